"""Chapter 5's bug hunts: a broken piece of a sampler, the symptom it causes, and its check each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.failures import CheckFailed

# ---- 5.a ---------------------------------------------------------------------------------------------------------

NUCLEUS_STORY = """
"We wanted careful answers, so we lowered top-p. Down to 0.5 they got better and better. At 0.3 the model says the same
word again and again, the first one of its vocabulary." Below: what is left of one distribution for several p.
"""


def nucleus(probabilities: Tensor, p: float) -> Tensor:
    """Ids of the smallest set of most probable tokens that together reach p, the most probable first.

    probabilities: float [vocab], sums to 1; p above 0, at most 1. Returns int64 [kept]; of equal ones the lower id goes
    first.
    """
    ranked, ids = probabilities.sort(descending=True, stable=True)
    return ids[ranked.cumsum(dim=0) <= p]


_FIELD_CASE = torch.tensor([0.1, 0.2, 0.3, 0.4])


def show_nucleus() -> None:
    """What is left, and how much of the probability that is."""
    for p in (0.95, 0.8, 0.6, 0.3):
        kept = nucleus(_FIELD_CASE, p)
        print(f"p = {p}: tokens {kept.tolist()} are left, with {float(_FIELD_CASE[kept].sum()):.1f} of the probability")
    print("a draw from nothing gives token 0")


def check_nucleus(mended: Callable[..., Tensor]) -> None:
    """Against the sentence itself: take one after the other until p is reached. Eighths are sums without rounding."""
    eighths = torch.tensor([0.125, 0.5, 0.25, 0.125])
    random = torch.randn(40, generator=torch.Generator().manual_seed(51)).softmax(-1)
    distributions = [("[0.1, 0.2, 0.3, 0.4]", _FIELD_CASE, (0.65, 0.95, 0.85, 0.45, 0.35)),
                     ("[0.125, 0.5, 0.25, 0.125]", eighths, (0.75, 0.5, 0.875, 0.6, 0.3, 1.0)),
                     ("four equal ones", torch.full((4,), 0.25), (0.5, 0.2, 0.7)),
                     ("one token", torch.ones(1), (0.3, 1.0)),
                     ("40 tokens", random, (0.02, 0.31, 0.77, 0.96))]  # fmt: skip
    compare(
        mended,
        _until_reached,
        [Case(f"{text}, p = {p}", row, p) for text, row, settings in distributions for p in settings],
        expected="the most probable tokens up to the one with which their sum reaches p, that one too",
        mistakes=combined(_nucleus, _NUCLEUS, at_once=2),
    )


def _until_reached(probabilities: Tensor, p: float) -> Tensor:
    row, kept, reached = probabilities.double().tolist(), list[int](), 0.0
    for token in sorted(range(len(row)), key=lambda token: -row[token]):
        if reached < p:
            kept.append(token)
        reached += row[token]
    return torch.tensor(kept)


_NUCLEUS: list[tuple[str, dict[str, Any]]] = [
    ("the token that crosses p is dropped: without it the set does not reach p", {}),
    ("the token that crosses p is dropped still, unless nothing would be left", {"least": 1}),
    ("the token that crosses p is dropped still, and where nothing is left all are kept", {"least": 1000}),
    ("the token that crosses p is dropped, and so is one with which p is reached exactly",
     {"keep": lambda sums, own, p: sums < p}),
    ("the token that crosses p is dropped, and so is one with which p is reached exactly, unless nothing would be left",
     {"keep": lambda sums, own, p: sums < p, "least": 1}),
    ("one token more is kept, whether p is reached already or not: where the sum is exactly p, it is too many",
     {"keep": lambda sums, own, p: sums - own <= p}),
    ("p is raised by the largest probability, which keeps several that come after the crossing one",
     {"keep": lambda sums, own, p: sums <= p + own.max()}),
    ("two tokens more are kept: only the one that crosses p was missing",
     {"keep": lambda sums, own, p: (sums <= p).sum() + 2 > torch.arange(len(sums))}),
    ("what is kept and what is cut are exchanged", {"keep": lambda sums, own, p: sums - own >= p}),
    ("the least probable tokens come first", {"descending": False, "keep": lambda sums, own, p: sums - own < p}),
    ("True or False for each place; asked for are ids",
     {"keep": lambda sums, own, p: sums - own < p, "gives": lambda ids, kept: kept}),
    ("the probabilities of what is left; asked for are ids",
     {"keep": lambda sums, own, p: sums - own < p, "gives": None}),
]  # fmt: skip


def _nucleus(
    keep: Callable[[Tensor, Tensor, float], Tensor] = lambda sums, own, p: sums <= p,
    least: int = 0,
    descending: bool = True,
    gives: Callable[[Tensor, Tensor], Tensor] | None = lambda ids, kept: ids[kept],
) -> Callable[[Tensor, float], Tensor]:
    """A nucleus of which at least so many tokens are kept."""

    def run(probabilities: Tensor, p: float) -> Tensor:
        ranked, ids = probabilities.sort(descending=descending, stable=True)
        kept = keep(ranked.cumsum(dim=0), ranked, p)
        if not kept.any():
            kept = torch.arange(len(ids)) < least
        return gives(ids, kept) if gives else ranked[kept]

    return run


# ---- 5.b ---------------------------------------------------------------------------------------------------------

PENALTY_STORY = """
"The model repeated itself, so I set a repetition penalty of 1.2. It got worse. At 1.5 it says nothing else. A colleague
has the same code, another model, and no trouble." Below, a token that was said, in two distributions: it should become
rarer from line to line.
"""


def penalize(logits: Tensor, said: Sequence[int], strength: float) -> Tensor:
    """Logits [vocab] after a repetition penalty: the logit of each token that was said moves by a factor.

    said: ids of prompt and answer; each distinct one counts once. strength: the factor by which a token becomes less
    likely, 1 changes nothing; a strength below 1 makes it likelier, by the inverse of the factor.
    """
    logits = logits.clone()
    for token in set(said):
        logits[token] /= strength
    return logits


_ABOVE_0 = torch.tensor([5.0, 4.0, 3.5, 3.0])
_BELOW_0 = _ABOVE_0 - 8.0  # the same distribution


def show_penalty() -> None:
    """How probable the token that was said is, for rising strengths."""
    for text, logits in (("the colleague's logits", _ABOVE_0), ("my logits", _BELOW_0)):
        print(f"{text}: {logits.tolist()}, token 0 was said")
        for strength in (1.0, 1.2, 1.5, 2.0):
            print(f"  strength {strength}: {float(penalize(logits, [0, 0], strength).softmax(-1)[0]):.3f}")


def check_penalty(mended: Callable[..., Tensor]) -> None:
    """Token by token in plain numbers: a positive logit is divided, a negative one multiplied."""
    random = torch.randn(30, generator=torch.Generator().manual_seed(52)) * 3
    banned = torch.tensor([-math.inf, -1.0, 2.0, 0.0])
    compare(
        mended,
        _moved,
        [
            Case("logits [3, 1], token 0 was said, strength 2", torch.tensor([3.0, 1.0]), [0], 2.0),
            Case("logits [-3, 1], token 0 was said, strength 2", torch.tensor([-3.0, 1.0]), [0], 2.0),
            Case("logits [-3, 2, -1, 4], 0 and 1 were said, strength 1.5", torch.tensor([-3.0, 2.0, -1.0, 4.0]), [0, 1],
                 1.5),
            Case("logits [-3, 1], token 0 was said twice, strength 2", torch.tensor([-3.0, 1.0]), [0, 0], 2.0),
            Case("logits [3, -1], both were said, strength 0.5", torch.tensor([3.0, -1.0]), [0, 1], 0.5),
            Case("a banned token and one of logit 0 were said, strength 2", banned, [3, 0], 2.0),
            Case("nothing was said, strength 2", torch.tensor([3.0, -1.0]), [], 2.0),
            Case("30 tokens, 12 of which were said", random, [3 * n % 19 for n in range(12)], 1.3),
        ],
        expected="said tokens moved by the factor towards less likely, whatever the sign of their logit, and all "
        "others as they were",
        mistakes=combined(_penalized, _PENALTY, at_once=2),
    )  # fmt: skip


def _moved(logits: Tensor, said: Sequence[int], strength: float) -> Tensor:
    return torch.tensor(
        [
            logit if token not in said else logit / strength if logit > 0 else logit * strength
            for token, logit in enumerate(logits.tolist())
        ]
    )


_LOWEST: tuple[Callable[[Tensor], Tensor], ...] = (torch.min, lambda logits: logits.min().clamp(max=0))
_PENALTY: list[tuple[str, dict[str, Any]]] = [
    ("a negative logit comes nearer to 0 when it is divided: the token becomes likelier",
     {"negative": lambda logit, strength: logit / strength}),
    ("negative logits are left as they are; their tokens are to become less likely too",
     {"negative": lambda logit, strength: logit}),
    ("all logits are multiplied: now it is the positive ones that become likelier",
     {"positive": lambda logit, strength: logit * strength}),
    ("the signs are looked at the wrong way round: positive logits are multiplied, negative ones divided",
     {"positive": lambda logit, strength: logit * strength, "negative": lambda logit, strength: logit / strength}),
    ("a negative logit loses its sign", {"negative": lambda logit, strength: -logit / strength}),
    ("a negative logit loses its sign", {"negative": lambda logit, strength: -logit * strength}),
    ("a negative logit is set to 0 or to a fixed number; it moves by the factor",
     {"negative": lambda logit, strength: 0.0 * strength}),
    ("right for a strength above 1 only: below it a token is to become likelier, and the smaller of the two is not",
     {"positive": lambda logit, strength: min(logit / strength, logit * strength),
      "negative": lambda logit, strength: min(logit / strength, logit * strength)}),
    ("something is taken off, and the logit does not move by the factor",
     {"positive": lambda logit, strength: logit - (strength - 1) * abs(logit),
      "negative": lambda logit, strength: logit - (strength - 1) * abs(logit)}),
    *(("something is taken off, and the logit does not move by the factor", dict.fromkeys(signs, taken))
      for taken in (lambda logit, strength: logit - math.log(strength), lambda logit, strength: logit - strength,
                    lambda logit, strength: logit - (strength - 1))
      for signs in (("positive", "negative"), ("negative",))),
    ("a token that was said twice is penalized twice; each distinct one counts once", {"times": "each"}),
    ("tokens that nobody said are penalized too", {"times": "all"}),
    ("all logits are shifted to 0 and below first; logits of tokens that nobody said stay as they were",
     {"shifted": torch.max}),
    *(("all logits are shifted to 0 and above first; logits of tokens that nobody said stay as they were",
       {"shifted": low}) for low in _LOWEST),
    *(("logits are shifted to 0 and above, divided, and shifted back: how far one moves then depends on the smallest "
       "of all; it moves by the factor", {"shifted": low, "back": True}) for low in _LOWEST),
]  # fmt: skip


def _penalized(
    positive: Callable[[float, float], float] = lambda logit, strength: logit / strength,
    negative: Callable[[float, float], float] = lambda logit, strength: logit * strength,
    times: str = "",
    shifted: Callable[[Tensor], Tensor] = lambda logits: torch.zeros(()),
    back: bool = False,
) -> Callable[[Tensor, Sequence[int], float], Tensor]:
    """The penalty, with mistakes switched on."""

    def run(logits: Tensor, said: Sequence[int], strength: float) -> Tensor:
        zero = shifted(logits)
        row = (logits - zero).tolist()
        counted = range(len(row)) if times == "all" else said if times == "each" else set(said)
        for token in counted:
            row[token] = (positive if row[token] > 0 else negative)(row[token], strength)
        return torch.tensor(row) + (zero if back else 0)

    return run


# ---- 5.c ---------------------------------------------------------------------------------------------------------

STREAM_STORY = """
"I gave every request a seed, so that I can repeat an answer. In the evening I can. By day I cannot: the same prompt,
the same seed, and another answer. My code has a single line that draws, and it is right." Below, request A with seed 7:
alone, and with others around it.
"""


class SharedSampler:
    """Draws tokens for the requests of an engine. What a request gets depends on its seed and distributions alone."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def start(self, name: str, seed: int) -> None:
        """A request that is served from now on; it need not be in every step."""
        self.generator.manual_seed(seed)

    def step(self, distributions: Mapping[str, Tensor]) -> dict[str, int]:
        """The next token of each request of this step: distributions by name, float [vocab] each."""
        return {name: int(torch.multinomial(row, 1, generator=self.generator)) for name, row in distributions.items()}


