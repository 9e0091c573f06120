"""Watches what torch does while a learner's code runs: the new memory that it takes, and the devices that meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's documented way, in spite of the underscore

# operations that take tensors of two devices on any machine: copies between them, and an index that lies on the CPU
_MAY_MIX = {
    torch.ops.aten.copy_,
    torch.ops.aten._to_copy,
    torch.ops.aten.index,
    torch.ops.aten.index_put_,
    torch.ops.aten.index_put,
}


class TensorWatch(TorchDispatchMode):
    """Within the `with` block. largest: bytes of the largest piece of new memory that one operation took.
    mixed: whether one operation was given tensors of two devices, which a GPU would refuse (single numbers it takes).
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.mixed = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at what one operation takes and gives, and does it."""
        given = list(_tensors([*args, *(kwargs or {}).values()]))
        devices = {tensor.device.type for tensor in given if tensor.dim() > 0}
        self.mixed |= len(devices) > 1 and func.overloadpacket not in _MAY_MIX
        result = func(*args, **(kwargs or {}))
        known = {_memory(tensor).data_ptr() for tensor in given}
        for made in map(_memory, _tensors([result])):
            self.largest = max(self.largest, 0 if made.data_ptr() in known else made.nbytes())
        return result


def watched(action: Callable[[], Any]) -> tuple[TensorWatch, Any]:
    """Runs ACTION; gives what was seen, and what came out."""
    with TensorWatch() as watch:
        result = action()
    return watch, result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
