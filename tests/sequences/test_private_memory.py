"""What jitted code trusts is private memory of the call: for every public verb, and for every array that it takes.

Two walks over the same cases. The first looks at what jitted code is handed: no array of it may share memory with the
caller's, and no address may point into it. The second changes the caller's memory at one line of the call after the
other: the call must have read either what was there before or what is there now, whole, and the pool must be what that
makes of it. A change lasts. So what is read a second time shows at every line between the two: after the first reading
every 16th line is enough.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numba.core import config

import kvpool
from changing import CASES, CHANGED, WALK, Case, given_to, scenes
from changing_scenes import look, seen, watched
from kvpool import BlockKeys, KVCacheManager, Lease, storage
from kvpool.common.jit import jit
from kvpool.hostcache import HostLease
from kvpool.pool import LoadTarget
from kvpool.storage import Forgotten, Prefetch, StoreRequest
from parts import PARTS
from steps import NAMES

FOLDER = str(Path(kvpool.__file__).parent)
DISPATCHER: Any = type(jit(lambda: None))
needs_jit = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT: nothing is jitted")

# -- what jitted code is handed ----------------------------------------------------------------------


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def call(dispatcher: Any, *args: Any) -> Any:
        for arg in args:
            look(arg)
        return plain(dispatcher, *args)

    plain = DISPATCHER.__mro__[-2].__call__
    monkeypatch.setattr(DISPATCHER, "__call__", call, raising=False)
    # What nobody has written yet may hold an address by chance, that of an array that was there before.
    monkeypatch.setattr(np, "empty", np.zeros)
    monkeypatch.setattr(np, "empty_like", np.zeros_like)
    watched.clear()
    seen.clear()
    yield
    watched.clear()


@needs_jit
@pytest.mark.parametrize(("case", "name", "form"), WALK)
def test_jitted_code_is_handed_no_memory_of_the_caller(looked: None, case: Case, name: str, form: str) -> None:
    with scenes(case) as scene_of:
        scene = scene_of()
        arguments, argument = given_to(case, scene, name, form, False)
        watched.extend([argument.memory] if form != "list" else [])
        case.call(scene, arguments)
        scene.picture()  # What other threads were asked for is done.
    assert not seen, f"{case.verb}: {name}: {seen[0]}"


# -- memory that changes -----------------------------------------------------------------------------


@contextmanager
def at_line(number: int, change: Callable[[], None]) -> Iterator[list[int]]:
    """Call ``change`` before line ``number`` of the package that this thread comes to; yields how many it came to."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        # What compiles loads now and then, and a simulated device runs what was enqueued: no lines of the call.
        inside = frame.f_code.co_filename.removeprefix(FOLDER)
        if inside == frame.f_code.co_filename or inside.startswith(("/common/jit/", "/device/sim/")):
            return None
        if event == "line":
            if count[0] == number:
                change()
            count[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


FIELDS: dict[type, tuple[str, ...]] = {
    BlockKeys: ("tokens", "keys", "extra_ids", "namespace"),
    HostLease: ("keys", "blocks"),
    Lease: ("blocks", "groups", "keys"),
    Prefetch: ("prompt",),
}


def _described(value: Any) -> object:
    """What a call returned, without addresses."""
    if isinstance(value, LoadTarget):
        return [(share.blocks.tolist(), share.slots().tolist()) for share in value.shares]
    if isinstance(value, StoreRequest):
        assert value.wait(600, returned=True)
        return value.codes.tolist(), value.error
    if isinstance(value, Forgotten):
        assert value.wait(600)
        return value.blocks
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist() if value.size < 1000 else 0
    if type(value) in FIELDS:
        value = [getattr(value, name) for name in FIELDS[type(value)]]
    return [_described(item) for item in value] if isinstance(value, (list, tuple)) else value


def _outcome(case: Case, scene: Any, name: str, form: str, line: int, changes: bool = False) -> tuple[object, int]:
    """What a call gives and what it leaves, and the lines of the package that it came to."""
    arguments, argument = given_to(case, scene, name, form, changes)
    with at_line(line, argument.change) as count:
        try:
            answer = case.call(scene, arguments)
        except (ValueError, TypeError, IndexError, kvpool.KVPoolError) as error:
            answer = (type(error).__name__, str(error))
    return (_described(answer), scene.picture()), count[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "name", "form"), CHANGED)
def test_memory_that_changes_at_any_line_of_a_call_counts_as_a_whole(case: Case, name: str, form: str) -> None:
    with scenes(case) as scene_of:
        _outcome(case, scene_of(), name, form, -1)  # compiles
        before, lines = _outcome(case, scene_of(), name, form, -1)
        after, _ = _outcome(case, scene_of(), name, form, -1, changes=True)
        assert before != after, "the change makes no difference: it would not be seen"
        scene, last, settled = scene_of(), after, 0
        for line in range(lines):
            settled = settled + 1 if last == before else 0
            if settled > 2 and line % 16 and line < lines - 1:
                continue
            untouched = scene.picture()
            last_before, last = last, _outcome(case, scene, name, form, line)[0]
            assert last in (before, after), f"changed before line {line} of {lines}"
            assert last == before or last_before == after, f"read again at line {line} of {lines}"
            if scene.picture() != untouched:
                if hasattr(scene, "cache"):
                    scene.cache.verify()
                scene = scene_of()
        assert last == before


# -- the walk is whole -------------------------------------------------------------------------------

