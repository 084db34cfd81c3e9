"""The doctor on a machine with a GPU names it, and reports how copies are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockLayout, KVCacheManager
from kvpool.__main__ import main
from kvpool.common.jit import cache
from kvpool.device.cuda import describe_gpus
from kvpool.tools.cli import doctor
from tests import emulated

pytestmark = pytest.mark.gpu

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def bare(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a cache of its own, on which nobody has chosen anything."""
    for name in ("KVPOOL_DEVICE", "KVPOOL_COPY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(capsys: Capture, *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


LOOK = """
from kvpool.__main__ import main
from tests.emulated import lab
assert main(["doctor"]) == 0
assert lab.driver().counter("contexts") == 0, "a look makes no context"
"""


def test_a_look_is_not_a_use_of_the_gpu() -> None:
    if not emulated.running():
        pytest.skip("the emulated driver counts contexts")
    from tests.emulated import lab

    lab.in_a_process(LOOK)


def test_a_kernel_that_was_tested_here_is_told_from_one_of_a_model_that_all_tests_ran_on(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_read_folders", lambda: [])
    monkeypatch.setattr(doctor, "SUITE_RAN_ON", ())
    line = "copy kernels: ok, {}; the suite of tests {} on this model"
    assert line.format("not self-tested here; the first pool does it", "has not run") in answer(capsys)[1]
    monkeypatch.undo()
    with KVCacheManager(BlockLayout(1, 1, 16, 4, "uint8"), device_blocks=4, device="cuda"):
        pass
    monkeypatch.setattr(doctor, "SUITE_RAN_ON", (describe_gpus()[0].name,))
    passed = "kernel, bulk" if float(describe_gpus()[0].capability) >= 9 else "kernel"
    assert line.format(f"self-tested here: {passed}", "has passed") in answer(capsys)[1]
