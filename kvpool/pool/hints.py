"""Hints: a client's wishes for its cached content, in the message format of vLLM, within the budget of its namespace.

A hint names content of its own namespace only. It holds no block: a pinned or retained block has a higher priority for
a while. So no hint makes a request fail, and the worst hints keep a namespace's share of the blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arguments import Integers, list_argument, text_argument
from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, key_rows, request_of
from kvpool.pool.prompt_requests import PromptRequests
from kvpool.state import control, verbs
from kvpool.state.records import DEFAULT_PRIORITY, PRIORITY_MAX

VERSION = 1
ACTIONS_MAX, KEYS_MAX, TEXT_MAX, SESSIONS_MAX = 64, 1 << 16, 256, 4096
LEASE_MS, LEASE_MS_MAX, RETAINED = 60_000, 600_000, 60
_SHARE, _SHARE_OF_ALL = 16, 2
"""A namespace may keep a sixteenth of all blocks by hints, and all namespaces together a half."""
Outcome: TypeAlias = Literal["done", "partly", "refused"]
HintPayload: TypeAlias = Mapping[str, "str | int | Integers | Sequence[str]"]
"""The content that an action names, its lease and its priority: see ``CachedContent.hints``."""
HintAction: TypeAlias = Mapping[str, "str | int | HintPayload"]
HintMessage: TypeAlias = Mapping[str, "str | int | Sequence[HintAction]"]
"""A message of a client. Its form is checked, since it comes from outside."""
_PAYLOADS = {
    "pin": {"lease_ms"},
    "retain": {"lease_ms", "priority"},
    "prefetch": {"lease_ms"},
    "drop": set[str](),
}
_FIELDS_MAX = 16
_NAMED = {"keys", "tokens", "session"}
SPENT = "the budget of the namespace is used up"
Rows = Int64s


class HintAnswer(NamedTuple):
    """The outcome of one action of a client's hints.

    ``CachedContent.hints`` returns it.

    Attributes
    ----------
    action_id : str
        The id that the client gave the action.
    outcome : {"done", "partly", "refused"}
        Whether it was applied to all, some or none of its blocks.
    blocks : int, default 0
        Number of full blocks to which it was applied.
    why : str, default ""
        The reason if it is not "done".
    """

    action_id: str
    outcome: Outcome
    blocks: int = 0
    why: str = ""


@contextmanager
def _not_too_deep() -> Iterator[None]:
    """Raise ValueError for a message that is nested too deeply to be read or printed."""
    try:
        yield
    except RecursionError:
        raise ValueError("message: its values are nested too deeply") from None


class Action(NamedTuple):
    """One action of a client, of which only ``action_id`` is checked. The other fields may be anything."""

    action_id: str
    action_type: object
    action_version: object
    payload: object

    @_not_too_deep()
    def read(self, named: Set[str]) -> tuple[str, dict[str, Any], int, int]:
        """Return the type, the payload, the lease in ms and the priority. ``named``: the fields that name content, of
        which a payload has one, if there are any. Raises TypeError, ValueError."""
        kind = self.action_type
        if not isinstance(kind, str) or kind not in _PAYLOADS:
            raise ValueError(f"action_type: expected one of {', '.join(_PAYLOADS)}, got {kind!r:.80}")
        _version("action_version", self.action_version)
        payload, others = _mapping("payload", self.payload), _PAYLOADS[kind]
        if len(payload) > _FIELDS_MAX:
            raise ValueError(f"payload: expected up to {_FIELDS_MAX} entries, got {len(payload)}")
        unknown = [repr(field)[:80] for field in payload if field not in named | others]
        if unknown or len(named & payload.keys()) != bool(named):
            expected = f"expected one of {', '.join(sorted(named))}" if named else "expected no name of content"
            expected += "".join(f", and {field}" for field in sorted(others))
            raise ValueError(f"payload: {expected}, got {', '.join(unknown or sorted(map(str, payload))) or 'none'}")
        lease = integer_argument("lease_ms", payload.get("lease_ms", LEASE_MS), 1, LEASE_MS_MAX)
        value = integer_argument("priority", payload.get("priority", RETAINED), DEFAULT_PRIORITY + 1, PRIORITY_MAX - 1)
        return kind, payload, lease, PRIORITY_MAX if kind == "pin" else value


@_not_too_deep()
def actions_of(message: object) -> list[Action]:
    """Return the actions of a message, at most ``ACTIONS_MAX``. Raises TypeError, ValueError."""
    envelope = _record("message", message, {"protocol_version", "message_id", "actions"})
    _version("protocol_version", envelope["protocol_version"])
    name_argument("message_id", envelope["message_id"])
    actions = list_argument("actions", envelope["actions"])
    if len(actions) > ACTIONS_MAX:
        raise ValueError(f"actions: expected up to {ACTIONS_MAX}, got {len(actions)}")
    known = [_record(f"actions[{i}]", action, set(Action._fields)) for i, action in enumerate(actions)]
    for i, action in enumerate(known):
        name_argument(f"actions[{i}].action_id", action["action_id"])
    return [Action(**action) for action in known]


class Budget:
    """The numbers of blocks that namespaces keep by hints, of ``blocks`` in all. Not thread-safe."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._all = blocks, 0
        self._used = Counter[int]()
        self._ends: list[tuple[int, int, int]] = []

    def take(self, namespace: int, wanted: int, now_ms: int, lease: int) -> int:
        """Return how many of the wanted blocks a namespace may keep for ``lease`` ms. They count until then."""
        while self._ends and self._ends[0][0] <= now_ms:
            _, holder, count = heappop(self._ends)
            self._count(holder, -count)
        left = self._blocks // _SHARE - self._used[namespace], self._blocks // _SHARE_OF_ALL - self._all
        taken = min(wanted, max(min(left), 0))
        if taken:
            heappush(self._ends, (now_ms + lease, namespace, taken))
            self._count(namespace, taken)
        return taken

    def _count(self, namespace: int, more: int) -> None:
        self._all += more
        self._used[namespace] += more
        if not self._used[namespace]:
            del self._used[namespace]


