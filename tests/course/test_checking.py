"""check(): one line where it is right, a few kind and precise ones where it is not, and nothing gets out of hand."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_registry import exercise, install

from llmfromscratch.course import exercises, limits
from llmfromscratch.course.checking import check, contained, run_check
from llmfromscratch.course.failures import CheckFailed, NotYetWritten


def twice(double):
    for number in (1, 2):
        if double(number) != 2 * number:
            raise CheckFailed(
                "twice the number",
                case=f"{number}: got {double(number)}, expected {2 * number}",
                mistake="the number is squared",
            )


def failure_of(monkeypatch: pytest.MonkeyPatch, function, **more) -> CheckFailed:
    install(monkeypatch, exercise(twice, **more))
    with pytest.raises(CheckFailed) as caught:
        check("1.3", function)
    return caught.value


def test_a_right_answer_prints_one_line_and_gives_nothing_back(monkeypatch, capsys):
    install(monkeypatch, exercise(twice))
    assert check("1.3", lambda number: number + number) is None
    out, err = capsys.readouterr()
    assert out == "✓ 1.3 doubling (2 points), not recorded: no course folder here, call start() first\n"
    assert err == ""


def test_a_wrong_answer_says_what_was_expected_the_case_the_mistake_and_what_next(monkeypatch):
    failure = failure_of(monkeypatch, lambda number: number**2)
    assert str(failure).splitlines() == [
        "✗ 1.3 doubling: not right yet",
        "  expected: twice the number",
        "  smallest case that fails: 1: got 1, expected 2",
        "  likely mistake: the number is squared",
        '  next: hint("1.3")',
    ]
    assert failure._render_traceback_() == str(failure).splitlines()
    assert failure.__cause__ is None and failure.__context__ is None


def test_a_blank_says_that_it_is_not_yet_written(monkeypatch):
    def double(number):
        # YOUR CODE HERE
        raise NotImplementedError()

    failure = failure_of(monkeypatch, double)
    assert isinstance(failure, NotYetWritten)
    assert str(failure).splitlines() == ["Exercise 1.3 is not yet written: doubling", '  next: hint("1.3")']


def first_part(number):
    raise NotImplementedError()


def test_an_earlier_blank_that_this_exercise_needs_is_named(monkeypatch):
    install(monkeypatch, exercise(twice), exercise(twice, name="first_part", exercise_id="1.2"))
    with pytest.raises(NotYetWritten, match=r"Exercise 1\.2 is not yet written") as caught:
        check("1.3", lambda number: first_part(number))
    assert "first_part written first: double uses it" in str(caught.value)


def test_a_refusal_of_torch_is_not_taken_for_a_blank(monkeypatch):
    failure = failure_of(monkeypatch, lambda number: torch.nn.Module()(number))
    assert not isinstance(failure, NotYetWritten)
    assert "NotImplementedError" in failure.error


def test_an_error_names_the_learners_own_line_and_what_it_means(monkeypatch):
    def double(number):
        return [number][number]

    failure = failure_of(monkeypatch, double)
    assert failure.line.endswith("of test_checking.py, in double: `return [number][number]`")
    assert failure.error == "IndexError: list index out of range"
    assert "an index lies outside" in failure.mistake


def test_a_result_that_the_check_cannot_use_is_no_traceback(monkeypatch):
    checks: dict = {}
    exec(compile("def shape_of(double): return double(1).shape", exercises.__file__, "exec"), checks)
    install(monkeypatch, exercise(checks["shape_of"]))
    with pytest.raises(CheckFailed, match="could not use what your code gave it"):
        check("1.3", lambda number: None)


def endless(number):
    while True:
        pass


def endless_catching(number):
    while True:
        try:
            number += 1
        except Exception:
            number = 0


def endless_catching_all(number):
    while True:
        try:
            while True:
                number += 1
        except:  # noqa: E722
            number = 0


def sleeping(number):
    time.sleep(60)


@pytest.mark.parametrize("function", [endless, endless_catching, endless_catching_all, sleeping])
def test_code_that_does_not_end_is_stopped_and_its_line_named(monkeypatch, function):
    started = time.monotonic()
    failure = failure_of(monkeypatch, function, seconds=0.3)
    assert time.monotonic() - started < 3
    assert failure.verdict.startswith("stopped after 0.3 s in line ")
    assert function.__name__ in failure.verdict
    assert sys.gettrace() is None or "coverage" in str(sys.gettrace())


def test_outside_the_main_thread_a_watchdog_stops_it(monkeypatch):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(failure_of(monkeypatch, endless, seconds=0.3)))
    thread.start()
    thread.join(10)
    assert seen and seen[0].verdict.startswith("stopped after 0.3 s")


def test_someone_elses_alarm_goes_on_after_a_check(monkeypatch):
    install(monkeypatch, exercise(twice))
    rang = []
    old_handler = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    old_timer = signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        check("1.3", lambda number: 2 * number)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.4
        time.sleep(0.6)
        assert rang == [True]
    finally:
        signal.signal(signal.SIGALRM, old_handler)
        signal.setitimer(signal.ITIMER_REAL, *old_timer)


@pytest.mark.skipif(
    sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="address space is bounded on Linux without CUDA"
)
@pytest.mark.parametrize(
    ("greedy", "much"),
    [
        (lambda n: bytearray(2**40), "too much memory"),
        (lambda n: torch.zeros(2**38), "1,099,511,627,776 bytes at once"),
        (lambda n: np.zeros(2**40), "8,796,093,022,208 bytes at once"),
    ],
    ids=["bytes", "tensor", "array"],
)
def test_code_that_eats_memory_is_stopped_and_the_bound_lifted_again(monkeypatch, greedy, much):
    import resource

    monkeypatch.setattr(limits, "MEMORY", 2**30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    failure = failure_of(monkeypatch, greedy)
    assert failure.verdict == f"stopped because it asked for {much}"
    assert "a size that is too large by far" in failure.mistake
    assert "at most 1 GB" in failure.expected
    assert resource.getrlimit(resource.RLIMIT_AS) == before


class Unusual(BaseException):
    pass


def leaving(number):
    sys.exit(0)


def raising_unusually(number):
    raise Unusual


@pytest.mark.parametrize(("function", "name"), [(leaving, "SystemExit"), (raising_unusually, "Unusual")])
def test_leaving_the_program_ends_only_the_check(monkeypatch, function, name):
    failure = failure_of(monkeypatch, function)
    assert name in failure.verdict and function.__name__ in failure.line


def test_an_interrupt_by_the_learner_goes_through(monkeypatch):
    def interrupted(number):
        raise KeyboardInterrupt

    install(monkeypatch, exercise(twice))
    with pytest.raises(KeyboardInterrupt):
        check("1.3", interrupted)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL


def test_what_the_code_prints_is_shown_on_stdout_and_cut(monkeypatch, capsys):
    def double(number):
        print("out", number)
        print("err", number, file=sys.stderr)
        print("x" * 100_000)
        return 2 * number

    install(monkeypatch, exercise(twice))
    check("1.3", double)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("your code printed:\nout 1\nerr 1\n")
    assert len(out) < 5000
    assert out.splitlines()[-1].startswith("✓ 1.3 doubling")


def draw_all() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - the global one is meant


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)


def test_random_numbers_are_the_same_in_every_check_and_untouched_outside(monkeypatch, capsys):
    drawn = []

    def draw(double):
        drawn.append(draw_all())
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    install(monkeypatch, exercise(draw))
    seed_all()
    want = draw_all()
    seed_all()
    check("1.3", twice)
    assert draw_all() == want
    check("1.3", twice)
    assert drawn[0] == drawn[1]
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_the_engines_own_object_is_refused(monkeypatch):
    engine = install(monkeypatch, exercise(twice))
    with pytest.raises(CheckFailed, match="this is the engine's own double"):
        check("1.3", engine.double)


def aliases(engine):
    captured = engine.double

    def through_an_alias(number):
        return captured(number)

    def through_the_module(number):
        return engine.double(number)

    def through_another_function(number):
        return engine.decorated(number)

    def hiding_the_failure(number):
        try:
            return engine.double(number)
        except BaseException:
            return 2 * number

    def by_its_name(number):
        return vars(engine)["dou" + "ble"](number)

    return [through_an_alias, through_the_module, through_another_function, hiding_the_failure, by_its_name]


@pytest.mark.parametrize("number", range(5))
def test_code_that_calls_the_engines_own_is_caught_by_whatever_name(monkeypatch, number):
    engine = install(monkeypatch, exercise(twice))
    with pytest.raises(CheckFailed, match="this calls the engine's own double"):
        check("1.3", aliases(engine)[number])
    assert engine.double(4) == 8, "the engine is whole again afterwards"


def scales(cls):
    if cls(3).scale(4) != 12:
        raise CheckFailed("the product")


def test_classes_that_inherit_from_or_wrap_the_engines_own_are_caught(monkeypatch):
    engine = install(monkeypatch, exercise(scales, name="Scaler"))

    class Scaler(engine.Scaler):
        pass

    class Wrapper:
        def __init__(self, factor):
            self.inner = engine.Scaler(factor)

        def scale(self, number):
            return self.inner.scale(number)

    with pytest.raises(CheckFailed, match="this inherits from the engine's own Scaler"):
        check("1.3", Scaler)
    with pytest.raises(CheckFailed, match="this calls the engine's own Scaler"):
        check("1.3", Wrapper)
    assert engine.Scaler(2).scale(2) == 4


def test_a_built_module_may_be_checked_against_itself(monkeypatch):
    engine = install(monkeypatch, exercise(twice))
    run_check(exercise(twice), engine.double)


def test_something_else_than_a_function_is_refused_with_the_right_call(monkeypatch):
    install(monkeypatch, exercise(twice))
    with pytest.raises(CheckFailed, match=r'as in check\("1\.3", double\)'):
        check("1.3", 6)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [("1.9", "this chapter has 1.3"), ("2.1", "there is no chapter 2"), (1.3, "a text such as '1.3', not by 1.3")],
)
def test_an_unknown_exercise_is_answered_with_those_that_exist(monkeypatch, wrong, sentence):
    install(monkeypatch, exercise(twice))
    with pytest.raises(exercises.UnknownExercise, match=sentence):
        check(wrong, twice)


def test_a_containment_without_an_exercise_has_its_own_limit():
    with pytest.raises(CheckFailed, match=r"stopped after 0\.2 s"):
        contained(lambda: endless(1), "1.a a hunt", seconds=0.2)
