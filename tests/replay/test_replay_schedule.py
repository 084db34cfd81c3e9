"""The window admits in file order, never more than fits the device tier in the worst case, as the shared protocol
says."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvpool.tools.replay.content import Request
from kvpool.tools.replay.engine import Admit, Append, Finish, Skip, schedule, worst_blocks


def requests_of(*lengths: tuple[int, int]) -> list[Request]:
    return [Request(i, 0, *pair, hash_ids=None) for i, pair in enumerate(lengths)]


def random_requests(seed: int, count: int = 200) -> list[Request]:
    print(f"seed {seed}")
    random = Random(seed)
    return requests_of(*((random.randint(1, 300), random.randint(0, 90)) for _ in range(count)))


def steps_of(requests: list[Request], device_blocks: int, active: int) -> list[tuple[Any, ...]]:
    result: list[tuple[Any, ...]] = []
    for step in schedule(requests, device_blocks=device_blocks, active=active, tokens_per_block=16):
        match step:
            case Admit(request):
                result.append(("admit", request.index))
            case Append(items):
                result.append(("append", [(request.index, start, count) for request, start, count in items]))
            case Finish(request):
                result.append(("finish", request.index))
            case Skip(request, blocks):
                result.append(("skip", request.index, blocks))
    return result


def test_small_schedule_is_as_written_by_hand() -> None:
    requests = requests_of((16, 20), (1, 0), (200, 0), (40, 5))
    assert steps_of(requests, device_blocks=6, active=2) == [
        ("admit", 0),
        ("append", [(0, 0, 16)]),
        ("admit", 1),
        ("append", [(0, 16, 4)]),
        ("skip", 2, 13),
        ("finish", 0),
        ("admit", 3),
        ("append", [(3, 0, 5)]),
        ("finish", 1),
        ("finish", 3),
    ]


@pytest.mark.parametrize(("device_blocks", "active"), [(24, 4), (60, 64), (23, 1)])
def test_worst_case_of_the_running_requests_always_fits(device_blocks: int, active: int) -> None:
    requests = random_requests(seed=device_blocks)
    running: set[int] = set()
    order, skipped = [], []
    for name, first, *_ in steps_of(requests, device_blocks, active):
        if name == "admit":
            running.add(first)
            order.append(first)
        elif name == "finish":
            assert first == min(running), "the oldest finishes first"
            running.remove(first)
        elif name == "skip":
            skipped.append(first)
        assert len(running) <= active
        assert sum(worst_blocks(requests[i], 16) for i in running) <= device_blocks
    assert not running
    assert sorted(order + skipped) == list(range(len(requests))) and order == sorted(order)
    assert skipped == [r.index for r in requests if worst_blocks(r, 16) > device_blocks]


def test_every_output_token_is_appended_once_and_in_order() -> None:
    requests = random_requests(seed=7)
    done = [0] * len(requests)
    for name, items, *_ in steps_of(requests, 100, 8):
        if name == "append":
            assert len({index for index, _, _ in items}) == len(items)
            for index, start, count in items:
                assert start == done[index] and 1 <= count <= 16
                done[index] += count
    assert done == [request.output_length for request in requests]
