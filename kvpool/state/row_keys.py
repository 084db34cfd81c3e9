"""The tokens of the rows of live sequences, and the keys that their blocks have already."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.records import EXTRA, KEYED, NONE, blocks_of, extra_of, head, sequences_of, table_of, tokens_of


@jit
def read_row(heads, g, slot, tokens, extra, keys):
    """Copy a row of group ``g``. Returns how many leading ``keys`` it had, or NONE if a column has no block.

    ``tokens`` int32[length]; ``extra`` int64[length], or int64[0] if no token of the pool has one; ``keys`` uint64[full
    blocks, 2]. A full block that is not committed has no key yet, unless it is of the prompt.
    """
    h = head(heads, g)
    blocks, row, width = blocks_of(h), table_of(h)[slot], h.width
    known = 0
    for i in range(sequences_of(h)[slot].blocks):
        b = row[i]
        if b == NONE:
            return NONE
        own = tokens_of(h)[b]
        for j in range(min(width, tokens.shape[0] - i * width)):
            tokens[i * width + j] = own[j]
        if extra.shape[0] and blocks[b].flags & EXTRA:
            for j in range(min(width, tokens.shape[0] - i * width)):
                extra[i * width + j] = extra_of(h)[b, j]
        if known == i and i < keys.shape[0] and blocks[b].flags & KEYED:
            keys[i, 0], keys[i, 1] = blocks[b].key0, blocks[b].key1
            known += 1
    return known
