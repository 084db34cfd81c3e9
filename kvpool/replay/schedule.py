"""The order of admissions, appends and finishes of a replay. Only lengths decide it, so it is the same for all
pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
    the device tier together. Until then the oldest requests finish. So no pool ever has to preempt.

    With each arrival, every running request that has output left appends one block's worth of tokens, all in one batch.
    The rest of its output is appended before it finishes, one block's worth at a time.
    """
    running: deque[Request] = deque()
    done: dict[int, int] = {}
    held = 0
    for request in requests:
        need = worst_blocks(request, tokens_per_block)
        if need > device_blocks:
            yield Skip(request, need)
            continue
        while running and (len(running) >= active or held + need > device_blocks):
            oldest = running.popleft()
            held -= worst_blocks(oldest, tokens_per_block)
            yield from _drain(oldest, done.pop(oldest.index), tokens_per_block)
        yield Admit(request)
        running.append(request)
        done[request.index] = 0
        held += need
        items = _chunks(running, done, tokens_per_block)
        if items:
            yield Append(items)
            for other, start, count in items:
                done[other.index] = start + count
    while running:
        oldest = running.popleft()
        yield from _drain(oldest, done.pop(oldest.index), tokens_per_block)


def _chunks(running: deque[Request], done: dict[int, int], tokens_per_block: int) -> list[tuple[Request, int, int]]:
    return [
        (request, done[request.index], min(tokens_per_block, request.output_length - done[request.index]))
        for request in running
        if done[request.index] < request.output_length
    ]


def _drain(request: Request, start: int, tokens_per_block: int) -> Iterator[Step]:
    for at in range(start, request.output_length, tokens_per_block):
        yield Append([(request, at, min(tokens_per_block, request.output_length - at))])
    yield Finish(request)
