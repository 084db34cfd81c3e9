"""The exceptions for what a verb of the state refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import DeviceError, OutOfBlocks, OutOfSequences, UnknownSequence
from kvpool.state import codes, verbs
from kvpool.state.records import RECURRENT, H


def refusal(
    heads: npt.NDArray[np.int64], code: int, ids: npt.NDArray[np.int64], sequences: npt.NDArray[Any], verb: Any = None
) -> Exception:
    """What to raise for the result below zero of a ``verb``. ``ids`` are the sequences that the call named,
    ``sequences`` their rows.

    The state lock is still held.
    """
    detail, more = int(heads[0, H.detail]), int(heads[0, H.bound])
    if code == codes.SHORT_OF_BLOCKS:
        return OutOfBlocks("device", detail, more, int(heads[0, H.detail_group]) if len(heads) > 1 else None)
    if code == codes.SHORT_OF_HOST_BLOCKS:
        return OutOfBlocks("host", detail, more, int(heads[0, H.detail_group]) if len(heads) > 1 else None)
    if code == codes.SHORT_OF_SEQUENCES:
        return OutOfSequences(detail, more)
    if code == codes.BAD_TOTAL:
        return ValueError(f"counts add up to {detail}, tokens has {more} entries")
    if code == codes.BAD_ACCEPTED:
        return ValueError(
            f"accepted[{detail}] is out of range or order: accepted are indices in rising order, below the {more} "
            "drafts"
        )
    which = int(ids[detail])
    if code == codes.UNKNOWN:
        return UnknownSequence(f"{which} is not a live sequence of this pool")
    if code == codes.IS_SWAPPED:
        return ValueError(f"sequence {which} is swapped out: accepted by resume and release")
    if code == codes.NOT_SWAPPED:
        return ValueError(f"sequence {which} is not swapped out: resume accepts those that are")
    if code == codes.DUPLICATE:
        return ValueError(f"sequence {which} is named twice")
    if code == codes.FAILED:
        return DeviceError(f"sequence {which} lost a block to a failed copy: release it")
    if code == codes.BAD_DRAFTS:
        return ValueError(
            f"drafts: sequence {which} has {more} tokens that are not committed, and no more can be drafts"
        )
    if code == codes.TOO_LONG:
        return ValueError(f"sequence {which} would pass max_sequence_tokens={heads[0, H.columns] * heads[0, H.width]}")
    if code == codes.PASSED:
        gone = (
            "what was committed has no state before"
            if heads[heads[0, H.detail_group], H.kind] == RECURRENT
            else "its window has passed"
        )
        return ValueError(f"the count of sequence {which} is out of range: {gone}; accepted are up to {more} tokens")
    sequence = sequences[which & 0xFFFFFFFF]
    lowest, length = int(sequence["committed"]) if verb is verbs.commit else 0, int(sequence["length"])
    return ValueError(
        f"counts: the count of sequence {which} is out of range: accepted are {lowest} to {length} tokens"
    )
