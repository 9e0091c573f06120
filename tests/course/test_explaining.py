"""What a learner is told when their code raises within a check: the line, the case, and what it means."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from toy_registry import exercise, install

from llmfromscratch.course import exercises, limits, memory_errors
from llmfromscratch.course.checking import check
from llmfromscratch.course.comparing import Case, compare, expect_equal, expect_raises, expect_type
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.errors import CheckpointError


def said(monkeypatch: pytest.MonkeyPatch, a_check, function, **more) -> list[str]:
    install(monkeypatch, exercise(a_check, **more))
    with pytest.raises(CheckFailed) as caught:
        check("1.3", function)
    return str(caught.value).splitlines()


def doubles(double):
    compare(double, lambda x: 2 * x, [Case(f"x = {x}", x) for x in (1, 2)], expected="twice x")


def in_the_course(text: str):
    """A check whose code counts as the course's, not as the learner's."""
    names = {"compare": compare, "CASES": [Case("x = 1", 1)]}
    exec(compile(text, exercises.__file__, "exec"), names)
    return names["doubles"]


def test_the_case_on_which_the_code_raised_is_named_with_what_was_expected(monkeypatch):
    def double(x):
        return {1: 2}[x]

    lines = said(monkeypatch, doubles, double)
    assert lines[0] == "✗ 1.3 doubling: your code stopped with an error"
    assert lines[1].startswith("  your line: line ") and lines[1].endswith("in double: `return {1: 2}[x]`")
    assert lines[2:] == [
        "  expected: twice x", "  smallest case that fails: x = 2: your code raised KeyError: 2",
        "  likely mistake: a key is looked up that is not there", '  next: hint("1.3")',
    ]  # fmt: skip


def test_what_the_exercise_knows_of_an_error_is_said_in_place_of_what_it_means_anywhere(monkeypatch):
    def knowing(double):
        compare(double, lambda x: 2 * x, [Case("x = 1", 1)], expected="", explain=lambda error, case: "one is no key")

    lines = said(monkeypatch, knowing, lambda x: {}[x])
    assert "  likely mistake: one is no key" in lines


def test_a_call_that_does_not_fit_and_one_that_does_not_end_name_their_case_too(monkeypatch):
    lines = said(
        monkeypatch, in_the_course("def doubles(double):\n    compare(double, abs, CASES, expected='')"), lambda: 2
    )
    assert lines[0] == "✗ 1.3 doubling: your code cannot be called the way the exercise calls it"
    assert lines[2].startswith("  smallest case that fails: x = 1: TypeError: ") and "takes 0 positional" in lines[2]
    assert "the parameters are not those of the exercise's cell" in lines[3]

    def endless(x):
        while x > 1:
            pass
        return 2 * x

    lines = said(monkeypatch, doubles, endless, seconds=0.3)
    assert "stopped after 0.3 s in line" in lines[0] and "  smallest case that fails: x = 2" in lines


def refuses(double):
    expect_raises(lambda: double(9), CheckpointError, case="9 rows for 2 heads")


def test_another_exception_than_the_one_asked_for_is_no_bare_error(monkeypatch):
    def double(x):
        return torch.zeros(x).reshape(2, -1)

    lines = said(monkeypatch, refuses, double)
    assert lines[0] == "✗ 1.3 doubling: your code raised another error than was asked for"
    assert lines[2] == "  expected: CheckpointError to be raised"
    assert lines[3].startswith("  smallest case that fails: 9 rows for 2 heads: your code raised RuntimeError: shape ")
    assert "worked on before it is looked at" in lines[4]

    def blank(x):
        raise NotImplementedError()

    assert said(monkeypatch, refuses, blank)[0] == "Exercise 1.3 is not yet written: doubling"


def test_shapes_that_do_not_go_together_are_shown(monkeypatch):
    def add(double):
        case = Case("5 tokens", torch.zeros(5, 3, 8), torch.zeros(5, 4), scale=torch.ones(2))
        compare(double, lambda x, cos, scale: x, [case], expected="a sum")

    lines = said(monkeypatch, add, lambda x, cos, scale: x + cos)
    assert lines[-2] == (
        "  likely mistake: shapes that do not go together: print the shapes of both sides; "
        "here `x` is [5, 3, 8], `cos` is [5, 4], `scale` is [2]"
    )
    lines = said(monkeypatch, add, lambda *both, scale: both[0] + both[1])
    assert lines[-2].endswith("here argument 1 is [5, 3, 8], argument 2 is [5, 4], `scale` is [2]")


def test_a_failure_from_within_the_call_learns_its_case(monkeypatch):
    def fields(double):
        def apply(x):
            got = double(x)
            expect_type(got, dict)
            return got

        compare(apply, lambda x: {"a": x}, [Case("x = 1", 1)], expected="a table")

    lines = said(monkeypatch, fields, lambda x: None)
    assert "  smallest case that fails: x = 1: got None, expected a dict" in lines
    assert "  likely mistake: the `return` is missing" in lines


class OwnError(Exception):
    pass


OwnError.__module__ = "__main__"
NAMES = [
    (lambda x: struct.unpack("<Q", b"123"), "your code raised struct.error: unpack requires a buffer of 8 bytes"),
    (lambda x: json.loads("{"), "your code raised json.decoder.JSONDecodeError: "),
    (lambda x: int("x"), "your code raised ValueError: invalid literal"),
    (lambda x: (_ for _ in ()).throw(CheckpointError("no")), "your code raised CheckpointError: no"),
    (lambda x: (_ for _ in ()).throw(OwnError()), "your code raised OwnError: no message"),
]


@pytest.mark.parametrize(("function", "text"), NAMES)
def test_exceptions_have_the_names_that_the_learner_would_write(monkeypatch, function, text):
    assert text in "\n".join(said(monkeypatch, doubles, function))


NONES = [
    (lambda x: {}.get(x).groups(), "something before the dot is None: a search that found nothing (re.match"),
    (lambda x: {}.get(x)[0], "something here is None: a search that found nothing"),
    (lambda x: b"".join([b"a"] * 2**64), "a number that is too large by far: print it"),
]


@pytest.mark.parametrize(("function", "meaning"), NONES)
def test_the_meaning_of_a_none_where_a_value_was_needed_is_said(monkeypatch, function, meaning):
    assert f"likely mistake: {meaning}" in "\n".join(said(monkeypatch, doubles, function))


def test_a_none_that_the_check_itself_stumbles_over_is_taken_for_a_missing_return(monkeypatch):
    check_of_module = in_the_course(
        "def doubles(double):\n    compare(lambda x: double(x).detach(), abs, CASES, expected='a tensor')"
    )
    assert said(monkeypatch, check_of_module, lambda x: None) == [
        "✗ 1.3 doubling: the check could not use what your code gave it",
        "  expected: a tensor",
        "  smallest case that fails: x = 1: AttributeError: 'NoneType' object has no attribute 'detach'",
        "  likely mistake: your code gave None: is a `return` missing?",
        '  next: hint("1.3")',
    ]


def test_an_error_outside_of_a_comparison_is_told_as_before(monkeypatch):
    def third(double):
        expect_equal(double(3), 6, expected="six", case="3")

    def double(x):
        return [][x]

    lines = said(monkeypatch, third, double)
    assert lines[2:4] == [
        "  error: IndexError: list index out of range",
        "  likely mistake: an index lies outside of what it indexes: compare it with the length or the shape",
    ]


GB = 2**30
TOO_LARGE, GROWING = "a size that is too large by far: print it", "a list that grows in a loop without end"
REFUSED = [
    (RuntimeError("can't allocate memory: you tried to allocate 4000000000000000 bytes. Error"), None,
     "4,000,000,000,000,000 bytes at once", TOO_LARGE),
    (RuntimeError("can't allocate memory: you tried to allocate 4096 bytes. Error"), None, "too much memory", GROWING),
    (RuntimeError("Storage size calculation overflowed with sizes=[9]"), None, "too much memory", TOO_LARGE),
    (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"), None, "21,474,836,480 bytes at once",
     TOO_LARGE),
    (MemoryError("Unable to allocate 7.50 TiB for an array"), None, "8,246,337,208,320 bytes at once", TOO_LARGE),
    (MemoryError(), (GB, GB), "too much memory", TOO_LARGE),
    (MemoryError(), (GB, 9 * GB), "too much memory", f"{TOO_LARGE}, or {GROWING}"),
    (MemoryError(), None, "too much memory", f"{TOO_LARGE}, or {GROWING}"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "before", "much", "mistake"), REFUSED)
def test_one_absurd_request_is_told_from_many_small_ones(monkeypatch, error, before, much, mistake):
    monkeypatch.setattr(memory_errors, "address_space", lambda: (GB, GB + GB // 2))
    assert memory_errors.is_out_of_memory(error)
    failure = memory_errors.failure(error, "line 1", before)
    assert failure.verdict == f"stopped because it asked for {much}" and failure.mistake == mistake
    assert failure.expected == "at most 4 GB of memory above what the notebook has"


def test_what_grew_close_to_the_limit_is_a_loop(monkeypatch):
    monkeypatch.setattr(memory_errors, "address_space", lambda: (2 * GB, GB + limits.MEMORY))
    assert memory_errors.failure(MemoryError(), "", (GB, GB)).mistake == GROWING
