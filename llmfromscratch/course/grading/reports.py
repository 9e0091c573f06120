"""Grades as a table to read, as JSON, and as the JUnit XML that CI programs show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.etree import ElementTree

from llmfromscratch.course.grading.grades import BLANK, PASSED, NotebookGrade

_MARKS = {"passed": "✓", "failed": "✗", "blank": "·", "refused": "!"}


def as_text(grades: Sequence[NotebookGrade]) -> str:
    """A table for each notebook."""
    return "\n\n".join(_text(grade) for grade in grades)


def _text(grade: NotebookGrade) -> str:
    if grade.error:
        return f"{grade.file}\n  not graded: {grade.error}"
    lines = [f"{grade.file} (chapter {grade.chapter})"]
    width = max((len(exercise.title) for exercise in grade.exercises), default=0)
    for exercise in grade.exercises:
        points = f"{exercise.points} / {exercise.possible}"
        row = f"  {_MARKS[exercise.status]} {exercise.id:5} {exercise.title:{width}}  {points:>7}  {exercise.status}"
        lines.append(row)
        said = exercise.message.splitlines() if exercise.status != BLANK else []
        lines += [f"          {line}" for line in said]
    lines.append(f"  {grade.points} of {grade.possible} points, {grade.seconds:.0f} s")
    lines += [f"  note: {note}" for note in (*grade.restored, *grade.notes)]
    return "\n".join(lines)


def as_json(grades: Sequence[NotebookGrade]) -> str:
    """One object: version, totals, and a list of files with their exercises."""
    files = [
        {
            "file": grade.file,
            "chapter": grade.chapter,
            "points": grade.points,
            "possible": grade.possible,
            "passed": grade.passed,
            "error": grade.error or None,
            "seconds": round(grade.seconds, 3),
            "restored": list(grade.restored),
            "notes": list(grade.notes),
            "exercises": [
                {
                    "id": exercise.id,
                    "title": exercise.title,
                    "points": exercise.points,
                    "possible": exercise.possible,
                    "status": exercise.status,
                    "message": exercise.message,
                }
                for exercise in grade.exercises
            ],
        }
        for grade in grades
    ]
    return json.dumps({"version": 1, "passed": all(grade.passed for grade in grades), "files": files}, indent=1) + "\n"


def as_junit(grades: Sequence[NotebookGrade]) -> str:
    """A testsuite for each notebook, a testcase for each exercise; one that could not be graded is an error."""
    root = ElementTree.Element("testsuites", name="llmfromscratch grade")
    for grade in grades:
        failures = sum(exercise.status != PASSED for exercise in grade.exercises)
        suite = ElementTree.SubElement(
            root, "testsuite", name=grade.file, tests=str(len(grade.exercises) or 1), failures=str(failures),
            errors=str(int(bool(grade.error))), skipped="0", time=f"{grade.seconds:.3f}",
        )  # fmt: skip
        if grade.error:
            case = ElementTree.SubElement(suite, "testcase", classname=grade.file, name="grading", time="0.000")
            ElementTree.SubElement(case, "error", message=grade.error).text = grade.error
        for exercise in grade.exercises:
            case = ElementTree.SubElement(
                suite, "testcase", classname=grade.chapter, name=f"{exercise.id} {exercise.title}",
                time=f"{exercise.seconds:.3f}",
            )  # fmt: skip
            if exercise.status != PASSED:
                said = f"{exercise.status}: {exercise.message}"
                failure = ElementTree.SubElement(case, "failure", message=said.splitlines()[0], type=exercise.status)
                failure.text = said
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
