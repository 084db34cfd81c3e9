"""verify() is itself verified: every field that it guards is corrupted, and the right check must see it."""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine import Engine, open_engine
from kvpool.errors import IntegrityError
from kvpool.state import records as fields
from kvpool.state import verify as verification
from kvpool.state.arrays import State
from kvpool.state.policies import block_lists
from kvpool.state.records import (
    CLEAN,
    DEVICE,
    EMPTY,
    HOST,
    KEYED,
    LINKED,
    LISTS_PER_TIER,
    LOST,
    LOWEST,
    NONE,
    ONBOARDING,
    PENDING,
    PUBLISHED,
    TAIL,
)
from tests.state.test_chains import BROKEN

Corrupt = Callable[[State], object]
Kind = Callable[["View"], np.ndarray]
T = 4


@pytest.fixture(scope="module")
def busy() -> Iterator[Engine]:
    """Two tiers, all kinds of blocks: shared, shared end, duplicate, redundant, host only, tail, with a ttl on both,
    pinned, empty."""
    engine = open_engine(T, 24, 8)
    engine.seed(range(300, 312), committed=12, retention=[(0, 8, 90, 9000), (8, None, 35, None)])
    engine.release(engine.add(range(5000, 5096)), store=False)
    engine.seed(range(12), committed=12)
    engine.cache.content.offload(range(8))
    for i, priority in enumerate((80, 20, 60)):
        engine.seed(range(1000 * i + 100, 1000 * i + 106), committed=6, retention=[(0, None, priority, 1000 * (3 - i))])
    engine.seed(range(600, 604), committed=4, retention=[(0, None, 50, None)])
    engine.add(range(9))
    engine.commit(engine.add(range(14)))
    for sequence in [engine.add(range(400, 410)) for _ in range(2)]:
        engine.commit(sequence)
    engine.fork(engine.add([700]))
    keys = engine.prompt(range(8)).keys
    engine.cache.pin(keys, tier="host", owner="reader")
    engine.cache.pin(keys[:1], tier="device", owner="reader")
    engine.cache.verify()
    yield engine
    engine.cache.close()


@pytest.fixture
def engine(busy: Engine) -> Iterator[Engine]:
    """One pool for all tests: after each, its state and its leases are what they were."""
    leases = busy.cache._leases._open
    arrays = [array for array in vars(busy.cache.core.tokens).values() if isinstance(array, np.ndarray)]
    before, open_before = [array.copy() for array in arrays], dict(leases)
    yield busy
    for array, content in zip(arrays, before, strict=True):
        array[...] = content
    leases.update(open_before)
    busy.cache.verify()


class View:
    """Blocks by what they are; each test takes the first of a kind."""

    def __init__(self, state: State) -> None:
        blocks = state.blocks
        self.state, self.flags, self.word = state, blocks["flags"], blocks["ref_word"]
        self.host = np.arange(len(blocks)) >= state.header.device_blocks
        self.held = self.word != 0
        self.empty = ~self.held & (self.flags & fields.INDEXED == 0)
        self.published, self.tail, self.linked = (self.flags & flag != 0 for flag in (PUBLISHED, TAIL, LINKED))
        self.twinned = blocks["other_copy"] != NONE
        self.timed = blocks["heap"] != NONE


def number(state: State, kind: Kind, which: int = 0) -> int:
    places = np.flatnonzero(kind(View(state)))
    assert len(places) > which, "the busy pool lacks a kind of block"
    return int(places[which])


def put(name: str, value: Callable[[State], int] | int, kind: Kind) -> Corrupt:
    """Overwrite one field of the first block of a kind."""

    def corrupt(state: State) -> None:
        state.blocks[number(state, kind)][name] = value(state) if callable(value) else value

    return corrupt


def add(name: str, value: int, kind: Kind) -> Corrupt:
    def corrupt(state: State) -> None:
        state.blocks[number(state, kind)][name] += value

    return corrupt


def flip(flag: int, kind: Kind) -> Corrupt:
    def corrupt(state: State) -> None:
        state.blocks[number(state, kind)]["flags"] ^= flag

    return corrupt


def write(name: str, place: Any, value: Any) -> Corrupt:
    """Overwrite an element of an array of the state, or a field of its header."""
    return lambda state: getattr(state, name).__setitem__(place, value(state) if callable(value) else value)


