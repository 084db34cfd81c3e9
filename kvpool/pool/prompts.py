"""Prompts: token buffers become keys of one pool, hashed once and outside every lock."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.entry.arguments import (
    adapter_argument,
    bool_argument,
    extra_array,
    id_array,
    is_integer,
    salt_argument,
    token_array,
)
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Scope, check_origin
from kvpool.state import hashing, kinds, row_keys
from kvpool.state.arrays import State

NO_KEYS: npt.NDArray[np.uint64] = np.empty((0, 2), np.uint64)


class Prompts:
    """The hashing of one pool's prompts. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._origin = (core.states.fingerprint, core.config.tokens_per_block)

    def hash(
        self, tokens: Any, salt: Any, adapter_id: Any, extra_ids: Any, reuse: Any = True, publish: Any = True
    ) -> BlockKeys:
        self._core.check_open()
        switches = bool_argument("reuse", reuse), bool_argument("publish", publish)
        if isinstance(tokens, BlockKeys):
            if any(one is not None for one in (salt, adapter_id, extra_ids)) or not all(switches):
                raise TypeError("tokens are BlockKeys, which have all other arguments: accepted is none")
            return self.own(tokens).bound(self._core.states.heads)
        scope = self._scope(salt_argument(salt), adapter_argument(adapter_id), *switches)
        return self._hash(token_array("tokens", tokens), extra_ids, scope)

    def of(self, prompt: Any) -> BlockKeys:
        """The keys of a prompt. Raises TypeError, ValueError."""
        if isinstance(prompt, BlockKeys):
            return self.own(prompt)
        return self._hash(token_array("prompt", prompt), None, self._scope(None, None))

    def all_of(self, prompts: list[Any]) -> list[BlockKeys]:
        """The keys of each prompt of a batch. Raises TypeError, ValueError."""
        found = [prompt if type(prompt) is BlockKeys else self.of(prompt) for prompt in prompts]
        return self._own(found)

    def own(self, keys: BlockKeys) -> BlockKeys:
        """The same keys, which a pool with this secret and block length has made; else ValueError."""
        return self._own([keys])[0]

    def _own(self, prompts: list[BlockKeys]) -> list[BlockKeys]:
        check_origin(prompts, self._origin)
        for keys in prompts:
            if not keys.proven:
                keys.prove(self.root(keys.salt, keys.adapter_id), self._core.states.heads)
        return prompts

    def of_sequences(self, ids: Any) -> Any:
        which, state = id_array("ids", ids), self._whole()
        with self._core.lock:
            rows = [self._read(state, row) for row in self._core.rows(which).tolist()]
        found = [BlockKeys.of_private(*row, self._core.states.heads) for row in rows]
        return found[0] if is_integer(ids) else found

    def _whole(self) -> State:
        """The group whose rows have most of their tokens: all, unless it has a window. Raises ValueError."""
        whole = [state for state in self._core.states if kinds.has_all(state.heads, state.group)]
        windowed = [state for state in self._core.states if kinds.has_windows(state.heads, state.group)]
        if not whole and not windowed:
            raise ValueError(
                "keys_of: the states of recurrent layers have no tokens: extend the BlockKeys that were added"
            )
        return (whole or windowed)[0]

    def _read(
        self, state: State, row: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64], npt.NDArray[np.int64] | None, Scope]:
        """What is known of a live row. The state lock is held by the caller."""
        own, width = state.sequences[row], self._core.config.tokens_per_block
        length = int(own["length"])
        if length == 0:
            raise ValueError(f"ids: sequence {int(own['generation']) << 32 | row} has no tokens, and so no keys")
        tokens, keys = np.empty(length, np.int32), np.empty((length // width, 2), np.uint64)
        extra = np.zeros(length if state.head.has_extra else 0, np.int64)
        known = row_keys.read_row(state.heads, state.group, row, tokens, extra, keys)
        if known < 0:
            raise ValueError(
                "ids: a window has passed tokens of a sequence: extend the BlockKeys that it was added with"
            )
        tag, root = int(own["namespace"]), (int(own["root0"]), int(own["root1"]))
        name = self._core.names.known[tag]
        scope = Scope(name.salt, name.adapter_id, (tag, *root), self._origin, publish=not own["private"])
        return tokens, keys[:known], extra if extra.any() else None, scope

    def root(self, salt: bytes | str | None, adapter_id: int | str | None) -> tuple[int, int, int]:
        """The digest of a namespace that was checked, and the key that its chains begin with."""
        states = self._core.states
        return hashing.namespace_root(states.secret, salt, adapter_id, states.namespace_in_key)

    def _scope(self, salt: bytes | str | None, adapter_id: int | str | None, *switches: bool) -> Scope:
        return Scope(salt, adapter_id, self.root(salt, adapter_id), self._origin, *switches)

    def _hash(self, found: npt.NDArray[np.int32], extra_ids: Any, scope: Scope) -> BlockKeys:
        """The keys of private tokens: what is hashed is what is compared and stored, whatever becomes of the caller's
        buffer."""
        return BlockKeys.of_private(found, NO_KEYS, extra_array(extra_ids, len(found)), scope, self._core.states.heads)
