"""What the server allows, in one frozen object, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmfromscratch.errors import RequestError

_MOST_PRIORITY = 1000  # as in SamplingParams


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server. None means no limit where it is allowed.

    model_name: what clients call the model, in /v1/models and in their requests.
    api_keys: {key: priority}. With any, all but /, /watch, /health, /ready and /metrics ask for one of them, and no
        request is more important than its key; without, everybody is served.
    max_queue: requests that may wait beside those that the engine serves at a time; one more is refused with 429.
    max_streams: answers that are streamed at a time, WebSockets among them; one more is refused with 429.
    max_choices: answers that one HTTP request may ask for, over all its prompts.
    max_prompt_tokens: None is what the context holds beside one new token.
    max_body_bytes: of a request, counted while it comes in.
    body_timeout: seconds in which a request's body must have come.
    request_timeout: seconds from a request's admission to the end of its answer.
    send_timeout: seconds that a client may take to read on, before its answer is given up.
    stop_timeout: seconds that a graceful stop waits for what runs.
    Raises RequestError for values that cannot be meant.
    """

    model_name: str = "llmfromscratch"
    api_keys: Mapping[str, int] = field(default_factory=dict)
    max_queue: int = 128
    max_streams: int = 256
    max_choices: int = 64
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 2_000_000
    body_timeout: float = 30.0
    request_timeout: float | None = 600.0
    send_timeout: float = 30.0
    stop_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name.strip():
            raise RequestError(f"model_name is {self.model_name!r}; give the name that clients will ask for.")
        _check_keys(self.api_keys)
        object.__setattr__(self, "api_keys", dict(self.api_keys))
        for name, least in (("max_queue", 0), ("max_streams", 1), ("max_choices", 1), ("max_body_bytes", 1)):
            _check_count(name, getattr(self, name), least)
        if self.max_prompt_tokens is not None:
            _check_count("max_prompt_tokens", self.max_prompt_tokens, 1)
        for name in ("body_timeout", "request_timeout", "send_timeout", "stop_timeout"):
            _check_seconds(name, getattr(self, name), may_be_none=name == "request_timeout")


def _check_keys(keys: Any) -> None:
    if not isinstance(keys, Mapping):
        raise RequestError(f"api_keys is a {type(keys).__name__}; give a dict of priorities by key.")
    for key, priority in keys.items():
        # the keys themselves are secrets, and stay out of messages
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key or " " in key:
            raise RequestError("an API key holds nothing, spaces, or characters that no HTTP header can carry.")
        if not _is_int(priority) or abs(priority) > _MOST_PRIORITY:
            raise RequestError(f"an API key has the priority {priority!r}; give a whole number from -1000 to 1000.")


def _check_count(name: str, value: Any, least: int) -> None:
    if not _is_int(value) or value < least:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def _check_seconds(name: str, value: Any, may_be_none: bool) -> None:
    if value is None and may_be_none:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < 1e9:  # NaN fails the comparison
        raise RequestError(f"{name} is {value!r}; it must be a number of seconds above 0.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
