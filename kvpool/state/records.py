"""The arrays that hold all state of a pool, their fields and their meaning, and the views of them that jitted functions
open.

A jitted verb gets one array, the *header*. It has addresses and sizes of all others, and scalars. Opening a view costs
a few loads; passing a dozen arrays from Python would cost more than most verbs. ``arrays`` owns the memory behind the
addresses.

Every group of layers has its own blocks and sequences, and one header, called ``group`` below. The headers are the
rows of one matrix, ``groups`` int64[groups, GROUP_COLUMNS].
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import address_of, array_at, compare_exchange, load, record_at, store

# -- guards ------------------------------------------------------------------------------------------------
#
# Named rules that tests take out one by one, to show that each is reached and that its proof bites. All are on in a
# pool. The field ``guards`` of the headers has a bit for each.

# Order of copies. X_AFTER_Y: before an access X to a block, its stream waits for earlier accesses Y of the block.
# "engine" is any stream of a caller, also a reader's.
COPY_READS_AFTER_COPIES, COPY_READS_AFTER_ENGINE = 1 << 0, 1 << 1
COPY_WRITES_AFTER_COPIES, COPY_WRITES_AFTER_ENGINE = 1 << 2, 1 << 3
ENGINE_READS_AFTER_COPIES, ENGINE_READS_AFTER_ENGINE = 1 << 4, 1 << 5
ENGINE_WRITES_AFTER_COPIES, ENGINE_WRITES_AFTER_ENGINE = 1 << 6, 1 << 7
LEVELS = 1 << 8  # copy ops of one batch that depend on each other are not enqueued together
OTHERS_BATCHES_TOO = 1 << 9  # a call returns when everything decided before it, by any thread, is enqueued
TICKET_ORDER = 1 << 10  # batches are enqueued in the order in which they were decided
READER_WAITS = 1 << 11  # the host gets a lease when the bytes have come, and a block to write to when nobody uses it
LOST_CONTENT_IS_FORGOTTEN = 1 << 12  # nobody finds content whose copy failed
# A block table on its way to the device is not overwritten before it was read. Nor is a block from which tokens move.
STAGED_BUFFERS_RETIRE_BY_EVENT, TOKENS_MOVE_BEFORE_REUSE = 1 << 13, 1 << 14

# Content. A key covers all tokens before its block, a hit compares more than a key, and a failed copy removes only its
# own content.
PARENT_IN_KEY, NAMESPACE_IN_KEY = 1 << 15, 1 << 16
NAMESPACE_AT_HIT, TOKENS_AT_HIT = 1 << 17, 1 << 18
TICKET_AT_LOSS = 1 << 19

# A call enqueues what it decides, unless no stream of a caller waits for that.
HANDED_OUT_IS_ENQUEUED = 1 << 22
ENGINE_READS_LAYER_AFTER_COPY = 1 << 21  # a wait for a layer that is loaded is a wait for all of its copies
UNPIN_AFTER_RELEASE = 1 << 20  # blocks that travel to another worker stay pinned until the transport has read them

GUARDS = {name.lower(): value for name, value in dict(globals()).items() if name.isupper() and isinstance(value, int)}
ALL_GUARDS = sum(GUARDS.values())

# -- fields ------------------------------------------------------------------------------------------------


def _numbers(names: str) -> np.dtype[Any]:
    """A record of int64 fields, so a row of an int64 matrix can be read as one."""
    return np.dtype([(name, "i8") for name in names.split()])


NONE, DEVICE, HOST = -1, 0, 1
DEFAULT_PRIORITY = 35
REFS = 0xFFFFFFFF
TIE_BITS = 20

# One block. Ids [0, device_blocks) are device blocks, the rest host blocks. One block represents a cached content (a
# key) in the index and among the children of its parent: its device copy or its host copy. `other_copy`
# links it to the other one.
BLOCK = np.dtype(
    [
        # What a release and an eviction read comes first: one cache line.
        ("ref_word", "i8"),  # references in the low half, pins in the high half; first, since atomics address it
        ("key0", "i8"),
        ("key1", "i8"),
        ("prev", "i4"),
        ("next", "i4"),
        ("chain", "i4"),  # next block in the same bucket of the index
        ("other_copy", "i4"),  # the copy of this content on the other tier
        ("list", "i2"),  # which list it is in; below zero: ~ of the list that it left, because somebody holds it
        ("filled", "i2"),  # tokens with known content
        ("uses", "u2"),  # sequences that computed or reused the content, saturating
        ("priority", "i1"),
        ("flags", "u1"),
        ("ttl", "i4"),  # ms from release, NONE = for ever
        ("heap", "i4"),  # place in the expiry heap, NONE = not in it
        # Where the policy looks at chains: that of the last release of a whole sequence that listed it, or NONE.
        ("owner", "i4"),
        ("used_at", "u4"),  # ms, modulo 2**32
        ("namespace", "i8"),
        ("ticket", "i8"),  # of the last copy op that wrote it, NONE = none has since it was taken
        ("parent0", "i8"),
        ("parent1", "i8"),
        ("deadline", "i8"),  # ms << TIE_BITS, and the order of arrival in the low bits; valid while `heap` is set
        ("child_prev", "i4"),
        ("child_next", "i4"),
        ("saved", "i8"),  # the dirty-block cursors that have read the content, as bits; the same in both copies
        # A block that a release gives back some places after this one: it is prefetched before its eviction.
        ("soon", "i4"),
        ("stored_at", "u4"),  # as used_at
    ],
    align=True,
)
# Flags, in this order. The block has a key; is cached under it; is cached as an unfull child; its bytes never came; is
# a source of the present call; some token has an extra id; represents its content in the index; has its key and waits
# for its bytes.
KEYED, PUBLISHED, TAIL, LOST, ONBOARDING, EXTRA, LINKED, PENDING = 1, 2, 4, 8, 16, 32, 64, 128
INDEXED = PUBLISHED | TAIL

SEQUENCE = np.dtype(
    [
        # Fields that every step reads come first.
        ("generation", "i4"),
        ("live", "i4"),  # 0, LIVE, RESERVED or SWAPPED
        ("failed", "i2"),  # a copy into one of its blocks failed
        ("private", "i2"),  # 1 = it publishes nothing
        ("mark", "i4"),  # scratch within one call
        ("length", "i4"),  # tokens
        ("committed", "i4"),  # tokens whose KV the engine has written
        ("blocks", "i4"),
        ("stream", "i4"),  # the last one on which the engine used it; NONE = the host has waited for everything
        ("forked", "i4"),  # 1 = another sequence may hold its last block too, which is checked before a write
        ("duplicates", "i4"),  # first block that may be a duplicate, NONE = none is
        ("priority", "i4"),  # of decoded blocks
        ("ttl", "i4"),
        ("namespace", "i8"),
        ("first", "i4"),  # blocks [SINKS, first) were given back, because its window has passed them
        ("kept", "i4"),  # in a recurrent group: the column of its prompt whose state is kept in any case
        ("cached", "i4"),  # reused tokens, with partial ones
        ("reused", "i4"),  # full blocks reused
        ("root0", "i8"),
        ("root1", "i8"),
        ("chain0", "i8"),  # in a recurrent group: key of the full committed columns
        ("chain1", "i8"),
        ("removals", "i8"),  # REMOVALS when its duplicates were last tried
        ("prompt", "i4"),  # how many of its tokens are of the prompt that it was added with
        ("from_host", "i4"),  # cached tokens in full blocks that were on the host
        ("dropped", "i4"),  # tokens that it rewound, and drafts that were rejected
        ("recomputed", "i4"),  # tokens whose blocks were cached already when it committed them; ends two cache lines
    ],
    align=True,
)

# A copy op has the columns of `Device.copy_blocks` and then its direction: device to host, host to device, or inside
# the device. Those inside the device need not wait for the slow link.
DIRECTION, DIRECTIONS = 4, 3
OFFLOAD, ONBOARD, WITHIN = range(DIRECTIONS)

# What a row is: a running sequence; a reservation, whose blocks a loader fills; or a sequence that is swapped out. They
# are bits, since a check may accept several.
LIVE, RESERVED, SWAPPED = 1, 2, 4

EVENT = np.dtype(
    # kind; tier; priority; 1 = continues the stored event before it; group; 1 = some token has an extra id
    [(name, "i1") for name in "kind tier priority joined group extra".split()]
    + [(name, "i8") for name in "key0 key1 parent0 parent1 namespace".split()],
    align=True,
)

# The header of a group: addresses of its arrays, sizes, notes of a call between its phases, and rules.
GROUP = _numbers(
    "blocks_at tokens_at extra_at lists_at index_at children_at heap_at sequences_at rows_at table_at copy_ops_at "
    "token_moves_at accesses_at events_at event_tokens_at event_extra_at counters_at histograms_at ring_at "
    "row_tokens_at row_extra_at swapped_at policy_at gone_at"
    " device_blocks blocks width buckets child_buckets sequences columns free_rows copy_ops token_moves accesses"
    " copy_ops_capacity token_moves_capacity accesses_capacity need stream ticket now offload_priority offload_reuse"
    " secret0 secret1 guards"
    " generation event_capacity removals has_extra clocks window sinks kind number block_tokens device_first "
    "host_first snapshot"
    " gone_capacity detail bound detail_group overflow stop returns cursors pending unsaved"
    " append_need append note_prompt name give_passed fill_encoded"
)
# `detail` is the subject of an error, mostly a place among the arguments, and `bound` the bound that it broke. In the
# first header, `detail_group` is the group of the error. `overflow` is how many contents the present admission still
# has to forget on the host, in any case. `device_first` or `host_first`, added to the id of a device or host block,
# gives its pool id. `block_tokens` are the tokens of a whole block for the device. `snapshot` is the number of blocks
# from one kept state to the next. `row_tokens` and `row_extra` have the ids of tokens for which a recurrent group has
# no blocks. `policy_at` is 0 where the policy needs no records of its own. `stop` and `returns` are hints of the engine
# for the sequences that it releases: why they stopped, and ENDS or the ms to their next turn, plus one. `cursors` has
# the open dirty-block cursors as bits, `pending` those that must read all content, and `unsaved` counts contents that
# the host evicted before one of the latter has read them. The last six are numbers of functions for `call`, where the
# group needs them.
ATTENTION, RECURRENT, CROSS = range(3)

# All groups share the ring of events. It has the number of the next event, of the oldest one that was not read, of the
# first one of this call, and of the first one that was never read; and the number of rows of all snapshots. A reader
# without a cursor adds it to the numbers.
# `gone` counts the contents that have left, the last of which `gone_of` has: half of its key, and the ms
# with the reason in the two lowest bits.
RING = _numbers("next read call seen snapshots gone")

# A request: addresses of its tokens (int32), keys (int64[full blocks, 2]), extra ids (int64, 0 = none) and retention
# ranges (int64[n, 4]: start, end, priority, ttl); ids and digests; the priority and ttl of its decoded tokens; whether
# it is a loader's; the encoder's length, for cross attention; whether it reuses nothing; whether it publishes nothing.
REQUEST = _numbers(
    "tokens_at length keys_at extra_at namespace root0 root1 ranges_at range_count priority ttl reserves encoder"
    " fresh private"
)
# The result of an admission for one request. The last fields are the admission's own notes between its phases.
OUTCOME = _numbers("id cached device_tokens host_tokens partial missed matched onboards source takes")

COUNTERS = tuple(
    (
        "prompt_tokens reused_device_tokens reused_host_tokens partial_tokens reused_device_blocks reused_host_blocks "
        "partial_blocks missed_blocks offloaded_blocks onboarded_blocks forgotten_device_blocks forgotten_host_blocks "
        "offloads_saved copied_blocks lost_blocks events_dropped redundant_dropped expired_blocks "
        "evicted_by_rule_blocks evicted_host_full_blocks passed_blocks forgotten_by_call_blocks appended_tokens "
        "dropped_tokens recomputed_tokens bypassed_tokens"
    ).split()
)
COUNTED = _numbers(" ".join(COUNTERS))
LIFETIME, IDLE, HOST_LIFETIME, HOST_IDLE, REUSE_GAP = range(5)
HISTOGRAMS = 5
BINS = 33  # bin 0 is below 1 ms, bin i covers [2**(i-1), 2**i) ms; after the bins comes the sum of all times

# Field numbers for Python, which passes int64 matrices: H.width is a column of headers.
H, N, R, OUT = (
    SimpleNamespace(**{name: i for i, name in enumerate(dtype.names or ())})
    for dtype in (GROUP, RING, REQUEST, OUTCOME)
)
GROUP_BYTES, REQUEST_BYTES, OUTCOME_BYTES = GROUP.itemsize, REQUEST.itemsize, OUTCOME.itemsize
GROUP_COLUMNS, REQUEST_COLUMNS, OUTCOME_COLUMNS = GROUP_BYTES // 8, REQUEST_BYTES // 8, OUTCOME_BYTES // 8

BUCKETS_MAX = 1 << 31  # a bucket number, 32 bits of a key times this, must fit in an int64

USES_MAX = 65535
PRIORITY_MAX = 100

LISTS_PER_TIER = 103
EMPTY, CLEAN = 101, 102
# rows LOWEST + tier of the lists array: no list of that tier below this priority has a block
LOWEST = 2 * LISTS_PER_TIER


@inline
def group_at(groups, g):
    """The header of group ``g``: a reference to row ``g`` of the matrix that verbs get."""
    return record_at(address_of(groups) + g * GROUP_BYTES, GROUP)


@inline
def request_at(requests, r):
    return record_at(address_of(requests) + r * REQUEST_BYTES, REQUEST)


@inline
def outcome_at(out, r):
    """The record of request ``r`` in one group. ``out`` is int64[n, OUTCOME]."""
    return record_at(address_of(out) + r * OUTCOME_BYTES, OUTCOME)


@inline
def blocks_of(group):
    return array_at(group.blocks_at, (group.blocks,), BLOCK)


@inline
def tokens_of(group):
    return array_at(group.tokens_at, (group.blocks, group.width), np.int32)


@inline
def extra_of(group):
    """Extra ids, int64[blocks, T]. No row may be touched unless ``has_extra``."""
    return array_at(group.extra_at, (group.blocks, group.width), np.int64)


@inline
def no_extra(group):
    """Extra ids of tokens that have none: int64[0]."""
    return extra_of(group)[0][:0]


@inline
def extra_in(group, b):
    """The extra ids of block ``b``, int64[T], or int64[0] if no token has one."""
    return extra_of(group)[b] if blocks_of(group)[b].flags & EXTRA else no_extra(group)


@inline
def lists_of(group):
    return array_at(group.lists_at, (LOWEST + 2, 3), np.int32)


@inline
def index_of(group):
    return array_at(group.index_at, (group.buckets,), np.int32)


@inline
def children_of(group):
    return array_at(group.children_at, (group.child_buckets,), np.int32)


@inline
def heap_of(group):
    return array_at(group.heap_at, (group.blocks + 1,), np.int32)


@inline
def sequences_of(group):
    return array_at(group.sequences_at, (group.sequences,), SEQUENCE)


@inline
def rows_of(group):
    return array_at(group.rows_at, (group.sequences,), np.int32)


@inline
def table_of(group):
    return array_at(group.table_at, (group.sequences, group.columns), np.int32)


@inline
def swapped_of(group):
    """The host blocks of sequences that are swapped out, in rows like those of the table. Rows of other sequences mean
    nothing."""
    return array_at(group.swapped_at, (group.sequences, group.columns), np.int32)


@inline
def row_tokens_of(group):
    """The tokens of sequences in a recurrent group, from the first full column that is not committed."""
    return array_at(group.row_tokens_at, (group.sequences, group.columns * group.width), np.int32)


@inline
def row_extra_of(group):
    """The extra ids of ``row_tokens_of``. No row may be touched unless ``has_extra``."""
    return array_at(group.row_extra_at, (group.sequences, group.columns * group.width), np.int64)


@inline
def copy_ops_of(group):
    return array_at(group.copy_ops_at, (group.copy_ops_capacity, 5), np.int64)


@inline
def token_moves_of(group):
    """Rows (stream, row of the sequence, source slot, target slot). Those of a sequence follow each other."""
    return array_at(group.token_moves_at, (group.token_moves_capacity, 4), np.int64)


@inline
def accesses_of(group):
    return array_at(group.accesses_at, (group.accesses_capacity, 3), np.int64)


@inline
def events_of(group):
    return array_at(group.events_at, (group.event_capacity,), EVENT)


@inline
def gone_of(group):
    return array_at(group.gone_at, (group.gone_capacity, 2), np.int64)


@inline
def ring_of(group):
    return record_at(group.ring_at, RING)


@inline
def counters_of(group):
    return record_at(group.counters_at, COUNTED)


@inline
def histograms_of(group):
    return array_at(group.histograms_at, (HISTOGRAMS, BINS + 1), np.int64)


@inline
def change_word(blocks, b, refs, pins):
    """Add to both halves of a block's reference word at once. Returns the new word. If a half would fall below zero,
    returns -1 and changes nothing."""
    ref_words = blocks["ref_word"]
    while True:
        old = load(ref_words, b)
        new_refs, new_pins = (old & REFS) + refs, (old >> 32) + pins
        if new_refs < 0 or new_pins < 0:
            return -1
        new = (new_pins << 32) | new_refs
        if compare_exchange(ref_words, b, old, new):
            return new


@inline
def add_reference(blocks, b):
    """Add a reference to a block, under the state lock. Returns the new word.

    Only a holder may change the reference word of a block without the lock. If the word is zero, nobody holds the
    block, so no exchange is needed.
    """
    ref_words = blocks["ref_word"]
    if load(ref_words, b) == 0:
        store(ref_words, b, 1)
        return 1
    return change_word(blocks, b, 1, 0)


@inline
def drop_reference(blocks, b):
    """Drop a reference of the caller, under the state lock. Returns the new word. The last hold needs no exchange
    either."""
    ref_words = blocks["ref_word"]
    if load(ref_words, b) == 1:
        store(ref_words, b, 0)
        return 0
    return change_word(blocks, b, -1, 0)


@inline
def pool_id(group, b):
    """The pool id of a block of a group."""
    return b + (group.device_first if b < group.device_blocks else group.host_first)


@jit
def place_of(groups, b):
    """The group of a block and its id there, from its pool id. (NONE, NONE) for an id outside the pool."""
    for g in range(len(groups)):
        group = group_at(groups, g)
        if group.device_first <= b < group.device_first + group.device_blocks:
            return g, b - group.device_first
        if group.host_first + group.device_blocks <= b < group.host_first + group.blocks:
            return g, b - group.host_first
    return NONE, NONE


# -- refusals --------------------------------------------------------------------------------------------


(
    SHORT_OF_BLOCKS,
    SHORT_OF_SEQUENCES,
    UNKNOWN,
    DUPLICATE,
    FAILED,
    TOO_LONG,
    BAD_COUNT,
    BAD_TOTAL,
    PASSED,
    BAD_DRAFTS,
    BAD_ACCEPTED,
    SEVERAL_STREAMS,
    TOO_LARGE,
    TOO_SMALL,
    NOT_FOUND,
    SHORT_OF_HOST_BLOCKS,
    IS_SWAPPED,
    NOT_SWAPPED,
    NEVER_FITS,
) = range(-1, -20, -1)
