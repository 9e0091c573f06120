"""A quiz of forty questions with four answers each: what a damaged model still knows.

    Question: What do bees make?
    Answer: honey        the answer whose tokens are most probable here, on average, is the model's choice

Guessing gives a quarter. With forty questions one more or less is 2.5 points, so the quiz tells a broken model from a
whole one and not two good ones from each other; that is what KL is for (`evaluation`). Ask your own: `Question`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.intake import required
from llmfromscratch.progress import progress_bar
from llmfromscratch.reading import opened


@dataclass(frozen=True)
class Question:
    """text: the question. answers: different ones, at least 2. right: the place of the right one, from 0."""

    text: str
    answers: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True)
class QuizResult:
    """chosen: of each question, the place of the answer that the model finds most probable. scores: of each question,
    the mean log-probability of a token of each answer."""

    questions: tuple[Question, ...]
    chosen: tuple[int, ...]
    scores: tuple[tuple[float, ...], ...]

    @property
    def right(self) -> tuple[bool, ...]:
        """Which questions were answered right."""
        return tuple(place == each.right for each, place in zip(self.questions, self.chosen, strict=True))

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.questions)

    def __str__(self) -> str:
        lines = [f"{sum(self.right)} of {len(self.questions)} right ({self.share:.0%})"]
        for each, place, right in zip(self.questions, self.chosen, self.right, strict=True):
            wrong = "" if right else f", not {each.answers[each.right]}"
            lines.append(f"  {'✓' if right else '✗'} {each.text} {each.answers[place]}{wrong}")
        return "\n".join(lines)


def accuracy(llm: Any, questions: Sequence[Question] | None = None) -> QuizResult:
    """Asks an LLM each question, and takes the answer that is most probable for a token, on average, as its own.

    llm: an `LLM`, whatever its parts. questions: QUESTIONS where none are given. Of equally probable answers the first
    counts. Raises RequestError for questions that cannot be asked, ValueError for logits that are NaN.
    """
    asked = tuple(QUESTIONS if questions is None else questions)
    _check(asked)
    scores = []
    for each in progress_bar(asked, "quiz", unit="question", delay=1.0):
        scores.append(tuple(_scores(llm, each)))
    chosen = tuple(max(range(len(some)), key=lambda place: some[place]) for some in scores)
    return QuizResult(asked, chosen, tuple(scores))


def _scores(llm: Any, question: Question) -> list[float]:
    """The mean log-probability of each answer's tokens; all answers go through the model in one pass."""
    read = required(llm.tokenizer).encode
    start = read(f"Question: {question.text}\nAnswer:")
    texts = [read(f"Question: {question.text}\nAnswer: {answer}") for answer in question.answers]
    begins = [_common(start, text) for text in texts]
    try:
        logits = _logits(llm, texts, begins)
    except OutOfMemory:  # a static cache may have no row for each
        logits = [_logits(llm, [text], [begin])[0] for text, begin in zip(texts, begins, strict=True)]
    found = []
    for text, begin, rows in zip(texts, begins, logits, strict=True):
        logs = rows.float().log_softmax(dim=-1)
        if not bool(logs.isfinite().all()):
            raise ValueError("the model's logits are NaN or infinite: its weights or dtype are at fault.")
        found.append(float(logs.gather(-1, torch.tensor(text[begin:]).unsqueeze(-1).to(logs.device)).mean()))
    return found


def _common(start: Sequence[int], text: Sequence[int]) -> int:
    """How many first tokens two texts share: what follows is the answer, however the tokenizer joins it on."""
    pairs = enumerate(zip(start, text, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(start), len(text) - 1))


def _logits(llm: Any, texts: Sequence[list[int]], begins: Sequence[int]) -> list[Tensor]:
    """Of each text, the logits of its tokens from `begin` on."""
    parts = [(-1 - place, text[:-1], 0) for place, text in enumerate(texts)]
    wanted = [range(begin - 1, len(text) - 1) for text, begin in zip(texts, begins, strict=True)]
    with opened(llm) as (network, cache):
        try:
            logits = network(Batch.of(parts, logits_at=wanted), cache)
        finally:
            for request, _, _ in parts:
                cache.release(request)
    return list(logits.split([len(rows) for rows in wanted]))


def _check(questions: Sequence[Any]) -> None:
    if not questions:
        raise RequestError("there are no questions; give at least one quiz.Question.")
    for place, each in enumerate(questions, start=1):
        problem = _problem(each)
        if problem:
            raise RequestError(f"question {place} cannot be asked: {problem}")


