"""Chat templates: a conversation laid out as the text the model was trained on, by the Jinja program in its files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, nodes

from llmfromscratch.errors import RequestError, TokenizerError
from llmfromscratch.text.template_sandbox import Sandbox

_LONGEST_TEMPLATE, _LONGEST_TEXT = 100_000, 10_000_000  # characters
# What a template can run into; endless recursion and what Python cannot compile are among it.
_REFUSED = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError,
    NameError, SyntaxError, AssertionError,
)  # fmt: skip

# A model's template, or several by their names: as a mapping, or as tokenizer_config.json lists them.
Templates = str | Mapping[str, str] | Sequence[Mapping[str, str]]


def choose(templates: Templates | None, name: str | None = None, tools: Any = None, documents: Any = None) -> str:
    """The template to render with, when a model ships one, several by name, or none.

    name: the one that is wanted; without it "tool_use" where there are tools and such a template, "rag" where there are
    documents and such a template, else "default". Raises TokenizerError when there is none, or none of that name.
    """
    if not templates:
        raise TokenizerError("this model has no chat template; use generate with a plain prompt.")
    if isinstance(templates, str):
        templates = {"default": templates}
    try:
        named = {str(key): text for key, text in _pairs(templates)}
    except _REFUSED as error:
        raise TokenizerError(f"the model's chat templates are no list of names and templates: {error!r}.") from error
    special = [known for known, given in (("tool_use", tools), ("rag", documents)) if given and known in named]
    wanted = name or (special[0] if special else "default")
    if not isinstance(named.get(wanted), str):
        raise TokenizerError(f"this model has no chat template named {wanted!r}; it has {', '.join(sorted(named))}.")
    return named[wanted]


def _pairs(templates: Mapping[str, str] | Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    if isinstance(templates, Mapping):
        return list(templates.items())
    return [(entry["name"], entry["template"]) for entry in templates]


def check_messages(messages: Any) -> None:
    """Raises RequestError for what is no conversation: a list of mappings with "role" and "content", both text.

    An answer that is nothing but a call of a tool may do without content (it is None, or there is none).
    """
    if not isinstance(messages, Sequence):
        raise RequestError(f"a chat is a list of messages, not {type(messages).__name__}.")
    for one in messages:
        content = one.get("content") if isinstance(one, Mapping) else None
        complete = isinstance(content, str) or (content is None and isinstance(one, Mapping) and one.get("tool_calls"))
        if not complete or not isinstance(one.get("role"), str):
            raise RequestError(f'a chat message is {{"role": text, "content": text}}, not {one!r}.')


def check_shown(template: str, **given: Any) -> None:
    """Refuses what a template would pass over: lists of mappings that it never reads, by the names of its variables.

    Raises RequestError for these, and for what is no list of mappings; None is fine.
    """
    for name, value in given.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
        if value is not None and not (listed and all(isinstance(entry, Mapping) for entry in value)):
            raise RequestError(f"{name} is {_short(value)}; it must be a list of mappings, as JSON has them.")
        if value and name not in _variables(template):
            raise RequestError(f"this model's chat template does not show {name} to the model; leave {name} out.")


@functools.lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """The names that a template reads, its own among them."""
    try:
        _compiled(template)  # which has a limit
        found = Sandbox().parse(template).find_all(nodes.Name)
        return frozenset(node.name for node in found if node.ctx == "load")
    except _REFUSED as error:
        raise TokenizerError(f"the model's chat template is damaged: {_short(error)}") from error


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The conversation as text.

    messages: {"role", "content"} and whatever else the template reads; an entry that is None counts as absent.
    tools, documents: as JSON schemas and as {"title", "text"}, for templates that show them to the model.
    variables: the strings a template may ask for (bos_token, eos_token) and its own switches.

    Raises TokenizerError where the template refuses the messages, is itself damaged, or takes more than its share of
    memory or time (`template_sandbox`).
    """
    try:
        environment = Sandbox()
        program = Template.from_code(environment, _compiled(template), environment.make_globals(None))
        given = {"tools": tools, "documents": documents, **variables}
        given["messages"] = [{key: value for key, value in one.items() if value is not None} for one in messages]
        pieces, length = [], 0
        for piece in program.generate(add_generation_prompt=add_generation_prompt, **plain(given)):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST_TEXT:
                raise TemplateError(f"its text is longer than {_LONGEST_TEXT} characters.")
        return "".join(pieces)
    except _REFUSED as error:
        raise TokenizerError(f"the model's chat template could not render these messages: {_short(error)}") from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> CodeType:
    if len(template) > _LONGEST_TEMPLATE:
        raise TemplateError(f"it has {len(template)} characters; {_LONGEST_TEMPLATE} are the limit.")
    return Sandbox().compile(template)


def _short(value: object) -> str:
    """An error's sentence, or how another value is written, neither of them endless."""
    text = (str(value) or type(value).__name__) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= 500 else f"{text[:500]}..."


def plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """A copy of plain data, mappings, lists, numbers and text, with every text (also a key) passed through `text`.

    A template sees nothing else: an object would bring its methods along. Raises TokenizerError for one.
    """
    if isinstance(value, str):
        return text(str.__str__(value))
    if isinstance(value, Mapping):
        return {plain(key, text): plain(inner, text) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(inner, text) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):  # numbers of other classes (enumerations, numpy's) lose their methods
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    raise TokenizerError(f"a chat message may hold text, numbers, lists and mappings, not {type(value).__name__}.")
