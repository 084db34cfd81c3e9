"""CachedContent: calls that look at, move, drop and rank cached content that a caller names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpool.common.arguments import Namespace, namespace_argument, priority_argument, ttl_argument
from kvpool.common.arrays import Bools, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import in_numpy
from kvpool.pool.core import MAX_MS, Core
from kvpool.pool.explain import Explanation, explained
from kvpool.pool.hints import ClientHints, HintAnswer
from kvpool.pool.keys import BlockKeys, Keys, MissingBlocks, Prompt, is_keys, key_rows, request_of, tier_number
from kvpool.pool.prompt_requests import PromptRequests
from kvpool.state import control, index, verbs


class CachedContent:
    """Cached content that a prompt, keys or a namespace names: ``cache.content``. Thread-safe."""

    def __init__(self, core: Core, requests: PromptRequests, client_hints: ClientHints) -> None:
        self.core, self._requests, self._client_hints = core, requests, client_hints

    def prefetch(self, prompt: Prompt) -> int:
        """Onboard the prompt's cached full blocks that are only on the host, without holding them. Returns how many.

        With a window, it onboards those that adding the prompt would reuse. It stops when no device block is free.
        Changes the pool.
        """
        keys = self._requests.keys(prompt)
        full = len(keys) // self.core.config.tokens_per_block
        ids = np.empty((len(self.core.states), full), np.int32)
        return int(self.core.decide(None, verbs.prefetch, request_of(keys), ids, self.core.now()))

    def offload(self, prompt: Prompt | Keys) -> int:
        """Copy cached device blocks to the host and keep both copies. Returns how many were copied.

        A later eviction from the device then costs no copy. Takes a prompt, or keys. Stops when the host has no room.
        Changes the pool.
        """
        return int(self.core.decide(None, verbs.offload, self._named(prompt)[1], self.core.now()))

    def cached_blocks(self, prompt: Prompt | Keys, *, tier: str | None = None) -> Bools:
        """Which blocks of a prompt, or of keys, are cached: bool[groups, n], for each group of layers and each key.

        ``tier``: "device" or "host", None for any. The answer may be outdated when the call returns. Thread-safe;
        changes nothing. Raises TypeError, ValueError, PoolClosed.
        """
        which, rows = tier_number(tier), self._named(prompt)[1]
        out = np.empty((len(self.core.states), len(rows)), np.bool_)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(self.core.states.groups, rows, which, out)
        return out

    def missing_blocks(self, prompt: Prompt, there: object) -> MissingBlocks:
        """Which blocks a loader should load for a prompt, so that more of it can be reused.

        ``there``: bool[groups, full blocks of the prompt], the blocks that it can load. The answer has the number of
        tokens that could then be reused. For each group of layers, it has the blocks that are lacking for that: in a
        group with attention to all tokens all of them, in a group with a window those that the next token sees, in a
        recurrent group the last state. It has no blocks if nothing is gained. Thread-safe; changes nothing. Raises
        TypeError, ValueError, PoolClosed.
        """
        keys, groups = self._requests.keys(prompt), self.core.states.groups
        rows = key_rows(keys)
        brought = _flags(there, (len(groups), len(rows)))
        cached = np.empty_like(brought)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(groups, rows, control.ANY_TIER, cached)
            lacks = brought | cached
            most = int(index.missing_blocks(groups, request_of(keys), cached, lacks))
        return MissingBlocks(
            most * self.core.config.tokens_per_block, tuple(np.flatnonzero(group_lacks) for group_lacks in lacks)
        )

    def explain(self, prompt: Prompt) -> Explanation:
        """Count the tokens of a prompt that the device and the host have, and say for the rest why not, by code and
        position. See ``Explanation``.

        Looks at every block of the prompt, and hashes it again for other namespaces that have or had sequences: for
        diagnosis, not for every request. Show the result to operators of the engine only, not to senders of prompts:
        "other_namespace" reveals what others have sent. Thread-safe; changes nothing. Raises TypeError, ValueError,
        PoolClosed.
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
        """Remove cached content from the index, on both tiers and in all groups of layers. Returns how many contents.

        ``prompt``: a prompt. This forgets its full blocks, and a stored tail with which the rest of it begins. Content
        that was computed after them stays, but nobody finds it without these blocks. Or keys. ``namespace``: a pair
        (salt, adapter_id), whose whole content is forgotten, as when a tenant leaves. That looks at every block of the
        pool, under the lock.

        Blocks that nobody holds are then empty, and are taken first. Blocks of sequences, reservations and leases keep
        their bytes until nobody holds them. A sequence or a reservation of the namespace, or with a block of the prompt
        or of the keys, publishes nothing from now on. Otherwise what it commits later would bring the content back. An
        ``import_blocks`` that is running is not stopped.

        Counted as ``forgotten_by_call_blocks``, with "removed" events. Changes the pool; thread-safe. Raises TypeError,
        ValueError, PoolClosed.
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
        """Give the cached full blocks of a prompt, or of keys, another priority. Returns how many were found.

        ``priority``: 0 (evicted first) to 100 (stays longest). ``ttl_ms``: after so long the priority falls to the
        default. The time begins now, or at the release of a block that somebody holds. A block whose priority changes
        is the last victim of its new one; others keep their place. A later request that hits the block can change it
        again by a retention range. Emits "updated" events. Changes the pool; thread-safe. Raises TypeError, ValueError,
        PoolClosed.
        """
        value, ttl = priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        return int(self.core.decide(None, control.set_priority, self._named(prompt)[1], value, ttl, self.core.now()))

    def hints(
        self, message: Mapping[str, Any], *, salt: bytes | str | None = None, adapter_id: int | str | None = None
    ) -> list[HintAnswer]:
        """Do what a client wishes for its content, as far as its budget goes. Returns a ``HintAnswer`` for each action.

        ``message``: a mapping as vLLM's ``KvHintsEnvelope``: ``protocol_version`` (1 or "1"), ``message_id``, and
        ``actions`` (at most 64), mappings with ``action_id``, ``action_type``, ``action_version`` and ``payload``.
        A payload has one of ``tokens`` (ids), ``session`` (a name that ``release`` was given) and ``keys``
        (uint64[n, 2], or texts of 32 hexadecimal digits), and may have ``lease_ms`` (default 60,000, at most 600,000):

        - "pin" and "retain" (``priority``, 36 to 99, default 60) have the cached blocks go after all others of a lower
          priority until the lease is over. No block is held: a request that needs all blocks gets them.
        - "prefetch" brings what only the host has to the device; of tokens or a session.
        - "drop" forgets cached blocks.

        Content of another namespace than that of ``salt`` and ``adapter_id``, which you set and not the client, counts
        as not cached. Leases and prefetches of a namespace are for at most a sixteenth of the blocks at a time, and
        for a half of them in all namespaces. An action that is wrong is refused; the others are done. Changes the pool;
        thread-safe. Raises TypeError or ValueError for a wrong envelope, with nothing changed; PoolClosed.
        """
        return self._client_hints.apply(message, salt, adapter_id)

    def refresh(self, now_ms: int | None = None) -> int:
        """Give blocks whose time to live is over the default priority. Returns how many. Changes the pool."""
        time_ms = self.core.now() if now_ms is None else integer_argument("now_ms", now_ms, 0, MAX_MS)
        return int(self.core.decide(None, verbs.refresh, time_ms))

    def _named(self, prompt: object) -> tuple[BlockKeys | None, Int64s]:
        """A prompt and its keys, or keys alone. Raises TypeError, ValueError."""
        prompt = in_numpy("prompt", prompt)
        if not isinstance(prompt, BlockKeys) and is_keys(prompt):
            return None, key_rows(prompt)
        keys = self._requests.keys(prompt)
        return keys, key_rows(keys)


def _flags(there: object, shape: tuple[int, int]) -> Bools:
    """Private bool[groups, full blocks]."""
    values = in_numpy("there", there)
    if isinstance(values, (list, tuple)):
        values = np.array(values)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"there: expected bool{list(shape)}, got {there!r:.80}")
    flags = np.asarray(values)[...]
    if flags.dtype != np.bool_ or flags.shape != shape:
        raise ValueError(f"there: expected bool{list(shape)}, got shape {flags.shape} and dtype {flags.dtype}")
    return flags.copy()
