"""The checks of what chapter 3's pages stand on: the allocator of blocks, and the names of shared beginnings."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, Mistake, compare
from llmfromscratch.course.exercises.cache_histories import check_in_engine
from llmfromscratch.errors import OutOfMemory

# ---- 3.8 the allocator -------------------------------------------------------------------------------------------

_REFUSALS = (OutOfMemory, ValueError, IndexError, KeyError)
_EVICTING = "allocate A, keep A, allocate B"
# (blocks, steps); a step names a block by a letter, and `keep` is a release with keep=True
_STEPS = [
    (1, "allocate A"),
    (2, "allocate A, allocate B"),
    (3, "allocate A, allocate B, release A, allocate C"),
    (1, "allocate A, allocate B"),
    (2, "allocate A, share A, release A, allocate B"),
    (2, "allocate A, share A, release A, release A, allocate B"),
    (1, "allocate A, release A, release A"),
    (1, "allocate A, release A, share A"),
    (2, "allocate A, keep A, allocate B"),
    (1, "allocate A, keep A, allocate B"),
    (2, "allocate A, allocate B, keep B, keep A, allocate C, allocate D"),
    (2, "allocate A, keep A, share A, allocate B, allocate C"),
    (2, "allocate A, allocate B, keep A, keep B, share A, keep A, allocate C"),
    (1, "allocate A, keep A, release A"),
    (1, "allocate A, keep A, share A, release A, allocate B"),
    (2, "allocate A, share A, keep A, release A, allocate B, allocate C"),
]


def check_block_allocator(allocator_class: Callable[..., Any]) -> None:
    """Along histories, against plain sets; blocks have letters there, for it is no matter which number comes out."""
    compare(
        partial(_handed_out, allocator_class),
        partial(_handed_out, PlainBlocks),
        [
            *(Case(f"{blocks} block{'s' * (blocks > 1)}: {steps}", blocks, steps) for blocks, steps in _STEPS),
            *(Case(f"4 blocks, a random history of 80 steps ({seed})", 4, _random_steps(seed, 80)) for seed in (1, 2)),
            Case(f"on_evict None, 1 block: {_EVICTING}", 1, _EVICTING, listens=False),
        ],
        expected="after every step the right blocks free, held and kept, and the right count of holders",
        mistakes=_allocator_mistakes(),
        diagnose=_about_steps,
        explain=_of_allocator,
        what="step",
    )  # fmt: skip
    check_in_engine("BlockAllocator", allocator_class, "PagedKVCache")


def _of_allocator(error: BaseException, case: Case) -> str:
    if "'NoneType' object is not callable" in str(error):
        return "`on_evict` is None where nobody listens: ask for that before you call it"
    if isinstance(error, TypeError) and "not tuple" in str(error):
        return "popitem gives a pair, the block and what stands under it (None): block, _ = ... takes it apart"
    return ""


def _allocator_mistakes() -> Iterator[Mistake]:
    """Whether a released block goes to the front of `free` or to its end is no mistake, but changes what follows."""
    for at_once in (1, 3):
        for at_end in (False, True):
            yield from combined(partial(_wrongly, at_end=at_end), _ALLOCATOR_MISTAKES, at_once)


_ALLOCATOR_MISTAKES: list[tuple[str, Settings]] = [
    ("a block that is free is handed out and stays in `free`: the next one to ask gets it too",
     {"stays_free": True}),
    ("a new block has one holder: its reference count is 1", {"uncounted": True}),
    ("the last of the free blocks is handed out; asked for is the first, so that neighbours follow each other",
     {"last_free": True}),
    ("a block goes back although another one still holds it", {"deaf": "lowers"}),
    ("a block goes back although another one still holds it", {"deaf": "ignores"}),
    ("a block goes back although another one still holds it: its count is set to 0, not lowered by 1",
     {"deaf": "clears"}),
    ("a block is kept although another one still holds it", {"deaf": "keeps"}),
    *((f"a block that nobody holds can be freed again, {what}; refuse it", {"twice": how})
      for how, what in (("clamped", "stands in `free` twice, and will have two owners"),
                        ("appended", "stands in `free` twice, and will have two owners"),
                        ("below", "and its count falls below 0"))),
    ("a free block can be shared, though there is nothing in it; refuse it", {"share_free": True}),
    ("a kept block is refused where it should be shared: it waits for just that", {"share_kept": "refused"}),
    ("`share` calls on_evict; the content of a kept block stays where it is shared", {"share_kept": "evicts"}),
    ("a block that others hold is not in `kept`, and taking it out raises KeyError: ask first, or give `pop` a default",
     {"share_kept": "needed"}),
    ("sharing does not count: the first of two holders frees the block for both",
     {"share_uncounted": True}),
    ("a kept block that is shared stays in `kept`: it will be taken from its holder",
     {"share_stays_kept": True}),
    ("a block whose last holder lets go never comes back", {"never_free": True}),
    ("kept blocks are never handed out: memory is said to be full while nobody holds them",
     {"kept_forever": True}),
    ("a kept block is handed out while others are free; its content may still serve",
     {"kept_first": True}),
    ("the newest kept block is handed out; the oldest has waited longest for someone to ask",
     {"newest_kept": True}),
    ("`on_evict` is not called: the index will go on naming a block that holds something else",
     {"silent": True}),
    ("`on_evict` is called for free blocks too", {"loud": True}),
    ("`on_evict` is None where nobody listens: ask for that before you call it", {"unasked": True}),
    ("`on_evict` comes after the new holder is counted; it should come before", {"late": True}),
    ("keep=True is not heeded: the content is given up at once", {"keep": "never"}),
    ("blocks are kept though keep is False", {"keep": "always"}),
    ("`keep` is taken the other way round: True keeps the block", {"keep": "swapped"}),
    ("a block that nobody holds is both kept and free", {"keep": "both"}),
    ("with nothing left, OutOfMemory is to be raised; an error of Python's own says nothing to a user",
     {"python_error": True}),
    ("the count goes down although the release is refused", {"twice": "refused"}),
]  # fmt: skip


def _about_steps(got: Any, want: Any) -> str:
    """What the first wrong step says where nothing comes out, or where something is to be refused."""
    step = next(name for name in want if got.get(name) != want[name])
    if got[step].startswith("gives None"):
        return "allocate returned None: `return block` is missing"
    refused = re.search(r"raises (\w+)", want[step])
    if refused is None:
        return ""
    raised = re.search(r"raises (\w+)", got[step])
    if raised:
        return f"raise {refused[1]}: callers wait for that, and {raised[1]} tells them nothing"
    return f"this cannot be done, and is to be refused with {refused[1]}"


def _ignore(block: int) -> None:
    """Stands for nobody who listens."""


def _raise_type_error(block: int) -> None:
    raise TypeError("'NoneType' object is not callable")


class PlainBlocks:
    """The oracle: every block is in one of three states, and `wrong` switches a mistake on."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None, **wrong: Any):
        self.free, self.kept, self.ref_counts = list(range(num_blocks)), list[int](), [0] * num_blocks
        self._on_evict, self._wrong = on_evict or (_raise_type_error if wrong.get("unasked") else _ignore), wrong

    def allocate(self) -> int:
        """The first free block, else the one that was kept first."""
        wrong = self._wrong
        take_kept = not self.free or bool(wrong.get("kept_first") and self.kept)
        if take_kept and (not self.kept or wrong.get("kept_forever")):
            raise IndexError if wrong.get("python_error") else OutOfMemory
        if take_kept:
            block = self.kept.pop(-1 if wrong.get("newest_kept") else 0)
        elif wrong.get("stays_free"):
            block = self.free[0]
        else:
            block = self.free.pop(-1 if wrong.get("last_free") else 0)
        evicts = (take_kept and not wrong.get("silent")) or wrong.get("loud")
        if evicts and not wrong.get("late"):
            self._on_evict(block)
        self.ref_counts[block] = 0 if wrong.get("uncounted") else 1
        if evicts and wrong.get("late"):
            self._on_evict(block)
        return block

    def share(self, block: int) -> None:
        """One more holder."""
        kept = self._wrong.get("share_kept")
        if not self.ref_counts[block] and block not in self.kept and not self._wrong.get("share_free"):
            raise ValueError
        if (kept == "refused" and block in self.kept) or (kept == "needed" and block not in self.kept):
            raise ValueError if kept == "refused" else KeyError
        if kept == "evicts" and block in self.kept:
            self._on_evict(block)
        if block in self.kept and not self._wrong.get("share_stays_kept"):
            self.kept.remove(block)
        self.ref_counts[block] += not self._wrong.get("share_uncounted")

    def release(self, block: int, keep: bool = False) -> None:
        """One holder less."""
        wrong = self._wrong
        twice = wrong.get("twice")
        if self.ref_counts[block] <= 0 and twice in (None, "refused"):
            self.ref_counts[block] -= twice == "refused"
            raise ValueError
        self.ref_counts[block] -= 1
        if wrong.get("deaf") == "clears":
            self.ref_counts[block] = min(0, self.ref_counts[block])
        left = self.ref_counts[block]
        if twice == "clamped":
            self.ref_counts[block] = max(0, left)
        deaf = wrong.get("deaf") == "lowers" or (wrong.get("deaf") == "keeps" and keep)
        if (left > 0 and not deaf) or (left < 0 and twice == "below"):
            return
        mode = wrong.get("keep", "kept" if keep else "free")
        if mode == "swapped":
            mode = "free" if keep else "kept"
        if mode in ("kept", "always") or (mode == "both" and keep):
            self.kept += [block] * (block not in self.kept)
        if mode in ("free", "never", "both") and not wrong.get("never_free"):
            self.free.insert(len(self.free) if wrong.get("at_end") else 0, block)


