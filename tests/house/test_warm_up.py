"""Warming up: afterwards, no call of an engine compiles or loads anything."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import kvpool
from kvpool.common.jit.helpers import Helpers

SCRIPT = """
import json, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
import kvpool
from kvpool.__main__ import main

def ready():
    return {
        f"{name}.{key}": len(value.overloads)
        for name, module in list(sys.modules.items()) if name.startswith("kvpool") and "replay" not in name
        for key, value in vars(module).items() if isinstance(value, Dispatcher) and value.__module__ == name
    }

kvpool.warm_up()
before = ready()
for device in ("cpu", "sim"):
    main(["replay", "--limit", "12", "--device-blocks", "40", "--host-blocks", "40", "--device", device, "--json"])
with kvpool.KVCacheManager(kvpool.BlockLayout(1, 1, 1, 4), device_blocks=8, host_blocks=4, device="sim") as cache:
    a = cache.add_sequence(list(range(9)), retention=[(0, 4, 80, None)])
    cache.commit(a)
    b = cache.add_sequence([*range(8), 7, 7])
    cache.rewind([a, b], [1, 2])
    c = cache.fork(a)
    cache.append_tokens([a, *c], [1, 2, 3, 4], [2, 2])
    cache.accept_drafts([a, *c], [2, 2], [1, 0], [1, 1])
    cache.reorder([a, *c], [1, 1])
    cache.release([a, b, *c], store=False)
    cache.content.offload(list(range(9)))
    cache.verify()
    cache.clear()


def layout(tokens=4, heads=1):
    return kvpool.BlockLayout(1, heads, 1, tokens)


GROUPS = [
    kvpool.LayerGroup([layout(), layout(heads=3)]),
    kvpool.LayerGroup(layout(heads=2), window=6, sinks=4),
    kvpool.LayerGroup(layout(1), kind="recurrent", snapshot_tokens=8),
    kvpool.LayerGroup(layout(), kind="cross"),
]
prompt = list(range(9))
for policy in ("reuse", "agent", "adaptive"):
    kvpool.KVCacheManager(layout(), device_blocks=8, device="cpu", policy=policy).close()
    kvpool.HostCache(8, 16, identity=kvpool.ModelIdentity(*"abcde"), policy=policy).close()
for device in ("cpu", "sim"):
    with kvpool.KVCacheManager(
        groups=GROUPS,
        device_blocks=[8] * 4,
        host_blocks=[5] * 4,
        device=device,
        event_capacity=64,
        max_sequence_tokens=64,
    ) as cache:
        a = cache.add_sequence(prompt, encoder_tokens=5)
        cache.match_prefix(prompt)
        cache.plan_batch([prompt], encoder_tokens=[5])
        cache.commit(a)
        for g in range(4):
            cache.blocks_needed(prompt, group=g, encoder_tokens=5 if g == 3 else None)
            cache.tables.copy_batch_block_offsets(np.zeros((1, 16), np.int32), [a], group=g)
            cache.block_table(a, stream=0 if device == "cpu" else cache.core.device.create_stream("b"), group=g)
            if g != 2:
                first, blocks, last = np.zeros(2, np.int32), np.zeros(16, np.int32), np.zeros(1, np.int32)
                cache.tables.copy_batch_block_csr(first, blocks, last, [a], group=g)
                cache.tables.copy_step_tables(cache.tables.step_tables([a], [0], [4], group=g), [a], [0], [4], group=g)
        cache.free_blocks_per_group
        cache.tables.state_blocks(a, group=2)
        cache.imports.load_targets(a)
        cache.append_tokens(a, [1, 2, 3])
        cache.rewind(a, [1])
        b = cache.fork(a)
        cache.append_tokens([a, *b], [1, 2, 3, 4], [2, 2])
        cache.accept_drafts([a, *b], [2, 2], [1, 0], [1, 1])
        cache.reorder([a, *b], [1, 1], store=True)
        cache.evictable_after_release([a, *b], group=0)
        cache.release([a, *b], stop="tool_use")
        cache.content.offload(prompt)
        for start in (100, 200):
            cache.release(cache.add_sequence([*range(start, start + 20)], encoder_tokens=5))
        cache.content.prefetch(prompt)
        cache.imports.reserve([*range(500, 513)], encoder_tokens=5).abort()
        cache.imports.reserve([*range(500, 513)], encoder_tokens=5).commit()
        cache.pin(cache.block_keys([*range(500, 512)]).keys[2:]).close()
        for g in range(3):
            block = bytes(cache.groups[g].block_bytes)
            cache.imports.import_blocks(cache.block_keys([*range(900, 904)]), [block], group=g)
        cache.content.refresh()
        cache.events(snapshot=True)
        cache.stats()
        cache.add_sequence(cache.block_keys(prompt, salt="s", extra_ids=prompt), encoder_tokens=5)
        cache.clear(force=True)
