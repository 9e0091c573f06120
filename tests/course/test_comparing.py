"""compare() and expect_equal(): values count, the first difference is shown, and the mistake gets its name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, NamedParts, compare, expect_equal, expect_raises, expect_type
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.occasions import occasion_of


def failure(got, want, **more) -> str:
    with pytest.raises(CheckFailed) as caught:
        expect_equal(got, want, expected="the right thing", **more)
    return str(caught.value)


SAME = [
    (1, 1), (1.0, 1.0), (0.1 + 0.2, 0.3), ("a", "a"), (b"a", b"a"), (None, None), (True, True),
    (float("nan"), float("nan")),
    ([1, [2.0, "x"]], [1, [2.0, "x"]]), ((1, 2), (1, 2)), ({"a": 1}, {"a": 1}), ({1, 2}, {2, 1}),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6])), (torch.zeros(0), torch.zeros(0)),
    (torch.tensor([float("inf"), float("nan")]), torch.tensor([float("inf"), float("nan")])),
    (torch.nn.Parameter(torch.ones(2)), torch.ones(2)), (np.arange(3), np.arange(3)), (torch.float32, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("got", "want"), SAME)
def test_equal_values_pass(got, want):
    expect_equal(got, want, expected="")


DIFFERENT = [
    (torch.tensor([0.0, -1.5]), torch.tensor([0.0, -torch.inf]), "got [0, -1.5], expected [0, -inf]"),
    (1, 2, "got 1, expected 2"),
    (1.0, 1.1, "got 1, expected 1.1"),
    (True, 1, "got a bool (True), expected an int"),
    (1, 1.0, "got an int (1), expected a float"),
    (None, 3, "got None, expected an int"),
    ([1.0], torch.tensor([1.0]), "got a list ([1]), expected a torch.Tensor"),
    (torch.tensor(3), 3, "got a torch.Tensor (3), expected an int"),
    (np.float64(3.5), torch.tensor(3.5), "expected a torch.Tensor"),
    ((1, 2), [1, 2], "got a tuple ((1, 2)), expected a list"),
    ([1, 2], [1, 3], "got [1, 2], expected [1, 3]"),
    ([1, 2], [1, 2, 3], "got 2 items ([1, 2]), expected 3 items ([1, 2, 3])"),
    ({"a": 1}, {"a": 1, "b": 2}, "key 'b' is missing"),
    ({"a": 1, "c": 2}, {"a": 1}, "key 'c' should not be there"),
    ({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.zeros(1)]}, "the result['a'][1]: got [1], expected [0]"),
    (torch.ones(2, 1), torch.ones(1, 2), "got shape [2, 1], expected shape [1, 2]"),
    (torch.ones(2).double(), torch.ones(2), "got dtype torch.float64, expected dtype torch.float32"),
    (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), "got [1, 3], expected [1, 2] (1 of 2 values differ)"),
    (torch.zeros(2, 20), torch.eye(20)[:2], "the result[0, 0]: got 0, expected 1 (2 of 40 values differ)"),
    (torch.tensor([float("nan")]), torch.tensor([1.0]), "got [nan], expected [1]"),
    (np.arange(3), np.arange(3) + 1, "got [0, 1, 2], expected [1, 2, 3]"),
    (np.arange(3.0), np.arange(3), "got dtype float64, expected dtype int64"),
    (torch.tensor([1e-9, 1.0]), torch.tensor([1e-9, 1.0001]), "(1 of 2 values differ)"),
]


def test_parts_that_the_check_has_named_are_told_by_their_names():
    want = NamedParts(ids=torch.ones(2, 20), mask=[1, 1])
    assert "ids[0, 0]: got 0, expected 1" in failure(NamedParts(ids=torch.zeros(2, 20), mask=[1, 1]), want)
    assert "fails: mask: got [1, 0], expected [1, 1]" in failure(NamedParts(ids=torch.ones(2, 20), mask=[1, 0]), want)
    said = failure(NamedParts(ids=torch.ones(2, 20), mask=None), want, what="the texts")
    assert "fails: mask: got None, expected a list" in said
    grown = torch.nn.Parameter(torch.ones(2, 20))
    expect_equal(NamedParts(ids=grown * 1, mask=[1, 1]), want, expected="")


@pytest.mark.parametrize(("got", "want", "said"), DIFFERENT)
def test_different_values_fail_and_the_first_difference_is_said(got, want, said):
    assert said in failure(got, want)


@dataclass
class Report:
    missing: list
    count: int = 0


def test_dataclasses_are_compared_by_field_whoever_defined_the_class():
    @dataclass
    class Other:
        missing: list
        count: int = 0

    Other.__name__ = "Report"
    expect_equal(Other(["a"]), Report(["a"]), expected="")
    assert "the result.missing: got ['b'], expected ['a']" in failure(Other(["b"]), Report(["a"]))
    assert "got a dict, expected a Report" in failure({}, Report([]))


GENERAL = [
    (None, torch.ones(2), "the `return` is missing"),
    (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).T, "the result is transposed"),
    (torch.arange(6.0).reshape(2, 3), torch.arange(6.0), "the values are right, in another shape"),
    (torch.zeros(3), torch.ones(3), "the result is all zeros"),
    (torch.tensor([1.0, -3.0]), torch.tensor([2.0, -6.0]), "every value is 0.5 times the right one"),
    (torch.tensor([1.0, -3.0]), torch.tensor([-1.0, 3.0]), "every sign is wrong"),
    (torch.tensor([0.0 / 1, float("nan")]), torch.tensor([1.0, 1.0]), "the result has NaN in it"),
    (torch.tensor([1.0, 2, 3, 0]), torch.tensor([1.0, 2, 3, 4]), "right until index 2, then wrong from index 3 on"),
    ([5, 6, 0, 0], [5, 6, 7, 8], "right until index 1, then wrong from index 2 on"),
]


@pytest.mark.parametrize(("got", "want", "mistake"), GENERAL)
def test_mistakes_that_any_exercise_knows_are_named(got, want, mistake):
    assert f"likely mistake: {mistake}" in failure(got, want)


def test_no_mistake_is_named_where_none_fits():
    assert "likely mistake" not in failure(torch.tensor([1.0, 7.0, 3.0]), torch.tensor([2.0, 5.0, 3.5]))


def test_the_tolerance_follows_the_dtype_and_the_size_of_the_values():
    large = torch.tensor([1e6, 0.0])
    expect_equal(large + torch.tensor([0.0, 1.0]), large, expected="")
    with pytest.raises(CheckFailed):
        expect_equal(large + torch.tensor([0.0, 100.0]), large, expected="")
    expect_equal(torch.ones(2).bfloat16() * 1.01, torch.ones(2).bfloat16(), expected="")
    expect_equal(torch.ones(2) * 1.01, torch.ones(2), expected="", tolerance=Tolerance(relative=0.1))


CASES = [Case(f"n={n}, sign={sign}", torch.arange(float(n)), sign=sign) for n in (1, 2, 5) for sign in (1, -1)]


def right(x, sign):
    return sign * x * 2 + 1


def forgets_the_sign(x, sign):
    return x * 2 + 1


def forgets_the_one(x, sign):
    return sign * x * 2


MISTAKES = [("the sign is not used", forgets_the_sign), ("the 1 is not added", forgets_the_one)]


def compared(function, **more) -> str:
    with pytest.raises(CheckFailed) as caught:
        compare(function, right, CASES, expected="twice x with its sign, and one", mistakes=MISTAKES, **more)
    return str(caught.value)


def test_a_right_function_passes_every_case():
    compare(lambda x, sign: 1 + 2 * x * sign, right, CASES, expected="")


def test_the_smallest_case_that_fails_is_shown_and_the_mistake_that_fits_all_is_named():
    said = compared(forgets_the_sign)
    assert "smallest case that fails: n=2, sign=-1: got [1, 3], expected [1, -1] (1 of 2 values differ)" in said
    assert "likely mistake: the sign is not used" in said
    assert "likely mistake: the 1 is not added" in compared(forgets_the_one)


def test_a_mistake_that_fits_only_the_smallest_case_is_not_named():
    def another(x, sign):
        return forgets_the_one(x, sign) if len(x) == 1 else x * 77

    assert "likely mistake" not in compared(another)


def test_a_mistake_that_would_fail_where_the_code_is_right_is_not_named():
    def wrong_at_five(x, sign):
        return right(x, sign) if len(x) < 5 else forgets_the_one(x, sign)

    assert "n=5, sign=1" in compared(wrong_at_five)
    assert "the 1 is not added" not in compared(wrong_at_five)


def affine(signed=True, one=True, twice=True):
    def function(x, sign):
        return (sign if signed else 1) * x * (2 if twice else 1) + (1 if one else 0)

    return function


TOGETHER = [("the sign is not used", {"signed": False}), ("the 1 is not added", {"one": False}),
            ("x is not doubled", {"twice": False})]  # fmt: skip


def combined_sentence(function, at_once=3) -> str:
    with pytest.raises(CheckFailed) as caught:
        compare(function, affine(), CASES[2:], expected="", mistakes=combined(affine, TOGETHER, at_once))
    return str(caught.value)


def test_of_mistakes_made_together_the_one_that_explains_the_case_that_is_shown_is_named():
    assert "n=2, sign=1: " in combined_sentence(affine(signed=False, one=False))
    assert "mistake: the 1 is not added" in combined_sentence(affine(signed=False, one=False))
    assert "mistake: x is not doubled" in combined_sentence(affine(signed=False, twice=False))
    assert "mistake: the sign is not used" in combined_sentence(affine(signed=False))


def test_mistakes_that_explain_a_case_only_together_are_both_named_and_more_than_two_are_not():
    said = combined_sentence(affine(one=False, twice=False))
    assert "mistake: the 1 is not added; and x is not doubled" in said
    assert "likely mistake: the" not in combined_sentence(affine(one=False, twice=False), at_once=1)
    said = combined_sentence(affine(signed=False, one=False, twice=False))
    assert not any(sentence in said for sentence, _ in TOGETHER)


def test_an_error_is_explained_by_what_the_exercise_knows_of_it():
    def fails(x, sign):
        return {}["key"] if len(x) == 2 else right(x, sign)

    with pytest.raises(KeyError) as caught:
        compare(fails, right, CASES, expected="", explain=lambda error, case: f"{error} for {case.text}")
    assert occasion_of(caught.value).meaning == "'key' for n=2, sign=1"


def test_a_diagnosis_is_asked_where_no_named_mistake_fits():
    said = compared(lambda x, sign: x + 5, diagnose=lambda got, want: f"off by {float((got - want)[0]):.0f}")
    assert "likely mistake: off by 4" in said


def test_a_later_case_that_raises_does_not_hide_the_first_failure():
    def wrong(x, sign):
        if len(x) == 5:
            raise ValueError("boom")
        return x

    assert "n=1, sign=1: got [0], expected [1]" in compared(wrong)


def test_arguments_changed_in_place_are_named_even_where_the_result_is_right():
    def in_place(x, sign):
        return x.mul_(2).mul_(sign).add_(1)

    said = compared(in_place)
    assert "n=1, sign=1: the call changed `x`: it was [0], then [1]" in said
    assert "an operation in place" in said
    with pytest.raises(CheckFailed, match=r"the call changed `items`: it was 2 items \(\[1, 2\]\), then 1 item "):
        compare(lambda items: items.pop(), lambda items: items[-1], [Case("", items=[1, 2])], expected="")


def test_the_first_value_that_changed_in_a_large_argument_is_shown():
    def in_place(values, *more):
        values[0, 2] += 1
        more[0][0, 20] = 7
        return values

    large, other = torch.zeros(2, 24), torch.zeros(1, 24)
    with pytest.raises(CheckFailed) as caught:
        compare(in_place, lambda *_: large, [Case("two rows", large, other)], expected="")
    assert "two rows: the call changed `values`: its value at [0, 2] was 0, then 1 (1 of 48 values" in str(caught.value)
    with pytest.raises(CheckFailed, match=r"the call changed argument 2: its value at \[0, 20\] was 0, then 7"):
        compare(lambda v, *m: in_place(v.clone(), *m), lambda *_: large, [Case("", large, other)], expected="")


def squared(x, weight):
    return ((x.float() * x.float()) * weight).to(x.dtype)


DTYPE_CASES = [Case("half", torch.ones(3).half(), 2.0), Case("more", torch.arange(4.0).half(), 1.0)]
AS_IF = [("the weight is not used", lambda x, weight: x.float() * x.float()),
         ("the square is missing", lambda x, weight: (x.float() * weight).to(x.dtype))]  # fmt: skip


def on_halves(function, cases) -> str:
    with pytest.raises(CheckFailed) as caught:
        compare(function, squared, cases, expected="", mistakes=AS_IF)
    return str(caught.value)


def test_where_only_the_dtype_is_wrong_that_is_the_mistake_though_a_named_one_has_the_same_values():
    said = on_halves(lambda x, weight: x.float() * x.float() * weight, DTYPE_CASES)
    assert "likely mistake: the values are right, the dtype is not: bring the result back to the dtype of `x`" in said
    said = on_halves(lambda x, weight: x.float() * x.float() * weight, [Case("", torch.ones(3).half(), 1.0)])
    assert "likely mistake: the values are right, the dtype is not" in said
    said = failure(torch.ones(2), torch.ones(2).half(), mistakes=[("a wrong one", torch.ones(2))])
    assert "the values are right, the dtype is not: the result should be torch.float16" in said
    assert "the dtype" not in failure(torch.ones(2) + 1, torch.ones(2).half(), mistakes=[]).split("likely mistake")[-1]


def test_a_named_mistake_is_named_where_the_values_are_wrong_too():
    assert "the weight is not used" in on_halves(lambda x, weight: x.float() * x.float(), DTYPE_CASES)
    assert "the square is missing" in on_halves(lambda x, weight: x.float() * weight, DTYPE_CASES)
    both = [("values alone", lambda x, weight: x.float() + 1), ("dtype too", lambda x, weight: x + 1)]
    with pytest.raises(CheckFailed, match="likely mistake: dtype too"):
        compare(lambda x, weight: x + 1, squared, DTYPE_CASES, expected="", mistakes=both)


def test_results_that_ask_for_a_gradient_are_compared_as_they_come_and_none_gets_the_usual_words(recwarn):
    layer = torch.nn.Linear(2, 2, bias=False)
    weight = layer.weight.detach()
    cases = [Case("ones", torch.ones(1, 2))]
    compare(lambda x: layer(x), lambda x: x @ weight.T, cases, expected="")
    compare(lambda x: [layer(x), {"a": layer(x)}], lambda x: [x @ weight.T, {"a": layer(x)}], cases, expected="")
    expect_equal(layer(torch.ones(1, 2)), layer(torch.ones(1, 2)), expected="")
    for wrong, said in ((None, "the `return` is missing"), (layer(torch.ones(1, 2)) * 2, "every value is 2 times")):
        with pytest.raises(CheckFailed) as caught:
            compare(lambda x, wrong=wrong: wrong, lambda x: x @ weight.T, cases, expected="")
        assert said in str(caught.value)
    assert "got None, expected a torch.Tensor" in failure(None, layer(torch.ones(1, 2)))
    assert len(recwarn) == 0


def test_the_right_type_is_insisted_upon_and_exceptions_are_asked_for():
    expect_type(torch.ones(1), torch.Tensor)
    with pytest.raises(CheckFailed, match="got a list"):
        expect_type([1], torch.Tensor)
    with pytest.raises(CheckFailed, match="the `return` is missing"):
        expect_type(None, torch.Tensor)
    assert "x" in expect_raises(lambda: {}["x"], KeyError, case="a missing key")
    with pytest.raises(CheckFailed, match="a missing key: got 3, and nothing was raised"):
        expect_raises(lambda: 3, KeyError, case="a missing key")
    with pytest.raises(ZeroDivisionError):
        expect_raises(lambda: 1 / 0, KeyError, case="")
