"""The order of admissions, appends and finishes of a replay. Only lengths decide it, so it is the same for all
pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from kvpool.replay.tokens import Request


class Skip(NamedTuple):
    """Skip the request. It never fits, since it alone needs more blocks than the device tier has."""

    request: Request
    blocks: int


class Admit(NamedTuple):
    """Admit the request."""

    request: Request


class Append(NamedTuple):
    """Append output tokens ``[start, start + count)`` to each request, in one batch."""

    items: list[tuple[Request, int, int]]


class Finish(NamedTuple):
    """Release the request."""

    request: Request


Step = Skip | Admit | Append | Finish


def worst_blocks(request: Request, tokens_per_block: int) -> int:
    """Return the number of blocks that `request` holds at its end if it shares none."""
    return -(-request.length // tokens_per_block)


def schedule(requests: Sequence[Request], *, device_blocks: int, active: int, tokens_per_block: int) -> Iterator[Step]:
    """Yield the steps of a replay in file order.

    A request is admitted if fewer than `active` others run, and if its worst case and theirs, with nothing shared, fit
    the device tier together. Until then the oldest requests finish. So no pool ever has to preempt. Those that say how
    long they run finish before the first arrival after that.

    With each arrival, every running request that has output left appends one block's worth of tokens, all in one batch.
    The rest of its output is appended before it finishes, one block's worth at a time.
    """
    running: list[Request] = []
    done: dict[int, int] = {}
    held = 0
    for request in requests:
        need = worst_blocks(request, tokens_per_block)
        if need > device_blocks:
            yield Skip(request, need)
            continue
        ended = sorted((one for one in running if _end(one) <= _begin(request)), key=_end)
        while ended or running and (len(running) >= active or held + need > device_blocks):
            first = ended.pop(0) if ended else running[0]
            running.remove(first)
            held -= worst_blocks(first, tokens_per_block)
            yield from _drain(first, done, tokens_per_block)
        yield Admit(request)
        running.append(request)
        done[request.index] = 0
        held += need
        if items := _grow(running, done, tokens_per_block):
            yield Append(items)
    for oldest in running:
        yield from _drain(oldest, done, tokens_per_block)


def _begin(request: Request) -> float:
    return 0.0 if request.timestamp is None else request.timestamp


def _end(request: Request) -> float:
    return inf if request.seconds is None else _begin(request) + request.seconds


def _grow(requests: Iterable[Request], done: dict[int, int], tokens_per_block: int) -> list[tuple[Request, int, int]]:
    """Give each request that has output left a block's worth of it. ``done`` are the tokens so far, by index."""
    items = []
    for request in requests:
        start = done[request.index]
        count = min(tokens_per_block, request.output_length - start)
        if count > 0:
            items.append((request, start, count))
            done[request.index] = start + count
    return items


def _drain(request: Request, done: dict[int, int], tokens_per_block: int) -> Iterator[Step]:
    while items := _grow([request], done, tokens_per_block):
        yield Append(items)
    del done[request.index]
    yield Finish(request)
