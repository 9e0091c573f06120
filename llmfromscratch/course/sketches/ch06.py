"""Chapter 6's sketches: an answer that is guessed ahead, at its plainest, and a count of what makes a GPU wait.

    one pass:  the newest token, and drafts behind it    17 | 4 9 3
               the model's best after each of them        4 | 9 8 .   so 4 and 9 stand, 8 comes in the place of 3

The engine does the same for many requests at once (`speculation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch's documented way, in spite of the underscore

from llmfromscratch import kv_cache, model, optimization
from llmfromscratch.batch import Batch


def plain_answer(network: model.Model, cache: kv_cache.KVCache, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The `count` most probable ids after a prompt, one after the other, a pass for each.

    The cache knows nothing of request 0 yet, or a beginning of the prompt. It holds all but the last id in the end.
    """
    ids = list(prompt_ids)
    for _ in range(count):
        stored = cache.length(0)
        ids.append(int(network(Batch.of([(0, ids[stored:], stored)]), cache)[0].argmax()))
    return ids[len(prompt_ids) :]


def speculative_answer(
    network: model.Model,
    cache: kv_cache.KVCache,
    prompt_ids: Sequence[int],
    count: int,
    propose: Callable[[list[int]], Sequence[int]],
) -> tuple[list[int], list[int]]:
    """What `plain_answer` gives, in fewer passes: the `count` ids, and how many of them each pass has added.

    propose(ids): drafts, a guess at what follows the text `ids`; there may be none, and more than are still of use: a
    pass adds at most one more than its drafts, and the answer has exactly `count` ids. It is asked before every pass.
    A pass is network(batch, cache) with Batch.of([(0, new ids, stored)], all_logits=True), which gives logits for
    every new id. New are what the cache does not hold yet (the whole prompt in the first pass, with drafts behind it
    as well; later the newest id) and the drafts. optimization.accept_greedy says which ids come of them.
    cache.length(0) is what is stored. cache.rewind(0, n) forgets the newest n: rejected drafts, no more, must not stay.
    In the end the cache holds the prompt and the answer without its last id.
    """
    ids, gained = list(prompt_ids), list[int]()
    while (left := len(prompt_ids) + count - len(ids)) > 0:
        drafts = list(propose(list(ids)))[: left - 1]
        stored = cache.length(0)
        batch = Batch.of([(0, [*ids[stored:], *drafts], stored)], all_logits=True)
        best = network(batch, cache)[len(ids) - stored - 1 :].argmax(dim=-1).tolist()
        accepted = optimization.accept_greedy(drafts, best)
        cache.rewind(0, len(drafts) + 1 - len(accepted))
        ids += accepted
        gained.append(len(accepted))
    return ids[len(prompt_ids) :], gained


# ---- what makes a GPU wait ---------------------------------------------------------------------------------------


class Waits:
    """How often Python has looked at a number of a tensor: `total`, and by the name of the operation in `by_name`.

    A GPU works through a queue that Python fills ahead of it. To hand a number to Python, the queue has to run empty:
    Python waits for the GPU, and then the GPU for Python. On the CPU the same code costs nothing, but can be counted.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_name.values())

    def note(self, name: str) -> None:
        """One more."""
        self.by_name[name] = self.by_name.get(name, 0) + 1


@contextlib.contextmanager
def counted_waits() -> Iterator[Waits]:
    """Counts within the `with` block what would wait on a GPU: item(), float(x), bool(x) and `if x`, tolist(), x[mask].

    What is counted is seen from below: .item(), float, int and bool all end in aten::_local_scalar_dense, while
    .tolist(), .numpy() and .cpu() are no operations of their own on the CPU, and are counted by their names.
    """
    waits = Waits()
    with _MethodWatch(waits), _OperationWatch(waits):
        yield waits


_METHODS = {"tolist", "numpy", "cpu"}
_OPERATIONS = {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "_unique2", "unique_dim"}


class _MethodWatch(TorchFunctionMode):
    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS and isinstance(args[0], torch.Tensor):
            self.waits.note(name)
        return func(*args, **(kwargs or {}))


class _OperationWatch(TorchDispatchMode):
    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATIONS:
            self.waits.note(name)
        elif name == "index" and any(place is not None and place.dtype == torch.bool for place in args[1]):
            self.waits.note("index by a mask")  # how many are left is a number that the shape needs
        return func(*args, **(kwargs or {}))
