"""Scenes: small pools in which two calls meet, and what must be true afterwards however their lines are interleaved.

``NUMBA_DISABLE_JIT=1 python -m tests.race.scenes NAME`` (from the root, with it and ``tests`` on the path) explores
one; ``--without`` takes a guard out, ``--most`` ends after so many schedules, ``--schedule`` runs a single one again,
as a failure printed it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import config

import kvpool
from engine import Clock, Engine, Request, small_layout
from kvpool import KVCacheManager
from kvpool.common.jit import intrinsics as atomics
from kvpool.pool import Reservation
from kvpool.pool.leases import Lease
from kvpool.state import records
from kvpool.state import records as fields
from tests import debug
from tests.race.interleave import Lock, Scene, explore, read_schedule, run

_PACKAGE = Path(kvpool.__file__).parent
# All that decides or hands over, except what reads no state (hashing), or only judges (verify).
_STATE = {path for path in (_PACKAGE / "state").rglob("*.py") if path.stem not in ("hashing", "verify")}
_PARTS = ("core", "deadlines", "exclusive", "leases", "reservations", "shutdown")
_VERBS = (*_PARTS, "block_tables", "cached_content", "live_sequences", "manager", "prompts")
FILES = {
    *map(str, _STATE),
    *(str(_PACKAGE / "pool" / f"{name}.py") for name in _VERBS),
    *(str(_PACKAGE / "pool" / "transfer" / f"{name}.py") for name in ("levels", "traffic", "transfer")),
}
assert all(map(os.path.exists, FILES)), "a file that has moved has no lines to switch between"


watching = False
"""Whether the changes of reference words are watched in scenes that are made from now on."""


def watch_words(lock: Lock) -> None:
    """From now on, whoever changes the reference word of a block without this lock fails."""

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(words: Any, b: int, *values: Any) -> Any:
            assert lock.held, f"the reference word of block {b} is changed without the state lock"
            return change(words, b, *values)

        return changed

    fields.store, fields.compare_exchange = watched(atomics.store), watched(atomics.compare_exchange)  # type: ignore[assignment]


class Cast(Engine):
    """An engine on a pool whose locks the explorer sees; it judges when all is over, not after each verb.

    ``without`` names the guard that is taken out: "state_lock", "transfer_lock", one of ``kvpool.state.records``, or
    None.
    """

    def __init__(self, P: int, S: int, without: str | None, T: int = 1, policy: str = "lru") -> None:
        clock = Clock()
        cache = KVCacheManager(
            small_layout(T, layers=1, kv_heads=1, head_dim=4, dtype="uint8"),
            device_blocks=P,
            host_blocks=S,
            device="cpu",
            max_sequences=4,
            secret=bytes(32),
            clock=clock,
            policy=policy,
        )
        super().__init__(cache)
        self.clock = clock
        state = contextlib.nullcontext() if without == "state_lock" else Lock(reentrant=True)
        cache.core.use_lock(state)
        if watching and isinstance(state, Lock):
            watch_words(state)
        cache.core.transfer.lock = contextlib.nullcontext() if without == "transfer_lock" else Lock(reentrant=False)  # type: ignore[assignment]
        if without in records.GUARDS:
            cache.core.disable_guard(without)
        self.contents: dict[bytes, list[tuple[int, int]]] = {}
        self.leased: dict[int, bytes] = {}

    def _done(self, sequence: Request) -> Request:
        return sequence

    def cache_blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """Have a prompt of one-token blocks computed, stored and released; returns its keys."""
        self.admission(tokens)()
        (sequence,) = self.live.values()
        self.cache.commit(sequence.id)
        del self.live[sequence.id]
        self.cache.release(sequence.id)
        return self.keys(tokens)

    def admission(self, tokens: Sequence[int]) -> Callable[[], Request]:
        """A verb: admit a prompt, compare what is reused, compute the rest."""
        prompt = self.prompt(tokens)
        self.contents |= {key: [(token, 0) for token in tokens[: i + 1]] for i, key in enumerate(self.keys(tokens))}
        return lambda: self.admitted(self.cache.add_sequence(prompt), tokens)

    def reader(self, pin: Callable[[], Lease | None], key: bytes) -> Callable[[], Lease | None]:
        """A verb: pin one key, and read what the lease gives."""

        def read() -> Lease | None:
            lease = pin()
            if lease is not None:
                self.leased[lease.id] = key
                self.check_lease(lease, key)
            return lease

        return read

    def check_lease(self, lease: Lease, key: bytes) -> None:
        items = self.contents[key]
        self.check_content(int(lease.blocks[0]), (None, None), items, len(items) - 1)

    def scene(self, verbs: Sequence[Callable[[], Any]], check: Callable[[list[Any]], None]) -> Scene:
        """The scene as it stands now, found to be in order."""
        self.judge()
        return Scene(verbs, check, FILES)

    def judge(self) -> None:
        """Every invariant; the bytes of all that is live, cached or leased; and no block that holds two contents."""
        self.check_owners()
        self.cache.verify()
        assert not self.cache.core.transfer._queue and not self.cache.core.transfer.waiting
        self.check_all()
        for tier in debug.cached(self.cache.core.tokens).values():
            for key, block in tier.items():
                self.check_content(block, (None, None), self.contents[key], len(self.contents[key]) - 1)
        for lease in self.cache.leases:
            self.check_lease(lease, self.leased[lease.id])

    def check_owners(self) -> None:
        """No block is in the tables of two sequences that have different content there."""
        named: dict[int, list[tuple[int, int]]] = {}
        for sequence in self.live.values():
            for i, block in enumerate(self.table(sequence)):
                mine = sequence.items[: i + 1]
                other = named.setdefault(block, mine)
                assert other == mine, f"block {block} was given out twice: to {other} and to {mine}"


Build = Callable[[str | None], Scene]


def _kinds(outcomes: Sequence[Any]) -> tuple[str, ...]:
    return tuple(type(outcome).__name__ for outcome in outcomes)


def _end(cast: Cast, *right: tuple[str, ...], offloaded: int = 0) -> Callable[[list[Any]], None]:
    """What is true afterwards: outcomes of these types, and so many contents that went to the host."""

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert _kinds(outcomes) in right
        assert len(debug.cached(cast.cache.core.tokens)["host"]) >= offloaded, "all victims were offloaded"

    return check


def victim(without: str | None, policy: str = "lru") -> Scene:
    """Two admissions that both must evict."""
    cast = Cast(2, 2, without, policy=policy)
    cast.cache_blocks([1, 2])
    return cast.scene([cast.admission([5]), cast.admission([6])], _end(cast, ("Request", "Request"), offloaded=2))


def victim_of_growth(without: str | None) -> Scene:
    """An admission and a growing sequence that both must evict: all that they compete for is the victim."""
    cast = Cast(3, 2, without)
    cast.cache_blocks([1, 2])
    grows = cast.admission([6])()
    cast.contents |= {key: [(6, 0), (7, 0)][: i + 1] for i, key in enumerate(cast.keys([6, 7]))}
    verbs = [cast.admission([5]), lambda: cast.append(grows, [7])]
    return cast.scene(verbs, _end(cast, ("Request", "Request"), offloaded=2))


def host_pin(without: str | None) -> Scene:
    """A reader finds and pins the host block that an admission needs for its victim."""
    cast = Cast(1, 1, without)
    (key,) = cast.cache_blocks([1])
    cast.cache_blocks([2])
    reader = cast.reader(lambda: cast.cache.find_and_pin_host(key, owner="reader"), key)
    return cast.scene([cast.admission([3]), reader], _end(cast, ("Request", "Lease"), ("Request", "NoneType")))


def device_pin(without: str | None) -> Scene:
    """A reader pins the device block that an admission must evict."""
    cast = Cast(1, 0, without)
    (key,) = cast.cache_blocks([1])
    reader = cast.reader(lambda: cast.cache.pin([key], owner="reader"), key)
    return cast.scene([cast.admission([3]), reader], _end(cast, ("Request", "BlockNotFound"), ("OutOfBlocks", "Lease")))


def pin_of_a_copy(without: str | None) -> Scene:
    """A reader pins a host block between the decision to offload into it and the copy."""
    cast = Cast(1, 1, without)
    (key,) = cast.cache_blocks([1])
    reader = cast.reader(lambda: cast.cache.find_and_pin_host(key, owner="reader"), key)
    return cast.scene([cast.admission([3]), reader], _end(cast, ("Request", "Lease"), ("Request", "NoneType")))


def admission_of_a_copy(without: str | None) -> Scene:
    """An admission onboards content between the decision of another to offload it and the copy."""
    cast = Cast(3, 3, without)
    for token in (1, 4, 5):
        cast.cache_blocks([token])

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert _kinds(outcomes) == ("Request", "Request")
        assert outcomes[1].cached == 1

    return cast.scene([cast.admission([3]), cast.admission([1, 9])], check)


def unpin_and_eviction(without: str | None) -> Scene:
    """A lease is closed while an admission looks for a block."""
    cast = Cast(1, 0, without)
    (key,) = cast.cache_blocks([1])
    lease = cast.reader(lambda: cast.cache.pin([key], owner="reader"), key)()
    assert lease is not None

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert _kinds(outcomes) in (("NoneType", "Request"), ("NoneType", "OutOfBlocks"))
        assert lease.closed

    return cast.scene([lease.close, cast.admission([3])], check)


def _two_ends(
    without: str | None, other: Callable[[Cast, Lease], Callable[[], Any]], right: Callable[[list[Any]], bool]
) -> Scene:
    """A lease is ended twice, while another reader has pinned the same block."""
    cast = Cast(1, 0, without)
    (key,) = cast.cache_blocks([1])
    lease = cast.reader(lambda: cast.cache.pin([key], owner="one"), key)()
    cast.reader(lambda: cast.cache.pin([key], owner="two"), key)()
    assert lease is not None

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert lease.closed and len(cast.cache.leases) == 1
        assert right(outcomes), outcomes

    return cast.scene([lease.close, other(cast, lease)], check)


def two_unpins(without: str | None) -> Scene:
    """A lease is closed by two threads: one of them is told that it came late."""
    return _two_ends(
        without, lambda cast, lease: lease.close, lambda ends: sorted(_kinds(ends)) == ["LeaseExpired", "NoneType"]
    )


def unpin_and_revoke(without: str | None) -> Scene:
    """A lease is closed by its holder and revoked by its owner's name."""

    def right(ends: list[Any]) -> bool:
        return (ends[0] is None and ends[1] == 0) or (_kinds(ends)[0] == "LeaseExpired" and ends[1] == 1)

    return _two_ends(without, lambda cast, lease: lambda: cast.cache.revoke("one"), right)


