"""Reads a chapter's source, jupytext Markdown, into cells with stable ids.

The format, exactly (``builder.py`` says what becomes of the cells):

**Code cells** are fences of exactly three backticks at the beginning of a line, language ``python``, with attributes
``key="value"`` on the opening line. Each has exactly one of these three keys, and only the keys of its row:

=============  ========================  =====================  ========================================
the cell is    required                  optional               cell id
=============  ========================  =====================  ========================================
a plain one    label                     volatile, raises       the label
an exercise    exercise, object, points  blanks                 ``exercise-1-3`` for ``exercise="1.3"``
a check        check                                            ``check-1-3`` for ``check="1.3"``
=============  ========================  =====================  ========================================

- ``label``: lower-case words of letters and digits joined by hyphens, at most 40 characters.
- ``volatile="true"``: the cell prints times or hardware; its output is not compared.
- ``raises="ValueError"``: the cell must end with this exception; the notebook goes on after it.
- ``exercise="1.3"``: chapter and number. The body is empty, the builder puts the real code in.
- ``object="llmfromscratch.loading.unpermute"``: a function or class at the top of a module of the package.
- ``points="2"``: a whole number above 0.
- ``blanks="forward,__init__"``: of a class, the methods to write; without it, all that have a body.
- ``check="1.3"``: the body holds lines to run before the check, or nothing; the builder writes the call.

**Other fences** stay in their Markdown cell: ``console``, ``text``, ``json``, ``toml``, ``yaml``, ``diff``, or none.

**Markdown cells** are separated by code cells, or by two blank lines. A cell that follows another Markdown cell starts
with a heading or with a line ``<!-- label: some-words -->``, so that two blank lines are never an accident. The id is
the label of that line (which does not reach the notebook), or else the heading's words, or else the id of the cell
before with ``-text`` added. So inserting a cell changes no other id, save that of a text without a heading that it
cuts off from the cell before. Two cells with one id are refused: give one of them a label.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

import jupytext

from llmfromscratch.errors import LLMFromScratchError

STATIC_LANGUAGES = ("", "console", "text", "json", "toml", "yaml", "diff")
# The key that makes the kind of a code cell: keys required beside it, and keys allowed beside it.
FENCE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "label": (set(), {"volatile", "raises"}),
    "exercise": ({"object", "points"}, {"blanks"}),
    "check": (set(), set()),
}
MAX_LABEL_LENGTH = 40

_KNOWN_KEYS = sorted({key for kind, (required, optional) in FENCE_KEYS.items() for key in (kind, *required, *optional)})
_VALUE_PATTERNS = {
    "label": (re.compile(r"[a-z0-9]+(-[a-z0-9]+)*"), "lower-case words of letters and digits joined by hyphens"),
    "volatile": (re.compile(r"true"), 'volatile="true", or no such key'),
    "raises": (re.compile(r"[A-Za-z_]\w*"), "the name of an exception class"),
    "exercise": (re.compile(r"[1-9]\d*\.[1-9]\d*"), 'chapter and number, like "1.3"'),
    "check": (re.compile(r"[1-9]\d*\.[1-9]\d*"), 'chapter and number, like "1.3"'),
    "object": (re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"), 'a dotted name, like "llmfromscratch.loading.unpermute"'),
    "points": (re.compile(r"[1-9]\d*"), "a whole number above 0"),
    "blanks": (re.compile(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)*"), 'methods joined by commas, like "__init__,forward"'),
}
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(.*?)\s*$")
_ATTRIBUTE = re.compile(r'([A-Za-z_][\w-]*)="([^"]*)"')
_LABEL_COMMENT = re.compile(r"^<!-- label: (.*?) -->$")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$")


class SourceError(LLMFromScratchError):
    """A chapter's source cannot become a notebook; the message gives the file, the line and what to do."""

    def __init__(self, reason: str, file: str, line: int):
        self.reason, self.file, self.line = reason, file, line
        super().__init__(f"{file}:{line}: {reason}")

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.reason, self.file, self.line)


