"""The guards: named rules that tests take out one by one, to show that each is reached and that its proof bites.

All are on in a pool. The field ``guards`` of the headers has a bit for each.
"""

from __future__ import annotations

# Order of copies. A name says who waits, before it reads or writes a block, for whose earlier accesses of it. "engine"
# is any stream of a caller, also a reader's.
COPY_READS_AFTER_COPIES, COPY_READS_AFTER_ENGINE = 1 << 0, 1 << 1
COPY_WRITES_AFTER_COPIES, COPY_WRITES_AFTER_ENGINE = 1 << 2, 1 << 3
ENGINE_READS_AFTER_COPIES, ENGINE_READS_AFTER_ENGINE = 1 << 4, 1 << 5
ENGINE_WRITES_AFTER_COPIES, ENGINE_WRITES_AFTER_ENGINE = 1 << 6, 1 << 7
LEVELS = 1 << 8  # moves of one batch that depend on each other are not enqueued together
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

UNPIN_AFTER_RELEASE = 1 << 20  # blocks that travel to another worker stay pinned until the transport has read them

GUARDS = {name.lower(): value for name, value in dict(globals()).items() if name.isupper() and isinstance(value, int)}
ALL = sum(GUARDS.values())
