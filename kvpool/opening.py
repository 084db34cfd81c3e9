"""Opens a pool or a host cache together with its stores, and closes all of them in the right order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from kvpool.common.arguments import Integers, Namespace
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import AnyArray
from kvpool.device.base import Device
from kvpool.errors import did_you_mean
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.tier import HostTier
from kvpool.pool.config import EvictionOptions, LayerGroup, MemoryOptions
from kvpool.pool.manager import KVCacheManager
from kvpool.storage.choice import LoadPolicy
from kvpool.storage.host_storage_manager import HostStorageManager
from kvpool.storage.storage_manager import StorageManager
from kvpool.storage.store import Store
from kvpool.storage.urls import naming, open_stores, place_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from kvpool.state.arrays import PolicyName
    from kvpool.storage.tier_storage import SaveMode

HASH_VERSION = "kvpool 1"
"""The way in which a pool makes keys, as a ModelIdentity names it."""
EVENT_CAPACITY = 16_384
"""More blocks than are committed in the milliseconds between two reads of the storage manager."""
DRAIN_SECONDS = 10.0
_log = logging.getLogger("kvpool.storage")


class PoolOptions(TypedDict, total=False):
    """The arguments of ``KVCacheManager`` that ``open`` passes on."""

    groups: Sequence[LayerGroup] | None
    tokens_per_block: int | None
    device: str | Device
    max_sequences: int
    max_sequence_tokens: int | None
    window: int | None
    sinks: int
    partial_reuse: bool
    policy: PolicyName
    eviction: EvictionOptions | None
    memory: MemoryOptions | None
    clock: Callable[[], int] | None


class StorageOptions(TypedDict, total=False):
    """The arguments of ``StorageManager`` that ``open`` passes on."""

    save: SaveMode
    quotas: Mapping[Namespace, int] | None
    load_seconds: float
    save_seconds: float | None
    staging_blocks: int
    promotion_blocks: int | None
    queued_blocks: int
    prefill_tokens_per_s: float | None
    failures: int
    probe_seconds: float
    interval_seconds: float


class OpenOptions(PoolOptions, StorageOptions, total=False):
    """The arguments of both."""


class HostCacheOptions(TypedDict, total=False):
    """The arguments of ``HostCache`` that ``open_host_cache`` passes on."""

    secret: bytes | None
    event_capacity: int
    clock: Callable[[], int] | None
    policy: PolicyName
    history: int


class HostStorageOptions(TypedDict, total=False):
    """The arguments of ``HostStorageManager`` that ``open_host_cache`` passes on."""

    save: SaveMode
    load_share: float
    save_share: float
    load_seconds: float
    save_seconds: float
    retry_seconds: float
    quota: int | None
    policies: Sequence[LoadPolicy | None] | None
    spare: Callable[[], float]


class OpenHostOptions(HostCacheOptions, HostStorageOptions, total=False):
    """The arguments of both."""


class OpenPool(NamedTuple):
    """A pool and the storage manager of its stores, as ``open`` returns them. A context manager.

    Attributes
    ----------
    cache : KVCacheManager
        The pool.
    storage : StorageManager
        What saves the blocks of the pool, and loads what a prompt needs.
    """

    cache: KVCacheManager
    storage: StorageManager

    def close(self, timeout: float = DRAIN_SECONDS) -> bool:
        """Wait until blocks are saved, then close the storage manager, and then the pool.

        The end of a ``with`` block does the same, with the default timeout. After an exception it does not wait.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for saves. What is not saved by then is lost with the pool, and a warning is logged.

        Returns
        -------
        bool
            Whether everything was saved, and no call of a store hangs.
        """
        return _close(self.storage, timeout, partial(self.cache.close, force=True))

    def __enter__(self) -> OpenPool:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        _close(self.storage, 0.0 if kind else DRAIN_SECONDS, partial(self.cache.__exit__, kind, *error))


class OpenHostCache(NamedTuple):
    """A host cache, its memory and the storage manager of its stores. A context manager.

    ``open_host_cache`` returns it.

    Attributes
    ----------
    cache : HostCache
        Call its ``reserve`` and ``abort``, and the other methods of the storage manager.
    tier : HostTier
        The memory of the host blocks.
    storage : HostStorageManager
        What saves the blocks, and loads what is looked up.
    """

    cache: HostCache
    tier: HostTier
    storage: HostStorageManager

    def close(self, timeout: float = DRAIN_SECONDS) -> bool:
        """Wait until blocks are saved, then close the storage manager, the cache and the tier, in this order.

        The end of a ``with`` block does the same, with the default timeout. After an exception it does not wait. Close
        a ``HostCopies`` before.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for saves. What is not saved by then is lost with the cache, and a warning is logged.

        Returns
        -------
        bool
            Whether everything was saved, and no call of a store hangs.
        """
        return _close(self.storage, timeout, self._close_rest)

    def __enter__(self) -> OpenHostCache:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        _close(self.storage, 0.0 if kind else DRAIN_SECONDS, self._close_rest)

    def _close_rest(self) -> None:
        self.cache.close()
        self.tier.close()


def open(
    layout: BlockLayout | None = None,
    *,
    device_blocks: int | Integers,
    host_blocks: int | Integers,
    stores: Sequence[Store | str],
    model: str | ModelIdentity,
    revision: str | None = None,
    secret: bytes | None = None,
    event_capacity: int = EVENT_CAPACITY,
    **options: Unpack[OpenOptions],
) -> OpenPool:
    """Open a pool together with its stores.

    Stores keep full blocks: of a prompt that is found again, the tokens after its last full block are computed.

    Parameters
    ----------
    layout : BlockLayout, optional
        The layout of a block. Not with ``groups``.
    device_blocks, host_blocks : int or sequence of int
        The capacities of both tiers, as for ``KVCacheManager``. Each group of layers needs host blocks.
    stores : sequence of str or Store
        1 to 16 stores, the nearest first, such as ``["disk:/var/kv?capacity=100GiB"]``: see ``open_store``.
    model : str or ModelIdentity
        The name of the model. Blocks of another model are never found. With a text, the type and layout of the elements
        are those of the pool.
    revision : str, optional
        The revision, or a digest, of the weights. Required if ``model`` is a text, since new weights need another one.
    secret : bytes, optional
        16 to 64 bytes that key the hash of content. Pools with another secret find nothing. Default: the secret of the
        first store that outlives the process.
    event_capacity : int, default 16384
        Blocks whose events are kept for the storage manager, which reads them every few milliseconds.
    **options : OpenOptions
        Other arguments of ``KVCacheManager`` and of ``StorageManager``, such as ``device``, ``policy`` or ``save``.

    Returns
    -------
    OpenPool
        The pool and its storage manager. Close it, or use it in a ``with`` statement.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.
    ImportError
        For a store whose extra is not installed.
    OSError
        For a store that cannot be opened. The message has its place in ``stores`` and its text.

    Notes
    -----
    If anything raises, what was opened before is closed again, in reverse order.

    Examples
    --------
    >>> import kvpool
    >>> from kvpool.storage import MemoryStore
    >>> layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4)
    >>> size = {"device_blocks": 8, "host_blocks": 8, "device": "cpu"}
    >>> store = MemoryStore(1 << 20)
    >>> with kvpool.open(layout, **size, stores=[store], model="tiny", revision="1") as (cache, storage):
    ...     sequence = cache.add_sequence([1, 2, 3, 4, 5, 6])
    ...     cache.commit(sequence)
    ...     cache.release(sequence)
    >>> with kvpool.open(layout, **size, stores=[store], model="tiny", revision="1") as (cache, storage):
    ...     waited = storage.prefetch([1, 2, 3, 4, 5, 6]).wait()
    ...     print(cache.match_prefix([1, 2, 3, 4, 5, 6]).tokens)
    4
    """
    pool_options, storage_options = _split("open", options, PoolOptions, StorageOptions)
    if isinstance(model, ModelIdentity) != (revision is None):
        raise ValueError(
            f"revision: expected a text with the name of a model, None with a ModelIdentity, got {revision!r:.80}"
        )
    opened_stores = open_stores(stores)
    with ExitStack() as ends:
        for store in opened_stores:
            ends.callback(store.discard)
        cache = KVCacheManager(
            layout,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            secret=_secret_of(opened_stores) if secret is None else secret,
            event_capacity=event_capacity,
            **pool_options,
        )
        ends.callback(cache.close)
        identity = model if isinstance(model, ModelIdentity) else _identity_of(model, revision or "", cache)
        storage = StorageManager(cache, opened_stores, identity=identity, **storage_options)
        ends.callback(storage.close)
        opened = OpenPool(cache, storage)
        ends.pop_all()
    return opened


def open_host_cache(
    host_blocks: int,
    block_bytes: int | BlockLayout | list[BlockLayout],
    *,
    identity: ModelIdentity,
    stores: Sequence[Store | str],
    memory: AnyArray | None = None,
    **options: Unpack[OpenHostOptions],
) -> OpenHostCache:
    """Open a host cache together with its memory and its stores.

    Parameters
    ----------
    host_blocks : int
        The number of host blocks.
    block_bytes : int or BlockLayout or list of BlockLayout
        Bytes of a block, of all workers together; or the layouts of its content.
    identity : ModelIdentity
        The model whose KV this is. Blocks of another model are never found.
    stores : sequence of str or Store
        1 to 16 stores, the nearest first, such as ``["disk:/var/kv?capacity=100GiB"]``: see ``open_store``.
    memory : array, optional
        Memory of the caller's for the host blocks: see ``HostTier``.
    **options : OpenHostOptions
        Other arguments of ``HostCache`` and of ``HostStorageManager``, such as ``policy`` or ``save``.

    Returns
    -------
    OpenHostCache
        The cache, its memory and its storage manager. Close it, or use it in a ``with`` statement.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.
    ImportError
        For a store whose extra is not installed.
    OSError
        For a store that cannot be opened. The message has its place in ``stores`` and its text.

    Notes
    -----
    If anything raises, what was opened before is closed again, in reverse order.
    """
    cache_options, storage_options = _split("open_host_cache", options, HostCacheOptions, HostStorageOptions)
    with ExitStack() as ends:
        cache = ends.enter_context(HostCache(host_blocks, block_bytes, identity=identity, **cache_options))
        tier = ends.enter_context(HostTier.of(cache, memory=memory))
        storage = ends.enter_context(HostStorageManager(cache, tier, stores, **storage_options))
        opened = OpenHostCache(cache, tier, storage)
        ends.pop_all()
    return opened


def _split(call: str, options: Mapping[str, Any], first: Any, second: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of each of two types. Raises TypeError for one that is of neither."""
    known = first.__optional_keys__ | second.__optional_keys__
    for name in options:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
    of_first = {name: value for name, value in options.items() if name in first.__optional_keys__}
    return of_first, {name: value for name, value in options.items() if name not in of_first}