@dataclass(frozen=True)
class SourceCell:
    """One cell of a source: `kind` is "markdown" or "code"; `line` is where it starts in the file, counted from 1."""

    kind: str
    id: str
    text: str
    line: int
    attributes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Fence:
    line: int
    indent: str
    marker: str
    info: str


def read_source(text: str, file: str) -> list[SourceCell]:
    """The cells of a chapter's source, in order, with their ids; `file` is the name that errors show.

    Raises SourceError for everything that the format above does not allow.
    """
    lines = text.splitlines()
    fences = [fence for fence in _fences(lines, file) if _is_code(fence, file)]
    attributes = [_attributes(fence, file) for fence in fences]
    cells = jupytext.reads(text, fmt="md").cells
    _refuse_surprises(cells, fences, file)
    code = iter(zip(fences, attributes, strict=True))
    found: list[SourceCell] = []
    start = 0
    for cell in cells:
        if cell.cell_type == "code":
            fence, values = next(code)
            start = fence.line + len(cell.source.splitlines()) + 1
            found.append(SourceCell("code", _code_id(values), cell.source, fence.line, values))
        else:
            start = lines.index(cell.source.split("\n")[0], start) + 1
            found.append(_markdown_cell(cell.source, start, found[-1] if found else None, file))
    _refuse_duplicates(found, file)
    return found


def _fences(lines: list[str], file: str) -> Iterator[_Fence]:
    """Every opening fence; refuses comments outside fences, and a fence that nothing closes."""
    opened: _Fence | None = None
    for number, line in enumerate(lines, 1):
        match = _FENCE.match(line)
        if opened is None:
            if match:
                opened = _Fence(number, *match.groups())
                yield opened
            elif line.lstrip().startswith("<!--") and not _LABEL_COMMENT.match(line):
                raise SourceError(
                    f"the comment {line.strip()!r} is not known. The only one is `<!-- label: some-words -->`, "
                    "alone on its line, at the beginning of a Markdown cell.", file, number,
                )  # fmt: skip
        elif match and match[2].startswith(opened.marker) and not match[3]:
            opened = None
    if opened:
        raise SourceError("this fence is never closed. Add the closing line of backticks.", file, opened.line)


def _is_code(fence: _Fence, file: str) -> bool:
    """Whether the fence is a code cell; refuses every fence that is neither plainly code nor plainly text."""
    language, _, rest = fence.info.partition(" ")
    if language in STATIC_LANGUAGES and not rest and fence.marker[0] == "`":
        return False
    if language == "python" and not fence.indent and fence.marker == "```":
        return True
    if language == "python":
        raise SourceError(
            "a python fence starts at the beginning of its line, with exactly three backticks.", file, fence.line
        )
    raise SourceError(
        f"the fence {(fence.marker + fence.info)!r} is not known. Code cells are ```python; text that does not run is "
        f"one of {', '.join(STATIC_LANGUAGES[1:])}, or has no language, without attributes.", file, fence.line,
    )  # fmt: skip


def _attributes(fence: _Fence, file: str) -> dict[str, str]:
    """The attributes of a python fence, checked against the allow-list."""
    rest = fence.info.removeprefix("python").strip()
    pairs = _ATTRIBUTE.findall(rest)
    values = dict(pairs)
    if re.sub(r"\s+", " ", rest) != " ".join(f'{key}="{value}"' for key, value in pairs):
        reason = f'the attributes {rest!r} cannot be read. Write each as key="value", quoted, with one space between.'
        raise SourceError(reason, file, fence.line)
    if len(values) < len(pairs):
        raise SourceError("an attribute is given twice. Keep one.", file, fence.line)
    for key in values:
        if key not in _KNOWN_KEYS:
            reason = f"the attribute {key!r} is not known. Known are {', '.join(_KNOWN_KEYS)}."
            raise SourceError(reason, file, fence.line)
    kinds = [kind for kind in FENCE_KEYS if kind in values]
    if len(kinds) != 1:
        reason = f"a code cell has exactly one of label, exercise, check; this one has {' and '.join(kinds) or 'none'}."
        raise SourceError(reason, file, fence.line)
    required, optional = FENCE_KEYS[kinds[0]]
    if missing := sorted(required - set(values)):
        raise SourceError(f"this {kinds[0]} cell lacks {', '.join(missing)}. Add it.", file, fence.line)
    if extra := sorted(set(values) - required - optional - {kinds[0]}):
        raise SourceError(f"{', '.join(extra)} has no meaning beside {kinds[0]!r}. Remove it.", file, fence.line)
    for key, value in values.items():
        _check_value(key, value, file, fence.line)
    return values


