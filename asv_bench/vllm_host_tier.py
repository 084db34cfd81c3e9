"""Figures of the host tier under vLLM, in the environment of ``tests.engines``::

    python -m tests.engines run python -m asv_bench.vllm_host_tier scheduler
    python -m tests.engines run python -m asv_bench.vllm_host_tier first-token
    python -m tests.engines run python -m asv_bench.vllm_host_tier worth --tokens 480
    python -m tests.engines run python -m asv_bench.vllm_host_tier steps
    python -m tests.engines run python -m asv_bench.vllm_host_tier no-reuse
    python -m tests.engines run python -m asv_bench.vllm_host_tier policies --trace sessions.jsonl.xz
    python -m tests.engines run python -m asv_bench.vllm_host_tier small-host

``scheduler`` times the calls of vLLM's scheduler to its manager of host blocks for requests of 60 chunks, alternating
between vLLM's own manager and kvpool's. ``first-token`` alternates between new prompts and prompts in the host tier,
and measures how long the first token takes. ``worth`` repeatedly requests prompts that only a store has, one that is
throttled and one that is not, with ``"load"`` "always" and "faster", and counts those that were loaded, the first dozen
apart. ``steps`` measures the cost for the scheduler's thread of a step with a new prompt of 8 chunks that is not
cached: of vLLM's manager, of kvpool's, and of kvpool's with a disk. ``no-reuse`` serves new prompts only, alternating
between an engine without a host tier, one with, and one with a disk, and measures how much more CPU time the process
takes. All print medians. ``policies`` plays sessions of agents, scaled down, through an engine, once for each eviction
policy of vLLM's own CPU tier and of kvpool's, of as much memory, and prints the share of tokens that came from a cache.
Answers must be the same. ``trace`` is a file of sessions as ``replay`` takes it.
``small-host`` serves 45 conversations of three turns by an engine with 31 chunks of host tier and a disk below it,
twice, with a restart between, and prints the share of the chunks that came from a cache, of those that were stored
before and fit into the host tier at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHUNKS, CAPACITY, ROUNDS = 60, 6000, 300
BLOCK_BYTES = 12 * 2 * 4 * 64 * 32 * 4
"""Bytes of a block of the small model, in float32."""
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


def _take_turns(sides: dict[str, Any], capacity: int, chunks: int, rounds: int) -> int:
    """Requests of new keys, which each side serves. Returns how many of them came until the tiers were full."""
    from vllm.v1.kv_offload.base import make_offload_key

    draw, warm = random.Random(3), capacity // chunks + 10
    for number in range(warm + rounds):
        keys = [make_offload_key(draw.randbytes(32), 0) for _ in range(chunks)]
        for side in sides.values():
            side.request(number, keys)
    return warm


def scheduler(rounds: int) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    import kvpool
    from kvpool.integrations.vllm.spec import KVPoolOffloadingManager

    identity = kvpool.ModelIdentity("toy", "r1", "float16", "chunks", "benchmark")
    cache = kvpool.HostCache(CAPACITY, 4096, identity=identity)
    sides = {"vLLM": Calls(CPUOffloadingManager(CAPACITY)), "kvpool": Calls(KVPoolOffloadingManager(cache))}
    warm = _take_turns(sides, CAPACITY, CHUNKS, rounds)
    print(f"{CHUNKS} chunks, {CAPACITY} in the tier, medians of {rounds} requests in turn, microseconds")
    for side, calls in sides.items():
        medians = {name: statistics.median(spent[warm:]) for name, spent in calls.times.items()}
        parts = "  ".join(f"{name} {value:6.1f}" for name, value in medians.items())
        print(f"{side:7} {parts}  sum {sum(medians.values()):6.1f}")


STEP_CHUNKS, STEP_CAPACITY = 8, 2000


class Steps:
    """Steps of a scheduler in each of which a new prompt comes, and the CPU time of each in the manager."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.times = manager, list[float]()

    def request(self, number: int, keys: list[Any]) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        manager, context, ended = self.manager, ReqContext(req_id=str(number)), ScheduleEndContext((), ())
        began = time.thread_time_ns()
        manager.on_new_request(context)
        result = manager.lookup(keys[0], context)
        manager.on_schedule_end(ended)
        spent = time.thread_time_ns() - began
        while result not in (LookupResult.MISS, LookupResult.HIT):  # other steps, in which the store answers
            time.sleep(0.0002)
            manager.on_schedule_end(ended)
            result = manager.lookup(keys[0], context)
        began = time.thread_time_ns()
        manager.prepare_store(keys, context)
        manager.on_request_finished(context)
        manager.complete_store(set(keys), context)
        manager.get_stats()
        manager.has_pending_work()
        list(manager.take_events())
        self.times.append((spent + time.thread_time_ns() - began) / 1e3)