class ClientHints:
    """Hints of clients. The state lock guards the budgets of namespaces, and the prompts of sessions."""

    def __init__(self, core: Core, requests: PromptRequests) -> None:
        self.core, self._requests = core, requests
        self._budget = Budget(core.states.blocks)
        self._sessions: OrderedDict[tuple[int, str], BlockKeys] = OrderedDict()
        self._remembered = 0

    def apply(self, message: object, salt: bytes | str | None, adapter_id: int | str | None) -> list[HintAnswer]:
        """Apply the actions of a message: see ``CachedContent.hints``."""
        actions = actions_of(message)
        self.core.check_open()
        scope = self._requests.in_namespace([0], salt, adapter_id)
        return [self._answer(action, scope) for action in actions]

    def remember(self, session: str, keys: BlockKeys) -> None:
        """Note the prompt of a session so far. The oldest sessions are dropped if all have more blocks than the
        pool."""
        with self.core.lock, self.core.changes:
            name = keys.namespace, session
            self._remembered += len(keys.keys) - self._forget_session(name)
            self._sessions[name] = keys
            while len(self._sessions) > SESSIONS_MAX or self._remembered > self.core.states.blocks:
                self._remembered -= self._forget_session(next(iter(self._sessions)))

    def _forget_session(self, name: tuple[int, str]) -> int:
        gone = self._sessions.pop(name, None)
        return 0 if gone is None else len(gone.keys)

    def _answer(self, action: Action, scope: BlockKeys) -> HintAnswer:
        try:
            kind, payload, lease, value = action.read(_NAMED)
            rows, prompt = self._content(payload, scope)
            done, why = self._do(kind, value, rows, prompt, scope.namespace, lease)
        except (TypeError, ValueError) as error:
            return HintAnswer(action.action_id, "refused", 0, str(error)[:TEXT_MAX])
        return HintAnswer(action.action_id, outcome(done, len(rows)), done, why)

    @_not_too_deep()
    def _content(self, payload: dict[str, Any], scope: BlockKeys) -> tuple[Rows, BlockKeys | None]:
        """Return the keys that an action names, and the prompt if it names one."""
        if "keys" in payload:
            keys = payload["keys"]
            if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
                if any(len(key) != 32 for key in keys):
                    raise ValueError(f"keys: expected texts of 32 hexadecimal digits, got {keys!r:.80}")
                keys = np.frombuffer(bytes.fromhex("".join(keys)), np.uint64).reshape(len(keys), 2)
            rows, prompt = key_rows(keys), None
        else:
            if "session" in payload:
                session = name_argument("session", payload["session"])
                with self.core.lock, self.core.changes:
                    prompt = self._sessions.get((scope.namespace, session))
                if prompt is None:
                    raise ValueError(f"session: expected one that a release has named lately, got {session!r:.80}")
            else:
                prompt = self._requests.in_namespace(payload["tokens"], scope.salt, scope.adapter_id)
            rows = key_rows(prompt)
        if not 1 <= len(rows) <= KEYS_MAX:
            raise ValueError(f"payload: expected names of 1 to {KEYS_MAX} full blocks, got {len(rows)}")
        return rows, prompt

    def _do(
        self, kind: str, value: int, rows: Rows, prompt: BlockKeys | None, namespace: int, lease: int
    ) -> tuple[int, str]:
        """Apply an action to the cached blocks of this namespace, within its budget. Returns their number, and why
        there are not more."""
        core, now_ms = self.core, self.core.now()
        if kind == "prefetch" and prompt is None:
            raise ValueError("payload: expected tokens or session for prefetch, got keys")
        cached = np.empty(len(rows), np.bool_)
        with core.lock, core.changes:
            control.cached_in(core.states.groups, rows, np.int64(namespace), cached)
            places, why = np.flatnonzero(cached), "" if cached.all() else "not all is cached in this namespace"
            if kind != "drop":
                left = self._budget.take(namespace, len(places), now_ms, lease)
                if left < len(places):
                    places, why = places[:left], SPENT
        if not len(places):
            return 0, why
        keys = np.ascontiguousarray(rows[places])
        if kind == "drop":
            core.decide(None, control.forget_keys, keys, keys[np.lexsort((keys[:, 1], keys[:, 0]))], now_ms)
        elif kind == "prefetch":
            assert prompt is not None
            part = prompt[: (int(places[-1]) + 1) * self.core.config.tokens_per_block]
            ids = np.empty((len(core.states), len(key_rows(part))), np.int32)
            core.decide(None, verbs.prefetch, request_of(part), ids, now_ms)
        else:
            core.decide(None, control.set_priority, keys, value, lease, now_ms)
        return len(places), why


