"""What callers hand in: prompts as token buffers with their keys, and arrays of sequence ids and counts."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.jit import jit
from kvpool.layout import integer_argument
from kvpool.state import requests
from kvpool.strided import in_numpy

INT32 = np.iinfo(np.int32)
TOKENS, INTEGERS = np.dtype(np.int32), np.dtype(np.int64)
NO_EXTRA = np.empty(0, np.int64)


class BlockKeys:
    """A prompt with the keys of its full blocks, ready for every call that takes a prompt. Made by ``KVCacheManager.block_keys``.

    ``tokens`` int32[n], ``keys`` uint64[n // tokens_per_block, 2], ``extra_ids`` int64[n] or None, all read-only; ``namespace`` is the
    digest of salt and adapter that blocks carry. Can be copied and pickled, for pools with the same secret.
    """

    __slots__ = ("_owned", "_root", "adapter_id", "namespace", "origin", "request", "salt")

    def __init__(
        self, tokens: npt.NDArray[np.int32], keys: npt.NDArray[np.uint64], salt: bytes | str | None, adapter_id: int | str | None,
        extra_ids: npt.NDArray[np.int64] | None, root: tuple[int, int, int], origin: tuple[str, int],
    ) -> None:  # fmt: skip
        # What the request points to lives as long as this object, and nobody else can write to it.
        self._owned, self._root = (tokens, keys, extra_ids), root
        self.salt, self.adapter_id, self.namespace, self.origin = salt, adapter_id, root[0], origin
        self.request = np.zeros((1, requests.REQUEST), np.int64)
        requests.describe(self.request, tokens, keys, NO_EXTRA if extra_ids is None else extra_ids, *root)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return read_only(self._owned[0])

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        return read_only(self._owned[1])

    @property
    def extra_ids(self) -> npt.NDArray[np.int64] | None:
        return None if self._owned[2] is None else read_only(self._owned[2])

    def __len__(self) -> int:
        return len(self._owned[0])

    def __reduce__(self) -> tuple[Any, ...]:
        tokens, keys, extra = self._owned
        owned = (tokens.copy(), keys.copy(), self.salt, self.adapter_id, None if extra is None else extra.copy())
        return BlockKeys, (*owned, self._root, self.origin)


def read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that cannot be written."""
    view = values.view()
    view.flags.writeable = False
    return view


class Match(NamedTuple):
    """What a prompt would reuse now, in tokens: full blocks on the device, full blocks on the host, part of one more block.

    Tokens that a window has passed count as on the device: they need no block, and are not computed again. Where there are several groups
    of layers, all of them can reuse these tokens, and those on the host are of the group that has the most there.
    """

    device_tokens: int
    host_tokens: int
    partial_tokens: int

    @property
    def full_tokens(self) -> int:
        return self.device_tokens + self.host_tokens

    @property
    def tokens(self) -> int:
        return self.full_tokens + self.partial_tokens


class Admission(NamedTuple):
    """What a batch got: int64[m] ids, and per request int32[m] reused tokens (total, device, host, partial) and blocks to be computed.

    Tokens that a window has passed count as on the device. Where there are several groups of layers, tokens on the host are of the group
    that has the most there; blocks to be computed are the same in all.
    """

    ids: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int32]
    device_tokens: npt.NDArray[np.int32]
    host_tokens: npt.NDArray[np.int32]
    partial_tokens: npt.NDArray[np.int32]
    missed_blocks: npt.NDArray[np.int32]

    @property
    def admitted(self) -> int:
        """Requests admitted: the whole batch, or with ``allow_partial_batch`` its head that fitted."""
        return len(self.ids)


def address(values: npt.NDArray[Any]) -> int:
    return int(values.__array_interface__["data"][0])