def _loaded(cast: Cast, **options: Any) -> Reservation:
    """A loader has brought a prompt, and has not committed it."""
    cast.admission([1])  # nobody adds it; what it would be is known
    reservation = cast.cache.imports.reserve(cast.prompt([1]), owner="one", **options)
    cast.block(int(reservation.blocks[0]))[:, :, 0] = cast.expected.of((None, None), [(1, 0)])[0]
    return reservation


def load_and_expire(without: str | None) -> Scene:
    """A loader commits what it has brought while its deadline passes, and somebody counts what has expired."""
    cast = Cast(2, 0, without)
    reservation = _loaded(cast, deadline_seconds=0.01)

    def count() -> int:
        cast.clock.now = 10
        return cast.cache.stats().expired_reservations

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        came, expired = len(debug.cached(cast.cache.core.tokens)["device"]), cast.cache.stats().expired_reservations
        assert (_kinds(outcomes)[0], outcomes[1], expired, came, reservation.closed) in (
            ("NoneType", 0, 0, 1, True),
            ("ReservationExpired", 1, 1, 0, False),
        )

    return cast.scene([reservation.commit, count], check)


def load_and_revoke(without: str | None) -> Scene:
    """A loader commits what it has brought while its owner's name is revoked."""
    cast = Cast(2, 0, without)
    reservation = _loaded(cast)

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        came = len(debug.cached(cast.cache.core.tokens)["device"])
        assert cast.free() == 2 and reservation.closed and cast.cache.imports.reservations == []
        assert (outcomes == [None, 0] and came == 1) or (
            _kinds(outcomes)[0] == "ReservationExpired" and outcomes[1] == 1 and came == 0
        )

    return cast.scene([reservation.commit, lambda: cast.cache.revoke("one")], check)