def _wrongly(**wrong: Any) -> Callable[..., dict[str, str]]:
    return partial(_handed_out, partial(PlainBlocks, **wrong))


def _handed_out(
    allocator_class: Callable[..., Any], num_blocks: int, steps: str, listens: bool = True
) -> dict[str, str]:
    """What happens at each step: the block in words, and the three states after it.

    It ends where a block is in two states or in none: what comes out afterwards hangs on chance, and names no mistake.
    """
    letters: dict[int, str] = {}
    evicted: list[str] = []

    def on_evict(block: int) -> None:
        counted = ", which has its new holder already" * (allocator.ref_counts[block] > 0)
        evicted.append(letters.get(block, "a free block") + counted)

    allocator = allocator_class(num_blocks, on_evict=on_evict if listens else None)
    blocks: dict[str, int] = {}
    log = {}
    for number, step in enumerate(steps.split(", "), 1):
        if not _in_one_state_each(allocator):
            log[f"{number}. {step}"] = "not played"
            continue
        what, letter = step.split()
        evicted.clear()
        before = [*allocator.free], [*allocator.kept]
        impossible = _impossible(allocator, what, blocks.get(letter))
        try:
            if what == "allocate":
                blocks[letter] = allocator.allocate()
                said = _origin(blocks[letter], before, letters)
                letters[blocks[letter]] = letter
            elif what == "share":
                said = str(allocator.share(blocks[letter]) or "")
            else:
                said = str(allocator.release(blocks[letter], keep=what == "keep") or "")
        except Exception as error:
            # where something is to be refused any error is one, be it the wrong one; elsewhere it ends the check
            if isinstance(error, NotImplementedError) or not (impossible or isinstance(error, _REFUSALS)):
                raise
            said = f"raises {type(error).__name__}"
        parts = [said, *(f"evicts {name}" for name in evicted), _state(allocator, letters)]
        log[f"{number}. {step}"] = "; ".join(part for part in parts if part)
    return log