after = ready()
print(json.dumps({name: after[name] for name in after if after[name] != before.get(name)}))
"""


def test_after_a_warm_up_nothing_is_compiled_or_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.exhaustive
def test_what_is_baked_into_an_image_by_root_can_be_read_by_whom_it_runs_as(tmp_path: Path) -> None:
    script = """
import sys
import kvpool.hostcache.warming
from kvpool.__main__ import main
from kvpool.device.work import numbers_bytes
kvpool.hostcache.warming.warm_up = lambda processes: numbers_bytes(3)
sys.exit(main(["warm-up", "--into", sys.argv[1]]))
"""
    into = tmp_path / "new" / "code"
    environment = {**os.environ, "PYTHONPATH": str(Path(kvpool.__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-c", f"import os; os.umask(0o077)\n{script}", str(into)], env=environment, check=True
    )
    files = [*into.rglob("*.nbc")]
    assert files and all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in files)
    failed = {**environment, "NUMBA_DISABLE_JIT": "1"}
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "none")], env=failed).returncode == 1
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o755 for path in (into, into.parent))
    (tmp_path / "file").touch()
    refused = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "--into: expected a folder that can be" in refused.stderr


# ----------------------------------------
# Processes share the work of compiling: they keep what one process keeps, and the loss of one loses nothing.


PROGRAM = "from kvpool.hostcache.warming import warm_host_cache; warm_host_cache(['adaptive'])"
ENDLESS = """
import os, time
helper = os.getppid()
while os.getppid() == helper:
    time.sleep(0.1)
"""
HELPED = """
import json, os, sys
from kvpool.common.jit.helpers import Helpers
from kvpool.common.jit.cache import announcer
program, processes = sys.argv[1], int(sys.argv[2])
with Helpers(program, processes) as helpers:
    if processes > 1:
        helpers.start()
        for process, _ in helpers._running:
            process.wait()
    exec(program)
print(json.dumps(announcer.compiled))
"""


def compiled_by(folder: Path, processes: int) -> tuple[int, set[str]]:
    """How many functions the first process compiled after its helpers had ended, and what is kept."""
    environment = {**os.environ, "KVPOOL_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(kvpool.__file__).parents[1])}
    command = [sys.executable, "-c", HELPED, PROGRAM, str(processes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {path.name for path in folder.glob("*.nbc")}


@pytest.mark.exhaustive
def test_helpers_compile_what_one_process_compiles_and_nothing_else(tmp_path: Path) -> None:
    alone, kept = compiled_by(tmp_path / "alone", 1)
    left, shared = compiled_by(tmp_path / "shared", 3)
    assert alone and (left, shared) == (0, kept)


INNER = """
import os, sys
from kvpool.common.jit.helpers import compile_ahead
from kvpool.common.jit.compiler import Dispatcher
Dispatcher.compile = lambda function, kinds: None
compile_ahead(sys.argv[1], 0, 1, os.getppid())
"""


@pytest.mark.exhaustive
def test_helpers_share_the_functions_inside_of_one_call_too(tmp_path: Path) -> None:
    """Half of a first replay is one call. Whoever compiles it finds the functions that it calls."""
    environment = {**os.environ, "KVPOOL_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(kvpool.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", INNER, PROGRAM], env=environment, check=True)
    ahead = {path.name for path in tmp_path.glob("*.nbc")}
    compiled, kept = compiled_by(tmp_path, 1)
    assert ahead and ahead < kept and not any("-entry" in name or "-locked" in name for name in ahead)
    assert compiled == len(kept) - len(ahead) < len(kept) / 2


@pytest.mark.exhaustive
def test_a_helper_that_fails_or_is_killed_is_named_and_its_work_is_left_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), Helpers("raise OSError('no such thing')", 2) as failing:
        assert failing.start() == failing.start() == 2
        failing._running[0][0].wait()
    with caplog.at_level(logging.WARNING), Helpers(ENDLESS, 2) as killed:
        killed.start()
        killed._running[0][0].kill()
        killed._running[0][0].wait()
    first, second = [record.getMessage() for record in caplog.records]
    assert "ended with status 1" in first and "OSError: no such thing" in first
    assert "ended with status -9" in second


def test_helpers_end_with_the_work(tmp_path: Path) -> None:
    with Helpers(ENDLESS, 3) as helpers:
        helpers.start()
        processes = [process for process, _ in helpers._running]
    assert [process.poll() for process in processes] == [-9, -9]


def test_nobody_helps_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.common.jit.cache_root", lambda: None)
    with Helpers(PROGRAM, 4) as helpers:
        assert helpers.start() == 1


@pytest.mark.parametrize("executable", [None, "/no/such/python"])
def test_nobody_helps_where_no_interpreter_can_be_started(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program that has Python inside."""
    monkeypatch.setattr(sys, "executable", executable)
    with Helpers(PROGRAM, 4) as helpers:
        assert helpers.start() == helpers.start() == 1


def test_a_helper_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("numba", "kvpool", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    with caplog.at_level(logging.WARNING), Helpers("pass", 2) as helpers:
        helpers.start()
        helpers._running[0][0].wait()
    assert not (tmp_path / "run").exists() and not caplog.records
