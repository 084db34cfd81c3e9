"""Sessions of agents, and a closed loop of users that plays them.

A session is a list of *turns*. A turn repeats most of the prompt of an earlier one. So a file has, for each turn, what
differs; the prompts are made while the session is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.tools.replay.content import Request, ranges

USERS, PAUSE_MAX = 32, 60.0
"""How many users play, and the longest pause that they make, in seconds."""
_ARRIVALS = 60.0
"""The users begin within so many seconds."""
_SEED, _SEED_VARIED = 7, 99


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
    runs: Int64s
    """int64[n, 2]: the first id, and how many follow each other."""


@dataclass(frozen=True, eq=False)
class AgentSession:
    """The turns of a session in order of time. Ids are its own: those of another session mean another content."""

    line: int
    tokens_per_id: int
    turns: list[Turn]
    ids: int
    """All ids are below this."""
    file: str = ""
    """Its file, if the trace is a folder."""

    def prompts(self, first: int) -> Iterator[tuple[Turn, Int64s]]:
        """Each turn and its ids, which count from ``first``. The end of a prompt that no id covers gets one that no
        other has."""
        made: list[Int64s] = []
        for place, turn in enumerate(self.turns):
            kept = made[turn.source][: turn.keep] if turn.keep else np.empty(0, np.int64)
            made.append(np.concatenate([kept, ranges(turn.runs[:, 0], turn.runs[:, 1])]))
            whole = len(made[-1]) * self.tokens_per_id >= turn.input_length
            yield turn, first + (made[-1] if whole else np.append(made[-1], self.ids + place))


def play(
    sessions: list[AgentSession],
    users: int = USERS,
    pause_max: float = PAUSE_MAX,
    varies: float = 0.0,
    waited: Callable[[], float] = lambda: 0.0,
) -> Iterator[Request]:
    """Yield the requests in the order in which ``users`` users make them, who wait for each answer.

    The sessions come in an order of chance, always the same. A user begins within a minute, waits after each answer as
    long as the session did, but at most ``pause_max`` seconds, and after the end of a session takes the next one. With
    ``varies``, the longest pause inside a session is drawn anew each time, up to this part of it shorter or longer.
    ``waited`` says how many seconds the last request waited before it began, which its user goes on later.
    """
    if users < 1 or not 0 <= pause_max < inf:
        raise ValueError(f"users, pause_max: expected 1 user or more, and seconds from 0 on, got {users}, {pause_max}")
    if not 0 <= varies <= 1:
        raise ValueError(f"varies: expected 0 to 1, got {varies}")
    random = Random(_SEED)
    varied = Random(_SEED_VARIED)
    index = 0
    first = 0
    waiting = [session for session in sessions if session.turns]
    random.shuffle(waiting)
    waiting.reverse()
    due: list[tuple[float, int, int, AgentSession, Iterator[tuple[Turn, Int64s]], tuple[Turn, Int64s]]] = []
    """When each user goes on, its number, and the number and the rest of its session."""
    total = len(waiting)

    def begin(user: int, now_s: float) -> None:
        nonlocal first
        if waiting:
            session = waiting.pop()
            prompts = session.prompts(first)
            first += session.ids + len(session.turns)
            heappush(due, (now_s, user, total - len(waiting), session, prompts, next(prompts)))

    for user in range(min(users, len(waiting))):
        begin(user, random.random() * _ARRIVALS)
    while due:
        now_s, user, number, session, prompts, (turn, ids) = heappop(due)
        following, end, returns = next(prompts, None), now_s + turn.seconds, inf
        if following is not None:
            returns = end + min(following[0].pause, pause_max * varied.uniform(1 - varies, 1 + varies))
        yield Request(
            index,
            session.line,
            turn.input_length,
            turn.output_length,
            hash_ids=ids.astype(np.uint64),
            tokens_per_id=session.tokens_per_id,
            timestamp=now_s,
            seconds=turn.seconds,
            stop=turn.stop,
            returns=returns,
            session=number,
            file=session.file,
        )
        index += 1
        if following is None:
            begin(user, end + waited() + random.random() * pause_max)
        else:
            heappush(due, (returns + waited(), user, number, session, prompts, following))
