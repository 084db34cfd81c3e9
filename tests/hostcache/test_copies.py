"""Copies between an engine's blocks and host blocks: exactly the bytes that were named, in every layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostTier, PagedKV, PoolClosed
from kvpool.device import CpuDevice
from kvpool.device.base import Stream
from kvpool.device.sim import RaceError, SimDevice
from kvpool.hostcache import HostCopies, HostSlots
from tests.hostcache.conftest import IDENTITY
from tests.hostcache.engines import LAYOUTS, SIZES, Paged, host_image, paged
from tests.waiting import at_once

BLOCK_BYTES, FIRST, HOST = 4096, 128, 8
Open = Callable[..., HostCopies]


@pytest.fixture
def open_copies() -> Iterator[Open]:
    """Opens copies over a tier of random bytes; no byte in front of ``first_byte`` may have changed in the end."""
    opened: list[tuple[HostTier, HostCopies, np.ndarray]] = []

    def build(kv: Any, per_host: int = 1, **options: Any) -> HostCopies:
        tier = HostTier(HOST, BLOCK_BYTES, identity=IDENTITY)
        tier.blocks[...] = np.random.default_rng(1).integers(0, 256, tier.blocks.shape, dtype=np.uint8)
        caches = [each.cache for each in kv] if isinstance(kv, list) else kv.cache
        options = {"blocks_per_host_block": per_host, "first_byte": FIRST, "device": "cpu"} | options
        opened.append((tier, HostCopies(tier, caches, **options), tier.blocks[:, :FIRST].copy()))
        return opened[-1][1]

    yield build
    for tier, copies, before in opened:
        np.testing.assert_array_equal(tier.blocks[:, :FIRST], before)
        copies.close()
        tier.close()


def filled(layout: str, **sizes: int) -> Paged:
    kv = paged(layout, **sizes)
    kv.fill(np.random.default_rng(2).integers(0, 256, kv.image().shape, dtype=np.uint8))
    return kv


@pytest.mark.parametrize("per_host", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_block_holds_its_engine_blocks_without_gaps(open_copies: Open, layout: str, per_host: int) -> None:
    for gap in (0, 7):
        kv = filled(layout, gap=gap)
        copies, blocks = open_copies(kv, per_host), [4, 5, 1, 8, 6]
        hosts = [6, 2, 3, 0, 7][: -(-len(blocks) // per_host)]
        before, gaps = copies.tier.blocks.copy(), [array.copy() for array in kv.arrays]
        done = copies.copy_in(blocks, hosts)
        expected, image = host_image(kv, kv.image(), blocks, per_host), kv.image()
        size = copies.group_bytes[0]
        assert done.done and done.nbytes == len(blocks) * size // per_host
        held = expected.shape[1] == size and len(blocks) % per_host == 0
        for row, host in enumerate(hosts if held else hosts[:-1]):
            np.testing.assert_array_equal(copies.tier.blocks[host, FIRST : FIRST + size], expected[row])
        others = [host for host in range(HOST) if host not in hosts]
        np.testing.assert_array_equal(copies.tier.blocks[others], before[others])
        np.testing.assert_array_equal(copies.tier.blocks[:, FIRST + size :], before[:, FIRST + size :])
        for array, old in zip(kv.arrays, gaps, strict=True):
            np.testing.assert_array_equal(array, old)
        kv.fill(0)
        targets = [0, 1, 2, 3, 7]
        copies.copy_out(targets, hosts)
        np.testing.assert_array_equal(kv.image()[:, :, targets], image[:, :, blocks])
        assert not kv.image()[:, :, [4, 5, 6, 8]].any()
        if gap:
            for array, old in zip(kv.arrays, gaps, strict=True):
                np.testing.assert_array_equal(array[..., -gap:], old[..., -gap:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_exact_and_counted_over_all_blocks_of_a_call(open_copies: Open, layout: str) -> None:
    """Against whole copies: only the tokens between the two numbers are another's afterwards."""
    kv, per_host = filled(layout), 2
    copies, blocks, hosts = open_copies(kv, per_host), [4, 5, 1, 8, 6], [6, 2, 3]
    image, width = kv.image(), kv.cache.tokens_per_block
    copies.copy_in(blocks, hosts)
    total = len(blocks) * width
    for skip in range(total + 1):
        for end in {skip, min(skip + 3, total), total}:
            kv.fill(0)
            ids = [-9 if i < skip // width else block for i, block in enumerate(blocks)]
            done = copies.copy_out(ids, hosts, skip_prefix_n_tokens=skip, n_tokens=end)
            expected = np.zeros_like(image)
            for t in range(skip, end):
                expected[:, :, blocks[t // width], t % width] = image[:, :, blocks[t // width], t % width]
            np.testing.assert_array_equal(kv.image(), expected)
            assert done.nbytes == (end - skip) * image[:, :, 0, 0].size
    kv.fill(image)
    before = copies.tier.blocks.copy()
    kv.fill(7)
    copies.copy_in(blocks, hosts, skip_prefix_n_tokens=width + 1, n_tokens=total - 1)
    kv.fill(0)
    copies.copy_out(blocks, hosts)
    expected = np.full_like(image, 7)
    expected[:, :, blocks[0]] = image[:, :, blocks[0]]
    expected[:, :, blocks[1], : 1 % width] = image[:, :, blocks[1], : 1 % width]
    expected[:, :, blocks[-1], -1] = image[:, :, blocks[-1], -1]
    if width > 1:
        np.testing.assert_array_equal(kv.image()[:, :, blocks], expected[:, :, blocks])
    assert (copies.tier.blocks != before).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_no_token_is_left_nothing_is_looked_at(open_copies: Open, layout: str) -> None:
    kv = filled(layout)
    copies, width, nowhere = open_copies(kv, 2), kv.cache.tokens_per_block, 10**9
    for token in range(3 * width + 1):
        for copy in (copies.copy_in, copies.copy_out):
            done = copy([nowhere] * 3, [nowhere] * 2, skip_prefix_n_tokens=token, n_tokens=token)
            assert (done.done, done.nbytes, done.fragments) == (True, 0, 0)


def test_a_block_below_zero_is_left_out_on_both_sides(open_copies: Open) -> None:
    kv = filled("L | P B T H D")
    copies, image = open_copies(kv, 2), kv.image()
    copies.copy_in([3, -1, 5, 6], [0, 1])
    kv.fill(0)
    copies.copy_out([-1, -1, 5, -1], [0, 1])
    expected = np.zeros_like(image)
    expected[:, :, 5] = image[:, :, 5]
    np.testing.assert_array_equal(kv.image(), expected)


def test_groups_of_layers_share_host_blocks_but_not_at_once(open_copies: Open) -> None:
    groups = [filled("L | P B T H D"), filled("L | B D", D=70)]
    copies, images = open_copies(groups, 2), [kv.image() for kv in groups]
    for group in (0, 1):
        copies.copy_in([1 + group, 5 + group], [group], group=group)
    for group, (kv, image) in enumerate(zip(groups, images, strict=True)):
        kv.fill(0)
        copies.copy_out([1 + group, 5 + group], [group], group=group)
        np.testing.assert_array_equal(kv.image()[:, :, [1 + group, 5 + group]], image[:, :, [1 + group, 5 + group]])
        assert copies.group_bytes[group] == image[:, :, :2].size


@pytest.mark.parametrize("parts", [2, 3, 100])
def test_a_copy_in_parts_of_the_layers_copies_the_same_bytes(open_copies: Open, parts: int) -> None:
    whole, cut = (open_copies(filled("L | P B T H D"), per_host=2) for _ in range(2))
    for copies, parts_of in ((whole, 1), (cut, parts)):
        copies.copy_in([3, 1, 0], [2, 0], skip_prefix_n_tokens=1, layer_parts=parts_of).wait()
    np.testing.assert_array_equal(whole.tier.blocks, cut.tier.blocks)
    assert whole.tier.blocks.any()
    with pytest.raises(ValueError, match="layer: .*"):
        cut.copy_out([3], [2], layer_parts=parts).follow(None, 99)
    with pytest.raises(ValueError, match="layer_parts"):
        cut.copy_out([3], [2], layer_parts=0)


def test_neighbours_are_copied_together(open_copies: Open) -> None:
    """As few fragments as can be: a page at a time, and pages that follow each other on both sides at once."""
    pages = filled("L | B D")
    assert open_copies(pages).copy_in([3, 1, 7], [0, 1, 2]).fragments == 3 * SIZES["L"]
    assert open_copies(pages, 4).copy_in([3, 4, 5, 7], [0]).fragments == 2 * SIZES["L"]
    assert open_copies(filled("| B L P T H D")).copy_in([3, 1], [0, 2]).fragments == 2
    exact = open_copies(filled("| B L P T H D"), first_byte=0)
    size = exact.group_bytes[0]
    tier = HostTier(4, size, identity=IDENTITY)
    with HostCopies(tier, filled("| B L P T H D").cache) as copies:
        assert copies.copy_in([3, 4, 5], [1, 2, 3]).fragments == 1, "host blocks that follow each other, too"


def test_large_copies_go_around_the_caches_and_are_the_same(open_copies: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.copy_plan.CACHED_BYTES_MAX", 0)
    for layout, size in (("L | P B T H D", 65), ("L | B D", 1300)):
        kv = filled(layout, D=size) if size > 100 else filled(layout, D=size, P=1)
        copies, image = open_copies(kv), kv.image()
        copies.copy_in([4, 2], [0, 1])
        kv.fill(0)
        copies.copy_out([4, 2], [0, 1])
        np.testing.assert_array_equal(kv.image()[:, :, [2, 4]], image[:, :, [2, 4]])


def test_threads_copy_at_the_same_time(open_copies: Open) -> None:
    kv = filled("L | P B T H D")
    copies, image = open_copies(kv), kv.image()

    def work(block: int) -> None:
        for _ in range(200):
            copies.copy_in([block], [block])
            copies.copy_out([block], [block])

    at_once(work, range(4))
    np.testing.assert_array_equal(kv.image(), image)


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    ([0], [0, 1], {}, "host_blocks: expected 1 for the 1 of blocks, got 2"),
    ([0, 1], [0], {}, "host_blocks: expected 2 for the 2 of blocks, got 1"),
    ([9], [0], {}, "blocks: expected blocks from 0 to 8, got 9"),
    ([0], [8], {}, "host_blocks: expected blocks from 0 to 7, got 8"),
    ([0], [-1], {}, "host_blocks: expected blocks from 0 to 7, got -1"),
    ([0.5], [0], {}, "blocks"),
    ([0], [[0]], {}, "host_blocks"),
    ([0], [0], {"skip_prefix_n_tokens": 5}, "skip_prefix_n_tokens: expected 0 to 4, got 5"),
    ([0], [0], {"skip_prefix_n_tokens": 3, "n_tokens": 2}, "skip_prefix_n_tokens: expected 0 to 2, got 3"),
    ([0], [0], {"n_tokens": 5}, "n_tokens: expected 0 to 4, got 5"),
    ([0], [0], {"group": 1}, "group: expected 0 to 0, got 1"),
    ([0], [0], {"stream": "mine"}, "stream: expected None, an integer handle"),
    ([0], HostSlots((0,), "00"), {}, "host_blocks: expected slots of this"),
]


def test_bad_arguments_copy_nothing(open_copies: Open) -> None:
    kv = filled("L | P B T H D")
    copies = open_copies(kv)
    before, image = copies.tier.blocks.copy(), kv.image()
    for blocks, hosts, options, message in WRONG:
        for call in (copies.copy_in, copies.copy_out):
            with pytest.raises((TypeError, ValueError), match=re.escape(message)):
                call(blocks, hosts, **options)
    np.testing.assert_array_equal(copies.tier.blocks, before)
    np.testing.assert_array_equal(kv.image(), image)


def test_a_target_is_named_once_and_must_be_writable(open_copies: Open) -> None:
    kv = filled("L | B D")
    copies = open_copies(kv)
    with pytest.raises(ValueError, match="host_blocks: expected different blocks to write, got one twice"):
        copies.copy_in([0, 1], [2, 2])
    with pytest.raises(ValueError, match="blocks: expected different blocks to write, got one twice"):
        copies.copy_out([1, 1], [2, 3])
    copies.copy_in([1, 1], [2, 3])
    copies.copy_out([0, 1], [2, 2])
    for array in kv.arrays:
        array.flags.writeable = False
    frozen = PagedKV.of([array[:, : SIZES["D"]] for array in kv.arrays], "L | B D")
    with HostCopies(copies.tier, frozen, first_byte=FIRST) as reading:
        reading.copy_in([0], [0])
        with pytest.raises(ValueError, match="caches: expected writable memory"):
            reading.copy_out([0], [0])


def test_slots_are_copied_and_their_ids_are_checked_again(open_copies: Open) -> None:
    class Own(HostSlots):
        def ids(self) -> Any:
            return [10**9]

    kv = filled("L | B D")
    copies = open_copies(kv)
    for slots, block in ((HostSlots, 3), (Own, 2)):
        copies.copy_in([0], slots((block,), copies.tier.fingerprint))
        np.testing.assert_array_equal(copies.tier.blocks[block, FIRST : FIRST + 5], kv.image()[0, 0, 0, 0, 0])
    for wrong, error in ((100, ValueError), ("x", TypeError)):
        with pytest.raises(error):
            copies.copy_in([0], HostSlots((wrong,), copies.tier.fingerprint))  # type: ignore[arg-type]


def test_engines_and_tiers_that_do_not_fit_are_refused() -> None:
    kv = filled("L | P B T H D")
    with HostTier(HOST, BLOCK_BYTES, identity=IDENTITY) as tier:
        for options, message in (
            ({"first_byte": BLOCK_BYTES - 10}, r"caches\[0\]: expected up to the 10 bytes of a host block .* got 240"),
            ({"first_byte": -1}, "first_byte: expected 0 to 4095, got -1"),
            ({"blocks_per_host_block": 0}, "blocks_per_host_block: expected 1 to 1048576, got 0"),
            ({"device": "gpu"}, "device: expected .*, got 'gpu'"),
        ):
            with pytest.raises(ValueError, match=message):
                HostCopies(tier, kv.cache, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="got some of the tier's"):
            HostCopies(tier, PagedKV.of(tier.blocks, "| B D"))
        for wrong, message in ((tier, tier.blocks), "caches"), ((tier.blocks, kv.cache), "tier"):
            with pytest.raises(TypeError, match=message):
                HostCopies(*wrong)


def test_closed_copies_refuse_and_leave_tier_and_device_as_they_are() -> None:
    kv, device = filled("L | B D"), CpuDevice()
    with HostTier(HOST, BLOCK_BYTES, identity=IDENTITY) as tier:
        copies = HostCopies(tier, kv.cache, device=device)
        done = copies.copy_in([0], [0])
        copies.close()
        copies.close()
        with pytest.raises(PoolClosed):
            copies.copy_in([0], [0])
        with pytest.raises(PoolClosed):
            done.follow(None)
        assert copies.closed and tier.blocks.shape == (HOST, BLOCK_BYTES)
        HostCopies(tier, kv.cache, device=device).close()
    with pytest.raises(PoolClosed):
        HostCopies(tier, kv.cache)


# ----------------------------------------
# Copies on streams that run late: what the copies order, and what the caller has to wait for.


BLOCKS, HOST_BLOCKS, PAGE, LAYERS = 6, 3, 8, 2
RUNS = [(seed, progress) for seed in range(4) for progress in (0.0, 0.5, 1.0)]


class Engine:
    """An engine with pages of its own on the sim device: its kernels fill blocks with a number, and read blocks."""

    def __init__(self, seed: int, progress: float) -> None:
        self.sim = SimDevice(seed, progress=progress)
        self.pages = [self.sim.allocate(BLOCKS * PAGE, "device").reshape(BLOCKS, PAGE) for _ in range(LAYERS)]
        self.cache = HostCache(HOST_BLOCKS, PAGE * LAYERS, identity=IDENTITY)
        self.tier = HostTier.of(self.cache)
        self.copies = HostCopies(self.tier, PagedKV.of(self.pages, "L | B D"), device=self.sim)
        self.stream: Any = self.sim.create_stream("engine")
        self.read: list[int] = []

    def write(self, block: int, value: int, stream: Stream | None = None) -> None:
        """A kernel that fills a block."""
        rows = [page[block] for page in self.pages]
        self.sim.launch(stream or self.stream, lambda: [row.fill(value) for row in rows], stores=rows)

    def look(self, block: int, stream: Stream | None = None) -> None:
        """A kernel that reads a block; what it saw is in ``read``, 0 for a block of several values."""
        rows = [page[block] for page in self.pages]

        def kernel() -> None:
            seen = {int(value) for row in rows for value in row}
            self.read.append(seen.pop() if len(seen) == 1 else 0)

        self.sim.launch(stream or self.stream, kernel, loads=rows)

    def store(self, key: bytes, block: int, publish: bool = True) -> None:
        taken = self.cache.reserve([key])
        done = self.copies.copy_in([block], taken.slots, stream=self.stream)
        if publish:
            done.wait()
        self.cache.publish([key])

    def close(self) -> None:
        self.sim.synchronize()
        self.copies.close()
        self.sim.close()
        self.cache.verify()


@pytest.fixture
def lab() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def build(seed: int = 0, progress: float = 0.5) -> Engine:
        opened.append(Engine(seed, progress))
        return opened[-1]

    yield build
    for engine in opened:
        if not engine.sim.closed:
            engine.close()


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_prompt_goes_down_and_comes_back(lab: Callable[..., Engine], seed: int, progress: float) -> None:
    """Written, stored, overwritten, loaded into another block, read: in any order that streams and events allow."""
    engine = lab(seed, progress)
    for i in range(5):
        key = bytes([65 + i])
        engine.write(0, 10 + i)
        engine.store(key, 0)
        engine.write(0, 99)  # the copy is done: the block may be used again
        with engine.cache.pin([key]) as lease:
            done = engine.copies.copy_out([1 + i], lease.slots, stream=engine.stream)
            done.follow(engine.stream)
            engine.look(1 + i)
            done.wait()
    engine.sim.synchronize()
    assert engine.read == [10, 11, 12, 13, 14]


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_copy_comes_after_the_work_on_the_stream_that_is_named(
    lab: Callable[..., Engine], seed: int, progress: float
) -> None:
    engine = lab(seed, progress)
    other = engine.sim.create_stream("another stream of the engine")
    engine.write(2, 7, other)
    taken = engine.cache.reserve([b"k"])
    engine.copies.copy_in([2], taken.slots, stream=other).follow(other)
    engine.write(2, 8, other)
    engine.sim.synchronize()
    np.testing.assert_array_equal(engine.tier.blocks[taken.blocks[0]], 7)
    engine.cache.publish([b"k"])


def race(engine: Engine, does: Callable[[Engine], None]) -> bool:
    """Whether the device finds a race."""
    does(engine)
    try:
        engine.sim.synchronize()
    except RaceError:
        return True
    return False


def load_by_layers(engine: Engine, waits: Callable[[int], bool]) -> None:
    """A kernel for each layer of a block that is loaded in two parts. Some wait for their layer."""
    engine.write(0, 5)
    engine.store(b"k", 0)
    with engine.cache.pin([b"k"]) as lease:
        done = engine.copies.copy_out([1], lease.slots, stream=engine.stream, layer_parts=2)
        for layer in range(LAYERS):
            if waits(layer):
                done.follow(engine.stream, layer)
            row = engine.pages[layer][1]
            engine.sim.launch(engine.stream, lambda row=row: engine.read.append(int(row.min())), loads=[row])
        done.wait()
        assert done.done


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_layer_is_there_once_its_part_is_waited_for(lab: Callable[..., Engine], seed: int, progress: float) -> None:
    engine = lab(seed, progress)
    load_by_layers(engine, lambda layer: True)
    engine.sim.synchronize()
    assert engine.read == [5, 5]


def overwrite_without_waiting(engine: Engine) -> None:
    engine.write(0, 1)
    engine.copies.copy_in([0], engine.cache.reserve([b"k"]).slots, stream=engine.stream)
    engine.write(0, 2)


def read_without_waiting(engine: Engine) -> None:
    engine.write(0, 1)
    engine.store(b"k", 0)
    with engine.cache.pin([b"k"]) as lease:
        engine.copies.copy_out([1], lease.slots, stream=engine.stream)
        engine.look(1)


def publish_before_it_is_written(engine: Engine) -> None:
    engine.write(0, 1)
    engine.store(b"k", 0, publish=False)
    with engine.cache.pin([b"k"]) as lease:
        engine.copies.copy_out([1], lease.slots, stream=engine.stream)


def unpin_before_it_is_read(engine: Engine) -> None:
    engine.write(0, 1)
    for key in (b"a", b"b", b"c"):
        engine.store(key, 0)
    with engine.cache.pin([b"a"]) as lease:
        engine.copies.copy_out([1], lease.slots, stream=engine.stream)
    engine.cache.touch([b"b", b"c"])
    engine.store(b"d", 0)


@pytest.mark.parametrize(
    "does",
    [
        overwrite_without_waiting,
        read_without_waiting,
        publish_before_it_is_written,
        unpin_before_it_is_read,
        lambda engine: load_by_layers(engine, lambda layer: False),
        lambda engine: load_by_layers(engine, lambda layer: layer == 0),
    ],
)
def test_what_the_caller_must_wait_for_is_a_race_without(
    lab: Callable[..., Engine], does: Callable[[Engine], None]
) -> None:
    """These are the rules of the documentation. The device finds each, so that an engine's tests find it too."""
    assert race(lab(progress=0.0), does)


@pytest.mark.parametrize("end", ["wait", "close"])
def test_a_copy_is_done_once_it_was_waited_for_or_its_copies_are_closed(lab: Callable[..., Engine], end: str) -> None:
    engine = lab(progress=0.0)
    engine.write(0, 5)
    gate = engine.sim.stall(engine.stream)
    taken = engine.cache.reserve([b"k"])
    done = engine.copies.copy_in([0], taken.slots, stream=engine.stream)
    assert not done.done
    gate.open()
    if end == "close":
        engine.copies.close()
    done.wait()
    assert done.done and (engine.tier.blocks[taken.blocks[0]] == 5).all()
    engine.cache.publish([b"k"])
