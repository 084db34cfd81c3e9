"""``python -m tests.stores.crash [--states N] [--recoveries N] [--seed S]``: the proof, and its figures."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.stores.crash import proof
from tests.stores.crash.log import Missing


def states(count: int, recoveries: int, seed: int) -> int:
    """Record once, replay into that many crash states and some of the recoveries; return the number of failures."""
    with tempfile.TemporaryDirectory() as slow, proof.in_memory() as built:
        began, work, results = time.monotonic(), Path(slow), []
        recording = proof.recorded(work, seed)
        print(f"{len(recording.records)} records in the log, {len(recording.promises().acknowledged)} acknowledgements")
        if count:
            results.append(("from the log", proof.replayed(recording, count, seed, built / "root")))
            results.append(("with files of another moment", proof.rolled_back(recording, 20, seed, built / "old")))
            failing = proof.recorded(_new(work / "failing"), seed, parts=("failing",))
            name = "from the log of a store whose syncs fail at times"
            results.append((name, proof.replayed(failing, max(1, count // 10), seed, built / "failing")))
        for number in range(recoveries):
            again = proof.recovered(recording, _new(work / f"recovery-{number}"), seed + number)
            name = f"from recovery {number}"
            results.append((name, proof.replayed(again, 100, seed + number, built / f"recovery-{number}")))
        for name, result in results:
            print(f"{name}: {result}")
            print("".join(f"  {failure}\n" for failure in result.failures), end="")
        print(f"{time.monotonic() - began:.0f} s")
        return sum(len(result.failures) for _, result in results)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed, 1 if something did, 2 if nothing can be recorded here."""
    parser = argparse.ArgumentParser(prog="python -m tests.stores.crash", description="Crash a DiskStore.")
    parser.add_argument("--states", type=int, default=0, metavar="N", help="crash states of one recorded log")
    parser.add_argument("--recoveries", type=int, default=0, metavar="N", help="recoveries to crash, 100 states each")

    parser.add_argument("--seed", type=int, default=None, metavar="S")
    options = parser.parse_args(arguments)
    if not options.states + options.recoveries:
        parser.error("give --states or --recoveries")
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        return int(states(options.states, options.recoveries, seed) > 0)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
