"""Tables of the hits of eviction policies, in per cent of all blocks of all prompts.

Sessions of agents are played in a closed loop: a number of users each work on one session after the other. A request
ends ``api`` seconds after it began, and the next one of its session comes after its pause, at most ``--cap`` seconds.
Chats come at their own times. Requests are instantaneous: admitted, committed and released at once. A block of the
trace is a block of one token here. ``trace`` is what ``replay`` takes::

    python asv_bench/policies.py pool sessions.jsonl.xz --cap 60 600 --half 1 --policies lru adaptive:stop oracle MIN
    python asv_bench/policies.py constants chats.jsonl --blocks 3000 10000 --half 1 --seeds 3

A policy may be followed by the hints of the engine with each release (``adaptive:future``). ``MIN`` and ``oracle``, the
session oracle, are the ceilings that ``kvpool plan --policies`` has. ``holding`` and ``MIN:holding`` are those of a
pool, which has to hold a whole prompt before it can evict a part of it. ``known`` holds prompts too. It gets the
lengths of the pauses of each session, including future ones, and when it ends, but not their order; ``known:stop``
also gets which of them follow which stop reason.

Tables: ``pool`` (the device alone, or two tiers with ``--host``); ``held`` (a request holds its blocks for ``api``
seconds, and one that finds too few free blocks waits for others to end, and all after it wait too); ``recurrent`` (a
second group keeps a state at every 32nd block); ``store`` (a store of ``--store`` blocks below both tiers, with their
policy); ``flood`` (with each request, another tenant requests 200 blocks that are not used again); ``hints`` (the
client pins, retains and prefetches sessions at random); ``hostcache`` (a HostCache instead of a pool); ``constants``
(``pool`` with each constant of the policies halved and doubled).
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.common.jit import jit
from kvpool.storage import StorageManager
from kvpool.storage.backends.memory import MemoryStore
from kvpool.tools.planner import Use
from kvpool.tools.planner.policies import MIN, SessionOracle, hints, min_hits, next_uses
from kvpool.tools.planner.stack import pop, push
from kvpool.tools.replay.content import Request
from kvpool.tools.replay.sessions import play
from kvpool.tools.replay.traces import read_sessions, read_trace

VARIES = 0.5
SNAPSHOT = 32
FLOOD = 200
FLOODED = 1 << 30
FLOOD_PRIORITY = 10
HALF, ENGINE_HINTS, CLIENT_HINTS = 5, 11, 13
"""Seeds: of the halves of the sessions, and of random hints of the engine and of clients."""
TABLES = ("pool", "held", "recurrent", "store", "flood", "hints", "hostcache", "constants")
CEILINGS = ("oracle", "holding", "known", "known:stop", MIN, f"{MIN}:holding")
LAYOUT = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=1, dtype="uint8", planes=1)
MODEL = kvpool.ModelIdentity("trace", "none", LAYOUT.dtype_name, LAYOUT, "policies 1")
CONSTANTS = {
    "kvpool.state.policies.pauses": ("_LEAN", "_PRIOR", "_MOST", "_REFRESH"),
    "kvpool.state.policies.chains": ("_OWN", "SAMPLE"),
    "kvpool.state.policies.agent": ("SOME", "RUN", "_RING", "_LEVEL"),
    "kvpool.state.policies.adaptive": ("_MEMORY", "_SURE"),
    "kvpool.state.arrays": ("_BLOCKS_PER_CHAIN", "_BLOCKS_PER_CHAIN_OF_TWO", "_BLOCKS_PER_NAME", "_GHOST_BLOCKS"),
}


class Arrival(NamedTuple):
    """A request: its ids, one for each block, or for each full block of a session."""

    request: Request
    ids: npt.NDArray[np.int32]

    @property
    def ms(self) -> int:
        return int(1000 * (self.request.timestamp or 0))


class Score(NamedTuple):
    hits: int
    blocks: int

    @property
    def rate(self) -> float:
        return 100 * self.hits / self.blocks


def arrivals(options: argparse.Namespace, cap: float, waited: Callable[[], float] = float) -> Iterator[Arrival]:
    """The requests of a trace, in order: of a random half of its sessions, or of half of its hour. ``waited``: see
    ``play``."""
    if ".jsonl.xz" in options.trace or options.sessions:
        sessions, random = read_sessions(options.trace), Random(HALF)
        sessions = [
            session for session in sessions if options.half is None or (random.random() < 0.5) == (options.half == 0)
        ]
        requests = play(sessions, options.users, cap, VARIES if options.jitter else 0.0, waited)
    else:
        chats = read_trace(options.trace).requests
        middle = len(chats) // 2
        requests = iter(chats if options.half is None else chats[middle:] if options.half else chats[:middle])
    for request in requests:
        assert request.hash_ids is not None
        whole = request.input_length // request.tokens_per_id if request.session is not None else None
        yield Arrival(request, request.hash_ids[:whole].astype(np.int32) + 1)


class Played:
    """A pool with a policy that requests are played through, and what a table adds to each."""

    def __init__(self, options: argparse.Namespace, blocks: int, policy: str, seed: int) -> None:
        self.options, self.now, self.open = options, 0, ExitStack()
        self.held, self.waited = list[tuple[int, int, Any, dict[str, Any]]](), 0.0
        self.policy, _, self.hinting = policy.partition(":")
        self.engine_random, self.client_random = Random(ENGINE_HINTS), Random(CLIENT_HINTS)
        self.sessions = list[str]()
        self.fresh = FLOODED
        groups: dict[str, Any] = {"layout": LAYOUT, "device_blocks": blocks + 1, "host_blocks": options.host}
        if options.table == "recurrent":
            state = kvpool.LayerGroup(LAYOUT, kind="recurrent", snapshot_tokens=SNAPSHOT)
            counts = [blocks + 1, blocks // SNAPSHOT * 2]
            groups = {"groups": [kvpool.LayerGroup(LAYOUT), state], "device_blocks": counts}
        self.cache = self.open.enter_context(
            kvpool.KVCacheManager(
                **groups,
                device="cpu",
                max_sequences=options.users + 4,
                policy=self.policy,
                partial_reuse=False,
                max_sequence_tokens=max(options.longest, FLOOD) + 1,
                clock=lambda: self.now,
                secret=bytes(32),
                event_capacity=1 << 20 if options.table == "store" else 0,
            )
        )
        self.open.callback(self._end)
        for state in self.cache.core.states:
            if state.policy_state is not None:
                state.policy_state.policy_state["draws"] = seed
        if options.table == "store":
            store = MemoryStore(options.store * LAYOUT.block_bytes, policy=self.policy)
            self.storage = self.open.enter_context(
                StorageManager(
                    self.cache,
                    [store],
                    identity=MODEL,
                    queued_blocks=1 << 20,
                    staging_blocks=1 << 15,
                    interval_seconds=1e-3,
                )
            )

    def ask(self, entry: Arrival) -> int:
        """Play a request. Returns how many of its blocks are hits."""
        self.now = max(self.now, entry.ms)
        # The last token of a prompt is never reused.
        keys = self.cache.block_keys(np.append(entry.ids, np.int32(0)))
        if self.options.table == "store":
            assert self.storage.drain(60) and self.storage.prefetch(keys, 60).wait(60)
        if self.options.table == "flood":
            self._flood()
        if self.options.table == "hints":
            self._hint(entry)
        admitted = self._admit(keys, len(entry.ids))
        self.waited = (self.now - entry.ms) / 1000
        seconds = entry.request.seconds or 0.0 if self.options.table == "held" else 0.0
        end = self.now + int(1000 * seconds)
        heappush(self.held, (end, entry.request.index, admitted.ids, self._engine_hints(entry.request)))
        if seconds == 0:
            self._release()
        return int(admitted.cached_tokens[0])

    def _admit(self, keys: Any, count: int, retention: Any = None) -> Any:
        """Admit and commit a prompt, once enough of the requests that came before have ended."""
        while self.held and self.held[0][0] <= self.now:
            self._release()
        while True:
            try:
                admitted = self.cache.add_sequence_batch([keys], retention=None if retention is None else [retention])
                break
            except kvpool.OutOfBlocks:
                self.now = max(self.now, self.held[0][0])
                self._release()
        self.cache.commit(admitted.ids, np.array([count]))
        self.cache.rewind(admitted.ids, np.array([1]))
        return admitted

    def _end(self) -> None:
        while self.held:
            self._release()

    def _release(self) -> None:
        *_, ids, engine_hints = heappop(self.held)
        self.cache.release(ids, **engine_hints)

    def _engine_hints(self, request: Request) -> dict[str, Any]:
        session_hint = {"session": str(request.session)} if self.options.table == "hints" else {}
        if self.hinting != "random":
            return session_hint | hints(request, self.hinting or "nothing")
        choices: list[dict[str, Any]] = [{"ends": True}, {"stop": "tool_use"}, {"stop": "end_turn"}, {}]
        random = self.engine_random
        return session_hint | random.choice([*choices, {"returns_in_ms": random.randrange(1, 600_000)}])

    def _flood(self) -> None:
        self.fresh += FLOOD
        keys = self.cache.block_keys(np.append(np.arange(self.fresh, self.fresh + FLOOD), 0), salt="flood")
        low = [kvpool.RetentionRange(0, None, FLOOD_PRIORITY)] if self.options.low else None
        self.cache.release(self._admit(keys, FLOOD, low).ids)

    def _hint(self, entry: Arrival) -> None:
        """Send a hint about some session, even one that has ended."""
        self.sessions.append(str(entry.request.session))
        kind = self.client_random.choice(("pin", "retain", "prefetch"))
        payload = {
            "session": self.client_random.choice(self.sessions),
            "lease_ms": self.client_random.randrange(1, 600_000),
        }
        action = {"action_id": "1", "action_type": kind, "action_version": 1, "payload": payload}
        self.cache.content.hints({"protocol_version": 1, "message_id": "1", "actions": [action]})


class PlayedHost:
    """A HostCache that requests are played through, as an engine does that keeps each of them until it has ended."""

    def __init__(self, options: argparse.Namespace, blocks: int, policy: str, seed: int) -> None:
        self.open, self.now, self.waited = ExitStack(), 0, 0.0
        cache = kvpool.HostCache(blocks, 8, identity=MODEL, secret=bytes(32), clock=lambda: self.now, policy=policy)
        self.cache = self.open.enter_context(cache)

    def ask(self, entry: Arrival) -> int:
        self.now = max(self.now, entry.ms)
        keys = [bytes(row) for row in entry.ids[:, None].view(np.uint8)]
        hits = int(np.append(self.cache.lookup(keys) == self.cache.HERE, False).argmin())
        self.cache.pin(keys[:hits]).close()
        self.cache.publish(self.cache.reserve(keys[hits:]).keys)
        self.cache.touch(keys, turn=True)
        return hits


def ceiling(options: argparse.Namespace, blocks: int, cap: float, name: str) -> Score:
    """Return what an oracle would hit."""
    uses = [Use(entry.request, entry.ids, len(entry.ids), len(entry.ids), 0) for entry in arrivals(options, cap)]
    if name.startswith(MIN):
        following, counted = next_uses(uses)
        prompt_ends = np.cumsum([len(use.blocks) for use in uses])
        hits = min_hits(following, counted, blocks) if name == MIN else min_holding(following, prompt_ends, blocks)
    elif name.startswith("known"):
        hits = sum(map(Known(uses, blocks, ":" in name).find, uses))
    else:
        oracle = SessionOracle(uses, blocks)
        hits = sum(map(oracle.find if name == "oracle" else partial(hold, oracle), uses))
    return Score(hits, sum(use.lookups for use in uses))


def min_holding(following: npt.NDArray[np.int64], prompt_ends: npt.NDArray[np.int64], capacity: int) -> int:
    """The hits of a cache that evicts the block whose next use is last, and holds each prompt until it has ended."""
    held, heap = np.zeros(len(following), np.uint8), np.empty(len(following), np.int64)
    return int(_min_holding(following, prompt_ends, capacity, held, heap))


@jit
def _min_holding(following: Any, prompt_ends: Any, capacity: int, held: Any, heap: Any) -> int:
    first, size, blocks, hits = 0, 0, 0, 0
    for end in prompt_ends:
        for place in range(first, end):
            blocks -= held[place]
            hits += held[place]
        while blocks > capacity - (end - first):
            size -= 1
            last = heap[0]
            pop(heap, size)
            blocks -= held[last]
            held[last] = 0
        for place in range(first, end):
            if following[place] < len(following):
                held[following[place]] = 1
                push(heap, size, following[place])
                size, blocks = size + 1, blocks + 1
        first = end
    return hits


class Known:
    """``known``: evicts by ``best``."""

    def __init__(self, uses: list[Use], blocks: int, stop: bool) -> None:
        self.oracle, self.stop, self.last = SessionOracle(uses, blocks), stop, dict[Any, tuple[Any, float]]()
        pauses = defaultdict[Any, list[float]](list)
        for use in uses:
            pauses[self._kind(use)].append((use.request.returns or 0.0) - (use.request.timestamp or 0.0))
        self.pauses = {kind: np.sort(lengths) for kind, lengths in pauses.items()}

    def _kind(self, use: Use) -> Any:
        return use.request.session, use.request.stop if self.stop else ""

    def find(self, use: Use) -> int:
        now_s = use.request.timestamp or 0.0
        for session, (blocks, _, number) in self.oracle.sessions.items():
            kind, since = self.last[session]
            self.oracle.sessions[session] = blocks, -best(self.pauses[kind], now_s - since), number
        self.last[use.request.session] = self._kind(use), now_s
        return hold(self.oracle, use)


def best(pauses: npt.NDArray[np.float64], age: float) -> float:
    """The worth of a session that has paused for ``age`` seconds and has such pauses: as ``pauses.worth``."""
    left = pauses[np.searchsorted(pauses, age) :]
    back = left[np.isfinite(left)] - age + 0.25
    count = np.arange(1, len(back) + 1)
    return float((count / (np.cumsum(back) + (len(left) - count) * back)).max(initial=0.0))


def hold(oracle: SessionOracle, use: Use) -> int:
    """What ``find`` finds if a running session is evicted last: until it has ended, it is about to continue."""
    assert use.request.session is not None and use.request.returns is not None
    hits = oracle.find(use._replace(request=replace(use.request, returns=-inf)))
    blocks, _, number = oracle.sessions[use.request.session]
    oracle.sessions[use.request.session] = blocks, use.request.returns, number
    return hits


def measure(options: argparse.Namespace, blocks: int, cap: float, policy: str, seed: int) -> Score:
    """Play all requests through a pool of its own, or through a ceiling."""
    if policy in CEILINGS:
        return ceiling(options, blocks, cap, policy)
    kind: Callable[..., Any] = PlayedHost if options.table == "hostcache" else Played
    played, hits, requested_blocks = kind(options, blocks, policy, seed), 0, 0
    with played.open:
        for entry in arrivals(options, cap, lambda: played.waited):
            hits += played.ask(entry)
            requested_blocks += len(entry.ids)
    return Score(hits, requested_blocks)


def cells(options: argparse.Namespace) -> None:
    """Print a row for each capacity and cap, with a column for each policy: the mean of the seeds, and their span."""
    print("| blocks | cap | " + " | ".join(f"`{policy}`" for policy in options.policies) + " |")
    for blocks in options.blocks:
        for cap in options.cap:
            columns = []
            for policy in options.policies:
                seeds = range(1 if policy == "lru" else options.seeds)
                rates = [measure(options, blocks, cap, policy, seed).rate for seed in seeds]
                span = f" ({min(rates):.2f} to {max(rates):.2f})" if len(rates) > 1 else ""
                columns.append(f"{np.mean(rates):.2f}{span}")
            print(f"| {blocks:,} | {cap:.0f} s | " + " | ".join(columns) + " |", flush=True)


def constants(arguments: list[str]) -> None:
    """Print the table ``pool`` with each constant as it is, halved, and doubled: each in a process of its own, which
    compiles the policies with it."""
    runs = [("as it is", "")]
    for module, names in CONSTANTS.items():
        for name in names:
            value, last = getattr(importlib.import_module(module), name), module.rpartition(".")[2]
            for factor in (0.5, 2):
                other = type(value)(value * factor)
                runs.append((f"{last}.{name} {value} as {other}", f"{module}:{name}={other}"))
    for title, change in runs:
        last_arguments = ["--policies", "adaptive", *(["--set", change] if change else [])]
        command = [sys.executable, __file__, "pool", *arguments, *last_arguments]
        rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
        print(f"| {title} | " + " | ".join(row.split("|")[3].strip() for row in rows) + " |", flush=True)


def change(text: str) -> None:
    """Set a constant before anything is compiled: MODULE:NAME=VALUE. Public names are set in all importing modules."""
    place, value = text.split("=")
    module, name = place.split(":")
    old = getattr(importlib.import_module(module), name)
    for imported in [imported for path, imported in sys.modules.items() if path.startswith("kvpool.state")]:
        if imported.__name__ == module or (name[0] != "_" and hasattr(imported, name)):
            setattr(imported, name, type(old)(float(value)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("table", choices=TABLES)
    add("trace", help="a file or a folder, as replay takes it")
    add("--sessions", action="store_true", help="it has sessions of agents (default: if its name ends in .jsonl.xz)")
    add("--half", type=int, choices=(0, 1), help="play a random half of the sessions, or half of the hour")
    add("--blocks", type=int, nargs="+", default=[25_000])
    add("--host", type=int, default=0, help="blocks of the host tier")
    add("--store", type=int, default=0, help="blocks of the store")
    add("--cap", type=float, nargs="+", default=[60.0], help="longest pause, seconds")
    add("--users", type=int, default=32)
    add("--jitter", action="store_true", help="draw the longest pause anew each time, x 0.5 to 1.5")
    add("--low", action="store_true", help=f"the flood has the priority {FLOOD_PRIORITY}")
    add("--policies", nargs="+", default=["lru", "adaptive"])
    add("--seeds", type=int, default=1, help="how often each policy draws other samples")
    add("--set", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str]) -> None:
    """Print a table."""
    options = parser().parse_args(arguments)
    if options.table == "constants":
        constants(arguments[1:])
        return
    if options.set:
        change(options.set)
    options.longest = max(len(entry.ids) for entry in arrivals(options, options.cap[0]))
    cells(options)


if __name__ == "__main__":
    main(sys.argv[1:])
