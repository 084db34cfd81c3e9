"""LoadOrCompute: how many blocks of a prompt are loaded from a store, and how many the engine computes, so that a hit
never loses to recomputation."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Protocol

from kvpool.common.arguments import number_argument
from kvpool.common.arrays.layout import integer_argument

BUDGET = 0.01
"""Loads may lose this share of the time that computing all hits would take."""
PROBES = 0.005
"""Loads from a store that seems slower than the engine may lose this share."""
SLOWEST = 1e-6
"""The least tokens a second that an engine may be said to compute: with fewer a block takes for ever."""
_PIECE_BYTES = 4 << 20
_MARGIN = 0.05
"""A load is expected to save at least this share of the time that it is to save."""
_SLACK = 0.25
"""A load may take twice its time, and this share of the time that it saves."""
_FORGET, _WORSE = 1 / 8, 1 / 4
"""How much of the fit, and of the mean of what loads gain less than expected, the last load makes."""
_PAUSE, _RARELY = 8, 104
"""Mean hits without a load before a probe, and before one that is not cheap. So fewer than one hit in a hundred is late
by more than a cheap probe risks."""
_PROBE, _CHEAP, _FREE, _DEAREST = 0.09, 0.095, 1 / 4, 1 / 2
"""Shares of the time to compute a hit: what a probe risks at least, what a cheap one risks, what it may risk unpaid
while no load has succeeded yet, and what it may risk at all."""


class Speed:
    """What a load of some bytes takes: latency + bytes x seconds per byte, fitted to the loads so far.

    Least squares of the relative errors, in which old loads count less: the mean is wanted, since times add up. One
    load moves the estimate by a limited factor. Not thread-safe.
    """

    def __init__(self) -> None:
        self.latency = self.per_byte = 0.0
        self.loads = 0
        self._sums = [0.0] * 5

    def seconds(self, nbytes: float) -> float:
        """What the load is expected to take. 0 before the first."""
        return self.latency + nbytes * self.per_byte

    def observe(self, nbytes: int, seconds: float) -> None:
        """A load of so many bytes, at least 1, took so long."""
        expected = self.seconds(nbytes)
        seconds = max(min(seconds, 8 * expected) if self.loads else seconds, 1e-9)
        weight, self.loads = 1 / (expected or seconds) ** 2, self.loads + 1
        new = (1.0, nbytes, nbytes * nbytes, seconds, nbytes * seconds)
        self._sums = [(1 - _FORGET) * old + weight * value for old, value in zip(self._sums, new, strict=True)]
        self._fit(*self._sums)

    def _fit(self, ones: float, x: float, xx: float, y: float, xy: float) -> None:
        spread = ones * xx - x * x
        self.latency, self.per_byte = 0.0, xy / xx
        if spread > 1e-3 * ones * xx:
            latency, per_byte = (xx * y - x * xy) / spread, (ones * xy - x * y) / spread
            if per_byte < 0:
                self.latency, self.per_byte = y / ones, 0.0
            elif latency > 0:
                self.latency, self.per_byte = latency, per_byte


@dataclass(eq=False)
class Load:
    """A load that was chosen. ``blocks``: how many leading blocks to load; with 0 there is none. ``until``: it is late
    so many seconds after it was chosen, unless more blocks come before."""

    blocks: int
    until: float = math.inf
    risk: float = 0.0
    """The most seconds that it may lose."""
    spare: float = 0.0
    """Seconds that the request waits for the engine in any case."""
    grace: float = 0.0
    """Seconds that it may take at no risk: what is spare, and less in a probe."""
    for_others: bool = False
    """It may be slower than the engine, so that others do not wait for the engine. If it comes whole, nothing is
    lost."""
    came: int = 0
    at: float = 0.0
    """When the last block came."""
    ahead: float = 0.0
    late: bool = False
    first: tuple[int, float] | None = None
    """How many blocks came first, and when."""
    promise: float = 0.0
    """What it is expected to save, as a share of the time to compute its blocks."""


class LoadPolicy(Protocol):
    """Chooses how many blocks of a hit are loaded, and when a load is given up. ``LoadOrCompute`` is one.

    Notes
    -----
    Any thread may call it. Nothing may wait.
    """

    def choose(self, available: int, ahead_bytes: int, spare: float, waited: float) -> Load:
        """Choose how many leading blocks are loaded.

        Parameters
        ----------
        available : int
            Leading blocks that the store has.
        ahead_bytes : int
            Bytes that the store loads before.
        spare : float
            Seconds for which the request waits for the engine in any case.
        waited : float
            Seconds for which the oldest load in flight has been waited for.

        Returns
        -------
        Load
            The load; without blocks there is none. See ``LoadOrCompute.choose``.
        """

    def late(self, load: Load, came: int, elapsed: float) -> bool:
        """Return whether to give the load up.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        came : int
            Leading blocks that have arrived.
        elapsed : float
            Seconds since ``choose``.

        Returns
        -------
        bool
            Whether to give it up.
        """

    def end(self, load: Load, came: int, seconds: float, queued: float) -> None:
        """Learn from a load that has ended.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        came : int
            Leading blocks that have arrived.
        seconds : float
            Seconds since ``choose``.
        queued : float
            Seconds of these before the store began with it.
        """

    def drop(self, load: Load) -> None:
        """End a load that shows nothing of the store, instead of ``end``.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        """


@dataclass(eq=False)
class LoadAttempt:
    """What is loaded from one store against the engine, which may compute it sooner. ``items``: blocks to load in all
    groups of layers, at least 1, of which so many ``came``. ``at``: when it was chosen; ``began``: when its first store
    request did."""

    policy: LoadPolicy
    load: Load
    items: int
    at: float
    came: int = 0
    began: float = math.inf

    @property
    def places(self) -> int:
        """Blocks of the prompt that have come, in all groups of layers."""
        return self.load.blocks * self.came // self.items

    @property
    def until(self) -> float:
        """When it is given up if nothing comes, on the storage manager's clock."""
        return self.at + self.load.until

    def note(self, items: int, began: float, now: float) -> None:
        """So many blocks have come, by a store request that began then."""
        self.came, self.began = self.came + items, min(self.began, began)
        self.lost(now)

    def lost(self, now: float) -> bool:
        """Whether to give it up: the engine computes the rest sooner."""
        return self.policy.late(self.load, self.places, max(0.0, now - self.at))

    def end(self, now: float, *, measured: bool = True) -> None:
        """It has ended. What it took is learned from, if it was ended for a reason that tells of the store."""
        took = max(0.0, now - self.at)
        if measured:
            self.policy.end(self.load, self.places, took, min(took, max(0.0, self.began - self.at)))
        else:
            self.policy.drop(self.load)