def list_of(tier: int, which: int) -> int:
    return tier * LISTS_PER_TIER + which


def move(kind: Kind, target: int) -> Corrupt:
    """Take the first block of a kind out of its list and put it at the back of another, with all links right."""

    def corrupt(state: State) -> None:
        b = number(state, kind)
        block_lists.unlink(fields.group_at(state.groups, state.group), b)
        block_lists.push(fields.group_at(state.groups, state.group), b, target, block_lists.BACK)

    return corrupt


def unlisted(state: State) -> None:
    block_lists.unlink(fields.group_at(state.groups, state.group), number(state, lambda v: v.empty))


def head_of(name: str, value: int) -> Corrupt:
    """Overwrite the first head of the index or the children that is in use."""

    def corrupt(state: State) -> None:
        heads = getattr(state, name)
        heads[np.flatnonzero(heads != NONE)[0]] = value

    return corrupt


def swap_heads(name: str) -> Corrupt:
    """Two buckets exchange what they hold, so that everything is reached, in the wrong place."""

    def corrupt(state: State) -> None:
        heads = getattr(state, name)
        a, b = np.flatnonzero(heads != NONE)[:2]
        heads[[a, b]] = heads[[b, a]]

    return corrupt


def tokens(kind: Kind) -> Corrupt:
    """Other tokens, but for the first, which chooses the bucket of children."""

    def corrupt(state: State) -> None:
        state.tokens[number(state, kind), 2] += 1

    return corrupt


def table(column: int, value: Callable[[State], int] | int) -> Corrupt:
    """Overwrite an entry of the first live row; column -1 is the one after its end."""

    def corrupt(state: State) -> None:
        row = int(np.flatnonzero(state.sequences["live"])[0])
        at = int(state.sequences["blocks"][row]) if column == -1 else column
        state.table[row, at] = value(state) if callable(value) else value

    return corrupt


def sequence(name: str, change: int) -> Corrupt:
    def corrupt(state: State) -> None:
        state.sequences[name][int(np.flatnonzero(state.sequences["live"])[1])] += change

    return corrupt


def dead_row(state: State) -> None:
    state.table[int(np.flatnonzero(state.sequences["live"] == 0)[0]), 0] = 0


def exchanged_heap(state: State) -> None:
    state.heap[[1, 2]] = state.heap[[2, 1]]


def crossed_copies(state: State) -> None:
    """Two contents, each on both tiers, whose copies name one another's."""
    a, b = (number(state, lambda v: v.twinned & ~v.host, i) for i in (0, 1))
    copies = state.blocks["other_copy"]
    copies[[a, b]] = copies[[b, a]]
    copies[copies[[a, b]]] = a, b


def empty(v: View) -> np.ndarray:
    return v.empty & ~v.host


def listed(v: View) -> np.ndarray:
    return ~v.held & v.published & ~v.host & ~v.twinned & v.linked


def shared(v: View) -> np.ndarray:
    return v.word == 2


def alone(v: View) -> np.ndarray:
    return v.published & ~v.twinned


def duplicate(v: View) -> np.ndarray:
    return v.held & (v.flags & KEYED != 0) & ~v.published & (v.state.blocks["filled"] == T)


def pinned(v: View) -> np.ndarray:
    return v.word >> 32 != 0


def host_only(v: View) -> np.ndarray:
    return v.published & v.host & ~v.twinned & ~v.timed


