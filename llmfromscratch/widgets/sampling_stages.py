"""How the next token's distribution comes about, stage by stage: what `sampling_distribution` draws.

Each stage is a function of the module `sampling`, or a learner's own in its place. What a stage did is compared with
its closed form, computed here in float64 from what the stage was given; what differs is a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import kv_cache, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.widgets.attention_trace import token_labels
from llmfromscratch.widgets.glyphs import VISIBLE
from llmfromscratch.widgets.token_reading import counted

PARTS = ("apply_penalties", "apply_temperature", "keep_top_k", "keep_top_p", "keep_min_p")
_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the order in which they act, with what turns them off
_SLACK = 1e-5  # of running sums: they may have been added up in single precision
Part = Callable[..., Tensor]


@dataclass(frozen=True)
class Prompt:
    """A text before its next token. logits: float32 [vocab], the model's; label(token id) -> the token, readable."""

    text: str
    token_ids: tuple[int, ...]
    logits: Tensor
    label: Callable[[int], str]


@dataclass(frozen=True)
class Cut:
    """What one filter did. before: float64 [vocab], what it was given, largest first; kept: bool [vocab]."""

    name: str
    value: float
    before: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Stages:
    """The distribution after each stage, all [vocab] and in the order of `ids`, the most probable token first.

    penalized: float32, the logits after the penalties; model: float64, the probabilities of the model alone; spread:
    after penalties and temperature; final: what the draw is made from. cuts: the filters that are on.
    """

    prompt: Prompt
    params: Any
    ids: Tensor
    model: Tensor
    penalized: Tensor
    spread: Tensor
    cuts: tuple[Cut, ...]
    final: Tensor
    problems: tuple[str, ...]

    @property
    def kept(self) -> Tensor:
        """Which tokens can be drawn: bool [vocab]."""
        return self.final > 0

    def cut_by(self, place: int) -> str:
        """The name of the filter that cut the token at this place of the ranking, or ""."""
        return next((cut.name for cut in self.cuts if not cut.kept[place]), "")

    def seen(self, place: int) -> bool:
        """Whether the token at this place stands in the prompt."""
        return int(self.ids[place]) in self.prompt.token_ids

    def label(self, place: int) -> str:
        """The token at this place, its white space made visible."""
        return self.prompt.label(int(self.ids[place]))


def read_prompt(llm: Any, text: str) -> Prompt:
    """Runs the model over the text. llm: anything with `model` and `tokenizer`. Raises ValueError for no tokens."""
    ids = [int(index) for index in llm.tokenizer.encode(text)]
    if not ids:
        raise ValueError("There is nothing to continue; give a prompt of at least one character.")
    cache = kv_cache.ConcatKVCache(llm.model.config.num_layers)
    logits = llm.model(Batch.of([(0, ids, 0)]), cache)[-1].float().cpu()
    return Prompt(text, tuple(ids), logits, lambda index: label_of(llm.tokenizer, index))


def label_of(tokenizer: Any, index: int) -> str:
    """The token as it can be read, or its number where the model has more ids than the tokenizer."""
    try:
        return token_labels(tokenizer, [index])[0] or f"[{index}]"
    except Exception:  # noqa: BLE001 - tokenizers differ in what they raise for an id that they do not know
        return f"[{index}]"


def in_one_line(text: str) -> str:
    """The text with signs for all white space but spaces."""
    return "".join(character if character == " " else VISIBLE.get(character, character) for character in text)


def choose_parts(given: Mapping[str, Part | None]) -> dict[str, Part]:
    """The functions that were given in the place of `sampling`'s own. Raises TypeError for a name that is none."""
    for name in given:
        if name not in PARTS:
            raise TypeError(f"{name!r} is no part of this figure; expected some of {', '.join(PARTS)}.")
    return {name: part for name, part in given.items() if part is not None}


def run_stages(prompt: Prompt, params: Any, parts: Mapping[str, Part] | None = None, module: Any = None) -> Stages:
    """All stages for one setting. Without parts the end is `distribution` of the module, whatever its stages say.

    parts: functions in the place of the module's; module: something with the functions of `sampling`, which it is if
    None.
    """
    given, source = parts or {}, sampling if module is None else module
    part = {name: given.get(name) or getattr(source, name) for name in PARTS}
    penalized, problems = _penalize(prompt, params, part["apply_penalties"])
    log_probabilities = _warm(penalized, params.temperature, part["apply_temperature"], problems)
    ranked, ids = log_probabilities.sort(descending=True, stable=True)
    spread = ranked.exp().double()
    final, cuts = _filter(spread, params, part)
    for cut in cuts:
        problems.extend(_doubts(cut, lambda place: repr(prompt.label(int(ids[place])))))
    if not given:
        row = source.Sampler().start(params, list(prompt.token_ids))
        own = source.distribution(prompt.logits.unsqueeze(0), [row])[0].double()[ids]
        problems.extend(_difference(own, final, lambda place: repr(prompt.label(int(ids[place])))))
        final = own
    model = prompt.logits.double().softmax(-1)
    return Stages(prompt, params, ids, model[ids], penalized[ids], spread, cuts, final, tuple(problems))


