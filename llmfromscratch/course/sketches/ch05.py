"""Chapter 5's sketches: a draw without a sum, and an answer that can only be what an expression describes.

    expression ─▶ NFA: states with arrows ─▶ DFA: sets of those states, one arrow for each byte ─▶ allowed tokens

The engine leaves this to a library; what that allows and what this allows is the same (a test compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def gumbel_draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draws a token of each row without ever computing a probability (Gumbel 1954; "the Gumbel-max trick").

    logits, uniforms: float [rows, vocab]; uniforms from 0 to below 1, one for each logit. Returns int64 [rows]: where
    logit - log(-log(uniform)) is largest. That is each token as often as the softmax of the logits says. A uniform of 0
    counts as the smallest normal number of its dtype (torch.finfo(...).tiny); a logit of -inf is never drawn.

    Example: logits [[0.0, 0.0]] with uniforms [[0.9, 0.2]] give [0]: 2.25 against -0.48.
    """
    smallest = torch.finfo(uniforms.dtype).tiny
    return (logits - (-uniforms.clamp(min=smallest).log()).log()).argmax(dim=-1)


# ---- an expression becomes states and arrows ---------------------------------------------------------------------


@dataclass
class Nfa:
    """States with arrows: `steps[s]` are (bytes, target), `jumps[s]` targets that are reached without a byte."""

    steps: list[list[tuple[frozenset[int], int]]] = field(default_factory=list)
    jumps: list[list[int]] = field(default_factory=list)

    def new_state(self) -> int:
        """One more state, without arrows yet."""
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def follow(self, states: set[int]) -> frozenset[int]:
        """The states themselves, and all that jumps lead to from them."""
        waiting, found = list(states), set(states)
        while waiting:
            for target in self.jumps[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return frozenset(found)


class Reader:
    """Reads an expression from left to right and builds its NFA: each method takes a state and returns where it leads.

    Known are characters of ASCII, `.` (any byte but a line's end), classes like [a-z_] and [^0-9], groups, |, *, +, ?,
    {3}, {2,4} and {2,}, and \\ before a character that is meant as it is; \\d is a digit.
    """

    def __init__(self, expression: str):
        self.text, self.place, self.nfa = expression, 0, Nfa()

    def peek(self) -> str:
        """The next character, or nothing at the end."""
        return self.text[self.place : self.place + 1]

    def take(self) -> str:
        """The next character, and one step on."""
        self.place += 1
        return self.text[self.place - 1 : self.place]

    def choice(self, start: int) -> int:
        """Alternatives, with | between them: all begin at `start`, all jump to one end."""
        end = self.nfa.new_state()
        while True:
            state = start
            while self.peek() not in ("", "|", ")"):
                state = self.repeated(state)
            self.nfa.jumps[state].append(end)
            if self.peek() != "|":
                return end
            self.take()

    def repeated(self, start: int) -> int:
        """A character, a class or a group, with the repetition behind it: it is built again for each time."""
        begin = self.place
        self.atom(self.nfa.new_state())  # read once for where it ends; to what this builds, nothing leads
        least, most = self.bounds()
        resume = self.place

        def build(state: int) -> int:
            self.place = begin
            return self.atom(state)

        for _ in range(least):
            start = build(start)
        end = self.nfa.new_state()
        self.nfa.jumps[start].append(end)
        for _ in range(0 if most is None else most - least):
            start = build(start)
            self.nfa.jumps[start].append(end)
        if most is None:  # as often as one likes: back to where it began
            loop = self.nfa.new_state()
            self.nfa.jumps[start].append(loop)
            back = build(loop)
            self.nfa.jumps[back] += [loop, end]
        self.place = resume
        return end

    def bounds(self) -> tuple[int, int | None]:
        """What stands behind an item: how often at least, and at most (None: without end)."""
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in simple:
            return simple[self.take()]
        if self.peek() != "{":
            return 1, 1
        self.take()
        inside = ""
        while self.peek() not in ("", "}"):
            inside += self.take()
        self.take()
        least, comma, most = inside.partition(",")
        return int(least), int(most) if most else None if comma else int(least)

    def atom(self, start: int) -> int:
        """One group, class, dot or character."""
        if self.peek() == "(":
            self.take()
            end = self.choice(start)
            self.take()  # the closing one
            return end
        end = self.nfa.new_state()
        self.nfa.steps[start].append((self.byte_set(), end))
        return end

    def byte_set(self) -> frozenset[int]:
        """The bytes that one place of the text may hold."""
        character = self.take()
        if character == ".":
            return frozenset(range(256)) - {ord("\n")}
        if character == "\\":
            character = self.take()
            return frozenset(b"0123456789") if character == "d" else frozenset([ord(character)])
        if character != "[":
            return frozenset([ord(character)])
        negated = self.peek() == "^" and bool(self.take())
        found: set[int] = set()
        while self.peek() != "]":
            first = self.take()
            last = first
            if self.peek() == "-":
                self.take()
                last = self.take()
            found |= set(range(ord(first), ord(last) + 1))
        self.take()
        return frozenset(range(256)) - found if negated else frozenset(found)


# ---- sets of states become one state -----------------------------------------------------------------------------


@dataclass
class Automaton:
    """A DFA over bytes. State 0 is the beginning; `arrows[state]` maps a byte to the next state, `accepting` are the
    states in which the text may end. A byte without an arrow leads nowhere."""

    arrows: list[dict[int, int]]
    accepting: set[int]

    def next_state(self, state: int, text: bytes) -> int | None:
        """Where these bytes lead from a state; None if some byte of them has no arrow."""
        current: int | None = state
        for byte in text:
            current = None if current is None else self.arrows[current].get(byte)
        return current


def compile_expression(expression: str) -> Automaton:
    """The DFA of an expression that `Reader` knows: its states are sets of NFA states that one can be in at once."""
    reader = Reader(expression)
    first = reader.nfa.new_state()
    last = reader.choice(first)
    nfa = reader.nfa
    sets = [nfa.follow({first})]
    number = {sets[0]: 0}
    arrows: list[dict[int, int]] = []
    for states in sets:  # it grows while we go through it
        targets: dict[int, set[int]] = {}
        for state in states:
            for allowed, target in nfa.steps[state]:
                for byte in allowed:
                    targets.setdefault(byte, set()).add(target)
        arrows.append({})
        for byte, reached in targets.items():
            together = nfa.follow(reached)
            if together not in number:
                number[together] = len(sets)
                sets.append(together)
            arrows[-1][byte] = number[together]
    return Automaton(arrows, {number[states] for states in sets if last in states})


# ---- and the automaton chooses among tokens ----------------------------------------------------------------------


def allowed_tokens(automaton: Automaton, state: int, vocabulary: Sequence[bytes]) -> Tensor:
    """Which tokens may come next: those whose bytes, all of them, the automaton has arrows for.

    vocabulary: the bytes of each token, by id; empty for tokens without text (control tokens), which are not allowed.
    Returns bool [vocab]. Every token is walked byte by byte, from `state` on: `automaton.arrows[at]` maps each byte
    that leads on to the next state; a byte that is not in it leads nowhere. A token may end
    in any state: more may follow.

    Example: in the first state of "[0-9]{2}" the tokens b"7" and b"42" are allowed, b"", b"123" and b"4a" are not.
    """
    allowed = []
    for text in vocabulary:
        at: int | None = state
        for byte in text:
            at = automaton.arrows[at].get(byte) if at is not None else None
        allowed.append(len(text) > 0 and at is not None)
    return torch.tensor(allowed, dtype=torch.bool)


def generate(
    next_logits: Callable[[list[int]], Tensor], prompt: list[int], automaton: Automaton, vocabulary: Sequence[bytes],
    end_id: int, max_tokens: int = 64,
) -> list[int]:  # fmt: skip
    """An answer that the automaton accepts, the most probable token each time; without its end token.

    next_logits: ids of a whole text -> float [vocab]. The end token is allowed where the text may end. An answer that
    is cut at max_tokens may be unfinished.
    """
    state, answer = 0, list[int]()
    while len(answer) < max_tokens:
        allowed = allowed_tokens(automaton, state, vocabulary)
        allowed[end_id] = state in automaton.accepting
        token = int(next_logits([*prompt, *answer]).masked_fill(~allowed, -torch.inf).argmax())
        if token == end_id:
            break
        answer.append(token)
        state = automaton.next_state(state, vocabulary[token]) or 0
    return answer