def two_commits(without: str | None) -> Scene:
    """Two sequences commit the same content."""
    cast = Cast(2, 0, without)
    sequences = [cast.admission([1])() for _ in range(2)]

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert outcomes == [None, None]
        assert len(debug.cached(cast.cache.core.tokens)["device"]) == 1
        assert sum(bool(flags & fields.PUBLISHED) for flags in cast.cache.core.tokens.blocks["flags"]) == 1
        cast.live.clear()
        cast.cache.release([sequence.id for sequence in sequences])
        cast.judge()
        assert cast.free() == 2

    return cast.scene([lambda s=s: cast.cache.commit(s.id) for s in sequences], check)  # type: ignore[misc]


def forget_and_commit(without: str | None) -> Scene:
    """Content is forgotten while a second sequence that has computed it commits it."""
    cast = Cast(4, 0, without)
    first, two = cast.admission([1])(), cast.admission([1])()
    cast.cache.commit(first.id)
    keys = cast.prompt([1])

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert outcomes == [1, None]
        cast.live.clear()
        cast.cache.release([first.id, two.id])
        cast.judge()
        assert not debug.cached(cast.cache.core.tokens)["device"]
        assert cast.free() == 4

    return cast.scene([lambda: cast.cache.content.forget(keys), lambda: cast.cache.commit(two.id)], check)