def outcome(done: int, wanted: int) -> Outcome:
    """Return the outcome of an action that was applied to ``done`` of ``wanted`` blocks."""
    return "done" if done == wanted else "partly" if done else "refused"


def _version(name: str, value: object) -> None:
    """Check a version, which vLLM writes as a string."""
    if value != str(VERSION):
        integer_argument(name, value, VERSION, VERSION)


def _record(name: str, value: object, fields: set[str]) -> dict[str, Any]:
    """Return a mapping with these fields and no others. Raises TypeError, ValueError."""
    record = _mapping(name, value)
    if set(record) != fields:
        raise ValueError(
            f"{name}: expected {', '.join(sorted(fields))}, got {', '.join(sorted(map(str, record))) or 'none':.200}"
        )
    return record


def _mapping(name: str, value: object) -> dict[str, Any]:
    """Return a copy of a mapping, which nobody else changes."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {value!r:.80}")
    return dict(value)


def name_argument(name: str, value: object) -> str:
    """Return a string of 1 to ``TEXT_MAX`` characters. Raises TypeError, ValueError."""
    text = text_argument(name, value)
    if not 1 <= len(text) <= TEXT_MAX:
        raise ValueError(f"{name}: expected 1 to {TEXT_MAX} characters, got {text!r:.80}")
    return text
