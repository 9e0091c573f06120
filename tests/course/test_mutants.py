"""The checks of every chapter reject wrong solutions, and call the likely mistakes by their names.

The wrong solutions stand in a table for each chapter; what goes beyond exchanging a piece is tested beside its table.
"""

from __future__ import annotations

import mutants
import mutants_ch01
import mutants_ch04
import pytest
import test_mutants_ch02
import test_mutants_ch03
import test_mutants_ch05
import test_mutants_ch05_choosing
import test_mutants_ch06
import test_mutants_ch06_drafts
import test_mutants_ch07
import test_mutants_ch07_calibration

from llmfromscratch.course import exercises

MUTANTS: mutants.Mutants = {
    **mutants_ch01.MUTANTS,
    **test_mutants_ch02.MUTANTS,
    **test_mutants_ch03.MUTANTS,
    **mutants_ch04.MUTANTS,
    **test_mutants_ch05.MUTANTS,
    **test_mutants_ch05_choosing.MUTANTS,
    **test_mutants_ch06.MUTANTS,
    **test_mutants_ch06_drafts.MUTANTS,
    **test_mutants_ch07.MUTANTS,
    **test_mutants_ch07_calibration.MUTANTS,
}
# of a class, the methods that the chapter leaves blank; those not named are given
BLANKS = {
    **{exercise_id: ["forward"] for exercise_id in ("1.6", "1.8", "1.9", "1.10")},
    "2.8": ["push", "flush"],
    "3.8": ["allocate", "share", "release"],
    "4.5": ["key"],
}


@pytest.mark.parametrize("exercise_id", MUTANTS)
def test_the_reference_written_as_the_learners_own_passes(exercise_id):
    mutants.expect_pass(exercise_id)


@pytest.mark.parametrize(("exercise_id", "piece", "instead", "diagnosis"), mutants.cases_of(MUTANTS))
def test_a_mutant_is_rejected_with_the_right_diagnosis(exercise_id, piece, instead, diagnosis):
    mutants.expect_rejection(exercise_id, piece, instead, diagnosis)


@pytest.mark.parametrize("exercise_id", MUTANTS)
def test_the_engines_own_object_and_a_call_of_it_are_refused(exercise_id):
    mutants.expect_refusal_of_the_engines_own(exercise_id)


@pytest.mark.parametrize("exercise_id", MUTANTS)
def test_a_blank_is_not_yet_written(exercise_id):
    mutants.expect_not_yet_written(exercise_id, BLANKS.get(exercise_id))


@pytest.mark.parametrize("chapter", exercises.chapters())
def test_every_exercise_of_a_chapter_has_at_least_five_mutants(chapter):
    listed = {exercise_id: those for exercise_id, those in MUTANTS.items() if exercise_id.startswith(f"{chapter}.")}
    mutants.expect_enough(chapter, listed)