def forget_and_hit(without: str | None) -> Scene:
    """Content is forgotten while an admission reuses it."""
    cast = Cast(4, 4, without)
    (key, *_) = cast.cache_blocks([1, 2])
    keys = cast.prompt([1, 2])

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert outcomes[0] == 2 and outcomes[1].cached in (0, 1)
        cached = debug.cached(cast.cache.core.tokens)["device"]
        assert key not in cached or outcomes[1].cached == 0

    return cast.scene([lambda: cast.cache.content.forget(keys), cast.admission([1, 5])], check)


def release_and_hit(without: str | None) -> Scene:
    """A sequence is released while an admission reuses its block."""
    cast = Cast(4, 0, without)
    old = cast.admission([1, 2])()
    cast.cache.commit(old.id)
    del cast.live[old.id]

    def check(outcomes: list[Any]) -> None:
        cast.judge()
        assert _kinds(outcomes) == ("NoneType", "Request")
        assert outcomes[1].cached == 1

    return cast.scene([lambda: cast.cache.release(old.id), cast.admission([1, 5])], check)


def swap_and_hit(without: str | None) -> Scene:
    """A sequence leaves for the host while an admission reuses its block."""
    cast = Cast(4, 2, without)
    old = cast.admission([1, 2])()
    cast.cache.commit(old.id)
    del cast.live[old.id]

    def check(outcomes: list[Any]) -> None:
        assert _kinds(outcomes) == ("int", "Request") and outcomes[1].cached == 1
        cast.cache.resume(old.id)
        cast.live[old.id] = old
        cast.judge()

    return cast.scene([lambda: cast.cache.swap_out(old.id), cast.admission([1, 5])], check)


def block_and_admission(without: str | None) -> Scene:
    """A block gives back the only device block and takes it again, while an admission wants it."""
    cast = Cast(1, 1, without)
    old, prompt, admit = cast.admission([1])(), cast.prompt([2]), cast.admission([3])
    cast.admission([2])  # what it would be is known
    del cast.live[old.id]
    cast.cache.commit(old.id)

    def block() -> Request:
        with cast.cache.exclusive():
            cast.cache.release(old.id)
            new = cast.cache.add_sequence(prompt)
        return cast.admitted(new, [2])

    return cast.scene([block, admit], _end(cast, ("Request", "OutOfBlocks"), offloaded=1))


def block_and_pin(without: str | None) -> Scene:
    """A reader pins the host block into which a block of calls offloads, though nobody enqueues the copy before."""
    cast = Cast(1, 1, without)
    (key,), prompt = cast.cache_blocks([1]), cast.prompt([3])
    cast.admission([3])

    def block() -> Request:
        with cast.cache.exclusive():
            new = cast.cache.add_sequence(prompt)
            cast.cache.match_prefix(prompt)
        return cast.admitted(new, [3])

    reader = cast.reader(lambda: cast.cache.find_and_pin_host(key, owner="reader"), key)
    return cast.scene([block, reader], _end(cast, ("Request", "Lease"), ("Request", "NoneType")))


def two_writers(without: str | None) -> Scene:
    """Two forks append to the end that they share; there is room for one copy."""
    cast = Cast(2, 0, without, T=2)
    parent = cast.admission([1])()
    (other,) = cast.fork(parent)
    verbs = [lambda: cast.append(parent, [2]), lambda: cast.append(other, [3])]
    return cast.scene(verbs, _end(cast, ("Request", "Request")))


def _word(without: str | None, start: tuple[int, int], changes: Sequence[tuple[int, int]]) -> Scene:
    """Threads change (refs, pins) of one word. Steps are its loads and exchanges. What would fall below zero changes
    nothing."""
    blocks = np.zeros(1, fields.BLOCK)
    blocks["ref_word"] = start[1] << 32 | start[0]
    fields.load, fields.compare_exchange = _load, _store if without == "compare_exchange" else _exchange  # type: ignore[assignment]

    def check(outcomes: list[Any]) -> None:
        done = [change for change, word in zip(changes, outcomes, strict=True) if word != -1]
        refused = [change for change, word in zip(changes, outcomes, strict=True) if word == -1]
        word = int(blocks["ref_word"][0])
        end = [start[i] + sum(change[i] for change in done) for i in range(2)]
        assert [word & fields.REFS, word >> 32] == end, f"{changes} of {start} gave {outcomes} and left {word:#x}"
        assert min(end) >= 0
        assert all(min(end[i] + change[i] for i in range(2)) < 0 for change in refused), "refused for no reason"

    return Scene([functools.partial(fields.change_word, blocks, 0, *change) for change in changes], check, {__file__})


