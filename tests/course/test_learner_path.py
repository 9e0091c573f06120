"""The learner's path through chapter 1: write, run, build, restart, and the engine answers through their own code."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import acting_learner
import pytest
from acting_learner import Chapter, cell_of, check_of, marker

from llmfromscratch import hub, learner_engine
from llmfromscratch.course import lab
from llmfromscratch.course.exercise import Exercise

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

SENTENCE = "The answer to this question lies in the intricate dance of light and color."
# they print times, show pictures or wait for transformers, and nothing that is built depends on them
SIDE_CELLS = {
    "checkpoint-map", "placement-planner", "hunt-a", "hunt-b", "hunt-c",
    "measure-loading", "measure-transformers", "equal-to-transformers",
}  # fmt: skip
# the model itself: what a run about recording and building does not need
MODEL_CELLS = {"random-weights", "next-token", "answer"}
ANSWER = """
from llmfromscratch import LLM, SamplingParams
question = [{"role": "user", "content": "Why is the sky blue?"}]
print(LLM(dtype="float32").chat(question, SamplingParams(max_tokens=20)).text)
"""
CHAPTER = Chapter("01_loading")
MAIN_CELLS = [name for name in CHAPTER.cells if name not in SIDE_CELLS]
BUILDING_CELLS = [name for name in MAIN_CELLS if name not in MODEL_CELLS]
BUILT = ("loading", "model")
Finished = tuple[Path, dict[str, str]]  # a course folder, and what each cell printed there


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A folder in which the whole chapter was solved and run; what each cell printed, by id."""
    folder = hand_out(tmp_path_factory.mktemp("clone") / "my_course")
    return folder, dict(run(folder, CHAPTER.written(CHAPTER.exercises), MAIN_CELLS))


@pytest.fixture
def course(finished: Finished, tmp_path: Path) -> Path:
    """A finished course of this test's own."""
    return shutil.copytree(finished[0], tmp_path / "my_course")


def hand_out(folder: Path) -> Path:
    """A learner's folder as `llmfromscratch lab` makes it; the model is fetched."""
    hub.resolve(hub.DEFAULT_MODEL)
    lab.prepare(folder, acting_learner.ROOT / "chapters")
    return folder


def run(folder: Path, cells: Mapping[str, str], order: Sequence[str]) -> list[tuple[str, str]]:
    """Restarts the kernel and runs cells, named by their ids, in an order; returns each id with what it printed."""
    ran = acting_learner.run_in_kernel(folder, [cells[name] for name in order])
    errors = [ran.error(index) for index in range(len(order))]
    said = [f"{e.ename}: {e.evalue}" if e else ran.text(index) for index, e in enumerate(errors)]
    return list(zip(order, said, strict=True))


def assert_all_passed(said: dict[str, str], exercises: Iterable[Exercise]) -> None:
    for exercise in exercises:
        points = f"{exercise.points} point{'s' if exercise.points > 1 else ''}"
        assert said[check_of(exercise)] == f"✓ {exercise.id} {exercise.title} ({points})\n"


def assert_not_yet_written(said: dict[str, str], exercise: Exercise) -> None:
    assert f"Exercise {exercise.id} is not yet written" in said[check_of(exercise)]


def built(folder: Path, module: str) -> str:
    return (folder / "my_engine" / f"{module}.py").read_text(encoding="utf-8")


def exercises_of(module: str) -> list[Exercise]:
    return [exercise for exercise in CHAPTER.exercises if exercise.replaceable == module]


def reference(exercise: Exercise) -> str:
    return learner_engine.reference_path(exercise.module).read_text(encoding="utf-8")


def assert_is_the_learners(folder: Path, exercise: Exercise) -> None:
    """The blanked function in the built module is what was typed: marked, and no statement of the reference in it."""
    assert exercise.replaceable is not None
    (blanked,) = acting_learner.blanked_functions(CHAPTER.blank(exercise))

    def body(text: str) -> list[str]:
        function = acting_learner.function_in(acting_learner.definition(text, exercise.name), blanked.name)
        return [ast.unparse(statement) for statement in acting_learner.statements(function)]

    mine, theirs = body(built(folder, exercise.replaceable)), body(reference(exercise))
    assert mine[0] == marker(exercise)
    assert theirs and not set(mine) & set(theirs), exercise.id