def _impossible(allocator: Any, what: str, block: Any) -> bool:
    """Whether a step is to be refused, by the state that the allocator itself shows."""
    if what == "allocate":
        return not allocator.free and not allocator.kept
    unheld = isinstance(block, int) and allocator.ref_counts[block] <= 0
    return unheld and (what != "share" or block not in allocator.kept)


def _in_one_state_each(allocator: Any) -> bool:
    held = [block for block, count in enumerate(allocator.ref_counts) if count > 0]
    numbers = range(len(allocator.ref_counts))
    return min(allocator.ref_counts) >= 0 and sorted([*allocator.free, *allocator.kept, *held]) == [*numbers]


def _origin(block: int, before: tuple[list[int], list[int]], letters: dict[int, str]) -> str:
    free, kept = before
    if block is None:
        return "gives None"
    if block in free:
        return "gives the first free block" if block == free[0] else "gives a free block, but not the first"
    return f"gives the block of {letters.get(block, 'nobody')}, which {'was kept' if block in kept else 'is held'}"


def _state(allocator: Any, letters: dict[int, str]) -> str:
    def named(blocks: Sequence[int]) -> list[str]:
        return [letters.get(block, "?") for block in blocks]

    held = [f"{letters.get(block, '?')} {count}x" for block, count in enumerate(allocator.ref_counts) if count]
    twice = [name for name, count in Counter(named(allocator.free)).items() if count > 1 and name != "?"]
    parts = [f"{len(allocator.free)} free", f"held: {', '.join(sorted(held)) or 'none'}"]
    parts.append(f"kept: {', '.join(named([*allocator.kept])) or 'none'}")
    parts += [] if _in_one_state_each(allocator) else ["a block is in two of these, or in none"]
    return ", ".join([*parts, *(f"{name} is free twice" for name in twice)])


