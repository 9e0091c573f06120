"""The check of chapter 6's speculative loop, against the same model without a cache and without drafts.

What the drafts should be depends on the case: none, all right, right up to a place, wrong, or something of all that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, general_mistake
from llmfromscratch.course.failures import CheckFailed

VOCABULARY = 29
ANSWER, GAINED = "the answer", "the tokens gained per pass"
STARTS, STORED = "the tokens that are stored when each pass begins", "the tokens that are stored in the end"
GOES_ON = "what the model says next, with what is stored in the end"
Propose = Callable[[list[int]], Sequence[int]]


@cache
def small_model() -> Callable[..., Tensor]:
    """A random model of two layers in float64, with weights large enough for every token to matter."""
    config = ModelConfig("llama", VOCABULARY, 24, 40, 2, num_heads=6, num_kv_heads=2, head_dim=4, context_length=128)
    with torch.random.fork_rng():
        torch.manual_seed(18)
        model = learner_engine.reference("model").Model(config).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model.requires_grad_(False).eval()


def new_cache() -> Any:
    """An empty cache for it."""
    return learner_engine.reference("kv_cache").ConcatKVCache(2)


@cache
def _next(text: tuple[int, ...]) -> int:
    return int(small_model()(Batch.of([(0, text, 0)]), new_cache())[0].argmax())


def recomputed(prompt: Sequence[int], count: int) -> list[int]:
    """The answer without a cache: everything is computed again for every token."""
    text = tuple(prompt)
    for _ in range(count):
        text = (*text, _next(text))
    return list(text[len(prompt) :])


class WatchedModel:
    """Stands for the small model, and notes where each pass begins. Its attributes are the model's."""

    def __init__(self, most_passes: int):
        self.starts: list[int] = []
        self.most_passes = most_passes

    def __call__(self, batch: Batch, cache: Any) -> Tensor:
        """As the model's forward."""
        if len(self.starts) >= self.most_passes:
            raise CheckFailed(
                f"at most {self.most_passes} passes: each gives a token at least",
                case=f"pass {self.most_passes + 1} begins",
                mistake="the loop does not see how long the answer is already",
            )
        self.starts.append(batch.spans[0].start)
        return small_model()(batch, cache)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(small_model(), name)


# ---- drafters ----------------------------------------------------------------------------------------------------


class Guess:
    """Drafts by the length of the text: how many there are, and how many of them are right; wrong from there on."""

    def __init__(self, right: Callable[[int], int], count: Callable[[int], int]):
        self.right, self.count = right, count

    def __call__(self, ids: list[int]) -> list[int]:
        """Drafts for a text."""
        count = self.count(len(ids))
        drafts = recomputed(ids, count)
        right = min(self.right(len(ids)), count)
        return [*drafts[:right], *((token + 1) % VOCABULARY for token in drafts[right:])]


def _again(ids: list[int]) -> list[int]:
    """Wrong at one place, and right behind it: it guesses the answer as it is without the wrong one."""
    drafts = recomputed(ids, 4)
    return [drafts[0], (drafts[1] + 1) % VOCABULARY, *drafts[2:]]


GUESSES: dict[str, Propose] = {
    "no drafts": lambda ids: [],
    "2 right drafts": Guess(lambda length: 2, lambda length: 2),
    "2 wrong drafts": Guess(lambda length: 0, lambda length: 2),
    "a right draft and a wrong one": Guess(lambda length: 1, lambda length: 2),
    "4 drafts, the second wrong": _again,
    "9 right drafts": Guess(lambda length: 9, lambda length: 9),
    "as many drafts as it likes, right as far as it likes": Guess(
        lambda length: length * 7 % 5, lambda length: length * 5 % 6
    ),
    "drafts in every second pass": Guess(lambda length: 3, lambda length: length % 2 * 3),
}


# ---- 6.11 --------------------------------------------------------------------------------------------------------


def check_speculative_answer(speculative_answer: Callable[..., Any]) -> None:
    """Against the model alone, with every kind of drafts; what is stored in the end counts as well."""
    compare(
        partial(_answered, speculative_answer),
        partial(_answered, _speculated()),
        answer_cases(),
        expected="the model's own answer, in as many passes as the drafts leave, and the keys of all its tokens "
        "but the "
        "last stored",
        mistakes=combined(lambda **wrong: partial(_answered, _speculated(**wrong)), _LOOP, at_once=2),
        diagnose=_of_parts,
        explain=_of_loop,
    )