def _check_value(key: str, value: str, file: str, line: int) -> None:
    pattern, expected = _VALUE_PATTERNS[key]
    if not pattern.fullmatch(value):
        raise SourceError(f'{key}="{value}" is not a good value. Expected: {expected}.', file, line)
    if key == "label" and len(value) > MAX_LABEL_LENGTH:
        raise SourceError(f"the label {value!r} has more than {MAX_LABEL_LENGTH} characters. Shorten it.", file, line)


def _refuse_surprises(cells: list, fences: list[_Fence], file: str) -> None:
    """Holds what jupytext made of the file against what the scan of its lines found."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    for cell, fence in zip(code, fences, strict=False):
        if any(line.lstrip().startswith("```") for line in cell.source.split("\n")):
            raise SourceError("a code cell holds a line of backticks. Build that text another way.", file, fence.line)
        if "incorrectly_encoded_metadata" in cell.metadata:
            raise SourceError("jupytext cannot read the attributes of this fence. Check its quotes.", file, fence.line)
    if len(code) != len(fences):
        reason = f"jupytext reads {len(code)} code cells from {len(fences)} python fences. Look for stray backticks."
        raise SourceError(reason, file, 1)
    if any(cell.cell_type == "raw" for cell in cells):
        raise SourceError("the file has a header or a raw cell. Remove it: the builder sets the metadata.", file, 1)


def _code_id(attributes: dict[str, str]) -> str:
    if "label" in attributes:
        return attributes["label"]
    kind = "exercise" if "exercise" in attributes else "check"
    return f"{kind}-{attributes[kind].replace('.', '-')}"


def _markdown_cell(text: str, line: int, previous: SourceCell | None, file: str) -> SourceCell:
    first, *rest = text.split("\n")
    if any(_LABEL_COMMENT.match(other) for other in rest):
        raise SourceError(
            "a label stands in the middle of this Markdown cell. Put two blank lines before it to start a new cell.",
            file, line,
        )  # fmt: skip
    if label := _LABEL_COMMENT.match(first):
        _check_value("label", label[1], file, line)
        body = "\n".join(rest).strip("\n")
        if not body:
            raise SourceError("a label without a text. Write the text right below it.", file, line)
        return SourceCell("markdown", label[1], body, line)
    if heading := _HEADING.match(first):
        return SourceCell("markdown", _slug(heading[1], file, line), text, line)
    if previous is None or previous.kind == "markdown":
        raise SourceError(
            "this Markdown cell needs a heading or a label. If two blank lines cut it off from the text above by "
            "accident, leave one; if a cell is meant to start here, write `<!-- label: some-words -->` above it.",
            file, line,
        )  # fmt: skip
    return SourceCell("markdown", f"{previous.id}-text", text, line)


def _slug(heading: str, file: str, line: int) -> str:
    """The words of a heading as an id: ASCII letters and digits joined by hyphens, cut at a word."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode("ascii").lower()
    words = re.findall(r"[a-z0-9]+", plain)
    while len("-".join(words)) > MAX_LABEL_LENGTH and len(words) > 1:
        words.pop()
    slug = "-".join(words)[:MAX_LABEL_LENGTH]
    if not slug:
        raise SourceError(f"the heading {heading!r} has no letter to make an id of. Give the cell a label.", file, line)
    return slug


def _refuse_duplicates(cells: list[SourceCell], file: str) -> None:
    seen: dict[str, SourceCell] = {}
    for cell in cells:
        if cell.id in seen:
            reason = f"the id {cell.id!r} is taken at line {seen[cell.id].line}. Give one of the two a label."
            raise SourceError(reason, file, cell.line)
        seen[cell.id] = cell
