"""The engines of examples/ run, show what they promise to show, and notice when a block table is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvpool
from kvpool.device.cuda import unusable
from kvpool.device.sim import RaceError
from tests.seeds import some_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HAPPENED = [
    "blocks reused on the device",
    "blocks reused in part",
    "blocks offloaded",
    "blocks onboarded",
    "preemptions",
    "guessed tokens that were right",
    "guessed tokens that were wrong, and rewound",
    "tokens compared",
]


@pytest.fixture
def engine(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("engine_numpy")


def run(*arguments: str, expected: int = 0) -> str:
    """What an example prints in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


SCRIPTS = {
    "engine_numpy": (["--chats", "16"], HAPPENED),
    "beams_numpy": (["--chats", "2"], []),
    "windows_numpy": (["--chats", "16"], ["the window had passed"]),
    "groups_numpy": (
        ["--chats", "5"],
        ["guessed tokens that were right", "accepted drafts that were moved", "times that a beam went on from another"],
    ),
    "drafts_numpy": (
        [],
        [
            *("blocks reused on the device", "blocks offloaded", "blocks onboarded", "preemptions"),
            *("accepted drafts that were moved", "drafts that were accepted", "drafts that were dropped"),
        ],
    ),
}
"""Arguments of each example, and what it counts that has to happen."""
FIRST = [*((name, "sim", 0) for name in SCRIPTS), ("windows_numpy", "cpu", 1)]
# A few chats of groups do all of it with one seed only, and many take long.
OTHERS = product(SCRIPTS.keys() - {"groups_numpy"}, ["cpu", "sim"], [0, 1, 2])
RUNS = dict.fromkeys([*FIRST, ("groups_numpy", "cpu", 0), *sorted(OTHERS)])


def assert_happened(output: str, what: list[str]) -> None:
    for text in what:
        counts = [int(line.split()[0].replace(",", "")) for line in output.splitlines() if text in line]
        assert any(counts), output


@pytest.mark.parametrize(("example", "device", "seed"), some_of(len(FIRST), RUNS))
def test_every_logit_is_that_of_the_model_without_a_cache(
    load: Callable[[str], ModuleType], example: str, device: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, what = SCRIPTS[example]
    assert load(example).main([*arguments, "--seed", str(seed), "--device", device, "--check"]) == 0
    assert_happened(capsys.readouterr().out, what)


def test_a_beam_in_the_wrong_row_is_noticed(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    reorder = kvpool.KVCacheManager.reorder

    def wrong(cache: kvpool.KVCacheManager, ids: Any, parents: Any, **options: Any) -> None:
        reorder(cache, ids, parents[::-1].copy() // 4 * 4, **options)

    monkeypatch.setattr(kvpool.KVCacheManager, "reorder", wrong)
    assert load("beams_numpy").main(["--chats", "1"]) == 1


def test_the_numpy_engine_runs_as_a_script() -> None:
    assert_happened(run("examples/engine_numpy.py"), HAPPENED)


def test_an_engine_says_what_did_not_happen(engine: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["--chats", "1"]) == 1
    assert "did not happen: " in capsys.readouterr().out


def one_wrong_block(tables: list[Any]) -> Any:
    """The table, but in the tenth step the first block of its first sequence is another one."""
    table = tables[-1]
    if len(tables) == 10:
        table[0, 0] = (table[0, 0] + 1) % 26
    return table


def stale_rows(tables: list[Any]) -> Any:
    """The table of the step before, where both have a block: as if nobody had waited until it was written again."""
    table, before = tables[-1], tables[max(len(tables) - 2, 0)]
    common = tuple(slice(min(pair)) for pair in zip(table.shape, before.shape, strict=True))
    both = (table[common] >= 0) & (before[common] >= 0)
    table[common][both] = before[common][both]
    return table


@pytest.mark.parametrize("broken", [one_wrong_block, stale_rows])
def test_a_wrong_block_table_is_noticed(
    engine: ModuleType,
    broken: Callable[[list[Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dense, tables = kvpool.pool.BlockTable.dense, []

    def wrong(self: kvpool.pool.BlockTable) -> Any:
        tables.append(dense(self))
        return broken([table.copy() for table in tables])

    monkeypatch.setattr(kvpool.pool.BlockTable, "dense", wrong)
    assert engine.main([]) == 1
    assert "the logits differ" in capsys.readouterr().out


def test_calls_that_do_not_name_the_stream_are_a_race(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add_sequence_batch", "append_tokens", "block_table", "commit", "release", "rewind"):
        call = getattr(kvpool.KVCacheManager, name)

        def nameless(*arguments: Any, stream: Any, call: Callable[..., Any] = call, **options: Any) -> Any:
            return call(*arguments, **options)

        monkeypatch.setattr(kvpool.KVCacheManager, name, nameless)
    with pytest.raises(RaceError, match="nothing orders"):
        engine.main(["--device", "sim"])


RULES = [
    "engine_reads_after_copies",
    "copy_writes_after_copies",
    "copy_writes_after_engine",
    "engine_writes_after_copies",
]


@pytest.mark.parametrize("rule", some_of(1, RULES))
def test_the_engine_needs_the_order_of_copies(engine: ModuleType, rule: str, without: Callable[[str], None]) -> None:
    without(rule)
    with pytest.raises(RaceError, match="nothing orders"):
        engine.main(["--device", "sim"])


# -- other packages
# ----------------------------------------------------------------------------------------------------------------------


def test_the_torch_example_reuses_what_it_wrote() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert "9 of 10 tokens reused" in run("examples/engine_torch.py")


def test_the_cupy_engine_says_what_it_needs() -> None:
    if unusable() is None:
        pytest.skip("there is a GPU")
    assert "cannot run here: the cuda device needs" in run("examples/engine_cupy.py", expected=1)


@pytest.mark.gpu
@pytest.mark.parametrize("package", ["cupy", "jax", "torch"])
def test_the_engine_runs_on_a_gpu(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = unusable() or (None if importlib.util.find_spec(package) else f"{package} is not installed")
    if missing:
        pytest.skip(missing)
    monkeypatch.setenv("KVPOOL_DEVICE", "cuda")
    run(f"examples/engine_{package}.py")


# -- the engine in CuPy, on the CPU
# ------------------------------------------------------------------------------------------------------


def test_the_kernel_of_the_cupy_engine_compiles_for_a_gpu(load: Callable[[str], ModuleType]) -> None:
    core = pytest.importorskip("cuda.core")
    example = load("engine_cupy")
    macros = "".join(f"#define {name} {value}\n" for name, value in example.CONSTANTS.items())
    try:
        program = core.Program(
            macros + example.SOURCE.read_text(encoding="utf-8"), "c++", core.ProgramOptions(arch="sm_80")
        )
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    assert b"paged_attention" in program.compile("cubin").code