def _problem(question: Any) -> str | None:
    if not isinstance(question, Question):
        return f"it is {question!r}; give quiz.Question(text, answers, right)."
    if not isinstance(question.text, str) or not question.text.strip():
        return f"its text is {question.text!r}; give a sentence."
    answers = question.answers
    if isinstance(answers, str) or not all(isinstance(each, str) and each.strip() for each in answers):
        return f"its answers are {answers!r}; give texts, none of them empty."
    if len(answers) < 2 or len(set(answers)) < len(answers):
        return f"its answers are {answers!r}; give at least 2, all different."
    if not isinstance(question.right, int) or not 0 <= question.right < len(answers):
        return f"right is {question.right!r}; it is the place of the right answer, 0 to {len(answers) - 1}."
    return None


# question, right answer, wrong ones
_WORDS = (
    ("What is the capital of France?", "Paris", "Berlin", "Madrid", "London"),
    ("What is the capital of Japan?", "Tokyo", "Beijing", "Seoul", "Bangkok"),
    ("What is the capital of Italy?", "Rome", "Athens", "Vienna", "Lisbon"),
    ("What do bees make?", "honey", "milk", "bread", "paper"),
    ("Which planet is closest to the Sun?", "Mercury", "Neptune", "Saturn", "Jupiter"),
    ("Which planet do we live on?", "Earth", "Mars", "Venus", "Saturn"),
    ("What is the chemical formula of water?", "H2O", "CO2", "NaCl", "O2"),
    ("What gas do people need to breathe?", "oxygen", "helium", "neon", "methane"),
    ("How many days are in a week?", "seven", "five", "nine", "twelve"),
    ("How many legs does a spider have?", "eight", "two", "three", "twenty"),
    ("How many sides does a triangle have?", "three", "five", "seven", "nine"),
    ("What colour is grass?", "green", "purple", "orange", "black"),
    ("What colour is snow?", "white", "red", "green", "brown"),
    ("What is the opposite of hot?", "cold", "loud", "green", "round"),
    ("What is the opposite of up?", "down", "fast", "blue", "soft"),
    ("Which animal says meow?", "a cat", "a cow", "a frog", "a duck"),
    ("Which animal barks?", "a dog", "a fish", "a snail", "a sheep"),
    ("What is frozen water called?", "ice", "steam", "sand", "smoke"),
    ("Which organ pumps blood through the body?", "the heart", "the ear", "the skin", "the nose"),
    ("Which organ do we think with?", "the brain", "the knee", "the elbow", "the foot"),
    ("Which organ do we see with?", "the eyes", "the lungs", "the teeth", "the fingers"),
    ("Who wrote the play Romeo and Juliet?", "William Shakespeare", "Albert Einstein", "Isaac Newton",
     "Pablo Picasso"),
    ("Who developed the theory of relativity?", "Albert Einstein", "William Shakespeare", "Charles Darwin",
     "Leonardo da Vinci"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci", "Isaac Newton", "Mark Twain", "Napoleon Bonaparte"),
    ("Which language is spoken in Brazil?", "Portuguese", "Swedish", "Japanese", "Hindi"),
    ("Which language is spoken in Germany?", "German", "Spanish", "Korean", "Arabic"),
    ("On which continent is Egypt?", "Africa", "Europe", "Australia", "Antarctica"),
    ("On which continent is China?", "Asia", "Africa", "Europe", "South America"),
    ("What is the largest ocean on Earth?", "the Pacific Ocean", "the Black Sea", "the Red Sea", "Lake Victoria"),
    ("What force pulls objects towards the ground?", "gravity", "friction", "magnetism", "electricity"),
    ("What is two plus two?", "four", "seven", "nine", "ten"),
    ("What is ten minus three?", "seven", "two", "nine", "twelve"),
    ("Which season comes after winter?", "spring", "autumn", "Monday", "night"),
    ("Which month comes after January?", "February", "June", "October", "December"),
    ("Where do fish live?", "in water", "in trees", "in the sky", "in the desert"),
    ("What do plants need to grow?", "sunlight and water", "plastic and glass", "coffee and sugar",
     "paper and ink"),
    ("What is used to cut paper?", "scissors", "a pillow", "a spoon", "a lamp"),
    ("What do people wear on their feet?", "shoes", "hats", "gloves", "glasses"),
    ("Which metal is attracted to magnets?", "iron", "gold", "silver", "aluminium"),
    ("What is a young dog called?", "a puppy", "a kitten", "a calf", "a lamb"),
)  # fmt: skip


def _made() -> tuple[Question, ...]:
    """The right answer stands in each place equally often, so that whoever always takes one place gets a quarter."""
    found = []
    for number, (text, right, *wrong) in enumerate(_WORDS):
        place = number % 4
        found.append(Question(text, (*wrong[:place], right, *wrong[place:]), place))
    return tuple(found)


QUESTIONS = _made()