def answer_cases() -> list[Case]:
    """Prompts, lengths and drafters, the smallest first."""
    listed = [
        ([3], 1, "no drafts"), ([3, 17, 5], 3, "no drafts"), ([3, 17, 5], 3, "2 right drafts"),
        ([3, 17, 5], 6, "2 right drafts"), ([3, 17, 5], 3, "2 wrong drafts"),
        ([3, 17, 5], 5, "a right draft and a wrong one"), ([3, 17, 5], 4, "2 right drafts"),
        ([3, 17, 5], 2, "9 right drafts"), ([3, 17, 5], 1, "2 right drafts"), ([8, 2], 9, "4 drafts, the second wrong"),
        ([8, 2], 9, "drafts in every second pass"), ([8, 2], 21, "9 right drafts"), ([8, 2], 0, "2 right drafts"),
        ([12, 25, 0, 7, 7], 24, "as many drafts as it likes, right as far as it likes"),
    ]  # fmt: skip
    return [Case(f"prompt {ids}, {count} new, {name}", ids, count, name) for ids, count, name in listed]


def _answered(function: Callable[..., Any], prompt: list[int], count: int, name: str) -> Any:
    """What a loop gives, with what it has left behind."""
    watched, store = WatchedModel(count + 1), new_cache()
    found = function(watched, store, list(prompt), count, GUESSES[name])
    if not isinstance(found, tuple) or len(found) != 2:
        return found
    stored = store.length(0)
    text = [*prompt, *(found[0] if isinstance(found[0], list) else [])]
    rest = text[stored:] or [0]
    return NamedParts(
        {
            ANSWER: found[0],
            GAINED: found[1],
            STARTS: watched.starts,
            STORED: stored,
            GOES_ON: int(small_model()(Batch.of([(0, rest, stored)]), store)[0].argmax()),
        }
    )


def _of_parts(got: Any, want: Any) -> str:
    if not isinstance(got, NamedParts):
        return "two lists are asked for: the answer, and the tokens gained per pass" if got is not None else ""
    if got[STORED] > want[STORED] and got[ANSWER] == want[ANSWER]:
        return "more is stored in the end than the prompt and the answer without its last id"
    return general_mistake(got[ANSWER], want[ANSWER])


_KEPT = (
    "the cache holds more than the text has: the keys of rejected drafts are in it still, and have to be "
    "forgotten before "
    "the next pass"
)


def _of_loop(error: BaseException, case: Case) -> str:
    text = str(error)
    if isinstance(error, ValueError) and "goes on at" in text:
        return (
            _KEPT
            if _goes_back(text)
            else "a pass begins further on than what is stored: tokens were forgotten that stand"
        )
    if isinstance(error, ValueError) and "no new tokens" in text:
        return _KEPT
    if isinstance(error, ValueError) and "cannot rewind" in text:
        return "more is rewound than there is, or a negative number: what is forgotten are the rejected drafts"
    if isinstance(error, IndexError):
        return "a row is asked for that is not there: all_logits=True gives a row for every new token"
    return ""


def _goes_back(text: str) -> bool:
    """Whether a pass was to begin before the end of what is stored."""
    numbers = [int(word) for word in text.replace(",", " ").replace(";", " ").split() if word.isdigit()]
    return len(numbers) > 2 and numbers[1] < numbers[2]