def _random_steps(seed: int, count: int) -> str:
    """A history on 4 blocks with 6 letters at a time, refusals included."""
    generator = torch.Generator().manual_seed(seed)
    plain, blocks, steps = PlainBlocks(4), dict[str, int](), list[str]()

    def pick(items: Sequence[str]) -> str:
        return items[int(torch.randint(len(items), (1,), generator=generator))]

    while len(steps) < count:
        what = pick(["allocate", "allocate", "share", "release", "keep", "keep"])
        letter = chr(ord("A") + len(steps) % 26) if what == "allocate" else pick([*blocks] or ["none"])
        if letter == "none":
            continue
        steps.append(f"{what} {letter}")
        try:
            if what == "allocate":  # any free block may be handed out, so the names of the free ones are used no more
                blocks = {name: held for name, held in blocks.items() if held not in plain.free}
                block = plain.allocate()
                blocks = {name: held for name, held in blocks.items() if held != block} | {letter: block}
            elif what == "share":
                plain.share(blocks[letter])
            else:
                plain.release(blocks[letter], keep=what == "keep")
        except (OutOfMemory, ValueError):
            continue
    return ", ".join(steps)


# ---- 3.9 names for beginnings ------------------------------------------------------------------------------------


def check_block_keys(block_keys: Callable[..., list[bytes]]) -> None:
    """Against hashlib on the bytes of the whole chain."""
    long = [(7 * n + 3) % 256 for n in range(33)]
    compare(
        partial(_readable, block_keys),
        partial(_readable, _chained()),
        [
            Case("no tokens, blocks of 4", [], 4),
            Case("3 tokens, blocks of 4: no block is full", [1, 2, 3], 4),
            Case("ids [5], blocks of 1", [5], 1),
            Case("ids [1, 2], blocks of 2", [1, 2], 2),
            Case("ids [1, 2, 3], blocks of 2", [1, 2, 3], 2),
            Case("ids [1, 2, 1, 2], blocks of 2: the same block after another beginning", [1, 2, 1, 2], 2),
            Case("ids [1, 2] after a parent", [1, 2], 2, bytes(range(32))),
            Case("ids [1, 2, 3, 4, 5] after a parent", [1, 2, 3, 4, 5], 2, bytes(range(32))),
            Case("ids above 255", [300, 70_000], 1),
            Case("ids as large as 8 bytes hold", [2**40, 2**63 - 1], 2),
            Case("33 ids, blocks of 16", long, 16),
            Case("a tuple of 8 ids, blocks of 3", tuple(long[:8]), 3),
        ],
        expected="a key of 32 bytes for each full block: SHA-256 of the key before it and the ids of the block",
        mistakes=[*combined(_chained, _KEY_MISTAKES), *_OTHER_KEYS],
        diagnose=_about_keys,
        what="the keys",
    )
    check_in_engine("block_keys", block_keys, "PagedKVCache")


def _packed(letter: str, ids: Sequence[int], order: str = "<") -> bytes:
    """By struct's name for a type: "q" are 8 bytes with a sign."""
    return struct.pack(f"{order}{len(ids)}{letter}", *ids)


_as_asked = partial(_packed, "q")


def _strictly_in(width: int) -> Callable[[Sequence[int]], bytes]:
    return lambda ids: b"".join(index.to_bytes(width, "little") for index in ids)


