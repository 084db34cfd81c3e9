"""Arguments of a StoreQueue: checked, and copied, so that nobody changes them later."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from kvpool.entry.arguments import first_outside, id_array
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import KEY_BYTES, Bytes, Rows

Keys = Bytes | BlockNames


def memory_argument(memory: Any) -> Bytes:
    # A view of its own, whose shape and type nobody else can change.
    own = np.asarray(memory)[...] if isinstance(memory, np.ndarray) else None
    fits = own is not None and own.dtype == np.uint8 and own.ndim == 2 and own.size > 0
    if own is None or not fits or not own.flags.c_contiguous or not own.flags.writeable:
        raise ValueError("memory: accepted is a writable, C-contiguous array uint8[slots, block_bytes]")
    return own


def keys_argument(keys: Any) -> Keys:
    if isinstance(keys, BlockNames):
        return BlockNames(keys.names, keys.generation, keys.contexts)
    # A subclass may answer with another shape than its memory has.
    own = np.asarray(keys)[...] if isinstance(keys, np.ndarray) else None
    if own is None or own.dtype != np.uint8 or own.ndim != 2 or own.shape[1] != KEY_BYTES:
        raise ValueError(f"keys: accepted is an array uint8[n, {KEY_BYTES}], made by the queue's secret, or BlockNames")
    return own.copy()


def rows_argument(rows: Any, count: int, slots: int, distinct: bool) -> Rows:
    own = id_array("rows", rows)
    if len(own) != count:
        raise ValueError(f"rows has {len(own)} elements: accepted is one for each of the {count} keys")
    if first_outside(own, slots - 1) >= 0:
        raise ValueError(f"rows={own!r:.80}: accepted are 0 to {slots - 1}")
    if distinct and len(np.unique(own)) != count:
        raise ValueError(f"rows={own!r:.80}: accepted are rows that differ, as each gets one block")
    return own


def name_argument(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_-]{1,64}", name):
        raise ValueError(f"store.name={name!r:.80}: accepted are 1 to 64 of the characters a-z, 0-9, _ and -")
    return str.__str__(name)


def deadline_argument(deadline: Any) -> float:
    try:
        found = math.nan if isinstance(deadline, (str, bytes)) else float(deadline)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        raise ValueError(f"deadline={deadline!r:.80}: accepted are seconds on the queue's clock")
    return found
