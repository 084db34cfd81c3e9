"""Contents: cached blocks, named by a prompt or by keys. They can be forgotten, valued, and looked up in all groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.strided import in_numpy
from kvpool.entry.arguments import adapter_argument, salt_argument
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, is_keys, key_rows, request_of, tier_number
from kvpool.pool.prompts import Prompts
from kvpool.pool.retention import priority_argument, ttl_argument
from kvpool.state import control, lookup, pins, verbs

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Lacking(NamedTuple):
    """What could be loaded for a prompt. With it, ``tokens`` tokens can be reused. ``blocks`` has, for each group of
    layers, the places of the full blocks that it lacks for that, int64[m] in rising order."""

    tokens: int
    blocks: tuple[Rows, ...]


class Contents:
    """Calls on cached content by its name. Thread-safe."""

    def __init__(self, core: Core, prompts: Prompts) -> None:
        self._core, self._prompts = core, prompts

    def offload(self, prompt: Any) -> int:
        """What ``KVCacheManager.offload`` does."""
        return int(self._core.decide(None, verbs.offload, self._named(prompt)[1], self._core.now()))

    def forget(self, prompt: Any, namespace: Any) -> int:
        """What ``KVCacheManager.forget`` does."""
        if (prompt is None) == (namespace is None):
            raise TypeError(f"prompt={prompt!r:.80}, namespace={namespace!r:.80}: accepted is exactly one of them")
        core = self._core
        if namespace is not None:
            tag = self._prompts.root(*_namespace_argument(namespace))[0]
            return int(core.decide(None, control.forget_namespace, tag, core.now()))
        keys, rows = self._named(prompt)
        ordered = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        if keys is None:
            return int(core.decide(None, control.forget_keys, rows, ordered, core.now()))
        return int(core.decide(None, control.forget_prompt, request_of(keys), rows, ordered, core.now()))

    def set_priority(self, prompt: Any, priority: Any, ttl_ms: Any) -> int:
        """What ``KVCacheManager.set_priority`` does."""
        value, ttl = priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        return int(self._core.decide(None, control.set_priority, self._named(prompt)[1], value, ttl, self._core.now()))

    def cached(self, prompt: Any, tier: Any) -> Flags:
        """What ``KVCacheManager.cached_blocks`` does."""
        which, rows = tier_number(tier), self._named(prompt)[1]
        out = np.empty((len(self._core.states), len(rows)), np.bool_)
        with self._core.lock:
            self._core.check_open()
            pins.cached(self._core.states.heads, rows, which, out)
        return out

    def lacking(self, prompt: Any, there: Any) -> Lacking:
        """What ``KVCacheManager.lacking`` does."""
        keys = self._prompts.of(prompt)
        rows, heads = key_rows(keys), self._core.states.heads
        brought = _flags(there, (len(heads), len(rows)))
        here = np.empty_like(brought)
        with self._core.lock:
            self._core.check_open()
            pins.cached(heads, rows, pins.ANY_TIER, here)
            lacks = brought | here
            most = int(lookup.lacking(heads, request_of(keys), here, lacks))
        return Lacking(most * self._core.config.tokens_per_block, tuple(np.flatnonzero(own) for own in lacks))

    def _named(self, prompt: Any) -> tuple[BlockKeys | None, Rows]:
        """A prompt and its keys, or keys alone. Raises TypeError, ValueError."""
        prompt = in_numpy("prompt", prompt)
        if not isinstance(prompt, BlockKeys) and is_keys(prompt):
            return None, key_rows(prompt)
        keys = self._prompts.of(prompt)
        return keys, key_rows(keys)


def _namespace_argument(namespace: Any) -> tuple[bytes | str | None, int | str | None]:
    if not isinstance(namespace, (list, tuple)) or len(namespace) != 2:
        raise TypeError(f"namespace={namespace!r:.80}: accepted is a pair (salt, adapter_id)")
    salt, adapter_id = tuple(namespace)
    return salt_argument(salt), adapter_argument(adapter_id)


def _flags(there: Any, shape: tuple[int, int]) -> Flags:
    """Private bool[groups, full blocks]."""
    given = in_numpy("there", there)
    if isinstance(given, (list, tuple)):
        given = np.array(given)
    if not isinstance(given, np.ndarray):
        raise TypeError(f"there={there!r:.80}: accepted is bool{list(shape)}")
    # A subclass may answer with another shape than its memory has.
    found = np.asarray(given)[...]
    if found.dtype != np.bool_ or found.shape != shape:
        raise ValueError(f"there has shape {found.shape} and dtype {found.dtype}: accepted is bool{list(shape)}")
    return found.copy()
