"""CachedContent: calls that look up, move, drop and rank cached content."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.common.arguments import Namespace, namespace_argument, priority_argument, ttl_argument
from kvpool.common.arrays import Bools, Int64s, SupportsDLPack
from kvpool.common.arrays.layout import Tier, integer_argument
from kvpool.common.arrays.strided import in_numpy
from kvpool.pool.core import MAX_MS, Core
from kvpool.pool.explain import Explanation, explained
from kvpool.pool.hints import ClientHints, HintAnswer, HintMessage
from kvpool.pool.keys import BlockKeys, Keys, MissingBlocks, Prompt, is_keys, key_rows, request_of, tier_number
from kvpool.pool.prompt_requests import PromptRequests
from kvpool.state import control, index, verbs


class CachedContent:
    """The calls about cached content, which a prompt, keys or a namespace names. It is ``KVCacheManager.content``.

    Notes
    -----
    Thread-safe.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
    ...     sequence = cache.add_sequence(range(8))
    ...     cache.commit(sequence)
    ...     cache.release(sequence)
    ...     print(cache.content.offload(range(8)), cache.content.cached_blocks(range(8), tier="host"))
    ...     print(cache.content.forget(range(8)), cache.match_prefix(range(8)).tokens)
    2 [[ True  True]]
    2 0
    """

    def __init__(self, core: Core, requests: PromptRequests, client_hints: ClientHints) -> None:
        self.core, self._requests, self._client_hints = core, requests, client_hints

    def prefetch(self, prompt: Prompt) -> int:
        """Copy the cached full blocks of a prompt to the device, where only the host has them.

        It does not hold them. It stops when no device block is free.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt.

        Returns
        -------
        int
            Number of blocks that were copied.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad prompt; after the pool was closed.

        Notes
        -----
        Changes the pool. With a sliding window, it copies the blocks that an admission of the prompt would reuse.
        """
        keys = self._requests.keys(prompt)
        full = len(keys) // self.core.config.tokens_per_block
        ids = np.empty((len(self.core.states), full), np.int32)
        return int(self.core.decide(None, verbs.prefetch, request_of(keys), ids, self.core.now()))

    def offload(self, prompt: Prompt | Keys) -> int:
        """Copy cached device blocks to the host, and keep both copies.

        A later eviction from the device then needs no copy. The call stops when the host tier has no room.

        Parameters
        ----------
        prompt : BlockKeys, array_like of int, shape (n,), or keys
            A prompt, or the keys of blocks: ndarray of uint64, shape (n, 2), or a list of 16-byte strings.

        Returns
        -------
        int
            Number of blocks that were copied.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Changes the pool.
        """
        return int(self.core.decide(None, verbs.offload, self._named(prompt)[1], self.core.now()))

    def cached_blocks(self, prompt: Prompt | Keys, *, tier: Tier | None = None) -> Bools:
        """Return whether each full block of a prompt, or each key, is cached.

        Parameters
        ----------
        prompt : BlockKeys, array_like of int, shape (n,), or keys
            A prompt, or the keys of blocks, as for ``offload``.
        tier : {"device", "host"}, optional
            Look in this tier only. By default in both.

        Returns
        -------
        ndarray of bool, shape (groups, m)
            For each group of layers and each of the m blocks.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Changes nothing. Other threads may change the pool before the caller reads the result.
        """
        which, rows = tier_number(tier), self._named(prompt)[1]
        out = np.empty((len(self.core.states), len(rows)), np.bool_)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(self.core.states.groups, rows, which, out)
        return out

    def missing_blocks(
        self, prompt: Prompt, available: Bools | Sequence[Sequence[bool]] | SupportsDLPack
    ) -> MissingBlocks:
        """Return the blocks that a loader should load so that more of a prompt can be reused.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt.
        available : array_like of bool, shape (groups, m)
            For each group of layers and each of the m full blocks of the prompt, whether the loader can load it.

        Returns
        -------
        MissingBlocks
            The number of tokens that can be reused afterwards, and the blocks to load: in a group with full attention,
            all that are not cached; with a sliding window, those that the next token sees; in a recurrent group, the
            last state. There are no blocks if loading gains nothing.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Changes nothing.
        """
        keys, groups = self._requests.keys(prompt), self.core.states.groups
        rows = key_rows(keys)
        loadable = _flags(available, (len(groups), len(rows)))
        cached = np.empty_like(loadable)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(groups, rows, control.ANY_TIER, cached)
            lacks = loadable | cached
            most = int(index.missing_blocks(groups, request_of(keys), cached, lacks))
        return MissingBlocks(
            most * self.core.config.tokens_per_block, tuple(np.flatnonzero(group_lacks) for group_lacks in lacks)
        )

    def explain(self, prompt: Prompt) -> Explanation:
        """Count the tokens of a prompt that the device and the host have, and give the reason for the others.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt.

        Returns
        -------
        Explanation
            The counts, and the ranges of tokens that are not reused.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad prompt; after the pool was closed.

        Notes
        -----
        Changes nothing. It looks up every block of the prompt, and hashes the prompt again for each other namespace
        that has or had sequences: use it for diagnosis, not for every request.

        Show the result to operators of the engine only, not to senders of prompts: the reason "other_namespace" reveals
        that another tenant has sent these tokens.
        """
        keys = self._requests.keys(prompt)
        match = self._requests.match(keys)
        full = len(keys) // self.core.config.tokens_per_block
        lacks = np.zeros(full, np.bool_)
        for blocks in self.missing_blocks(keys, np.ones((len(self.core.config.groups), full), np.bool_)).blocks:
            lacks[blocks] = True
        return explained(self.core, keys, match, lacks)

    def forget(
        self,
        prompt: Prompt | Keys | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> int:
        """Remove cached content from the index, in both tiers and in all groups of layers.

        Pass either ``prompt`` or ``namespace``.

        Parameters
        ----------
        prompt : BlockKeys, array_like of int, shape (n,), or keys, optional
            A prompt, or the keys of blocks, as for ``offload``. A prompt names its full blocks, and a cached block that
            begins with its last tokens. Content after these blocks stays cached, but cannot be reused without them.
        namespace : tuple of (salt, adapter_id), optional
            Remove all content of this namespace, such as that of a tenant who leaves. It visits every block of the pool
            under the lock.

        Returns
        -------
        int
            Number of contents that were removed. Two copies of one content count once.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Changes the pool. Blocks that nobody holds are empty afterwards, and are taken first. Blocks of sequences,
        reservations and leases keep their bytes until they are released. Sequences and reservations with such a block,
        or of the namespace, publish nothing from now on: a later commit would cache the content again. An
        ``import_blocks`` that is running is not stopped.

        Statistics count the blocks as ``forgotten_by_call_blocks``, and there are "removed" events.
        """
        if (prompt is None) == (namespace is None):
            raise TypeError(f"prompt, namespace: expected exactly one of them, got {prompt!r:.80}, {namespace!r:.80}")
        if namespace is not None:
            tag = self._requests.root(*namespace_argument("namespace", namespace))[0]
            return int(self.core.decide(None, control.forget_namespace, tag, self.core.now()))
        keys, rows = self._named(prompt)
        ordered, now_ms = rows[np.lexsort((rows[:, 1], rows[:, 0]))], self.core.now()
        if keys is None:
            return int(self.core.decide(None, control.forget_keys, rows, ordered, now_ms))
        return int(self.core.decide(None, control.forget_prompt, request_of(keys), rows, ordered, now_ms))

    def set_priority(self, prompt: Prompt | Keys, priority: int, *, ttl_ms: int | None = None) -> int:
        """Set the eviction priority of cached full blocks.

        Parameters
        ----------
        prompt : BlockKeys, array_like of int, shape (n,), or keys
            A prompt, or the keys of blocks, as for ``offload``.
        priority : int
            0 (evicted first) to 100 (evicted last).
        ttl_ms : int, optional
            After this many milliseconds the priority falls to the default, 35. The time begins now, or when a held
            block is released. By default it never falls.

        Returns
        -------
        int
            Number of blocks that were found.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Changes the pool, and records "updated" events. Among the blocks of the new priority, a block whose priority
        changes is evicted last. A later request that hits the block can change it again by a ``RetentionRange``.
        """
        value, ttl = priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        return int(self.core.decide(None, control.set_priority, self._named(prompt)[1], value, ttl, self.core.now()))

    def hints(
        self, message: HintMessage, *, salt: bytes | str | None = None, adapter_id: int | str | None = None
    ) -> list[HintAnswer]:
        """Apply a client's cache hints, within the budget of its namespace.

        Parameters
        ----------
        message : mapping
            The hints, as vLLM's ``KvHintsEnvelope``: ``protocol_version`` (1 or "1"), ``message_id``, and ``actions``,
            a list of at most 64 mappings with ``action_id``, ``action_type``, ``action_version`` and ``payload``.
        salt : bytes or str, optional
            The salt of the client's content. The engine sets it, and not the client.
        adapter_id : int or str, optional
            The adapter of the client's content; likewise.

        Returns
        -------
        list of HintAnswer
            The outcome of each action.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad envelope, with nothing changed; after the pool was closed.

        Notes
        -----
        Changes the pool. An action that is not valid is refused, and the others are applied.

        A payload has one of ``tokens`` (ids), ``session`` (a name that was passed to ``KVCacheManager.release``) and
        ``keys`` (uint64[n, 2], or strings of 32 hexadecimal digits). It may have ``lease_ms`` (default 60,000, at most
        600,000). The types of actions are:

        - "pin" and "retain" (with ``priority``, 36 to 99, default 60) raise the priority of cached blocks until the
          lease ends. The blocks are not held: a request that needs all blocks gets them.
        - "prefetch" copies blocks that only the host has to the device. It takes tokens or a session.
        - "drop" removes blocks from the cache.

        Content of any other namespace counts as not cached. The leases and prefetches of a namespace cover at most a
        sixteenth of the blocks at a time, and those of all namespaces a half.
        """
        return self._client_hints.apply(message, salt, adapter_id)

    def refresh(self, now_ms: int | None = None) -> int:
        """Set the default priority for the blocks whose time to live has passed.

        Parameters
        ----------
        now_ms : int, optional
            The time, in milliseconds on the pool's clock. By default now.

        Returns
        -------
        int
            Number of blocks.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad time; after the pool was closed.

        Notes
        -----
        Changes the pool. Other calls do this as far as they need it, so an engine does not have to call it.
        """
        time_ms = self.core.now() if now_ms is None else integer_argument("now_ms", now_ms, 0, MAX_MS)
        return int(self.core.decide(None, verbs.refresh, time_ms))

    def _named(self, prompt: object) -> tuple[BlockKeys | None, Int64s]:
        """Return a prompt and its keys, or None and keys. Raises TypeError, ValueError."""
        prompt = in_numpy("prompt", prompt)
        if not isinstance(prompt, BlockKeys) and is_keys(prompt):
            return None, key_rows(prompt)
        keys = self._requests.keys(prompt)
        return keys, key_rows(keys)


def _flags(available: object, shape: tuple[int, int]) -> Bools:
    """Return a private bool[groups, full blocks]. Raises TypeError, ValueError."""
    values = in_numpy("available", available)
    if isinstance(values, (list, tuple)):
        values = np.array(values)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"available: expected bool{list(shape)}, got {available!r:.80}")
    flags = np.asarray(values)[...]
    if flags.dtype != np.bool_ or flags.shape != shape:
        raise ValueError(f"available: expected bool{list(shape)}, got shape {flags.shape} and dtype {flags.dtype}")
    return flags.copy()
