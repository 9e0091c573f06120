"""What a passed check keeps of the learner's source: the definition, and what it needs to stand in a file of its own.

Names that the definition uses are followed through the notebook: helpers by their source, constants by their value,
everything that comes from a library by an import. What cannot be taken along is refused by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import symtable
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import exercises, literals, live_source, progress
from llmfromscratch.course.exercise import Exercise

_NOTEBOOK_ONLY = ("display", "get_ipython", "In", "Out")
_STOOD_IN_FOR = ("open", "exit", "quit")  # IPython puts its own into a notebook, a file has Python's


class NotRecordable(Exception):
    """Something that the learner's code uses cannot be taken along; the text is a sentence with what to do."""


def record(exercise: Exercise, obj: Any) -> dict[str, Any]:
    """The entry for progress.json of an object that passed its check.

    Keys: module and name (whose place it takes), source, helpers (name -> source, in the order they are needed),
    imports (name -> import line), constants (name -> expression), uses (ids of exercises of the same module), sha256
    of the source, points, passed_at, reference_hash. Raises NotRecordable.
    A sketch goes into no engine, so it is kept without what cannot be taken along; the sentences about that are in the
    entry as not_taken, which is absent where all was taken.
    """
    try:
        definition = live_source.find_definition(obj)
    except live_source.NoSource as error:
        raise NotRecordable(str(error)) from None
    if definition.name != exercise.name:
        raise NotRecordable(f"the definition is called `{definition.name}`: call it `{exercise.name}`")
    needs = _Needs(exercise, definition.namespace)
    needs.follow(definition.source)
    entry = {
        "module": exercise.module,
        "name": exercise.name,
        "source": definition.source,
        "helpers": needs.helpers,
        "imports": needs.imports,
        "constants": needs.constants,
        "uses": needs.uses,
        "sha256": learner_engine.text_hash(definition.source),
        "points": exercise.points,
        "passed_at": progress.now(),
        "reference_hash": learner_engine.reference_hash(exercise.module),
    }
    return entry | ({"not_taken": needs.not_taken} if needs.not_taken else {})


def used_names(source: str) -> list[str]:
    """The global names that a piece of source reads, inner functions, decorators and defaults included, sorted."""
    names: set[str] = set()
    tables = [symtable.symtable(source, "<recorded>", "exec")]
    while tables:
        table = tables.pop()
        tables.extend(table.get_children())
        top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return sorted(names)


