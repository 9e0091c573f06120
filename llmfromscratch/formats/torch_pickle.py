"""A look at a PyTorch checkpoint's pickle before anything is built from it.

A pickle is a program for a small stack machine: it can name any function and call it. `torch.load(weights_only=True)`
refuses most of that, yet still lets a short pickle ask for much memory (`bytearray(10**12)`, copies of copies).
So the program is read first, without running it, and must be of the kind that `torch.save` writes for tensors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.stored import PLAIN_DTYPES

# What `torch.save` (pickle protocol 2) writes for dictionaries of tensors, numbers and strings.
_OPCODES = (
    {"PROTO", "STOP", "GLOBAL", "BINPERSID", "REDUCE", "BUILD"}
    | {"MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
    | {"SETITEM", "SETITEMS", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
    | {"BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
    | {"NONE", "NEWTRUE", "NEWFALSE"}
)
_ORDERED_DICT = "collections OrderedDict"
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_NAMES = (
    {_ORDERED_DICT, "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
    | {f"torch {kind}Storage" for kind in _STORAGES}
    | {str(dtype).replace(".", " ") for dtype in PLAIN_DTYPES.values()}
)
_MOST_BUILDS = 64  # each copies a dictionary; a state dict needs one
_LONGEST_TUPLE = 512  # bytes of pickle; a tensor's arguments need about 100


def check_pickle(data: bytes, file: Path) -> None:
    """Raise CheckpointError unless the pickle builds only dictionaries, lists, tensors and plain values.

    What passes takes memory in proportion to the pickle's length when it is loaded.
    """
    builds = 0
    marks: list[int] = []
    dictionaries = _EmptyDictionaries()
    for name, argument, position in _operations(data, file):
        if not dictionaries.accept(name, argument):
            raise _refusal("makes an OrderedDict as a copy of other data", file)
        builds += name == "BUILD"
        if builds > _MOST_BUILDS:
            raise _refusal(f"sets the attributes of more than {_MOST_BUILDS} objects", file)
        if name == "MARK":
            marks.append(position)
        elif name in ("TUPLE", "SETITEMS", "APPENDS") and marks:
            length = position - marks.pop()
            if name == "TUPLE" and length > _LONGEST_TUPLE:
                raise _refusal(f"has a tuple of {length} bytes, above {_LONGEST_TUPLE}", file)


class _EmptyDictionaries:
    """Holds a pickle to making every OrderedDict empty, as torch.save does: otherwise it may be a copy of any size.

    So wherever the class comes onto the stack, by its name or from the memo, the two operations that call it without
    arguments must follow.
    """

    def __init__(self) -> None:
        self.memo: set[int] = set()  # the memo's places that hold the class
        self.expected: list[str] = []
        self.on_top = False

    def accept(self, name: str, argument: Any) -> bool:
        """Take the next operation; False if it breaks the rule."""
        if name in ("BINPUT", "LONG_BINPUT"):
            (self.memo.add if self.on_top else self.memo.discard)(argument)
            return True
        if self.expected and name != self.expected.pop(0):
            return False
        from_memo = name in ("BINGET", "LONG_BINGET") and argument in self.memo
        self.on_top = from_memo or (name == "GLOBAL" and argument == _ORDERED_DICT)
        if self.on_top:
            self.expected = ["EMPTY_TUPLE", "REDUCE"]
        return True


def _operations(data: bytes, file: Path) -> Iterator[tuple[str, Any, int]]:
    """(operation, argument, position) one after the other, each of an allowed kind."""
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "GLOBAL" and argument not in _NAMES:
                raise _refusal(f"asks for {str(argument).replace(' ', '.')!r}", file)
            if opcode.name not in _OPCODES:
                raise _refusal(f"uses the operation {opcode.name}", file)
            yield opcode.name, argument, position or 0
    except (ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(f"Its pickle is damaged ({error}); fetch the file again.", file=file) from error


def _refusal(what: str, file: Path) -> CheckpointError:
    """The error for a pickle that is more than data."""
    return CheckpointError(
        f"Its pickle {what}, which is more than tensors and plain values; nothing in it was run. "
        "If you trust its source, re-save a dictionary of tensors, best as safetensors.",
        file=file,
    )
