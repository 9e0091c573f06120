"""A small package to cut exercises from, a small source that uses it, and what makes more sources of its parts."""

from __future__ import annotations

from pathlib import Path

import nbformat

from llmfromscratch.course.authoring import builder

TOYS = '''\
"""Toys."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCALE = 2


def area(radius: float) -> float:
    """The area of a circle.

    radius: in metres.
    """

    # half-way comments are part of the answer
    square = radius * radius
    return math.pi * square
    # and so are last ones


@dataclass
class Box:
    """A box of one width."""

    width: float = 1.0  # metres

    def double(
        self,
        times: int = 1,
    ) -> Box:
        # no docstring here
        text = """a
  b"""
        return Box(self.width * SCALE * times + len(text) - 4)

    @property
    def size(self) -> float:
        """The width, in metres."""
        return self.width

    def later(self) -> None:
        """Nothing yet."""


def bare():
    return 1


def empty():
    """Says nothing."""


def one_line(): return "no room"


def one_line_documented(): """Doc."""; return 1


def long(x):
    """Many lines."""
''' + "".join(f"    x += {n}\n" for n in range(25)) + "    return x\n"  # fmt: skip

SOURCE = """\
# Toys

Words.

```python label="imports"
from __future__ import annotations

import math
from dataclasses import dataclass

from llmfromscratch.course import check

SCALE = 2
```

## Circles

```python exercise="1.1" object="toys.shapes.area" points="2"
```

```python check="1.1"
radius = 3
```

Now boxes.

```python exercise="1.2" object="toys.shapes.Box" points="3" blanks="double"
```

```python check="1.2"
```

```python label="time" volatile="true"
print(Box().double())
```
"""


CHECK = '```python check="{}"\n```\n\n'


def write_toys(folder: Path) -> Path:
    """The package toys, with its one module, in the folder."""
    toys = folder / "toys"
    toys.mkdir()
    (toys / "shapes.py").write_text(TOYS, encoding="utf-8")
    return toys


def built(text: str, folder: Path, file: str = "toys.md") -> builder.Notebooks:
    return builder.build_notebooks(text, file, package_folder=folder, chapter_limits=False)


def cells_by_id(notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    return {cell.id: cell for cell in notebook.cells}


def exercise(number: str, name: str = "area", more: str = "", body: str = "") -> str:
    return f'```python exercise="{number}" object="toys.shapes.{name}" points="1"{more}\n{body}```\n\n'


def chapter(*parts: str) -> str:
    start = SOURCE.split("## Circles")[0]
    return start + "".join(parts)