def assert_is_the_references(folder: Path, exercise: Exercise) -> None:
    assert exercise.replaceable is not None
    mine, theirs = (
        ast.unparse(acting_learner.definition(text, exercise.name))
        for text in (built(folder, exercise.replaceable), reference(exercise))
    )
    assert mine == theirs


def assert_engine_answers_after_a_restart(folder: Path) -> None:
    """In a new process, with the two built modules; the reference's files of these are not even opened."""
    engine = folder / "my_engine"
    said = acting_learner.restart(engine)
    assert said["answer"].startswith(SENTENCE)
    assert said["files"] == [str(engine / f"{module}.py") for module in BUILT]
    assert set(said["files"]) <= set(said["opened"])
    package = acting_learner.ROOT / "llmfromscratch"
    inside = [Path(file) for file in said["opened"] if Path(file).parent in (package, package / "__pycache__")]
    stems = {file.name.split(".")[0] for file in inside}
    assert "config" in stems and not stems & set(BUILT)


def test_what_is_typed_differs_from_the_reference_in_every_statement_and_is_marked() -> None:
    (unpermute,) = [exercise for exercise in CHAPTER.exercises if exercise.name == "unpermute"]
    cell = acting_learner.typed(CHAPTER.blank(unpermute), unpermute)
    assert marker(unpermute) in cell and "my_pairs = my_weight.reshape(my_num_heads, " in cell
    assert cell.startswith("def unpermute(weight: Tensor, num_heads: int) -> Tensor:\n")


def test_the_whole_chapter_passes_and_builds_modules_with_nothing_of_the_reference_where_the_learner_wrote(
    finished: Finished,
) -> None:
    folder, said = finished
    assert_all_passed(said, CHAPTER.exercises)
    assert [text for text in said.values() if "Error" in text or "Failed" in text] == []
    assert "still the reference's" not in said["build"]
    assert said["build"].count("checked in a fresh process") == 2
    assert said["answer"].startswith(SENTENCE)
    for module in BUILT:
        names = ", ".join(f"{exercise.id} {exercise.name}" for exercise in exercises_of(module))
        assert f"# yours: {names}\n# still the reference's: none of the exercises\n" in built(folder, module)
        for exercise in exercises_of(module):
            assert_is_the_learners(folder, exercise)


def test_after_a_restart_the_finished_engine_answers_without_the_references_modules(finished: Finished) -> None:
    assert_engine_answers_after_a_restart(finished[0])


def test_the_command_line_answers_through_the_learners_engine_and_shows_the_board(finished: Finished) -> None:
    folder, _ = finished
    command = ["generate", "Why is the sky blue?", "--engine", "my_engine", "--max-tokens", "20", "--dtype", "float32"]
    assert acting_learner.run_program(["-m", "llmfromscratch", *command], folder).startswith(SENTENCE)
    board = acting_learner.run_program(["-m", "llmfromscratch", "board"], folder).splitlines()
    states = {line.split()[0]: line.split()[1:5] for line in board if line.strip("-")}
    assert states["loading"] == ["yours", "12", "/", "12"] and states["model"] == ["yours", "14", "/", "14"]


def test_with_every_second_exercise_blank_the_reference_fills_in_and_says_so_everywhere(tmp_path: Path) -> None:
    folder = hand_out(tmp_path / "my_course")
    solved = CHAPTER.exercises[1::2]
    said = dict(run(folder, CHAPTER.written(solved), BUILDING_CELLS))

    *passed, last = solved  # the whole model needs the decoder layer, which is blank
    assert_all_passed(said, passed)
    for exercise in CHAPTER.exercises[0::2]:
        assert_not_yet_written(said, exercise)
    assert "Exercise 1.9 is not yet written" in said[check_of(last)] and "Model uses it" in said[check_of(last)]

    whole = acting_learner.run_program(["-m", "llmfromscratch", "board"], folder)
    for module, possible in (("loading", "6 / 12"), ("model", "4 / 14")):
        mine = [exercise for exercise in exercises_of(module) if exercise in passed]
        theirs = [exercise for exercise in exercises_of(module) if exercise not in passed]
        names = ", ".join(f"{exercise.id} {exercise.name}" for exercise in theirs)
        assert f"still the reference's: {names}\n" in said["build"]
        assert f"# still the reference's: {names}\n" in built(folder, module)
        (row,) = [line for line in whole.splitlines() if line.startswith(f"{module} ")]
        assert f"partly yours (2 of {len(mine + theirs)})" in row and possible in row
        assert ", ".join(exercise.id for exercise in theirs) in row
        for exercise in mine:
            assert_is_the_learners(folder, exercise)
        for exercise in theirs:
            assert_is_the_references(folder, exercise)
    assert_engine_answers_after_a_restart(folder)