def _integers(name: str, values: Any) -> npt.NDArray[Any]:
    """Any one-dimensional integer buffer or sequence as an array, without a copy where it is a buffer."""
    values = in_numpy(name, values)
    if isinstance(values, np.ndarray):
        found = values
    elif isinstance(values, (list, tuple)):
        try:
            found = np.frombuffer(array.array("q", values), np.int64) if values else np.empty(0, np.int64)
        except OverflowError:
            raise ValueError(f"{name}: {max(values, key=abs)} is not in the int64 range") from None
        except TypeError:
            raise TypeError(f"{name}={values!r:.80}: accepted are integers") from None
    elif isinstance(values, (str, bytes)) or values is None:
        raise TypeError(f"{name}={values!r:.80}: accepted are integer buffers and lists of int")
    else:
        found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name}={values!r:.80} has dtype {found.dtype}: accepted are integers")
    if found.ndim != 1:
        raise ValueError(f"{name} has shape {found.shape}: accepted is one dimension")
    return found


def _is_plain(values: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array can be used as it is, found out quickly; a False says nothing."""
    return type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1 and values.flags.carray


def _plain(values: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """Contiguous, aligned and writable: jitted code is compiled for nothing else. A copy only where needed."""
    found = np.ascontiguousarray(values, dtype)
    return found if found.flags.carray else found.copy()


def token_array(name: str, tokens: Any, *, empty: bool = False) -> npt.NDArray[np.int32]:
    """Token ids as int32[n], contiguous; the caller's own buffer if it is that already.

    Raises TypeError for other than integers, ValueError for other shapes, ids outside int32, or (unless ``empty``) no token.
    """
    if _is_plain(tokens, TOKENS) and len(tokens):
        return tokens
    found = _integers(name, tokens)
    if len(found) == 0 and not empty:
        raise ValueError(f"{name} is empty: at least one token is accepted")
    if found.dtype != np.int32 and len(found):
        low, high = int(found.min()), int(found.max())
        if low < INT32.min or high > INT32.max:
            raise ValueError(f"{name}: {low if low < INT32.min else high} is not in the int32 range of token ids")
    return _plain(found, np.int32)


def int64_array(name: str, values: Any) -> npt.NDArray[np.int64]:
    """Integers as int64[n], contiguous."""
    if _is_plain(values, INTEGERS):
        return values
    if isinstance(values, (list, tuple)) and any(isinstance(value, bool) for value in values):
        raise TypeError(f"{name}={values!r:.80}: accepted are integers, no bools")
    found = _integers(name, values)
    if found.dtype == np.uint64 and len(found) and int(found.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {int(found.max())} is not in the int64 range")
    return _plain(found, np.int64)


def window_argument(window: Any, sinks: Any) -> tuple[int, int]:
    """Tokens of a sliding window, 0 for none, and of its sinks. Raises TypeError or ValueError."""
    seen, first = 0 if window is None else integer_argument("window", window, 1, INT32.max), integer_argument("sinks", sinks, 0, INT32.max)
    if first and not seen:
        raise ValueError(f"sinks={first}: accepted is 0 without a window")
    return seen, first


def encoder_argument(name: str, tokens: Any, count: int, needed: bool) -> npt.NDArray[np.int64]:
    """Lengths of the encoder's inputs, one for each of ``count`` prompts where there is cross attention. Raises TypeError or ValueError."""
    if (tokens is not None) != needed:
        raise ValueError(f"{name}={tokens!r:.80}: accepted is {'a number' if needed else 'None without a group'} for cross attention")
    found = np.zeros(count, np.int64) if tokens is None else id_array(name, tokens)
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} entries: accepted is one for each of the {count} prompts")
    wrong = first_outside(found, INT32.max)
    if wrong >= 0:
        raise ValueError(f"{name}: {int(found[wrong])} is out of range: accepted are 0 to {INT32.max}")
    return found


def bool_argument(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r:.80}: accepted are True and False")
    return bool(value)


