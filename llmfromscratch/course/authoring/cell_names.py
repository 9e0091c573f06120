"""Which names a notebook's cells use before any cell defines them.

Names used while a cell runs must be defined by an earlier cell or an earlier statement of the same cell; names used
inside functions, only by the end of the cell. Annotations count as used, so that a learner can look up every name.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable

from IPython.core.inputtransformer2 import TransformerManager

from llmfromscratch.errors import LLMFromScratchError

# What IPython puts into every notebook. The history names (_, __, _1) are left out: they change with the order of runs.
IPYTHON_NAMES = frozenset({"get_ipython", "display", "In", "Out"})
KNOWN_NAMES = frozenset(dir(builtins)) | IPYTHON_NAMES | {"__name__"}

# Statements that evaluate what they use before they bind anything.
_USE_BEFORE_BINDING = (ast.Assign, ast.AugAssign, ast.AnnAssign)


class CellError(LLMFromScratchError):
    """A code cell holds something that a chapter must not hold; the message says what."""


def parse_cell(source: str) -> ast.Module:
    """The syntax tree of a cell, its line magics turned into calls as IPython does.

    Raises CellError for a syntax error, a shell command, a cell magic and a star import.
    """
    plain = TransformerManager().transform_cell(source)
    for marker, kind in (
        ("get_ipython().system(", "a shell command (!)"),
        ("get_ipython().getoutput(", "a shell command (!)"),
        ("get_ipython().run_cell_magic(", "a cell magic (%%)"),
    ):
        if plain.count(marker) > source.count(marker):
            raise CellError(f"it holds {kind}, which works on some systems only. Write it in Python.")
    try:
        tree = ast.parse(plain)
    except SyntaxError as error:
        raise CellError(f"it is not Python: {error.msg} in line {error.lineno} of the cell.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            raise CellError(f"it imports everything from {node.module}. Import the names that are used.")
    return tree


def undefined_names(cells: Iterable[ast.Module]) -> list[list[str]]:
    """For each cell, in order, the names it uses that nothing before has defined, sorted."""
    known = set(KNOWN_NAMES)
    missing = []
    for tree in cells:
        statements = [_Statement(node) for node in tree.body]
        at_the_end = known.union(*(statement.binds for statement in statements))
        unknown: set[str] = set()
        for statement in statements:
            unknown |= statement.used_at_once - known
            unknown |= statement.used_later - at_the_end
            known |= statement.binds
        missing.append(sorted(unknown))
    return missing


class _Statement:
    """The global names that one top-level statement binds, uses as it runs, and uses inside functions."""

    def __init__(self, node: ast.stmt):
        self.binds: set[str] = set()
        self.used_at_once: set[str] = set()
        self.used_later: set[str] = set()
        self._visit(symtable.symtable(ast.unparse(node), "<cell>", "exec"), inside_function=False)
        if not isinstance(node, _USE_BEFORE_BINDING):
            self.used_at_once -= self.binds
        elif isinstance(node, ast.AugAssign):
            self.used_at_once |= self.binds

    def _visit(self, table: symtable.SymbolTable, inside_function: bool) -> None:
        inside_function = inside_function or table.get_type() not in {"module", "class"}
        for symbol in table.get_symbols():
            is_global = table.get_type() == "module" or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                self.binds.add(symbol.get_name())
            if is_global and symbol.is_referenced():
                (self.used_later if inside_function else self.used_at_once).add(symbol.get_name())
        for child in table.get_children():
            self._visit(child, inside_function)
