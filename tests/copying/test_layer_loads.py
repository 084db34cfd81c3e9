"""An engine computes with the first layers of a prefix while the others come from the host: when each layer may be
read, how early the first token comes, and what becomes of it when a copy is refused."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import BlockLayout, KVCacheManager, LayerGroup, OutOfBlocks, PoolClosed
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError
from kvpool.pool.prompts import LayerLoads
from tests.race.lab import Lab
from tests.race.test_races import X, Y, failing_lab, on_the_host

LAYERS, BLOCKS, WIDTH = 32, 64, 4
PROMPT = list(range(BLOCKS * WIDTH)) + [999]


class Timed(WrappedDevice):
    """Adds up when each stream would be done: copying all blocks takes a second, and events hold streams back."""

    def __init__(self, inner: SimDevice) -> None:
        super().__init__(inner)
        self.done = defaultdict[int, float](float)
        self.times: dict[DeviceEvent, float] = {}

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        super().copy_blocks(moves, stream, layers)
        self.done[stream.handle] += len(moves) / BLOCKS * len(layers.of(LAYERS)) / LAYERS

    def record(self, stream: Stream) -> DeviceEvent:
        event: DeviceEvent = super().record(stream)
        self.times[event] = self.done[stream.handle]
        return event

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        super().wait(stream, event)
        self.done[stream.handle] = max(self.done[stream.handle], self.times.get(event, 0.0))


def first_token(parts: int | None) -> float:
    """When the first token of a long hit on the host comes, if copying all of it takes 1 s and computing takes 1 s."""
    device = Timed(SimDevice(0, progress=0.0))
    layout = BlockLayout(LAYERS, 1, 2, WIDTH)
    with KVCacheManager(layout, device_blocks=BLOCKS + 1, host_blocks=BLOCKS, device=device) as cache:
        put_on_the_host(cache, PROMPT, [7] * len(PROMPT))
        device.synchronize()
        device.done.clear()
        device.times.clear()
        stream = device.create_stream("engine")
        loads = None if parts is None else cache.imports.layer_loads(stream, parts=parts)
        admitted = cache.add_sequence_batch([PROMPT], **({"stream": stream} if loads is None else {"loads": loads}))
        assert admitted.host_tokens.tolist() == [BLOCKS * WIDTH]
        for layer in range(LAYERS):
            if loads is not None:
                loads.wait(layer)
            device.done[stream.handle] += 1.0 / LAYERS
        done = device.done[stream.handle]
        cache.release(admitted.ids)
    device.inner.close()
    return done


def put_on_the_host(cache: KVCacheManager, prompt: list[int], other: list[int]) -> None:
    """Cache a prompt, and have another one push it out of the device."""
    sequence = cache.add_sequence(prompt)
    cache.commit(sequence)
    cache.release(sequence)
    cache.release(cache.add_sequence(other), store=False)


def loading(parts: int = 2, **options: Any) -> tuple[Lab, LayerLoads, NDArray[np.int64]]:
    """A pool that loads a prompt from the host, part by part: the loads, and the sequence."""
    lab = Lab(3, 2, **options)
    on_the_host(lab)
    loads = lab.cache.imports.layer_loads(lab.a, parts=parts)
    admitted = lab.cache.add_sequence_batch([lab.prompt(X)], loads=loads)
    assert admitted.host_tokens.tolist() == [2]
    return lab, loads, admitted.ids


@pytest.mark.parametrize(("parts", "seconds"), [(None, 2.0), (8, 1 + 1 / 8), (LAYERS, 1 + 1 / LAYERS)])
def test_the_first_token_of_a_long_hit_comes_after_the_longer_of_copy_and_compute(
    parts: int | None, seconds: float
) -> None:
    assert first_token(parts) == pytest.approx(seconds)


@pytest.mark.parametrize("waits", [2, 1, 0])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_layer_that_is_read_before_its_event_is_a_race(parts: int, waits: int) -> None:
    for seed in range(3):
        lab, loads, ids = loading(parts, seed=seed)
        for layer in range(2):
            if layer < waits:
                loads.wait(layer)
            lab.read_layers(int(ids[0]), X[:2], [layer])
        lab.cache.release(ids)
        races = lab.findings()
        assert bool(races) == (waits < min(2, parts)), f"seed {seed}: {races}"


@pytest.mark.parametrize("then", ["commit", "release", "another stream"])
def test_who_comes_after_an_engine_that_waited_for_no_layer_waits_for_all(then: str) -> None:
    lab, _, ids = loading()
    if then == "commit":
        lab.cache.commit(ids)
    if then == "release":
        lab.cache.release(ids)
        ids = lab.cache.add_sequence_batch([lab.prompt(X)], stream=lab.b).ids
    else:
        lab.cache.block_table(ids, lab.b)
    table = lab.cache.block_table(ids).dense()[0]
    lab.sim.launch(lab.b, lambda: None, reads=[(int(table[0]), 0, 2)])
    lab.cache.release(ids)
    assert not lab.findings()


@pytest.mark.parametrize("place", range(4))
def test_a_refused_part_is_copied_again_as_a_whole_and_what_is_refused_then_is_lost(place: int) -> None:
    lab, device = failing_lab(3, 2)
    on_the_host(lab)
    loads = lab.cache.imports.layer_loads(lab.a, parts=2)
    device.place = place  # of the moves: a part each, then (after a refusal) the whole
    ids = lab.cache.add_sequence_batch([lab.prompt(X)], loads=loads).ids
    refused, device.place = device.place < 0, None
    for layer in range(2):
        loads.wait(layer)
        lab.read_layers(int(ids[0]), X[:2], [layer])
    assert refused == (place < 2)
    assert lab.cache.stats().lost_blocks == 0
    lab.cache.release(ids)
    assert not lab.findings()


def test_a_load_that_is_refused_twice_raises_at_the_next_call_that_names_it() -> None:
    lab, device = failing_lab(3, 2)
    on_the_host(lab)
    device.fail_at = lambda call, index, move: True
    ids = lab.cache.add_sequence_batch([lab.prompt(X)], loads=lab.cache.imports.layer_loads(lab.a, parts=2)).ids
    device.fail_at = ()
    assert lab.cache.stats().lost_blocks == 1
    with pytest.raises(DeviceError, match="lost a block"):
        lab.cache.append_tokens(ids, [1])
    lab.cache.release(ids)
    assert not lab.findings()


def test_all_groups_of_layers_come_in_parts_of_their_own() -> None:
    sim = SimDevice(0, progress=0.3)
    groups = [LayerGroup(BlockLayout(layers, 1, 2, 2)) for layers in (3, 2)]
    with KVCacheManager(groups=groups, device_blocks=[3, 3], host_blocks=[2, 2], device=sim) as cache:
        put_on_the_host(cache, X, Y)
        loads = cache.imports.layer_loads(parts=3)
        admitted = cache.add_sequence_batch([X], loads=loads)
        assert admitted.host_tokens.tolist() == [2]
        for group, layers in ((0, 3), (1, 2)):
            (block, *_), *_ = cache.block_table(admitted.ids, group=group).dense().tolist()
            row = (block + cache.groups[group].first_device_block, 0, 2)
            for layer in range(layers):
                loads.wait(layer, group=group)
                sim.launch(None, lambda: None, reads=[row], layers=Layers(layer, layers))
        for layer, wrong, message in ((2, {"group": 1}, "layer: expected 0 to 1, got 2"), (0, {}, "group")):
            with pytest.raises(ValueError, match=message):
                loads.wait(layer, **wrong)
        cache.release(admitted.ids)
        sim.synchronize()
    assert not sim.races
    sim.close()


@pytest.mark.parametrize("prompts", [[], [[7] * 6]])
def test_an_admission_of_nothing_leaves_its_loads_to_no_later_one(prompts: list[list[int]]) -> None:
    lab = Lab(3, 2)
    on_the_host(lab)
    held = lab.cache.add_sequence_batch([[500]], stream=lab.b).ids
    loads = lab.cache.imports.layer_loads(lab.a, parts=2)
    assert not len(lab.cache.add_sequence_batch(prompts, loads=loads, allow_partial_batch=True).ids)
    ids = lab.cache.add_sequence_batch([X[:3]], stream=lab.a).ids
    lab.read_layers(int(ids[0]), X[:2], [0, 1])
    lab.cache.release([*ids, *held])
    assert not loads.events and not lab.findings()


def test_wrong_arguments_are_named_and_nothing_is_admitted() -> None:
    layout = BlockLayout(2, 1, 2, 2)
    caches = [KVCacheManager(layout, device_blocks=4, device="cpu") for _ in range(2)]
    with caches[0] as cache, caches[1] as other:
        for wrong, error in ((0, ValueError), ("2", TypeError), (True, TypeError)):
            with pytest.raises(error, match="parts"):
                cache.imports.layer_loads(parts=wrong)
        loads: Any
        for loads, stream in ((other.imports.layer_loads(), None), (cache.imports.layer_loads(), 0), (8, None)):
            with pytest.raises((TypeError, ValueError), match="loads"):
                cache.add_sequence_batch([X], loads=loads, stream=stream)
        loads = cache.imports.layer_loads()
        for layer in (-1, 2):
            with pytest.raises(ValueError, match="layer: .*"):
                loads.wait(layer)
        with pytest.raises(OutOfBlocks):
            cache.add_sequence_batch([[1] * 5, [2] * 5], loads=loads)
        assert cache.stats().device.used == 0 and loads.events == []
        loads.wait(1)
    with pytest.raises(PoolClosed):
        loads.wait(0)
    with pytest.raises(PoolClosed):
        cache.imports.layer_loads()
