"""What jitted code trusts is private memory of the call: for every public verb, and for every array that it takes.

Two walks over the same cases. The first looks at what jitted code is handed: no array of it may share memory with the
caller's, and no address may point into it. The second changes the caller's memory at one line of the call after the
other: the call must have read either what was there before or what is there now, whole, and the pool must be what that
makes of it.
"""

from __future__ import annotations

import inspect
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
from changing import CASES, CHANGED, WALK, Case, given_to, look, seen, watched
from kvpool import BlockKeys, KVCacheManager, Lease, Loadable
from kvpool.jit import jit

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
    scene = case.scene()
    given, argument = given_to(case, scene, name, form, False)
    watched.extend([argument.memory] if form != "list" else [])
    case.call(scene, given)
    assert not seen, f"{case.verb}: {name}: {seen[0]}"


# -- memory that changes -----------------------------------------------------------------------------


@contextmanager
def at_line(number: int, change: Callable[[], None]) -> Iterator[list[int]]:
    """Call ``change`` before line ``number`` of the package that this thread comes to; yields how many it came to."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        # What holds signals back looks at all of them now and then, and what compiles loads now and then: no lines of
        # the call.
        inside = frame.f_code.co_filename.removeprefix(FOLDER)
        if inside == frame.f_code.co_filename or inside.startswith(("/interrupt.py", "/jit/")):
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


def _described(value: Any) -> object:
    """What a call returned, without addresses."""
    if isinstance(value, BlockKeys):
        return (
            value.tokens.tolist(),
            value.keys.tolist(),
            None if value.extra_ids is None else value.extra_ids.tolist(),
            value.namespace,
        )
    if isinstance(value, Loadable):
        return [(share.blocks.tolist(), share.slots().tolist()) for share in value._shares]
    if isinstance(value, Lease):
        return value.blocks.tolist(), value.groups.tolist(), None if value.keys is None else value.keys.tolist()
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist() if value.size < 1000 else 0
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    return value


def _outcome(case: Case, scene: Any, name: str, form: str, line: int, changes: bool = False) -> tuple[object, int]:
    """What a call gives and what it leaves, and the lines of the package that it came to."""
    given, argument = given_to(case, scene, name, form, changes)
    with at_line(line, argument.change) as count:
        try:
            answer = case.call(scene, given)
        except (ValueError, TypeError, IndexError, kvpool.KVPoolError) as error:
            answer = (type(error).__name__, str(error))
    return (_described(answer), scene.picture()), count[0]


@pytest.mark.parametrize(("case", "name", "form"), CHANGED)
def test_memory_that_changes_at_any_line_of_a_call_counts_as_a_whole(case: Case, name: str, form: str) -> None:
    _outcome(case, case.scene(), name, form, -1)  # compiles
    before, lines = _outcome(case, case.scene(), name, form, -1)
    after, _ = _outcome(case, case.scene(), name, form, -1, changes=True)
    assert before != after, "the change makes no difference: it would not be seen"
    scene, last = case.scene(), after
    for line in range(lines):
        untouched = scene.picture()
        last_before, last = last, _outcome(case, scene, name, form, line)[0]
        assert last in (before, after), f"changed before line {line} of {lines}"
        assert last == before or last_before == after, f"read again at line {line} of {lines}"
        if scene.picture() != untouched:
            if hasattr(scene, "cache"):
                scene.cache.verify()
            scene = case.scene()
    assert last == before


# -- the walk is whole -------------------------------------------------------------------------------

NO_ARRAYS = {
    "stream",
    "group",
    "n",
    "store",
    "owner",
    "tier",
    "priority",
    "max_blocks",
    "salt",
    "adapter_id",
    "decode_priority",
    "decode_ttl_ms",
    "allow_partial_batch",
    "snapshot",
    "writable",
    "raw",
    "part",
    "force",
    "now_ms",
    "lease",
    "reservation",
    "reuse",
    "publish",
    "ttl_ms",
    "namespace",
}
"""Names of arguments that are no arrays in any call."""
ELSEWHERE = {
    # tuples, read into rows of the call
    ("add_sequence", "retention"),
    ("add_sequence_batch", "retention"),
    ("reserve", "retention"),
    ("copy_batch_block_offsets", "scale"),
    ("copy_batch_block_offsets", "v_offset"),  # read into tuples of ints
    # written
    ("copy_batch_block_offsets", "target"),
    *(("copy_batch_block_csr", name) for name in ("indptr", "indices", "last_page_len")),
    *(("step_tables", "out"), ("copy_step_tables", "target")),
    ("import_blocks", "prompt"),
    ("import_blocks", "data"),  # BlockKeys, which are immutable; KV itself
    *(("import_blocks", "first"), ("commit_reserved", "tokens")),  # one number
    ("apply", "operations"),  # a list, whose arrays are walked by operation
}
"""Arguments that may be sequences and are looked at elsewhere, or are meant to be memory of the caller's."""


def test_the_walk_covers_every_argument_of_every_public_call() -> None:
    walked = {(case.verb, name) for case in CASES for name in case.arrays} | {("add_sequence_batch", "prompts")}
    missing = [
        f"{name}({argument})"
        for name, method in inspect.getmembers(KVCacheManager, inspect.isfunction)
        if not name.startswith("_")
        for argument in list(inspect.signature(method).parameters)[1:]
        if argument not in NO_ARRAYS and not {(name, argument)} & (walked | ELSEWHERE)
    ]
    assert not missing, f"not walked: {missing}"
    functions = {name for name in kvpool.__all__ if inspect.isfunction(getattr(kvpool, name))}
    assert functions == {"attach", "gather_kv", "scatter_kv", "split_blocks", "warm_up"}, (
        "another public function: has it arrays?"
    )
