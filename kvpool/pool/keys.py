"""BlockKeys: a prompt with the keys of its full blocks, hashed once and outside every lock; and the results of calls
with prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arguments import (
    INT32_MAX,
    Integers,
    adapter_argument,
    bool_argument,
    extra_array,
    is_integer,
    salt_argument,
    token_array,
)
from kvpool.common.arrays import Int32s, Int64s, SupportsDLPack, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import in_numpy, read_only
from kvpool.state import control, records, requests

NO_EXTRA = np.empty(0, np.int64)
NO_REQUESTS: Int64s = np.empty((0, records.REQUEST_COLUMNS), np.int64)


class Scope(NamedTuple):
    """The namespace and the options of a prompt. ``root`` is the digest of the namespace, and the two halves of the key
    before the first block. ``origin`` is the fingerprint of the secret, and ``tokens_per_block``."""

    salt: bytes | str | None
    adapter_id: int | str | None
    root: tuple[int, int, int]
    origin: tuple[str, int]
    reuse: bool = True
    publish: bool = True


class BlockKeys:
    """A prompt with the keys of its full blocks, hashed once, for every call that takes a prompt.

    ``KVCacheManager.block_keys`` returns it. ``len`` is its number of tokens. A slice ``keys[:n]`` is the prompt of the
    first n tokens, and costs no hashing and no copy. ``extend`` appends tokens.

    Notes
    -----
    Immutable and thread-safe: its arrays are read-only views.

    It can be copied and pickled, for pools with the same secret. A pool hashes a copy again when it receives it first,
    and refuses keys that do not match the tokens. Pass a copy to ``KVCacheManager.block_keys`` before you extend it.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     keys = cache.block_keys(range(6))
    ...     longer = keys.extend([6, 7])
    ...     print(len(keys), keys.keys.shape, longer.keys.shape, len(longer[:4]))
    6 (1, 2) (2, 2) 4
    """

    __slots__ = ("_extra_ids", "_groups", "_keys", "_request", "_scope", "_tokens")
    __iter__ = None

    def __new__(
        cls,
        tokens: Integers,
        keys: Uint64s,
        salt: bytes | str | None,
        adapter_id: int | str | None,
        extra_ids: Integers | None,
        root: tuple[int, int, int],
        origin: tuple[str, int],
        reuse: bool = True,
        publish: bool = True,
    ) -> BlockKeys:
        """Restore a copy or a pickle, and copy its arrays. Raises TypeError or ValueError for values that no pool has
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
        """Return the keys of checked arguments, and of arrays that nobody else can write.

        ``known`` has the keys of the first full blocks. The others are hashed with the secret in ``groups``, the
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
        """Set all fields, and hash the keys from ``first`` on with the secret in ``groups``."""
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
        """Return the keys of this prompt with more tokens after it.

        Only the blocks that the new tokens fill are hashed.

        Parameters
        ----------
        tokens : array_like of int, shape (m,)
            The new token ids. It may be empty.
        extra_ids : array_like of int64, shape (m,), optional
            The extra ids of the new tokens.

        Returns
        -------
        BlockKeys
            The keys of all tokens.

        Raises
        ------
        TypeError, ValueError
            For a bad argument. ValueError too for a copy or a pickle, which has no secret: pass it to
            ``KVCacheManager.block_keys`` first.
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
        """Raise ValueError unless the pool with these headers, in which the namespace has this root, computes the same
        keys. A copy or a pickle is hashed here, once, and can be extended afterwards."""
        if self._groups is None:
            hashed = BlockKeys.of_private(self._tokens, self._keys[:0], self._extra_ids, self._scope, groups)
            if root != self._scope.root or not np.array_equal(hashed._keys, self._keys):
                raise ValueError("keys: they are not those of their tokens, extra_ids, salt and adapter_id")
            self._groups = groups

    @property
    def has_extra(self) -> bool:
        """Whether some token has an extra id."""
        return self._extra_ids is not None

    @property
    def tokens(self) -> Int32s:
        """The token ids, int32 of shape (n,)."""
        return read_only(self._tokens)

    @property
    def keys(self) -> Uint64s:
        """The keys of the full blocks, uint64 of shape (n // tokens_per_block, 2)."""
        return read_only(self._keys)

    @property
    def extra_ids(self) -> Int64s | None:
        """The extra id of each token, int64 of shape (n,), or None if no token has one."""
        return None if self._extra_ids is None else read_only(self._extra_ids)

    @property
    def salt(self) -> bytes | str | None:
        """The salt, which separates tenants."""
        return self._scope.salt

    @property
    def adapter_id(self) -> int | str | None:
        """The adapter, such as a LoRA, that the KV is computed with."""
        return self._scope.adapter_id

    @property
    def namespace(self) -> int:
        """The digest of salt and adapter that each block carries."""
        return self._scope.root[0]

    @property
    def root(self) -> tuple[int, int]:
        """The key before the first block, as two signed 64-bit integers."""
        return self._scope.root[1:]

    @property
    def origin(self) -> tuple[str, int]:
        """The fingerprint of the pool's secret, and ``tokens_per_block``."""
        return self._scope.origin

    @property
    def reuse(self) -> bool:
        """Whether the prompt may reuse cached blocks."""
        return self._scope.reuse

    @property
    def publish(self) -> bool:
        """Whether other prompts may reuse the blocks of this one."""
        return self._scope.publish

    def __len__(self) -> int:
        return len(self._tokens)

    def __setstate__(self, state: object) -> None:
        raise TypeError("BlockKeys have no state to set: a pickle has the arguments of their constructor")

    def __reduce__(self) -> tuple[Any, ...]:
        salt, adapter_id, root, origin, reuse, publish = self._scope
        extra = None if self._extra_ids is None else self._extra_ids.copy()
        args = (self._tokens.copy(), self._keys.copy(), salt, adapter_id, extra, root, origin, reuse, publish)
        return BlockKeys, args


