"""Hints: what a client wants to happen to its content, in the envelope of vLLM. A namespace pays with its own budget.

A hint names content of its own namespace only. It holds no block: what is pinned or retained has a higher priority for
a while, and goes last. So no hint makes a request fail, and the worst hints keep a namespace's share of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import list_argument, text_argument
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, key_rows, request_of
from kvpool.pool.leases import Leases
from kvpool.pool.together import Together
from kvpool.state import control, verbs
from kvpool.state.records import DEFAULT_PRIORITY, PRIORITY_MAX

VERSION = 1
ACTIONS_MAX, KEYS_MAX, TEXT_MAX, SESSIONS_MAX = 64, 1 << 16, 256, 4096
LEASE_MS, LEASE_MS_MAX, RETAINED = 60_000, 600_000, 60
_SHARE, _SHARE_OF_ALL = 8, 2
"""A namespace may keep an eighth of all blocks by hints, and all namespaces together a half."""
_PAYLOADS = {
    "pin": {"lease_ms"},
    "retain": {"lease_ms", "priority"},
    "prefetch": {"lease_ms"},
    "drop": set[str](),
}
Rows = npt.NDArray[np.int64]


class HintAnswer(NamedTuple):
    """What became of one action: ``outcome`` is "done", "partly" or "refused", and ``why`` says why it is not done.
    ``blocks``: of how many keys of the namespace."""

    action_id: str
    outcome: str
    blocks: int = 0
    why: str = ""


class Hints(Together):
    """The call of a pool that takes hints. The state lock guards the budgets of namespaces, and what sessions have."""

    def __init__(self, core: Core, leases: Leases) -> None:
        super().__init__(core, leases)
        self._hinted: dict[int, list[tuple[int, int]]] = {}
        self._sessions: dict[tuple[int, str], BlockKeys] = {}
        self._remembered = 0

    def hints(
        self, message: Mapping[str, Any], *, salt: bytes | str | None = None, adapter_id: int | str | None = None
    ) -> list[HintAnswer]:
        """Do what a client wishes for its content, as far as its budget goes. Returns a ``HintAnswer`` for each action.

        ``message``: a mapping as vLLM's ``KvHintsEnvelope``: ``protocol_version`` (1), ``message_id``, and ``actions``
        (at most 64), mappings with ``action_id``, ``action_type``, ``action_version`` (1) and ``payload``. A payload
        has one of ``tokens`` (ids), ``session`` (a name that ``release`` was given) and ``keys`` (rows of two numbers,
        or texts of 32 hexadecimal digits), and may have ``lease_ms`` (default 60,000, at most 600,000):

        - "pin" and "retain" (``priority``, 36 to 99, default 60) have the cached blocks go after all others of a lower
          priority until the lease is over. No block is held: a request that needs all blocks gets them.
        - "prefetch" brings what only the host has to the device; of tokens or a session.
        - "drop" forgets cached blocks.

        Content of another namespace than that of ``salt`` and ``adapter_id``, which you set and not the client, counts
        as not cached. Leases and prefetches of a namespace are for at most an eighth of the blocks at a time, and for a
        half of them in all namespaces. An action that is wrong is refused; the others are done. Changes the pool;
        thread-safe. Raises TypeError or ValueError for a wrong envelope, with nothing changed; PoolClosed.
        """
        envelope = _record("message", message, {"protocol_version", "message_id", "actions"})
        integer_argument("protocol_version", envelope["protocol_version"], VERSION, VERSION)
        name_argument("message_id", envelope["message_id"])
        actions = list_argument("actions", envelope["actions"])
        if len(actions) > ACTIONS_MAX:
            raise ValueError(f"actions: {len(actions)} of them, accepted are {ACTIONS_MAX}")
        fields = {"action_id", "action_type", "action_version", "payload"}
        known = [_record(f"actions[{i}]", one, fields) for i, one in enumerate(actions)]
        names = [name_argument(f"actions[{i}].action_id", one["action_id"]) for i, one in enumerate(known)]
        scope = self.block_keys([0], salt=salt, adapter_id=adapter_id)
        self.core.check_open()
        return [self._answer(name, one, scope) for name, one in zip(names, known, strict=True)]

    def _remember(self, session: str, keys: BlockKeys) -> None:
        """A session has come so far. The oldest sessions are forgotten if all have more blocks than the pool."""
        with self.core.lock:
            name = keys.namespace, session
            self._remembered += len(keys.keys) - self._forget_session(name)
            self._sessions[name] = keys
            while len(self._sessions) > SESSIONS_MAX or self._remembered > self.core.states.blocks:
                self._remembered -= self._forget_session(next(iter(self._sessions)))

    def _forget_session(self, name: tuple[int, str]) -> int:
        gone = self._sessions.pop(name, None)
        return 0 if gone is None else len(gone.keys)

    def _answer(self, name: str, action: dict[str, Any], scope: BlockKeys) -> HintAnswer:
        try:
            kind = action["action_type"]
            if not isinstance(kind, str) or kind not in _PAYLOADS:
                raise ValueError(f"action_type={kind!r:.80}: accepted are {', '.join(_PAYLOADS)}")
            integer_argument("action_version", action["action_version"], VERSION, VERSION)
            payload = _mapping("payload", action["payload"])
            rows, prompt = self._content(payload, scope, _PAYLOADS[kind])
            lease = integer_argument("lease_ms", payload.get("lease_ms", LEASE_MS), 1, LEASE_MS_MAX)
            done, why = self._do(kind, payload, rows, prompt, scope.namespace, lease)
        except (TypeError, ValueError) as error:
            return HintAnswer(name, "refused", 0, str(error)[:TEXT_MAX])
        return HintAnswer(name, "done" if done == len(rows) else "partly" if done else "refused", done, why)

    def _content(self, payload: dict[str, Any], scope: BlockKeys, others: set[str]) -> tuple[Rows, BlockKeys | None]:
        """The keys that an action names, and the prompt if it names one."""
        named = {"keys", "tokens", "session"}
        unknown = [repr(one)[:80] for one in payload if one not in named | others]
        if unknown or len(named & payload.keys()) != 1:
            told = f"accepted is one of {', '.join(sorted(named))}" + "".join(f", and {one}" for one in sorted(others))
            raise ValueError(f"payload has {', '.join(unknown or sorted(map(str, payload)))}: {told}")
        if "keys" in payload:
            keys = payload["keys"]
            if isinstance(keys, list) and all(isinstance(one, str) for one in keys):
                keys = np.frombuffer(bytes.fromhex("".join(keys)), np.uint64).reshape(len(keys), 2)
            rows, prompt = key_rows(keys), None
        else:
            if "session" in payload:
                session = name_argument("session", payload["session"])
                with self.core.lock:
                    prompt = self._sessions.get((scope.namespace, session))
                if prompt is None:
                    raise ValueError(f"session={session!r:.80}: accepted are sessions that a release has named lately")
            else:
                prompt = self.block_keys(payload["tokens"], salt=scope.salt, adapter_id=scope.adapter_id)
            rows = key_rows(prompt)
        if not 1 <= len(rows) <= KEYS_MAX:
            raise ValueError(f"{len(rows)} full blocks are named: accepted are 1 to {KEYS_MAX}")
        return rows, prompt

    def _do(
        self, kind: str, payload: dict[str, Any], rows: Rows, prompt: BlockKeys | None, namespace: int, lease: int
    ) -> tuple[int, str]:
        """Do an action for as many blocks as are cached, of this namespace, and within its budget."""
        core, now = self.core, self.core.now()
        value = integer_argument("priority", payload.get("priority", RETAINED), DEFAULT_PRIORITY + 1, PRIORITY_MAX - 1)
        if kind == "prefetch" and prompt is None:
            raise ValueError("keys: accepted by prefetch are tokens and session")
        cached = np.empty(len(rows), np.bool_)
        with core.lock:
            control.cached_in(core.states.heads, rows, np.int64(namespace), cached)
            own, why = np.flatnonzero(cached), "" if cached.all() else "not all is cached in this namespace"
            if kind != "drop":
                left = self._budget(namespace, now)
                if left < len(own):
                    own, why = own[:left], "the budget of the namespace is used up"
                if len(own):
                    self._hinted.setdefault(namespace, []).append((now + lease, len(own)))
        if not len(own):
            return 0, why
        keys = np.ascontiguousarray(rows[own])
        if kind == "drop":
            core.decide(None, control.forget_keys, keys, keys[np.lexsort((keys[:, 1], keys[:, 0]))], now)
        elif kind == "prefetch":
            assert prompt is not None
            part = prompt[: (int(own[-1]) + 1) * self.core.config.tokens_per_block]
            ids = np.empty((len(core.states), len(key_rows(part))), np.int32)
            core.decide(None, verbs.prefetch, request_of(part), ids, now)
        else:
            core.decide(None, control.set_priority, keys, PRIORITY_MAX if kind == "pin" else value, lease, now)
        return len(own), why

    def _budget(self, namespace: int, now: int) -> int:
        """How many more blocks the namespace may keep. The state lock is held."""
        for one, leases in list(self._hinted.items()):
            live = [lease for lease in leases if lease[0] > now]
            if live:
                self._hinted[one] = live
            else:
                del self._hinted[one]
        used = {one: sum(count for _, count in leases) for one, leases in self._hinted.items()}
        blocks = self.core.states.blocks
        left = blocks // _SHARE - used.get(namespace, 0), blocks // _SHARE_OF_ALL - sum(used.values())
        return max(min(left), 0)


def _record(name: str, value: object, fields: set[str]) -> dict[str, Any]:
    """A mapping with these fields and no others. Raises TypeError, ValueError."""
    own = _mapping(name, value)
    if set(own) != fields:
        raise ValueError(f"{name} has {sorted(map(str, own))!r:.200}: accepted are {', '.join(sorted(fields))}")
    return own


def _mapping(name: str, value: object) -> dict[str, Any]:
    """A copy of a mapping, which nobody else changes."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r:.80}: accepted is a mapping")
    return dict(value)


def name_argument(name: str, value: object) -> str:
    text = text_argument(name, value)
    if not 1 <= len(text) <= TEXT_MAX:
        raise ValueError(f"{name}={text!r:.80}: accepted are 1 to {TEXT_MAX} characters")
    return text
