"""What was decided for fixed calls is decided still, in machine code and in the interpreter, under any secret."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.golden import pools
from tests.golden.cases import CASES, SEEDS, changed, pool_case, read
from tests.house.test_interpreter import python

EVERYWHERE = {
    "offload", "onboard", "event created", "event cleared", "event stored device", "event stored host",
    "event removed device", "event removed host", "event updated device", "add", "add OutOfBlocks", "append OutOfBlocks",
    "commit", "rewind", "fork", "reorder", "keep", "release", "swap_out", "resume", "resume OutOfBlocks", "together",
    "together OutOfBlocks", "prefetch", "offload", "pin", "unpin", "reserve", "load", "abort", "import", "forget",
    "set_priority", "refresh", "misused release UnknownSequence",
}  # fmt: skip
"""What happens in pools of every kind."""
NEVER = {
    "one": {"passed_blocks"},
    "recurrent": {"passed_blocks", "partial_tokens", "partial_blocks"},
    "cross": {"passed_blocks"},
    "mixed": {"partial_tokens", "partial_blocks", "resume OutOfBlocks"},
}
"""Of these, what does not happen in pools of some kinds."""
INTERPRETED = ("window on cpu, seed 1", "mixed on sim, seed 0", "keys")


@pytest.mark.parametrize("device", pools.DEVICES)
@pytest.mark.parametrize("kind", pools.KINDS)
def test_a_pool_decides_what_it_did(kind: str, device: str) -> None:
    runs = {pool_case(kind, device, seed): pools.drive(kind, device, seed) for seed in SEEDS}
    seen = sum((run.seen for run in runs.values()), Counter[str]())
    wanted = (EVERYWHERE | {*pools.FIGURES}) - NEVER.get(kind, set())
    assert not (missing := sorted(name for name in wanted if not seen[name])), f"the cases do not cover {missing}"
    wrong = changed({case: run.digest for case, run in runs.items()}, read())
    assert not wrong, wrong


def test_keys_are_what_they_were() -> None:
    assert not (wrong := changed({"keys": CASES["keys"]().digest}, read())), wrong


def test_the_interpreter_decides_what_machine_code_decides() -> None:
    python("-m", "tests.golden", *INTERPRETED, jit=False)


def test_decisions_do_not_depend_on_the_secret() -> None:
    assert pools.drive("mixed", "cpu", 0, bytes(32)).digest == read()[pool_case("mixed", "cpu", 0)]


def test_every_digest_belongs_to_a_case() -> None:
    assert list(read()) == list(CASES)
