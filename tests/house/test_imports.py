"""Imports run one way, GPU packages are imported in one place, and nothing grows past a screen."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvpool"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = ("kvpool", "tests", "asv_bench", "docs", "examples")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "env" not in path.parts]

# A room imports only rooms above it. The files at the top of the package are rooms too.
ROOMS = [
    "errors",
    "common",
    "state",
    "device",
    "pool",
    "hostcache",
    "remote",
    "storage",
    "opening",
    "",
    "integrations",
    "tools",
    "__main__",
]
RANKS = {name: rank for rank, name in enumerate(ROOMS)}
GPU_PACKAGES = {"cuda", "cupy", "jax", "tensorflow", "torch"}
GPU_MODULE = "device.cuda.cuda_device"
ENGINES = {"integrations.sglang": {"torch"}}
"""Plug-ins whose engine hands over arrays of this package, and has imported it before."""


def name_of(path: Path) -> str:
    """Dotted name below the package: ``state.lru``; the package itself is the empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in MODULES}


def rank_of(name: str) -> int:
    """The room of a module; fails for one that has been given none."""
    candidate = name
    while candidate not in RANKS and "." in candidate:
        candidate = candidate.rpartition(".")[0]
    assert candidate in RANKS, f"kvpool.{name} has no room in ROOMS"
    return RANKS[candidate]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of a file, wherever in the file; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def own_imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and name (below the package) of every module of the package that a file imports."""
    imports = []
    for line, imported in imports_of(path):
        package, _, name = imported.partition(".")
        if package == "kvpool":
            name = name if name in FILES else name.rpartition(".")[0]
            assert name in FILES, f"{path}:{line}: there is no {imported}"
            imports.append((line, name))
    return imports


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path}:{line}: kvpool.{imported}"
        for name, path in FILES.items()
        for line, imported in own_imports_of(path)
        if rank_of(imported) > rank_of(name)
    ]
    assert not wrong, f"imports from later rooms: {wrong}"


def test_gpu_packages_are_imported_by_one_module_only() -> None:
    wrong = [
        f"{path}:{line}: {imported}"
        for name, path in FILES.items()
        for line, imported in imports_of(path)
        if name != GPU_MODULE and imported.partition(".")[0] in GPU_PACKAGES - ENGINES.get(name, set())
    ]
    assert not wrong, wrong


def test_no_imports_run_in_a_circle() -> None:
    names = {name: {to for _, to in own_imports_of(path)} - {name, ""} for name, path in FILES.items()}
    while leaves := {name for name, imported in names.items() if not imported & names.keys()}:
        names = {name: imported for name, imported in names.items() if name not in leaves}
    assert not names, f"these import each other, or what does: {sorted(names)}"


def test_no_file_has_the_name_of_another() -> None:
    counted = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert not [name for name, count in counted.items() if count > 1]


OUTER = ("hostcache", "remote", "storage", "integrations", "tools")


def test_the_example_of_the_readme_loads_the_core_only() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    assert "KVCacheManager" in example
    script = f"{example}\nimport sys\nprint(*sorted(name for name in sys.modules if name.startswith('kvpool.')))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "kvpool.pool.manager" in loaded
    assert not [name for name in loaded if name.split(".")[1] in OUTER]


FOREIGN = {"_asdict", "_fields", "_replace", "_is_owned", "_getvalue", "_getframe"}
"""What named tuples, locks, sys and Numba's arrays have, whose names are theirs."""
NUMBAS = {
    *("_create_empty_module", "_data_layout", "_ee", "_engine", "_get_module_for_linking", "_module_pass_manager"),
    *("_lock", "_pass_builder", "_tm"),
}
"""What Numba's code generator and its lock have. One file may use it."""


def test_no_module_touches_private_members_of_another() -> None:
    wrong = []
    for name, path in FILES.items():
        tree = tree_of(path)
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        private = [node for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")]
        own = {node.attr for node in private if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= FOREIGN | (NUMBAS if name == "common.jit.compiler" else set())
        wrong += [f"{path}:{node.lineno}: {ast.unparse(node)}" for node in private if node.attr not in own]
    assert not wrong, wrong


def docstring_lines(tree: ast.AST) -> int:
    """Lines of the docstrings of a file or function, and of the attributes in it."""
    statements = [
        node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in statements)


@pytest.mark.exhaustive
def test_files_open_with_their_purpose_and_fit() -> None:
    wrong = []
    for path in SOURCES:
        text, tree = path.read_text(encoding="utf-8"), tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{path}: no docstring")
        if text.count("\n") - docstring_lines(tree) >= 600:
            wrong.append(f"{path}: 600 lines or more, without docstrings")
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long = [
            node.name
            for node in functions
            if (node.end_lineno or node.lineno) - node.lineno - docstring_lines(node) >= 70
        ]
        wrong += [f"{path}: more than 70 lines in {name}" for name in long]
    assert not wrong, wrong


def test_package_imports_without_gpu_packages_and_without_jit() -> None:
    script = f"import sys; sys.modules.update(dict.fromkeys({sorted(GPU_PACKAGES)})); import kvpool"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_cuda_sources_hide_no_nvidia_package(tmp_path: Path) -> None:
    folder = ROOT / "cuda"
    assert not list(folder.rglob("*.py"))
    assert not {"bindings", "core", "pathfinder"} & {entry.name for entry in folder.iterdir()}
    for name in ("bindings", "core", "pathfinder"):
        (tmp_path / "cuda" / name).mkdir(parents=True)
        (tmp_path / "cuda" / name / "__init__.py").write_text("", encoding="utf-8")
    # With -c the working directory comes first on the path, as it does for `python -m` from the root.
    script = "import cuda, cuda.bindings, cuda.core, cuda.pathfinder; assert cuda.__file__ is None"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def loaded_by(path: Path) -> Iterator[str]:
    """Dotted names that are imported when a file is: not those of functions, nor those of type checkers."""
    pending: list[ast.AST] = [*tree_of(path).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef):
            pending += ast.iter_child_nodes(node)


@pytest.mark.parametrize("name", ["integrations.vllm.spec", "integrations.vllm.secondary_tier"])
def test_numba_is_not_there_when_vllm_starts(name: str) -> None:
    """On a CPU, vLLM reads the attributes of all loaded modules then, and fails at one of llvmlite."""
    seen, pending = {""}, ["", name]
    while pending:
        module = pending.pop()
        for imported in loaded_by(FILES[module]):
            package, *parts = imported.split(".")
            assert package not in ("numba", "llvmlite"), f"{name} loads kvpool.{module}, which imports {imported}"
            inner = {".".join(parts[: end + 1]) for end in range(len(parts))} if package == "kvpool" else set()
            new = (inner & FILES.keys()) - seen
            seen |= new
            pending += new
    assert "integrations.options" in seen
