"""The package keeps its shape: arrows go down only, replaceable modules are used through the module, files stay small.

Read from the syntax trees, so that a new file cannot slip through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmfromscratch
from llmfromscratch import learner_engine

PACKAGE = Path(llmfromscratch.__file__).parent
REPLACEABLE = {
    "loading", "tokenizer", "kv_cache", "scheduler", "sampling", "optimization", "quantization", "model", "attention",
}  # fmt: skip

# From the ground up. A module imports from its own floor and from those below, and never in a circle.
FLOORS = [
    {"errors", "progress"},
    {"learner_engine", "batch", "config", "sampling_params", "devices", "formats", "kernels", "hub"},
    {"cache_parts", "checkpoint_files", "key_report", "placement", "rope", "text"}
    | {"constraint_words", "constraint_expressions", "constraint_schemas", "constraint_endings"},
    {"loading", "tokenizer", "kv_cache", "sampling", "masks"},
    {"optimization", "quantization"},
    {"kv_memory", "attention", "decode_attention", "compiled_decode", "attention_backends", "sparse_cache"}
    | {"attention_sdpa", "attention_flash", "attention_triton"}
    | {"packed_weight", "quantized_layouts", "quantized_parts", "quantized_cache"},
    {"packed_products"},
    {"model", "quantized_linear"},
    {"cache_frames", "calibration", "calibrated", "rotation", "quantized_model", "native_weights", "quantized_files"},
    {"constraints", "request", "scheduler", "divergence"}
    | {"fused_layers", "compiled_layers", "quantized_layers", "triton_layers", "compiled_graph"},
    {"steps", "simulation", "stopping", "scoring", "layer_skipping", "drafters", "speculation"},
    {"engine", "engine_core", "metrics", "answers", "intake", "async_engine", "branches", "beam_search", "contrastive"}
    | {"profile_events", "profiling", "machine_limits", "memory_report", "medusa"}
    | {"reading", "evaluation", "quiz", "sensitivity"},
    {"doctor", "server"},
    {"cli", "__init__", "__main__"},
    {"widgets", "course"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# `llmfromscratch.LLM` and the command `lab` reach upwards lazily; what the package's face shows lies anywhere below.
MAY_REACH_UP_LAZILY = {("__init__", "widgets"), ("cli", "course")}


def short(file: Path) -> str:
    """ "formats.gguf" for formats/gguf.py; a folder's __init__ goes by the folder's name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def read(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


TREES = {short(file): read(file) for file in sorted(PACKAGE.rglob("*.py"))}


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None, bool]]:
    """(module of ours, name taken out of it or None, whether inside a function) for every import in a tree."""
    above = parents(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        place: ast.AST | None = node
        while place is not None and not isinstance(place, ast.FunctionDef | ast.AsyncFunctionDef):
            place = above.get(place)
        for module, name in targets(node):
            yield module, name, place is not None


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str | None]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            package, _, rest = alias.name.partition(".")
            if package == "llmfromscratch":
                yield rest or "__init__", None
        return
    assert node.level == 0, "relative imports hide where an arrow goes; write the whole name"
    package, _, rest = (node.module or "").partition(".")
    if package != "llmfromscratch":
        return
    for alias in node.names:
        inner = f"{rest}.{alias.name}" if rest else alias.name
        if (PACKAGE / inner.replace(".", "/")).with_suffix(".py").exists() or (
            PACKAGE / inner.replace(".", "/")
        ).is_dir():
            yield inner, None
        else:
            yield rest or "__init__", alias.name


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def without_type_checking(tree: ast.Module) -> ast.Module:
    return ast.Module([node for node in tree.body if not is_type_checking(node)], [])


def test_every_module_has_a_floor():
    unknown = {name.split(".")[0] for name in TREES} - set(FLOOR)
    assert not unknown, f"give {sorted(unknown)} a floor in this table, and keep the arrows going down"


@pytest.mark.parametrize("name", TREES)
def test_an_arrow_never_goes_up(name):
    own = name.split(".")[0]
    for module, _, lazy in imports(without_type_checking(TREES[name])):
        other = module.split(".")[0]
        if lazy and (own, other) in MAY_REACH_UP_LAZILY:
            continue
        assert FLOOR[other] <= FLOOR[own], f"{name} imports {module}, which lies above it"