_REWINDS: list[tuple[str, Callable[[int, int], int]]] = [
    ("rejected drafts are not forgotten: their keys stay in the cache, and every later token looks at them",
     lambda drafts, accepted: 0),
    ("one rejected draft too few is forgotten: all that do not stand must go",
     lambda drafts, accepted: max(drafts - accepted, 0)),
    ("only one token is forgotten, however many drafts were rejected",
     lambda drafts, accepted: int(accepted <= drafts)),
    ("all drafts are forgotten, those that stand too; their keys are right and need not be computed again",
     lambda drafts, accepted: drafts),
    ("one token too many is forgotten: the last that stands is computed again in the next pass",
     lambda drafts, accepted: drafts + 2 - accepted),
    ("drafts that stand are forgotten, and rejected ones stay", lambda drafts, accepted: accepted - 1),
]  # fmt: skip
_LOOP: list[tuple[str, dict[str, Any]]] = [
    *((sentence, {"rewind": rewind, "bare": bare}) for bare in (False, True) for sentence, rewind in _REWINDS),
    ("more than `count` ids come back: drafts have to be cut to what is left", {"cut": lambda drafts, left: drafts}),
    ("more than `count` ids come back: with `left` tokens to go, left - 1 drafts are of use, one token comes by itself",
     {"cut": lambda drafts, left: drafts[:left]}),
    ("drafts are cut further than they have to be", {"cut": lambda drafts, left: drafts[: max(left - 2, 0)]}),
    ("the answer is cut to `count`, and what is stored and counted is not",
     {"cut": lambda drafts, left: drafts, "ends": lambda ids, count: ids[:count]}),
    ("the drafts are held against the wrong rows: the newest token's row says what the first draft should be",
     {"row": lambda rest, drafts: rest}),
    ("the drafts are held against the first rows of the pass; with a prompt in it they are further down",
     {"row": lambda rest, drafts: 0}),
    ("the drafts are held against rows one too early", {"row": lambda rest, drafts: max(rest - 2, 0)}),
    ("drafts are asked for the prompt alone; propose wants the whole text so far",
     {"text": lambda ids, prompt: prompt}),
    ("drafts are asked for the answer alone; propose wants the whole text so far",
     {"text": lambda ids, prompt: ids[len(prompt) :]}),
    ("drafts are asked for the text without its newest token", {"text": lambda ids, prompt: ids[:-1]}),
    ("the pass over the prompt brings no drafts: it can check some as well as any other", {"first": False}),
    ("every pass adds one token: no drafts are checked, or nothing of them is kept", {"cut": lambda drafts, left: []}),
    ("the drafts of each pass are counted; asked for are the tokens that it has added",
     {"counts": lambda drafts, accepted: drafts}),
    ("the drafts that stand are counted; the model's own token is gained as well",
     {"counts": lambda drafts, accepted: accepted - 1}),
    ("every draft counts, and the model's own token; only what stands is gained",
     {"counts": lambda drafts, accepted: drafts + 1}),
    ("the prompt comes out as well; asked for is the answer", {"prompt": True}),
    ("drafts are taken over as they are, right or wrong",
     {"accept": lambda drafts, best: [*drafts, best[len(drafts)]]}),
    ("the model's own token after the drafts that stand is thrown away, unless none stands",
     {"accept": lambda drafts, best: _stand(drafts, best) or [best[0]]}),
    ("the answer and the count of passes come back; asked for are the tokens gained in each",
     {"ends_gained": len}),
    ("the sum of the gained tokens comes back; asked for is one number for each pass", {"ends_gained": sum}),
    ("the answer comes back as a tensor; asked for is a list", {"ends": lambda ids, count: torch.tensor(ids)}),
    ("the two are exchanged: first the answer, then the tokens gained", {"order": -1}),
    ("the cache is released after every pass, and the whole text computed again; it is there to be used",
     {"released": True}),
]  # fmt: skip


def _stand(drafts: list[int], best: list[int]) -> list[int]:
    right = 0
    while right < len(drafts) and drafts[right] == best[right]:
        right += 1
    return drafts[:right]


def _accepted(drafts: list[int], best: list[int]) -> list[int]:
    stand = _stand(drafts, best)
    return [*stand, best[len(stand)]]


def _speculated(
    rewind: Callable[[int, int], int] = lambda drafts, accepted: drafts + 1 - accepted,
    cut: Callable[[list[int], int], list[int]] = lambda drafts, left: drafts[: left - 1],
    accept: Callable[[list[int], list[int]], list[int]] = _accepted,
    row: Callable[[int, int], int] = lambda rest, drafts: rest - 1,
    counts: Callable[[int, int], int] = lambda drafts, accepted: accepted,
    **wrong: Any,
) -> Callable[..., Any]:
    """The loop, with mistakes switched on."""

    def run(model: Callable[..., Tensor], store: Any, prompt: list[int], count: int, propose: Propose) -> Any:
        ids, gained = list(prompt), list[int]()
        while (left := len(prompt) + count - len(ids)) > 0:
            asked = wrong.get("text", lambda ids, prompt: ids)(list(ids), prompt)
            drafts = cut(list(propose(asked)), left) if asked and (gained or wrong.get("first", True)) else []
            stored = store.length(0)
            rest = ids[stored:] if wrong.get("bare") else ids[stored:] or ids[-1:]
            batch = Batch.of([(0, [*rest, *drafts], stored)], all_logits=True)
            best = model(batch, store).argmax(-1).tolist()
            best = [
                *best[row(len(ids) - stored if wrong.get("bare") else len(rest), len(drafts)) :],
                *[0] * (len(drafts) + 1),
            ]
            new = accept(drafts, best)
            store.rewind(0, min(max(rewind(len(drafts), len(new)), 0), store.length(0)))
            if wrong.get("released"):
                store.release(0)
            ids += new
            gained.append(counts(len(drafts), len(new)))
        answer = wrong.get("ends", lambda ids, count: ids)(ids[0 if wrong.get("prompt") else len(prompt) :], count)
        return (answer, wrong.get("ends_gained", lambda gained: gained)(gained))[:: wrong.get("order", 1)]

    return run
