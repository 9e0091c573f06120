"""Chapter 1's first four exercises as a chapter of their own, quick to run, and what a student may hand in of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from llmfromscratch.course.authoring import builder

_PLACES = {
    "1.1": ("llmfromscratch.course.sketches.ch01.read_safetensors_header", 2),
    "1.2": ("llmfromscratch.loading.dequantize_q4_1", 3),
    "1.3": ("llmfromscratch.loading.canonical_name", 3),
    "1.4": ("llmfromscratch.loading.unpermute", 3),
}
POINTS = 11
_HEAD = """\
# Short

```python label="set-up"
from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

from llmfromscratch.course import check
from llmfromscratch.errors import CheckpointError
```

```python label="name-tables"
from llmfromscratch.loading import IGNORED_PATTERN, LAYER_NAMES, LAYER_PATTERN, STRAY_PREFIXES, TOP_NAMES
```

"""
_EXERCISE = '```python exercise="{0}" object="{1}" points="{2}"\n```\n\n```python check="{0}"\n```\n\n'


def build(folder: Path) -> builder.Notebooks:
    """The chapter in FOLDER, as it is handed out; returned are the blank and the solved notebook."""
    source = _HEAD + "".join(_EXERCISE.format(number, *place) for number, place in _PLACES.items())
    made = builder.build_notebooks(source, "01_short.md", chapter_limits=False)
    folder.mkdir(exist_ok=True)
    (folder / "01_short.ipynb").write_text(builder.to_json(made.blank), encoding="utf-8")
    return made


def hand_in(
    notebook: NotebookNode, file: Path, cells: Mapping[str, str | None], added: Mapping[str, str] | None = None
) -> Path:
    """A copy of the notebook with the code of cells exchanged by id (None: removed), and cells added after some."""
    notebook = copy.deepcopy(notebook)
    kept = []
    for cell in notebook.cells:
        if cells.get(cell.id, "") is not None:
            cell.source = cells.get(cell.id, cell.source)
            kept.append(cell)
        if cell.id in (added or {}):
            kept.append(new_code_cell((added or {})[cell.id]))
    notebook.cells = kept
    file.write_text(builder.to_json(notebook), encoding="utf-8")
    return file