def _in_few_bytes(width: int) -> Callable[[Sequence[int]], bytes]:
    """What is too large loses its highest bytes, as in an array of a small type."""
    return lambda ids: b"".join((index % 256**width).to_bytes(width, "little") for index in ids)


_KEY_MISTAKES: list[tuple[str, Settings]] = [
    ("the keys are not chained: the same tokens after another beginning get the same key, and with it the keys and "
     "values of another text", {"chain": "none"}),
    ("`parent` is not used: it comes before the first block", {"first": b""}),
    ("the keys are not chained: `parent` comes before every block, but from the second on it is the key before",
     {"chain": "parent"}),
    ("a block that is not full gets a key; more tokens will come into it", {"partial": True}),
    ("the last block has no key where it is full: range leaves out its end", {"short": True}),
    *((f"each id takes 8 bytes, also the small ones; here it takes {width}", {"pack": pack})
      for width, letter in ((1, "B"), (2, "H"), (4, "I"))
      for pack in (_in_few_bytes(width), _strictly_in(width),
                   partial(_packed, letter), partial(_packed, letter.lower()))),
    ("each id takes 8 bytes, also the small ones; here it takes 1", {"pack": bytes}),
    ("the ids are written with their highest byte first; little endian is the lowest first",
     {"pack": partial(_packed, "q", order=">")}),
    ("the ids come before the key of the block before; it is the other way round", {"behind": True}),
    ("the text of the list is hashed; asked for are 8 bytes an id", {"pack": lambda ids: str(list(ids)).encode()}),
    ("every key is a hash of the whole text up to there; asked for is a chain, where the key before and one block are "
     "enough to go on", {"whole": True}),
    ("one hash goes on through all blocks; each key is a new one, of the key before and one block", {"running": True}),
]  # fmt: skip


def _chained(
    chain: str = "keys", pack: Callable[[Sequence[int]], bytes] = _as_asked, **wrong: Any
) -> Callable[..., list[bytes]]:
    """The keys with hashlib's own update, which takes what is hashed piece by piece; one mistake switched on."""

    def run(ids: Sequence[int], size: int, parent: bytes = b"") -> list[bytes]:
        before = b"" if chain == "none" else wrong.get("first", parent)
        keys: list[bytes] = []
        sha = hashlib.sha256()
        blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
        full = [block for block in blocks if len(block) == size or wrong.get("partial")]
        for number, block in enumerate(full[: len(full) - (wrong.get("short", False) and len(ids) % size == 0)]):
            block = ids[: (number + 1) * size] if wrong.get("whole") else block
            sha = sha if wrong.get("running") else hashlib.sha256()
            for piece in [pack(block), before] if wrong.get("behind") else [before, pack(block)]:
                sha.update(piece)
            keys.append(sha.digest())
            links = {"none": b"", "parent": parent, "keys": keys[-1]}
            before = parent if wrong.get("whole") else links[chain]
        return keys

    return run


class _Key(bytes):
    """A key that is shown by its first digits: nobody can compare 32 bytes by eye."""

    def __repr__(self) -> str:
        return f"{self[:3].hex()}... ({len(self)} bytes)"


_Key.__name__, _Key.__module__ = "bytes", "builtins"  # what a learner is told to return


def _readable(block_keys: Callable[..., Any], *given: Any) -> Any:
    keys = block_keys(*given)
    return [_Key(key) if type(key) is bytes else key for key in keys] if type(keys) is list else keys


def _about_keys(got: Any, want: Any) -> str:
    kinds = {type(key) for key in got} if isinstance(got, list) else {_Key}
    if kinds - {_Key}:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        return f"the keys are of type {names}, asked for are the 32 bytes of digest()"
    return ""


def _of_python(ids: Sequence[int], size: int, parent: bytes = b"") -> list[int]:
    return [hash((parent, *ids[start : start + size])) for start in range(0, len(ids) - size + 1, size)]


_OTHER_KEYS: list[tuple[str, Callable[..., Any]]] = [
    ("the key of the last block alone comes out; each block has one", lambda *given: _chained()(*given)[-1:]),
    ("the keys are texts of hexadecimal digits; digest() gives bytes",
     lambda *given: [key.hex() for key in _chained()(*given)]),
    ("hash() gives a short number that anyone can foresee: two texts may be made to have the same one", _of_python),
]  # fmt: skip
