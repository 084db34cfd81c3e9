"""What was decided for fixed calls is decided still, in machine code and in the interpreter, under any secret."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.state.arrays import POLICIES
from tests.golden import pools
from tests.golden.cases import CASES, DRIVES, SEEDS, STORE_SEEDS, changed, pool_case, read
from tests.house.test_interpreter import python
from tests.seeds import some_of

EVERYWHERE = {
    "offload",
    "onboard",
    "event created",
    "event cleared",
    "event stored device",
    "event stored host",
    "event removed device",
    "event removed host",
    "event updated device",
    "add",
    "add OutOfBlocks",
    "append OutOfBlocks",
    "commit",
    "rewind",
    "fork",
    "reorder",
    "keep",
    "release",
    "swap_out",
    "resume",
    "resume OutOfBlocks",
    "exclusive",
    "exclusive OutOfBlocks",
    "prefetch",
    "offload prompt",
    "pin",
    "unpin",
    "reserve",
    "load",
    "abort",
    "import",
    "forget",
    "set_priority",
    "refresh",
    "misused release UnknownSequence",
}
"""What happens in pools of every kind."""
NEVER = {
    "one": {"passed_blocks"},
    "recurrent": {"passed_blocks", "partial_tokens", "partial_blocks"},
    "cross": {"passed_blocks"},
    "mixed": {"partial_tokens", "partial_blocks", "resume OutOfBlocks"},
}
"""The ones among these that do not happen in pools of some kinds."""
KEPT = {"store find", "store save", "store load"}
SEEN = {
    "host cache": {
        "reserve",
        "reserve OutOfBlocks",
        "publish",
        "abort",
        "pin",
        "pin BlockNotFound",
        "touch",
        "forget",
        "refresh",
        "event stored",
        "event removed",
        "event updated",
    },
    "store queue": {
        *KEPT,
        "store forget",
        "store clear",
        "find late",
        "find failed",
        "find cancelled",
        "save ok",
        "save refused",
        "save late",
        "save failed",
        "load ok",
        "load absent",
        "load late",
        "load failed",
        "forget ok",
        "clear ok",
    },
    "keeper": {
        *KEPT,
        "store forget",
        "store clear",
        "prefetch loaded",
        "prefetch absent",
        "prefetch cached",
        "forgotten",
        "event stored near",
        "event removed near",
        "event cleared",
    },
    "host keeper": {*KEPT, "store clear", "write", "lookup", "forget", "pin"},
    **{f"policy {policy}": {"offload", "onboard", "event removed host"} for policy in POLICIES},
    **{f"host policy {policy}": {"event removed"} for policy in POLICIES},
    "policy adaptive": {"offload", "follows lru", "follows reuse"},
    "host policy adaptive": {"event removed", "follows lru", "follows reuse"},
}
"""What happens beside pools, by the first words of the cases."""
CASES_OF_POOLS = [*((kind, "cpu") for kind in pools.KINDS), *((kind, "sim") for kind in reversed(pools.KINDS))]
"""Of all kinds on the CPU, and the mixed one on the sim device first."""
INTERPRETED = ("window on cpu, seed 1", "mixed on sim, seed 0", "keys")


@pytest.mark.parametrize(("kind", "device"), some_of(len(pools.KINDS) + 1, CASES_OF_POOLS))
def test_a_pool_decides_what_it_did(kind: str, device: str) -> None:
    runs = {pool_case(kind, device, seed): pools.drive(kind, device, seed) for seed in SEEDS}
    seen = sum((run.seen for run in runs.values()), Counter[str]())
    wanted = (EVERYWHERE | {*pools.FIGURES}) - NEVER.get(kind, set())
    assert not (missing := sorted(name for name in wanted if not seen[name])), f"the cases do not cover {missing}"
    wrong = changed({case: run.digest for case, run in runs.items()}, read())
    assert not wrong, wrong


@pytest.mark.parametrize("name", DRIVES)
def test_what_reaches_stores_and_host_caches_is_what_it_was(name: str) -> None:
    runs = {f"{name}, seed {seed}": CASES[f"{name}, seed {seed}"]() for seed in STORE_SEEDS}
    seen = sum((run.seen for run in runs.values()), Counter[str]())
    missing = sorted(event for event in SEEN[name.partition(",")[0]] if not seen[event])
    assert not missing, f"the cases do not cover {missing}"
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