# One line each, so that each is one step.
def _load(array: Any, index: int) -> Any:
    return atomics.load(array, index)


def _exchange(array: Any, index: int, expected: int, desired: int) -> Any:
    return atomics.compare_exchange(array, index, expected, desired)


def _store(array: Any, index: int, expected: int, desired: int) -> Any:
    return array.__setitem__(index, desired) is None


def two_locks(without: str | None) -> Scene:
    """No pool: each thread takes two locks; without "lock_order", each in an order of its own."""
    locks = [Lock(reentrant=False), Lock(reentrant=False)]

    def take(first: Lock, second: Lock) -> None:
        with first:
            with second:
                pass

    backward = locks[::-1] if without == "lock_order" else locks
    return Scene(
        [functools.partial(take, *locks), functools.partial(take, *backward)], lambda outcomes: None, {__file__}
    )


def a_wait(without: str | None) -> Scene:
    """No pool: a thread reads a list until there is something in it; without "the_other" nobody puts anything there."""
    box: list[int] = [] if without == "the_other" else [1]

    def look() -> None:
        while not box:
            pass

    return Scene([look], lambda outcomes: None, {__file__})


BUILDS: dict[str, tuple[Build, int | None]] = {
    "victim": (victim, 1),
    "victim_of_a_policy": (functools.partial(victim, policy="agent"), 1),
    "swap_and_hit": (swap_and_hit, 1),
    "victim_of_growth": (victim_of_growth, 1),
    "host_pin": (host_pin, 1),
    "device_pin": (device_pin, 1),
    "pin_of_a_copy": (pin_of_a_copy, 1),
    "admission_of_a_copy": (admission_of_a_copy, 1),
    "unpin_and_eviction": (unpin_and_eviction, 1),
    "two_unpins": (two_unpins, 2),
    "load_and_expire": (load_and_expire, 1),
    "load_and_revoke": (load_and_revoke, 1),
    "unpin_and_revoke": (unpin_and_revoke, 2),
    "two_commits": (two_commits, 1),
    "forget_and_commit": (forget_and_commit, 1),
    "forget_and_hit": (forget_and_hit, 1),
    "release_and_hit": (release_and_hit, 1),
    "two_writers": (two_writers, 1),
    "block_and_admission": (block_and_admission, 1),
    "block_and_pin": (block_and_pin, 1),
    "two_locks": (two_locks, 1),
    "a_wait": (a_wait, 1),
    "word_gains_both": (lambda without: _word(without, (1, 1), [(1, 0), (0, 1)]), None),
    "word_loses_both": (lambda without: _word(without, (1, 1), [(-1, 0), (0, -1)]), None),
    "word_loses_last_twice": (lambda without: _word(without, (1, 0), [(-1, 0), (-1, 0)]), None),
    "word_of_three": (lambda without: _word(without, (1, 1), [(1, 0), (0, 1), (-1, 0)]), None),
}
"""Name of a scene -> how to build it without one guard, and how many preemptions to try; None is all interleavings."""


def said(arguments: Sequence[str] | None = None) -> str:
    """What one command says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", choices=sorted(BUILDS))
    parser.add_argument("--without", help="the guard to take out")
    parser.add_argument("--preemptions", type=int, help="another bound than the scene's own")
    parser.add_argument("--inside", metavar="FUNCTION", help="preempt threads in functions of this name only")
    parser.add_argument("--most", type=int, help="end after so many schedules, of all")
    parser.add_argument("--seed", type=int, default=0, help="draws their order")
    parser.add_argument("--schedule", help="run this one only")
    parser.add_argument("--watch-words", action="store_true", help="fail if a word changes without the state lock")
    args = parser.parse_args(arguments)
    if not config.DISABLE_JIT:
        parser.error("set NUMBA_DISABLE_JIT=1: machine code has no lines to switch between")
    global watching
    watching = args.watch_words
    build, bound = BUILDS[args.scene]
    scene = build(args.without)
    if args.schedule:
        return run(scene, read_schedule(args.schedule))[1] or "right"
    preemptions = bound if args.preemptions is None else args.preemptions
    return json.dumps(explore(scene, preemptions, args.most, args.seed, args.inside)._asdict())


def serve() -> None:
    """Answer commands, each a line of JSON, by such lines. Each runs in a fork, as if it were alone."""
    for line in sys.stdin:
        if os.fork() == 0:
            print(json.dumps(said(json.loads(line))), flush=True)
            os._exit(0)
        if os.wait()[1]:
            sys.exit("a command has failed")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        print(said())