Prompt: TypeAlias = "BlockKeys | Integers"
"""A prompt: token ids, or the keys that were made of them."""
Key: TypeAlias = bytes | bytearray | memoryview | Uint64s
Keys: TypeAlias = "BlockKeys | Uint64s | Sequence[Key] | SupportsDLPack"
"""Keys: 16 bytes for each, or uint64[n, 2]."""


def request_of(prompt: BlockKeys) -> Int64s:
    """Return a prompt as jitted code reads it: int64[1, REQUEST_COLUMNS], see ``state.records``.

    It holds addresses of the prompt's own memory, so the caller keeps the prompt alive and does not write to the array.
    """
    return prompt._request


def requests_of(prompts: Sequence[BlockKeys]) -> Int64s:
    """Return the same for several prompts, in a private int64[n, REQUEST_COLUMNS] that the call may write to."""
    if len(prompts) == 1:
        return prompts[0]._request.copy()
    return np.concatenate([prompt._request for prompt in prompts] or [NO_REQUESTS])


def unproven(prompts: Sequence[BlockKeys], origin: tuple[str, int]) -> list[BlockKeys]:
    """Return the prompts whose keys no pool has computed or verified yet. Raises ValueError unless a pool with this
    secret and block length has made all of them."""
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
    """The number of tokens of a prompt that the pool could reuse at this moment.

    ``KVCacheManager.match_prefix`` returns it.

    Attributes
    ----------
    device_tokens : int
        Tokens in full blocks on the device.
    host_tokens : int
        Tokens in full blocks that only the host has. They are copied to the device on admission.
    partial_tokens : int
        First tokens of one more block, which are copied from a block that matches in part.
    store_tokens : int, default 0
        Tokens after the full blocks that stores behind the host are known to have. A ``StorageManager`` sets it. They
        are not part of ``full_tokens`` and ``tokens``: an admission reuses a block only after it was loaded to the
        host.

    Notes
    -----
    In a pool with a sliding window, tokens that the window has passed count as device tokens, since they need no block
    and are not computed again. With several groups of layers, every group can reuse these tokens. ``host_tokens`` is
    that of the group with the most tokens on the host.
    """

    device_tokens: int
    host_tokens: int
    partial_tokens: int
    store_tokens: int = 0

    @property
    def full_tokens(self) -> int:
        """The number of tokens in full blocks."""
        return self.device_tokens + self.host_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens, with those of the block that matches in part."""
        return self.full_tokens + self.partial_tokens


class Admission(NamedTuple):
    """The sequences that an admission has made, with the tokens that each reuses.

    ``KVCacheManager.add_sequence_batch`` returns it. It has the first m prompts of the batch, in their order; the
    prompts after them may fit later. Without ``allow_partial_batch``, m is the length of the batch, and no prompt is
    refused.

    Attributes
    ----------
    ids : ndarray of int64, shape (m,)
        The sequence ids; -1 for a refused prompt.
    cached_tokens : ndarray of int32, shape (m,)
        Reused tokens: the sum of the next three. The engine computes the others.
    device_tokens : ndarray of int32, shape (m,)
        Reused tokens in full blocks that were on the device.
    host_tokens : ndarray of int32, shape (m,)
        Reused tokens in full blocks that were on the host only.
    partial_tokens : ndarray of int32, shape (m,)
        Reused tokens that were copied from a block that matched in part.
    missed_blocks : ndarray of int32, shape (m,)
        Blocks of the prompt that are not full hits.
    refused : dict of int to str
        The prompts of the whole batch that can never fit: index in the batch, and the reason.

    Notes
    -----
    In a pool with a sliding window, tokens that the window has passed count as device tokens. With several groups of
    layers, ``host_tokens`` is that of the group with the most tokens on the host; ``missed_blocks`` is the same in all.
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
        """The number of prompts that were admitted: the first ``len(ids)`` without the refused ones."""
        return int(np.count_nonzero(self.ids >= 0))