_ALONE = ("A",) * 6
# (what happens, who is in each step, what it says of a sampler that lets it change an answer)
_DAYS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("somebody else calls torch.rand between the steps", _ALONE,
     "torch's own generator is used, which belongs to everybody: a request needs one of its own"),
    ("A is called Z", ("Z",) * 6, "the name counts as well as the seed"),
    ("A and B are served together", ("AB",) * 6,
     "a request takes its numbers from a generator that others use, or that their start has seeded again"),
    ("A and B are served together, B stands first", ("BA",) * 6,
     "the order of the requests decides who gets which number"),
    ("B begins two steps after A", ("A", "A", "AB", "AB", "AB", "AB", "B", "B"),
     "when a request begins counts as well as its seed"),
    ("B is there for the first two steps only", ("AB", "AB", "A", "A", "A", "A"),
     "a request goes on taking numbers, or the others get them, when it has left"),
    ("A is left out of two steps", ("AB", "B", "AB", "B", "AB", "AB", "A", "A"),
     "a number is taken for a request in a step that it is not in, so it is missing later"),
    ("A and C have the same seed", ("AC",) * 6,
     "requests with the same seed share a stream; each needs one of its own"),
    ("C begins with A's seed when A has gone", ("A", "A", "A", "C", "C", "C"),
     "requests with the same seed share a stream; each needs one of its own"),
    ("five are served", ("ABCDE", "ACE", "BDA", "EDCBA", "AB", "A", "CDE", "ABCDE"), "the neighbours still count"),
)  # fmt: skip
_SEEDS = {"A": 7, "B": 8, "C": 7, "D": 3, "E": 11, "Z": 7}


