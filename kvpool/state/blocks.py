"""The arrays that hold all state of a pool, their fields and their meaning, and the views of them that jitted functions take.

A jitted verb gets one array, the *header*: addresses and sizes of all others, and the scalars. Opening a view costs a few loads;
passing a dozen arrays from Python would cost more than most verbs. ``states`` owns the memory behind the addresses.

Every group of layers has blocks, sequences and a header of its own: ``h`` below. Headers are the rows of one matrix, ``heads``
int64[groups, HEADER].
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.atomics import array_at, compare_exchange, load, store

NONE = -1
DEVICE, HOST = 0, 1
DEFAULT_PRIORITY = 35
REFS = 0xFFFFFFFF
TIE_BITS = 20

# One block. Ids [0, device_blocks) are device blocks, the rest host blocks. A content (a key) that is cached is represented in
# the index and among the children of its parent by one block, its device or its host copy; `twin` links it to the other copy.
BLOCK = np.dtype(
    [
        ("word", "i8"),  # refs in the low half, pins in the high half; first, since atomics address it
        ("key0", "i8"),
        ("key1", "i8"),
        ("namespace", "i8"),
        ("prev", "i4"),
        ("next", "i4"),
        ("chain", "i4"),  # next block in the same bucket of the index
        ("twin", "i4"),  # the copy of this content on the other tier
        ("list", "i2"),  # which list it is in, NONE = held
        ("filled", "i2"),  # tokens with known content
        ("uses", "u2"),  # sequences that computed or reused the content, saturating
        ("priority", "i1"),
        ("flags", "u1"),
        ("ticket", "i8"),  # of the move that wrote it last, NONE = no move did since it was taken
        ("parent0", "i8"),
        ("parent1", "i8"),
        ("deadline", "i8"),  # ms << TIE_BITS, and the order of arrival below; meaningful while `heap` is set
        ("child_prev", "i4"),
        ("child_next", "i4"),
        ("ttl", "i4"),  # ms from release, NONE = for ever
        ("heap", "i4"),  # place in the expiry heap, NONE = not there
        ("stored_at", "u4"),  # ms, modulo 2**32
        ("used_at", "u4"),
    ],
    align=True,
)
# flags: has a key; is cached under it; is cached as an unfull child; its bytes never came; is a source of the call under way; some
# token has an extra id; represents its content in the index
KEYED, PUBLISHED, TAIL, LOST, ONBOARDING, EXTRA, LINKED = 1, 2, 4, 8, 16, 32, 64
INDEXED = PUBLISHED | TAIL

SEQUENCE = np.dtype(
    [
        # What every step reads comes first.
        ("generation", "i4"),
        ("live", "i4"),  # 0, LIVE or RESERVED
        ("failed", "i4"),  # a block of it was lost on the way
        ("mark", "i4"),  # scratch within one call
        ("length", "i4"),  # tokens
        ("committed", "i4"),  # tokens whose KV the engine has written
        ("blocks", "i4"),
        ("stream", "i4"),  # which the engine used for it last; NONE = the host has waited for everything
        ("forked", "i4"),  # 1 = its last block may be another's too, and is looked at before it is written
        ("duplicates", "i4"),  # first block that may be a duplicate, NONE = none is
        ("priority", "i4"),  # of decoded blocks
        ("ttl", "i4"),
        ("namespace", "i8"),
        ("first", "i4"),  # blocks [SINKS, first) were given back: its window has passed them
        ("kept", "i4"),  # in a recurrent group: the column of its prompt whose state is kept, whatever the rule
        ("cached", "i4"),  # reused tokens, partial ones included
        ("reused", "i4"),  # full blocks reused
        ("root0", "i8"),
        ("root1", "i8"),
        ("chain0", "i8"),  # in a recurrent group: key of the full committed columns
        ("chain1", "i8"),
        ("removals", "i8"),  # REMOVALS when its duplicates were last tried
        ("unused", "i8", 2),  # two lines of a cache, the first of which has what every step reads
    ],
    align=True,
)

# A row of the engine's, or one whose blocks a loader fills: nobody else may name that.
LIVE, RESERVED = 1, 2

EVENT = np.dtype(
    [
        ("kind", "i1"),
        ("tier", "i1"),
        ("priority", "i1"),
        ("joined", "i1"),  # 1 = continues the stored event before it
        ("group", "i1"),
        ("extra", "i1"),  # 1 = some token has an extra id
        ("key0", "i8"),
        ("key1", "i8"),
        ("parent0", "i8"),
        ("parent1", "i8"),
        ("namespace", "i8"),
    ],
    align=True,
)

# Header: addresses first, then sizes and scalars.
(
    A_BLOCKS, A_TOKENS, A_EXTRA, A_LISTS, A_INDEX, A_CHILDREN, A_HEAP, A_SEQUENCES, A_ROWS, A_TABLE, A_MOVES, A_TOKEN_MOVES,
    A_ACCESSES, A_EVENTS, A_EVENT_TOKENS, A_EVENT_EXTRA, A_COUNTERS, A_HISTOGRAMS, DEVICE_BLOCKS, BLOCKS, WIDTH, BUCKETS,
    CHILD_BUCKETS, SEQUENCES, COLUMNS, FREE_ROWS, MOVES, MOVES_CAPACITY, TOKEN_MOVES, TOKEN_MOVES_CAPACITY, ACCESSES,
    ACCESSES_CAPACITY, STREAM, TICKET, NOW, OFFLOAD_PRIORITY, OFFLOAD_REUSE, SECRET0, SECRET1, GUARD, GENERATION, EVENTS, A_RING,
    REMOVALS, HAS_EXTRA, SHELVED, DETAIL, DETAIL2, DETAIL_GROUP, WINDOW, SINKS, KIND, GROUP, BLOCK_TOKENS, DEVICE_FIRST, HOST_FIRST,
    SNAPSHOT, A_ROW_TOKENS, A_ROW_EXTRA, HEADER,
) = range(60)  # fmt: skip
# DETAIL_GROUP, in the first header only, is the group that an error is about. DEVICE_FIRST or HOST_FIRST, added to the id of a device or
# host block, gives the id that all behind the state knows it by. BLOCK_TOKENS are the tokens of a whole block for the device; SNAPSHOT, the
# blocks from one kept state to the next. A_ROW_TOKENS and A_ROW_EXTRA have the ids of tokens that a recurrent group has no blocks for. The
# ring of events is common to all groups; A_RING has its numbers:
EVENT_NEXT, EVENT_READ, CALL_EVENT, RING = range(4)
ATTENTION, RECURRENT, CROSS = range(3)

COUNTERS = (
    "prompt_tokens", "reused_device_tokens", "reused_host_tokens", "partial_tokens", "reused_device_blocks", "reused_host_blocks",
    "partial_blocks", "missed_blocks", "offloaded_blocks", "onboarded_blocks", "forgotten_device_blocks", "forgotten_host_blocks",
    "offloads_saved", "copied_blocks", "lost_blocks", "events_dropped", "redundant_dropped", "expired_blocks",
    "evicted_by_rule_blocks", "evicted_host_full_blocks", "passed_blocks",
)  # fmt: skip
(
    C_PROMPT, C_DEVICE_TOKENS, C_HOST_TOKENS, C_PARTIAL_TOKENS, C_DEVICE_HITS, C_HOST_HITS, C_PARTIAL, C_MISSED, C_OFFLOADED,
    C_ONBOARDED, C_FORGOTTEN_DEVICE, C_FORGOTTEN_HOST, C_SAVED, C_COPIED, C_LOST, C_DROPPED, C_REDUNDANT, C_EXPIRED,
    C_BY_RULE, C_HOST_FULL, C_PASSED,
) = range(len(COUNTERS))  # fmt: skip
LIFETIME, IDLE, HOST_LIFETIME, HOST_IDLE, REUSE_GAP, HISTOGRAMS = range(6)
BINS = 33  # bin 0 is below 1 ms, bin i covers [2**(i-1), 2**i) ms; the sum of all times is behind the bins

BUCKETS_MAX = 1 << 31  # 32 bits of a key times the number of buckets are an int64

LISTS_PER_TIER = 103
EMPTY, REDUNDANT = 101, 102
LOWEST = 2 * LISTS_PER_TIER  # rows LOWEST + tier of the lists array: no list of that tier below this priority has a block


@jit(inline="always")
def blocks_of(h):
    return array_at(h[A_BLOCKS], (h[BLOCKS],), BLOCK)


@jit(inline="always")
def tokens_of(h):
    return array_at(h[A_TOKENS], (h[BLOCKS], h[WIDTH]), np.int32)


@jit(inline="always")
def extra_of(h):
    """Extra ids, int64[blocks, T]; no row of it may be touched unless HAS_EXTRA."""
    return array_at(h[A_EXTRA], (h[BLOCKS], h[WIDTH]), np.int64)


@jit(inline="always")
def lists_of(h):
    return array_at(h[A_LISTS], (LOWEST + 2, 3), np.int32)


@jit(inline="always")
def index_of(h):
    return array_at(h[A_INDEX], (h[BUCKETS],), np.int32)


@jit(inline="always")
def children_of(h):
    return array_at(h[A_CHILDREN], (h[CHILD_BUCKETS],), np.int32)


@jit(inline="always")
def heap_of(h):
    return array_at(h[A_HEAP], (h[BLOCKS] + 1,), np.int32)


@jit(inline="always")
def sequences_of(h):
    return array_at(h[A_SEQUENCES], (h[SEQUENCES],), SEQUENCE)


@jit(inline="always")
def rows_of(h):
    return array_at(h[A_ROWS], (h[SEQUENCES],), np.int32)


@jit(inline="always")
def table_of(h):
    return array_at(h[A_TABLE], (h[SEQUENCES], h[COLUMNS]), np.int32)


@jit(inline="always")
def row_tokens_of(h):
    """Of a recurrent group: the tokens of sequences, from the first full column that is not committed on."""
    return array_at(h[A_ROW_TOKENS], (h[SEQUENCES], h[COLUMNS] * h[WIDTH]), np.int32)


@jit(inline="always")
def row_extra_of(h):
    """Their extra ids; no row of it may be touched unless HAS_EXTRA."""
    return array_at(h[A_ROW_EXTRA], (h[SEQUENCES], h[COLUMNS] * h[WIDTH]), np.int64)


@jit(inline="always")
def moves_of(h):
    return array_at(h[A_MOVES], (h[MOVES_CAPACITY], 4), np.int64)


@jit(inline="always")
def token_moves_of(h):
    """Rows (stream, row of the sequence, source slot, target slot); those of a sequence follow each other."""
    return array_at(h[A_TOKEN_MOVES], (h[TOKEN_MOVES_CAPACITY], 4), np.int64)


@jit(inline="always")
def accesses_of(h):
    return array_at(h[A_ACCESSES], (h[ACCESSES_CAPACITY], 3), np.int64)


@jit(inline="always")
def events_of(h):
    return array_at(h[A_EVENTS], (h[EVENTS],), EVENT)


@jit(inline="always")
def event_tokens_of(h):
    return array_at(h[A_EVENT_TOKENS], (h[EVENTS], h[WIDTH]), np.int32)


@jit(inline="always")
def event_extra_of(h):
    """Like ``extra_of``."""
    return array_at(h[A_EVENT_EXTRA], (h[EVENTS], h[WIDTH]), np.int64)


@jit(inline="always")
def ring_of(h):
    return array_at(h[A_RING], (RING,), np.int64)


@jit(inline="always")
def counters_of(h):
    return array_at(h[A_COUNTERS], (len(COUNTERS),), np.int64)


@jit(inline="always")
def histograms_of(h):
    return array_at(h[A_HISTOGRAMS], (HISTOGRAMS, BINS + 1), np.int64)


@jit(forceinline=True)
def change_word(blocks, b, refs, pins):
    """Add to both halves of a block's word at once; returns the new word, or -1 with nothing changed if a half would fall below zero."""
    words = blocks["word"]
    while True:
        old = load(words, b)
        new_refs, new_pins = (old & REFS) + refs, (old >> 32) + pins
        if new_refs < 0 or new_pins < 0:
            return np.int64(-1)
        new = (new_pins << 32) | new_refs
        if compare_exchange(words, b, old, new):
            return new


@jit(forceinline=True)
def add_reference(blocks, b):
    """Add a reference to a block, under the state lock; returns the new word.

    Only who holds a block may change its word without the lock. A word of zero is nobody's, and needs no exchange.
    """
    words = blocks["word"]
    if load(words, b) == 0:
        store(words, b, 1)
        return np.int64(1)
    return change_word(blocks, b, 1, 0)


@jit(forceinline=True)
def drop_reference(blocks, b):
    """Drop a reference that the caller has, under the state lock; returns the new word. The last hold needs no exchange either."""
    words = blocks["word"]
    if load(words, b) == 1:
        store(words, b, 0)
        return np.int64(0)
    return change_word(blocks, b, -1, 0)
