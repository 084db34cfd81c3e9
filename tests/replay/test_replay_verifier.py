"""The verifier follows every copy, and says which block holds what it should not."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.errors import DeviceError
from kvpool.tools.replay.content import token_states
from kvpool.tools.replay.verifier import VerificationError, Verifier, WatchedDevice

T, DEVICE, HOST = 4, 6, 5
LAYOUT = BlockLayout(2, 2, 4, T)


class Rig:
    """Pools on a verifying device, without a manager."""

    def __init__(self, inner: CpuDevice | None = None) -> None:
        self.device = WatchedDevice(inner or CpuDevice())
        self.pools = MemoryPools(self.device, LAYOUT, DEVICE, HOST)
        self.verifier = Verifier(LAYOUT, self.pools.device_pool, self.pools.host_pool, DEVICE, HOST)
        self.device.verifier = self.verifier

    def copy(self, *moves: tuple[int, int, int]) -> None:
        self.device.copy_blocks(np.array([(*move, 0) for move in moves], dtype=np.int64).reshape(-1, 4))

    def corrupt(self, block: int, token: int, layer: int, plane: int) -> None:
        device, host = self.pools.device_pool, self.pools.host_pool
        segment = device[layer, plane, block] if block < DEVICE else host[block - DEVICE, layer, plane]
        segment[token].view(np.uint8)[...] ^= 1


def states(length: int, salt: str | None = None) -> Any:
    return token_states(np.arange(length), T, salt=salt)


def blocks(*ids: int) -> Any:
    return np.array(ids, dtype=np.int64)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 10])
def test_what_was_written_in_pieces_is_found_whole(start: int, length: int) -> None:
    rig = Rig()
    everything = states(start + length)
    sequence = blocks(5, 0, 3, 1, 4)
    rig.verifier.write(sequence, 0, everything[:start])
    rig.verifier.write(sequence, start, everything[start:])
    rig.verifier.check(sequence, everything, "was handed out as cached")
    if length:
        rig.corrupt(int(sequence[(start + length - 1) // 4]), (start + length - 1) % 4, layer=0, plane=0)
        with pytest.raises(VerificationError):
            rig.verifier.check(sequence, everything, "was handed out as cached")


def test_other_bytes_at_a_reuse_are_a_failure_that_names_the_place() -> None:
    rig = Rig()
    rig.verifier.context = "request 7"
    rig.verifier.write(blocks(2, 4), 0, states(7))
    rig.corrupt(4, 1, layer=1, plane=0)
    rig.verifier.check(blocks(2, 4), states(5), "was handed out as cached")
    message = r"device block 4, token 1, request 7: was handed out as cached \(layer 1, plane 0"
    with pytest.raises(VerificationError, match=message) as caught:
        rig.verifier.check(blocks(2, 4), states(6), "was handed out as cached")
    error = caught.value
    assert (error.block, error.tier, error.token, error.layer, error.plane) == (4, "device", 1, 1, 0)
    with pytest.raises(VerificationError, match="device block 4, token 1, .*was overwritten while in use"):
        rig.verifier.check(blocks(2, 4), states(7), "was overwritten while in use")


def test_moves_of_one_batch_are_followed_in_order() -> None:
    seed = 3
    print(f"seed {seed}")
    random = Random(seed)
    for _ in range(60):
        rig = Rig()
        total = DEVICE + HOST
        rig.verifier.write(np.arange(DEVICE), 0, states(DEVICE * T))
        rig.copy(*((i, DEVICE + i, T) for i in range(HOST)))
        moves = []
        for _ in range(random.randint(1, 12)):
            source, target = random.sample(range(total), 2)
            moves.append((source, target, random.choice((T, T, random.randint(1, T)))))
        rig.copy(*moves)
        rig.verifier.raise_failure()
        block = random.randrange(DEVICE)
        rig.corrupt(block, random.randrange(T), 0, 1)
        rig.copy((block, (block + 1) % DEVICE, T))
        with pytest.raises(VerificationError, match=f"is not what the copy from block {block} should leave"):
            rig.verifier.raise_failure()


@pytest.mark.parametrize(("source", "target", "tier"), [(0, DEVICE + 2, "host"), (DEVICE, 3, "device")])
@pytest.mark.parametrize("tokens", [2, T])
def test_a_copy_of_damaged_bytes_is_a_failure_that_names_the_target(
    source: int, target: int, tier: str, tokens: int
) -> None:
    rig = Rig()
    rig.verifier.write(blocks(0), 0, states(T))
    rig.copy((0, DEVICE, T))
    rig.corrupt(source, 1, layer=0, plane=1)
    rig.copy((source, target, tokens))
    with pytest.raises(VerificationError, match=f"{tier} block {target}, token 1, .* from block {source} ") as caught:
        rig.verifier.raise_failure()
    assert (caught.value.layer, caught.value.plane) == (0, 1)


def test_a_copy_of_tokens_that_nobody_wrote_is_a_failure() -> None:
    rig = Rig()
    rig.verifier.write(blocks(0), 0, states(2))
    rig.copy((0, 1, 2))
    rig.verifier.raise_failure()
    rig.copy((0, DEVICE, T))
    with pytest.raises(VerificationError, match="device block 0, token 2, .*copied before its KV was written"):
        rig.verifier.raise_failure()


def test_a_device_that_stops_half_way_is_followed_half_way() -> None:
    class Failing(CpuDevice):
        fails = False

        def copy_blocks(self, moves: Any, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
            super().copy_blocks(moves[:1] if self.fails else moves, stream, layers)
            if self.fails:
                raise DeviceError("out of order", completed=1)

    inner = Failing()
    rig = Rig(inner)
    rig.verifier.write(blocks(0, 1), 0, states(8))
    inner.fails = True
    with pytest.raises(DeviceError):
        rig.copy((0, 2, T), (1, 3, T))
    inner.fails = False
    assert rig.verifier.verified.partial_copies == 1
    rig.copy((2, 4, T))
    rig.verifier.raise_failure()
    rig.verifier.check(blocks(4), states(4), "was handed out as cached")
