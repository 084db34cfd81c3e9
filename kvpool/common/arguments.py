"""Checks of callers' arguments: token buffers, arrays of sequence ids and counts, flags, texts, retention.

Jitted code runs without the interpreter's lock and checks no bounds. So it may read only memory that the caller cannot
reach: every function here that returns an array returns private memory. Each function copies first, and then checks
the copy. The caller's memory may change later, and an object of the caller's may give another answer when it is asked
again. Neither changes the result.
"""

from __future__ import annotations

import array
import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Array, Int32s, Int64s, SupportsDLPack
from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.arrays.strided import in_numpy
from kvpool.common.jit import jit

Integers: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | array.array[int] | memoryview | SupportsDLPack"
"""Any buffer or sequence of integers."""
Ids: TypeAlias = "int | np.integer[Any] | Integers"
"""One id, or several."""
Namespace: TypeAlias = tuple["bytes | str | None", "int | str | None"]
"""Salt and adapter."""

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
ENDS = np.int64(-1)
"""The value of ``returns`` of a sequence that is not continued."""
StopReason: TypeAlias = Literal["tool_use", "end_turn"]
STOPS: tuple[StopReason, ...] = ("tool_use", "end_turn")
OPEN_END = 1 << 62
TOKENS, INTEGERS = np.dtype(np.int32), np.dtype(np.int64)
_FEW, _AT_ONCE = 16, 256
# Sequences of other types than these are read item by item, since NumPy makes numbers of the bools among integers.
_BUFFERS = (str, bytes, bytearray, memoryview, array.array, range, np.ndarray)


def address(values: Array) -> int:
    return int(values.__array_interface__["data"][0])


def _integers(name: str, values: object) -> Array:
    """A private copy of any one-dimensional integer buffer or sequence, contiguous, aligned and writable."""
    values = in_numpy(name, values)
    if isinstance(values, Sequence) and not isinstance(values, _BUFFERS):
        return _numbers(name, values)
    if isinstance(values, (str, bytes)) or values is None:
        raise TypeError(f"{name}: expected integers, got {values!r:.80}")
    try:
        # The view shows type and shape, so a large buffer that is refused is never copied.
        view = np.asarray(values)[...]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected integers, got {values!r:.80}") from None
    if view.ndim == 0:
        raise TypeError(f"{name}: expected a sequence of integers, got {values!r:.80}")
    if view.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {view.dtype}")
    if view.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {view.shape}")
    return view.copy()


def _numbers(name: str, values: Sequence[Any]) -> Int64s:
    # An ``__index__`` of an item may change the list, so it is copied first.
    items = tuple(values)
    try:
        numbers = np.frombuffer(array.array("q", items), np.int64) if items else np.empty(0, np.int64)
    except OverflowError:
        wrong = next((i for i in map(operator.index, items) if not -INT64_MAX - 1 <= i <= INT64_MAX), values)
        raise ValueError(f"{name}: expected integers in the int64 range, got {wrong!r:.80}") from None
    except TypeError:
        raise TypeError(f"{name}: expected integers, got {values!r:.80}") from None
    if bool in map(type, items):
        wrong = [*map(type, items)].index(bool)
        raise TypeError(f"{name}[{wrong}]: expected an integer, got {items[wrong]!r}")
    return numbers