def list_argument(name: str, value: Any) -> Any:
    """A list or tuple; TypeError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r:.80}: accepted is a list")
    return value


def private(values: npt.NDArray[Any], given: Any) -> npt.NDArray[Any]:
    """The array if it is nobody else's memory, else a copy."""
    return values if values.flags.owndata and values is not given else values.copy()


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def id_array(name: str, ids: Any) -> npt.NDArray[np.int64]:
    """One id or several as int64[n]."""
    if is_integer(ids):
        return np.array([integer_argument(name, ids, -(1 << 63), (1 << 63) - 1)], np.int64)
    return int64_array(name, ids)


def count_array(name: str, counts: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One count for each id, none negative; a single number is the count of a single id."""
    found = id_array(name, counts)
    if len(found) != len(ids):
        raise ValueError(f"{name} has {len(found)} entries: accepted is one for each of the {len(ids)} ids")
    wrong = first_outside(found, INT32.max)
    if wrong >= 0:
        raise ValueError(f"{name}: {int(found[wrong])} is out of range: accepted are 0 to {INT32.max}")
    return found


@jit
def first_outside(values: npt.NDArray[np.int64], highest: int) -> int:
    """The place of the first value below 0 or above ``highest``, else -1."""
    for i in range(values.shape[0]):
        if values[i] < 0 or values[i] > highest:
            return i
    return -1


def salt_argument(salt: Any) -> bytes | str | None:
    """As an exact builtin: a subclass could compare or print as another value."""
    if salt is None:
        return None
    if isinstance(salt, bytes):
        return bytes(memoryview(salt))
    if isinstance(salt, str):
        return str.__str__(salt)
    raise TypeError(f"salt={salt!r:.80}: accepted are None, bytes and str")


def adapter_argument(adapter_id: Any) -> int | str | None:
    """As an exact builtin, like ``salt_argument``."""
    if adapter_id is None:
        return None
    if isinstance(adapter_id, str):
        return str.__str__(adapter_id)
    if is_integer(adapter_id):
        return int.__index__(int(adapter_id) if isinstance(adapter_id, np.integer) else adapter_id)
    raise TypeError(f"adapter_id={adapter_id!r:.80}: accepted are None, int and str")


def extra_array(extra_ids: Any, count: int) -> npt.NDArray[np.int64] | None:
    """Extra ids as a private int64[count], or None if there are none or all are zero."""
    if extra_ids is None:
        return None
    found = int64_array("extra_ids", extra_ids)
    if len(found) != count:
        raise ValueError(f"extra_ids has {len(found)} entries: accepted is one for each of the {count} tokens")
    return private(found, extra_ids) if found.any() else None


def key_rows(keys: Any) -> npt.NDArray[np.int64]:
    """Keys as int64[n, 2]: BlockKeys, uint64[n, 2], or a sequence of 16-byte strings."""
    if isinstance(keys, BlockKeys):
        return keys._owned[1].view(np.int64)
    keys = in_numpy("keys", keys)
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
            raise ValueError(f"keys has shape {keys.shape} and dtype {keys.dtype}: accepted is uint64[n, 2]")
        return _plain(keys, np.uint64).view(np.int64)
    if not isinstance(keys, Sequence) or isinstance(keys, (str, bytes)):
        raise TypeError(f"keys={keys!r:.80}: accepted are BlockKeys, uint64[n, 2] and sequences of single keys")
    return np.concatenate([key_row(key) for key in keys]) if len(keys) else np.empty((0, 2), np.int64)


def key_row(key: Any) -> npt.NDArray[np.int64]:
    """One key as int64[1, 2]: 16 bytes or uint64[2]."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        data = bytes(key)
        if len(data) != 16:
            raise ValueError(f"key has {len(data)} bytes: accepted are 16")
        return np.frombuffer(data, np.int64).copy().reshape(1, 2)
    try:
        found = np.asarray(in_numpy("key", key))
    except ValueError:
        raise TypeError(f"key={key!r:.80}: accepted are 16 bytes and uint64[2]") from None
    if found.dtype != np.uint64 or found.shape != (2,):
        raise TypeError(f"key={key!r:.80}: accepted are 16 bytes and uint64[2]")
    return _plain(found, np.uint64).view(np.int64).reshape(1, 2)
