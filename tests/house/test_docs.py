"""The documentation builds without a warning, names everything that is public, and its examples and commands are
right."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import kvpool
from kvpool.__main__ import command_line
from kvpool.integrations.metric_definitions import COUNTER, DEFINITIONS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "DESIGN.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
WITH_EXAMPLES = [path for path in sorted((ROOT / "kvpool").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
PUBLIC = (
    "kvpool",
    "kvpool.device.memory",
    "kvpool.device.sim",
    "kvpool.errors",
    "kvpool.hostcache",
    "kvpool.pool",
    "kvpool.tools.planner",
    "kvpool.integrations.kv_events",
    "kvpool.remote",
    "kvpool.storage",
    "kvpool.storage",
    "kvpool.storage.backends.disk",
    "kvpool.storage.backends.mooncake",
    "kvpool.storage.backends.peer",
    "kvpool.storage.backends.s3",
)
SHELL = [
    (page.name, line.partition("#")[0].strip())
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "-m kvpool " in line
]


@pytest.mark.exhaustive
def test_the_documentation_builds_without_a_warning(built: Path) -> None:
    assert (built / "index.html").is_file()


def public_names(module: ModuleType) -> set[str]:
    """What a package offers: ``__all__``, or else what its ``__init__`` imports by name from its own modules."""
    if hasattr(module, "__all__"):
        above = kvpool.__all__ if module is not kvpool else ("__version__",)
        return {f"{module.__name__}.{name}" for name in module.__all__ if name not in above}
    statement = f"from {module.__name__}"
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    statements = re.findall(r"from (\S+) import (.+)", text)
    names = {
        part.rpartition(" as ")[2].strip()
        for source, what in statements
        if source.startswith(statement[5:])
        for part in what.split(",")
    }
    return {f"{module.__name__}.{name}" for name in names}


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_in_the_reference(built: Path, package: str) -> None:
    from sphinx.util.inventory import InventoryFile

    with (built / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    listed = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    wanted = public_names(importlib.import_module(package))
    assert wanted, package
    assert not wanted - listed


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_are_right(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(("page", "line"), SHELL)
def test_commands_that_are_shown_have_these_options(page: str, line: str) -> None:
    for command in re.split(r"&&|\|", line):
        _, separator, arguments = command.partition("-m kvpool ")
        if separator:
            command_line().parse_args(shlex.split(arguments.partition(" > ")[0]))


def test_links_and_files_that_are_named_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        linked = [target for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text) if "://" not in target]
        named = re.findall(r"`((?:docs|examples|tests|asv_bench|kvpool)/[\w./]*)`", text)
        missing += [f"{page}: {target}" for target in linked if not (page.parent / target).exists()]
        missing += [f"{page}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing, missing


def test_every_metric_is_in_the_table_of_metrics() -> None:
    named = re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    names = {definition.name + "_total" * (definition.kind == COUNTER) for definition in DEFINITIONS}
    assert names <= {f"kvpool_{name}" for name in named}


# ----------------------------------------
# What README.md and the pages of docs/ show runs as it stands.


PROGRAMS = [
    pytest.param(page, code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]
NEEDS = {
    "cryptography": ("cryptography",),
    "kvpool.integrations.kv_events": ("msgspec", "zmq"),
    "kvpool.remote": ("zmq",),
    "kvpool.open": ("cryptography",),
    "kvpool.storage": ("cryptography",),
    "kvpool.storage.backends.peer.peer_store": ("zmq",),
    "kvpool.integrations.metrics": ("prometheus_client",),
}


@pytest.mark.parametrize(("page", "code"), PROGRAMS)
def test_the_programs_that_are_shown_run(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for module, packages in NEEDS.items():
        if module in code:
            for package in packages:
                pytest.importorskip(package)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    shown = re.findall(r"# prints: (.+)", code)
    assert shown, "a program says what it prints"
    for line in shown:
        assert line in said
