"""Operations: what ``KVCacheManager.apply`` does together. Each names a verb of the pool, and takes what that takes."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.common.arguments import Ids, Integers
from kvpool.pool.keys import Keys, Prompt
from kvpool.pool.leases import Lease
from kvpool.pool.prompts import Retention
from kvpool.pool.together import Operation
from kvpool.state.records import DEFAULT_PRIORITY


def match(prompt: Prompt) -> Operation:
    """As ``match_prefix``; the result is a ``Match``."""
    return Operation("match", (prompt,))


def pin(keys: Keys, *, owner: str = "", tier: str | None = None) -> Operation:
    """As ``pin``, for the stream of ``apply``, which must name one: the call would have to wait else. The result is a
    ``Lease``, or None if the device has refused a copy that it waits for."""
    return Operation("pin", (keys, owner, tier))


def unpin(lease: Lease) -> Operation:
    """As ``Lease.close``, for the stream of ``apply`` or the lease's own."""
    return Operation("unpin", (lease,))


def add(
    prompts: Sequence[Prompt],
    *,
    retention: Sequence[Retention | None] | None = None,
    decode_priority: int = DEFAULT_PRIORITY,
    decode_ttl_ms: int | None = None,
    allow_partial_batch: bool = False,
    encoder_tokens: Integers | None = None,
) -> Operation:
    """As ``add_sequence_batch``; the result is an ``Admission``."""
    arguments = (prompts, retention, decode_priority, decode_ttl_ms, allow_partial_batch, encoder_tokens)
    return Operation("add", arguments)


def append(ids: Ids, tokens: Integers, counts: Ids | None = None) -> Operation:
    """As ``append_tokens``; the result is None."""
    return Operation("append", (ids, tokens, counts))


def commit(ids: Ids, counts: Ids | None = None) -> Operation:
    """As ``commit``; the result is None."""
    return Operation("commit", (ids, counts))


def release(
    ids: Ids, *, store: bool = True, stop: str | None = None, ends: bool = False, returns_in_ms: int | None = None
) -> Operation:
    """As ``release``; the result is None."""
    return Operation("release", (ids, store, stop, ends, returns_in_ms))
