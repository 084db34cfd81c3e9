"""What jitted code trusts is private memory of the call: for every public verb, and for every array that it takes.

No array that jitted code is handed may share memory with the caller's, and no address may point into it; nor may the
keys of a store's job. What is no array of NumPy's is read once.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numba.core import config

import kvpool
from array_arguments import CASES, WALK, Case, argument_of
from array_scenes import look, seen, watched
from kvpool import KVCacheManager, storage
from kvpool.common.arguments import int64_array, token_array
from kvpool.common.jit import jit
from kvpool.pool.keys import key_rows
from kvpool.storage import StoreRequest, store_requests
from parts import PARTS
from steps import NAMES
from tests.interop.arrays import InterfaceOnly

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
    scene = case.scene()
    with ExitStack() as open_scenes:
        if hasattr(scene, "close"):
            open_scenes.callback(scene.close)  # waits for the work of other threads
        arguments = {other: argument_of(case, scene, other, case.forms[0])[0] for other in case.arrays}
        arguments[name], memory = argument_of(case, scene, name, form)
        watched.extend([] if memory is None else [memory])
        answer = case.call(scene, arguments)
        if isinstance(answer, StoreRequest):
            look(answer.keys)
    assert not seen, f"{case.verb}: {name}: {seen[0]}"
    # Once to see that it has an interface, once for its memory.
    assert form != "interface" or arguments[name].count <= 2, f"{case.verb}: {name}: read again"


@pytest.mark.parametrize(
    ("private", "values"),
    [
        (partial(token_array, "prompt"), np.arange(3, dtype=np.int32)),
        (partial(int64_array, "ids"), np.arange(3)),
        (key_rows, np.ones((3, 2), np.uint64)),
        (store_requests.keys_argument, np.ones((3, store_requests.KEY_BYTES), np.uint8)),
    ],
    ids=["tokens", "integers", "keys", "keys of jobs"],
)
def test_arguments_are_copied(private: Callable[[Any], Any], values: Any) -> None:
    for form in (values, InterfaceOnly(values)) if values.ndim == 1 else (values,):
        assert not np.shares_memory(private(form), values)


class Walk:
    """Traces a call. During one of the lines that check arguments, the memory of its argument has a wrong value.
    ``count``: how many of these lines the call came to."""

    def __init__(self, line: int, memory: Any, wrong: int) -> None:
        self._memory, self._values, self.count = memory, {line: wrong, line + 1: memory[0]}, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Walk | None:
        if not frame.f_code.co_filename.endswith("kvpool/common/arguments.py"):
            return None
        if event == "line":
            self._memory[0] = self._values.get(self.count, self._memory[0])
            self.count += 1
        return self


@pytest.mark.parametrize(
    ("private", "values", "wrong"),
    [
        (partial(token_array, "prompt"), np.arange(3, dtype=np.int32), -1),
        (partial(token_array, "prompt"), np.arange(3), -1),
        (partial(int64_array, "ids"), np.arange(3, dtype=np.uint64), 1 << 63),
    ],
    ids=["tokens", "tokens of 64 bits", "unsigned integers"],
)
def test_a_value_that_is_wrong_during_any_line_is_checked_as_it_was_copied(
    private: Callable[[Any], Any], values: Any, wrong: int
) -> None:
    lines, reached = 0, True
    while reached:
        memory = values.copy()
        walk = Walk(lines, memory, wrong)
        before = sys.gettrace()
        sys.settrace(walk)
        try:
            with suppress(ValueError):
                assert private(memory).tolist() == values.tolist()
        finally:
            sys.settrace(before)
        reached, lines = walk.count > lines, lines + 1
    assert lines > 4


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
    "HostCopies": "stream caches places",  # caches and layouts are immutable, and so are places
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