def token_array(name: str, tokens: object, *, empty: bool = False) -> Int32s:
    """Token ids as private int32[n].

    Raises TypeError for items that are not integers, and for bools. Raises ValueError for other shapes, for negative
    ids, for ids above int32 and, unless ``empty``, for no token.
    """
    if type(tokens) is np.ndarray and tokens.dtype is TOKENS:
        ids = tokens.copy()
        if ids.dtype is TOKENS and ids.ndim == 1 and len(ids) and lowest(ids) >= 0:
            return ids
    if isinstance(tokens, (list, tuple)) and tokens:
        # An ``__index__`` of an item may change the list, so it is copied first.
        items = tuple(tokens)
        try:
            # Unsigned items are converted in a third of the time. Those above int32 are negative here.
            from_items = np.frombuffer(array.array("I", items), np.int32)
            if _are_tokens(items, from_items):
                return from_items
        except (TypeError, OverflowError):
            pass  # The code below raises the error.
    checked = _integers(name, tokens)
    if len(checked) == 0 and not empty:
        raise ValueError(f"{name}: expected one token or more, got none")
    if len(checked):
        low, high = int(checked.min()), int(checked.max())
        if low < 0 or high > INT32_MAX:
            raise ValueError(f"{name}: expected token ids from 0 to {INT32_MAX}, got {low if low < 0 else high}")
    return checked.astype(np.int32, copy=False)


def _are_tokens(items: tuple[Any, ...], values: Int32s) -> bool:
    """Whether no item is negative or a bool. A bool is 0 or 1, so only items with a value below 2 are looked at."""
    places = np.empty(_FEW, INTEGERS)
    count = below_two(values, places)
    if count > _FEW:
        return int(lowest(values)) >= 0 and bool not in map(type, items)
    return not count or all(values[i] >= 0 and type(items[i]) is not bool for i in places[:count].tolist())


@jit
def lowest(values: Int32s) -> np.int32:
    """The lowest of int32[n]; 2 if there is none below."""
    low = np.int32(2)  # as wide as the values: more of them fit into a vector
    for i in range(values.shape[0]):
        low = min(low, values[i])
    return low


@jit
def below_two(values: Int32s, places: Int64s) -> int:
    """Write where the first of int32[n] are below 2 to ``places`` int64[m]. Returns how many are."""
    count, n = 0, values.shape[0]
    for first in range(0, n, _AT_ONCE):
        last = min(first + _AT_ONCE, n)
        low = np.int32(2)
        for i in range(first, last):
            low = min(low, values[i])
        if low < 2:
            for i in range(first, last):
                if values[i] < 2:
                    if count < places.shape[0]:
                        places[count] = i
                    count += 1
    return count


def int64_array(name: str, values: object) -> Int64s:
    """Integers as private int64[n]. Raises TypeError for items that are not integers, and for bools. Raises ValueError
    for other shapes and for numbers outside int64."""
    if type(values) is np.ndarray and values.dtype is INTEGERS:
        integers = values.copy()
        if integers.dtype is INTEGERS and integers.ndim == 1:
            return integers
    checked = _integers(name, values)
    if checked.dtype == np.uint64 and len(checked) and int(checked.max()) > INT64_MAX:
        raise ValueError(f"{name}: expected integers in the int64 range, got {int(checked.max())}")
    return checked.astype(np.int64, copy=False)


def each_argument(name: str, values: object, count: int, of: str = "ids", highest: int | None = INT32_MAX) -> Int64s:
    """One number for each of ``count`` things, from 0 to ``highest`` (None: any), as private int64[count]. A single
    number is that of a single thing. Raises TypeError, ValueError."""
    numbers = id_array(name, values)
    if len(numbers) != count:
        raise ValueError(f"{name}: expected {count}, one for each of the {of}, got {len(numbers)}")
    wrong = -1 if highest is None else first_outside(numbers, highest)
    if wrong >= 0:
        raise ValueError(f"{name}: expected 0 to {highest}, got {int(numbers[wrong])}")
    return numbers


def count_array(name: str, counts: object, ids: Int64s) -> Int64s:
    """One count for each id, as private int64[n]. No count is negative."""
    return each_argument(name, counts, len(ids))


def stop_argument(stop: object) -> int:
    """Why a model stopped, as the state counts it: 0 where nobody says it."""
    return 0 if stop is None else 1 + STOPS.index(choice_argument("stop", stop, STOPS))


