"""Every public verb with every array that it takes, and arguments that it accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pytest

from array_scenes import Away, Graph, Grouped, Hosted, Kept, Nothing, Paged, Plain, Saved, Stored, Uploads, named
from kvpool import BlockKeys, StagingBuffers, gather_kv, scatter_kv
from kvpool.device.memory import StridedArray
from kvpool.storage import BlockNames
from kvpool.tools.replay.content import Request
from parts import owner_of, reach
from steps import arrays
from tests.interop.arrays import InterfaceOnly

# -- cases -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One verb with arguments that it accepts."""

    verb: str
    scene: Callable[[], Any]
    call: Callable[..., Any]
    arrays: dict[str, Any]
    """The content of each argument that is an array, or what says it of a scene."""
    dtypes: dict[str, Any] = {}
    """Where it is not int64."""
    forms: tuple[str, ...] = ("array", "interface")
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


BOTH, ONE, TWO = attrgetter("ids"), (lambda scene: [scene.one]), (lambda scene: [scene.two])
APPENDED = {"ids": BOTH, "tokens": [1, 2, 3], "counts": [1, 2]}
STEP = {"ids": BOTH, "first": [4, 1], "counts": [2, 3]}
PROMPT, RUNNING, ON_HOST = range(9), range(100, 106), range(300, 309)
KEYS, KEY = attrgetter("keys.keys"), (lambda scene: scene.keys.keys[0])
OWN_KEYS = lambda scene: scene.cache.block_keys(np.arange(100, 106)).keys  # noqa: E731
EXTRA = [0] * 8 + [5]
SLOTS = {"slot_mapping": [0, 1, 2, 5, -1, 15]}
STORED = {"keys": lambda scene: scene.keys(0, 1)}
PRIORITY = {"set_priority": {"priority": 80}}
INT32, UINT64, ARRAY, ONCE = np.int32, np.uint64, ("array",), ("iterator",)
TOKENS = {"prompt": INT32}


def _captured(scene: Any, arguments: dict[str, Any]) -> None:
    captured, graph = scene.capture(
        partial(scene.cache.tables.capture_block_offsets, **arguments), np.empty((4, 6), np.int32)
    )
    scene.replay(captured, graph, {"ids": scene.ids})
    captured.close()


def _csr(scene: Any, arguments: dict[str, Any]) -> None:
    vectors = np.empty(3, np.int32), np.empty(12, np.int32), np.empty(2, np.int32)
    scene.cache.tables.copy_batch_block_csr(*vectors, **arguments)