def _secret_of(stores: Sequence[Store]) -> bytes | None:
    """The secret of the first store that outlives the process. Without such a store, that of the first one."""
    persistent = [store for store in stores if store.persistent]
    for store in persistent or stores:
        with suppress(NotImplementedError), naming(place_of(store, stores.index(store))):
            return store.secret
    if persistent:
        raise ValueError("secret: expected 16 to 64 bytes, since no store has a secret before it is opened, got None")
    return None


def _identity_of(model: str, revision: str, cache: KVCacheManager) -> ModelIdentity:
    """The identity of a model whose elements are those of a pool."""
    layouts = [layout for group in cache.groups for layout in group.layouts]
    kv_dtype = " ".join(dict.fromkeys(layout.dtype_name for layout in layouts))
    return ModelIdentity(model, revision, kv_dtype, layouts, HASH_VERSION)


def _close(storage: StorageManager | HostStorageManager, timeout: float, close_rest: Callable[[], object]) -> bool:
    """Wait until all is saved, for ``timeout`` seconds. Then close the storage manager, and after it the rest, whatever
    exception comes."""
    with ExitStack() as ends:
        ends.callback(close_rest)
        with storage:
            saved = storage.closed or storage.drain(timeout)
            if timeout and not saved:
                _log.warning("closed after %g s, before all blocks were saved", timeout)
        return storage.close() and saved