CORRUPTIONS: list[tuple[str, str, Corrupt]] = [
    ("forked", "a sequence takes a shared end for its own", lambda s: s.sequences["forked"].fill(0)),
    ("list links", "prev", add("prev", 1, lambda v: v.empty & (v.state.blocks["prev"] != NONE))),
    ("list links", "next is the block itself", put("next", lambda s: number(s, empty), empty)),
    ("list links", "next is outside", put("next", 1 << 20, empty)),
    ("list links", "the block names another list", put("list", 0, listed)),
    ("list links", "length", write("lists", (list_of(DEVICE, EMPTY), 2), 1)),
    ("list links", "last", write("lists", (list_of(DEVICE, EMPTY), 1), 0)),
    ("list links", "first is outside", write("lists", (list_of(HOST, EMPTY), 0), -7)),
    ("listed or held", "a listed block is held", put("ref_word", 1, empty)),
    ("listed or held", "a held block is let go", put("ref_word", 0, duplicate)),
    ("listed or held", "a held block names a list", put("list", 5, duplicate)),
    ("listed or held", "in no list, held by nobody", unlisted),
    ("tier of list", "a device block among the host's", move(empty, list_of(HOST, EMPTY))),
    ("tier of list", "a host block among the device's", move(host_only, list_of(DEVICE, 35))),
    ("list of content", "content among the empty", move(listed, list_of(DEVICE, EMPTY))),
    ("list of content", "an empty block among content", move(empty, list_of(DEVICE, 35))),
    ("list of content", "the only copy among the redundant", move(host_only, list_of(HOST, CLEAN))),
    ("list of content", "priority", add("priority", 1, listed)),
    ("lowest priority", "device", write("lists", (LOWEST + DEVICE, 0), EMPTY)),
    ("lowest priority", "host", write("lists", (LOWEST + HOST, 0), EMPTY)),
    ("saved", "of one copy only", add("saved", 1, lambda v: v.twinned & v.host)),
    ("copies", "one side only", put("other_copy", NONE, lambda v: v.twinned & ~v.host)),
    ("copies", "of what is not published", put("other_copy", 0, duplicate)),
    ("copies", "on one tier", put("other_copy", 0, lambda v: alone(v) & ~v.host & (np.arange(len(v.flags)) > 0))),
    ("copies", "crossed", crossed_copies),
    ("copies", "keys differ", add("key1", 1, lambda v: v.twinned & v.host)),
    ("copies", "namespaces differ", add("namespace", 1, lambda v: v.twinned & v.host)),
    ("copies", "tokens differ", tokens(lambda v: v.twinned & v.host)),
    ("representative", "none, of one copy", flip(LINKED, alone)),
    ("representative", "none, of two copies", flip(LINKED, lambda v: v.twinned & v.linked)),
    ("representative", "both copies", flip(LINKED, lambda v: v.twinned & ~v.linked)),
    ("representative", "of nothing", flip(LINKED, empty)),
    ("published", "without a key", flip(KEYED, alone)),
    ("index", "a head is gone", head_of("index", NONE)),
    ("index", "two heads are exchanged", swap_heads("index")),
    ("index", "a chain runs in a circle", put("chain", lambda s: number(s, alone), alone)),
    ("index", "an outsider in a chain", lambda s: head_of("index", number(s, empty))(s)),
    ("children", "a head is gone", head_of("children", NONE)),
    ("children", "two heads are exchanged", swap_heads("children")),
    ("children", "the way back", add("child_prev", 1, lambda v: v.linked)),
    ("children", "a circle", put("child_next", lambda s: number(s, alone), alone)),
    ("key", "tokens", tokens(alone)),
    ("key", "parent", add("parent1", 1, alone)),
    ("key", "secret", write("header", "secret0", lambda s: int(s.header.secret0) ^ 1)),
    ("filled", "published and not full", put("filled", T - 1, alone)),
    ("filled", "a tail of no token", put("filled", 0, lambda v: v.tail)),
    ("filled", "a full tail", put("filled", T, lambda v: v.tail)),
    ("table", "after the end", table(-1, 0)),
    ("table", "a hole", table(0, NONE)),
    ("table", "a host block", table(0, lambda s: len(s.blocks) - 1)),
    ("table", "outside", table(0, 1 << 20)),
    ("table", "of a released sequence", dead_row),
    ("references", "one too many", add("ref_word", 1, shared)),
    ("references", "one too few", add("ref_word", -1, shared)),
    ("references", "another block", table(0, lambda s: number(s, duplicate))),
    ("length", "a block more than there is", sequence("length", T)),
    ("length", "more committed than there is", sequence("committed", 100)),
    ("lost", "a lost block unknown to its sequence", flip(LOST, duplicate)),
    ("committed", "a full committed block without a key", flip(KEYED, duplicate)),
    ("scratch", "a mark", sequence("mark", 1)),
    ("scratch", "an onboard", flip(ONBOARDING, duplicate)),
    ("pending", "what is published", flip(PENDING, alone)),
    ("rows", "a live one is free", write("rows", 0, lambda s: np.flatnonzero(s.sequences["live"])[0])),
    ("rows", "one is missing", write("header", "free_rows", lambda s: int(s.header.free_rows) - 1)),
    ("expiries", "size below zero", write("heap", 0, -1)),
    ("expiries", "size beyond the blocks", write("heap", 0, 1000)),
    ("expiries", "one is forgotten", write("heap", 0, lambda s: int(s.heap[0]) - 1)),
    ("expiries", "a member outside", write("heap", 1, 1 << 20)),
    ("expiries", "two are exchanged", exchanged_heap),
    ("expiries", "order", lambda s: s.blocks["deadline"].__setitem__(s.heap[1], 1 << 40)),
    ("expiries", "a block says that it is inside", put("heap", 1, empty)),
    ("expiries", "a place", add("heap", 1, lambda v: v.timed)),
    ("expiries", "no ttl", put("ttl", NONE, lambda v: v.timed)),
    ("expiries", "a ttl that nobody watches", put("ttl", 5, lambda v: listed(v) & (v.state.blocks["priority"] == 50))),
    ("pins", "one too many", add("ref_word", 1 << 32, pinned)),
    ("pins", "one too few", add("ref_word", -(1 << 32), lambda v: pinned(v) & (v.word & 0xFFFFFFFF != 0))),
]


