"""What the pages "Where things are", "Five races" and "What it is made of" name exists: files, functions, tests,
mutations. A rule that is taken out prints what the page shows."""

from __future__ import annotations

import ast
import functools
import os
import random
import re
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.bench import bench

ROOT = Path(__file__).parents[2]
RACES, MADE_OF = (ROOT / "docs" / f"{name}.md" for name in ("races", "made-of"))
SECTIONS = re.findall(
    r"```sh\npython -m tests\.mutations (\w+) --verbose\n```\n(.*?)(?=```sh|\n## |\Z)", RACES.read_text(), re.S
)


def named_on(page: Path) -> list[str]:
    """``file``, ``folder/`` and ``file::name``, without the parameters of a test."""
    code = re.findall(r"`([\w./-]+(?:::[\w.]+)?)(?:\[[^`]*\])?`", page.read_text(encoding="utf-8"))
    folders = ("kvpool/", "cuda/", "tests/", "asv_bench/", ".ci/")
    return [name for name in code if name.startswith(folders) and (name[-1] == "/" or "." in name)]


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Functions, classes, methods and constants of a Python file; kernels of a CUDA source, without a width."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cu", ".cuh"):
        return frozenset(re.findall(r"__global__ .*?(\w+?)(?:_##bytes)?\(const", text))
    return frozenset(_names(ast.parse(text).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> list[str]:
    names = []
    for node in body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                names.append(prefix + name)
            case ast.ClassDef(name):
                names += [prefix + name, *_names(node.body, f"{prefix}{name}.")]
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                names.append(prefix + name)
    return names


def is_there(name: str) -> bool:
    file, _, what = name.partition("::")
    return (ROOT / file).exists() and (not what or what in defined_in(ROOT / file))


@pytest.mark.parametrize("page", [RACES, MADE_OF], ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    named = named_on(page)
    assert len(named) > 20
    assert not [name for name in named if not is_there(name)]


def test_files_of_the_table_of_questions_are_there() -> None:
    """They are named from the package, or from a room of it."""
    rooms = (ROOT / "docs" / "design" / "rooms.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", rooms.split("\n## In which file")[1].split("\n## Rooms")[0])
    assert len(named) > 10
    assert not [name for name in named if not [*ROOT.glob(f"kvpool/{name}"), *ROOT.glob(f"kvpool/*/{name}")]]


@pytest.mark.parametrize(("name", "text"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_a_mutation_of_a_page_is_killed_by_the_test_that_stands_below_it(name: str, text: str) -> None:
    killers = {test.partition("[")[0] for test in MUTATIONS[name].tests}
    assert killers & set(re.findall(r"`(tests/[\w./]+::\w+)", text))


def _plain(text: str) -> str:
    """Without line breaks, and without numbers of lines and steps, which change with every edit."""
    text = re.sub(r"\b[ab] \d+ steps to \S+ in", "steps to", text)
    return re.sub(r"\s+", " ", text)


@pytest.mark.exhaustive
def test_a_rule_that_is_taken_out_prints_what_the_page_shows() -> None:
    """``KVPOOL_MUTATIONS_SEED`` draws another one of the page."""
    seed = int(os.environ.get("KVPOOL_MUTATIONS_SEED", random.randrange(1 << 32)))
    name, text = random.Random(seed).choice(SECTIONS)
    print(f"seed {seed}: {name}")
    with bench() as copy:
        verdict = copy.run(MUTATIONS[name])
    said, shown = _plain(verdict.text), re.findall(r"```text\n(.*?)```", text, re.S)
    assert shown and not verdict.lived
    for part in (part for block in shown for part in re.split(r"…\n?", block)):
        assert _plain(part).strip(" ,") in said, verdict.text
