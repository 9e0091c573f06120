"""Which modules of the engine are the learner's: nine names may be served from a folder of their own.

Below everything else in the package and free of torch, because it acts before any other module is imported.
`activate(folder)` puts a finder in front of Python's own that answers for the nine names only, so that a stray
`engine.py` in that folder replaces nothing. Modules that are already imported are reloaded in place.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from llmfromscratch.errors import LLMFromScratchError

PACKAGE = "llmfromscratch"
VARIABLE = "LLMFROMSCRATCH_ENGINE"
# in the order of their floors: a module imports only what stands before it
REPLACEABLE = (
    "loading", "tokenizer", "kv_cache", "sampling", "optimization", "quantization", "attention", "model", "scheduler",
)  # fmt: skip
_KEPT_BY_RELOAD = ("__name__", "__spec__", "__loader__", "__package__", "__builtins__")


class LearnerEngineError(LLMFromScratchError, ImportError):
    """The folder of a learner's engine, or a file in it, cannot be used; the sentence says which and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


class _LearnerLoader(SourceFileLoader):
    """Runs a learner's file, always compiled afresh: two versions written within one second share a time stamp."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = Path(self.path).read_bytes()
        try:
            return self.source_to_code(source, self.path)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise LearnerEngineError(_broken(self.path, line, error)) from error

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except LearnerEngineError:
            raise
        except Exception as error:
            raise LearnerEngineError(_broken(self.path, _line_in(self.path, error.__traceback__), error)) from error


def _line_in(file: str, trace: TracebackType | None) -> int | None:
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _broken(file: str, line: int | None, error: Exception) -> str:
    name = Path(file).stem
    place = f"{file}, line {line}" if line else file
    what = error.msg if isinstance(error, SyntaxError) else error
    return (
        f"{place}: your {name}.py cannot be imported ({type(error).__name__}: {what}). "
        f'Mend that line, or run build("{name}", discard_edits=True), or move the file away to use the reference.'
    )


class _LearnerFinder(MetaPathFinder):
    """Answers for the nine names where the folder has their file, and for nothing else."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        file = self.folder / f"{name}.py"
        if package != PACKAGE or name not in REPLACEABLE or not file.is_file():
            return None
        return spec_from_file_location(fullname, file, loader=_LearnerLoader(fullname, str(file)))


class _RefusingFinder(MetaPathFinder):
    """Raises in the place of every import of one of the nine: the engine that was asked for cannot be had."""

    def __init__(self, error: LearnerEngineError):
        self.error = error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package == PACKAGE and name in REPLACEABLE:
            raise self.error
        return None


def active_folder() -> Path | None:
    """The folder that modules are served from, or None while the engine is the reference alone."""
    return next((finder.folder for finder in sys.meta_path if isinstance(finder, _LearnerFinder)), None)


def learner_files(folder: Path) -> list[str]:
    """The replaceable names that FOLDER has a file for, in the order of their floors."""
    return [name for name in REPLACEABLE if (folder / f"{name}.py").is_file()]


def activate(folder: str | Path, *, may_be_empty: bool = False) -> None:
    """Serves the nine replaceable modules from FOLDER from now on; those already imported are reloaded in place.

    Raises LearnerEngineError where the folder is missing, holds none of the nine (unless `may_be_empty`), or a file
    that has to be reloaded is broken; the engine is then what it was before.
    """
    checked = _checked(Path(folder), may_be_empty)
    _switch([_LearnerFinder(checked)])


def deactivate() -> None:
    """Back to the reference alone; what came from the learner's folder is reloaded from the package."""
    _switch([])


def activate_from_environment() -> None:
    """Does what LLMFROMSCRATCH_ENGINE asks for; called once, when the package is first imported.

    Where it names no folder of modules, the sentence about that comes with the first of the nine modules that is
    imported: the rest of the package, the doctor above all, must stay usable.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        try:
            activate(folder)
        except LearnerEngineError as error:
            sys.meta_path.insert(0, _RefusingFinder(error))


def _checked(folder: Path, may_be_empty: bool) -> Path:
    folder = folder.expanduser().absolute()
    advice = f"set {VARIABLE} (or --engine, or start(engine=...)) to the my_engine folder of a course, or leave it out."
    if not folder.is_dir():
        raise LearnerEngineError(f"{folder} is not a folder, so no engine can be taken from it: {advice}")
    if not may_be_empty and not learner_files(folder):
        names = ", ".join(f"{name}.py" for name in REPLACEABLE)
        raise LearnerEngineError(f"{folder} holds none of {names}: {advice}")
    return folder


def _switch(finders: list[_LearnerFinder]) -> None:
    before = list(sys.meta_path)
    touched = {name for finder in finders for name in learner_files(finder.folder)}
    touched |= {name for name in REPLACEABLE if _is_learners(name)}
    sys.meta_path[:] = [
        *finders,
        *(finder for finder in before if not isinstance(finder, _LearnerFinder | _RefusingFinder)),
    ]
    importlib.invalidate_caches()
    try:
        reload_in_place(touched)
    except BaseException:
        sys.meta_path[:] = before
        raise


def _is_learners(name: str) -> bool:
    """Whether the imported module came from a learner's file (which may have been moved away since)."""
    module = sys.modules.get(f"{PACKAGE}.{name}")
    return module is not None and isinstance(getattr(module, "__loader__", None), _LearnerLoader)


def reload_in_place(names: Iterable[str]) -> None:
    """Reloads those of NAMES that are imported, keeping the module objects that others hold.

    Names that the new file no longer has are gone afterwards. After an error all of them are as they were.
    """
    wanted = set(names)
    modules = [sys.modules[full] for n in REPLACEABLE if n in wanted and (full := f"{PACKAGE}.{n}") in sys.modules]
    before = [dict(vars(module)) for module in modules]
    try:
        for module in modules:
            for name in set(vars(module)).difference(_KEPT_BY_RELOAD):
                del vars(module)[name]
            importlib.reload(module)
    except BaseException:
        for module, content in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(content)
            sys.modules[module.__name__] = module
        raise


def reference_path(module: str) -> Path:
    """The package's own file of a module, given by its short name ("loading") or its dotted one."""
    parts = module.removeprefix(f"{PACKAGE}.").split(".")
    return Path(__file__).parent.joinpath(*parts).with_suffix(".py")


def reference_hash(module: str) -> str:
    """sha256 of the reference's source, line ends aside: what a learner's file says it was built on."""
    return text_hash(reference_path(module).read_text(encoding="utf-8"))


def text_hash(text: str) -> str:
    """sha256 of a text in UTF-8, as hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def reference(name: str) -> ModuleType:
    """The package's own module NAME, whichever engine is active: a private copy, with private copies below it.

    Checks take their oracles from here, so that a learner's module in the engine cannot vouch for itself.
    """
    if name not in REPLACEABLE:
        raise ValueError(f"{name!r} is not one of the replaceable modules {', '.join(REPLACEABLE)}")
    full = f"{PACKAGE}._reference.{name}"
    if full in sys.modules:
        return sys.modules[full]
    spec = spec_from_file_location(full, reference_path(name))
    if spec is None or spec.loader is None:
        raise LearnerEngineError(f"{reference_path(name)} cannot be read: install the package again")
    module = sys.modules[full] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        _use_private_copies(module)
    except BaseException:
        del sys.modules[full]
        raise
    return module


def _use_private_copies(module: ModuleType) -> None:
    for key, value in list(vars(module).items()):
        for name in REPLACEABLE:
            if isinstance(value, ModuleType) and value is sys.modules.get(f"{PACKAGE}.{name}"):
                setattr(module, key, reference(name))