def _served(
    sampler_class: Callable[[], Any],
    steps: Sequence[str],
    seed: int | None = None,
    vocab: int = 64,
    noise: bool = False,
) -> dict[str, list[int]]:
    """What each request gets; it starts where it appears first. The distribution depends on its number of tokens."""
    sampler, got = sampler_class(), dict[str, list[int]]()
    for names in steps:
        for name in names:
            if name not in got:
                got[name] = []
                sampler.start(name, _SEEDS[name] if seed is None else seed)
        tokens = sampler.step({name: _distribution(len(got[name]), vocab) for name in names})
        if noise:
            torch.rand(3)
        _refuse_odd(tokens, names, vocab)
        for name in names:
            got[name].append(tokens[name])
    return got


def _distribution(number: int, vocab: int) -> Tensor:
    if vocab == 4:
        return torch.tensor([0.0, 0.6, 0.3, 0.1])
    return torch.randn(vocab, generator=torch.Generator().manual_seed(number)).softmax(-1)


def _refuse_odd(tokens: Any, names: str, vocab: int) -> None:
    fine = isinstance(tokens, dict) and sorted(tokens) == sorted(names)
    if not fine or not all(type(token) is int and 0 <= token < vocab for token in tokens.values()):
        raise CheckFailed(
            "a dict with one token, an int, for each request of the step",
            case=f"a step of {' and '.join(names)}: got {tokens!r}",
            mistake="the `return` is missing" if tokens is None else "",
        )


