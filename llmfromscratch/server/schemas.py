"""What requests look like. Types are strict: a number in quotes is no number, and true is not 1.

A parameter of OpenAI's that is not supported here may be sent with its neutral value, which asks for nothing; any other
value is refused by name. A parameter that nobody knows is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llmfromscratch.constraint_schemas import MAX_NODES, MAX_TEXT
from llmfromscratch.server.errors import APIError

Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[Token], Field(min_length=1)]
Words = Annotated[list[str], Field(max_length=256)]
Bias = Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
                 Field(max_length=1024)]  # fmt: skip


def _one_wish(wanted: str) -> WrapValidator:
    """For a union: its branches would say one thing each, and all but one of them beside the point."""

    def check(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("union", "it must be {wanted}", {"wanted": wanted}) from None

    return WrapValidator(check)


def _few_values(schema: Any) -> Any:
    """A schema that is too large is refused while that is cheap: turning it into text takes a third of a second."""
    left, seen = [schema], 0
    while left:
        one = left.pop()
        seen += 1
        if seen + len(left) > MAX_NODES:
            raise PydanticCustomError("schema", "it may hold {most} values at most", {"most": MAX_NODES})
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return schema


SchemaObject = Annotated[dict[str, Any], AfterValidator(_few_values)]
JSONSchema = Annotated[
    SchemaObject | Annotated[str, Field(max_length=MAX_TEXT)],
    _one_wish(f"a JSON schema: an object of at most {MAX_NODES} values, or the text of one"),
]
Stop = Annotated[str | Annotated[list[str], Field(max_length=32)], _one_wish("a text or a list of at most 32 texts")]
FewStops = Annotated[str | Annotated[list[str], Field(max_length=4)], _one_wish("a text or a list of at most 4 texts")]
Texts = Annotated[list[str], Field(min_length=1)]
Prompt = Annotated[str | TokenIds, _one_wish("a text or a list of token ids, not empty")]
Prompts = Annotated[
    str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)],
    _one_wish("a text, a list of token ids, or a list of either, not empty"),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Likeliest = Annotated[int | None, Field(ge=0, le=20)]

_TEXT_ONLY = "answers are text and nothing else"
_NO_TOOLS = "this server finds no calls of tools in what the model says"
_NO_BEAMS = "no text of a beam search is certain before its end, so beams are for LLM.generate, without a server"
# Parameters that ask for something that this server does not do: the values that ask for nothing, and why.
NOT_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),  # says how tools are called, and there are none
    "prediction": ((), "there is no predicted text to begin from"),
    "reasoning_effort": (("none",), "the model has no effort to set"),
    "verbosity": (("medium",), "the model has no verbosity to set; say it in the prompt"),
    "web_search_options": ((), "this server searches nothing"),
    "service_tier": (("auto", "default"), "all are served alike, by the priority of their key"),
    "store": ((False,), "this server keeps no answers"),
    "metadata": (({},), "this server keeps no answers, nor what is said about them"),
    "moderation": ((), "this server moderates nothing"),
    "suffix": (("",), "this server continues texts, and fills no gaps"),
    "best_of": ((1,), "ask for several answers with n"),
    "beam_width": ((), _NO_BEAMS),
    "length_penalty": ((1.0, 1), _NO_BEAMS),
    "safety_identifier": ((), "this server keeps nothing about its users"),
    "prompt_cache_key": ((), "prompts that begin alike share the cache by themselves"),
    "prompt_cache_retention": ((), "prompts that begin alike share the cache by themselves"),
    "prompt_cache_options": ((), "prompts that begin alike share the cache by themselves"),
}


class Strict(BaseModel):
    """Nothing is converted, and nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(Strict):
    """How the answer is decoded; each field is that of `SamplingParams`. What is left out has its usual value there."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({"beam_width", "length_penalty"})

    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    bad_words: Words | None = None
    stop: Stop | None = None
    stop_token_ids: list[Token] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: Count | None = None
    regex: str | None = None
    json_schema: JSONSchema | None = None
    required_words: Words | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in cls.REFUSED & given.keys():
            neutral, why = NOT_SUPPORTED[name]
            value = given[name]
            if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                raise APIError(400, f"{name} is not supported: {why}.", "unsupported_parameter", name)
        return {name: value for name, value in given.items() if name not in cls.REFUSED}


class StreamOptions(Strict):
    """include_usage: one more event at the end, with the number of tokens."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class OpenAIRequest(Sampling):
    """What /v1/completions and /v1/chat/completions have in common."""

    REFUSED: ClassVar[frozenset[str]] = frozenset(NOT_SUPPORTED)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Taken, and not looked at: it asks for nothing.")
    stop: FewStops | None = None


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions. logprobs: how many likely tokens to tell at each place, beside the chosen one."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Likeliest = None


class TextPart(Strict):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation. Fields of this server's own answers may come back in it, as empty as they were."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | list[TextPart], _one_wish('a text, or a list of parts {"type": "text", "text": ...}: there are no others')
    ]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """As the chat template reads it; OpenAI's "developer" is what models know as "system"."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class NamedSchema(Strict):
    """The schema that an answer has to follow; it is always followed strictly."""

    name: str
    schema_: SchemaObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions. logprobs: whether to tell them; top_logprobs: how many likely tokens at each place."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    response_format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest = None


def _one_of(name: str) -> ConfigDict:
    """Says in the description what `check_one` checks."""
    either: list[Any] = [
        {"required": [one], "properties": {one: {"not": {"type": "null"}}}} for one in (name, "messages")
    ]
    return ConfigDict(json_schema_extra={"oneOf": either})


class GenerateRequest(Sampling):
    """POST /generate, the plain form: a prompt or a conversation, and the fields of SamplingParams."""

    model_config = _one_of("prompt")

    prompt: Prompt | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    logprobs: Likeliest = None
    prompt_logprobs: Likeliest = None
    stream: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> GenerateRequest:
        check_one(self.prompt, self.messages, "prompt")
        return self


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation as the model's chat template lays it out."""

    model_config = _one_of("text")

    text: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        check_one(self.text, self.messages, "text")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize. skip_special: leave control tokens out of the text."""

    token_ids: list[Token]
    skip_special: bool = True


def check_one(text: Any, messages: Any, name: str) -> None:
    """Raises APIError unless exactly one of the two is given."""
    if (text is None) == (messages is None):
        raise APIError(400, f"give either {name} or messages, and not both.", "invalid_value", name)