@dataclass
class _Needs:
    """Collects what one exercise's definition needs from the notebook's namespace."""

    exercise: Exercise
    namespace: dict[str, Any]
    helpers: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    uses: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen.add(self.exercise.name)
        self.others = {e.name: e.id for e in exercises.exercises_of(self.exercise.module)}
        short = self.exercise.replaceable
        self.theirs = learner_engine.reference(short) if short else importlib.import_module(self.exercise.module)

    def follow(self, source: str) -> None:
        """Takes along every global name that SOURCE reads."""
        for name in used_names(source):
            if name not in self.seen and not name.startswith("__"):
                self.seen.add(name)
                self._take_or_leave(name)

    def _take_or_leave(self, name: str) -> None:
        try:
            self.take(name)
        except NotRecordable as error:
            if self.exercise.replaceable is not None:
                raise
            self.not_taken.append(str(error))

    def take(self, name: str) -> None:
        if name in _NOTEBOOK_ONLY:
            raise NotRecordable(f"`{name}` exists only in a notebook: leave it out of the function")
        if name not in self.namespace:
            return  # a builtin, or a name on a path that the check never took
        value = self.namespace[name]
        if name in _STOOD_IN_FOR and _is_ipythons(value):
            return
        if name in self.others:
            self.uses.append(self.others[name])
        elif name in vars(self.theirs):
            if not self._is_theirs(name, value):
                raise NotRecordable(
                    f"`{name}` means something else in {self.exercise.module}, where your code is going: "
                    "give yours another name"
                )
        elif isinstance(value, ModuleType):
            self._take_import(name, value.__name__, None)
        elif (expression := literals.expression(value)) is not None:
            self.constants[name] = expression.text
            self.imports.update(expression.imports)
        elif self._is_from_notebook(value):
            self._take_helper(name, value)
        else:
            self._take_from_library(name, value)

    def _is_from_notebook(self, value: Any) -> bool:
        own_module = getattr(value, "__module__", None) == self.namespace.get("__name__")
        return (inspect.isroutine(value) or inspect.isclass(value)) and own_module

    def _is_theirs(self, name: str, value: Any) -> bool:
        """Whether the module that is built has the same thing under the same name already."""
        theirs = vars(self.theirs)[name]
        engines = vars(importlib.import_module(self.exercise.module)).get(name)
        if value is theirs or value is engines or _public_name(value) == _public_name(theirs) is not None:
            return True
        if self._is_from_notebook(value):
            return _same_definition(value, learner_engine.reference_path(self.exercise.module).read_text("utf-8"), name)
        mine, other = literals.expression(value), literals.expression(theirs)
        return mine is not None and mine == other

    def _take_helper(self, name: str, value: Any) -> None:
        try:
            definition = live_source.find_definition(value)
        except live_source.NoSource as error:
            raise NotRecordable(str(error)) from None
        if definition.name != name:  # a second name for a helper: take the helper, then the alias
            if self.namespace.get(definition.name) is not value:
                raise NotRecordable(f"`{name}` is an older `{definition.name}`: use that name, or run its cell again")
            self.follow(definition.name)
            self.helpers[name] = f"{name} = {definition.name}\n"
            return
        self.follow(definition.source)
        self.helpers[name] = definition.source

    def _take_import(self, name: str, module: str, attribute: str | None) -> None:
        module = "os.path" if module in ("posixpath", "ntpath") else module
        if module == "__main__" or module.startswith(f"{learner_engine.PACKAGE}.course"):
            raise NotRecordable(f"`{name}` comes from {module}, which the engine does not have: do without it")
        if module == self.exercise.module and attribute is not None:
            raise NotRecordable(f"`{name}` is `{attribute}` of the same module: use it under that name")
        if attribute is not None:
            self.imports[name] = f"from {module} import {_as(attribute, name)}"
        elif "." in module and name != module.split(".")[0]:
            parent, _, last = module.rpartition(".")
            self.imports[name] = f"from {parent} import {_as(last, name)}"
        else:
            self.imports[name] = f"import {_as(module, name)}"

    def _take_from_library(self, name: str, value: Any) -> None:
        attribute = getattr(value, "__qualname__", None) or name
        modules = [getattr(value, "__module__", None), *sorted(sys.modules, key=lambda m: (m.count("."), len(m), m))]
        for module in modules:
            found = sys.modules.get(module or "")
            if module is None or module == "__main__" or module.startswith("_") or not isinstance(found, ModuleType):
                continue
            for candidate in (attribute, name):
                if vars(found).get(candidate) is value:
                    self._take_import(name, module, candidate)
                    return
        raise NotRecordable(literals.refusal(name, value))


def _as(name: str, alias: str) -> str:
    return name if name == alias else f"{name} as {alias}"


def _is_ipythons(value: Any) -> bool:
    namespace = getattr(value, "__globals__", None) or {"__name__": type(value).__module__}
    return str(namespace.get("__name__")).startswith(("IPython.", "ipykernel."))


def _public_name(value: Any) -> str | None:
    """A module's name, or module and name of a function or class, private copies under the name they are copies of."""
    if isinstance(value, ModuleType):
        name = value.__name__
    elif inspect.isroutine(value) or inspect.isclass(value):
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
    else:
        return None
    return name.replace(f"{learner_engine.PACKAGE}._reference.", f"{learner_engine.PACKAGE}.")


def _same_definition(value: Any, text: str, name: str) -> bool:
    """Whether a notebook's object has the source that the module has: given code is shown in chapters too."""
    nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    try:
        mine = live_source.find_definition(value).source
    except live_source.NoSource:
        return False
    return bool(nodes) and ast.dump(ast.parse(mine).body[0]) == ast.dump(nodes[0])