PLAIN = re.compile(
    r"(int|str|bool|float|bytes|None|slice|Callable\[.*\]|BaseException|TracebackType|Path|os\.PathLike\[str\]"
    r"|KVCacheManager|HostCache|HostTier|ModelIdentity|BlockLayout|Store|CircuitBreaker|Call|StoreRequest|StorageManager|Device|Stream|Launcher|SharedTier|LayerLoads"
    r"|HostTierDescription|EvictionOptions|MemoryOptions|Tier|BlockOrder|TokenOrder|PolicyName|StopReason|GroupKind|SaveMode|RequestKind|Literal\[[^]]*\]|StepTables|Operation|type\[.*\]|[\s|])*"
)
"""Types that are neither arrays nor sequences: an argument of such a type is not walked."""
NO_ARRAYS = {
    "KVCacheManager": "stream namespace device_blocks host_blocks groups",  # a pair of texts, numbers
    **dict.fromkeys(("GraphTables", "HostCopy", "LayerLoads", "Lease", "Reservation"), "stream"),
    "HostCopies": "stream caches",  # caches and layouts are immutable
    **{"HostCache": "block_bytes", "LayerGroup": "layout", "ModelIdentity": "layout", "BlockLayout": "dtype"},
    "HostTier": "cache block_bytes",
    **{"PagedKV": "owner", "StridedArray": "owner", "StoreWorker": "owner"},  # is compared by identity
    "StorageManager": "namespace stores quotas",  # read when a part is made, and never handed to jitted code
    **{"HostStorageManager": "stores policies", "StepTables": "as_table"},
    **{"BlockKeys": "root origin", "HostSlots": "blocks"},  # tuples
}
"""Arguments of classes that are no arrays, whatever their type is."""
IN_PLACE = {
    "KVCacheManager": "retention scale v_offset target indptr indices last_page_len data",  # read at once, or KV itself
    "MemoryOptions": "device_memory host_memory table",
    "PagedKV": "arrays pool planes bases",  # ``PagedKV.of`` has made and checked the last two
    **{"HostTier": "memory", "StoreWorker": "memory", "StepTables": " ".join(NAMES)},
}
"""Memory of the caller's that is meant to be used in place, and what is read at once and looked at elsewhere."""
VERBS = (
    kvpool.KVCacheManager,
    kvpool.HostCache,
    kvpool.hostcache.HostCopies,
    kvpool.hostcache.HostCopy,
    kvpool.HostTier,
    kvpool.MemoryOptions,
    kvpool.EvictionOptions,
    kvpool.hostcache.HostLease,
    kvpool.hostcache.HostSlots,
    kvpool.BlockKeys,
    kvpool.BlockLayout,
    kvpool.pool.GraphTables,
    kvpool.device.memory.Export,
    kvpool.LayerGroup,
    kvpool.pool.LayerLoads,
    kvpool.Lease,
    kvpool.pool.LoadTarget,
    kvpool.ModelIdentity,
    kvpool.PagedKV,
    kvpool.pool.Reservation,
    kvpool.pool.StepTables,
    kvpool.device.memory.StridedArray,
    storage.HostStorageManager,
    storage.StorageManager,
    storage.BlockNames,
    storage.StoreWorker,
)
"""Public classes that callers make, or whose methods they call."""
BUILT = {
    kvpool.pool.GraphTables,
    kvpool.pool.LayerLoads,
    kvpool.Lease,
    kvpool.pool.LoadTarget,
    kvpool.pool.Reservation,
    kvpool.hostcache.HostLease,
    kvpool.hostcache.HostCopy,
    kvpool.device.memory.Export,
}
"""Classes that only the pool makes."""
OF_THE_POOL = {
    ("BlockKeys", "of_private"),
    ("BlockKeys", "prove"),
    ("BlockKeys", "bound"),
    ("Export", "of_place"),
    ("HostCopies", "query"),
    ("HostCopies", "synchronize"),
    ("HostCopies", "hold_back"),
    ("HostCache", "publish_ordered"),
}
"""Methods that parts of the pool call, and nobody else."""


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods of a class, and what makes it unless the pool does. Those of a pool's parts are the pool's."""
    for part in PARTS.values() if owner is KVCacheManager else ():
        yield from ((name, method) for name, method in inspect.getmembers(part, callable) if name[0] != "_")
    for name, method in inspect.getmembers(owner, callable):
        made = name == ("__new__" if "__new__" in vars(owner) else "__init__") and owner not in BUILT
        if (made or not name.startswith("_")) and (owner.__name__, name) not in OF_THE_POOL:
            yield "" if made else name, method


def _arguments(call: Any) -> Iterator[str]:
    """Names of the arguments that may be arrays."""
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name not in ("self", "cls") and not PLAIN.fullmatch(str(parameter.annotation)):
            yield parameter.name


def not_walked(owner: type) -> list[str]:
    """The arguments of a public class that may be arrays and that no walk and no list has."""
    name, walked = owner.__name__, {(case.verb, argument) for case in CASES for argument in case.arrays}
    prefix = "" if owner is KVCacheManager else f"{name}."
    return [
        f"{name}.{method}({argument})"
        for method, call in _methods(owner)
        for argument in _arguments(call)
        if argument not in f"{NO_ARRAYS.get(name)} {IN_PLACE.get(name)}".split()
        and (prefix + method if method else name, argument) not in walked | BY_NAME
    ]


BY_NAME = {("add_sequence_batch", "prompts"), ("import_blocks", "prompt"), ("StoreWorker.give_back", "rows")}
"""A list of what is walked, BlockKeys, which are immutable, and rows that become a list before anything reads them."""


@pytest.mark.parametrize("owner", VERBS, ids=lambda owner: owner.__name__)
def test_the_walk_covers_every_argument_of_every_public_call(owner: type) -> None:
    assert not not_walked(owner)
