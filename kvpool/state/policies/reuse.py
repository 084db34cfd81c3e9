"""The policy ``reuse``: chains are alike if they have made as many turns and are as long, and those that come back
least go first."""

from __future__ import annotations

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import bit_length
from kvpool.state.policies.pauses import KINDS, MEMBERS


@jit
def class_of(count, length):
    """The class of a chain of ``length`` blocks that has come back ``count`` times."""
    return min(count, KINDS - 1) * MEMBERS + min(bit_length(length), MEMBERS - 1)
