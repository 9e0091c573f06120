"""Chapter 5's checks of draws, temperature, filters, penalties and streams reject wrong solutions, and call the likely
mistakes by their names."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course.exercises import drawing_checks, filter_checks

_SUMS = "cumulative = probabilities.double().cumsum(dim=-1)"
_TARGETS = "targets = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]"
_SEARCH = "drawn = torch.searchsorted(cumulative, targets, right=True)"
_MINIMUM = "return torch.minimum(drawn, last).squeeze(-1)"
_SHARES = "cumulative = (probabilities.double() / probabilities.double().sum(-1, keepdim=True)).cumsum(dim=-1)"
_GUMBEL = "return (logits - (-uniforms.clamp(min=smallest).log()).log()).argmax(dim=-1)"
_CLAMPED = "uniforms.clamp(min=smallest)"
_NOISE = f"(-{_CLAMPED}.log()).log()"
_LIFTS = ("1e-6", "1e-7", "1e-9", "1e-10", "torch.finfo(uniforms.dtype).eps")
_OFF = "(logits - logits.amax(dim=-1, keepdim=True))"
_DIVISORS = "divisors = temperatures.clamp(min=limits.tiny, max=limits.max).to(logits)"
_HEAT = f"return {_OFF} / divisors.unsqueeze(-1)"
_FIRST_K = "(places < top_k.unsqueeze(-1))"
_K = f"return {_FIRST_K} | (top_k == 0).unsqueeze(-1)"
_KTH = "ranked.gather(-1, (top_k - 1).clamp(0, ranked.shape[-1] - 1).unsqueeze(-1))"
_BEFORE = "before = torch.nn.functional.pad(ranked.cumsum(dim=-1), (1, -1))"
_P = "return before < top_p.unsqueeze(-1)"
_REPELLED = "repelled = torch.where(logits > 0, logits / factor, logits * factor)"
_CHOSEN = "logits = torch.where(seen, repelled, logits)"
_TAKEN = "return logits - presence.unsqueeze(-1) * (counts > 0) - frequency.unsqueeze(-1) * counts"
_TAKE = "torch.rand(1, generator=stream, dtype=torch.float64)"
_STREAMS = f"return torch.cat([{_TAKE} for stream in streams])"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "5.1": [
        ("right=True", "right=False", "must exceed it"),
        (_SEARCH, "drawn = (cumulative < targets).sum(-1, keepdim=True)", "must exceed it"),
        (" * cumulative[:, -1:]\n", "\n", "a row need not add up to 1"),
        (_MINIMUM, f"{_MINIMUM} * 0 + (cumulative > uniforms.unsqueeze(-1)).int().argmax(-1)",
         "a row need not add up to 1"),
        (f"{_TARGETS}\n    {_SEARCH}", "drawn = torch.searchsorted(cumulative, uniforms.unsqueeze(-1), right=True)\n"
         "    return drawn.squeeze(-1)", "a row need not add up to 1"),
        ("* cumulative[:, -1:]", "* cumulative[:, -1].sum()", "all rows are scaled by one sum"),
        ("* cumulative[:, -1:]", "* cumulative[0, -1]", "the sum of the first"),
        ("uniforms.to(cumulative)", "uniforms[0].expand(len(uniforms))", "the first number is used for all"),
        (_SEARCH, "return (cumulative <= uniforms * cumulative[:, -1:]).sum(-1)", "make a column of them"),
        (_SEARCH, "return (cumulative > uniforms * cumulative[:, -1:]).int().argmax(-1)", "make a column of them"),
        (_TARGETS, "targets = uniforms", "make a column [rows, 1]"),
        (f"{_SUMS}\n    {_TARGETS}\n    {_SEARCH}", f"{_SHARES}\n"
         "    return torch.searchsorted(cumulative, uniforms.unsqueeze(-1), right=True).squeeze(-1)",
         "the last column that has any probability"),
        (f"{_SUMS}\n    {_TARGETS}\n    {_SEARCH}", f"{_SHARES}\n"
         "    return (cumulative > uniforms.unsqueeze(-1)).int().argmax(-1)",
         "the last column that has any probability"),
        (f"{_SUMS}\n    {_TARGETS}\n    {_SEARCH}", f"{_SHARES}\n    drawn = (cumulative <= uniforms.unsqueeze(-1))\n"
         "    return drawn.sum(-1).clamp(max=probabilities.shape[-1] - 1)", "the last column that has any probability"),
        ("probabilities.double().cumsum(dim=-1)", "probabilities.cumsum(dim=-1)", "make them float64"),
        ("probabilities.double().cumsum(dim=-1)", "probabilities.cumsum(dim=-1).double()", "make them float64"),
        (f"{_SUMS}\n    {_TARGETS}", "shares = probabilities / probabilities.sum(-1, keepdim=True)\n"
         "    cumulative, targets = shares.double().cumsum(-1), uniforms.unsqueeze(-1)", "make them float64"),
        (_MINIMUM, "return probabilities.argmax(-1)", "the most probable column"),
        (_SUMS, "cumulative = probabilities.double().sort(descending=True).values.cumsum(dim=-1)",
         "in order of probability"),
        (_SUMS, "cumulative = probabilities.double().softmax(-1).cumsum(dim=-1)", "a softmax of the probabilities"),
        (f"{_SUMS}\n    {_TARGETS}\n    {_SEARCH}", "cumulative = probabilities.double().cumsum(dim=0)\n"
         f"    {_TARGETS}\n    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)",
         "along each row"),
        (_MINIMUM, f"{_MINIMUM} + 1", "the column after"),
        (_MINIMUM, f"{_MINIMUM} - 1", "the column before"),
        (_MINIMUM, "return torch.multinomial(probabilities, 1).squeeze(-1)", "no random numbers of your own"),
        (_SEARCH, "drawn = torch.searchsorted(cumulative, torch.rand_like(targets) * cumulative[:, -1:], right=True)",
         "no random numbers of your own"),
        (_MINIMUM, "return torch.minimum(drawn, last) * 0", "a column comes back"),
        (_MINIMUM, "return torch.minimum(drawn, last)", "a column comes back"),
        (_MINIMUM, "return int(drawn[0])", "a single number comes back"),
        (_SUMS, "drawn = []\n    for row, number in zip(probabilities, uniforms):\n        total = 0\n"
         "        for column, one in enumerate(row):\n            total += one\n"
         "            if total > number:\n                drawn.append(column)\n                break\n"
         f"    return torch.tensor(drawn)\n    {_SUMS}", "a row need not add up to 1"),
        (_MINIMUM, f"{_MINIMUM}.int()", "the dtype is not"),
        (_MINIMUM, f"{_MINIMUM}.tolist()", "a list"),
        (_SUMS, "cumulative = probabilities.cumsum_(-1).double()", "in place"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "5.2": [
        ("(-uniforms.clamp(min=smallest).log()).log()", f"{_CLAMPED}.log()", "one logarithm"),
        ("logits - (-uniforms.clamp(min=smallest).log()).log()", f"logits + {_CLAMPED}.log()", "one logarithm"),
        ("logits -", "logits +", "a sign is wrong"),
        ("(-uniforms.clamp(min=smallest).log()).log()", f"{_CLAMPED}.log().log()", "a minus goes between"),
        (_CLAMPED, "uniforms", "a uniform of 0"),
        (_CLAMPED, "uniforms.float().clamp(min=torch.finfo(torch.float32).tiny)", "brought to float32"),
        *((_NOISE, f"(-(uniforms + {small}).log()).log()", "to 1 or above") for small in _LIFTS),
        *((_NOISE, f"(-(uniforms + {small}).log() + {small}).log()", words)
          for small, words in zip(_LIFTS, ("to 1 or above", *["add nothing"] * 4), strict=True)),
        *((_NOISE, f"(-{_CLAMPED}.log() + {small}).log()", "smaller still") for small in (1e-6, 1e-9, 1e-10)),
        *((_NOISE, f"(-uniforms.log() + {small}).log()", "a uniform of 0 has no finite") for small in (1e-6, 1e-20)),
        *((_NOISE, f"(-{raised}.log()).log()", "far more than the smallest positive number")
          for raised in ("(uniforms + 1e-20)", "(uniforms + 1e-30)", "uniforms.clamp(min=1e-20)",
                         "uniforms.clamp(min=1e-9)", "uniforms.clamp(min=1e-6)")),
        ("argmax", "argmin", "the smallest is taken"),
        ("(logits -", "(logits.softmax(-1) -", "the softmax of the logits"),
        ("(logits -", "(logits.exp() -", "e**logit"),
        ("(logits -", "(0 -", "the logits play no part"),
        ("logits - ", "logits * -", "multiplied by the numbers"),
        ("logits - ", "logits / -", "divided by the numbers"),
        (_GUMBEL, f"return (logits / -{_CLAMPED}.log()).argmax(-1)", "divided by -log(u)"),
        (_GUMBEL, "return (logits + uniforms).argmax(-1)", "added as they are"),
        (_GUMBEL, "return logits.argmax(-1)", "the numbers play no part"),
        ("uniforms.clamp(", "uniforms[:, :1].clamp(", "the numbers play no part"),
        ("uniforms.clamp(", "uniforms[:1].clamp(", "the first row's numbers"),
        ("argmax(dim=-1)", "argmax(dim=0)", "of each column"),
        ("argmax(dim=-1)", "argmax()", "one token for all rows"),
        ("argmax(dim=-1)", "max(dim=-1)[0]", "where they are"),
        ("uniforms.clamp(", "torch.rand_like(uniforms).clamp(", "no random numbers of your own"),
        (_GUMBEL, "return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)", "no random numbers of your own"),
        ("argmax(dim=-1)", "max(dim=-1)", "values and indices"),
        ("uniforms.clamp(", "uniforms.clamp_(", "in place"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "5.3": [
        (" / divisors", " * divisors", "multiplied by the temperature"),
        (_OFF, "logits", "not taken off first"),
        (f"return {_OFF} / divisors.unsqueeze(-1)", f"return ({_OFF} / divisors.unsqueeze(-1)).softmax(-1)",
         "this is the softmax"),
        (f"return {_OFF} / divisors.unsqueeze(-1)", f"return ({_OFF} / divisors.unsqueeze(-1)).log_softmax(-1)",
         "the logarithm of the softmax"),
        ("divisors.unsqueeze(-1)", "divisors[0]", "the first row is used for all"),
        ("divisors.unsqueeze(-1)", "divisors", "make a column of them"),
        ("logits.amax(dim=-1, keepdim=True)", "logits.max()", "of the whole tensor"),
        ("logits.amax(dim=-1, keepdim=True)", "logits.amax(dim=0, keepdim=True)", "of each column"),
        ("logits.amax(dim=-1, keepdim=True)", "logits.amin(dim=-1, keepdim=True)", "the smallest"),
        ("logits.amax(dim=-1, keepdim=True)", "logits.mean(dim=-1, keepdim=True)", "the mean"),
        ("logits.amax(dim=-1, keepdim=True)", "logits.max(dim=-1, keepdim=True)", "values and indices"),
        ("keepdim=True", "keepdim=False", "without keepdim"),
        (f"{_DIVISORS}\n    {_HEAT}", "return logits / temperatures", "not taken off first"),
        (f"{_DIVISORS}\n    {_HEAT}", "return (logits - logits.max()) / temperatures.unsqueeze(-1)",
         "of the whole tensor"),
        (".clamp(min=limits.tiny, max=limits.max)", "", "smallest and largest normal number"),
        (".clamp(min=limits.tiny, max=limits.max)", ".clamp(min=limits.tiny)", "-inf / inf is NaN"),
        (".clamp(min=limits.tiny, max=limits.max)", ".clamp(max=limits.max)", "0 / 0 is NaN"),
        ("min=limits.tiny", "min=1e-6", "below 1e-06 count as"),
        ("min=limits.tiny", "min=1e-3", "below 0.001 count as"),
        (_DIVISORS, "divisors = temperatures.to(logits) + 1e-8", "small ones are lost in it"),
        (_HEAT, "scaled = logits / divisors.unsqueeze(-1)\n    return scaled - scaled.amax(-1, keepdim=True)",
         "off after the division"),
        (_HEAT, "return logits / divisors.unsqueeze(-1) - logits.amax(-1, keepdim=True)", "the undivided largest"),
        (".to(logits)", "", "the dtype of the temperatures"),
        (_HEAT, "logits -= logits.amax(-1, keepdim=True)\n    return logits / divisors.unsqueeze(-1)", "in place"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "5.4": [
        (" | (top_k == 0).unsqueeze(-1)", "", "keeps nothing"),
        (_K, "return places < top_k.clamp(min=1).unsqueeze(-1)", "keeps one candidate"),
        ("places <", "places <=", "one candidate too many"),
        ("places <", "places + 1 <", "one candidate too few"),
        ("places < top_k", "places < (top_k * (top_k <= ranked.shape[-1]))", "beyond the candidates"),
        (_K, "return (places < top_k[:1]) | (top_k[:1] == 0) | torch.zeros_like(ranked, dtype=torch.bool)",
         "the first row is used for all"),
        (_K, "top_k = top_k.max()\n    return (places < top_k) | (top_k == 0) | torch.zeros_like(ranked).bool()",
         "the largest k"),
        (_K, "top_k = torch.where(top_k == 0, ranked.shape[-1], top_k)\n    return places.expand_as(ranked) < top_k",
         "make a column of them"),
        (_FIRST_K, f"(ranked >= {_KTH})", "the places decide"),
        (_FIRST_K, f"(ranked > {_KTH})", ""),
        ("places <", "ranked.shape[-1] - 1 - places <", "the last k stay"),
        (_K, "return (places >= top_k.unsqueeze(-1)) & (top_k > 0).unsqueeze(-1)", "True and False are exchanged"),
        (_K, f"{_K} & (ranked > 0)", ""),
        (_FIRST_K, f"({_FIRST_K} & (ranked > 0))", "probability 0 are cut as well"),
        (_K, f"kept = {_K[7:]}\n    return ranked * kept", "True or False for each candidate"),
        (_K, f"{_K[:7]}({_K[7:]}).int()", "the dtype is not"),
        (_K, "return torch.stack([row >= row[k - 1] for row, k in zip(ranked, top_k)])", "k may be 0"),
        (_K, "return ranked >= ranked.topk(int(top_k.max()), dim=-1).values[:, -1:]", "k may be 0"),
        (_K, "return places < top_k", "one row comes back"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "5.5": [
        (_BEFORE, "before = ranked.cumsum(dim=-1)", "the candidate that crosses p is dropped"),
        (f"{_BEFORE}\n    {_P}", "return ranked.cumsum(dim=-1) <= top_p.unsqueeze(-1)",
         "the candidate that crosses p is dropped"),
        (f"{_BEFORE}\n    {_P}", "kept = ranked.cumsum(dim=-1) <= top_p.unsqueeze(-1)\n    kept[:, 0] = True\n"
         "    return kept", "does not mend it"),
        (f"{_BEFORE}\n    {_P}", "kept = ranked.cumsum(dim=-1) < top_p.unsqueeze(-1)\n    kept[:, 0] = True\n"
         "    return kept", "does not mend it"),
        (f"{_BEFORE}\n    {_P}", "keep = ranked.cumsum(dim=-1) < top_p.unsqueeze(-1)\n    keep[0] = True\n"
         "    return keep", "[0] is the whole first row"),
        (f"{_BEFORE}\n    {_P}", "keep = ranked.cumsum(dim=-1) <= top_p.unsqueeze(-1)\n    keep[0] = True\n"
         "    return keep", "[0] is the whole first row"),
        (_P, "keep = before < top_p.unsqueeze(-1)\n    keep[0] = True\n    return keep",
         "[0] is the whole first row"),
        ("before <", "before <=", "have reached p"),
        ("(1, -1)", "(2, -2)", "one candidate too many"),
        (_BEFORE, "before = ranked.cumsum(dim=-1).roll(1, -1)", "roll brings"),
        (_BEFORE, "before = ranked.cumsum(dim=-1).roll(1)", "roll"),
        (_BEFORE, f"ranked = ranked / ranked.sum(-1, keepdim=True)\n    {_BEFORE}", "scaled to a sum of 1"),
        ("top_p.unsqueeze(-1)", "top_p[0]", "the first row is used for all"),
        ("top_p.unsqueeze(-1)", "top_p", "make a column of them"),
        (_BEFORE, "before = ranked.cumsum(dim=0)", "down the columns"),
        ("before <", "before >=", "True and False are exchanged"),
        ("before <", "before >", "True and False are exchanged"),
        (_BEFORE, "before = ranked.flip(-1).cumsum(-1).flip(-1)", "begin at the end"),
        ("top_p.unsqueeze(-1)", "1 - top_p.unsqueeze(-1)", "1 - p"),
        (_P, "return ranked >= top_p.unsqueeze(-1)", "by itself"),
        (_P, "return ranked >= top_p.unsqueeze(-1) * ranked[:, :1]", "min-p"),
        (_BEFORE, _BEFORE.replace("ranked", "ranked.softmax(-1)"), "a softmax of the probabilities"),
        (_P, "return ranked * (before < top_p.unsqueeze(-1))", "True or False for each candidate"),
        ("ranked.cumsum(dim=-1)", "ranked.cumsum_(dim=-1)", "in place"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "5.6": [
        (_REPELLED, "repelled = logits / factor", "a negative logit is divided"),
        (_REPELLED, "repelled = logits * factor", "a positive logit is multiplied"),
        ("logits > 0", "logits < 0", "the wrong way round"),
        ("factor = repetition.unsqueeze(-1)", "factor = repetition.unsqueeze(-1) ** counts", "once for each time"),
        ("factor = repetition.unsqueeze(-1)", "factor = repetition.unsqueeze(-1) ** counts.clamp(min=1)",
         "once for each time"),
        (_REPELLED, "repelled = logits - factor", "it is a factor"),
        ("logits * factor", "logits", "negative logits are left"),
        (_CHOSEN, "logits = repelled", "applied to all tokens"),
        ("where(seen,", "where(~seen,", "what was not seen"),
        ("where(seen,", "where(counts > 0,", "the answer alone; what stands in the prompt"),
        (f"{_REPELLED}\n    {_CHOSEN}", "logits = torch.where(seen & (logits > 0), logits / factor, logits * factor)",
         "there are three kinds"),
        (f"{_REPELLED}\n    {_CHOSEN}", "logits = torch.where(seen & (logits < 0), logits * factor, logits / factor)",
         "there are three kinds"),
        (_CHOSEN, "logits = repelled * seen + logits * ~seen", "NaN of -inf"),
        ("(counts > 0)", "seen", "presence counts the prompt"),
        ("(counts > 0)", "counts", "presence is taken off for each time"),
        (" * (counts > 0)", "", "presence is taken off all"),
        ("(counts > 0)", "(counts > 1)", "more than once"),
        ("* counts", "* (counts > 0)", "frequency is taken off once"),
        ("* counts", "* seen", "frequency counts the prompt"),
        ("* counts", "* counts / counts.sum(-1, keepdim=True).clamp(min=1)", "a share of the answer"),
        (_TAKEN, _TAKEN.replace("presence", "other").replace("frequency", "presence").replace("other", "frequency"),
         "are exchanged"),
        (_TAKEN, _TAKEN.replace(" - ", " + "), "presence and frequency are added"),
        ("- presence", "+ presence", "presence is added"),
        ("- frequency", "+ frequency", "frequency is added"),
        (" - presence.unsqueeze(-1) * (counts > 0)", "", "`presence` plays no part"),
        (" - frequency.unsqueeze(-1) * counts", "", "`frequency` plays no part"),
        (f"    {_CHOSEN}\n", "", "`repetition` plays no part"),
        (f"    {_REPELLED}\n    {_CHOSEN}\n", "", "`repetition` plays no part"),
        (_TAKEN, f"""logits = logits - presence.unsqueeze(-1) * (counts > 0) - frequency.unsqueeze(-1) * counts
    {_REPELLED}
    return torch.where(seen, repelled, logits)""", ""),
        (f"{_REPELLED}\n    {_CHOSEN}\n    {_TAKEN}", f"""logits = {_TAKEN[7:]}
    {_REPELLED}
    return torch.where(seen, repelled, logits)""", "presence and frequency come first"),
        ("factor = repetition.unsqueeze(-1)",
         "factor, presence, frequency = repetition[0], presence[:1], frequency[:1]",
         "the first row are used for all"),
        ("factor = repetition.unsqueeze(-1)", "factor = repetition", ""),
        (_CHOSEN, "logits[seen] = repelled[seen]", "in place"),
        (f"{_REPELLED}\n    {_CHOSEN}", "logits[logits > 0] /= 2", "in place"),
        ("    return logits", "    logits", "`return` is missing"),
    ],
    "5.7": [
        ("generator=stream,", "generator=streams[0],", "the first stream gives"),
        ("generator=stream,", "generator=streams[-1],", "the last stream gives"),
        (_STREAMS, f"return {_TAKE.replace('stream,', 'streams[0],')}.expand(len(streams))", "the first stream"),
        (_STREAMS, f"return {_TAKE.replace('1, ', 'len(streams), ').replace('stream,', 'streams[0],')}",
         "the first stream gives"),
        ("torch.rand(1, generator=stream, dtype=torch.float64)",
         "torch.rand(2, generator=stream, dtype=torch.float64)[:1]", "two numbers are taken"),
        ("torch.rand(1, generator=stream, dtype=torch.float64)",
         "torch.rand(2, generator=stream, dtype=torch.float64)[1:]", "two numbers are taken"),
        ("torch.rand(1,", "torch.rand(2,", "two numbers are taken"),
        (_TAKE, "torch.rand(len(streams), generator=stream, dtype=torch.float64)[:1]", "as many numbers"),
        (", dtype=torch.float64", "", "float32 has too few digits"),
        (", dtype=torch.float64)", ").double()", "float32 has too few digits"),
        (_STREAMS, f"return torch.tensor([{_TAKE}.item() for stream in streams])", "rounded to float32"),
        ("generator=stream,", "generator=stream.manual_seed(stream.initial_seed()),", "begin anew"),
        ("generator=stream,", "generator=torch.Generator().manual_seed(stream.initial_seed()),", "come from copies"),
        ("generator=stream,", "generator=stream.clone_state(),", "come from copies"),
        ("torch.rand(", "torch.randn(", "normally distributed"),
        (_STREAMS, "return torch.rand(len(streams), dtype=torch.float64)", "torch's own generator"),
        ("generator=stream, ", "", "torch's own generator"),
        ("for stream in streams", "for stream in reversed(streams)", "in another order"),
        (_STREAMS, f"{_STREAMS}.sort().values", "in another order"),
        ("torch.cat(", "list(", "a list comes back"),
        ("torch.cat(", "torch.stack(", "in another shape"),
        (_STREAMS, "return torch.rand(len(streams), generator=streams, dtype=torch.float64)", "takes one generator"),
        ("    return ", "    ", "`return` is missing"),
    ],
}  # fmt: skip


def shown_cases(check) -> list[str]:
    """The words of the cases that a check hands out, as learners read them."""
    texts = []

    def watched(function, oracle, cases, **settings):
        texts.extend(case.text for case in cases)
        raise StopIteration

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(f"{check.__module__}.compare", watched)
        check(lambda *arguments: None)
    return texts


def test_a_case_stands_by_itself_and_shows_tensors_with_all_their_brackets():
    draws = shown_cases(drawing_checks.check_draw)
    assert not [text for text in draws if "the same" in text]
    assert "40 random rows of 12 in float64, the last 3 columns 0, each uniform the largest number below 1" in draws
    penalties = shown_cases(filter_checks.check_apply_penalties)
    assert penalties[0] == "logits [[2]], seen [[True]], counts [[0]], repetition [2]"
    assert penalties[2] == ("logits [[2, 2]], seen [[False, True]], counts [[0, 0]], repetition [2]")
    assert "repetition [1.5, 1], presence [0, 1], frequency [0, 0.25]" in penalties[13]
