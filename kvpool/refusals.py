"""The exceptions for what a verb of the state refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.errors import DeviceError, OutOfBlocks, OutOfSequences, UnknownSequence
from kvpool.state import admission, drafts, groups, growth, live
from kvpool.state.blocks import COLUMNS, DETAIL, DETAIL2, DETAIL_GROUP, KIND, RECURRENT, WIDTH


def refusal(heads: npt.NDArray[np.int64], code: int, ids: npt.NDArray[np.int64]) -> Exception:
    """What to raise for a verb's result below zero. ``ids`` are the sequences that the call named; the state lock is still held."""
    detail, more = int(heads[0, DETAIL]), int(heads[0, DETAIL2])
    if code == admission.SHORT_OF_BLOCKS:
        return OutOfBlocks("device", detail, more, int(heads[0, DETAIL_GROUP]) if len(heads) > 1 else None)
    if code == admission.SHORT_OF_SEQUENCES:
        return OutOfSequences(detail, more)
    if code == groups.BAD_TOTAL:
        return ValueError(f"counts add up to {detail}, tokens has {more} entries")
    if code == drafts.BAD_ACCEPTED:
        return ValueError(f"accepted[{detail}] is out of range or order: accepted are indices in rising order, below the {more} drafts")
    which = int(ids[detail])
    if code == live.UNKNOWN:
        return UnknownSequence(f"{which} is not a live sequence of this pool")
    if code == live.DUPLICATE:
        return ValueError(f"sequence {which} is named twice")
    if code == live.FAILED:
        return DeviceError(f"sequence {which} lost a block to a failed copy: release it")
    if code == drafts.BAD_DRAFTS:
        return ValueError(f"drafts: sequence {which} has {more} tokens that are not committed, and no more can be drafts")
    if code == growth.TOO_LONG:
        return ValueError(f"sequence {which} would pass max_sequence_tokens={heads[0, COLUMNS] * heads[0, WIDTH]}")
    if code == growth.PASSED:
        gone = "what was committed has no state before" if heads[heads[0, DETAIL_GROUP], KIND] == RECURRENT else "its window has passed"
        return ValueError(f"the count of sequence {which} is out of range: {gone}; accepted are up to {more} tokens")
    return ValueError(f"the count of sequence {which} is out of range: its bound is {more} tokens")
