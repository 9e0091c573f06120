"""Constants of a notebook written down as expressions, or a sentence that says why one cannot be."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any

_LONGEST = 20_000  # characters of one constant


@dataclass(frozen=True)
class Expression:
    """Source text that evaluates to the value, and the imports it needs (name -> import line)."""

    text: str
    imports: dict[str, str] = field(default_factory=dict)


def expression(value: Any) -> Expression | None:
    """An expression for numbers, texts, None, containers of them, patterns, torch dtypes and devices; else None."""
    imports: dict[str, str] = {}
    text = _written(value, imports)
    return None if text is None or len(text) > _LONGEST else Expression(text, imports)


def _written(value: Any, imports: dict[str, str]) -> str | None:
    kind = type(value)
    if kind in (bool, int, str, bytes, type(None), type(...)):
        return "..." if value is ... else repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if kind is complex:
        return repr(value)
    if kind in (list, tuple, set, frozenset):
        return _written_items(value, imports)
    if kind is dict:
        pairs = [(_written(key, imports), _written(item, imports)) for key, item in value.items()]
        ok = all(key is not None and item is not None for key, item in pairs)
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}" if ok else None
    return _written_special(value, imports)


def _written_items(value: Any, imports: dict[str, str]) -> str | None:
    parts = [_written(item, imports) for item in value]
    if any(part is None for part in parts):
        return None
    inner = ", ".join(str(part) for part in parts)
    if type(value) is list:
        return f"[{inner}]"
    if type(value) is tuple:
        return f"({inner},)" if len(parts) == 1 else f"({inner})"
    if type(value) is set:
        return f"{{{inner}}}" if parts else "set()"
    return f"frozenset([{inner}])"


def _written_special(value: Any, imports: dict[str, str]) -> str | None:
    if isinstance(value, re.Pattern):
        imports["re"] = "import re"
        return f"re.compile({value.pattern!r}, {value.flags})"
    regex, torch = sys.modules.get("regex"), sys.modules.get("torch")
    if regex is not None and isinstance(value, regex.Pattern):
        imports["regex"] = "import regex"
        return f"regex.compile({value.pattern!r}, {value.flags})"
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        imports["torch"] = "import torch"
        return str(value) if isinstance(value, torch.dtype) else f'torch.device("{value}")'
    return None


def refusal(name: str, value: Any) -> str:
    """Why a value of the notebook cannot be taken along, and what to do instead."""
    kind = type(value)
    full = f"{kind.__module__}.{kind.__name__}" if kind.__module__ != "builtins" else kind.__name__
    if hasattr(value, "shape") or hasattr(value, "parameters"):
        advice = "make it inside the function, or pass it as an argument"
    elif hasattr(value, "read") and hasattr(value, "close"):
        advice = "open the file inside the function"
    elif kind in (list, tuple, set, frozenset, dict):
        full, advice = f"{full} that is too long or holds more than numbers and texts", "make it inside the function"
    else:
        advice = "make it inside the function, or pass it as an argument"
    return f"`{name}` is a {full} that lives only in the notebook: {advice}"