def steps(rounds: int) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    import kvpool
    from kvpool.integrations.options import EngineOptions
    from kvpool.integrations.vllm.spec import KVPoolOffloadingManager

    identity = kvpool.ModelIdentity("toy", "r1", "float16", "chunks", "benchmark")
    caches = [kvpool.HostCache(STEP_CAPACITY, 4096, identity=identity) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder, kvpool.HostTier.of(caches[1]) as tier:
        disk = EngineOptions(stores=(f"disk:{folder}/store?capacity=256MiB",))
        sides = {
            "vLLM": Steps(CPUOffloadingManager(STEP_CAPACITY)),
            "kvpool": Steps(KVPoolOffloadingManager(caches[0], events=False)),
            "kvpool with a disk": Steps(KVPoolOffloadingManager(caches[1], disk, events=False)),
        }
        sides["kvpool with a disk"].manager.open_stores(tier.share(), identity)
        warm = _take_turns(sides, STEP_CAPACITY, STEP_CHUNKS, rounds)
        print(f"a new prompt of {STEP_CHUNKS} chunks, medians of {rounds} steps in turn, microseconds of the thread")
        for name, side in sides.items():
            print(f"{name:20} {statistics.median(side.times[warm:]):6.1f}")
            side.manager.shutdown()


def _serve_in_turn(stores: list[str] | None, asked: Any, tokens: int) -> None:
    """A process with an engine: for each prompt that comes, the CPU time that it takes."""
    from tests.engines import serve

    os.environ.update(serve.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    length = tokens + NEW_TOKENS + serve.BLOCK
    extra = {"host_bytes": "256MiB", "weights": "random 0", "stores": stores}
    script: dict[str, Any] = {
        "shape": "small",
        "processes": False,
        "transfer": None if stores is None else serve.transfer(extra),
        "engine": {"max_model_len": length, "num_gpu_blocks_override": length // serve.BLOCK + 3},
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = serve.open_engine(script, Path(folder))
        asked.send("ready")
        while (prompt := asked.recv()) is not None:
            began = time.process_time()
            serve.serve_wave(engine, [{"name": str(began), "tokens": prompt, "new": NEW_TOKENS}], {})
            asked.send(time.process_time() - began)
        engine.engine_core.shutdown()


def no_reuse(rounds: int, tokens: int) -> None:
    processes = multiprocessing.get_context("spawn")
    draw = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "without a host tier": None,
            "with a host tier": [],
            "with a disk": [f"disk:{folder}/store?capacity=4GiB"],
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        engines = {}
        for name, stores in ways.items():
            our_end, engine_end = processes.Pipe()
            processes.Process(target=_serve_in_turn, args=(stores, engine_end, tokens), daemon=True).start()
            engines[name] = our_end
            assert our_end.recv() == "ready"
        for number in range(rounds + 2):
            prompt = [draw.randrange(2, 2048) for _ in range(tokens)]
            for name, engine in engines.items():
                engine.send(prompt)
                spent = engine.recv()
                if number >= 2:
                    times[name].append(spent)
        for engine in engines.values():
            engine.send(None)
    alone = times["without a host tier"]
    print(f"new prompts of {tokens} tokens, 12 layers, {rounds} in turn, CPU time of the process, medians")
    for name, seconds in times.items():
        ratio = statistics.median(mine / other for mine, other in zip(seconds, alone, strict=True))
        print(f"{name:20} {statistics.median(seconds) * 1e3:8.1f} ms  {ratio:.3f} times")


def first_token(rounds: int, tokens: int) -> None:
    from tests.engines import serve

    os.environ.update({name: value for name, value in serve.SETTINGS.items() if name != "OMP_NUM_THREADS"})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    length = tokens + NEW_TOKENS + serve.BLOCK
    extra = {
        "spec_name": "KVPoolOffloadingSpec",
        "spec_module_path": "kvpool.integrations.vllm.spec",
        "host_bytes": "1GiB",
    }
    script: dict[str, Any] = {
        "shape": "small",
        "processes": False,
        "transfer": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        "engine": {"max_model_len": length, "num_gpu_blocks_override": length // serve.BLOCK + 3},
    }
    draw = random.Random(3)
    times: dict[str, list[float]] = {"computed": [], "loaded": []}
    with tempfile.TemporaryDirectory() as folder:
        engine = serve.open_engine(script, Path(folder))
        for number in range(rounds + 1):
            prompt = [draw.randrange(2, 2048) for _ in range(tokens)]
            other = [draw.randrange(2, 2048) for _ in range(tokens)]
            for name, asked in (("computed", prompt), ("between", other), ("loaded", prompt)):
                request = {"name": f"{name}-{number}", "tokens": asked, "new": NEW_TOKENS}
                (answer,) = serve.serve_wave(engine, [request], {}).values()
                whole = (tokens - 1) // serve.BLOCK * serve.BLOCK
                assert (answer["cached"] >= whole) == (name == "loaded"), (name, answer["cached"])
                if name in times and number:
                    times[name].append(answer["first"] * 1e3)
        engine.engine_core.shutdown()
    print(f"prompts of {tokens} tokens, 12 layers, medians of {rounds} in turn, first token in ms")
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("  ".join(f"{name} {value:.1f}" for name, value in medians.items()), end="  ")
    print(f"{medians['computed'] / medians['loaded']:.1f} times")


def _serve_all(script: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The answers of an engine in a process of its own: one prompt after the other."""
    from tests.engines import serve

    os.environ.update(serve.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    with tempfile.TemporaryDirectory() as folder:
        engine, answers = serve.open_engine(script, Path(folder)), []
        for number, prompt in enumerate(prompts):
            answers += serve.serve_wave(
                engine, [{"name": str(number), "tokens": prompt, "new": NEW_TOKENS}], {}
            ).values()
        engine.engine_core.shutdown()
    return answers


def worth(rounds: int, tokens: int) -> None:
    from tests.engines import serve

    processes = multiprocessing.get_context("spawn")
    blocks, warm_up, draw = tokens // serve.BLOCK, 12, random.Random(3)
    prompts = [[draw.randrange(2, 2048) for _ in range(tokens)] for _ in range(4)]
    print(f"{rounds} hits of {tokens} tokens in a store, first token in ms, mean and worst")
    for bytes_per_s, load in ((1e7, "always"), (1e7, "faster"), (1e10, "always"), (1e10, "faster")):
        extra = {
            "stores": [f"asv_bench.load_grid.Throttled:{bytes_per_s}?capacity=1GiB"],
            "weights": "random 0",
            "host_bytes": (blocks + 2) * BLOCK_BYTES,
            "load": load,
            "load_share": 1.0,
            "load_seconds": 60.0,
            "retry_seconds": 0.001,
        }
        script: dict[str, Any] = {
            "shape": "small",
            "processes": False,
            "transfer": serve.transfer(extra),
            "engine": {"max_model_len": tokens + 2 * serve.BLOCK, "num_gpu_blocks_override": blocks + 4},
        }
        asked = [prompts[number % len(prompts)] for number in range(len(prompts) + warm_up + rounds)]
        with processes.Pool(1) as pool:
            answers = pool.apply(_serve_all, (script, asked))[-rounds:]
        times, loaded = (
            [1e3 * answer["first"] for answer in answers],
            sum(answer["cached"] >= serve.BLOCK for answer in answers),
        )
        print(
            f"{bytes_per_s / 1e6:8.0f} MB/s {load:7} loaded {loaded:3} {statistics.mean(times):8.1f} {max(times):8.1f}"
        )


POLICIES = {"vLLM": ("lru", "arc"), "kvpool": ("lru", "agent", "adaptive")}
USERS, PAUSE_MAX, TOKENS_MAX, TIER_CHUNKS = 16, 60.0, 1024, 100
SCALE = 100
"""Blocks of 64 tokens of a session that are a chunk of 32 tokens here."""


def _scaled(trace: str, count: int) -> list[tuple[float, list[int]]]:
    """When each request comes, and its tokens. Equal beginnings of sessions stay equal."""
    from kvpool.tools.replay.sessions import play
    from kvpool.tools.replay.traces import read_sessions
    from tests.engines.serve import BLOCK

    requests: list[tuple[float, list[int]]] = []
    for request in play(read_sessions(trace), USERS, PAUSE_MAX):
        assert request.hash_ids is not None and request.timestamp is not None
        ids = request.hash_ids[: request.input_length // request.tokens_per_id][SCALE - 1 :: SCALE].tolist()
        tokens = [random.Random(block * BLOCK + at).randrange(2, 512) for block in ids for at in range(BLOCK)]
        if tokens:
            requests.append((request.timestamp, [*tokens[:TOKENS_MAX], 2]))
        if len(requests) == count:
            break
    return requests


def _tier(side: str, policy: str) -> dict[str, Any]:
    """The options of a host tier."""
    from tests.engines import serve

    if side == "kvpool":
        return serve.transfer({"host_bytes": TIER_CHUNKS << 15, "policy": policy}, recovers=False)
    extra = {
        "spec_name": "CpuSpec",
        "spec_module_path": "tests.engines.cpu_tiers",
        "cpu_bytes_to_use": TIER_CHUNKS << 15,
        "eviction_policy": policy,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _play(side: str, policy: str, requests: list[tuple[float, list[int]]], answers: Any) -> None:
    """A process with an engine that serves requests, one after the other, by the clock of the trace."""
    from tests.engines import serve

    os.environ.update(serve.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

    now_s = [began := time.monotonic()]
    length = TOKENS_MAX + 2 * serve.BLOCK
    script: dict[str, Any] = {
        "shape": "tiny",
        "processes": False,
        "transfer": _tier(side, policy) if policy else None,
        "engine": {"max_model_len": length, "num_gpu_blocks_override": length // serve.BLOCK + 3},
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = serve.open_engine(script, Path(folder))
        if policy:
            config = engine.vllm_config.kv_transfer_config.kv_connector_extra_config
            assert policy in (config.get("eviction_policy"), config.get("policy"))
        from kvpool.common import arguments  # imports Numba, which vLLM must not meet when it starts

        arguments.time = SimpleNamespace(monotonic_ns=lambda: int(1e9 * now_s[0]))  # type: ignore[assignment]
        for at, tokens in requests:
            now_s[0] = began + at
            results = serve.serve_wave(engine, [{"name": str(at), "tokens": tokens, "new": NEW_TOKENS}], {})
            answers.send([(answer["tokens"], answer["cached"]) for answer in results.values()][0])
        engine.engine_core.shutdown()


def policies(rounds: int, trace: str) -> None:
    processes = multiprocessing.get_context("spawn")
    requests = _scaled(trace, rounds)
    tokens = sum(len(prompt) for _, prompt in requests)
    print(f"{len(requests)} requests of {USERS} users, {tokens} tokens, {TIER_CHUNKS} chunks in the tier")
    right: list[list[int]] = []
    for side, policy in [("no tier", ""), *((side, policy) for side, names in POLICIES.items() for policy in names)]:
        our_end, engine_end = processes.Pipe()
        engine = processes.Process(target=_play, args=(side, policy, requests, engine_end), daemon=True)
        engine.start()
        engine_end.close()
        answers = [our_end.recv() for _ in requests]
        engine.join()
        right = right or [tokens_out for tokens_out, _ in answers]
        same = sum(tokens_out == expected for (tokens_out, _), expected in zip(answers, right, strict=True))
        print(
            f"{side + ' ' + policy:23} {100 * sum(cached for _, cached in answers) / tokens:6.2f} % of the tokens, "
            f"{same} of {len(requests)} answers the same",
            flush=True,
        )


CONVERSATIONS, TURNS, HOST_CHUNKS = 45, 3, 31
TINY_BLOCK_BYTES = 32 << 10
"""Bytes of a block of the tiny model, in float32."""


def _conversation_waves() -> list[list[dict[str, Any]]]:
    """Requests of all conversations, four at a time. The next turn comes when all others have had theirs."""
    draw = random.Random(3)
    waves: list[list[dict[str, Any]]] = []
    for turn in range(TURNS):
        order = draw.sample(range(CONVERSATIONS), CONVERSATIONS)
        for start in range(0, CONVERSATIONS, 4):
            wave = []
            for conversation in order[start : start + 4]:
                tokens = [draw.randrange(2, 512) for _ in range(draw.randrange(96, 288))]
                request = {"name": f"{conversation}.{turn}", "tokens": tokens, "new": NEW_TOKENS}
                wave.append(request | ({"after": f"{conversation}.{turn - 1}"} if turn else {}))
            waves.append(wave)
    return waves


def _serve_conversations(folder: str) -> list[tuple[str, int, list[int], int]]:
    """Name, prompt tokens, generated tokens and cached tokens of each request."""
    from tests.engines import serve

    os.environ.update(serve.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    store = f"disk:{folder}/store?capacity=1GiB"
    extra = {"stores": [store], "weights": "random 0", "host_bytes": HOST_CHUNKS * TINY_BLOCK_BYTES, "load": "always"}
    script: dict[str, Any] = {
        "shape": "tiny",
        "processes": False,
        "transfer": serve.transfer(extra),
        "engine": {"max_model_len": 1024, "num_gpu_blocks_override": 64},
    }
    history: dict[str, list[int]] = {}
    results = []
    engine = serve.open_engine(script, Path(folder))
    for wave in _conversation_waves():
        for name, answer in serve.serve_wave(engine, wave, history).items():
            prompt = len(history[name]) - len(answer["tokens"])
            results.append((name, prompt, answer["tokens"], answer["cached"]))
    engine.engine_core.shutdown()
    return results


def small_host() -> None:
    from tests.engines.serve import BLOCK

    processes = multiprocessing.get_context("spawn")
    expected: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in ("first run", "after a restart"):
            with processes.Pool(1) as pool:
                results = pool.apply(_serve_conversations, (folder,))
            cached = possible = same = 0
            prompts = {name: prompt for name, prompt, _, _ in results}
            for name, prompt, tokens, reused in results:
                conversation, turn = name.split(".")
                before = prompts.get(f"{conversation}.{int(turn) - 1}", -NEW_TOKENS) + NEW_TOKENS
                stored = prompt if name in expected else before
                possible += min((prompt - 1) // BLOCK, stored // BLOCK, HOST_CHUNKS)
                cached += reused // BLOCK
                same += expected.setdefault(name, tokens) == tokens
            print(f"{run:16} {len(results)} requests, {same} answers the same", end=", ")
            print(f"{cached} of {possible} chunks from a cache, {cached / possible:.1%}", flush=True)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument(
        "what", choices=["scheduler", "steps", "no-reuse", "first-token", "worth", "policies", "small-host"]
    )
    parse.add_argument("--rounds", type=int, default=0, help="of each side (default: 300, or 20 or 8 prompts)")
    parse.add_argument("--tokens", type=int, default=1984)
    parse.add_argument("--trace", help="sessions of agents, for policies")
    options = parse.parse_args()
    kinds: dict[str, Callable[[], None]] = {
        "scheduler": lambda: scheduler(options.rounds or ROUNDS),
        "steps": lambda: steps(options.rounds or ROUNDS),
        "policies": lambda: policies(options.rounds or 220, options.trace),
        "small-host": small_host,
        "worth": lambda: worth(options.rounds or 20, options.tokens),
        "no-reuse": lambda: no_reuse(options.rounds or 20, options.tokens),
        "first-token": lambda: first_token(options.rounds or 8, options.tokens),
    }
    kinds[options.what]()


if __name__ == "__main__":
    main()
