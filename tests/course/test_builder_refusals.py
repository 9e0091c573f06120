"""What the builder refuses, each with the line and a reason that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_chapter import CHECK, built, chapter, exercise, write_toys

from llmfromscratch.course.authoring.builder import build_notebooks
from llmfromscratch.course.authoring.source import SourceError


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    return write_toys(tmp_path)


def refusal(text: str, folder: Path, file: str = "toys.md") -> str:
    with pytest.raises(SourceError) as caught:
        built(text, folder, file)
    return str(caught.value)


@pytest.mark.parametrize(
    "language", ["bash", "sh", "sql", "html", "javascript", "R", "py", "python3", "markdown", "latex"]
)
def test_a_fence_that_would_run_or_is_unknown_is_refused_with_its_line(toys, language):
    message = refusal(f"# A\n\n```{language}\nls\n```\n", toys)
    assert message.startswith("toys.md:3: ")
    assert "console, text" in message


@pytest.mark.parametrize("language", ["console", "text", "json", ""])
def test_a_fence_of_text_stays_in_its_markdown_cell_even_with_blank_lines(toys, language):
    text = f"# A\n\n```{language}\none\n\n\n# two\n```\n\nend"
    assert [cell.source for cell in built(text, toys).blank.cells] == [text]


@pytest.mark.parametrize(
    ("fence", "reason"),
    [
        ("```python", "one of label, exercise, check; this one has none"),
        ('```python label="a" check="1.1"', "this one has label and check"),
        ('```python label="a" colour="red"', "'colour' is not known"),
        ('```python label="a" active="md"', "'active' is not known"),
        ("```python label=a", "quoted"),
        ('```python exercise=3.10 object="toys.shapes.area" points="1"', "quoted"),
        ('```python label="a', "quoted"),
        ('```python title label="a"', "quoted"),
        ('```python label="a" label="b"', "given twice"),
        ('```python label="A b"', "lower-case words"),
        ('```python label="' + "a" * 41 + '"', "more than 40"),
        ('```python label="a" volatile="yes"', 'volatile="true"'),
        ('```python label="a" points="1"', "points has no meaning beside 'label'"),
        ('```python exercise="1.1" object="toys.shapes.area"', "lacks points"),
        ('```python exercise="1.1" object="toys.shapes.area" points="0"', "above 0"),
        ('```python exercise="1.01" object="toys.shapes.area" points="1"', "chapter and number"),
        ('```python exercise="1.1" object="area" points="1"', "dotted name"),
        ('  ```python label="a"', "beginning of its line"),
        ('````python label="a"', "exactly three backticks"),
        ('~~~python label="a"', "exactly three backticks"),
        ('```{python} label="a"', "not known"),
        ("~~~text", "not known"),
        ('```text label="a"', "without attributes"),
    ],
)  # fmt: skip
def test_a_wrong_fence_is_refused_with_its_reason(toys, fence, reason):
    marker = fence.strip()[: 4 if fence.startswith("````") else 3]
    assert reason in refusal(f"# A\n\n{fence}\n{marker}\n", toys)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("# A\n\n```text\nopen\n", 3, "never closed"),
        ('# Top\n\n```python label="a"\n```\n\n# B\n\n```python label="a"\n```\n', 8, "'a' is taken at line 3"),
        ("# A\n\nx\n\n\n# A\n", 6, "'a' is taken at line 1"),
        ("# A\n\none\n\n\ntwo\n", 6, "two blank lines"),
        ("no heading\n", 1, "needs a heading or a label"),
        ("# !?\n", 1, "no letter"),
        ("# A\n\n<!-- label: b -->\ntext\n", 1, "Put two blank lines before it"),
        ("<!-- label: Not Good -->\ntext\n", 1, "lower-case words"),
        ("<!-- label: a -->\n", 1, "without a text"),
        ("# A\n\n<!-- a remark -->\n", 3, "is not known"),
        ("# A\n\n<!-- #region -->\nx\n<!-- #endregion -->\n", 3, "is not known"),
        ("---\ntitle: x\n---\n\n# A\n", 1, "header"),
        ('# A\n\n```python label="a"\nx = """\n```bash\n"""\n```\n', 3, "line of backticks"),
    ],
)
def test_wrong_markdown_is_refused_with_its_line_and_reason(toys, text, line, reason):
    message = refusal(text, toys)
    assert message.startswith(f"toys.md:{line}: ")
    assert reason in message


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([exercise("1.1")], "exercise 1.1 has no check"),
        ([exercise("1.1"), exercise("1.2")], "exercise 1.1 has no check before exercise 1.2"),
        ([CHECK.format("1.1")], "the check of 1.1 does not follow it"),
        ([exercise("1.1"), CHECK.format("1.2")], "the check of 1.2 does not follow it"),
        ([exercise("1.1"), CHECK.format("1.1"), CHECK.format("1.1")], "'check-1-1' is taken"),
        ([exercise("1.2"), CHECK.format("1.2")], "exercise 1.2 stands where 1.1 should"),
        ([exercise("1.1"), CHECK.format("1.1"), exercise("2.2")], "exercise 2.2 stands where 1.2 should"),
        ([exercise("1.1", body="x = 1\n")], "is not empty"),
        ([exercise("1.1", name="Missing")], "0 functions or classes 'Missing'"),
        ([exercise("1.1").replace("shapes", "nothing")], "no file nothing.py"),
        ([exercise("1.1").replace("toys", "other")], "not an object of a module of toys"),
        ([exercise("1.1", name="bare")], "no docstring"),
        ([exercise("1.1", name="empty")], "no body"),
        ([exercise("1.1", name="one_line")], "no docstring"),
        ([exercise("1.1", name="one_line_documented")], "begins on the line of its head"),
        ([exercise("1.1", name="long")], "26 lines of code, and 25 is the limit"),
        ([exercise("1.1", more=' blanks="x"')], "is a function"),
        ([exercise("1.1", name="Box", more=' blanks="double,triple"')], "no method triple"),
        ([exercise("1.1", name="Box", more=' blanks="later"')], "no body to write"),
    ],
)
def test_a_wrong_exercise_is_refused_with_its_reason(toys, parts, reason):
    assert reason in refusal(chapter(*parts), toys)