def show_streams() -> None:
    """What A gets on different days."""
    print("A alone:", _served(SharedSampler, _ALONE)["A"])
    for text, steps, _ in _DAYS[2:6]:
        print(f"{text}:", _served(SharedSampler, steps)["A"])


def check_streams(mended: Callable[[], Any]) -> None:
    """However it draws: by its seed, as the distribution says, and the same alone and in any company."""
    alone = {name: _served(mended, _ALONE, seed)["A"] for name, seed in _SEEDS.items()}
    _expect(alone["A"] == _served(mended, _ALONE)["A"], "A alone, twice: two answers", "the seed is not used")
    _expect(alone["A"] != alone["B"], "A with seed 7 and with seed 8: the same answer",
            "the seed is not used: nothing is drawn, or always with the same numbers")  # fmt: skip
    many = _served(mended, ("A",) * 400, vocab=4)["A"]
    shares = [many.count(token) / 400 for token in range(4)]
    near = all(abs(share - want) < 0.1 for share, want in zip(shares, (0.0, 0.6, 0.3, 0.1), strict=True))
    _expect(near and shares[0] == 0, f"400 draws from [0, 0.6, 0.3, 0.1]: shares {shares}",
            "every token is drawn with the same number: the stream begins again each time" if max(shares) == 1
            else "the draws do not follow the distribution")  # fmt: skip
    for text, steps, mistake in _DAYS:
        for name, tokens in _served(mended, steps, noise="torch.rand" in text).items():
            want = alone[name][: len(tokens)]
            _expect(tokens[:6] == want, f"{text}: {name} gets {tokens[:6]}, and alone {want}", mistake)