def entropy_of(probabilities: Tensor) -> float:
    """In bits: 0 where one token has all, log2(n) where n tokens share evenly."""
    some = probabilities[probabilities > 0]
    return abs(float(-(some * some.log2()).sum()))


# ---- the stages --------------------------------------------------------------------------------------------------


def _penalize(prompt: Prompt, params: Any, apply: Part) -> tuple[Tensor, list[str]]:
    """The logits after the penalties, and what is wrong with them. No answer has begun: its counts are 0."""
    logits = prompt.logits
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[list(prompt.token_ids)] = True
    counts = torch.zeros(1, len(logits), dtype=torch.int64)
    strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    settings = (torch.tensor([float(strength)]) for strength in strengths)
    after = _checked(apply(logits.unsqueeze(0), seen.unsqueeze(0), counts, *settings), "apply_penalties", logits)
    return after, doubts_about_penalties(logits, after, seen, counts[0], params, prompt.label)


def doubts_about_penalties(
    logits: Tensor, after: Tensor, seen: Tensor, counts: Tensor, params: Any, label: Callable[[int], str]
) -> list[str]:
    """What the penalties did against the rule, as sentences. Tensors: [vocab], as `sampling.apply_penalties` knows."""
    factor = params.repetition_penalty
    right = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    right = right - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    wrong = ((after - right).abs() > 1e-4 * (1 + right.abs())) | ~after.isfinite()
    said = []
    for group, what in ((seen, "stands in the text"), (~seen, "is not in the text")):
        found = (wrong & group).nonzero().flatten().tolist()
        if not found:
            continue
        worst = max(found, key=lambda index: _badness(float(after[index] - logits[index])))
        moved = f"the logit of {label(worst)!r}, which {what}, from {logits[worst]:.2f} to {after[worst]:.2f}"
        end = ": it becomes likelier" if after[worst] > logits[worst] else f"; {right[worst]:.2f} was expected"
        said.append(f"{penalties_in_words(params)} moves {moved}{end}{_more(len(found) - 1)}.")
    return said


def penalties_in_words(params: Any) -> str:
    """The penalties that are on: "repetition_penalty 1.3"; "no penalty" if none is."""
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    on = [f"{name} {getattr(params, name):g}" for name, off in neutral.items() if getattr(params, name) != off]
    return " and ".join(on) or "no penalty"


def _badness(rise: float) -> tuple[bool, float]:
    return rise > 0, abs(rise) if rise == rise else float("inf")


def _warm(logits: Tensor, temperature: float, apply: Part, problems: list[str]) -> Tensor:
    """log-probabilities [vocab] at the temperature."""
    temperatures = torch.tensor([temperature], dtype=torch.float64)
    scaled = _checked(apply(logits.unsqueeze(0), temperatures), "apply_temperature", logits)
    log_probabilities = scaled.log_softmax(-1)
    if log_probabilities.isnan().any():
        raise ValueError(f"apply_temperature at {temperature:g} gives logits that have no probabilities (nan, or inf).")
    right = (logits.double() / temperature).softmax(-1)
    first = int(right.argmax())
    found = float(log_probabilities[first].exp())
    if (log_probabilities.double().exp() - right).abs().max() > 1e-3:
        problems.append(
            f"At temperature {temperature:g} the token with the largest logit has a probability of {found:.3f}; "
            f"logits divided by {temperature:g} give it {float(right[first]):.3f}."
        )
    return log_probabilities


