"""A loader: it has the KV of prompts in a store of its own, and brings it into reservations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine import Engine
from kvpool import PagedKV, scatter_kv
from kvpool.pool import LoadTarget, Reservation
from tests import debug


def kv(engine: Engine, tokens: Sequence[int]) -> np.ndarray:
    """What an outside store has of a prompt: [planes, layers, tokens, heads, head_dim]."""
    token = np.stack(engine.expected.of((None, None), [(t, 0) for t in tokens]))
    return np.ascontiguousarray(token.transpose(2, 1, 0, 3, 4)).view(engine.cache.layout.storage_dtype)


def load(engine: Engine, reservation: Reservation | LoadTarget, tokens: Sequence[int], *, whole: bool = False) -> None:
    """Bring the KV of a prompt, by the slot mapping alone (``whole``) or by the skip as well."""
    paged = PagedKV.of_pool(engine.cache.layout, engine.cache.memory.device_pool)
    skip = 0 if whole else reservation.skip_prefix_n_tokens
    scatter_kv(paged, reservation.slot_mapping, kv(engine, tokens), skip_prefix_n_tokens=skip)


def picture(engine: Engine) -> tuple[Any, ...]:
    cache = engine.cache
    return (
        debug.dump(cache.core.tokens),
        cache.imports.reservations,
        cache.leases,
        cache.core.transfer._decided,
        cache.memory.device_pool.tobytes(),
    )
