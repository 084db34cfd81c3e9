"""The named rules that keep transfers in order. Tests take them out one by one, to show that each is reached and that its proof bites."""

from __future__ import annotations

# Who waits, before reading or writing a block, for whose earlier accesses of it. "Engine" is any stream of a caller, a reader's included.
COPY_READS_AFTER_COPIES, COPY_READS_AFTER_ENGINE, COPY_WRITES_AFTER_COPIES, COPY_WRITES_AFTER_ENGINE = 1, 2, 4, 8
ENGINE_READS_AFTER_COPIES, ENGINE_READS_AFTER_ENGINE, ENGINE_WRITES_AFTER_COPIES, ENGINE_WRITES_AFTER_ENGINE = 16, 32, 64, 128
LEVELS = 256  # moves of one batch that depend on each other are not handed over together
OTHERS_BATCHES_TOO = 512  # a call returns when everything decided before it is enqueued, by whichever thread
TICKET_ORDER = 1024  # batches are enqueued in the order in which they were decided
READER_WAITS = 2048  # the host gets a lease when the bytes have come, and a block to write to when nobody uses it
LOST_CONTENT_IS_FORGOTTEN = 4096  # what a failed copy should have brought is not findable
TOKENS_MOVE_BEFORE_REUSE = 16384  # a block out of which tokens are moved is not overwritten before they have been read
STAGED_BUFFERS_RETIRE_BY_EVENT = 8192  # a block table on its way to the device is not overwritten before it has been read

GUARDS = {name.lower(): value for name, value in dict(globals()).items() if name.isupper() and isinstance(value, int)}
ALL = sum(GUARDS.values())
