"""Chapter 4's sketches: the waste of static batches counted, bucketing, and the engine's loop at its plainest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmfromscratch import kv_cache, model, scheduler
from llmfromscratch.batch import Batch


def static_waste(prompts: Sequence[int], answers: Sequence[int]) -> tuple[int, int]:
    """Tokens that a static batch needs to compute, and tokens that it does compute.

    prompts, answers: lengths in tokens, one of each for every request; at least one request, every length at least 1.
    The step that computes the prompts gives the first token of every answer; each later token takes one more step, and
    the last one need not be computed itself. So a request needs prompt + answer - 1.
    The batch is a rectangle: every prompt is padded to the longest, every row goes on until the longest answer is done.

    Example: prompts [2, 4] and answers [3, 1] need 4 + 4 = 8 tokens; the batch computes 2 rows of 4 + 3 - 1, so 12.
    """
    needed = sum(prompts) + sum(answers) - len(prompts)
    return needed, len(prompts) * (max(prompts) + max(answers) - 1)


def buckets(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups requests of like length: places in `lengths`, at most `size` a group, so that little is padded.

    Shortest first; of equal lengths the earlier place first. Every group but the last has `size` members.

    Example: lengths [9, 2, 8, 3, 7] in groups of 2 are [[1, 3], [4, 2], [0]].
    """
    places = sorted(range(len(lengths)), key=lambda place: lengths[place])
    return [places[first : first + size] for first in range(0, len(places), size)]


def serve(
    network: model.Model,
    cache: kv_cache.KVCache,
    plan: scheduler.Scheduler,
    requests: Sequence[scheduler.Request],
    end_tokens: Collection[int] = (),
) -> int:
    """Answers all requests greedily, as many at a time as the scheduler likes; returns the number of steps.

    The clock counts steps: step n is planned at time n, from 0 on, and its tokens are recorded at time n + 1.
    Add every request first, then repeat until `plan.schedule(now)` is empty: put the ids [start, start + tokens) of
    each piece of work into one batch, and compute it in one pass of the network. `Batch.of` takes a list of
    (request id, new ids, start) and asks for the logits of each part's last token; leave out work of 0 tokens, a row
    of a static batch that has ended. Where the work completes its request (`completes`), record the token with the
    largest logit. A request whose token is in `end_tokens` is then finished with "stop", any other that has
    params.max_tokens tokens with "length".
    """
    for request in requests:
        plan.add(request)
    steps = 0
    while work := plan.schedule(float(steps)):
        steps += 1
        todo = [one for one in work if one.tokens > 0]
        ids = [one.request.ids[one.start : one.start + one.tokens] for one in todo]
        parts = [(one.request.request_id, new, one.start) for one, new in zip(todo, ids, strict=True)]
        logits = network(Batch.of(parts), cache)
        for one, row in zip(todo, logits, strict=True):
            if one.completes:
                token = int(row.argmax())
                one.request.record(token, float(steps))
                if token in end_tokens:
                    plan.finish(one.request, "stop")
                elif len(one.request.token_ids) == one.request.params.max_tokens:
                    plan.finish(one.request, "length")
    return steps