def test_a_built_file_edited_by_hand_is_used_kept_and_set_aside_only_when_asked(course: Path) -> None:
    file = course / "my_engine" / "loading.py"
    (names,) = [exercise for exercise in CHAPTER.exercises if exercise.name == "canonical_name"]
    unedited = built(course, "loading")
    edited = unedited.replace(marker(names), "print('a line of mine')")
    assert edited != unedited
    file.write_text(edited, encoding="utf-8")
    discard = 'build("loading", discard_edits=True)'
    look = 'from llmfromscratch import loading\nprint(loading.canonical_name("output.weight"))'
    cells = {**CHAPTER.cells, "build": 'build("loading")', "answer": ANSWER, "discard": discard, "look": look}
    said = run(course, cells, ["set-up", "build", "answer", "look", "discard", "look"])
    board, kept, answer, before, aside, after = (text for _, text in said)

    assert [line for line in board.splitlines() if line.startswith("loading ") and "edited by hand" in line]
    assert "my_engine/loading.py was edited by hand, so it stays as it is" in kept and discard in kept
    assert answer.startswith("a line of mine\n") and SENTENCE in answer
    assert "Your edited file is now my_engine/loading.edited-1.py" in aside and "Built my_engine/loading.py" in aside
    assert (before, after) == ("a line of mine\nlm_head.weight\n", "lm_head.weight\n")
    assert (course / "my_engine" / "loading.edited-1.py").read_text(encoding="utf-8") == edited
    assert built(course, "loading") == unedited


def test_nothing_of_a_wrong_solution_gets_into_the_built_module_before_or_after_a_right_one(tmp_path: Path) -> None:
    folder = hand_out(tmp_path / "my_course")
    (right, unpermute) = [e for e in CHAPTER.exercises if e.name in ("dequantize_q4_1", "unpermute")]
    guess = "wrong_guess = weight\nreturn wrong_guess.clone()"
    cells = {
        **CHAPTER.written([right, unpermute]),
        "wrong": acting_learner.typed(CHAPTER.blank(unpermute), unpermute, guess),
        "build": 'build("loading")',
        "look": 'print(open("my_engine/loading.py", encoding="utf-8").read())',
    }  # fmt: skip
    begin = ["set-up", "stored-tensors", cell_of(right), check_of(right)]
    wrong = ["wrong", check_of(unpermute), "build", "look"]
    corrected = [cell_of(unpermute), check_of(unpermute)]
    said = run(folder, cells, [*begin, *wrong, *corrected, *wrong])

    verdicts = [text for name, text in said if name == check_of(unpermute)]
    assert [verdict.split()[0] for verdict in verdicts] == ["CheckFailed:", "✓", "CheckFailed:"]
    before, after = (text for name, text in said if name == "look")
    assert "# yours: 1.2 dequantize_q4_1\n" in before and "# yours: 1.2 dequantize_q4_1, 1.4 unpermute\n" in after
    assert "wrong_guess" not in before + after
    assert marker(unpermute) not in before and marker(unpermute) in after
    assert_is_the_learners(folder, unpermute)


def test_the_notebook_runs_a_second_time_and_its_cells_in_another_order_and_builds_the_same(
    finished: Finished, course: Path
) -> None:
    written, checks = ([name(exercise) for exercise in CHAPTER.exercises] for name in (cell_of, check_of))
    # when these run, the notebook's loading is the built one
    after_building = ["name-tables", "exercise-1-3", "check-1-3", "the-open-book", "build"]
    order = [*BUILDING_CELLS, *reversed(written), *reversed(checks), *after_building]
    said = run(course, CHAPTER.written(CHAPTER.exercises), order)
    half = len(BUILDING_CELLS)
    assert_all_passed(dict(said[:half]), CHAPTER.exercises)
    assert_all_passed(dict(said[half:]), CHAPTER.exercises)
    assert [text for _, text in said if "Error" in text or "Failed" in text] == []
    for module in BUILT:
        assert built(course, module) == built(finished[0], module)