class Plan(NamedTuple):
    """The admission that ``add_sequence_batch`` with ``allow_partial_batch`` would make at this moment.

    ``KVCacheManager.plan_batch`` returns it. It has the first m prompts of the batch, which fit together; m is the
    length of the batch if all of them fit.

    Attributes
    ----------
    cached_tokens : ndarray of int32, shape (m,)
        Tokens that would be reused: the sum of the next three.
    device_tokens : ndarray of int32, shape (m,)
        Of those, tokens in full blocks on the device.
    host_tokens : ndarray of int32, shape (m,)
        Of those, tokens in full blocks on the host only.
    partial_tokens : ndarray of int32, shape (m,)
        Of those, tokens that would be copied from a block that matches in part.
    missed_blocks : ndarray of int32, shape (m,)
        Blocks of the prompt that are not full hits.
    blocks : int or ndarray of int64, shape (groups,)
        Free device blocks that the m prompts take together. An int in a pool with one group of layers.
    computing : ndarray of int64, shape (m,)
        A live sequence that is computing a longer prefix of the prompt than is cached; -1 if there is none.
    computing_tokens : ndarray of int32, shape (m,)
        The number of tokens, all in full blocks, that the prompt can reuse once that sequence has committed them; 0 if
        there is none.
    refused : dict of int to str
        The prompts of the whole batch that can never fit: index in the batch, and the reason.
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
        """Tokens in full blocks that would be reused, int32 of shape (m,)."""
        return self.device_tokens + self.host_tokens

    @property
    def admitted(self) -> int:
        """The number of prompts that would be admitted: the first m without the refused ones."""
        return len(self.cached_tokens) - sum(place < len(self.cached_tokens) for place in self.refused)


class MissingBlocks(NamedTuple):
    """The blocks that a loader has to load so that more of a prompt can be reused.

    ``CachedContent.missing_blocks`` returns it.

    Attributes
    ----------
    tokens : int
        The number of tokens that can be reused once these blocks are loaded.
    blocks : tuple of ndarray of int64
        For each group of layers, the indices of the prompt's full blocks to load, in ascending order.
    """

    tokens: int
    blocks: tuple[Int64s, ...]


def tier_number(tier: object) -> int:
    """Return the number of a tier in the state; ANY_TIER for None. Raises ValueError for anything else."""
    numbers = {None: control.ANY_TIER, "device": records.DEVICE, "host": records.HOST}
    if not (tier is None or isinstance(tier, str)) or tier not in numbers:
        raise ValueError(f"tier: expected None, 'device' or 'host', got {tier!r:.80}")
    return numbers[tier]


def key_rows(keys: object) -> Int64s:
    """Return keys as private int64[n, 2]. Accepts BlockKeys, uint64[n, 2], or a sequence of 16-byte strings."""
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
    """Return one key as private int64[1, 2]. Accepts 16 bytes or uint64[2]."""
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
    """Return whether an argument is keys rather than tokens: two dimensions, or single keys in a sequence."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not is_integer(value[0])
