"""PromptRequests: prompts as requests of the state. Their keys, what they would match, and which can never fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from kvpool.common.arguments import (
    Integers,
    RetentionRange,
    adapter_argument,
    address,
    bool_argument,
    encoder_argument,
    list_argument,
    priority_argument,
    retention_rows,
    salt_argument,
    token_array,
    ttl_argument,
)
from kvpool.common.arrays import Int32s, Int64s, Uint64s
from kvpool.pool.config import Group
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Match, Scope, request_of, requests_of, unproven
from kvpool.state import hashing, index, records, requests

Rows = Int64s
NO_KEYS: Uint64s = np.empty((0, 2), np.uint64)
Retention = Sequence[RetentionRange | tuple[int | None, ...]]


Arrivals: TypeAlias = tuple[list[BlockKeys], Rows, list["Rows | None"], bool]
"""The prompts of an admission, and what is asked for them, all of it checked: the requests, int64[n, REQUEST], as
jitted code sees them; the memory of the retention that these point to; and whether a part of them may be admitted."""


class PromptRequests:
    """Hashes and checks the prompts of calls, for all parts of a pool. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self.core, config = core, core.config
        self.origin = (core.states.fingerprint, config.tokens_per_block)
        self.width, self._columns = config.tokens_per_block, config.columns
        # A shorter request fits into every group, whatever is cached, if nothing else lives.
        cross = [group.device_blocks for group in config.groups if group.kind == "cross"]
        others = [group.device_blocks for group in config.groups if group.kind != "cross"]
        self._always, self._encoder_always = (
            self.width * min(self._columns, *each) for each in (others, cross or [self._columns])
        )

    @cached_property
    def plain(self) -> Scope:
        """The scope of most prompts."""
        return Scope(None, None, self.root(None, None), self.origin)

    def root(self, salt: bytes | str | None, adapter_id: int | str | None) -> tuple[int, int, int]:
        """The digest of a namespace that was checked, and the key that its chains begin with."""
        states = self.core.states
        return hashing.namespace_root(states.secret, salt, adapter_id, states.namespace_in_key)

    def keys(self, prompt: object) -> BlockKeys:
        """The keys of a prompt. Raises TypeError, ValueError."""
        return self.own([self.hashed("prompt", prompt)])[0]

    def all_keys(self, prompts: list[Any]) -> list[BlockKeys]:
        """The keys of each prompt of a batch. Raises TypeError, ValueError."""
        for i, prompt in enumerate(prompts):
            if type(prompt) is not BlockKeys:
                prompts[i] = self.hashed(f"prompts[{i}]", prompt)
        return self.own(prompts)

    def hashed(self, name: str, prompt: object) -> BlockKeys:
        if isinstance(prompt, BlockKeys):
            return prompt
        tokens = token_array(name, prompt)
        return BlockKeys.of_private(tokens, NO_KEYS, None, self.plain, self.core.states.groups)

    def own(self, prompts: list[BlockKeys]) -> list[BlockKeys]:
        """The same keys, which a pool with this secret and block length has made; else ValueError."""
        for keys in unproven(prompts, self.origin):
            keys.prove(self.root(keys.salt, keys.adapter_id), self.core.states.groups)
        return prompts

    def match(self, keys: BlockKeys) -> Match:
        full, host, partial = self.look_up(request_of(keys))[0][-1, :3].tolist()
        return Match(full - host, host, partial)

    def look_up(self, request: Rows) -> tuple[Rows, Int32s]:
        """What a prompt would reuse now, int64[groups + 1, 6], as ``state.index.match`` returns it; the last row is
        for all groups. And the blocks of each group, int32[groups, n]."""
        groups, full = self.core.states.groups, int(request[0, records.R.length]) // self.width
        out, ids = np.empty((len(groups) + 1, 6), np.int64), np.empty((len(groups), full), np.int32)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            index.match(groups, request, ids, out)
        return out, ids

    def arrivals(
        self,
        prompts: object,
        retention: object,
        decode_priority: object,
        decode_ttl_ms: object,
        allow_partial: object,
        encoder_tokens: object,
    ) -> Arrivals:
        """The arguments of ``add_sequence_batch``, checked. Raises TypeError, ValueError."""
        some = bool_argument("allow_partial_batch", allow_partial)
        keys = self.all_keys(list_argument("prompts", prompts))
        rows = self.rows(keys, encoder_tokens)
        if decode_priority is not records.DEFAULT_PRIORITY or decode_ttl_ms is not None:
            rows[:, records.R.priority] = priority_argument("decode_priority", decode_priority)
            rows[:, records.R.ttl] = ttl_argument("decode_ttl_ms", decode_ttl_ms)
        ranges: list[Rows | None] = []
        if retention is not None:
            items = list_argument("retention", retention)
            ranges += [None if item is None else retention_rows(item) for item in items]
            if len(ranges) != len(keys):
                raise ValueError(f"retention: expected {len(keys)}, one for each of the prompts, got {len(ranges)}")
        for i, row_ranges in enumerate(ranges):
            if row_ranges is not None:
                rows[i, records.R.ranges_at], rows[i, records.R.range_count] = address(row_ranges), len(row_ranges)
        for prompt in keys:
            if prompt.has_extra:
                self.core.enable_extra()
        return keys, rows, ranges, some

    def rows(self, keys: list[BlockKeys], encoder_tokens: object) -> Rows:
        """The prompts of a batch as jitted code sees them. Raises TypeError, ValueError."""
        rows, crosses = requests_of(keys), self.core.config.crosses
        if crosses or encoder_tokens is not None:
            rows[:, records.R.encoder] = encoder_argument("encoder_tokens", encoder_tokens, len(keys), crosses)
        return rows

    def refused(self, keys: list[BlockKeys], rows: Rows) -> dict[int, str]:
        """Which of the requests int64[n, REQUEST] of these prompts can never be admitted, and why.

        With a sliding window, only a part of a cached prefix is needed. So a request may fit because of what is cached
        now. Raises PoolClosed.
        """
        if max(map(len, keys), default=0) <= self._always and not self.core.config.crosses:
            return {}
        large = (rows[:, records.R.length] > self._always) | (rows[:, records.R.encoder] > self._encoder_always)
        reasons = ((i, self._why_never(rows[i : i + 1])) for i in np.flatnonzero(large).tolist())
        return {i: why for i, why in reasons if why is not None}

    def _why_never(self, row: Rows) -> str | None:
        columns, encoder = (-(-int(row[0, i]) // self.width) for i in (records.R.length, records.R.encoder))
        layer_groups, groups = self.core.config.groups, self.core.states.groups
        fresh = requests.fresh_of
        needs = [encoder if g.kind == "cross" else int(fresh(groups, g.index, row, 0, columns)) for g in layer_groups]
        short = [g for g in layer_groups if needs[g.index] > g.device_blocks]
        # Groups for cross attention or full attention need all of their blocks at once. The others need what the next
        # token sees.
        for group in short:
            if group.kind == "cross" or (group.kind == "attention" and group.window is None):
                return f"{self._lack(group, needs[group.index])}: it can never fit"
        if columns > self._columns or encoder > self._columns:
            what = (
                f"a prompt of {columns} blocks"
                if columns > self._columns
                else f"encoder_tokens={int(row[0, records.R.encoder])}"
            )
            return f"{what} passes max_sequence_tokens={self._columns * self.width}: it can never fit"
        for group in short:
            out, ids = self.look_up(row)
            matched = int(out[group.index, 3])
            held = int(np.count_nonzero(ids[group.index, :matched] != records.NONE))
            needed = min(needs[group.index], held + int(fresh(groups, group.index, row, matched, columns)))
            if needed > group.device_blocks:
                return (
                    f"{self._lack(group, needed)}: it can never fit as a whole; add its first tokens, commit them, "
                    "append the others"
                )
        return None

    def _lack(self, group: Group, needed: int) -> str:
        where = f" of group {group.index}" if len(self.core.config.groups) > 1 else ""
        are = "block{} is" if needed == 1 else "blocks{} are"
        return f"{needed} device {are.format(where)} needed at once, of {group.device_blocks}"

    def in_namespace(self, tokens: Integers, salt: bytes | str | None, adapter_id: int | str | None) -> BlockKeys:
        """Hash a prompt of a namespace, as ``KVCacheManager.block_keys`` does."""
        names = salt_argument(salt), adapter_argument(adapter_id)
        scope = Scope(*names, self.root(*names), self.origin)
        return BlockKeys.of_private(token_array("tokens", tokens), NO_KEYS, None, scope, self.core.states.groups)