def returns_argument(ends: object, returns_in_ms: object) -> int:
    """When a sequence is continued, as the state counts it: 0 where nobody says it, ENDS, or the milliseconds and
    one."""
    if bool_argument("ends", ends):
        if returns_in_ms is not None:
            raise ValueError(f"returns_in_ms: expected None with ends=True, got {returns_in_ms!r:.80}")
        return int(ENDS)
    return 0 if returns_in_ms is None else 1 + integer_argument("returns_in_ms", returns_in_ms, 0, INT32_MAX - 1)


def split_argument(counts: object, ids: Int64s, name: str, values: Array) -> Int64s:
    """How many of ``values`` are for each id, int64[n]; all of them by default, if there is one id. Raises TypeError,
    ValueError."""
    if counts is None and len(ids) != 1:
        raise ValueError(f"counts: expected one for each of {len(ids)} ids, got None")
    each = each_argument("counts", len(values) if counts is None else counts, len(ids))
    if int(each.sum()) != len(values):
        raise ValueError(
            f"counts: expected numbers that add up to the {len(values)} entries of {name}, got {int(each.sum())}"
        )
    return each


def encoder_argument(name: str, tokens: object, count: int, needed: bool) -> Int64s:
    """Lengths of the encoder's inputs as private int64[count], one for each prompt. They are needed only where a group
    is for cross attention (``needed``), and are zeros elsewhere. Raises TypeError, ValueError."""
    if (tokens is not None) != needed:
        raise ValueError(
            f"{name}: expected {'a number' if needed else 'None without a group'} for cross attention, got "
            f"{tokens!r:.80}"
        )
    return np.zeros(count, np.int64) if tokens is None else each_argument(name, tokens, count, "prompts")


def bool_argument(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r:.80}")
    return bool(value)


def list_argument(name: str, value: object) -> list[Any]:
    """The items of a list or tuple, in a new list. Raises TypeError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list, got {value!r:.80}")
    return list(value)


def text_argument(name: str, value: object) -> str:
    """The text as an exact ``str``: a subclass could compare as another value. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r:.80}")
    return str.__str__(value)


def number_argument(name: str, value: object, least: float = 0.0, most: float = sys.float_info.max) -> float:
    """A finite number, such as seconds or a rate. Raises TypeError, or ValueError below ``least`` or above ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {value!r:.80}")
    if not least <= value <= most:
        bounds = f"of {least:g} or more" if most == sys.float_info.max else f"from {least:g} to {most:g}"
        raise ValueError(f"{name}: expected a finite number {bounds}, got {value!r:.80}")
    return float(value)


def is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def id_array(name: str, ids: object) -> Int64s:
    """One id or several ids as private int64[n]."""
    if type(ids) is int and -(1 << 63) <= ids < 1 << 63:
        single = np.empty(1, INTEGERS)  # half of what ``np.array`` takes
        single[0] = ids
        return single
    if type(ids) is not np.ndarray and is_integer(ids):
        return np.array([integer_argument(name, ids, -(1 << 63), (1 << 63) - 1)], np.int64)
    return int64_array(name, ids)


@jit
def first_outside(values: Int64s, highest: int) -> int:
    """The index of the first value below 0 or above ``highest``, or -1 if there is none."""
    for i in range(values.shape[0]):
        if values[i] < 0 or values[i] > highest:
            return i
    return -1


def salt_argument(salt: object) -> bytes | str | None:
    if salt is None or isinstance(salt, (bytes, str)):
        return bytes(salt) if isinstance(salt, bytes) else text_argument("salt", salt) if salt is not None else None
    raise TypeError(f"salt: expected None, bytes or str, got {salt!r:.80}")


def adapter_argument(adapter_id: Any) -> int | str | None:
    if adapter_id is None or isinstance(adapter_id, str):
        return None if adapter_id is None else text_argument("adapter_id", adapter_id)
    if is_integer(adapter_id):
        return operator.index(adapter_id)
    raise TypeError(f"adapter_id: expected None, int or str, got {adapter_id!r:.80}")


def namespace_argument(name: str, namespace: object) -> Namespace:
    if not isinstance(namespace, (list, tuple)) or len(namespace) != 2:
        raise TypeError(f"{name}: expected a pair (salt, adapter_id), got {namespace!r:.80}")
    salt, adapter_id = tuple(namespace)
    return salt_argument(salt), adapter_argument(adapter_id)


def extra_array(extra_ids: object, count: int) -> Int64s | None:
    """Extra ids as a private int64[count], or None if there are none or all are zero."""
    if extra_ids is None:
        return None
    extra = int64_array("extra_ids", extra_ids)
    if len(extra) != count:
        raise ValueError(f"extra_ids: expected {count}, one for each of the tokens, got {len(extra)}")
    return extra if extra.any() else None


def clock_argument(clock: object) -> Callable[[], int]:
    """The function that returns a pool's time in milliseconds; by default it reads the system's monotonic clock."""
    if clock is not None and not callable(clock):
        raise TypeError(f"clock: expected a function that returns milliseconds, got {clock!r:.80}")
    return milliseconds if clock is None else clock


def milliseconds() -> int:
    """The time of the system's monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class RetentionRange(NamedTuple):
    """How long to keep the blocks whose first token is in a range of a prompt's tokens.

    Attributes
    ----------
    start : int
        First token of the range.
    end : int or None
        One past its last token, or None for the end of the prompt.
    priority : int
        0 (evicted first) to 100 (evicted last).
    ttl_ms : int, optional
        Milliseconds after release from which the priority is that of other blocks. By default it never ends.
    """

    start: int
    end: int | None
    priority: int
    ttl_ms: int | None = None