@pytest.mark.parametrize(("check", "corrupt"), [pytest.param(c, f, id=f"{c}: {what}") for c, what, f in CORRUPTIONS])
def test_a_corrupted_field_is_named(engine: Engine, check: str, corrupt: Corrupt) -> None:
    corrupt(engine.cache.core.tokens)
    with pytest.raises(IntegrityError) as raised:
        engine.cache.verify()
    assert raised.value.check == check, f"the first to see it: {raised.value}"
    assert str(raised.value).startswith(f"{check}: ")


def test_all_that_is_wrong_is_found(engine: Engine) -> None:
    """A pool collects what an interrupted call has decided before it verifies, and "listed or held" names the block
    that a tier lacks: so the state is verified alone."""
    state = engine.cache.core.tokens
    write("header", "copy_ops", 1)(state)
    assert failed_checks(engine) == {"copy ops"}
    unlisted(state)
    for check in ("pins", "rows", "filled", "lowest priority"):
        next(corrupt for name, _, corrupt in CORRUPTIONS if name == check)(state)
    assert {"copy ops", "capacity", "pins", "rows", "filled", "lowest priority"} <= failed_checks(engine)


def test_pins_are_those_of_the_leases(engine: Engine) -> None:
    engine.cache._leases._open.popitem()
    with pytest.raises(IntegrityError, match="pins: block"):
        engine.cache.verify()


def test_a_sound_pool_has_no_findings(engine: Engine) -> None:
    assert failed_checks(engine) == set()


def failed_checks(engine: Engine) -> set[str]:
    leased = np.concatenate([lease.blocks for lease in engine.cache.leases])
    return {check for check, _ in verification.findings(engine.cache.core.tokens, leased)}


def test_every_check_is_tested() -> None:
    source = inspect.getsource(verification)
    named = re.findall(r'yield \(?\s*"([a-z ]+)"', source) + re.findall(r'^        \("([a-z ]+)", _walk', source, re.M)
    elsewhere = {"copy ops", "capacity", "window", "states", "chain", "cross", *BROKEN}
    assert set(named) == {check for check, _, _ in CORRUPTIONS} | elsewhere


NOWHERE: dict[str, Corrupt] = {
    "a copy": put("other_copy", 1 << 20, alone),
    "a head of the index": head_of("index", 1 << 28),
    "a chain": put("chain", 1 << 28, alone),
    "a chain into a circle": lambda s: s.blocks["chain"].fill(number(s, lambda v: alone(v) & v.host)),
    "a head of the children": head_of("children", 1 << 28),
    "a child": put("child_next", 1 << 28, lambda v: v.linked),
    "a previous block": put("prev", 1 << 28, empty),
    "a free row": write("rows", 0, 1 << 28),
    "more free rows than rows": write("header", "free_rows", 1 << 40),
    "more blocks than columns": sequence("blocks", 1 << 20),
    "a list": put("list", 1 << 14, lambda v: v.empty),
}


@pytest.mark.parametrize("link", NOWHERE)
# Other tests of this process may have loaded JAX, whose threads the child does not have and does not use.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_links_to_nowhere_neither_crash_nor_hang(engine: Engine, link: str) -> None:
    """In a process of its own, which may die of it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            NOWHERE[link](engine.cache.core.tokens)
            engine.cache.verify()
        except IntegrityError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
