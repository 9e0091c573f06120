"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, the message being a sentence."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llmfromscratch.errors import LLMFromScratchError

_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SHOWN = 100  # characters of a wrong value
_DETAILS = 3  # faults of one request that are told
_TAGS = {"str", "int", "float", "bool", "dict", "list", "constrained-str"}  # pydantic's names of a union's branches


class APIError(Exception):
    """An answer that is an error. param: the parameter at fault; code: a word for programs to look at."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON that is ASCII, so that nothing a client sent can fail to be encoded on its way back."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Puts every error that can leave the app into OpenAI's shape."""
    for error in (APIError, LLMFromScratchError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, answer_error)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in an exception."""
    return as_api_error(error, request.method, request.url.path).response()


def as_api_error(error: Exception, method: str = "", path: str = "") -> APIError:
    """Any exception as an error for the client; what is not the client's fault keeps its details to the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, LLMFromScratchError):
        return APIError(400, str(error))
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return _http(error, method, path)
    _log.error("A request failed in the server.", exc_info=error)
    return APIError(500, "the server failed at this request; its log says how.", "internal_error")


def from_validation(error: ValidationError) -> APIError:
    """What pydantic found wrong with a message that came over a WebSocket."""
    return _invalid([{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()])


def _http(error: HTTPException, method: str, path: str) -> APIError:
    headers = error.headers
    if error.status_code == 404:
        return APIError(404, f"there is nothing at {_short(path)}; /openapi.json lists what there is.", "not_found")
    if error.status_code == 405:
        allowed = (headers or {}).get("Allow", "another method")
        return APIError(405, f"{path} does not take {method}; use {allowed}.", "method_not_allowed", headers=headers)
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI could not read the body
        return APIError(400, f"the body is not JSON that can be read: {error.__cause__}.", "invalid_json")
    return APIError(error.status_code, str(error.detail), headers=headers)


def _invalid(found: Sequence[Mapping[str, Any]]) -> APIError:
    """What pydantic found, as sentences; what it says about the branches of one union becomes one."""
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for fault in found:
        by_place.setdefault(_place(fault["loc"]), []).append(fault)
    sentences = [_sentence(place, faults) for place, faults in by_place.items()]
    more = len(sentences) - _DETAILS
    text = " ".join(sentences[:_DETAILS]) + (f" And {more} more faults." if more > 0 else "")
    first = next(iter(by_place))
    unknown = any(fault["type"] == "extra_forbidden" for fault in by_place[first])
    return APIError(400, text, "unknown_parameter" if unknown else "invalid_value", first or None)


def _sentence(place: str, faults: Sequence[Mapping[str, Any]]) -> str:
    fault, name = faults[0], place or "the body"
    if fault["type"] == "extra_forbidden":
        return f"{name} is not a parameter that this server knows; leave it out."
    if fault["type"] == "missing":
        return f"{name} is missing; it is required."
    wanted = " or ".join(dict.fromkeys(_wish(one) for one in faults))
    return f"{name} is {_short(fault.get('input'))}; {wanted}."


def _wish(fault: Mapping[str, Any]) -> str:
    text = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    return text[:1].lower() + text[1:]


def _place(location: Sequence[Any]) -> str:
    """ "messages[0].content" for ("body", "messages", 0, "content")."""
    place = ""
    for before, part in pairwise(location):
        if before == "response_format":
            continue  # the branch of its union, which pydantic names after its type
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in _TAGS and not any(sign in part for sign in "[(-"):
            place += f".{part}" if place else part
    return _short(place, quoted=False)


def _short(value: Any, quoted: bool = True) -> str:
    text = repr(value[: _SHOWN * 2] if isinstance(value, str | list | bytes) else value) if quoted else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