class LoadOrCompute:
    """Chooses between loading a prefix and computing it, and gives up loads that are late.

    Parameters
    ----------
    prefill_tokens_per_s : float
        Prompt tokens that the engine computes in a second.
    block_bytes : int
        Bytes of a block in the store.
    tokens_per_block : int
        Tokens of such a block.
    piece_bytes : int, default 4 MiB
        Blocks of a load arrive in pieces of about this size.

    Raises
    ------
    TypeError, ValueError
        For a bad argument.

    Notes
    -----
    For each hit: ``load = choose(available)``. If ``load.blocks`` is 0, the engine computes all. Otherwise begin the
    load. When blocks arrive, and at ``load.until``, ask ``late(load, came, elapsed)``; when it is true, stop waiting,
    and let the engine compute the rest. In the end, call ``end`` once, also for a load that failed. All times are in
    seconds, and ``elapsed`` counts from ``choose``.

    The sum over all hits of (time until the load ended, beyond what was spare + time to compute the rest) is at most 1
    + ``BUDGET`` times what computing all hits takes, plus half of the longest, whatever the store does. It holds as far
    as loads are given up when ``late`` is true. Not in the sum is the time for which whole loads have waited so that
    others need not wait for the engine: each at most as long as the oldest load had ``waited`` then.

    Any thread may call it. Nothing blocks. There is no clock.

    Examples
    --------
    >>> from kvpool.storage import LoadOrCompute
    >>> policy = LoadOrCompute(1000.0, block_bytes=1 << 20, tokens_per_block=16)
    >>> load = policy.choose(100)  # a first load, to measure the store
    >>> policy.end(load, 100, seconds=0.1)
    >>> latency, bytes_per_second = policy.expected()
    >>> round(bytes_per_second / 1e9, 1)
    1.0
    """

    def __init__(
        self, prefill_tokens_per_s: float, block_bytes: int, tokens_per_block: int, *, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        speed = number_argument("prefill_tokens_per_s", prefill_tokens_per_s, SLOWEST)
        self.block_bytes = integer_argument("block_bytes", block_bytes, 1, 1 << 40)
        tokens = integer_argument("tokens_per_block", tokens_per_block, 1, 1 << 31)
        self._piece = max(1, integer_argument("piece_bytes", piece_bytes, 1, 1 << 40) // self.block_bytes)
        self.block_seconds = tokens / speed
        self._lock = threading.Lock()
        self._speed = Speed()
        self._budget = self._since = self._mean = self._longest = self._worse = 0.0
        self._tried = 0.0
        self._fresh = True
        self._hits = 0

    def choose(self, available: int, ahead_bytes: int = 0, spare: float = 0.0, waited: float = 0.0) -> Load:
        """Choose how many of the leading blocks that the store has are loaded now.

        Parameters
        ----------
        available : int
            Leading blocks that the store has.
        ahead_bytes : int, default 0
            Bytes that the store loads before.
        spare : float, default 0.0
            Seconds for which the request waits for the engine in any case. A load costs nothing meanwhile.
        waited : float, default 0.0
            Seconds for which the oldest load in flight has been waited for, whose request then needs the same engine.

        Returns
        -------
        Load
            Its ``blocks`` are to be loaded, and it is late at ``until`` unless more blocks arrive before.
        """
        available = integer_argument("available", available, 0, 1 << 40)
        ahead_bytes = integer_argument("ahead_bytes", ahead_bytes, 0, 1 << 62)
        number_argument("spare", spare)
        number_argument("waited", waited)
        if not available:
            return Load(0)
        with self._lock:
            saved = available * self.block_seconds
            self._count(saved)
            load = Load(available, spare=spare, grace=spare, ahead=ahead_bytes * self._speed.per_byte)
            load.risk = self._risk(load, saved, waited)
            if not load.risk:
                return Load(0)
            self._budget -= load.risk
            self._since = 0.0
            self._look(load, 0, 0.0)
            return load

    def late(self, load: Load, came: int, elapsed: float) -> bool:
        """Return whether to give the load up.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        came : int
            Leading blocks that have arrived.
        elapsed : float
            Seconds since ``choose``.

        Returns
        -------
        bool
            Whether to give it up.
        """
        with self._lock:
            self._look(load, came, elapsed)
            load.late = load.late or (came < load.blocks and elapsed >= load.until)
            return load.late

    def end(self, load: Load, came: int, seconds: float, queued: float = 0.0) -> None:
        """Learn from a load that has ended or was given up.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        came : int
            Leading blocks that have arrived.
        seconds : float
            Seconds since ``choose``.
        queued : float, default 0.0
            Seconds of these before the store began with it.
        """
        with self._lock:
            gain = came * self.block_seconds - max(seconds - load.spare, 0.0)
            if load.for_others and came == load.blocks:
                gain = max(gain, 0.0)
            self._budget += load.risk + gain
            load.risk = 0.0
            if load.first and load.first[0] < came:
                # The latency shows in what came first.
                self._learn(load.first[0], max(load.first[1] - queued, 0.0))
            self._learn(came, max((load.at if load.late else seconds) - queued, 0.0))
            share = gain / (load.blocks * self.block_seconds)
            self._worse += _WORSE * (max(load.promise - share, 0.0) - self._worse)
            if came == load.blocks:
                # A probe that has succeeded takes back what late loads have said.
                self._worse = 0.0 if self._tried else self._worse
                self._tried, self._fresh = 0.0, False

    def drop(self, load: Load) -> None:
        """End a load that nobody waits for any more, instead of ``end``. Nothing is learned from it.

        Parameters
        ----------
        load : Load
            What ``choose`` has returned.
        """
        with self._lock:
            self._budget += load.risk
            load.risk = 0.0

    def expected(self) -> tuple[float, float]:
        """Return the latency and the bandwidth of the store.

        Returns
        -------
        latency : float
            Seconds.
        bandwidth : float
            Bytes per second; infinity before it is known.
        """
        with self._lock:
            per_byte = self._speed.per_byte
            return self._speed.latency, 1 / per_byte if per_byte else math.inf

    # -- inside; the lock is held --------------------------------------------------------------------

    def _learn(self, came: int, seconds: float) -> None:
        """So many blocks took so long."""
        if came:
            nbytes = came * self.block_bytes
            if self._tried and seconds < self._speed.seconds(nbytes) / 2:
                # A probe finds the store faster: what it was like before says nothing.
                self._speed = Speed()
            self._speed.observe(nbytes, seconds)

    def _count(self, saved: float) -> None:
        self._hits += 1
        self._mean += (saved - self._mean) / min(self._hits, 64)
        self._longest = max(saved, self._longest * (1 - 1 / 256))
        self._since += saved
        # What was gained long ago is no reason to lose it now.
        self._budget = min(self._budget, 64 * self._mean) + BUDGET * saved

    def _risk(self, load: Load, saved: float, waited: float) -> float:
        """What a load of all its blocks may lose. 0 if there shall be no load."""
        speed, transfer_s = self._speed, self._speed.seconds(load.blocks * self.block_bytes)
        first = max(load.ahead + speed.seconds(min(load.blocks, self._piece) * self.block_bytes) - load.spare, 0.0)
        load.promise = 1 - max(load.ahead + transfer_s - load.spare, 0.0) / saved
        if not speed.loads and load.spare >= saved:
            # Whatever the store is like: it is given up before the engine could have begun.
            load.promise, load.grace = 0.0, load.spare - 2 * _PROBE * saved
            return _PROBE * saved
        short = not speed.loads or load.promise - self._worse < _MARGIN
        # Else the load that has waited longest could wait for the engine too, and longer in all than this one here.
        spares = 0 < waited > load.ahead + transfer_s - saved
        load.for_others = short and spares and 0 < transfer_s <= (1 - _MARGIN - self._worse) * saved
        if short and not load.for_others:
            return self._probe(load, saved, 2 * first if load.promise >= _MARGIN else 0.0)
        risk = min(2 * first + _SLACK * saved, self._budget)
        # With less it would be late before its first blocks can come.
        return risk if risk >= 1.25 * first else 0.0

    def _probe(self, load: Load, saved: float, least: float) -> float:
        """What a load from a store that seems too slow, or is not known, may lose. Each probe risks twice what the one
        before has lost, since a long latency shows only to those who wait."""
        paid = min(self._budget, PROBES * self._since)
        if 2 * self._tried > _DEAREST * self._longest:
            self._tried, self._fresh = 0.0, False
        risk = max(_PROBE * saved, 2 * self._tried, least)
        free = self._fresh and risk <= _FREE * saved
        self._budget += risk if free else 0.0
        pause = _PAUSE if risk <= _CHEAP * saved else _RARELY
        if not free and (risk > min(paid, _DEAREST * saved) or self._since < pause * self._mean):
            return 0.0
        self._tried, load.grace = risk, max(0.0, load.spare - 2 * risk)
        return risk

    def _look(self, load: Load, came: int, elapsed: float) -> None:
        """Note what has come, and say until when that is enough."""
        if came > load.came:
            load.first = load.first or (came, elapsed)
            load.came, load.at = came, elapsed
        rest = load.blocks - load.came
        expected = self._speed.seconds(rest * self.block_bytes) + (0.0 if load.came else load.ahead)
        silent = max(load.at, load.grace) + 2 * expected + _SLACK * rest * self.block_seconds
        worth = load.grace + load.risk + load.came * self.block_seconds
        load.until = min(worth, silent) if self._speed.loads else worth
