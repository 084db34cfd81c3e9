"""Every public verb with every array that it takes: arguments that it accepts, and what each of them is changed to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pytest

from changing_scenes import (
    Away,
    Forgetting,
    Graph,
    Grouped,
    Hosted,
    Kept,
    Nothing,
    Paged,
    Plain,
    Saved,
    Stored,
    Uploads,
    named,
)
from kvpool import BlockKeys, StagingBuffers, gather_kv, scatter_kv
from kvpool.device.memory import StridedArray
from kvpool.hostcache import HostCopies
from kvpool.hostcache.host_copies import HostPlace
from kvpool.storage import BlockNames
from kvpool.tools.replay.content import Request
from parts import owner_of, reach
from steps import NAMES, arrays

# -- cases -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One verb with arguments that it accepts, those that are arrays as lists of numbers, and what each of them is
    changed to."""

    verb: str
    scene: Callable[[], Any]
    call: Callable[..., Any]
    arrays: dict[str, tuple[Any, Any]]
    """For each argument (before, after), of the scene."""
    dtypes: dict[str, Any] = {}
    """Where it is not int64."""
    forms: tuple[str, ...] = ("array", "interface", "list")
    """What the argument may be."""


def at(path: str, **others: Any) -> Callable[[Any, dict[str, Any]], Any]:
    """A call of what a scene has under a dotted name, with other arguments too."""
    return lambda scene, arguments: attrgetter(path)(scene)(**others, **arguments)


def verb(name: str, scene: Callable[[], Any] = Plain, dtypes: Any = None, others: Any = None, **arrays: Any) -> Case:
    """A call of a pool's method with these arrays, and with other arguments."""
    part, _ = owner_of(name)
    return Case(
        name, scene, at(f"cache.{part}.{name}" if part else f"cache.{name}", **others or {}), arrays, dtypes or {}
    )


def of_both(numbers: Callable[[Any], list[int]], place: int, value: int) -> tuple[Any, Any]:
    """Numbers that depend on the scene, and the same with another value in one place."""

    def changed(scene: Any) -> list[int]:
        changed = list(numbers(scene))
        changed[place] = value
        return changed

    return numbers, changed


FAR, MANY = 1 << 40, 2_000_000
BOTH = of_both(lambda scene: scene.ids, -1, FAR)
ONE = of_both(lambda scene: [scene.one], -1, FAR)
APPENDED = {"ids": BOTH, "tokens": ([1, 2, 3], [1, 2, 9]), "counts": ([1, 2], [1, MANY])}
STEP = {"ids": BOTH, "first": ([4, 1], [4, FAR]), "counts": ([2, 3], [2, MANY])}
PROMPT = list(range(9)), [*range(5), 70, 71, 72, 73]
KEYS = (lambda scene: scene.keys.keys.tolist()), (lambda scene: [[1, 2], [3, 4]])
RUNNING = list(range(100, 106)), [1, *range(101, 106)]
ON_HOST = list(range(300, 309)), [*range(300, 307), 1, 1]
OWN_KEYS = (lambda scene: scene.cache.block_keys(np.arange(100, 106)).keys.tolist()), (lambda scene: [[1, 2]])
KEY = (lambda scene: scene.keys.keys[0].tolist()), (lambda scene: [1, 2])
SLOTS = {"slot_mapping": ([0, 1, 2, 5, -1, 15], [0, 1, 2, 5, -1, 31])}
STORED = (lambda scene: scene.keys(0, 1).tolist()), (lambda scene: scene.keys(2, 9).tolist())
PRIORITY = {"set_priority": {"priority": 80}}
INT32, UINT64, ARRAYS, ARRAY, LIST = np.int32, np.uint64, ("array", "interface"), ("array",), ("list",)
TOKENS = {"prompt": INT32}


def _table(rows: int, dtype: Any = np.int32) -> Any:
    return np.full((rows, 6), -7, dtype)


def _offsets(scene: Any, arguments: dict[str, Any]) -> Any:
    target = _table(4)
    scene.cache.tables.copy_batch_block_offsets(target, **arguments)
    return target