def _batch(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: reach(scene.cache, name)([arguments["prompts"], [1, 2]])


def _hint(scene: Any, arguments: dict[str, Any]) -> None:
    action = {"action_id": "a", "action_type": "drop", "action_version": 1, "payload": {"keys": arguments["message"]}}
    scene.cache.content.hints({"protocol_version": 1, "message_id": "m", "actions": [action]})


def _copies(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: copy(scene.paged, arguments["slot_mapping"], scene.staging)


def _several(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    """The same staging as two, of which the first is skipped in part."""

    def call(scene: Any, arguments: dict[str, Any]) -> None:
        two = StagingBuffers([scene.staging[:, :, :4], scene.staging[:, :, 4:]])
        copy(scene.paged, arguments["slot_mapping"], two, skip_prefix_n_tokens=1)

    return call


def _uploads(scene: Any, arguments: dict[str, Any]) -> None:
    device = StridedArray(1 << 20, scene.staging.shape, 2, memory="device", kind="u")
    scatter_kv(scene.paged, arguments["slot_mapping"], device, launcher=Uploads())


def _block_keys(scene: Any, arguments: dict[str, Any]) -> BlockKeys:
    keys = scene.keys
    return BlockKeys(**arguments, salt=None, adapter_id=None, root=(keys.namespace, *keys.root), origin=keys.origin)


def _strided(scene: Any, arguments: dict[str, Any]) -> StridedArray:
    return StridedArray(scene.memory.ctypes.data, itemsize=2, kind="u", owner=scene.memory, **arguments)


def _record(scene: Any, arguments: dict[str, Any]) -> None:
    scene.surveyor.record(Request(0, 0, 12, 0, hash_ids=arguments["hash_ids"], tokens_per_id=4))


CASES = [
    verb("block_keys", Plain, {"tokens": INT32}, tokens=PROMPT, extra_ids=EXTRA),
    *(
        verb(name, Plain, TOKENS, prompt=PROMPT)
        for name in ("match_prefix", "add_sequence", "explain", "reserve", "forget", "cached_blocks")
    ),
    *(verb(name, Plain, TOKENS, prompt=RUNNING) for name in ("offload", "blocks_needed")),
    verb("prefetch", Plain, TOKENS, prompt=ON_HOST),
    verb("offload", Plain, {"prompt": UINT64}, prompt=OWN_KEYS),
    verb("set_priority", Plain, TOKENS, {"priority": 80}, prompt=PROMPT),
    verb("missing_blocks", Plain, TOKENS, {"available": np.ones((1, 2), np.bool_)}, prompt=PROMPT),
    verb("missing_blocks", Plain, {"available": np.bool_}, {"prompt": np.arange(40, 49)}, available=[[True, True]]),
    *(verb(name, Plain, {"prompt": UINT64}, prompt=KEYS) for name in ("forget", "cached_blocks")),
    verb("set_priority", Plain, {"prompt": UINT64}, {"priority": 80}, prompt=KEYS),
    Case(
        "BlockKeys.extend",
        Plain,
        at("keys.extend"),
        {"tokens": [1, 2, 3, 4], "extra_ids": [0, 0, 0, 5]},
        {"tokens": INT32},
    ),
    verb("blocks_needed", Plain, {}, sequences=BOTH, new_tokens=[1, 4]),
    *(
        Case(name, Plain, _batch(name), {"prompts": PROMPT}, {"prompts": INT32})
        for name in ("add_sequence_batch", "plan_batch")
    ),
    *(
        verb(name, Grouped, {}, others, encoder_tokens=[5])
        for name, others in (
            *((name, {"prompt": np.arange(40, 50)}) for name in ("add_sequence", "reserve")),
            *((name, {"prompts": [np.arange(40, 50)]}) for name in ("add_sequence_batch", "plan_batch")),
            ("blocks_needed", {"prompt": np.arange(40, 50), "group": 2}),
        )
    ),
    verb("append_tokens", Plain, {"tokens": INT32}, **APPENDED),
    verb("commit", Plain, {}, ids=BOTH, counts=[6, 5]),
    verb("rewind", Plain, {}, ids=BOTH, counts=[1, 2]),
    *(
        verb(name, Plain, {}, ids=BOTH)
        for name in "release swap_out evictable_after_release keys_of request_stats block_table cached_tokens "
        "sequence_length committed_tokens load_targets fork".split()
    ),
    verb("block_table", Plain, {}, {"stream": 0}, ids=BOTH),
    verb("reorder", Plain, {}, ids=BOTH, parents=[1, 0]),
    verb("accept_drafts", Plain, {}, {"drafts": [3]}, ids=TWO, accepted=[0, 2]),
    verb("accept_drafts", Plain, {}, ids=TWO, drafts=[3], accepted=[0, 2], counts=[2]),
    verb("resume", Away, {}, ids=BOTH),
    Case("hints", Plain, _hint, {"message": KEYS}, {"message": UINT64}),
    verb("state_blocks", Grouped, {}, {"group": 1}, ids=ONE),
    verb("copy_batch_block_offsets", Plain, {}, {"target": np.empty((4, 6), np.int32)}, ids=BOTH, rows=[3, 1]),
    Case("copy_batch_block_csr", Plain, _csr, {"ids": BOTH}),
    verb("step_tables", Plain, {}, {"out": arrays(2, 5, 2, 4)}, **STEP),
    verb("copy_step_tables", Plain, {}, {"target": arrays(2, 5, 2, 4)}, **STEP),
    Case("capture_block_offsets", Graph, _captured, {"rows": [3, 1]}),
    Case(
        "GraphTables.stage",
        Graph,
        lambda scene, arguments: scene.replay(scene.captured, scene.graph, arguments),
        STEP,
    ),
    verb("pin", Plain, {"keys": UINT64}, keys=KEYS),
    verb("find_and_pin_host", Plain, {"key": UINT64}, key=KEY),
    verb("pin_blocks", Plain, {}, ids=lambda scene: [scene.block]),
    *(
        Case(name, Nothing, call, SLOTS)
        for name, call in (
            ("gather_kv", _copies(gather_kv)),
            ("scatter_kv", _copies(scatter_kv)),
            ("scatter_kv", _uploads),
            ("gather_kv of StagingBuffers", _several(gather_kv)),
            ("scatter_kv of StagingBuffers", _several(scatter_kv)),
        )
    ),
    *(
        Case(
            f"HostCopies.{name}",
            Paged,
            at(f"copies.{name}", skip_prefix_n_tokens=1),
            {"blocks": [2, -1, 1], "host_blocks": [3, 0]},
        )
        for name in ("copy_in", "copy_out")
    ),
    *(
        Case(
            f"HostCache.{name}", Hosted, at(f"cache.{name}", **PRIORITY.get(name, {})), {"keys": named(*keys)}, {}, ONCE
        )
        for name, keys in (
            ("lookup", "ax"),
            ("pin", "ab"),
            ("touch", "abc"),
            ("reserve", "xy"),
            ("publish", "pq"),
            ("in_order", "pq"),
            ("abort", "pq"),
            ("forget", "ab"),
            ("set_priority", "ab"),
        )
    ),
    Case(
        "HostCache.read_dirty",
        Hosted,
        lambda scene, arguments: scene.cache.read_dirty(scene.cursor, **arguments),
        {"keys": named(*"ab")},
        {},
        ONCE,
    ),
    *(
        Case(f"HostStorageManager.{name}", Kept, at(f"manager.{name}", **others), {argument: named(*keys)}, {}, ONCE)
        for name, argument, keys, others in (
            ("lookup", "keys", ("here", "stored"), {}),
            ("pin", "keys", ("here", "there"), {}),
            ("publish", "keys", ("p", "q"), {}),
            ("publish", "unsaved", ("p",), {"keys": named("p", "q")}),
            ("touch", "keys", ("here", "there"), {}),
            ("forget", "keys", ("here", "there"), {}),
        )
    ),
    *(
        Case(f"StoreWorker.{name}", Stored, at(f"queue.{name}"), STORED | rows, {"keys": np.uint8}, ARRAY)
        for name, rows in (
            *((name, {}) for name in ("find", "find_now", "forget")),
            *((name, {"rows": [6, 7]}) for name in ("load", "save")),
        )
    ),
    *(
        Case(f"StorageManager.{name}", Saved, at(f"manager.{name}"), {"prompt": PROMPT}, TOKENS)
        for name in ("prefetch", "match_prefix", "explain", "forget")
    ),
    Case("StorageManager.forget", Saved, at("manager.forget"), {"prompt": KEYS}, {"prompt": UINT64}),
    Case(
        "BlockNames",
        Nothing,
        lambda scene, arguments: BlockNames(**arguments),
        {"names": named("here", "there")},
        {},
        ONCE,
    ),
    Case(
        "BlockNames",
        Nothing,
        lambda scene, arguments: BlockNames([b"a", b"b"], **arguments),
        {"contexts": named("here", "there")},
        {},
        ONCE,
    ),
    Case(
        "BlockKeys",
        Plain,
        _block_keys,
        {"tokens": PROMPT, "keys": KEYS, "extra_ids": EXTRA},
        {"tokens": INT32, "keys": UINT64},
        ARRAY,
    ),
    Case("StridedArray", Nothing, _strided, {"shape": [3, 2], "strides": [8, 2]}, {}, ONCE),
    Case("Surveyor.record", Nothing, _record, {"hash_ids": [1, 2, 3]}, {"hash_ids": UINT64}, ARRAY),
]


def argument_of(case: Case, scene: Any, name: str, form: str) -> tuple[Any, Any]:
    """An argument in one of several forms, and the memory that it has. An iterator has none, and is read once."""
    content = case.arrays[name]
    content = content(scene) if callable(content) else content
    if form == "iterator":
        return iter(content), None
    memory = np.array(content, case.dtypes.get(name, np.int64))
    return (InterfaceOnly(memory) if form == "interface" else memory), memory


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
