"""Chapter 6's last bug hunt: a pass over drafts that leaves something behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.speculative_checks import VOCABULARY, new_cache, recomputed, small_model

REJECTED_STORY = """
"Speculative decoding, greedy, so the text must be the same as without. It is, up to the first draft that was rejected.
From there on it is another text, a fluent one. When every draft is right, nothing is wrong." Below, an answer with
drafts of which every third is wrong, and the answer without drafts.
"""


def one_pass(network: Callable[..., Tensor], cache: kv_cache.KVCache, ids: list[int], drafts: list[int]) -> list[int]:
    """The tokens that one pass adds to a text: the drafts as far as they are right, and one more.

    ids: the text so far; the cache holds all of it but the newest token, before and after. network(batch, cache) gives
    logits for every new token. cache: length(request_id), rewind(request_id, tokens) and the rest of a KVCache.
    """
    batch = Batch.of([(0, [ids[-1], *drafts], cache.length(0))], all_logits=True)
    best = network(batch, cache).argmax(dim=-1).tolist()
    right = 0
    while right < len(drafts) and drafts[right] == best[right]:
        right += 1
    return [*drafts[:right], best[right]]


_PROMPT = [12, 25, 0, 7, 7]


def _drafts_of(ids: list[int], count: int, wrong: str) -> list[int]:
    drafts = recomputed(ids, count)
    places = {"none": (), "the first": (0,), "the last": (count - 1,), "the second": (1,), "all": range(count)}.get(
        wrong, [place for place in range(count) if (len(ids) + place) % 3 == 0]
    )
    return [(token + 1) % VOCABULARY if place in places else token for place, token in enumerate(drafts)]


def _answer(add: Callable[..., list[int]], count: int, drafts: int, wrong: str) -> Any:
    """An answer pass by pass, what each pass is given, and what is stored after each."""
    cache, ids, stored, sizes = new_cache(), list(_PROMPT), list[int](), list[int]()
    small_model()(Batch.of([(0, ids[:-1], 0)]), cache)

    def network(batch: Batch, cache: Any) -> Tensor:
        sizes.append(len(batch.token_ids))
        return small_model()(batch, cache)

    while len(ids) < len(_PROMPT) + count and len(stored) < count:
        new = add(network, cache, list(ids), _drafts_of(ids, drafts, wrong))
        if not isinstance(new, list) or not new:
            return new
        ids += new
        stored.append(cache.length(0) - len(ids))
    return NamedParts(
        {
            "the answer": ids[len(_PROMPT) :],
            "what is stored after each pass, in tokens more than the text has (-1: all but the newest)": stored,
            "tokens that each pass has computed": sizes,
        }
    )


def show_rejected() -> None:
    """The answer with drafts, and without."""
    print("with drafts:   ", _answer(one_pass, 16, 3, "every third")["the answer"][:16])
    print("without drafts:", recomputed(_PROMPT, 16))


def check_rejected(mended: Callable[..., list[int]]) -> None:
    """Against the model without drafts and without a cache; a pass computes what is new, and no more."""
    compare(
        partial(_answer, mended),
        partial(_answer, _passed()),
        [Case(f"drafts in a pass: {drafts}, wrong of them: {wrong}, new tokens: {count}", count, drafts, wrong)
         for count, drafts, wrong in (
             (2, 1, "none"), (2, 1, "all"), (5, 2, "the last"), (4, 2, "the first"), (5, 2, "all"),
             (9, 3, "the second"), (16, 4, "every third"), (12, 6, "the second"), (6, 0, "none"),
         )],
        expected="the answer as it is without drafts, after each pass all of the text stored but its newest token, and "
        "nothing computed twice",
        mistakes=combined(lambda **wrong: partial(_answer, _passed(**wrong)), _REJECTED, at_once=2),
        explain=_of_pass,
    )  # fmt: skip


def _of_pass(error: BaseException, case: Case) -> str:
    if isinstance(error, ValueError) and "goes on at" in str(error):
        return (
            "a pass has to begin where the stored tokens end, and the keys of rejected drafts are stored still: "
            "they have "
            "to be forgotten, not skipped"
        )
    if isinstance(error, ValueError) and "cannot rewind" in str(error):
        return "more is rewound than there is, or a negative number: what is forgotten are the rejected drafts"
    return ""


_REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("the keys of rejected drafts stay in the cache, and every later token looks at them",
     {"rewind": lambda drafts, right: 0}),
    ("all drafts are forgotten, those that stand too: their keys were right",
     {"rewind": lambda drafts, right: drafts}),
    ("one rejected draft too few is forgotten", {"rewind": lambda drafts, right: max(drafts - right - 1, 0)}),
    ("one token too many is forgotten: the last that stands belongs to the text",
     {"rewind": lambda drafts, right: drafts - right + 1}),
    ("the drafts that stand are forgotten, and the rejected ones stay", {"rewind": lambda drafts, right: right}),
    ("only one token is forgotten, however many drafts were rejected",
     {"rewind": lambda drafts, right: min(1, drafts - right)}),
    ("drafts are forgotten only where none stands", {"rewind": lambda drafts, right: 0 if right else drafts}),
    ("drafts are forgotten only where some stand", {"rewind": lambda drafts, right: drafts - right if right else 0}),
    ("the drafts are not looked at any more: nothing can be rejected, and nothing is gained", {"without": True}),
    ("the drafts are forgotten before they were computed: rewind takes off what is stored", {"early": True}),
    ("the cache is emptied and the whole text computed again; only the keys of rejected drafts had to go",
     {"again": True}),
    ("rejected drafts are accepted", {"all": True}),
]  # fmt: skip


def _passed(
    rewind: Callable[[int, int], int] = lambda drafts, right: drafts - right, **wrong: bool
) -> Callable[..., Any]:
    """One pass, with mistakes switched on."""

    def run(network: Callable[..., Tensor], cache: Any, ids: list[int], drafts: list[int]) -> list[int]:
        drafts = [] if wrong.get("without") else drafts
        if wrong.get("early"):
            cache.rewind(0, min(len(drafts), cache.length(0)))
        rest = [ids[-1]]
        if wrong.get("again"):
            cache.release(0)
            rest = ids
        batch = Batch.of([(0, [*rest, *drafts], cache.length(0))], all_logits=True)
        best = network(batch, cache).argmax(-1).tolist()[len(rest) - 1 :]
        fits = [draft == one for draft, one in zip(drafts, best, strict=False)]
        right = len(fits) if wrong.get("all") or False not in fits else fits.index(False)
        many = 0 if wrong.get("early") else rewind(len(drafts), right)
        cache.rewind(0, min(many, cache.length(0)))
        return [*drafts[:right], best[right]]

    return run
