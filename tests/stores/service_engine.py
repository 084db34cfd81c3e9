"""An engine that shares a store with others, in a process of its own. It saves blocks, says which are kept, and looks
at every byte that it loads. ``python -m tests.stores.service_engine STORE NUMBER SECONDS``."""

from __future__ import annotations

import sys
import time

import numpy as np

from kvpool.storage import OK
from kvpool.storage.urls import open_store
from tests.stores.lab import begin_save, content, names, open_queue

OF_ALL = 400
"""Blocks have the numbers from 0 to this."""
AT_ONCE = 8


def main(store: str, number: str, seconds: str) -> None:
    random, end = np.random.default_rng(int(number)), time.monotonic() + float(seconds)
    print(f"engine {number}, seed {number}", flush=True)
    with open_queue(open_store(store)) as queue:
        while time.monotonic() < end:
            first = int(random.integers(0, OF_ALL - AT_ONCE))
            saving = begin_save(queue, AT_ONCE, first)
            assert saving.wait(600, returned=True)
            kept = [first + place for place in np.flatnonzero(saving.codes == OK).tolist()]
            wanted, rows = random.choice(OF_ALL, AT_ONCE, replace=False), np.arange(AT_ONCE, 2 * AT_ONCE)
            loading = queue.load(queue.secret.derive_keys([names(1, int(number))[0] for number in wanted]), rows)
            assert loading.wait(600, returned=True)
            came = np.flatnonzero(loading.codes == OK)
            for place in came.tolist():
                assert (queue.memory[AT_ONCE + place] == content(int(wanted[place]))).all(), wanted[place]
            print("kept", *kept, flush=True)
            print("came", len(came), flush=True)
            if not kept:
                time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
