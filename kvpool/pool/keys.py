"""BlockKeys: a prompt with the keys of its full blocks, hashed once and outside every lock; and what calls with prompts
answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arguments import (
    INT32_MAX,
    ForeignArray,
    Integers,
    adapter_argument,
    bool_argument,
    extra_array,
    is_integer,
    salt_argument,
    token_array,
)
from kvpool.common.arrays import Int32s, Int64s, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import in_numpy, read_only
from kvpool.state import control, records, requests

NO_EXTRA = np.empty(0, np.int64)
NO_REQUESTS: Int64s = np.empty((0, records.REQUEST_COLUMNS), np.int64)


class Scope(NamedTuple):
    """What a prompt has beside its tokens and their extra ids. ``root``: the digest of the namespace, and the key that
    its chain begins with; ``origin``: the fingerprint of the secret, and ``tokens_per_block``."""

    salt: bytes | str | None
    adapter_id: int | str | None
    root: tuple[int, int, int]
    origin: tuple[str, int]
    reuse: bool = True
    publish: bool = True


class BlockKeys:
    """A prompt with the keys of its full blocks, ready for every call that takes a prompt. Made by
    ``KVCacheManager.block_keys``.

    ``tokens`` int32[n], ``keys`` uint64[n // tokens_per_block, 2], ``extra_ids`` int64[n] or None. ``namespace`` is the
    digest of salt and adapter that blocks carry. ``origin`` is the fingerprint of the secret, and ``tokens_per_block``.
    ``reuse`` and ``publish`` are as in ``block_keys``.

    ``keys[:n]`` are those of the first n tokens, at any n; nothing is hashed, and nothing copied. ``extend`` gives
    those of more tokens. Immutable: arrays are read-only views, and nobody can make them writable. Can be copied and
    pickled, for pools with the same secret. A pool hashes a copy again when it sees it first, and refuses keys that are
    not those of the tokens. ``KVCacheManager.block_keys`` takes a copy, for one that can be extended.
    """

    __slots__ = ("_extra_ids", "_groups", "_keys", "_request", "_scope", "_tokens")
    __iter__ = None

    def __new__(
        cls,
        tokens: object,
        keys: object,
        salt: bytes | str | None,
        adapter_id: int | str | None,
        extra_ids: object,
        root: tuple[int, int, int],
        origin: tuple[str, int],
        reuse: bool = True,
        publish: bool = True,
    ) -> BlockKeys:
        """Of what a copy or a pickle brings. Copies the arrays. Raises TypeError or ValueError for what no pool has
        made."""
        # An ``__init__`` could be called again, while jitted code reads the arrays that it replaces.
        origin, root = _origin_argument(origin), _root_argument(root)
        ids = token_array("tokens", tokens)
        rows = key_rows(keys).view(np.uint64)
        if len(rows) != len(ids) // origin[1]:
            full = len(ids) // origin[1]
            raise ValueError(
                f"keys: expected one for each of the {full} full blocks of {len(ids)} tokens, got {len(rows)} rows"
            )
        extra = extra_array(extra_ids, len(ids))
        switches = bool_argument("reuse", reuse), bool_argument("publish", publish)
        scope = Scope(salt_argument(salt), adapter_argument(adapter_id), root, origin, *switches)
        self = object.__new__(cls)
        self._fill(ids, rows, extra, scope, None)
        return self

    @classmethod
    def of_private(
        cls,
        tokens: Int32s,
        known: Uint64s,
        extra_ids: Int64s | None,
        scope: Scope,
        groups: Int64s,
    ) -> BlockKeys:
        """Of arguments that have been checked, and of arrays that nobody else can write.

        ``known`` are the keys of the first full blocks; the others are hashed with the secret in ``groups``, the
        headers of a pool's states.
        """
        self, full = object.__new__(cls), len(tokens) // scope.origin[1]
        keys, first = known, len(known)
        if full > first:
            keys = np.empty((full, 2), np.uint64)
            if first:
                keys[:first] = known
        self._fill(tokens, keys, extra_ids, scope, groups, first)
        return self

    def _fill(
        self,
        tokens: Int32s,
        keys: Uint64s,
        extra_ids: Int64s | None,
        scope: Scope,
        groups: Int64s | None,
        first: int | None = None,
    ) -> None:
        """``first``: the first key that is to be hashed with the secret that ``groups`` have."""
        # What the request points to lives as long as this object, and nobody else can reach it to write to it.
        self._tokens, self._keys, self._extra_ids = tokens, keys, extra_ids
        self._scope, self._groups = scope, groups
        self._request = np.zeros((1, records.REQUEST_COLUMNS), np.int64)
        extra = NO_EXTRA if extra_ids is None else extra_ids
        how = (self._request, tokens, keys, extra, *scope.root, not scope.reuse, not scope.publish)
        if first is None or groups is None:
            requests.describe(*how)
        else:
            requests.describe_and_hash(groups, first, *how)

    def extend(self, tokens: Integers, *, extra_ids: Integers | None = None) -> BlockKeys:
        """The keys of this prompt and ``tokens`` after it; hashes only the blocks that these fill.

        ``tokens``: m token ids, may be none. ``extra_ids``: int64[m], those of the new tokens. Changes nothing. Raises
        TypeError, and ValueError, also for a copy or a pickle, which knows no secret: give it to ``block_keys`` first.
        Thread-safe.
        """
        if self._groups is None:
            raise ValueError(
                "keys: expected what KVCacheManager.block_keys(copy) gives, got a copy that no pool has made"
            )
        new = token_array("tokens", tokens, empty=True)
        extra, known = extra_array(extra_ids, len(new)), self._extra_ids
        if extra is not None or known is not None:
            zeros = [np.zeros(len(part), np.int64) for part in (self._tokens, new)]
            extra = np.concatenate((zeros[0] if known is None else known, zeros[1] if extra is None else extra))
        both = np.concatenate((self._tokens, new))
        return BlockKeys.of_private(both, self._keys, extra, self._scope, self._groups)

    def __getitem__(self, which: slice) -> BlockKeys:
        if not isinstance(which, slice):
            raise TypeError(f"index: expected a slice [:n], got [{which!r:.80}]")
        start, stop, step = which.indices(len(self))
        if start != 0 or step != 1 or stop <= 0:
            raise ValueError(
                f"index: expected a slice [:n] of one token or more, got [{which.start}:{which.stop}:{which.step}]"
            )
        extra = None if self._extra_ids is None else self._extra_ids[:stop]
        part = object.__new__(BlockKeys)
        keys = self._keys[: stop // self._scope.origin[1]]
        part._fill(
            self._tokens[:stop], keys, extra if extra is not None and extra.any() else None, self._scope, self._groups
        )
        return part

    def prove(self, root: tuple[int, int, int], groups: Int64s) -> None:
        """Raise ValueError unless the pool with these headers, in which the namespace has this root, would give the
        same keys. What a copy or a pickle has brought is hashed, once, and can be extended then."""
        if self._groups is None:
            hashed = BlockKeys.of_private(self._tokens, self._keys[:0], self._extra_ids, self._scope, groups)
            if root != self._scope.root or not np.array_equal(hashed._keys, self._keys):
                raise ValueError("keys: they are not those of their tokens, extra_ids, salt and adapter_id")
            self._groups = groups

    @property
    def has_extra(self) -> bool:
        """Whether there are extra ids."""
        return self._extra_ids is not None

    @property
    def tokens(self) -> Int32s:
        return read_only(self._tokens)

    @property
    def keys(self) -> Uint64s:
        return read_only(self._keys)

    @property
    def extra_ids(self) -> Int64s | None:
        return None if self._extra_ids is None else read_only(self._extra_ids)

    @property
    def salt(self) -> bytes | str | None:
        return self._scope.salt

    @property
    def adapter_id(self) -> int | str | None:
        return self._scope.adapter_id

    @property
    def namespace(self) -> int:
        return self._scope.root[0]

    @property
    def root(self) -> tuple[int, int]:
        """The key that the chain of blocks begins with, as two signed 64-bit integers."""
        return self._scope.root[1:]

    @property
    def origin(self) -> tuple[str, int]:
        return self._scope.origin

    @property
    def reuse(self) -> bool:
        return self._scope.reuse

    @property
    def publish(self) -> bool:
        return self._scope.publish

    def __len__(self) -> int:
        return len(self._tokens)

    def __setstate__(self, state: object) -> None:
        raise TypeError("BlockKeys have no state to set: a pickle brings what they are made of")

    def __reduce__(self) -> tuple[Any, ...]:
        salt, adapter_id, root, origin, reuse, publish = self._scope
        extra = None if self._extra_ids is None else self._extra_ids.copy()
        args = (self._tokens.copy(), self._keys.copy(), salt, adapter_id, extra, root, origin, reuse, publish)
        return BlockKeys, args


Prompt: TypeAlias = "BlockKeys | Integers"
"""What calls with prompts take: tokens, or what was hashed of them."""
Key: TypeAlias = bytes | bytearray | memoryview | Uint64s
Keys: TypeAlias = "BlockKeys | Uint64s | Sequence[Key] | ForeignArray"
"""What calls with keys take: 16 bytes for each, or uint64[n, 2]."""


def request_of(prompt: BlockKeys) -> Int64s:
    """A prompt as jitted code sees it: int64[1, REQUEST_COLUMNS], see ``state.records``.

    It holds addresses of the prompt's own memory: for calls that keep the prompt, and do not write to it.
    """
    return prompt._request


def requests_of(prompts: Sequence[BlockKeys]) -> Int64s:
    """The same of several prompts, private: int64[n, REQUEST], in which the call notes what it asks for."""
    if len(prompts) == 1:
        return prompts[0]._request.copy()
    return np.concatenate([prompt._request for prompt in prompts] or [NO_REQUESTS])


def unproven(prompts: Sequence[BlockKeys], origin: tuple[str, int]) -> list[BlockKeys]:
    """Those of the prompts that no pool has hashed yet, or compared with its own. Raises ValueError unless a pool with
    this secret and block length has made all of these keys."""
    for prompt in prompts:
        made_by = prompt._scope.origin
        if made_by is not origin and made_by != origin:
            raise ValueError("the keys were made by a pool with another secret or another tokens_per_block")
    return [prompt for prompt in prompts if prompt._groups is None]


def _origin_argument(origin: object) -> tuple[str, int]:
    if not isinstance(origin, tuple) or len(origin) != 2 or not isinstance(origin[0], str):
        raise TypeError(f"origin: expected (fingerprint, tokens_per_block), got {origin!r:.80}")
    return str.__str__(origin[0]), integer_argument("origin[1]", origin[1], 1, INT32_MAX)


def _root_argument(root: object) -> tuple[int, int, int]:
    if not isinstance(root, tuple) or len(root) != 3:
        raise TypeError(f"root: expected three integers, got {root!r:.80}")
    namespace, root0, root1 = (
        integer_argument(f"root[{i}]", number, -(1 << 63), (1 << 63) - 1) for i, number in enumerate(root)
    )
    return namespace, root0, root1


class Match(NamedTuple):
    """What a prompt would reuse now, in tokens: full blocks on the device, full blocks on the host, part of one more
    block.

    Tokens that a window has passed count as on the device: they need no block, and are not computed again. With several
    groups of layers, all groups can reuse these tokens; ``host_tokens`` is of the group that has the most on the host.

    ``store_tokens``: tokens after the full blocks that stores behind the host are known to have. A ``StorageManager``
    counts them. They are no part of ``full_tokens`` and ``tokens``: an admission reuses only what has been brought to
    the host.
    """

    device_tokens: int
    host_tokens: int
    partial_tokens: int
    store_tokens: int = 0

    @property
    def full_tokens(self) -> int:
        return self.device_tokens + self.host_tokens

    @property
    def tokens(self) -> int:
        return self.full_tokens + self.partial_tokens


class Admission(NamedTuple):
    """What the head of a batch got, prompt by prompt: ids, reused tokens (total, device, host, partial) and blocks to
    be computed.

    ``ids`` int64[m], the others int32[m]. They are about the first m prompts of the batch, in its order; the prompts
    behind them may fit later. ``refused`` says which prompts of the whole batch can never fit, and why: place in the
    batch -> reason. A refused prompt among the first m has the id -1. Without ``allow_partial_batch``, m is the length
    of the batch and nothing is refused.

    Tokens that a window has passed count as on the device. With several groups of layers, tokens on the host are of the
    group that has the most on the host; blocks to be computed are the same in all.
    """

    ids: Int64s
    cached_tokens: Int32s
    device_tokens: Int32s
    host_tokens: Int32s
    partial_tokens: Int32s
    missed_blocks: Int32s
    refused: dict[int, str]

    @property
    def admitted(self) -> int:
        """How many requests were admitted: those of the first ``len(ids)`` that were not refused."""
        return int(np.count_nonzero(self.ids >= 0))


class Plan(NamedTuple):
    """What ``add_sequence_batch`` would do now with the head of a batch that fits, prompt by prompt.

    ``cached_tokens``, ``device_tokens``, ``host_tokens``, ``partial_tokens``, ``missed_blocks`` int32[m] and
    ``refused`` are those of the ``Admission`` with ``allow_partial_batch``: m is the length of the batch where it fits
    as a whole. ``blocks``: the free device blocks that these m prompts take together; an int, or int64[groups] where
    there are several groups.

    ``computing`` int64[m]: a live sequence that is computing more of the prompt's beginning than is cached, -1 if there
    is none. ``computing_tokens`` int32[m]: once it has committed so many tokens, the prompt can reuse them, all in full
    blocks; 0 if there is none.
    """

    cached_tokens: Int32s
    device_tokens: Int32s
    host_tokens: Int32s
    partial_tokens: Int32s
    missed_blocks: Int32s
    blocks: int | Int64s
    computing: Int64s
    computing_tokens: Int32s
    refused: dict[int, str]

    @property
    def full_tokens(self) -> Int32s:
        """Reused tokens in full blocks, int32[m]."""
        return self.device_tokens + self.host_tokens

    @property
    def admitted(self) -> int:
        """How many prompts would be admitted: those of the first m that were not refused."""
        return len(self.cached_tokens) - sum(place < len(self.cached_tokens) for place in self.refused)


class MissingBlocks(NamedTuple):
    """What could be loaded for a prompt. With it, ``tokens`` tokens can be reused. ``blocks`` has, for each group of
    layers, the places of the full blocks that it lacks for that, int64[m] in rising order."""

    tokens: int
    blocks: tuple[Int64s, ...]


def tier_number(tier: object) -> int:
    """A tier as the state counts them; ANY_TIER for None. ValueError for anything else."""
    numbers = {None: control.ANY_TIER, "device": int(records.DEVICE), "host": int(records.HOST)}
    if not (tier is None or isinstance(tier, str)) or tier not in numbers:
        raise ValueError(f"tier: expected None, 'device' or 'host', got {tier!r:.80}")
    return numbers[tier]


def key_rows(keys: object) -> Int64s:
    """Keys as private int64[n, 2]: BlockKeys, uint64[n, 2], or a sequence of 16-byte strings."""
    if isinstance(keys, BlockKeys):
        return keys._keys.view(np.int64)
    keys = in_numpy("keys", np.asarray(keys) if isinstance(keys, memoryview) else keys)
    if isinstance(keys, np.ndarray):
        array = np.asarray(keys)[...]
        if array.dtype != np.uint64 or array.ndim != 2 or array.shape[1] != 2:
            raise ValueError(f"keys: expected uint64[n, 2], got shape {array.shape} and dtype {array.dtype}")
        return array.copy().view(np.int64)
    if not isinstance(keys, Sequence) or isinstance(keys, (str, bytes)):
        raise TypeError(f"keys: expected BlockKeys, uint64[n, 2] or a sequence of single keys, got {keys!r:.80}")
    rows = [key_row(key) for key in tuple(keys)]
    return np.concatenate(rows) if rows else np.empty((0, 2), np.int64)


def key_row(key: object) -> Int64s:
    """One key as private int64[1, 2]: 16 bytes or uint64[2]."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        data = bytes(key)
        if len(data) != 16:
            raise ValueError(f"key: expected 16 bytes, got {len(data)}")
        return np.frombuffer(data, np.int64).copy().reshape(1, 2)
    try:
        array = np.asarray(in_numpy("key", key))[...]
    except (TypeError, ValueError):
        raise TypeError(f"key: expected 16 bytes or uint64[2], got {key!r:.80}") from None
    if array.dtype != np.uint64 or array.shape != (2,):
        raise TypeError(f"key: expected 16 bytes or uint64[2], got {key!r:.80}")
    return array.copy().view(np.int64).reshape(1, 2)


def is_keys(value: object) -> bool:
    """Whether an argument is keys rather than tokens: two dimensions, or single keys in a sequence."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not is_integer(value[0])
