"""Every invariant of the state as one named check, in each group and between groups. Reads the arrays. The caller holds
the state lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Bools, Int32s, Int64s
from kvpool.common.jit import jit
from kvpool.errors import IntegrityError
from kvpool.state.arrays import State, States
from kvpool.state.hashing import key_in
from kvpool.state.index import bucket, child_bucket
from kvpool.state.policies.chains import CHAINS_MAX
from kvpool.state.policies.pauses import CLASSES
from kvpool.state.records import (
    ATTENTION,
    CLEAN,
    CROSS,
    DEFAULT_PRIORITY,
    DEVICE,
    EMPTY,
    HOST,
    INDEXED,
    KEYED,
    LINKED,
    LISTS_PER_TIER,
    LOST,
    LOWEST,
    NONE,
    ONBOARDING,
    PENDING,
    PUBLISHED,
    RECURRENT,
    SWAPPED,
    TAIL,
    blocks_of,
    children_of,
    extra_in,
    group_at,
    index_of,
    lists_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.requests import column_key

IntArray = npt.NDArray[np.integer]


@jit
def _walk_lists(groups, g, seen):
    """Count in ``seen`` how often each block is listed. Returns a block whose links or list disagree, else NONE."""
    group = group_at(groups, g)
    blocks, lists = blocks_of(group), lists_of(group)
    for which in range(LOWEST):
        b, before, count = lists[which, 0], NONE, 0
        while b != NONE:
            if b < 0 or b >= len(blocks):
                return max(before, 0)
            if blocks[b].prev != before or blocks[b].list != which or count > len(blocks):
                return b
            seen[b] += 1
            count += 1
            before, b = b, blocks[b].next
        if lists[which, 1] != before or lists[which, 2] != count:
            return max(before, 0)
    return NONE


@jit
def _walk_index(groups, g, seen):
    """Count in ``seen`` how often the index reaches each block. Returns a block that is reached twice, or from the
    wrong bucket, else NONE."""
    group = group_at(groups, g)
    blocks, index = blocks_of(group), index_of(group)
    for at in range(len(index)):
        b = index[at]
        while b != NONE:
            if b < 0 or b >= len(blocks):
                return b
            seen[b] += 1
            if seen[b] > 1 or bucket(blocks[b].key0, len(index)) != at:
                return b
            b = blocks[b].chain
    return NONE


@jit
def _walk_children(groups, g, seen):
    group = group_at(groups, g)
    blocks, index = blocks_of(group), children_of(group)
    for at in range(len(index)):
        b, before = index[at], NONE
        while b != NONE:
            if b < 0 or b >= len(blocks):
                return b
            seen[b] += 1
            if seen[b] > 1 or blocks[b].child_prev != before:
                return b
            if child_bucket(blocks[b].parent0, tokens_of(group)[b, 0], len(index)) != at:
                return b
            before, b = b, blocks[b].child_next
    return NONE


@jit
def _wrong_key(groups, g):
    """A published block whose key is not the key of its parent, tokens and extra ids, else NONE."""
    group = group_at(groups, g)
    blocks, tokens = blocks_of(group), tokens_of(group)
    for b in range(len(blocks)):
        if blocks[b].flags & (PUBLISHED | PENDING):
            key = key_in(group, tokens[b], extra_in(group, b), blocks[b].parent0, blocks[b].parent1)
            if key[0] != blocks[b].key0 or key[1] != blocks[b].key1:
                return b
    return NONE


@jit
def _wrong_chain(groups, g):
    """A row of a recurrent group whose notes disagree with the keys of its blocks, else NONE."""
    group = group_at(groups, g)
    blocks, sequences, width = blocks_of(group), sequences_of(group), group.width
    for slot in range(group.sequences):
        sequence, row = sequences[slot], table_of(group)[slot]
        if sequence.live == 0:
            continue
        key0, key1 = sequence.chain0, sequence.chain1
        done = sequence.committed // width
        if sequence.committed < 0 or sequence.length < sequence.committed or sequence.length > group.columns * width:
            return slot
        if done == 0 and (key0 != sequence.root0 or key1 != sequence.root1):
            return slot
        for i in range(max(done - 1, 0), sequence.length // width):
            if i >= done:
                key0, key1 = column_key(group, slot, i, key0, key1)
            b = row[i]
            if b < NONE or b >= len(blocks):
                return slot
            if b != NONE and blocks[b].flags & KEYED and (blocks[b].key0 != key0 or blocks[b].key1 != key1):
                return slot
    return NONE


Finding = tuple[str, str]
Check = tuple[str, Any, str]
"""A check, for which blocks or rows it is wrong (or whether), and a text that names the first one."""


def _lists(state: State) -> Iterator[Check]:
    blocks, device = state.blocks, int(state.header.device_blocks)
    seen = np.zeros(len(blocks), np.int32)
    bad = _walk_lists(state.groups, state.group, seen)
    if bad != NONE:
        yield "list links", True, f"links, list or length disagree at block {bad}"
        return
    held = blocks["ref_word"] != 0
    yield "listed or held", (seen == 1) == held, "block {} is held and listed, or neither"
    yield "listed or held", (blocks["list"] < 0) != held, "block {} is marked as in a list and is held, or neither"
    for name, part in (("device", slice(0, device)), ("host", slice(device, None))):
        yield (
            "capacity",
            seen[part].sum() + held[part].sum() != len(blocks[part]),
            f"{name}: listed + held is not the capacity",
        )
    # The rule is repeated here. Asking the policy would check it against itself.
    on_host = np.arange(len(blocks)) >= device
    content = [(blocks["flags"] & INDEXED) == 0, on_host & (blocks["other_copy"] != NONE)]
    tier = np.where(on_host, HOST, DEVICE)
    expected = tier * LISTS_PER_TIER + np.select(content, [EMPTY, CLEAN], blocks["priority"])
    other = blocks["list"] // LISTS_PER_TIER != tier
    yield "tier of list", ~held & other, "block {} is in a list of the other tier"
    yield (
        "list of content",
        ~held & (blocks["list"] != expected),
        "block {} is in a list that its content does not belong to",
    )
    for row in (DEVICE, HOST):
        filled = np.flatnonzero(state.lists[row * LISTS_PER_TIER : row * LISTS_PER_TIER + EMPTY, 2])
        if len(filled) and filled[0] < state.lists[LOWEST + row, 0]:
            yield "lowest priority", True, f"priority {filled[0]} of tier {row} has blocks but would not be looked at"


def _index(state: State) -> Iterator[Check]:
    blocks, device = state.blocks, int(state.header.device_blocks)
    flags, other_id = blocks["flags"], blocks["other_copy"]
    published, linked, tail = (flags & PUBLISHED) != 0, (flags & LINKED) != 0, (flags & TAIL) != 0
    pending = (flags & PENDING) != 0
    has = other_id != NONE
    outside = has & ((other_id < 0) | (other_id >= len(blocks)))
    if outside.any():
        yield "copies", outside, "the copy of block {} is not a block"
        return
    yield "copies", has & ~published, "block {} has a copy but is not published"
    other = blocks[other_id]
    is_device = np.arange(len(blocks)) < device
    mutual = (other["other_copy"] == np.arange(len(blocks))) & (is_device != is_device[other_id])
    same = (
        (other["key0"] == blocks["key0"])
        & (other["key1"] == blocks["key1"])
        & (other["namespace"] == blocks["namespace"])
    )
    yield "copies", has & ~(mutual & same), "block {} and its copy do not name each other, one content and two tiers"
    yield "copies", has & (state.tokens != state.tokens[other_id]).any(axis=1), "block {} and its copy differ in tokens"
    yield (
        "saved",
        has & (blocks["saved"] != other["saved"]),
        "block {} and its copy were read by different cursors",
    )
    alone = published & ~has & ~linked
    both = has & (linked == linked[other_id])
    yield "representative", alone | both, "the content of block {} has none or two in the index"
    yield "representative", linked & ~published & ~tail & ~pending, "block {} is linked but caches nothing"
    yield "published", published & (flags & KEYED == 0), "block {} is published without a key"
    wrong = pending & (published | ~linked | (blocks["ref_word"] != 1 << 32) | (blocks["uses"] != 0))
    yield "pending", wrong, "block {} waits for its bytes, and is not linked, is published, or is held by others"
    for name, walk, members in (
        ("index", _walk_index, linked & (published | pending)),
        ("children", _walk_children, linked if len(state.children) else linked & False),
    ):
        seen = np.zeros(len(blocks), np.int32)
        bad = walk(state.groups, state.group, seen)
        if bad != NONE:
            yield name, True, f"links or bucket are wrong at block {bad}"
        else:
            yield name, (seen == 1) != members, "block {} can be reached but should not be, or the reverse"
    members = np.flatnonzero(linked & (published | pending))
    keys = np.stack([blocks["key0"][members], blocks["key1"][members]], axis=1)
    yield "index", len(np.unique(keys, axis=0)) != len(keys), "two contents have one key"
    bad = _wrong_key(state.groups, state.group)
    yield "key", bad != NONE, f"the key of block {bad} is not that of its tokens"
    width = state.tokens.shape[1]
    wrong = (published & (blocks["filled"] != width)) | (tail & ((blocks["filled"] < 1) | (blocks["filled"] >= width)))
    yield "filled", wrong, "block {} has the wrong number of tokens"


def _sequences(state: State) -> Iterator[Check]:
    blocks, sequences = state.blocks, state.sequences
    live, device, away = sequences["live"] != 0, int(state.header.device_blocks), sequences["live"] == SWAPPED
    table = _rows(state, away)
    length = np.where(live, sequences["blocks"], 0)
    place, sinks = np.arange(table.shape[1]), int(state.header.sinks)
    occupied = (place < length[:, None]) & ((place < sinks) | (place >= sequences["first"][:, None]))
    if state.header.kind == RECURRENT:
        yield from _recurrent(state, table, length)
        occupied &= table != NONE
    yield "table", away & (state.table != NONE).any(axis=1), "row {} has ids though its sequence is swapped out"
    yield (
        "table",
        ((table != NONE) != occupied).any(axis=1),
        "row {} has ids behind its end, or holes that no window has passed",
    )
    width, committed = state.tokens.shape[1], sequences["committed"].astype(np.int64)
    if state.header.window:
        # What the next token sees, and the last full block, whose key is the parent of the next one.
        needed = np.minimum((committed - int(state.header.window) + 1) // width, committed // width - 1)
        wrong = live & (sequences["first"] > np.maximum(needed, sinks))
        yield "window", wrong, "sequence {} has given back what its next token sees"
    ids = table[occupied]
    outside = (ids < 0) | (ids >= len(blocks))
    misplaced = ((table >= device) != away[:, None])[occupied]
    if outside.any() or misplaced.any():
        yield "table", True, "a live sequence names a block that is not on the device, or a swapped one a block that is"
        return
    refs = np.bincount(ids, minlength=len(blocks))
    yield "references", refs != (blocks["ref_word"] & 0xFFFFFFFF), "block {}: refs are not the sequences that name it"
    wrong = live & (
        (sequences["blocks"] != -(-sequences["length"] // width)) | (sequences["committed"] > sequences["length"])
    )
    yield "length", wrong, "sequence {}: length, committed and blocks disagree"
    lost = (blocks["flags"][np.where(occupied, table, 0)] & LOST != 0) & occupied
    yield "lost", lost.any(axis=1) & (sequences["failed"] == 0), "sequence {} lost a block and is not marked"
    keyed = (blocks["flags"][np.where(occupied, table, 0)] & KEYED) != 0
    full = (
        (np.arange(table.shape[1]) < (sequences["committed"] // width)[:, None])
        & occupied
        & (sequences["failed"] == 0)[:, None]
    )
    if state.header.kind == ATTENTION:
        yield "committed", (full & ~keyed).any(axis=1), "sequence {} has a full committed block without a key"
    if state.header.kind == CROSS:
        yield "cross", blocks["flags"] & (KEYED | INDEXED) != 0, "block {} of a group for cross attention has a key"
        yield "cross", live & (sequences["committed"] != 0), "sequence {} has committed tokens of its encoder"
    shared = (blocks["ref_word"][np.where(occupied, table, 0)] & 0xFFFFFFFF > 1) & occupied
    unfull = np.arange(table.shape[1]) == (sequences["length"] // width)[:, None]
    yield "forked", (shared & unfull).any(axis=1) & (sequences["forked"] == 0), "sequence {} shares its end unknowingly"
    free = state.rows[: int(state.header.free_rows)]
    yield (
        "rows",
        sorted(free.tolist()) != np.flatnonzero(~live).tolist(),
        "the free rows are not those without a sequence",
    )


def _rows(state: State, away: Bools) -> Int32s:
    """The blocks of all sequences: those of the table, and those of sequences that are swapped out."""
    if not away.any():
        return state.table
    rows = state.table.copy()
    rows[away] = state.swapped[away]
    rows[away[:, None] & (np.arange(rows.shape[1]) >= state.sequences["blocks"][:, None])] = NONE
    return rows


def _recurrent(state: State, table: Int32s, length: IntArray) -> Iterator[Check]:
    """Which columns of a recurrent group have a state: the last one, snapshots that are not passed, and perhaps some
    between."""
    sequences, place = state.sequences, np.arange(table.shape[1])
    some, width, every = length > 0, state.tokens.shape[1], int(state.header.snapshot)
    passed = ((sequences["committed"].astype(np.int64) - 1) // width)[:, None]
    running = table[np.arange(len(table)), np.clip(length - 1, 0, table.shape[1] - 1)]
    yield "states", some & (running == NONE), "sequence {} has no running state"
    early = some[:, None] & (place < passed) & (table != NONE)
    yield "states", early.any(axis=1), "sequence {} holds a state that it has passed"
    if every:
        kept = (place >= passed) & (place < length[:, None]) & ((place + 1) % every == 0)
        yield "states", (kept & (table == NONE)).any(axis=1), "sequence {} lacks a snapshot"
    bad = _wrong_chain(state.groups, state.group)
    yield "chain", bad != NONE, f"the key or the tokens noted for sequence {bad} are not those of its blocks"


def _expiries(state: State) -> Iterator[Check]:
    blocks, heap = state.blocks, state.heap
    size = int(heap[0])
    members = heap[1 : size + 1]
    inside = np.zeros(len(blocks), bool)
    if not 0 <= size <= len(blocks) or (members < 0).any() or (members >= len(blocks)).any():
        yield "expiries", True, "the heap is out of bounds"
        return
    inside[members] = True
    yield "expiries", inside != (blocks["heap"] != NONE), "block {} is in the heap and not marked so, or the reverse"
    yield "expiries", (blocks["heap"][members] != np.arange(1, size + 1)).any(), "a place in the heap is wrong"
    place = np.arange(2, size + 1)
    yield (
        "expiries",
        (blocks["deadline"][heap[place]] < blocks["deadline"][heap[place >> 1]]).any(),
        "the heap is out of order",
    )
    timed = (blocks["list"] >= 0) & (blocks["list"] % LISTS_PER_TIER < EMPTY) & (blocks["ttl"] != NONE)
    yield (
        "expiries",
        inside != (timed & (blocks["priority"] != DEFAULT_PRIORITY)),
        "block {} should have a deadline, or not",
    )


def _pins(state: State, leased: IntArray) -> Iterator[Check]:
    pins = np.bincount(leased, minlength=len(state.blocks))
    yield "pins", pins != (state.blocks["ref_word"] >> 32), "block {}: pins are not those of the live leases"


def _scratch(state: State) -> Iterator[Check]:
    yield "scratch", state.sequences["mark"] != 0, "sequence row {} is still marked by a call"
    yield "scratch", state.blocks["flags"] & ONBOARDING != 0, "block {} is still marked as the source of an onboard"


def _moves(state: State) -> Iterator[Check]:
    yield "copy ops", state.header.copy_ops != 0, f"{state.header.copy_ops} copy ops were not handed to transfer"


def _chains(state: State) -> Iterator[Check]:
    """The records of policies that look at chains. The blocks in the record of a chain are a guess, and checked when
    used."""
    chain_book = state.policy_state
    if chain_book is None:
        return
    policy_state, chains, blocks = chain_book.policy_state[0], chain_book.chains, len(state.blocks)
    sizes = (0, policy_state["cached"], policy_state["known"], len(chains))
    yield "chains", sizes != tuple(sorted(sizes)), "more chains have blocks than are known, or more than there are"
    numbers, count = np.arange(len(chains)), len(chains)
    outside = np.zeros(count, bool)
    lists = zip(
        chain_book.policy_state, (chains, chain_book.tier_lists), (chain_book.order, chain_book.host_order), strict=True
    )
    for listed, tier_lists, order in lists if len(chain_book.tier_lists) else [next(lists)]:
        complete = np.array_equal(np.sort(order), numbers)
        yield "chains", not complete, "the order of chains lacks one"
        if complete:
            yield "chains", tier_lists["place"][order] != numbers, "the chain at place {} has another place"
        for name in ("first", "rest"):
            outside |= (tier_lists[name] < NONE) | (tier_lists[name] >= blocks)
        wrong = not NONE <= listed["pick"] < count or not 0 <= listed["cached"] <= count
        yield "chains", wrong, "no chain that there is loses blocks now"
    for name, high in (("after", count), ("before", count), ("row", CLASSES), ("alike", CLASSES)):
        outside |= (chains[name] < 0) | (chains[name] >= high)
    yield "chains", outside, "chain {} names a block, a chain or a class that there is not"
    owners = state.blocks["owner"]
    yield "chains", (owners < NONE) | (owners >= count), "block {} is of no chain that there is"
    named = (chain_book.names >> 8) & (CHAINS_MAX - 1)
    yield "names", (chain_book.names != NONE) & (named >= count), "name {} is of no chain that there is"
    if not outside.any():
        yield "rings", chains["before"][chains["after"]] != numbers, "chain {} and its neighbour do not name each other"
    running = chain_book.turns[chain_book.turns != NONE]
    if ((running < 0) | (running >= count)).any():
        yield "turns", True, "a row has a chain that does not exist"
    else:
        yield (
            "turns",
            np.bincount(running, minlength=count) != chains["turns"],
            "chain {}: its turns are not its rows",
        )
    yield "turns", (chain_book.turns != NONE) & (state.sequences["live"] == 0), "row {} has a chain and no sequence"
    yield (
        "ghosts",
        chain_book.ghosts.sum(axis=0) != chain_book.scores[0],
        "the ghost of expert {} has other blocks than it counts",
    )


def findings(state: State, leased: IntArray) -> list[Finding]:
    """All broken invariants as (check, detail). ``leased`` are the blocks of live leases, one entry for each pin."""
    checks = (
        _lists(state),
        _index(state),
        _sequences(state),
        _expiries(state),
        _pins(state, leased),
        _scratch(state),
        _moves(state),
        _chains(state),
    )
    broken = (result for check in checks for result in check if np.any(result[1]))
    return [(name, text.format(int(np.flatnonzero(wrong)[0]))) for name, wrong, text in broken]


def together(states: States) -> list[Finding]:
    """What the groups of a pool disagree about. A sequence has the same row in all groups and, except for cross
    attention, the same tokens."""
    first, broken = next(state for state in states if state.header.kind != CROSS), []
    for g, state in enumerate(states):
        same = ("live", "generation", "failed", "stream") + (
            () if state.header.kind == CROSS else ("length", "committed", "cached")
        )
        live = first.sequences["live"] != 0
        wrong = [name for name in same if not np.array_equal(first.sequences[name][live], state.sequences[name][live])]
        rows = state.header.free_rows == first.header.free_rows and np.array_equal(state.rows, first.rows)
        idle = (state.sequences["live"][~live] != 0).any()
        if wrong or idle or not rows:
            broken.append(("groups", f"group {g} has other sequences than the first: {', '.join(wrong) or 'rows'}"))
    return broken


def verify_states(states: States, leased: Int64s) -> None:
    """Raise IntegrityError for the first invariant that does not hold. If there are several groups, the message names
    the group.

    ``leased`` are the blocks of live leases, one entry for each pin, by their pool ids.
    """
    pins = {int(state.header.number): ids for state, _, ids in states.split(leased)}
    for g, state in enumerate(states):
        for check, detail in findings(state, pins.get(g, leased[:0])):
            raise IntegrityError(check, f"group {g}: {detail}" if len(states) > 1 else detail)
    for check, detail in together(states):
        raise IntegrityError(check, detail)