def _step(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        out = arrays(2, 5, 2, 4)
        if name == "step_tables":
            scene.cache.tables.step_tables(**arguments, out=out)
        else:
            scene.cache.tables.copy_step_tables(out, **arguments)
        return [getattr(out, name) for name in NAMES]

    return call


def _captured(scene: Any, arguments: dict[str, Any]) -> Any:
    target = _table(4)
    captured, graph = scene.capture(partial(scene.cache.tables.capture_block_offsets, **arguments), target)
    scene.replay(captured, graph, {"ids": scene.ids})
    captured.close()
    return target


def _staged(scene: Any, arguments: dict[str, Any]) -> Any:
    scene.replay(scene.captured, scene.graph, arguments)
    return [getattr(scene.out, name).copy() for name in NAMES]


def _csr(scene: Any, arguments: dict[str, Any]) -> Any:
    vectors = np.full(3, -7, np.int32), np.full(12, -7, np.int32), np.full(2, -7, np.int32)
    scene.cache.tables.copy_batch_block_csr(*vectors, **arguments)
    return vectors


def _batch(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: reach(scene.cache, name)([arguments["prompts"], [1, 2]])


def _hint(message: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "drop", "action_version": 1, "payload": {"keys": message}}
    return {"protocol_version": 1, "message_id": "m", "actions": [action]}


def _copies(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: copy(scene.paged, arguments["slot_mapping"], scene.staging)


def _several(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    """The same staging as two, of which the first is skipped in part."""

    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        two = StagingBuffers([scene.staging[:, :, :4], scene.staging[:, :, 4:]])
        copy(scene.paged, arguments["slot_mapping"], two, skip_prefix_n_tokens=1)

    return call


def _host_copy(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        done = getattr(scene.copies, name)(**arguments, skip_prefix_n_tokens=1)
        return done.nbytes, done.fragments

    return call


def _places(scene: Any, arguments: dict[str, Any]) -> Any:
    with HostCopies(scene.copies.tier, [scene.paged] * 2, device="cpu", **arguments) as copies:
        return copies.group_bytes


def _two(step: int, *at: int) -> list[HostPlace]:
    return [HostPlace(first, step, ((0, 48, 12), (48, 48, 12))) for first in at]


def _uploads(scene: Any, arguments: dict[str, Any]) -> Any:
    launcher, device = Uploads(), StridedArray(1 << 20, scene.staging.shape, 2, memory="device", kind="u")
    scatter_kv(scene.paged, arguments["slot_mapping"], device, launcher=launcher)
    return launcher.seen


def _block_keys(scene: Any, arguments: dict[str, Any]) -> BlockKeys:
    keys = scene.keys
    return BlockKeys(**arguments, salt=None, adapter_id=None, root=(keys.namespace, *keys.root), origin=keys.origin)


def _strided(scene: Any, arguments: dict[str, Any]) -> Any:
    strided = StridedArray(scene.memory.ctypes.data, itemsize=2, kind="u", owner=scene.memory, **arguments)
    return strided.shape, strided.steps


def _record(scene: Any, arguments: dict[str, Any]) -> Any:
    scene.surveyor.record(Request(0, 0, 12, 0, hash_ids=arguments["hash_ids"], tokens_per_id=4))


CASES = [
    verb("block_keys", Plain, {"tokens": INT32}, tokens=PROMPT, extra_ids=([0] * 8 + [5], [0] * 8 + [6])),
    *(
        verb(name, Plain, TOKENS, prompt=PROMPT)
        for name in ("match_prefix", "add_sequence", "explain", "reserve", "forget", "cached_blocks")
    ),
    *(verb(name, Plain, TOKENS, prompt=RUNNING) for name in ("offload", "blocks_needed")),
    verb("prefetch", Plain, TOKENS, prompt=ON_HOST),
    verb("offload", Plain, {"prompt": UINT64}, prompt=OWN_KEYS)._replace(forms=ARRAYS),
    verb("set_priority", Plain, TOKENS, {"priority": 80}, prompt=PROMPT),
    verb("missing_blocks", Plain, TOKENS, {"available": np.ones((1, 2), np.bool_)}, prompt=PROMPT),
    verb(
        "missing_blocks",
        Plain,
        {"available": np.bool_},
        {"prompt": np.arange(40, 49)},
        available=([[True, True]], [[True, False]]),
    )._replace(forms=ARRAYS),
    *(
        verb(name, Plain, {"prompt": UINT64}, prompt=KEYS)._replace(forms=ARRAYS)
        for name in ("forget", "cached_blocks")
    ),
    verb("set_priority", Plain, {"prompt": UINT64}, {"priority": 80}, prompt=KEYS)._replace(forms=ARRAYS),
    Case(
        "BlockKeys.extend",
        Plain,
        at("keys.extend"),
        {"tokens": ([1, 2, 3, 4], [1, 2, 3, 9]), "extra_ids": ([0, 0, 0, 5], [0, 0, 0, 6])},
        {"tokens": INT32},
    ),
    verb("blocks_needed", Plain, {}, sequences=BOTH, new_tokens=([1, 4], [1, MANY])),
    *(
        Case(name, Plain, _batch(name), {"prompts": PROMPT}, {"prompts": INT32})
        for name in ("add_sequence_batch", "plan_batch")
    ),
    *(
        verb(name, Grouped, {}, others, encoder_tokens=([5], [9]))
        for name, others in (
            *((name, {"prompt": np.arange(40, 50)}) for name in ("add_sequence", "reserve")),
            *((name, {"prompts": [np.arange(40, 50)]}) for name in ("add_sequence_batch", "plan_batch")),
            ("blocks_needed", {"prompt": np.arange(40, 50), "group": 2}),
        )
    ),
    verb("append_tokens", Plain, {"tokens": INT32}, **APPENDED),
    verb("commit", Plain, {}, ids=BOTH, counts=([6, 5], [6, MANY])),
    verb("rewind", Plain, {}, ids=of_both(lambda scene: scene.ids, 0, FAR), counts=([1, 2], [1, MANY])),
    *(
        verb(name, Plain, {}, ids=BOTH)
        for name in "release swap_out evictable_after_release keys_of request_stats block_table cached_tokens "
        "sequence_length committed_tokens load_targets fork".split()
    ),
    verb("block_table", Plain, {}, {"stream": 0}, ids=BOTH),
    verb("reorder", Plain, {}, ids=BOTH, parents=([1, 0], [1, FAR])),
    verb(
        "accept_drafts",
        Plain,
        {},
        {"drafts": [3]},
        ids=of_both(lambda scene: [scene.two], 0, FAR),
        accepted=([0, 2], [0, MANY]),
    ),
    verb(
        "accept_drafts",
        Plain,
        {},
        ids=of_both(lambda scene: [scene.two], 0, FAR),
        drafts=([3], [MANY]),
        accepted=([0, 2], [1, 2]),
        counts=([2], [MANY]),
    ),
    verb("resume", Away, {}, ids=BOTH),
    Case(
        "hints",
        Plain,
        lambda s, arguments: s.cache.content.hints(_hint(**arguments)),
        {"message": KEYS},
        {"message": UINT64},
        ARRAYS,
    ),
    verb("state_blocks", Grouped, {}, {"group": 1}, ids=ONE),
    Case("copy_batch_block_offsets", Plain, _offsets, {"ids": BOTH, "rows": ([3, 1], [3, FAR])}),
    Case("copy_batch_block_csr", Plain, _csr, {"ids": BOTH}),
    *(Case(name, Plain, _step(name), STEP) for name in ("step_tables", "copy_step_tables")),
    Case("capture_block_offsets", Graph, _captured, {"rows": ([3, 1], [3, FAR])}),
    Case("GraphTables.stage", Graph, _staged, STEP),
    verb("pin", Plain, {"keys": UINT64}, keys=KEYS)._replace(forms=ARRAYS),
    verb("find_and_pin_host", Plain, {"key": UINT64}, key=KEY)._replace(forms=ARRAYS),
    verb("pin_blocks", Plain, {}, ids=of_both(lambda scene: [scene.block], 0, FAR)),
    Case("gather_kv", Nothing, _copies(gather_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv", Nothing, _copies(scatter_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv", Nothing, _uploads, SLOTS, {}, ARRAYS),
    Case("gather_kv of StagingBuffers", Nothing, _several(gather_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv of StagingBuffers", Nothing, _several(scatter_kv), SLOTS, {}, ARRAYS),
    *(
        Case(
            f"HostCopies.{name}",
            Paged,
            _host_copy(name),
            {"blocks": ([2, -1, 1], [2, -1, FAR]), "host_blocks": ([3, 0], [3, FAR])},
        )
        for name in ("copy_in", "copy_out")
    ),
    Case("HostCopies", Paged, _places, {"places": (_two(192, 0, 96), _two(96, 0, 192))}, {}, LIST),
    *(
        Case(
            f"HostCache.{name}",
            Hosted,
            at(f"cache.{name}", **PRIORITY.get(name, {})),
            {"keys": (named(*before), named(*after))},
            {},
            LIST,
        )
        for name, before, after in (
            ("lookup", "ax", "ap"),
            ("pin", "ab", "ax"),
            ("touch", "abc", "xbc"),
            ("reserve", "xy", "xz"),
            ("publish", "pq", "px"),
            ("in_order", "pq", "px"),
            ("abort", "pq", "px"),
            ("forget", "ab", "ax"),
            ("set_priority", "ab", "ax"),
        )
    ),
    Case(
        "HostStorageManager.publish",
        Kept,
        at("manager.publish", keys=named("p", "q")),
        {"unsaved": (named("p"), named("x"))},
        {},
        LIST,
    ),
    Case(
        "HostCache.read_dirty",
        Hosted,
        lambda scene, arguments: scene.cache.read_dirty(scene.cursor, **arguments),
        {"keys": (named(*"ab"), named(*"ax"))},
        {},
        LIST,
    ),
    *(
        Case(f"HostStorageManager.{name}", Kept, at(f"manager.{name}"), {"keys": (before, after)}, {}, LIST)
        for name, before, after in (
            ("lookup", named("here", "stored"), named("here", "x")),
            ("pin", named("here", "there"), named("here", "x")),
            ("publish", named("p", "q"), named("p", "x")),
            ("touch", named("here", "there"), named("here", "x")),
            ("forget", named("here", "there"), named("here", "x")),
        )
    ),
    *(
        Case(
            f"StoreWorker.{name}",
            Stored,
            at(f"queue.{name}", **others),
            {"keys": STORED} | rows,
            {"keys": np.uint8},
            ARRAY,
        )
        for name, others, rows in (
            ("find", {}, {}),
            ("find_now", {}, {}),
            ("forget", {}, {}),
            ("load", {"rows": [6, 7]}, {}),
            ("load", {}, {"rows": ([6, 7], [6, 5])}),
            ("save", {}, {"rows": ([6, 7], [6, FAR])}),
        )
    ),
    *(
        Case(f"StorageManager.{name}", Saved, at(f"manager.{name}"), {"prompt": PROMPT}, TOKENS)
        for name in ("prefetch", "match_prefix", "explain")
    ),
    Case("StorageManager.forget", Forgetting, at("manager.forget"), {"prompt": PROMPT}, TOKENS),
    Case("StorageManager.forget", Forgetting, at("manager.forget"), {"prompt": KEYS}, {"prompt": UINT64}, ARRAYS),
    *(
        Case("BlockNames", Nothing, call, {name: (named("here", "there"), named("here", "x"))}, {}, LIST)
        for name, call in (
            ("names", lambda scene, arguments: BlockNames(**arguments).names),
            ("contexts", lambda scene, arguments: BlockNames([b"a", b"b"], **arguments).contexts),
        )
    ),
    Case(
        "BlockKeys",
        Plain,
        _block_keys,
        {"tokens": PROMPT, "keys": KEYS, "extra_ids": ([0] * 8 + [5], [0] * 8 + [6])},
        {"tokens": INT32, "keys": UINT64},
        ARRAY,
    ),
    Case("StridedArray", Nothing, _strided, {"shape": ([3, 2], [2, 2]), "strides": ([8, 2], [16, 4])}, {}, LIST),
    Case("Surveyor.record", Nothing, _record, {"hash_ids": ([1, 2, 3], [1, 2, 4])}, {"hash_ids": UINT64}, ARRAY),
]


def _numbers(scene: Any, values: Any) -> list[Any]:
    return list(values(scene) if callable(values) else values)


class Interface:
    """An array that is none of NumPy's."""

    def __init__(self, array: Any) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__

    def __repr__(self) -> str:
        return "Interface()"


class Argument:
    """Memory of the caller's in one of several forms, and what becomes of it."""

    def __init__(self, case: Case, name: str, form: str, scene: Any, changes: bool) -> None:
        before, after = (_numbers(scene, values) for values in case.arrays[name])
        dtype = case.dtypes.get(name, np.int64)
        self.memory: Any = list(before) if form == "list" else np.array(before, dtype)
        self.after: Any = after if form == "list" else np.array(after, dtype)
        self.value = Interface(self.memory) if form == "interface" else self.memory
        if changes:
            self.change()

    def change(self) -> None:
        self.memory[:] = self.after


def _ids() -> Iterator[str]:
    """A name for each case: its verb, with a number from the second case of a verb on."""
    counts: Counter[str] = Counter()
    for case in CASES:
        counts[case.verb] += 1
        yield case.verb if counts[case.verb] == 1 else f"{case.verb} {counts[case.verb]}"


WALK = [
    pytest.param(case, name, form, id=f"{case_id}-{name}-{form}")
    for case_id, case in zip(_ids(), CASES, strict=True)
    for name in case.arrays
    for form in case.forms
]
CHANGED = [
    param
    for param in WALK
    for case, name, form in [param.values]
    if form == "array"
    or (form == "list" and (name == next(iter(case.arrays)) or case.forms == LIST))
    or (form == "interface" and 1 < len(case.arrays) and name == list(case.arrays)[-1])
]
"""Every argument as an array, of each case the first one as a list, and the last of several in another package's
array."""


@contextmanager
def scenes(case: Case) -> Iterator[Callable[[], Any]]:
    """Makes scenes of a case. One that has threads is closed when the next one is made, and at the end."""
    made: list[Any] = []

    def close() -> None:
        while made:
            getattr(made.pop(), "close", lambda: None)()

    def make() -> Any:
        close()
        made.append(case.scene())
        return made[0]

    try:
        yield make
    finally:
        close()


def given_to(case: Case, scene: Any, changed: str, form: str, changes: bool) -> tuple[dict[str, Any], Argument]:
    """The arguments of a call, of which one is in this form and can be changed."""
    arguments = {
        name: Argument(case, name, form if name == changed else "array", scene, changes and name == changed)
        for name in case.arrays
    }
    return {name: argument.value for name, argument in arguments.items()}, arguments[changed]
