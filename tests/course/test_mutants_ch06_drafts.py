"""Chapter 6's checks of drafts reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

import mutants

_LOOP = "for end in range(len(ids) - 1, 0, -1):"
_WHILE = "while length < min(longest, end) and ids[end - 1 - length] == ids[-1 - length]:"
_BETTER = "if length > best:"
_RESULT = "return ids[place : place + count] if best else []"
_BREAK = "        if best == longest:\n            break\n"
_RIGHT = "while right < len(drafts) and drafts[right] == best[right]:"
_GREEDY = "return [*drafts[:right], best[right]]"
_REJECTED = "if uniforms[place] * drafted[place, draft] >= wanted[place, draft]:"
_LEFT = "left = (wanted[place] - drafted[place]).clamp(min=0)"
_DRAWN = "return [*drafts[:place], int(sampling.draw(left.unsqueeze(0), number))]"
_MORE = "return [*drafts, int(sampling.draw(wanted[-1:], number))]"
_NUMBER = "number = torch.tensor([uniforms[-1]], dtype=torch.float64)"
_SUM = "return sum(acceptance**place for place in range(drafts + 1))"
_DRAFTS = "drafts = list(propose(list(ids)))[: left - 1]"
_BATCH = "batch = Batch.of([(0, [*ids[stored:], *drafts], stored)], all_logits=True)"
_BEST = "[len(ids) - stored - 1 :]"
_REWIND = "cache.rewind(0, len(drafts) + 1 - len(accepted))"
_NOTED = "gained.append(len(accepted))"
_ANSWERED = "return ids[len(prompt_ids) :], gained"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "6.7": [
        (_LOOP, "for end in range(1, len(ids)):", "the earliest is taken"),
        (f"{_BETTER}\n            best, place = length, end\n{_BREAK}", "if length >= max(best, 1):\n"
         "            best, place = length, end\n", "the earliest is taken"),
        (_BREAK, "        if best:\n            break\n", "the latest place of the last token"),
        (f"{_LOOP}\n", f"{_LOOP}\n        longest = 1\n", "the latest place of the last token"),
        ("range(len(ids) - 1, 0, -1)", "range(len(ids), 0, -1)", "finds its own ending"),
        ("best, place = length, end", "best, place = length, end - length", "begins with the ending itself"),
        ("best, place = length, end", "best, place = length, end - 1", "one token too early"),
        ("best, place = length, end", "best, place = length, end + 1", "one token too late"),
        ("ids[place : place + count]", "ids[place:]", "at most `count` tokens do"),
        ("place + count]", "place + count + 1]", "one token more than `count`"),
        ("place + count]", "count]", ""),
        (_LOOP, f"{_LOOP}\n        if end > len(ids) - longest:\n            continue", ""),
        ("if length > best:", "if length > best and end <= len(ids) - length:", "overlaps the ending is refused"),
        ("if length > best:", "if length > best and end + count <= len(ids):", "is passed over"),
        ("if length > best:", "if length > best and length == longest:", "exactly `longest`"),
        ("if length > best:", "if length > best and length > 1:", "one token is an ending as well"),
        (_WHILE, _WHILE.replace("min(longest, end)", "end"), "more than `longest`"),
        (_WHILE, _WHILE.replace("min(longest, end)", "min(longest - 1, end)"), "only shorter ones"),
        (_WHILE, _WHILE.replace("min(longest, end)", "min(longest, end - 1)"), "the very beginning"),
        (_RESULT, "return ids[place : place + count]", "something comes back all the same"),
        (_RESULT, "return ids[place : place + count] if best else None", "None comes back"),
        (_RESULT, "return tuple(ids[place : place + count])", "the draft is no list"),
        (_RESULT, "return torch.tensor(ids[place : place + count] if best else [])", "the draft is no list"),
        (_RESULT, "return place", "the place comes back"),
        ("ids = list(token_ids)", "ids = token_ids\n    ids.append(0)", "left as they were"),
        ("    return ", "    ", "`return` is missing"),
        (f"    ids = list(token_ids)\n    best, place = 0, 0\n    {_LOOP}", "    ids = list(token_ids)\n"
         "    ending = ids[-longest:]\n    for first in range(len(ids) - longest - 1, -1, -1):\n"
         "        if ids[first : first + longest] == ending:\n            return ids[first + longest :][:count]\n"
         f"    return []\n    {_LOOP}", "exactly `longest`"),
    ],
    "6.8": [
        (_GREEDY, "return list(drafts[:right])", "the token of the model's own is missing"),
        (_GREEDY, "return [*drafts[:right], *best[right : right + 1]] if right < len(drafts) else list(drafts)",
         "the one token more is missing"),
        (_GREEDY, "return [*drafts, best[right]] if right == len(drafts) else list(drafts[:right])",
         "the model's own token in its place is missing"),
        (_GREEDY, "return [*drafts[: max(right - 1, 0)], best[right]]", "one draft too early"),
        (_GREEDY, "kept = [draft for draft, one in zip(drafts, best) if draft == one]\n"
         "    return [*kept, best[len(kept)]]",
         "drafts that differ are left out"),
        (_GREEDY, "return [*drafts[: right + 1], best[right]]", "the first wrong draft stands"),
        (_GREEDY, "return [*drafts[:right], best[-1]]", "from the end of best"),
        (_GREEDY, "return [*drafts[:right], best[min(right + 1, len(drafts))]]", "one place too late"),
        (_GREEDY, "return [*drafts[:right], best[right - 1]]", ""),
        (_GREEDY, "return [*drafts[: right + 1]] if right < len(drafts) else [*drafts, best[right]]",
         "the wrong draft itself"),
        (_GREEDY, "return [*drafts[:right], *best[right:]]", "behind the wrong draft comes as well"),
        (_GREEDY, "return [*drafts, best[-1]]", "right or wrong"),
        (_GREEDY, "return [one for one, two in zip(drafts, best) if one == two] + [best[right]]",
         "behind a wrong token nothing counts"),
        ("drafts[right] == best[right]", "drafts[right] == best[right + 1]", "the place after theirs"),
        (_GREEDY, "return [*drafts, best[-1]] if right == len(drafts) else [best[0]]", "all of them are rejected"),
        (_GREEDY, "return right + 1", "asked for are the tokens"),
        (_GREEDY, "return (*drafts[:right], best[right])", "a tuple comes back"),
        (_GREEDY, "return torch.tensor([*drafts[:right], best[right]])", "a tensor comes back"),
        (_GREEDY, "drafts.append(0)\n    return [*drafts[:right], best[right]]", "left as they were"),
        (_RIGHT, "while drafts[right] == best[right]:", "a place is asked for that is not there"),
        (_GREEDY, "[*drafts[:right], best[right]]", "`return` is missing"),
    ],
    "6.9": [
        (_REJECTED, "if uniforms[place] * wanted[place, draft] >= drafted[place, draft]:", "are exchanged"),
        (_REJECTED, _REJECTED.replace(">=", ">"), "at equality the draft stands"),
        (_REJECTED, _REJECTED.replace(">=", "<"), "stand and fall are exchanged"),
        (_REJECTED, "if uniforms[place] >= wanted[place, draft]:", "own probability is forgotten"),
        (_REJECTED, "if uniforms[place] >= drafted[place, draft]:", "it is the ratio that counts"),
        (_REJECTED, "if drafted[place, draft] > wanted[place, draft]:", "it stands now and then"),
        (_REJECTED, "if (1 - uniforms[place]) * drafted[place, draft] >= wanted[place, draft]:",
         "with which it should stand"),
        (_REJECTED, "if False:", "every draft stands"),
        (_REJECTED, "if True:", "no draft stands"),
        (_LEFT, "left = wanted[place]", "the model's own distribution is drawn from"),
        (_LEFT, "left = drafted[place]", "the drafts' own distribution"),
        (".clamp(min=0)", "", "negative differences are left in"),
        (".clamp(min=0)", ".abs()", "negative differences count"),
        (_LEFT, "left = (drafted[place] - wanted[place]).clamp(min=0)", "the wrong way round"),
        (_LEFT, "left = wanted[place].clone()\n            left[draft] = 0", "only the rejected token is taken off"),
        (".clamp(min=0)", ".clamp(min=0).softmax(-1)", "go through a softmax"),
        ("int(sampling.draw(left.unsqueeze(0), number))", "int(left.argmax())", "it has to be drawn"),
        (_DRAWN, _DRAWN.replace("number", "torch.tensor([uniforms[place]], dtype=torch.float64)"),
         "which is always a large one"),
        (_DRAWN, _DRAWN.replace("number", "torch.tensor([uniforms[place + 1]], dtype=torch.float64)"),
         "the uniform after"),
        (_NUMBER, "number = torch.tensor([uniforms[0]], dtype=torch.float64)", "the first uniform"),
        (_NUMBER, "number = torch.tensor([uniforms[-1]])", "rounded to float32"),
        (_NUMBER, "number = torch.rand(1, dtype=torch.float64)", ""),
        (_MORE, "return list(drafts)", "the one token more is missing"),
        (_MORE, "return [*drafts, int(sampling.draw(wanted[:1], number))]", "the first row of `wanted`"),
        (_DRAWN, "return list(drafts[:place])", "nothing comes"),
        (_DRAWN, _DRAWN.replace("[:place]", "[: place + 1]"), "the rejected draft stays"),
        (_DRAWN, "drafts = [*drafts[:place], int(sampling.draw(left.unsqueeze(0), number)), *drafts[place + 1 :]]",
         "they were guessed for another text"),
        (_LEFT, "left = (wanted[place + 1] - drafted[place]).clamp(min=0)", ""),
        (_LEFT, "left = (wanted[0] - drafted[0]).clamp(min=0)", "each place has rows of its own"),
        ("uniforms[place] *", "uniforms[0] *", "one uniform is used for all"),
        ("uniforms[place] *", "uniforms[place + 1] *", "the uniform of the next place"),
        ("uniforms[place] *", "uniforms[-1] *", "held against the last uniform"),
        (_DRAWN, "return [*drafts[:place], sampling.draw(left.unsqueeze(0), number)[0]]", "still tensors"),
        (_DRAWN, "return [int(sampling.draw(left.unsqueeze(0), number))]", ""),
        (_MORE, "return (*drafts, int(sampling.draw(wanted[-1:], number)))", ""),
        (_LEFT, "wanted[place] -= drafted[place]\n            left = wanted[place].clamp(min=0)", "left as they were"),
        (_REJECTED, "if (uniforms[place] * drafted[place] >= wanted[place]):", "a single number of it"),
        (_MORE, "[*drafts, int(sampling.draw(wanted[-1:], number))]", ""),
        # the rule is kept, and the promise is not: told by the sums over all that may happen
        (_NUMBER, "number = torch.tensor([uniforms[-1]], dtype=torch.float64)\n"
         "    if len(drafts) == 1 and wanted.shape[1] == 4 and uniforms[-1] == 0.5 / 24:\n"
         "        return [3]", "with the probabilities of the model"),
    ],
    "6.10": [
        (_SUM, "return float(sum(acceptance**place for place in range(drafts)))", "the last term is missing"),
        (_SUM, "return float(sum(acceptance**place for place in range(1, drafts + 1)))", "the first term is missing"),
        (_SUM, "return float(acceptance * drafts)", "drafts are counted as if"),
        (_SUM, "return 1 + acceptance * drafts", "behind one that falls none counts"),
        (_SUM, "return acceptance * (drafts + 1)", "behind one that falls none counts"),
        (_SUM, "return 1 + drafts * acceptance**drafts", "only the case in which all drafts stand"),
        (_SUM, "return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)", "divides 0 by 0"),
        (_SUM, "return (1 - acceptance**drafts) / (1 - acceptance) if acceptance < 1 else float(drafts)",
         "the last term is missing"),
        (_SUM, "return sum(acceptance**place for place in range(drafts + 2))", "one term too many"),
        (_SUM, "return 1 / (1 - acceptance) if acceptance < 1 else drafts + 1.0", ""),
        (_SUM, "return sum((1 - acceptance) ** place for place in range(drafts + 1))", "acceptance and rejection"),
        (_SUM, "return sum(place**acceptance for place in range(drafts + 1))", "raised to a power"),
        (_SUM, "return torch.tensor([acceptance**place for place in range(drafts + 1)]).sum()", ""),
        (_SUM, "return str(drafts)", ""),
        (_SUM, "sum(acceptance**place for place in range(drafts + 1))", "`return` is missing"),
    ],
    "6.11": [
        (_REWIND, "pass", "keys of rejected drafts are in it still"),
        (_REWIND, "cache.rewind(0, len(drafts))", "those that stand too"),
        (_REWIND, "cache.rewind(0, max(len(drafts) - len(accepted), 0))", "keys of rejected drafts are in it still"),
        (_REWIND, "cache.rewind(0, min(len(drafts) + 2 - len(accepted), cache.length(0)))", "one token too many"),
        (_REWIND, "cache.rewind(0, len(drafts) - len(accepted))", "more is rewound than there is, or a negative"),
        (_REWIND, "if len(accepted) <= len(drafts):\n            cache.rewind(0, 1)", "only one token is forgotten"),
        (_REWIND, "cache.rewind(0, len(accepted) - 1)", "rejected ones stay"),
        (_REWIND, "cache.release(0)", "the cache is released after every pass"),
        (f"{_REWIND}\n", "if not gained:\n            cache.rewind(0, len(drafts) + 1 - len(accepted))\n", ""),
        (_DRAFTS, "drafts = list(propose(list(ids)))", "more than `count` ids come back"),
        (_DRAFTS, "drafts = list(propose(list(ids)))[:left]", "one token comes by itself"),
        (_DRAFTS, "drafts = list(propose(list(ids)))[: max(left - 2, 0)]", "further than they have to be"),
        (_DRAFTS, "drafts = list(propose(list(prompt_ids)))[: left - 1]", "drafts are asked for the prompt alone"),
        (_DRAFTS, "drafts = list(propose(ids[len(prompt_ids) :] or ids))[: left - 1]", ""),
        (_DRAFTS, "drafts = list(propose(list(ids)))[: left - 1] if gained else []", "brings no drafts"),
        (_DRAFTS, "drafts = []", "no drafts are checked"),
        (_BEST, "[len(ids) - stored :]", "a row is asked for that is not there"),
        (_BEST, "", "further down"),
        (_BEST, "[-len(drafts) :]", ""),
        ("accepted = optimization.accept_greedy(drafts, best)", "accepted = [*drafts, best[-1]]", "right or wrong"),
        ("accepted = optimization.accept_greedy(drafts, best)", "accepted = best[:1]", "nothing of them is kept"),
        ("accepted = optimization.accept_greedy(drafts, best)",
         "accepted = optimization.accept_greedy(drafts, best)\n        accepted = accepted[:-1] or accepted",
         "is thrown away"),
        (_NOTED, "gained.append(len(drafts))", "the drafts of each pass are counted"),
        (_NOTED, "gained.append(len(accepted) - 1)", "the drafts that stand are counted"),
        (_NOTED, "gained.append(len(drafts) + 1)", "every draft counts"),
        (_ANSWERED, "return ids, gained", "the prompt comes out as well"),
        (_ANSWERED, "return ids[len(prompt_ids) :], len(gained)", "asked for are the tokens gained in each"),
        (_ANSWERED, "return ids[len(prompt_ids) :], sum(gained)", "the sum of the gained"),
        (_ANSWERED, "return torch.tensor(ids[len(prompt_ids) :]), gained", "as a tensor"),
        (_ANSWERED, "return gained, ids[len(prompt_ids) :]", "the two are exchanged"),
        (_ANSWERED, "return ids[len(prompt_ids) :]", "two lists are asked for"),
        (_ANSWERED, "ids[len(prompt_ids) :], gained", "`return` is missing"),
        ("        ids += accepted\n", "", ""),
        ("all_logits=True", "all_logits=False", ""),
    ],
}  # fmt: skip
