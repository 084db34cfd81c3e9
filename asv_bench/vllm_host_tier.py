"""Figures of the host tier under vLLM, in the environment of ``tests.engines``::

    python -m tests.engines run python -m asv_bench.vllm_host_tier scheduler
    python -m tests.engines run python -m asv_bench.vllm_host_tier first-token

``scheduler`` times what vLLM's scheduler asks of its manager of host blocks for requests of 60 chunks, of vLLM's own
manager and of kvpool's in turn. ``first-token`` serves prompts that are new and prompts that are in the host tier in
turn, and says how long the first token takes. Both print medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNKS, CAPACITY, ROUNDS = 60, 6000, 300
NEW_TOKENS = 4


class Calls:
    """The calls for one request after the other, and how long each took, in microseconds."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.times = manager, {name: [] for name in ("lookup", "touch", "load", "store")}

    def timed(self, name: str, *calls: Callable[[], Any]) -> None:
        began = time.perf_counter()
        for call in calls:
            call()
        self.times[name].append((time.perf_counter() - began) * 1e6)

    def request(self, number: int, keys: list[Any]) -> None:
        """All keys are new, and others are evicted for them; later they are found and loaded."""
        from vllm.v1.kv_offload.base import ReqContext

        manager, context = self.manager, ReqContext(req_id=str(number))
        manager.on_new_request(context)
        stored = set(keys)
        self.timed(
            "store", lambda: manager.prepare_store(keys, context), lambda: manager.complete_store(stored, context)
        )
        manager.on_request_finished(context)
        again = ReqContext(req_id=f"{number} again")
        manager.on_new_request(again)
        self.timed("lookup", *[lambda key=key: manager.lookup(key, again) for key in keys])
        self.timed("touch", lambda: manager.touch(keys, again))
        self.timed("load", lambda: manager.prepare_load(keys, again), lambda: manager.complete_load(stored, again))
        manager.on_request_finished(again)


def scheduler(rounds: int) -> None:
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    import kvpool
    from kvpool.engines.vllm import KVPoolOffloadingManager

    identity = kvpool.ModelIdentity("toy", "r1", "float16", "chunks", "benchmark")
    cache = kvpool.HostCache(CAPACITY, 4096, identity=identity)
    sides = {"vLLM": Calls(CPUOffloadingManager(CAPACITY)), "kvpool": Calls(KVPoolOffloadingManager(cache))}
    draw = random.Random(3)
    warm = CAPACITY // CHUNKS + 10
    for number in range(warm + rounds):
        keys = [make_offload_key(draw.randbytes(32), 0) for _ in range(CHUNKS)]
        for calls in sides.values():
            calls.request(number, keys)
    print(f"{CHUNKS} chunks, {CAPACITY} in the tier, medians of {rounds} requests in turn, microseconds")
    for side, calls in sides.items():
        medians = {name: statistics.median(found[warm:]) for name, found in calls.times.items()}
        parts = "  ".join(f"{name} {value:6.1f}" for name, value in medians.items())
        print(f"{side:7} {parts}  sum {sum(medians.values()):6.1f}")


def first_token(rounds: int, tokens: int) -> None:
    from tests.engines import serve

    os.environ.update({name: value for name, value in serve.SETTINGS.items() if name != "OMP_NUM_THREADS"})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    length = tokens + NEW_TOKENS + serve.BLOCK
    extra = {"spec_name": "KVPoolOffloadingSpec", "spec_module_path": "kvpool.engines.vllm", "host_memory": "1GiB"}
    script: dict[str, Any] = {
        "shape": "small",
        "processes": False,
        "transfer": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        "engine": {"max_model_len": length, "num_gpu_blocks_override": length // serve.BLOCK + 3},
    }
    draw = random.Random(3)
    found: dict[str, list[float]] = {"computed": [], "loaded": []}
    with tempfile.TemporaryDirectory() as folder:
        engine = serve.open_engine(script, Path(folder))
        for number in range(rounds + 1):
            prompt = [draw.randrange(2, 2048) for _ in range(tokens)]
            other = [draw.randrange(2, 2048) for _ in range(tokens)]
            for name, given in (("computed", prompt), ("between", other), ("loaded", prompt)):
                request = {"name": f"{name}-{number}", "tokens": given, "new": NEW_TOKENS}
                (answer,) = serve.serve_wave(engine, [request], {}).values()
                whole = (tokens - 1) // serve.BLOCK * serve.BLOCK
                assert (answer["cached"] >= whole) == (name == "loaded"), (name, answer["cached"])
                if name in found and number:
                    found[name].append(answer["first"] * 1e3)
        engine.engine_core.shutdown()
    print(f"prompts of {tokens} tokens, 12 layers, medians of {rounds} in turn, first token in ms")
    medians = {name: statistics.median(values) for name, values in found.items()}
    print("  ".join(f"{name} {value:.1f}" for name, value in medians.items()), end="  ")
    print(f"{medians['computed'] / medians['loaded']:.1f} times")


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("what", choices=["scheduler", "first-token"])
    parse.add_argument("--rounds", type=int, default=0, help="requests, or prompts (default: 300, or 8)")
    parse.add_argument("--tokens", type=int, default=1984)
    given = parse.parse_args()
    if given.what == "scheduler":
        scheduler(given.rounds or ROUNDS)
    else:
        first_token(given.rounds or 8, given.tokens)


if __name__ == "__main__":
    main()
