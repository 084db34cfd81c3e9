"""What the engine's streams will do and have done to blocks: the rows that transfer orders copies and streams by."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.blocks import ACCESSES, ACCESSES_CAPACITY, accesses_of

# Kinds of rows (kind, stream, block). The stream will read the block, or write it, from now on; its accesses so far are enqueued,
# and among them is what wrote the block's content. FOLLOWS has a second stream in place of the block, which the first one takes over from.
WILL_READ, WILL_WRITE, ACCESSED, WROTE, FOLLOWS = range(5)


@jit
def emit_access(h, kind, stream, b):
    n = h[ACCESSES]
    if h[ACCESSES_CAPACITY] == 0:
        return
    if n >= h[ACCESSES_CAPACITY]:
        raise RuntimeError("more accesses than were reserved")
    rows = accesses_of(h)
    rows[n, 0], rows[n, 1], rows[n, 2] = kind, stream, b
    h[ACCESSES] = n + 1