def _expect(holds: bool, case: str, mistake: str) -> None:
    if not holds:
        raise CheckFailed(
            "the same answer for the same seed and distributions, whoever else is served", case=case, mistake=mistake
        )


# ---- 5.d ---------------------------------------------------------------------------------------------------------

ORDER_STORY = """
"We took our settings along from transformers, temperature and top-p, digit by digit. Ours is duller when it is hot, and
wilder when it is cold. At temperature 1 both are the same." Below, the tokens that can be drawn at all from one
distribution: by this code, and by the engine in its declared order, which is that of transformers too.
"""


def filtered(logits: Tensor, temperature: float, p: float) -> Tensor:
    """The distribution that a token is drawn from, at a temperature above 0 and with top-p: float [vocab], sums to 1.

    logits: float32 [vocab]. The nucleus is the smallest set of most probable tokens that reaches p.
    """
    ranked, ids = logits.softmax(dim=-1).sort(descending=True, stable=True)
    kept = ids[ranked.cumsum(dim=-1) - ranked < p]
    left = torch.full_like(logits, -torch.inf)
    left[kept] = logits[kept] / temperature
    return left.softmax(dim=-1)


_ANIMALS = torch.tensor([2.0, 1.6, 1.1, 0.5, -0.2, -1.0, -2.5, -4.0])


def engines_distribution(logits: Tensor, temperature: float, p: float) -> Tensor:
    """What the engine draws from: float64 [vocab]."""
    engine = learner_engine.reference("sampling")
    params = engine.SamplingParams(temperature=temperature, top_p=p)
    return engine.distribution(logits[None], [engine.Sampler().start(params, [])])[0]


def show_order() -> None:
    """How many tokens can be drawn, and how probable the best is, at three temperatures."""
    for temperature in (0.5, 1.0, 2.0):
        for text, draw_from in (("this code", filtered), ("the engine", engines_distribution)):
            found = draw_from(_ANIMALS, temperature, 0.8)
            print(f"temperature {temperature}, p = 0.8, {text:>10}: {int((found > 0).sum())} tokens, "
                  f"the first with {float(found[0]):.2f}")  # fmt: skip


