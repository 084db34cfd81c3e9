"""What a queue and the storage managers of a pool and of a HostCache send to a store; and what a HostCache does.

Each store has one thread, and each step waits until it has done everything, so that no thread races another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from kvpool import HostCache
from kvpool.storage import MemoryStore
from kvpool.storage.store import CODES, Bytes, Rows, Space, Stop
from tests.golden.recorder import Recorder
from tests.stores.host_lab import Engine as HostEngine
from tests.stores.lab import IDENTITY, Clock, Gate, names, open_queue
from tests.stores.pool_lab import make_engine, make_manager, room

STEPS = 60
HOST_SAVES = ("commit", "reuse")
VERBS = {
    "reserve": 6,
    "publish": 8,
    "abort": 1,
    "pin": 3,
    "unpin": 5,
    "touch": 3,
    "forget": 0.6,
    "clear": 0.1,
    "wait": 1,
}


class Noted(MemoryStore):
    """Notes each block of a call with the code that it answered, however calls are cut. ``gate`` holds finds of nothing
    that is there; ``broken`` makes calls of a kind fail."""

    threads = 1

    def __init__(self, name: str, blocks: int) -> None:
        super().__init__(room(blocks))
        self.name, self.log, self.broken = name, list[tuple[Any, ...]](), ""
        self.gate: Callable[[], None] = lambda: None

    def open(self, space: Space) -> bytes:
        super().open(space)
        return bytes(range(32))

    def _note(self, kind: str, keys: Bytes, codes: Bytes, *more: Any) -> None:
        self.log += [(kind, key.tobytes(), CODES[code], *more) for key, code in zip(keys, codes.tolist(), strict=True)]

    def _begin(self, kind: str) -> None:
        if kind == self.broken:
            self.log.append((kind, b"", "broken"))
            raise OSError("broken")

    def find(self, keys: Bytes) -> Bytes:
        gate, self.gate = self.gate, lambda: None
        gate()
        self._begin("find")
        codes = super().find(keys)
        self._note("find", keys, codes)
        return codes

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        self._begin("save")
        codes = super().save(keys, rows, macs, tag, limit, stop)
        self._note("save", keys, codes, min(limit, 1000))
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        self._begin("load")
        codes, macs = super().load(keys, rows, stop)
        self._note("load", keys, codes)
        return codes, macs

    def forget(self, keys: Bytes) -> int:
        self.log += [("forget", key.tobytes()) for key in keys]
        return super().forget(keys)

    def clear(self, tag: bytes) -> int:
        dropped = super().clear(tag)
        self.log.append(("clear", b"", len(tag), dropped))
        return dropped


def note_calls(recorder: Recorder, *stores: Noted) -> None:
    """Note what has reached the stores. Nothing is under way in them."""
    for store in stores:
        for kind, key, *more in store.log:
            recorder.line(f"store {kind}", store.name, recorder.numbers([key]) if key else None, *more)
        store.log.clear()


# -- the queue of a store --------------------------------------------------------------------------------


def drive_queue(seed: int) -> Recorder:
    """Rounds of jobs that wait together for a call that hangs; some are cancelled, late, failed or dropped."""
    recorder, random, clock, store = Recorder(), Random(seed), Clock(), Noted("one", 24)
    with open_queue(store, clock=clock, piece_bytes=3 * 4096) as queue:
        tags = [queue.secret.tag(b"%d" % number) for number in range(3)]
        for _ in range(STEPS):
            gate = store.gate = Gate()
            held = queue.find(queue.secret.derive_keys([b"held"]))
            assert gate.reached.wait(600)
            jobs = [_job(queue, random, clock, tags) for _ in range(random.randint(1, 6))]
            if random.random() < 0.3 and (job := random.choice(jobs)).kind not in ("forget", "clear"):
                job.cancel()
            clock.pass_(random.choice((0.0, 0.0, 0.0, 2.0)))
            store.broken = random.choice(("", "", "", "", "find", "load", "save"))
            gate.open()
            for job in (held, *jobs):
                assert job.wait(600, returned=True)
            note_calls(recorder, store)
            for job in jobs:
                codes = [CODES[code] for code in job.codes.tolist()]
                recorder.line(f"job {job.kind}", codes, job.dropped, bool(job.error))
                recorder.seen.update(f"{job.kind} {code}" for code in codes)
        stats = queue.stats()
        recorder.line("stats", {" ".join(key): count for key, count in stats.blocks.items()}, stats.nbytes, stats.store)
    return recorder


def _job(queue: Any, random: Random, clock: Clock, tags: Sequence[bytes]) -> Any:
    keys = queue.secret.derive_keys(names(random.randint(1, 8), random.randrange(40)))
    rows = np.array(random.sample(range(queue.slots), len(keys)))
    deadline = random.choice((float("inf"), float("inf"), clock() + 1))
    kind, tag = random.choices(("find", "load", "save", "forget", "clear"), (3, 5, 6, 1, 0.4))[0], random.choice(tags)
    if kind == "save":
        return queue.save(keys, rows, tag=tag, limit=random.choice((0, 3, 100, 100)), deadline=deadline)
    if kind == "load":
        return queue.load(keys, rows, tag=tag, deadline=deadline)
    if kind == "find":
        return queue.find(keys, tag=tag, deadline=deadline)
    return queue.forget(keys) if kind == "forget" else queue.clear(random.choice((None, tag)))


# -- storage managers ------------------------------------------------------------------------------------


def drive_manager(save: str, seed: int) -> Recorder:
    """A pool and a store that are too small for their prompts. Loads from two stores would race each other."""
    recorder, random, clock = Recorder(), Random(seed), Clock()
    store = Noted("near", 30)
    documents = [[random.randrange(9) for _ in range(28)] for _ in range(4)]
    engine = make_engine(20, 10, secret=bytes(range(32)))
    options = {"save": save, "clock": clock, "quotas": {("a", None): room(6)}}
    # It turns when it is asked to, and no prefetch waits for others to be admitted.
    options |= {"interval_seconds": 60.0, "promotion_blocks": 1000}
    with engine.cache, make_manager(engine, store, **options) as manager:
        for _ in range(STEPS):
            draw, salt = random.random(), random.choice((None, None, None, "a"))
            tokens = documents[random.randrange(4)][: random.randint(8, 28)] + [9] * random.choice((0, 0, 5))
            prompt = engine.prompt(tokens, salt=salt)
            if draw < 0.5:
                recorder.line("seed", engine.seed(tokens, salt=salt))
            elif draw < 0.85:
                handle = manager.prefetch(prompt, timeout=600.0)
                assert handle.wait(600) and manager.drain(600), manager.stats()
                recorder.line(f"prefetch {handle.ended}", handle.blocks, engine.seed(tokens, salt=salt))
            elif draw < 0.94:
                _forgotten(recorder, lambda keys=prompt: manager.forget(keys))
            elif draw < 0.96:
                _forgotten(recorder, lambda: manager.forget(namespace=("a", None)))
            elif draw < 0.97:
                _forgotten(recorder, manager.clear)
            clock.pass_(random.random())
            assert manager.drain(600)
            note_calls(recorder, store)
            recorder.outcome("match", lambda keys=prompt: manager.match_prefix(keys))
            _note_events(recorder, manager.events())
        stats = manager.stats()
        figures = (stats.saved_blocks, stats.loaded_blocks, stats.found_blocks, stats.promoted_blocks)
        dropped = {" ".join(key): count for key, count in stats.dropped.items()}
        recorder.line("stats", figures, dropped, stats.prefetches)
    return recorder


def _note_events(recorder: Recorder, events: Any) -> None:
    """Tier by tier, and key by key: those of stores come between others, wherever they became known."""
    for tier in (None, *events.tiers):
        for event in events:
            for key in [None] if event.keys is None else event.keys:
                if event.tier == tier:
                    number = None if key is None else recorder.numbers([key])
                    recorder.line(" ".join(filter(None, ("event", event.kind, tier))), number, event.salt)


def _forgotten(recorder: Recorder, call: Callable[[], Any]) -> None:
    done = call()
    assert done.wait(600)
    recorder.line("forgotten", done.blocks, done.stores)


def drive_host_manager(save: str, seed: int) -> Recorder:
    recorder, random = Recorder(), Random(seed)
    stores = [Noted("near", 20), Noted("far", 60)]
    engine = HostEngine(*stores, blocks=8, save=save, load_share=1.0)
    try:
        for _ in range(STEPS):
            draw, count, first = random.random(), random.randint(1, 4), random.randrange(24)
            if draw < 0.4:
                recorder.outcome("write", lambda c=count, f=first: engine.write(c, f))
            elif draw < 0.9:
                recorder.line("lookup", engine.manager.lookup(names(count, first)))
            elif draw < 0.98:
                recorder.line("forget", engine.manager.forget(names(count, first)))
            else:
                engine.manager.clear()
                engine.until(lambda: not any(counters.unconfirmed_drops for counters in engine.manager.stats().stores))
            engine.now += 2 * random.random()
            assert engine.manager.drain(1e6)
            note_calls(recorder, *stores)
            wanted = [key for key in names(count, first) if engine.cache.find(key) == engine.cache.HERE]
            with engine.manager.pin(wanted) as lease:
                recorder.line("pin", lease.keys, lease.blocks)
            assert engine.manager.drain(1e6)
            note_calls(recorder, *stores)
        stats = engine.manager.stats()
        recorder.line("stats", stats.asked, stats.loaded_blocks, stats.missed, stats.saved_blocks, stats.unsaved)
    finally:
        engine.close()
    return recorder


# -- the host cache --------------------------------------------------------------------------------------


def drive_host_cache(seed: int) -> Recorder:
    recorder, random, now = Recorder(), Random(seed), [0]
    known, leases, pending = [bytes([i]) * (1 + i) for i in range(1, 30)], [], []
    with HostCache(9, 64, identity=IDENTITY, clock=lambda: now[0], event_capacity=256, policy="lru") as cache:

        def keep(kind: str, result: Any) -> None:
            if result is not None:
                {"reserve": lambda: pending.extend(result.keys), "pin": lambda: leases.append(result)}[kind]()

        for _ in range(6 * STEPS):
            verb = random.choices(list(VERBS), list(VERBS.values()))[0]
            keys = random.choices(known, k=random.randrange(5))
            here = [key for key in keys if cache.find(key) == cache.HERE or random.random() < 0.02]
            if verb == "reserve":
                rule = {"priority": random.choice((35, 35, 10, 80)), "ttl_ms": random.choice((None, 3, 9))}
                call = lambda keys=keys, r=rule: cache.reserve(keys, **r)  # noqa: E731
                keep(
                    verb,
                    recorder.outcome(
                        verb, call, lambda reservation: [reservation.keys, reservation.blocks, reservation.evicted]
                    ),
                )
            elif verb in ("publish", "abort"):
                count = random.randint(0, len(pending))
                chosen, pending[:count] = pending[:count], []
                recorder.outcome(verb, lambda v=verb, o=chosen: getattr(cache, v)(o))
            elif verb == "pin":
                keep(verb, recorder.outcome(verb, lambda keys=here: cache.pin(keys), lambda lease: lease.blocks))
            elif verb == "unpin" and leases:
                leases.pop(random.randrange(len(leases))).close()
            elif verb in ("touch", "forget"):
                recorder.outcome(verb, lambda v=verb, keys=here: getattr(cache, v)(keys))
            elif verb == "clear":
                recorder.outcome(verb, lambda: cache.clear(force=random.random() < 0.5))
            elif verb == "wait":
                now[0] += random.randint(1, 8)
                recorder.outcome("refresh", cache.refresh)
            recorder.line("lookup", cache.lookup(known))
            for event in cache.events():
                recorder.line(f"event {event.kind}", event.number, event.keys, event.priority)
        stats = cache.stats()
        recorder.line("stats", stats.pending, stats.pinned, stats.empty)
        cache.revoke("")
    return recorder
