"""Sessions of agents: how they are read, and a closed loop of users that plays them.

A session is a list of *turns*. A turn repeats most of the prompt of an earlier one. So a file has, for each turn, what
differs; the prompts are made while the session is played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np

from kvpool.replay.columns import INT32_MAX, REQUIRED, Row
from kvpool.replay.tokens import OUTPUT_STRIDE, Ids, Request, ranges

USERS, PAUSE_MAX = 32, 60.0
"""How many users play, and the longest pause that they make, in seconds."""
_ARRIVALS = 60.0
"""The users begin within so many seconds."""
_CALL_SECONDS, _CALL_SECONDS_MAX = 6.5, 300.0
"""How long a request takes if nothing is said, and at most."""
_PROMPT_MAX, _IDS_MAX = 10_000_000, 1 << 24
"""The most tokens of a prompt, and the most ids of the prompts of one session together."""
_SEED, _SEED_VARIED = 7, 99
_PACKED = ("t", "in", "out", "stop", "api_time", "think_time", "agent", "from", "keep", "runs")
"""The columns of a request that is written as a list."""


class Turn(NamedTuple):
    """One request of a session. Its ids are the first ``keep`` of the turn ``source``, and then those of ``runs``."""

    begin: float
    """Seconds since the session began, as recorded. It gives the order."""
    input_length: int
    output_length: int
    seconds: float
    """How long it takes."""
    pause: float
    """Seconds from the end of the turn before it to its own begin."""
    stop: str
    """Why the model stopped; empty if nothing is said."""
    source: int
    keep: int
    runs: Ids
    """int64[n, 2]: the first id, and how many follow each other."""


@dataclass(frozen=True, eq=False)
class AgentSession:
    """The turns of a session in order of time. Ids are its own: those of another session mean another content."""

    line: int
    tokens_per_id: int
    turns: list[Turn]
    ids: int
    """All ids are below this."""

    def prompts(self, first: int) -> Iterator[tuple[Turn, Ids]]:
        """Each turn and its ids, which count from ``first``. The end of a prompt that no id covers gets one that no
        other has."""
        made: list[Ids] = []
        for place, turn in enumerate(self.turns):
            kept = made[turn.source][: turn.keep] if turn.keep else np.empty(0, np.int64)
            made.append(np.concatenate([kept, ranges(turn.runs[:, 0], turn.runs[:, 1])]))
            whole = len(made[-1]) * self.tokens_per_id >= turn.input_length
            yield turn, first + (made[-1] if whole else np.append(made[-1], self.ids + place))


def read_session(row: Row) -> AgentSession:
    """Read a session in either format: packed into a line (``session``, ``block``), or as it was recorded (``id``,
    ``block_size``). Raises TraceError."""
    packed = "session" in row.columns
    tokens_per_id = row.integer("block" if packed else "block_size", 1, 1 << 20)
    if row.columns.get("hash_id_scope", "local") != "local":
        raise row.error("column 'hash_id_scope' must be 'local': the ids of a session are its own")
    turns: list[Turn] = []
    counts: list[int] = []
    for part in _packed(row) if packed else _recorded(row):
        source, keep, runs = _shared(part, counts) if packed else (-1, 0, _runs(part))
        counts.append(keep + int(runs[:, 1].sum()))
        turn = _turn(part, source, keep, runs)
        lacking = -(-turn.input_length // tokens_per_id) - counts[-1]
        if not 0 <= lacking <= 1:
            covered = f"{counts[-1]} ids of {tokens_per_id} tokens for {turn.input_length} tokens"
            raise part.error(f"{covered}: accepted is an id for each, or for each but the last unfull one")
        if sum(counts) > _IDS_MAX:
            raise part.error(f"the prompts of the session have more than {_IDS_MAX} ids together")
        turns.append(turn)
    if any(later.begin < turn.begin for turn, later in pairwise(turns)):
        raise row.error("column 'requests' must be in the order of 't'")
    highest = max((int(turn.runs.sum(axis=1).max(initial=0)) for turn in turns), default=0)
    return AgentSession(row.line, tokens_per_id, turns, highest)


def _turn(part: Row, source: int, keep: int, runs: Ids) -> Turn:
    asked, paused = part.seconds("api_time", None), part.seconds("think_time", None)
    return Turn(
        begin=part.seconds("t", REQUIRED) or 0.0,
        input_length=part.integer("in", 1, _PROMPT_MAX),
        output_length=part.integer("out", 0, OUTPUT_STRIDE),
        seconds=min(_CALL_SECONDS if asked is None else asked, _CALL_SECONDS_MAX),
        pause=paused or 0.0,
        stop=part.text("stop") or "",
        source=source,
        keep=keep,
        runs=runs,
    )


def _packed(row: Row) -> Iterator[Row]:
    for place, values in enumerate(row.items("requests", len(_PACKED))):
        yield row.part(f"request {place}", dict(zip(_PACKED, values, strict=True)))


def _shared(part: Row, counts: list[int]) -> tuple[int, int, Ids]:
    """Which ids a packed request shares with an earlier one, and the runs that follow."""
    source = part.integer("from", -1, len(counts) - 1)
    keep = part.integer("keep", 0, counts[source] if source >= 0 else 0)
    flat = part.part("", {"runs": [number for run in part.items("runs", 2) for number in run]})
    return source, keep, flat.integers("runs", INT32_MAX, np.int64).reshape(-1, 2)


def _recorded(row: Row) -> list[Row]:
    """All requests, those of sub-agents too, in order of time."""
    found: list[Row] = []
    pending = [(str(place), one) for place, one in enumerate(row.items("requests"))][::-1]
    while pending:
        place, columns = pending.pop()
        part = row.part(f"request {place}", columns)
        if "requests" in part.columns:
            pending += [(f"{place}.{inner}", one) for inner, one in enumerate(part.items("requests"))][::-1]
        else:
            found.append(part)
    return sorted(found, key=lambda part: part.seconds("t", REQUIRED) or 0.0)


def _runs(part: Row) -> Ids:
    """The ids of a recorded request as runs."""
    ids = part.integers("hash_ids", INT32_MAX, np.int64)
    firsts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    return np.stack([ids[firsts], np.diff(firsts, append=len(ids))], axis=1)


def play(
    sessions: list[AgentSession], users: int = USERS, pause_max: float = PAUSE_MAX, varies: float = 0.0
) -> Iterator[Request]:
    """Yield the requests in the order in which ``users`` users make them, who wait for each answer.

    The sessions come in an order of chance, always the same. A user begins within a minute, waits after each answer as
    long as the session did, but at most ``pause_max`` seconds, and after the end of a session takes the next one. With
    ``varies``, the longest pause inside a session is drawn anew each time, up to this part of it shorter or longer.
    """
    if users < 1 or not 0 <= pause_max < inf:
        raise ValueError(f"users {users}, pause_max {pause_max}: accepted are 1 user or more, and seconds from 0 on")
    if not 0 <= varies <= 1:
        raise ValueError(f"varies {varies}: accepted is 0 to 1")
    random, varied, index, first = Random(_SEED), Random(_SEED_VARIED), 0, 0
    waiting = [session for session in sessions if session.turns]
    random.shuffle(waiting)
    waiting.reverse()
    due: list[tuple[float, int, AgentSession, Iterator[tuple[Turn, Ids]], tuple[Turn, Ids]]] = []
    """When each user goes on, its number, and the rest of its session."""

    def begin(user: int, now: float) -> None:
        nonlocal first
        if waiting:
            session = waiting.pop()
            prompts = session.prompts(first)
            first += session.ids + len(session.turns)
            heappush(due, (now, user, session, prompts, next(prompts)))

    for user in range(min(users, len(waiting))):
        begin(user, random.random() * _ARRIVALS)
    while due:
        now, user, session, prompts, (turn, ids) = heappop(due)
        following, end, returns = next(prompts, None), now + turn.seconds, inf
        if following is not None:
            returns = end + min(following[0].pause, pause_max * varied.uniform(1 - varies, 1 + varies))
            heappush(due, (returns, user, session, prompts, following))
        yield Request(
            index,
            session.line,
            turn.input_length,
            turn.output_length,
            hash_ids=ids.astype(np.uint64),
            tokens_per_id=session.tokens_per_id,
            timestamp=now,
            seconds=turn.seconds,
            stop=turn.stop,
            returns=returns,
        )
        index += 1
        if following is None:
            begin(user, end + random.random() * pause_max)