def check_order(mended: Callable[..., Tensor]) -> None:
    """In plain numbers: powers of e at the temperature, one token after the other until p is reached, and 1 again."""
    random = torch.randn(40, generator=torch.Generator().manual_seed(53)) * 2
    settings = ((1.0, 0.8), (0.5, 0.8), (2.0, 0.8), (3.0, 0.5), (0.25, 0.95), (1.7, 1.0))
    compare(
        mended,
        _by_temperature_then_p,
        [Case(f"{text}, temperature {temperature}, p = {p}", logits, temperature, p)
         for text, logits in (("the eight logits from above", _ANIMALS), ("40 tokens", random))
         for temperature, p in settings],
        expected="the nucleus of the distribution at this temperature, with the sum 1",
        mistakes=combined(_tempered, _ORDER, at_once=2),
    )  # fmt: skip


def _by_temperature_then_p(logits: Tensor, temperature: float, p: float) -> Tensor:
    powers = [math.exp(logit / temperature) for logit in logits.tolist()]
    kept, reached = [0.0] * len(powers), 0.0
    for token in sorted(range(len(powers)), key=lambda token: -powers[token]):
        if reached < p * sum(powers):
            kept[token] = powers[token]
        reached += powers[token]
    return torch.tensor([power / sum(kept) for power in kept])


_ORDER: list[tuple[str, dict[str, Any]]] = [
    ("the nucleus is still that of temperature 1: the temperature has to act before top-p looks",
     {"first": lambda temperature: 1.0}),
    ("the temperature acts before top-p, and once more behind it", {"later": lambda temperature: temperature**2}),
    ("the temperature chooses the nucleus and is then forgotten: its probabilities are those of temperature 1",
     {"later": lambda temperature: 1.0}),
    ("the temperature is not used at all any more",
     {"first": lambda temperature: 1.0, "later": lambda temperature: 1.0}),
    ("logits are multiplied by the temperature; they are divided by it",
     {"first": lambda temperature: 1 / temperature, "later": lambda temperature: 1 / temperature}),
    ("the nucleus is right, and the logits in it are multiplied by the temperature",
     {"later": lambda temperature: 1 / temperature}),
    ("what is left does not sum to 1 again", {"scaled": False}),
    ("top-p has no effect any more", {"p": lambda p, temperature: 2.0}),
    ("p is bent by the temperature in place of the distribution",
     {"first": lambda temperature: 1.0, "p": lambda p, temperature: p ** (1 / temperature)}),
    ("p is bent by the temperature, or probabilities are divided by it, which comes to the same: it divides logits",
     {"first": lambda temperature: 1.0, "p": lambda p, temperature: p * temperature}),
    ("p is bent by the temperature in place of the distribution",
     {"first": lambda temperature: 1.0, "p": lambda p, temperature: p / temperature}),
    ("the token that crosses p is dropped", {"crossing": False}),
    ("logits; asked for is the distribution", {"gives": lambda found: found.log()}),
]  # fmt: skip


def _tempered(
    first: Callable[[float], float] = lambda temperature: temperature,
    later: Callable[[float], float] = lambda temperature: temperature,
    p: Callable[[float, float], float] = lambda p, temperature: p,
    **wrong: Any,
) -> Callable[[Tensor, float, float], Tensor]:
    """Temperature `first` chooses the nucleus, `later` gives its probabilities."""

    def run(logits: Tensor, temperature: float, threshold: float) -> Tensor:
        row = (logits.double() / first(temperature)).softmax(-1)
        found = (logits.double() / later(temperature)).softmax(-1)
        ranked, ids = row.sort(descending=True, stable=True)
        sums = ranked.cumsum(-1)
        kept = ids[(sums - ranked if wrong.get("crossing", True) else sums) < p(threshold, temperature)]
        left = torch.zeros_like(found)
        left[kept] = found[kept]
        left = left / left.sum() if wrong.get("scaled", True) else left
        return wrong.get("gives", lambda found: found)(left).float()

    return run