def test_the_exercises_of_chapter_two_are_numbered_from_2_1(toys):
    text = chapter(exercise("1.1"), CHECK.format("1.1"))
    assert "exercise 1.1 stands where 2.1 should" in refusal(text, toys, file="02_tokenizer.md")
    assert built(text, toys, file="01_loading.md")


def test_the_first_cell_must_have_the_future_import_of_the_package_file(toys):
    text = chapter(exercise("1.1"), CHECK.format("1.1")).replace("from __future__ import annotations\n\n", "")
    assert "must begin with `from __future__ import annotations`" in refusal(text, toys)


def code_cell(body: str, label: str = "a") -> str:
    return f'```python label="{label}"\n{body}\n```\n\n'


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("print(x)", "x"),
        ("x = x + 1", "x"),
        ("x += 1", "x"),
        ("print(x)\nx = 1", "x"),
        ("def f():\n    return helper(y)", "helper, y"),
        ("def f(a: Tensor) -> Array:\n    return a", "Array, Tensor"),
        ("class A(Base):\n    b = c\n    def f(self):\n        return D", "Base, D, c"),
        ("[y for x in range(3)]", "y"),
        ("@decorate\ndef f(a=default):\n    pass", "decorate, default"),
        ("import os.path\nos, path", "path"),
        ("_", "_"),
    ],
)
def test_a_name_that_no_earlier_cell_defines_is_refused(toys, body, names):
    assert f"the cell 'a' uses {names}, which" in refusal("# Top\n\n" + code_cell(body), toys)


@pytest.mark.parametrize(
    "body",
    [
        "x = 1\nprint(x, __name__, get_ipython(), display)",
        "def f():\n    return g()\ndef g():\n    return f",
        "class A:\n    b = 1\n    c = b\n    def f(self) -> A:\n        return super().f(), A",
        "for i in range(3):\n    j = i\nprint(i, j, [k for k in range(j)], (n := 3), n)",
        "import os.path as p\nfrom os import sep as s\nwith open(p.join(s)) as f:\n    print(f)",
        "try:\n    pass\nexcept ValueError as error:\n    print(error)",
        "def f():\n    global made\n    made = 1\nf()\nprint(made)",
        "%matplotlib inline",
        "def f(x):\n    return lambda y: x + y",
        "match 3:\n    case [a, *b]:\n        print(a, b)",
    ],
)
def test_defined_names_and_names_of_python_and_ipython_are_accepted(toys, body):
    assert built("# Top\n\n" + code_cell(body), toys)


def test_names_carry_over_to_later_cells_but_not_to_earlier_ones(toys):
    define, use = code_cell("x = 1", "define"), code_cell("x", "use")
    assert built("# Top\n\n" + define + use, toys)
    assert "the cell 'use' uses x" in refusal("# Top\n\n" + use + define, toys)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("from os import *", "imports everything from os"),
        ("!ls", "shell command"),
        ("files = !ls", "shell command"),
        ("%%bash\nls", "cell magic"),
        ("def f(:", "is not Python"),
        ("\n".join(f"x = {n}" for n in range(41)), "41 lines; 40 is the limit"),
    ],
)
def test_a_code_cell_that_must_not_stand_is_refused(toys, body, reason):
    assert reason in refusal("# Top\n\n" + code_cell(body), toys)


def big(cells: int, words: int, volatile: int) -> str:
    parts = ["# A\n\n" + "word " * (words - 1)]
    for number in range(cells - 1):
        mark = ' volatile="true"' if number < volatile else ""
        parts.append(f'```python label="c-{number}"{mark}\nprint({number})\n```')
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize(
    ("cells", "words", "volatile", "reason"),
    [
        (44, 10, 0, "44 cells; 45 to 65"),
        (66, 10, 0, "66 cells; 45 to 65"),
        (45, 2501, 0, "2501 words"),
        (45, 10, 23, "23 of 44 code cells are volatile"),
        (45, 2500, 22, None),
        (65, 10, 0, None),
    ],
)
def test_a_chapter_beyond_the_limits_of_a_chapter_is_refused(cells, words, volatile, reason):
    text = big(cells, words, volatile)
    if reason is None:
        assert len(build_notebooks(text, "01_a.md").blank.cells) == cells
        return
    with pytest.raises(SourceError, match=reason):
        build_notebooks(text, "01_a.md")
