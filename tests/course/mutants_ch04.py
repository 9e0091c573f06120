"""Chapter 4's checks reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

import mutants

_NEEDED = "needed = sum(prompts) + sum(answers) - len(prompts)"
_SIDE = "max(prompts) + max(answers) - 1"
_WASTE = f"return needed, len(prompts) * ({_SIDE})"
_ORDER = "sorted(range(len(lengths)), key=lambda place: lengths[place])"
_GROUPS = "[places[first : first + size] for first in range(0, len(places), size)]"
_TODO = "0 if row.ended else row.length - start"
_WORK = "Work(row, start, new, width - new)"
_STEP_WORK = f"[{_WORK} for row, start, new in zip(rows, starts, todo, strict=True)]"
_CHUNK = "one.request.ids[one.start : one.start + one.tokens]"
_FINISH = '                    plan.finish(one.request, "stop")\n'
_STOP = f"                if token in end_tokens:\n{_FINISH}                elif"
_FULL = "elif len(one.request.token_ids) == one.request.params.max_tokens:"
_LENGTH = f'                {_FULL}\n                    plan.finish(one.request, "length")\n'
_ADD = "    for request in requests:\n        plan.add(request)\n"
_KEY = "request.arrival - request.params.priority * self.ageing"
_LAST = "max(planner.running, key=planner.seniority)"
_GIVES_WAY = "            planner.preempt(last)\n"
_GIVES_UP = "            if last is request:\n                return False\n"
_TOKENS = "min(request.length - start, planner.budget)"
_PUT = "planner.plan[request.request_id] = Work(request, start, tokens)"
_ROOM = "    if make_room(planner, request, tokens):\n"
_LOOP = "    while planner.waiting and planner.budget > 0 and len(planner.running) < planner.max_requests:\n"
_FRONT = "request = planner.waiting[0]"
_HITS = "planner.cache.match_prefix(request.request_id, request.ids)"
_REST = "request.length - hits"
_BACK = "            planner.cache.release(request.request_id)\n            return\n"
_QUEUE = (
    f"{_LOOP}        {_FRONT}\n        hits = {_HITS}\n        try:\n"
    f"            planner.cache.reserve(request.request_id, {_REST})\n        except OutOfMemory:\n{_BACK}"
)
_EACH = (
    "    for request in list(planner.waiting):\n"
    "        if planner.budget <= 0 or len(planner.running) == planner.max_requests:\n            break\n"
)
_BEGIN = "planner.begin(request, now, hits)"
_NEXT = "        plan_next(planner, request)"
_CATCH = "        try:\n            planner.cache.reserve(request.request_id, tokens)\n            return True\n"
_BATCHED = "        logits = network(Batch.of(parts), cache)\n"
_LOOPED = "    while work := plan.schedule(float(steps)):\n"
_TAKEN = f"        try:\n            planner.cache.reserve(request.request_id, {_REST})\n"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "4.1": [
        ("len(prompts) * (max(prompts)", "sum(prompts) + len(prompts) * (0", "not padded"),
        (f"len(prompts) * ({_SIDE})", "sum(prompts) + len(prompts) * (max(answers) - 1)", "not padded"),
        (f"len(prompts) * ({_SIDE})", "len(prompts) * max(prompts) + sum(answers) - len(prompts)", "rows leave"),
        (" - len(prompts)", "", "in what is needed"),
        (f"({_SIDE})", "(max(prompts) + max(answers))", "in the rectangle"),
        (_SIDE, "max(prompts)", "left out of the rectangle"),
        (f"({_SIDE})", "(max(p + a for p, a in zip(prompts, answers)) - 1)", "its longest request"),
        (_WASTE, f"return needed, {_SIDE}", "one of them"),
        (_WASTE, f"{_WASTE} - needed", "this is what is wasted"),
        (_WASTE, f"return len(prompts) * ({_SIDE}), needed", "changed places"),
        (_WASTE, f"return 100 * (1 - needed / (len(prompts) * ({_SIDE})))", "percentage"),
        (_WASTE, f"return 1 - needed / (len(prompts) * ({_SIDE}))", "a share"),
        (_WASTE, f"return [needed, len(prompts) * ({_SIDE})]", "tuple"),
        (f"{_NEEDED}\n    {_WASTE}",
         f"needed = sum(prompts) + sum(answers)\n    return needed, len(prompts) * ({_SIDE} + 1)",
         "nobody asks what comes after it"),
        ("max(prompts)", "min(prompts)", "the shortest"),
        (" - len(prompts)", " - 1", "for all together; each request"),
        (f"({_SIDE})", "(max(prompts) + max(answers)) - 1", "for all together; each row"),
        ("    return needed", "    needed", "`return` is missing"),
    ],
    "4.2": [
        (f"return {_GROUPS}", f"return [[lengths[place] for place in group] for group in {_GROUPS}]",
         "these are the lengths"),
        (_ORDER, "sorted(lengths)", "these are the lengths"),
        (_ORDER, "[lengths.index(length) for length in sorted(lengths)]", "again and again"),
        (_ORDER, "list(range(len(lengths)))", "as they come"),
        ("lengths[place])", "-lengths[place])", "the longest come first"),
        ("lengths[place])", "lengths[place], reverse=True)", "the longest come first"),
        ("lengths[place])", "(lengths[place], -place))", "of equal lengths"),
        ("range(0, len(places), size)", "range(0, len(places) - size + 1, size)", "the last group is lost"),
        ("range(0, len(places), size)", "range(len(places))", "in several groups"),
        (_GROUPS, "[places[first :: -(-len(places) // size)] for first in range(-(-len(places) // size))]",
         "dealt out"),
        (_GROUPS, "[places[first::size] for first in range(size)]", "in steps of `size`"),
        (_GROUPS, "[places[first::size] for first in range(0, len(places), size)]", "in steps of `size`"),
        (f"return {_GROUPS}", f"return [sorted(group) for group in {_GROUPS}]", "sorted again"),
        (f"return {_GROUPS}", f"return [tuple(group) for group in {_GROUPS}]", "tuples"),
        (f"return {_GROUPS}", "return places", "one list of all"),
        ("first + size]", "first + 1]", "only its first member"),
        ("    places =", "    lengths.sort()\n    places =", "left as they were"),
    ],
    "4.3": [
        (_STEP_WORK, f"{_STEP_WORK[:-1]} if not row.ended]", "are left out"),
        (_TODO, "row.length - start", "still computes its last token"),
        (_TODO, "0 if row.finish_reason == 'stop' else row.length - start", "was aborted"),
        ("width - new)", "0 if row.ended else width - new)", "gets no padding"),
        ("width = max(todo, default=0)",
         "width = max((row.length - start for row, start in zip(rows, starts)), default=0)", "counts for the width"),
        ("Work(row, start,", "Work(row, 0,", "begins at 0"),
        ("Work(row, start,", "Work(row, row.length,", "behind all tokens"),
        (_TODO, "0 if row.ended else row.length", "computed again in every step"),
        (_TODO, "0 if row.ended else 1", "one token is planned"),
        (_TODO, "0 if row.ended else 1 if start else row.length", "as soon as anything is stored"),
        ("width - new)", "max(r.length for r in rows) - row.length)", "whole texts"),
        ("width - new)", "max(0, max(len(r.prompt_token_ids) for r in rows) - new))", "of the prompts in later steps"),
        (", width - new)", ")", "nothing is padded"),
        ("width - new)", "width)", "the whole width"),
        (_WORK, "Work(row, start, width)", "counted among the tokens"),
        ("max(todo, default=0)", "min(todo, default=0)", "the shortest"),
        (_WORK, "Work(row, start, width, width - new)", "counted among the tokens"),
        (_TODO, "0 if row.ended else max(1, len(row.prompt_token_ids) - start)", "from the prompt alone"),
        (_TODO, "0 if row.ended else len(row.prompt_token_ids) - start", "from the prompt alone"),
        (f"todo = [{_TODO} for row, start in zip(rows, starts, strict=True)]\n    width = max(todo, default=0)",
         "todo = [row.length - start for row, start in zip(rows, starts)]\n    width = max(todo)",
         "still computes its last token"),
        (_WORK, "Work(row, start, row.length - start, width - (row.length - start))", "still computes its last token"),
        (_TODO, "0 if row.ended else row.size - start", "there is no `size`; a request has request_id"),
        ("cache.length(row.request_id)", "cache.length(row)", "the request's number: request.request_id"),
        ("max(todo, default=0)", "max(todo)", "no largest of nothing"),
        (f"return {_STEP_WORK}", f"return tuple({_STEP_WORK})", "a list"),
    ],
    "4.4": [
        ("if one.completes:", "if not one.request.ended:", "although the prompt is not complete"),
        ("if one.completes:", "if one.start + one.tokens >= len(one.request.prompt_token_ids):", "after a preemption"),
        (_CHUNK, "one.request.ids[one.start :]", "a chunk ends after `tokens`"),
        (_CHUNK, "one.request.ids[: one.tokens]", "from the front"),
        (_CHUNK, "one.request.prompt_token_ids[one.start : one.start + one.tokens]", "not in the prompt"),
        ("if one.tokens > 0]", "]", "has 0 tokens"),
        ("                one.request.record(token, float(steps))\n                if token in end_tokens:",
         "                if token not in end_tokens:\n                    one.request.record(token, float(steps))\n"
         "                if token in end_tokens:", "the end token is not recorded"),
        ("one.request.record(token, float(steps))", "one.request.token_ids.append(token)", "by hand"),
        (_STOP, "                if", "`end_tokens` is not used"),
        (_STOP + _LENGTH.partition("elif")[2],
         f'{_LENGTH.replace("elif", "if")}                elif token in end_tokens:\n'
         '                    plan.finish(one.request, "stop")\n', "may be an end token too"),
        ('plan.finish(one.request, "length")', 'plan.finish(one.request, "stop")', "the same for both"),
        ("== one.request.params.max_tokens", "== one.request.params.max_tokens - 1", "one token too few"),
        ("== one.request.params.max_tokens", "> one.request.params.max_tokens", "one token too many"),
        ("elif len(one.request.token_ids) ==", "elif one.request.length >=", "the prompt is counted"),
        ('plan.finish(one.request, "length")', "pass", "is never finished"),
        ('plan.finish(one.request, "stop")', "pass", "is never finished"),
        ("record(token, float(steps))", "record(token, float(steps - 1))", "recorded at time n"),
        ("plan.schedule(float(steps))", "plan.schedule(float(steps + 1))", "is planned at time n + 1"),
        ("plan.schedule(float(steps))", "plan.schedule(0.0)", "every step is planned at time 0"),
        ("    steps = 0\n", "    steps = 1\n", ""),
        (_ADD + "    steps = 0\n    while",
         "    steps = 0\n    for request in requests:\n     plan.add(request)\n     while", "one after the other"),
        ("zip(todo, logits, strict=True)", "zip(todo, logits[:1].expand(len(todo), -1), strict=True)", "the first row"),
        ("zip(todo, logits, strict=True)", "zip(work, logits, strict=True)", "as many rows of logits as parts"),
        ("row.argmax()", "row.argmin()", "the smallest"),
        ("row.argmax()", "row.max()", "the largest logit itself"),
        ("    return steps", "    return steps + 1", "the last, empty plan"),
        ("    return steps", "    return float(steps)", "an int"),
        (_BATCHED, "        logits = [network(Batch.of([part]), cache)[0] for part in parts]\n",
         "each request has its own pass: the weights are read once for each"),
        (_BATCHED, "        half = -(-len(parts) // 2)\n"
         "        halves = [part for part in (parts[:half], parts[half:]) if part]\n"
         "        logits = [row for part in halves for row in network(Batch.of(part), cache)]\n",
         "put all of a step into one batch"),
        (_LOOPED, "    while any(not request.ended for request in requests):\n"
         "        work = plan.schedule(float(steps))\n", "Repeat until the plan is empty"),
        (_LOOPED, "    while plan.waiting or plan.running:\n"
         "        work = plan.schedule(float(steps))\n", "Repeat until the plan is empty"),
        (_STOP + _LENGTH.partition("elif")[2],
         '                if token in end_tokens:\n                    one.request.finish_reason = "stop"\n'
         f'                {_FULL}\n                    one.request.finish_reason = "length"\n',
         "nobody told the scheduler"),
        (_STOP + _LENGTH.partition("elif")[2],
         '                if token in end_tokens:\n                    one.request.end("stop")\n'
         f'                {_FULL}\n                    one.request.end("length")\n', "nobody told the scheduler"),
        ("zip(todo, logits, strict=True)", "zip(work, logits)", "a row that has ended has none"),
        ("one.completes", "one.complete", "there is no `complete`; a piece of work has"),
        ("one.request.record(", "one.request.append(", "there is no `append`; a request has"),
        ("plan.finish(one.request,", "plan.end(one.request,", "there is no `end`; a scheduler has"),
        (f"{_LENGTH}    return steps", f"{_LENGTH}    return", "not returned"),
        ("if one.tokens > 0]", "]", "not in the prompt"),
        ("    return steps", "    steps", "not returned"),
    ],
    "4.5": [
        (_KEY, _KEY.replace("-", "+"), "the sign"),
        (" * self.ageing", "", "`ageing` is not used"),
        ("self.ageing", "10.0", "always worth 10"),
        (_KEY, "request.arrival", "the priority is not used"),
        ("request.params.priority", "request.priority", "there is no `priority`; a request has request_id"),
        (_KEY, "-request.params.priority * self.ageing", "the arrival is not used"),
        (_KEY, "(-request.params.priority, request.arrival)", "starve"),
        (_KEY, "-request.params.priority", "starve"),
        (_KEY, "request.params.priority * self.ageing - request.arrival", "the newest would go first"),
        (_KEY, "request.arrival - self.ageing", "for each level"),
        ("* self.ageing", "/ self.ageing", "divided by `ageing`"),
        (_KEY, "request.arrival - (request.params.priority > 0) * self.ageing", "once, whatever the priority"),
    ],
    "4.6": [
        (_LAST, "min(planner.running, key=planner.seniority)", "the oldest gives way"),
        (_LAST, "planner.running[0]", "the first of `running`"),
        (_LAST, "planner.running[-1]", "the last of `running`"),
        (_LAST, "max(planner.running, key=lambda one: one.arrival)", "the newest arrival"),
        (_LAST, "max(planner.running, key=lambda one: one.request_id)", "the highest number"),
        (_LAST, "request", "always gives way itself"),
        (_LAST, "max([one for one in planner.running if one is not request] or [request], key=planner.seniority)",
         "never gives way itself"),
        (f"            last = {_LAST}\n", "            return False\n", "False at once"),
        (_GIVES_UP, "            if last is request:\n                return False\n            try:\n"
         "                planner.cache.reserve(request.request_id, tokens)\n                return True\n"
         "            except OutOfMemory:\n                return False\n", "one may not be enough"),
        (_GIVES_UP, f"{_GIVES_UP}            return True\n", "not asked for again"),
        (f"            last = {_LAST}\n{_GIVES_WAY}", "            mine = planner.seniority(request)\n"
         "            younger = [one for one in planner.running if planner.seniority(one) > mine]\n"
         "            for last in sorted(younger or [request], key=planner.seniority, reverse=True):\n"
         "                planner.preempt(last)\n", "all who are younger"),
        (_GIVES_UP, "", "the loop goes on"),
        (_GIVES_UP, _GIVES_UP.replace("False", "True"), "True is said"),
        (_GIVES_UP, _GIVES_UP.replace("return False", "return"), "nothing is returned: there the answer is False"),
        ("            return True\n", "            return\n", "nothing is returned: there the answer is True"),
        ("request_id, tokens)", "request_id, tokens - 1)", "one token too few"),
        ("request_id, tokens)", "request_id, 1)", "for one token"),
        ("request_id, tokens)", "request_id, request.length)", "whole text"),
        (_GIVES_WAY, "            planner.cache.release(last.request_id)\n", "nobody tells the planner"),
        (_GIVES_WAY, "            planner.running.remove(last)\n", "keeps its memory"),
        (_GIVES_WAY, f"            planner.running.remove(last)\n{_GIVES_WAY}", "finds no memory"),
        (_GIVES_WAY, f"{_GIVES_WAY}            planner.waiting.append(last)\n", "in the queue twice"),
        (_GIVES_WAY, "", "nobody gives way"),
        ("except OutOfMemory:", "except ValueError:", "catch it"),
        ("except OutOfMemory:", "except Exception:", "every error is caught"),
        (_LAST, "max([one for one in planner.running if one is not request], key=planner.seniority)",
         "never gives way itself"),
        (f"    while True:\n{_CATCH}        except OutOfMemory:\n",
         "    if True:\n        while not planner.cache.reserve(request.request_id, tokens):\n",
         "cache.reserve returns nothing"),
        (_CATCH, "        try:\n            if planner.cache.reserve(request.request_id, tokens):\n"
         "                return True\n", "cache.reserve returns nothing"),
        (f"{_GIVES_WAY}{_GIVES_UP}", f"{_GIVES_UP}{_GIVES_WAY}", "is the last itself, and keeps its memory"),
        (f"            last = {_LAST}\n",
         "            others = [one for one in planner.running if one is not request]\n"
         "            if not others:\n                return False\n"
         "            last = max(others, key=planner.seniority)\n", "never gives way itself"),
        (_GIVES_WAY, f"            if len(planner.running) == 1:\n                return False\n{_GIVES_WAY}",
         "is the only one left, and keeps its memory"),
        ("request_id, tokens)", "request_id, planner.cache.length(request.request_id) + tokens)",
         "what is stored is reserved once more"),
        ("request_id, tokens)", "request_id, request.length + tokens)", "on top of what is stored"),
        ("reserve(request.request_id,", "reserve(request,", "the request's number: request.request_id"),
        ("planner.preempt", "planner.evict", "there is no `evict`; a planner has"),
    ],
    "4.7": [
        (_TOKENS, "request.length - start", "the budget is not looked at"),
        ("        planner.budget -= tokens\n", "", "not lowered"),
        ("planner.budget -= tokens", "planner.budget -= 1", "lowered by 1"),
        ("planner.budget -= tokens", "planner.budget = 0", "set to 0"),
        (f"{_ROOM}        {_PUT}\n        planner.budget -= tokens",
         f"    budget = planner.budget\n{_ROOM}        {_PUT}\n        planner.budget = budget - tokens",
         "gave way is lost"),
        (_TOKENS, "1", "only one token"),
        (_TOKENS, "request.length - start\n    if tokens > planner.budget:\n        return",
         "larger than the budget is not planned at all"),
        (_TOKENS, "request.length - start if request.length - start <= planner.budget else 0",
         "larger than the budget is not planned at all"),
        ("planner.budget)", "planner.max_batch_tokens)", "planner.budget is what is left of it"),
        ("start, tokens)", "start, tokens, planner.budget - tokens)", "padding is given"),
        ("start, tokens)", "start, tokens, planner.max_batch_tokens - tokens)", "padding is given"),
        ("start, tokens)", "start, tokens, request.length - start - tokens)", "padding is given"),
        (_PUT, f"tokens = {_TOKENS}\n        {_PUT}", "once more after make_room"),
        ("make_room(planner, request, tokens)", "make_room(planner, request, start + tokens)",
         "what is stored is asked for once more"),
        (_TOKENS, f"1 if request.token_ids else {_TOKENS}", "some of its answer"),
        (_TOKENS, "planner.budget", "whether or not"),
        (_TOKENS, "min(request.length, planner.budget)", "those in the cache are done"),
        (_TOKENS, "min(len(request.prompt_token_ids) - start, planner.budget)", "only the prompt"),
        (_ROOM, "    if True:\n", "not asked"),
        (_ROOM, "    make_room(planner, request, tokens)\n    if True:\n", "no memory"),
        ("make_room(planner, request, tokens)", "make_room(planner, request, request.length - start)",
         "the whole rest"),
        ("make_room(planner, request, tokens)", "make_room(planner, request, request.length)", "the whole text"),
        ("Work(request, start, tokens)", "Work(request, 0, tokens)", "begins at 0"),
        ("Work(request, start, tokens)", "Work(request, len(request.prompt_token_ids), tokens)", "behind the prompt"),
        ("start = planner.cache.length(request.request_id)", "start = request.prefix_hits", "begins at 0"),
        (_PUT, "planner.plan = {request.request_id: Work(request, start, tokens)}", "the plan of the others"),
        (_PUT, "pass", "not put into"),
        (_PUT, _PUT.replace("[request.request_id]", "[request]"), "its number"),
        (_PUT, "planner.plan[request.request_id] = tokens", "a Work"),
        (f"{_ROOM}        {_PUT}\n        planner.budget -= tokens",
         f"    planner.budget -= tokens\n{_ROOM}        {_PUT}", "yet the budget is lowered"),
    ],
    "4.8": [
        (_QUEUE,
         _QUEUE.replace(f"{_LOOP}        {_FRONT}\n", _EACH).replace("            return", "            continue"),
         "is skipped for a smaller one"),
        (_REST, "request.length", "not subtracted"),
        (_REST, "min(request.length - hits, planner.budget)", "the first chunk alone"),
        (_REST, "request.length - hits - 1", "one token too few"),
        (_REST, "len(request.prompt_token_ids) - hits", "the prompt alone"),
        (f"hits = {_HITS}", "hits = 0", "match_prefix is not asked"),
        ("request.ids)", "request.prompt_token_ids)", "the prompt alone"),
        (_BACK, "            return\n", "keeps what it took over"),
        ("< planner.max_requests", "<= planner.max_requests", "one request too many"),
        ("< planner.max_requests", "< planner.max_requests - 1", "a place is left empty"),
        (" and len(planner.running) < planner.max_requests", "", "the places are not looked at"),
        ("planner.budget > 0", "planner.budget >= 0", "no budget is left"),
        ("planner.budget > 0", "planner.budget >= planner.waiting[0].length", "it can begin with a chunk"),
        (f"\n{_NEXT}", "", "not planned"),
        ("planner.waiting[0]", "planner.waiting[-1]", "the last one"),
        ("planner.waiting[0]", "min(planner.waiting, key=lambda one: one.length)", "the shortest one"),
        ("planner.waiting[0]", "min(planner.waiting, key=lambda one: one.arrival)", "the earliest arrival"),
        (_NEXT, f"{_NEXT}\n        return", "only one request"),
        (_QUEUE, _QUEUE.replace(_REST, "request.length").replace("request.ids", "request.prompt_token_ids")
         .replace(_BACK, "            return\n"), "keeps what it took over"),
        ("planner.waiting[0]", "planner.waiting.pop(0)", "planner.begin takes it out itself"),
        ("planner.waiting[0]", "min(planner.waiting, key=planner.seniority)", "first by `seniority`"),
        (f"{_BEGIN}\n{_NEXT}", f"{_BEGIN}\n        late = [*locals().get('late', []), request]\n"
         "    for request in locals().get('late', []):\n        plan_next(planner, request)",
         "planned when all have begun"),
        (f"{_QUEUE}        {_BEGIN}\n{_NEXT}",
         f"    late = []\n{_QUEUE.replace('return', 'break')}        {_BEGIN}\n        late.append(request)\n"
         "    for request in late:\n        plan_next(planner, request)", "planned when all have begun"),
        (f"{_QUEUE}        {_BEGIN}\n{_NEXT}",
         f"    late = []\n{_QUEUE.replace('return', 'break')}        {_BEGIN}\n        late.append(request)\n"
         "    for request in late:\n        if planner.budget > 0:\n            plan_next(planner, request)",
         "planned when all have begun"),
        (f"{_TAKEN}        except OutOfMemory:\n{_BACK}        {_BEGIN}",
         f"        {_BEGIN}\n{_TAKEN}        except OutOfMemory:\n{_BACK}", "who does not fit has begun already"),
        (_QUEUE, _QUEUE.replace(_LOOP, "    while planner.waiting:\n")
         + "        if planner.budget < 1 or len(planner.running) >= planner.max_requests:\n            return\n",
         "looked at only after the cache was asked"),
        (f"{_LOOP}", "    while planner.waiting:\n", ""),
        (_QUEUE, _QUEUE.replace(_LOOP, "    while planner.waiting:\n")
         + "        if planner.budget < 1 or len(planner.running) >= planner.max_requests:\n"
         "            planner.cache.release(request.request_id)\n            return\n",
         "looked at only after the cache was asked"),
        ("except OutOfMemory:", "except Exception:", "every error is caught"),
        (_BEGIN, "planner.begin(request, request.arrival, hits)", "`now` is not handed on"),
        (_BEGIN, "planner.begin(request, 1234.5, hits)", "`now` is not handed on"),
        ("request.request_id, request.length", "request.number, request.length", "there is no `number`; a request has"),
        (f"{_LOOP}        {_FRONT}\n", _EACH.replace("list(planner.waiting)", "planner.waiting"), "every second one"),
        (_BEGIN, "planner.begin(request, now, 0)", "how many tokens were taken over"),
        (_BEGIN, "planner.begin(request, 0.0, hits)", "`now`"),
        (f"        {_BEGIN}\n", "", "leaves the queue"),
        ("planner.cache.reserve(request.request_id, request.length - hits)",
         "if not make_room(planner, request, request.length - hits):\n                return",
         "takes memory from those who run"),
        ("except OutOfMemory:", "except KeyError:", "nobody else begins"),
    ],
}  # fmt: skip
