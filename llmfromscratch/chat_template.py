"""Chat templates: a conversation laid out as the text the model was trained on, by the Jinja program in its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmfromscratch.errors import TokenizerError

# What a template can run into; endless recursion and texts without measure are among it.
_REFUSED = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,
    MemoryError,
)


def render(template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **tokens: str) -> str:
    """The conversation as text; `tokens` are the strings a template may ask for (bos_token, eos_token).

    Raises TokenizerError where the template refuses the messages or is itself damaged.
    """
    try:
        return _environment().from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **tokens
        )  # fmt: skip
    except _REFUSED as error:
        raise TokenizerError(f"the model's chat template could not render these messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Where templates run: they come with the model file, so they see nothing but their arguments."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