def priority_argument(name: str, value: object) -> int:
    """A priority: 0 (goes first) to 100 (stays longest)."""
    if type(value) is int and 0 <= value <= 100:
        return value
    return integer_argument(name, value, 0, 100)


def ttl_argument(name: str, value: object) -> int:
    """Milliseconds from release, or None for ever, which is -1 here."""
    return -1 if value is None else integer_argument(name, value, 1, INT32_MAX)


def deadline_argument(seconds: object) -> int | None:
    """Milliseconds after which a reservation expires, at least 1, or None for never."""
    if seconds is None:
        return None
    return round(1000 * number_argument("deadline_seconds", seconds, 0.001, INT32_MAX / 1000))


def retention_rows(ranges: Sequence[RetentionRange | tuple[int | None, ...]]) -> Int64s:
    """Ranges as int64[n, 4] rows (start, end, priority, ttl), sorted by start.

    Raises ValueError for a negative index, an empty range, an overlap, or an open end before the last range; TypeError
    for no range.
    """
    if not isinstance(ranges, (list, tuple)) or isinstance(ranges, RetentionRange):
        raise TypeError(f"retention: expected a list of ranges, got {ranges!r:.80}")
    rows = []
    for i, item in enumerate(ranges):
        name = f"retention[{i}]"
        try:
            parsed = RetentionRange(*item)
        except TypeError:
            raise TypeError(f"{name}: expected (start, end, priority[, ttl_ms]), got {item!r}") from None
        start = integer_argument(f"{name}.start", parsed.start, 0, OPEN_END - 1)
        end = OPEN_END if parsed.end is None else integer_argument(f"{name}.end", parsed.end, 0, OPEN_END)
        if end <= start:
            raise ValueError(f"{name}: expected an end above the start, got {item!r}")
        priority = priority_argument(f"{name}.priority", parsed.priority)
        rows.append((start, end, priority, ttl_argument(f"{name}.ttl_ms", parsed.ttl_ms)))
    rows.sort()
    for before, after in zip(rows, rows[1:], strict=False):
        if after[0] < before[1]:
            raise ValueError(
                "retention: expected ranges that do not overlap, only the last with an open end, got "
                f"{list(ranges)!r:.200}"
            )
    return np.array(rows, np.int64).reshape(-1, 4)