def test_the_engine_never_imports_the_course_or_the_widgets():
    below = {name: {module.split(".")[0] for module, _, _ in imports(tree)} for name, tree in TREES.items()}
    for name in TREES:
        if name.split(".")[0] not in ("widgets", "course", "cli"):
            assert not below[name] & {"widgets", "course"}, name


def test_no_modules_import_each_other_in_a_circle():
    edges = {
        name: {module for module, _, lazy in imports(without_type_checking(tree)) if not lazy} & set(TREES) - {name}
        for name, tree in TREES.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in edges[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("name", TREES)
def test_replaceable_modules_are_used_through_the_module(name):
    # `__init__` names the public face for type checkers only; at run time it asks the module anew each time
    for module, taken, _ in imports(without_type_checking(TREES[name])):
        assert taken is None or module not in REPLACEABLE, (
            f"{name} takes {taken} out of {module}: after a learner's build() it would keep the old one; "
            f"write `from llmfromscratch import {module}` and {module}.{taken}"
        )


@pytest.mark.parametrize("name", TREES)
def test_no_subclass_default_decorator_or_module_constant_holds_on_to_a_replaceable_object(name):
    tree = without_type_checking(TREES[name])
    for node in holders(tree):
        for inner in ast.walk(node):
            held = (
                isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in REPLACEABLE
            )
            other = held and inner.value.id != name
            assert not other, f"{name}, line {inner.lineno}: {ast.unparse(inner)} is taken when the module is imported"


def holders(tree: ast.Module) -> Iterator[ast.AST]:
    """The expressions that are computed while the module is imported, annotations aside (they stay text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from [*node.bases, *node.keywords, *node.decorator_list]
            yield from values(node.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from node.decorator_list
    yield from values(tree.body)


def values(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and node.value is not None:
            yield node.value


@pytest.mark.parametrize("name", TREES)
def test_annotations_stay_text(name):
    """Without this, an annotation would hold on to an object of a replaceable module."""
    functions = any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(TREES[name]))
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in TREES[name].body)
    assert future or not functions


def test_the_learners_engine_replaces_these_nine_modules_and_they_exist_or_will():
    assert set(learner_engine.REPLACEABLE) == REPLACEABLE
    for name in ("loading", "tokenizer", "kv_cache", "sampling", "model", "attention"):
        assert name in TREES


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=short)
def test_a_module_can_be_read_in_one_sitting(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{file.name} has {lines} lines: move what its chapter does not teach out of it"


def test_the_spine_of_the_engine_can_be_read_in_one_sitting():
    # since chapter 2 the tokenizer is a module of its own size, held by the test above
    files = [PACKAGE / f"{name}.py" for name in ("model", "engine")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 500


def test_no_module_is_a_drawer_for_odds_and_ends():
    for name in TREES:
        assert name.split(".")[-1] not in ("utils", "util", "helpers", "common", "misc", "tools"), name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from llmfromscratch.loading import Checkpoint", [("loading", "Checkpoint", False)]),
        ("from llmfromscratch import loading", [("loading", None, False)]),
        ("def f():\n    import llmfromscratch.course.board", [("course.board", None, True)]),
        ("from llmfromscratch.formats import ggml", [("formats.ggml", None, False)]),
        ("from llmfromscratch import LLM", [("__init__", "LLM", False)]),
        ("import torch", []),
    ],
)
def test_the_reader_of_imports_sees_each_form(source, found):
    assert list(imports(ast.parse(source))) == found


@pytest.mark.parametrize(
    "source",
    [
        "class Own(kv_cache.KVCache): pass",
        "def f(x=sampling.Sampler()): pass",
        "def f(*, x=sampling.Sampler()): pass",
        "@model.something\ndef f(): pass",
        "TABLE = {'a': loading.Checkpoint}",
        "class C:\n    x = model.Model",
        "class C:\n    x: int = field(default_factory=sampling.Sampler)",
        "f = lambda x=attention.attend: x",
    ],
)
def test_the_reader_of_holders_sees_each_form(source):
    found = [
        inner for node in holders(ast.parse(source)) for inner in ast.walk(node) if isinstance(inner, ast.Attribute)
    ]
    assert found
