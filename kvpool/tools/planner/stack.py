"""LRU stack distances of the blocks of requests: a bitmap over time counts which blocks were touched since. And what
Belady's rule finds of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Array, Int32s, Int64s, Uint64s
from kvpool.common.jit import jit
from kvpool.state.policies.policy import nth_released
from kvpool.tools.replay.content import mixed

BLOCKS, NOW, LIVE, RUNS, USED, REQUESTS, COUNTS = range(7)
"""Places in ``StackTables.counts``: distinct blocks with a key, the next position in time, and the bits that are set.
Then, of all requests, the runs, the sampled blocks used, and the requests."""
FOLLOWED, FOUND, COLUMNS = 4, 5, 6
"""Columns of ``StackTables.requests``."""

STEPS = 128
"""Buckets of a coarse histogram for each doubling."""
BUCKETS = STEPS * 36
GROUPS = 32
"""The sample has so many parts. Their differences give its error."""
_START = 1 << 12
_LISTS = {
    **dict.fromkeys(("seen", "hits", "parent"), np.int32),
    **dict.fromkeys(("last", "distances", "again"), np.int64),
    **dict.fromkeys(("keys", "bits"), np.uint64),
    "times": np.float64,
}
"""The types of the tables of one dimension that begin with this length."""
_BLOCKS_MAX = 2**31 - 1

REQUEST_EDGES = (2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000)
SECOND_EDGES = (1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1_800.0, 3_600.0, 10_800.0, 21_600.0, 86_400.0, 604_800.0)
"""The upper edges of the bars in the histogram of reuse gaps."""

_ONE, _ALL = np.uint64(1), np.uint64(2**64 - 1)
_M1, _M2 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_M4, _MUL = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_S2, _S4, _S32, _S56 = (np.uint64(n) for n in (2, 4, 32, 56))
_LOW = np.uint64(63)


class StackTables(NamedTuple):
    """All tables about the blocks seen so far. Blocks with a key are numbered in the order of their first use.

    Time is a position in `bits`: each block that was seen has a bit at its last use. `tree` is a Fenwick tree over the
    set bits of words.
    """

    slots: Int32s
    """A hash table by key with open addressing, a power of two long. It has block numbers, -1 for an empty slot."""
    keys: Uint64s
    last: Int64s
    """Time of the last use, by number."""
    seen: Int32s
    """Request of the last use."""
    hits: Int32s
    """How often it would have been reused with unbounded memory."""
    parent: Int32s
    """The sampled block before it, or -1."""
    bits: Uint64s
    tree: Int32s
    distances: Int64s
    """[distance]: lookups that hit if the capacity is at least `distance` blocks."""
    again: Int64s
    """[distance]: the same for blocks that were used before but are not looked up, since their tokens are computed."""
    runs: Int64s
    """[runs, 3]: a request, a distance, and how many of its lookups one after another were found at that distance and
    the ones that follow it."""
    groups: Int64s
    """[groups, bucket of `bucket_of`]: the same for each group. A group is a part of the sampled blocks, by key."""
    cold: Int64s
    """[groups]: lookups of blocks never seen before."""
    coarse: Int64s
    """[tenants, bucket of `bucket_of`]: the same for each tenant."""
    gaps: Int64s
    """[2, 16]: reuses by the number of requests since the last use, with a place for each of `REQUEST_EDGES` and one
    beyond them, and by the seconds."""
    times: npt.NDArray[np.float64]
    """Seconds, by request. NaN if the trace has no times."""
    requests: Int64s
    """[requests, COLUMNS]: tokens of the prompt and of the answer, the tenant, the distinct blocks with a key that came
    before, the sampled blocks that were looked up, and those with a key."""
    counts: Int64s


class UsedBlocks(NamedTuple):
    """One request. Block k has the content of the `ids` that cover its `tokens_per_block` tokens, after all tokens
    before."""

    tokens_per_id: int
    tokens_per_block: int
    lookups: int
    """How many blocks, from the first on, may be reused."""
    keyed: int
    """How many blocks, from the first on, another request can repeat."""
    full: int
    """All full blocks. Those after the keyed ones are never repeated."""
    seed: np.uint64
    """The seed of the namespace."""
    threshold: np.uint64
    """A block is sampled if the upper half of its key is below this."""
    request: int
    tenant: int


@jit
def ones(x):
    """How many bits of a word are set."""
    x = x - ((x >> _ONE) & _M1)
    x = (x & _M2) + ((x >> _S2) & _M2)
    x = (x + (x >> _S4)) & _M4
    return np.int64((x * _MUL) >> _S56)


@jit
def add(tree, word, change):
    """Add `change` to the number of set bits of a word."""
    at = word + 1
    while at < len(tree):
        tree[at] += change
        at += at & -at


@jit
def later(tables, time):
    """Blocks whose last use came after `time`."""
    word = time >> 6
    below = _ALL >> np.uint64(63 - (time & 63))
    count = ones(tables.bits[word] & below)
    while word > 0:
        count += tables.tree[word]
        word -= word & -word
    return tables.counts[LIVE] - count


@jit
def bucket_of(distance):
    """The bucket of a distance of at least 1. Buckets are exact below 2 * STEPS; after that, each doubling has STEPS
    buckets."""
    shift = 0
    while distance >> shift >= 2 * STEPS:
        shift += 1
    return shift * STEPS + (distance >> shift)


@jit
def place_of(value, edges):
    """How many of the ascending edges a value has reached."""
    place = 0
    while place < len(edges) and value >= edges[place]:
        place += 1
    return place


@jit
def slot_of(tables, key):
    """The slot that has a key, or the one where it belongs."""
    mask = len(tables.slots) - 1
    slot = np.int64(key & np.uint64(mask))
    while tables.slots[slot] >= 0 and tables.keys[tables.slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@jit
def key_of(ids, access, block, parent):
    """The key of a block, from its content and its parent's key."""
    first = block * access.tokens_per_block
    key = parent
    for at in range(first // access.tokens_per_id, (first + access.tokens_per_block - 1) // access.tokens_per_id + 1):
        key = mixed(key ^ mixed(ids[at]))
    # One id can cover several blocks. The parent's key tells them apart.
    return key


@jit
def count_hit(tables, access, number, distance, group):
    """Add one reuse to the histograms."""
    tables.distances[distance] += 1
    tables.groups[group, bucket_of(distance)] += 1
    tables.coarse[access.tenant, bucket_of(distance)] += 1
    before = tables.seen[number]
    tables.gaps[0, place_of(access.request - before, REQUEST_EDGES)] += 1
    waited = tables.times[access.request] - tables.times[before]
    if waited >= 0:
        tables.gaps[1, place_of(waited, SECOND_EDGES)] += 1
    tables.hits[number] += 1


@jit
def count_run(tables, access, distance, goes_on):
    """Add one found block to the last run, or begin another."""
    if not goes_on:
        run = tables.runs[tables.counts[RUNS]]
        run[0] = access.request
        run[1] = distance
        run[2] = 0
        tables.counts[RUNS] += 1
    tables.runs[tables.counts[RUNS] - 1, 2] += 1


@jit
def look_up(tables, access, ids, found):
    """Count the distances of a request's blocks. Puts their numbers into `found` and returns how many there are.

    All distances are from the time before the request: a request claims what it finds before it takes new blocks.
    """
    counts = tables.counts
    key = access.seed
    number = np.int64(-1)
    distance = np.int64(0)
    count = 0
    groups = np.uint64(len(tables.cold))
    for block in range(access.keyed):
        key = key_of(ids, access, block, key)
        if key >> _S32 >= access.threshold:
            continue
        group = np.int64((mixed(key) >> _S32) % groups)
        before, number = number, number + 1
        # A child that came in the same request as its parent has the next number.
        if number >= counts[BLOCKS] or tables.keys[number] != key:
            slot = slot_of(tables, key)
            number = np.int64(tables.slots[slot])
            if number < 0:
                number = counts[BLOCKS]
                tables.slots[slot] = number
                tables.keys[number], tables.last[number] = key, -1
                tables.hits[number], tables.parent[number] = 0, before
                counts[BLOCKS] += 1
        last = tables.last[number]
        goes_on = last >= 0 and before >= 0 and tables.last[before] == last + 1
        if last >= 0:
            distance = distance + 1 if goes_on else later(tables, last) + 1
        if block >= access.lookups:
            tables.again[distance] += 1 if last >= 0 else 0
        else:
            tables.requests[access.request, FOLLOWED] += 1
            if last < 0:
                tables.cold[group] += 1
            else:
                count_hit(tables, access, number, distance, group)
                count_run(tables, access, distance, goes_on)
        found[count] = number
        count += 1
    return count


@jit
def touch(tables, access, found, count):
    """Make the request's blocks the last used ones, in the order in which a release gives them to the policy."""
    bits = tables.bits
    tree = tables.tree
    counts = tables.counts
    word, removed = np.int64(-1), 0
    for at in range(count - 1, -1, -1):
        last = tables.last[found[at]]
        if last >= 0:
            if last >> 6 != word:
                if removed:
                    add(tree, word, -removed)
                word, removed = last >> 6, 0
            bits[word] &= ~(_ONE << (np.uint64(last) & _LOW))
            removed += 1
            counts[LIVE] -= 1
    if removed:
        add(tree, word, -removed)
    begin = counts[NOW]
    end = begin + count
    for block in range(access.keyed, access.full):
        if mixed(mixed(access.seed ^ np.uint64(access.request)) ^ np.uint64(block)) >> _S32 < access.threshold:
            end += 1
    first_keyed = end - count
    for at in range(count):
        number = found[at]
        tables.last[number] = first_keyed + nth_released(at, count)
        tables.seen[number] = access.request
    set_range(bits, tree, begin, end)
    counts[LIVE] += end - begin
    counts[USED] += end - begin
    counts[NOW] = end


@jit
def set_range(bits, tree, begin, end):
    """Set the bits `[begin, end)`, which are clear."""
    while begin < end:
        word = begin >> 6
        stop = min(end, (word + 1) << 6)
        width = stop - begin
        bits[word] |= (_ALL >> np.uint64(64 - width)) << (np.uint64(begin) & _LOW)
        add(tree, word, width)
        begin = stop


@jit
def record(tables, access, ids, found):
    """Look up and touch the blocks of the next request. Every table must have room for all of them, and ``found`` for
    the numbers of those with a key."""
    count = look_up(tables, access, ids, found)
    touch(tables, access, found, count)
    tables.requests[access.request, FOUND] = count
    tables.counts[REQUESTS] += 1


@jit
def compact(tables, bits, tree):
    """Renumber the last uses without gaps, into clear `bits` and `tree`, which may be longer."""
    before = 0
    for word in range(len(tables.bits)):
        # The old tree is no longer needed: its words now hold the number of set bits before each word.
        tables.tree[word] = before
        before += ones(tables.bits[word])
    for number in range(tables.counts[BLOCKS]):
        last = tables.last[number]
        below = (_ONE << (np.uint64(last) & _LOW)) - _ONE
        tables.last[number] = tables.tree[last >> 6] + ones(tables.bits[last >> 6] & below)
    set_range(bits, tree, np.int64(0), tables.counts[LIVE])
    tables.counts[NOW] = tables.counts[LIVE]


@jit
def fill_slots(slots, keys, count):
    """Put the first `count` keys into empty slots."""
    mask = len(slots) - 1
    for number in range(count):
        slot = np.int64(keys[number] & np.uint64(mask))
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = number


@jit
def trace_back(hits, parent, head, depth):
    """For each block the first block of its run, and its place in its chain. A run is a part of a chain that is reused
    together."""
    for number in range(len(hits)):
        before = parent[number]
        depth[number] = 0 if before < 0 else depth[before] + 1
        # Two children cannot both be reused as often as their parent.
        head[number] = head[before] if before >= 0 and hits[before] == hits[number] else number


# -- Belady's rule ---------------------------------------------------------------------------------


@jit
def follow(blocks, later, following):
    """Put the place of the next use of each block into ``following``. ``later`` has a place beyond the end for each."""
    for place in range(len(blocks) - 1, -1, -1):
        following[place] = later[blocks[place]]
        later[blocks[place]] = place


@jit
def belady(following, counted, capacity, held, heap):
    """The hits of ``min_hits``. A block that is held is known by the place of its next use, in ``held`` and in
    ``heap``, the last use first. Places that have passed stay below all others."""
    size = 0
    blocks = 0
    hits = 0
    for place in range(len(following)):
        if held[place]:
            hits += counted[place]
            blocks -= 1
        if following[place] < len(following):
            held[following[place]] = 1
            push(heap, size, following[place])
            size, blocks = size + 1, blocks + 1
            if blocks > capacity:
                held[heap[0]] = 0
                size, blocks = size - 1, blocks - 1
                pop(heap, size)
    return hits


@jit
def push(heap, size, value):
    """Add a value to a heap of ``size`` values, the largest first."""
    at = size
    while at > 0 and heap[(at - 1) // 2] < value:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = value


@jit
def pop(heap, size):
    """Remove the first value of a heap, of which ``size`` values stay."""
    value, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


# -- the tables ------------------------------------------------------------------------------------


def new_tables(groups: int) -> StackTables:
    """Tables about nothing yet, of a sample in so many groups."""
    return StackTables(
        slots=np.full(2 * _START, -1, np.int32),
        tree=np.zeros(_START + 1, np.int32),
        runs=np.zeros((_START, 3), np.int64),
        groups=np.zeros((groups, BUCKETS), np.int64),
        cold=np.zeros(groups, np.int64),
        coarse=np.zeros((1, BUCKETS), np.int64),
        requests=np.zeros((_START, COLUMNS), np.int64),
        gaps=np.zeros((2, 16), np.int64),
        counts=np.zeros(COUNTS, np.int64),
        **{name: np.zeros(_START, dtype) for name, dtype in _LISTS.items()},
    )


def with_room(tables: StackTables, full: int, request: int, tenant: int) -> StackTables:
    """The tables with room for another request, of so many full blocks; those given stay as they are. Raises
    OverflowError beyond 2**31 - 1 blocks."""
    counts = tables.counts
    blocks, live = int(counts[BLOCKS]) + full, int(counts[LIVE]) + full
    if live > _BLOCKS_MAX:
        raise OverflowError(f"more than {_BLOCKS_MAX} distinct blocks: follow a smaller share of them")
    needed = {
        **dict.fromkeys(("keys", "last", "seen", "hits", "parent"), blocks),
        **dict.fromkeys(("distances", "again"), live + 1),
        "runs": int(counts[RUNS]) + full,
        "coarse": tenant + 1,
        **dict.fromkeys(("times", "requests"), request + 1),
    }
    short = {name: length for name, length in needed.items() if length > len(getattr(tables, name))}
    if short:
        tables = tables._replace(**{name: _longer(getattr(tables, name), length) for name, length in short.items()})
    if 2 * blocks > len(tables.slots):
        slots = np.full(_power_of_two(4 * blocks), -1, np.int32)
        fill_slots(slots, tables.keys, counts[BLOCKS])
        tables = tables._replace(slots=slots)
    if int(counts[NOW]) + full > 64 * len(tables.bits):
        words = max(len(tables.bits), _power_of_two(2 * live) // 64)
        bits, tree = np.zeros(words, np.uint64), np.zeros(words + 1, np.int32)
        # What it writes is copied before: the caller's tables stay as they are, if an exception of a handler comes.
        tables = tables._replace(tree=tables.tree.copy(), last=tables.last.copy(), counts=tables.counts.copy())
        compact(tables, bits, tree)
        tables = tables._replace(bits=bits, tree=tree)
    return tables


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _longer(array: Array, length: int) -> Array:
    result = np.zeros((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
