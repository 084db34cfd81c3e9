"""Every rule in the list of mutations is where it says, and so are the tests that must fail without it; a few are taken
out."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path

import pytest

from kvpool.state import records
from tests.mutations import MUTATIONS
from tests.mutations.__main__ import main, unfit
from tests.mutations.anchors import Package
from tests.mutations.bench import bench
from tests.mutations.generated import mutants
from tests.mutations.mutation import ROOT, Mutation

SOME = 3


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )


@pytest.mark.exhaustive
def test_every_mutation_fits_its_function_and_names_tests_that_exist() -> None:
    package, wrong = Package(ROOT / "kvpool"), []
    for name, mutation in MUTATIONS.items():
        package.place(mutation)
        before, after = ([ast.dump(node) for node in nodes] for nodes in mutation.code())
        if before == after or not mutation.tests or not mutation.harm.endswith("."):
            wrong.append(f"{name}: changes nothing, or names no test or harm")
        for test in mutation.tests:
            file, _, function = test.partition("::")
            if re.split(r"::|\[", function)[0] not in defined_in(ROOT / file):
                wrong.append(f"{name}: there is no {test}")
    assert not wrong, wrong


def test_every_rule_with_a_switch_has_a_mutation() -> None:
    sources = " ".join(mutation.before + mutation.after for mutation in MUTATIONS.values())
    in_words = {
        "levels": "levels.cut(copy_ops) if cut",
        "namespace_in_key": "in_key",
        "namespace_at_hit": ".namespace != namespace",
        "tokens_at_hit": "block_tokens[b, i] ^ tokens",
        "ticket_at_loss": ".ticket != ticket",
    }
    for who in ("copy_reads", "copy_writes", "engine_reads", "engine_writes"):
        in_words[f"{who}_after_copies"] = f"guards >> {who.upper()} & 2"  # only the other guard of the two is left
        in_words[f"{who}_after_engine"] = f"guards >> {who.upper()} & 1"
    assert not [name for name in records.GUARDS if in_words.get(name, name.upper()) not in sources]


@pytest.mark.exhaustive
def test_some_mutations_are_killed() -> None:
    """``KVPOOL_MUTATIONS_SEED`` draws others."""
    seed = int(os.environ.get("KVPOOL_MUTATIONS_SEED", "2"))
    print(f"seed {seed}: python -m tests.mutations --sample {SOME} --seed {seed}")
    assert main(["--sample", str(SOME), "--seed", str(seed)]) == 0


@pytest.mark.exhaustive
def test_a_mutation_that_no_test_notices_lives_and_the_tree_is_as_it_was() -> None:
    test = "tests/state/test_lists.py::test_every_key_has_a_bucket"
    harmless = Mutation("harmless", "LEVELS", "LEVELS = 1 << 8", "LEVELS = (1 << 8)", "None.", (test,))
    before = (ROOT / "kvpool" / "state" / "records.py").read_bytes()
    with bench() as copy:
        written = (copy.folder / "kvpool" / "state" / "records.py").read_bytes()
        assert copy.run(harmless).lived == (test,)
        with pytest.raises(RuntimeError, match="did not run"):
            copy.run(harmless._replace(tests=("tests/state/test_lists.py::test_of_nothing",)))
        with pytest.raises(ValueError, match="harmless: LEVELS has 0 times"):
            copy.run(harmless._replace(before="what is not there"))
        assert (copy.folder / "kvpool" / "state" / "records.py").read_bytes() == written
    assert (ROOT / "kvpool" / "state" / "records.py").read_bytes() == before and not copy.folder.exists()


def test_each_rule_makes_its_mutants_of_functions_and_of_no_message(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    code = """A = 1 < 2
def f(a, b):
    'Text.'
    if a and b < 1:
        b.c = a
    while a is not b:
        g(a)
    if a:
        raise ValueError(a == b)
"""
    (tmp_path / "room" / "a.py").write_text(code)
    package = Package(tmp_path)
    made = {made.name: package.changed(made.place, 1, made.after)[1] for made in mutants(package, "room")}
    before = ast.unparse(ast.parse(code)).splitlines()
    changed = {name: [line.strip() for line in text.splitlines() if line not in before] for name, text in made.items()}
    assert changed == {
        "room.a:f:1:true": ["if True:"],
        "room.a:f:2:false": ["if False:"],
        "room.a:f:3:swap": ["if a or b < 1:"],
        "room.a:f:4:true": ["if True and b < 1:"],
        "room.a:f:5:true": ["if a and True:"],
        "room.a:f:6:off": ["if a and b <= 1:"],
        "room.a:f:7:off": ["if a and b < 2:"],
        "room.a:f:8:drop": ["pass"],
        "room.a:f:9:false": ["while False:"],
        "room.a:f:10:negate": ["while a is b:"],
        "room.a:f:11:drop": ["pass"],
        "room.a:f:12:true": ["if True:"],
        "room.a:f:13:false": ["if False:"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name some, or --all"),
        ("nothing --sample 1", "there is no nothing"),
        ("nothing --sample 1 --generated --room state/admit", "there is no nothing"),
    ],
)
def test_a_command_line_without_a_known_name_runs_nothing(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_what_is_made_by_rule_is_killed_by_a_test_that_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    tests = "tests/state/test_lists.py"
    options = ["--generated", "--room", "state/policies/block_lists", "--tests", tests, "--sample", "12", "--seed", "1"]
    assert main(options) == 0
    assert re.search(rf"^killed state\.policies\.block_lists:.* by {tests}::", capsys.readouterr().out, re.MULTILINE)


def test_a_mutation_follows_its_code_to_another_function_and_one_without_code_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.py").write_text("def first(a):\n    return 1\n\n\ndef take(a):\n    return a\n")
    (tmp_path / "new.py").write_text(
        "class Lists:\n    def take(self, a):\n        if (a > 1\n            ): return 2\n"
    )
    moved = Mutation("moved", "lists.drop", "a > 1", "False", "None.", ())
    gone = moved._replace(name="gone", before="a > 2")
    fits = moved._replace(name="fits", function="old.take", before="return a")
    (tmp_path / "lists.py").write_text('Mutation(\n    "moved",\n    "lists.drop",\n)\n')
    package = Package(tmp_path)
    assert unfit(package, [moved, gone, fits], None) == [moved, gone]
    assert unfit(package, [moved, gone, fits], tmp_path) == [gone]
    assert (tmp_path / "lists.py").read_text() == 'Mutation(\n    "moved",\n    "Lists.take",\n)\n'
    assert capsys.readouterr().out == "moved: lists.drop -> Lists.take\n"
    assert package.applied(moved._replace(function="take"))[1].endswith("if False:\n            return 2")
    assert package.anchored(fits._replace(function="Gone.take")) == fits._replace(function="take")
