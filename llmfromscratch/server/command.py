"""What `llmfromscratch serve` does with its options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.server import require_extra
from llmfromscratch.server.settings import ServerSettings

require_extra()  # what is missing is said before a model is loaded

_LIMITS = ("max_queue", "max_streams", "max_prompt_tokens", "request_timeout")


def serve(options: argparse.Namespace) -> bool:
    """Serves until a signal; True if it stopped gracefully. Options are checked before the model is loaded."""
    from llmfromscratch.server import running
    from llmfromscratch.server.app import create_app

    own = settings(options)
    taken = running.bind(options.host, options.port)
    engine: dict[str, Any] = {} if options.max_requests is None else {"max_requests": options.max_requests}
    engine |= {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    llm = LLM(options.model, dtype=options.dtype, device=options.device, **engine)
    server = running.Server(create_app(llm, own))
    print(f"Serving {own.model_name} at {running.address(taken)} (Ctrl-C stops)", flush=True)
    server.run(sockets=[taken])
    return not server.force_exit


def settings(options: argparse.Namespace) -> ServerSettings:
    """The server's settings as the command line has them."""
    limits = {name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None}
    # a path's end is a name that says enough, and tells clients nothing about this machine
    name = options.model_name or Path(options.model).name or options.model
    lines = list(options.api_key)
    if options.api_keys is not None:
        lines += _lines(options.api_keys)
    return ServerSettings(model_name=name, api_keys=api_keys(lines), **limits)


def api_keys(lines: Iterable[str]) -> dict[str, int]:
    """KEY or KEY=PRIORITY each; 0 is the usual priority. A key may hold "=" itself, as base64 does: the last counts."""
    keys = {}
    for line in lines:
        key, _, priority = line.rpartition("=")
        number = priority.strip()
        if key and number.removeprefix("-").isdecimal() and len(number) <= 5:
            keys[key] = int(number)
        elif key and number:
            raise RequestError(f"the priority of an API key is {number!r}; give KEY or KEY=PRIORITY, a whole number.")
        else:
            keys[line] = 0
    return keys


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the file of API keys cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:  # the server would be open to everybody
        raise RequestError(f"{file} holds no API key; write one on a line, or leave the option out.")
    return lines