def _filter(ranked: Tensor, params: Any, part: Mapping[str, Part]) -> tuple[Tensor, tuple[Cut, ...]]:
    """What is left, scaled to a sum of 1, and what each filter that is on did."""
    cuts = []
    for name, off in _FILTERS.items():
        value = getattr(params, name)
        if value == off:
            continue
        kept = part[f"keep_{name}"](ranked.unsqueeze(0), torch.tensor([value], dtype=_dtype(name)))
        kept = _checked(kept, f"keep_{name}", ranked, torch.bool)
        cuts.append(Cut(name, value, ranked, kept))
        left = ranked.masked_fill(~kept, 0)
        if float(left.sum()) <= 0:
            raise ValueError(f"keep_{name} keeps no token at {name} {value:g}: there is nothing to draw from.")
        ranked = left / left.sum()
    return ranked / ranked.sum(), tuple(cuts)


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == "top_k" else torch.float64


def _checked(result: Any, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The one row that a part returned. Raises ValueError where it is no such row."""
    kind = f"{dtype} " if dtype else ""
    wanted = f"a {kind}tensor [rows, candidates] = [1, {len(like)}] was expected"
    if not isinstance(result, Tensor):
        raise ValueError(f"{name} returned {result!r:.40}; {wanted}.")
    if result.shape != (1, len(like)) or (dtype and result.dtype != dtype):
        raise ValueError(f"{name} returned {result.dtype} {list(result.shape)}; {wanted}.")
    return result[0].detach().cpu()


# ---- what cannot be right ----------------------------------------------------------------------------------------


def _doubts(cut: Cut, name_of: Callable[[int], str]) -> list[str]:
    """What a filter kept or cut against its rule."""
    if cut.name == "min_p":
        return _doubts_about_min_p(cut, name_of)
    kept, count = cut.kept, int(cut.kept.sum())
    gaps = (~kept[:count]).nonzero().flatten().tolist()
    if gaps:
        later = int(kept.nonzero()[-1])
        return [f"keep_{cut.name} cuts {name_of(gaps[0])} and keeps {name_of(later)}, which is less probable."]
    if cut.name == "top_k":
        right = min(int(cut.value), len(kept))
        return [] if count == right else [f"keep_top_k keeps {counted(count, 'token')}; top_k is {right}."]
    total, without_last = float(cut.before[:count].sum()), float(cut.before[: count - 1].sum())
    if total < cut.value - _SLACK and count < len(kept):
        return [
            f"keep_top_p keeps {counted(count, 'token')} with {total:.3f} together, less than top_p {cut.value:g}: "
            f"the token that crosses it, {name_of(count)}, is cut."
        ]
    if without_last >= cut.value + _SLACK:
        right = int((cut.before.cumsum(-1) < cut.value).sum()) + 1
        return [f"keep_top_p keeps {counted(count, 'token')}; the first {right} reach top_p {cut.value:g} already."]
    return []


def _doubts_about_min_p(cut: Cut, name_of: Callable[[int], str]) -> list[str]:
    least = cut.value * float(cut.before[0])
    kept_small = (cut.kept & (cut.before < least - _SLACK)).nonzero().flatten().tolist()
    cut_large = (~cut.kept & (cut.before > least + _SLACK)).nonzero().flatten().tolist()
    said = []
    for places, verb in ((kept_small, "keeps"), (cut_large, "cuts")):
        if places:
            said.append(
                f"keep_min_p {verb} {name_of(places[0])} with {float(cut.before[places[0]]):.3f}; the limit is "
                f"{cut.value:g} x {float(cut.before[0]):.3f} = {least:.3f}{_more(len(places) - 1)}."
            )
    return said


def _difference(own: Tensor, final: Tensor, name_of: Callable[[int], str]) -> list[str]:
    """Where `sampling.distribution` is not what its stages give one after the other."""
    said = []
    if abs(float(own.sum()) - 1) > 1e-3:
        said.append(f"The probabilities of sampling.distribution add up to {float(own.sum()):.3f}, not to 1.")
    away = (own - final).abs()
    if not away.max() <= 1e-3:
        place = int(away.nan_to_num(nan=torch.inf).argmax())
        said.append(
            f"sampling.distribution gives {name_of(place)} {float(own[place]):.3f}; "
            f"its stages one after the other give {float(final[place]):.3f}."
        )
    return said


def _more(count: int) -> str:
    return f" ({count:,} more like this)" if count > 0 else ""


def gained_and_lost(now: Stages, before: Stages) -> tuple[list[int], list[int]]:
    """Token ids that can be drawn now and could not before, and the other way round; the most probable first."""
    new, old = _kept_ids(now), _kept_ids(before)
    known, held = set(old), set(new)
    return [index for index in new if index not in known], [index for index in old if index not in held]


def _kept_ids(stages: Stages) -> Sequence[int]:
    return stages.ids[stages.kept].tolist()
