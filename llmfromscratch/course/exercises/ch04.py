"""Chapter 4, the scheduler: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    admission_checks,
    batching_checks,
    scheduler_checks,
    scheduler_clinic,
    serving_checks,
    serving_clinic,
)

EXERCISES = [
    Exercise(
        id="4.1",
        object="llmfromscratch.course.sketches.ch04.static_waste",
        title="what a rectangle wastes",
        points=1,
        minutes=6,
        check=batching_checks.check_static_waste,
        hints=(
            "Draw the worked example: a row for each request, a column for each token. Where does a row end, and where "
            "does the rectangle?",
            "sum(...) over both lists, and how many requests there are, give what is needed; max(...) of each list and "
            "the number of rows give the rectangle.",
            "One row needs prompt + answer - 1. The rectangle has len(prompts) rows, and each is as long as the "
            "longest prompt and the longest answer together, less that same 1.",
        ),
    ),
    Exercise(
        id="4.2",
        object="llmfromscratch.course.sketches.ch04.buckets",
        title="buckets of like length",
        points=1,
        minutes=6,
        check=batching_checks.check_buckets,
        hints=(
            "Two steps: put the places in the order of their lengths, then cut that list into pieces.",
            "sorted(..., key=...) over range(len(lengths)) sorts places, and leaves equals as they were; a slice "
            "[first : first + size] is a group, a shorter one at the end too.",
            "key=lambda place: lengths[place]; then a list of slices for first in range(0, len(lengths), size).",
        ),
    ),
    Exercise(
        id="4.3",
        object="llmfromscratch.scheduler.padded_step",
        title="a step of a static batch",
        points=2,
        minutes=12,
        check=batching_checks.check_padded_step,
        hints=(
            "For each row two numbers: where its work begins, and how many tokens it has to compute. The widest row "
            "then tells what the others are padded with.",
            "cache.length(row.request_id) is where it begins, row.length how many tokens the request has, row.ended "
            "whether it has nothing to do any more. max(..., default=0) knows what to say of no rows.",
            "First a list of what each row has to do: 0 if it has ended, else row.length less what is in the cache. "
            "Then Work(row, start, tokens, padding) for each, where tokens + padding is the same for all.",
        ),
    ),
    Exercise(
        id="4.4",
        object="llmfromscratch.course.sketches.ch04.serve",
        title="the loop around the scheduler",
        points=4,
        minutes=25,
        check=serving_checks.check_serve,
        hints=(
            "Write one step first: from a plan to a batch, from logits to tokens, from tokens to who has ended. Around "
            "it comes a loop that ends with an empty plan.",
            "`while work := plan.schedule(...)` plans and asks whether there is something in one go. A part is "
            "(one.request.request_id, the slice of one.request.ids, one.start); zip goes through parts and logits.",
            "Leave out work of 0 tokens before the batch is made. Where one.completes: int(row.argmax()), "
            'one.request.record(token, time after the step), then plan.finish with "stop" if it is an end token, '
            'else with "length" if the answer has max_tokens.',
        ),
    ),
    Exercise(
        id="4.5",
        object="llmfromscratch.scheduler.FirstComeFirstServed",
        title="who goes first",
        points=1,
        minutes=5,
        check=scheduler_checks.check_first_come,
        hints=(
            "The smallest key goes first. So what has to happen to the key of a request that is more important?",
            "request.arrival is in seconds, request.params.priority counts levels, and self.ageing says what a level "
            "is worth in seconds.",
            "In the worked example both keys are 2 s: the arrival at 12 s has been moved by one level of 10 s. In "
            "which direction?",
        ),
    ),
    Exercise(
        id="4.6",
        object="llmfromscratch.scheduler.make_room",
        title="make room",
        points=3,
        minutes=15,
        check=scheduler_checks.check_make_room,
        hints=(
            "Ask for the memory. If it is not there, somebody gives way: who? And what then? There are two ways out of "
            "this loop.",
            "`while True`, and in it try: planner.cache.reserve(...), except OutOfMemory. max(planner.running, "
            "key=planner.seniority) finds who has the least right to its memory.",
            "try reserve and return True; except OutOfMemory: find the last one, planner.preempt it, and return False "
            "if it `is request`. Otherwise the loop asks for the memory once more.",
        ),
    ),
    Exercise(
        id="4.7",
        object="llmfromscratch.scheduler.plan_next",
        title="chunks in a budget",
        points=2,
        minutes=10,
        check=scheduler_checks.check_plan_next,
        hints=(
            "Where does the work begin, how much is left of the text, and how much of that does the budget allow? A "
            "request that decodes is no special case.",
            "planner.cache.length(request.request_id) is where it begins; request.length counts prompt and answer; min "
            "keeps to the budget; make_room(planner, request, tokens) says whether there is memory.",
            "Only if make_room says True: planner.plan[request.request_id] = Work(request, start, tokens), and "
            "planner.budget -= tokens. make_room may have changed the budget, so lower what it is by then.",
        ),
    ),
    Exercise(
        id="4.8",
        object="llmfromscratch.scheduler.admit",
        title="let in whoever fits",
        points=4,
        minutes=20,
        check=admission_checks.check_admit,
        hints=(
            "A loop that looks at the front of the queue again and again. Four things end it: nobody waits, no place, "
            "no budget, no memory.",
            "request = planner.waiting[0], for planner.begin takes it out of the list. match_prefix takes over and "
            "gives a number of tokens; the memory for the rest is reserved in a try.",
            "In the loop: hits = match_prefix(request.request_id, request.ids); try to reserve what request.length has "
            "beyond them; except OutOfMemory: cache.release the request and return. Then planner.begin, which wants "
            "the hits too, and plan_next.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="4.a",
        title="one token short",
        story=scheduler_clinic.BORDER_STORY,
        run=scheduler_clinic.show_border,
        broken=scheduler_clinic.PagedText,
        check=scheduler_clinic.check_paged_text,
    ),
    BugHunt(
        id="4.b",
        title="the report that never came",
        story=scheduler_clinic.STARVING_STORY,
        run=scheduler_clinic.show_starving,
        broken=scheduler_clinic.next_in_line,
        check=scheduler_clinic.check_next_in_line,
    ),
    BugHunt(
        id="4.c",
        title="slower by the hour",
        story=serving_clinic.PLACES_STORY,
        run=serving_clinic.show_places,
        broken=serving_clinic.Places,
        check=serving_clinic.check_places,
    ),
    BugHunt(
        id="4.d",
        title="everybody stutters",
        story=serving_clinic.STUTTER_STORY,
        run=serving_clinic.show_stutter,
        broken=serving_clinic.plan_step,
        check=serving_clinic.check_plan_step,
    ),
]
