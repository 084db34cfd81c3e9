"""The engines of the other examples over groups of layers: full attention, sliding windows and recurrent state in one
pool.

    python examples/groups_numpy.py # chats with guesses, with trees of drafts, with recurrent layers, and beams python
    examples/groups_numpy.py --device sim # the same on a stream that runs late

The engines make the same calls as with a single group, and a request has one answer to how much is reused. Only the
block tables differ: there is one for each group, and each layer of the model reads the table of its own group
(`GroupsModel`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from beams_numpy import STEPS, Search, make_prompts
from beams_numpy import compare as compare_beams
from drafts_numpy import Tree, TreeEngine, in_tree
from engine_numpy import (
    HEAD_DIM,
    LAYOUT,
    Batch,
    Engine,
    Floats,
    Ints,
    attention,
    compare,
    counted,
    forward,
    make_chats,
    make_weights,
    options,
    report,
)
from windows_numpy import in_window

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice

SIZE, DECAY = LAYOUT.tokens_per_block, 0.9


def attention_layout(layers: int, kv_heads: int) -> kvpool.BlockLayout:
    return kvpool.BlockLayout(
        layers=layers, kv_heads=kv_heads, head_dim=HEAD_DIM, tokens_per_block=SIZE, dtype="float64"
    )


# Two layers each. Those with a window differ in heads, so that the group has two parts.
FULL = kvpool.LayerGroup(attention_layout(2, kv_heads=2))
WINDOWED = kvpool.LayerGroup([attention_layout(1, kv_heads=4), attention_layout(1, kv_heads=1)], window=19, sinks=3)
# A block is the state of both layers after some prefix: a matrix for each head.
STATE = kvpool.BlockLayout(
    layers=2, kv_heads=2, head_dim=HEAD_DIM * HEAD_DIM, tokens_per_block=1, planes=1, dtype="float64"
)
RECURRENT = kvpool.LayerGroup(STATE, kind="recurrent", snapshot_tokens=2 * SIZE)
Groups = tuple[kvpool.LayerGroup, ...]


# -- the model ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a layer of the model has its KV or state."""

    group: int
    part: int
    layer: int


def places_of(groups: Groups) -> list[Place]:
    """Return the place of every layer of the model. The groups alternate."""
    by_group = [
        [Place(g, p, i) for p, part in enumerate(group.layouts) for i in range(part.layers)]
        for g, group in enumerate(groups)
    ]
    return [place for layers in zip(*by_group, strict=True) for place in layers]


def heads_of(groups: Groups) -> list[int]:
    """KV heads of every layer."""
    return [groups[place.group].layouts[place.part].kv_heads for place in places_of(groups)]


def recur(q: Floats, k: Floats, v: Floats, state: Floats) -> tuple[Floats, Floats]:
    """Linear attention after a ``state`` [kv_heads, d, d]: the output [n, heads, d], and the states after each of the n
    tokens."""
    states = np.empty((len(q), *state.shape))
    for i in range(len(q)):
        states[i] = state = DECAY * state + k[i, :, :, None] * v[i, :, None, :]
    grouped = q.reshape(len(q), len(state), -1, HEAD_DIM)
    return np.einsum("nkgd,nkde->nkge", grouped, states).reshape(q.shape) / HEAD_DIM, states


def uncached(groups: Groups, weights: dict[str, Any], tokens: list[int]) -> Floats:
    """The model without any cache: all logits of a whole conversation at once."""
    positions, places = np.arange(len(tokens)), places_of(groups)

    def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        group = groups[places[layer].group]
        if group.kind == "recurrent":
            return recur(q, k, v, np.zeros((k.shape[1], HEAD_DIM, HEAD_DIM)))[0]
        return attention(q, k, v, in_window(positions, positions, group.window or len(tokens), group.sinks))

    return np.asarray(forward(weights, np.array(tokens), positions, attend))


# -- the model on a paged cache ----------------------------------------------------------------------------------------


def states_of(columns: npt.NDArray[np.int32], start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """From a sequence's row in the table of a recurrent group: the block of the state after ``start`` tokens, -1 at the
    start, and where the states up to ``end`` go, as (tokens, block)."""
    kept = [(column, int(block)) for column, block in enumerate(columns) if block >= 0]
    read = next(block for column, block in kept if column >= (start - 1) // SIZE) if start else -1
    return read, [(min((column + 1) * SIZE, end), block) for column, block in kept if column >= start // SIZE]


@dataclass
class GroupsBatch:
    """A batch of any of the engines, with the block tables int32[sequences, most blocks] of all groups."""

    batch: Batch
    tables: list[npt.NDArray[np.int32]]
    groups: tuple[kvpool.pool.config.Group, ...]

    def touched(self) -> tuple[list[Any], list[Any]]:
        """Tables have block ids of the group; the device has pool ids, which differ between groups."""
        reads, writes = [], []
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.kind == "recurrent":
                states_read = [states_of(row, *self.span(i)) for i, row in enumerate(table)]
                read = [(block, 0, 1) for block, _ in states_read if block >= 0]
                written = [(block, 0, 1) for _, states in states_read for _, block in states]
            else:
                read, written = replace(self.batch, table=table).touched()
            for ranges, to in ((read, reads), (written, writes)):
                to += [(group.first_device_block + block, first, end) for block, first, end in ranges]
        return reads, writes

    def span(self, row: int) -> tuple[int, int]:
        positions = self.batch.positions[self.batch.owner == row]
        return int(positions[0]), int(positions[-1]) + 1


class GroupsModel:
    """``forward`` whose layers each write to and read from the pool of their group and part, through the block table of
    their group."""

    def __init__(self, groups: Groups, weights: dict[str, Any], cache: kvpool.KVCacheManager) -> None:
        self.groups, self.weights, self.cache, self.places = groups, weights, cache, places_of(groups)

    def run(self, groups_batch: GroupsBatch) -> Floats:
        """Logits [n, vocabulary]."""
        batch = groups_batch.batch
        trees = getattr(batch, "trees", [Tree([], [])] * len(batch.sequences))
        rows = [batch.owner == row for row in range(len(trees))]
        standing = np.concatenate(
            [tree.stand(batch.positions[rows[i]], groups_batch.span(i)[1]) for i, tree in enumerate(trees)]
        )

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            place, out = self.places[layer], np.empty_like(q)
            group, table = self.groups[place.group], groups_batch.tables[place.group]
            # [K and V, blocks, tokens, kv_heads, head_dim]
            pool = self.cache.memory.device_pools[place.group][place.part][place.layer]
            for row, (mine, tree) in enumerate(zip(rows, trees, strict=True)):
                if group.kind == "recurrent":
                    out[mine] = paged_recur(pool, table[row], *groups_batch.span(row), q[mine], k[mine], v[mine])
                else:
                    out[mine] = paged_attention(
                        pool, table[row], batch.positions[mine], q[mine], k[mine], v[mine], group, tree
                    )
            return out

        return np.asarray(forward(self.weights, batch.tokens, standing, attend))


def paged_attention(
    pool: Floats,
    columns: npt.NDArray[np.int32],
    positions: Ints,
    q: Floats,
    k: Floats,
    v: Floats,
    group: kvpool.LayerGroup,
    tree: Tree,
) -> Floats:
    """Attention of one sequence's new tokens, the last of which may be a tree of drafts. -1 in the table: not
    attended to any more."""
    blocks, tokens, end = columns[positions // SIZE], positions % SIZE, int(positions[-1]) + 1
    pool[0, blocks, tokens], pool[1, blocks, tokens] = k, v
    kept = np.flatnonzero(columns >= 0)
    places = (kept[:, None] * SIZE + np.arange(SIZE)).reshape(-1)
    keys, values = pool[:, columns[kept]].reshape(2, -1, *k.shape[1:])
    near = in_window(tree.stand(positions, end), tree.stand(places, end), group.window or end, group.sinks)
    return attention(q, keys, values, near & in_tree(positions, places, tree))


def paged_recur(
    pool: Floats, columns: npt.NDArray[np.int32], start: int, end: int, q: Floats, k: Floats, v: Floats
) -> Floats:
    """The recurrence of one sequence's new tokens: from the state after what is computed, to all states that the table
    has room for."""
    shape = (k.shape[1], HEAD_DIM, HEAD_DIM)
    read, written = states_of(columns, start, end)
    out, states = recur(q, k, v, pool[0, read, 0].reshape(shape) if start else np.zeros(shape))
    for count, block in written:
        pool[0, block, 0] = states[count - start - 1].reshape(pool.shape[-2:])
    return out


# -- the engines -------------------------------------------------------------------------------------------------------


class OverGroups:
    """What an engine does differently where there are several groups."""

    cache: kvpool.KVCacheManager
    stream: Any

    def table(self, sequences: Any, group: int = 0) -> kvpool.pool.BlockTable:
        return self.cache.block_table(sequences, stream=self.stream, group=group)

    def launch(self, batch: Batch) -> SimpleNamespace:
        groups = self.cache.groups
        tables = [self.table(batch.sequences, group.index).dense() for group in groups]
        return super().launch(GroupsBatch(batch, tables, groups))  # type: ignore[misc]


class GuessingEngine(OverGroups, Engine):
    """Guesses are appended and rewound in all groups."""


class TreesEngine(OverGroups, TreeEngine):
    """The accepted path of a tree is moved in all groups."""


class PlainEngine(OverGroups, Engine):
    """Without guesses: a state has all of them in it, or none."""

    guesses_max = 0


class BeamSearch(OverGroups, Search):
    """Beams share blocks and states until they write."""


def serve(device: Device, engine: Any, groups: Groups, blocks: list[int], *, chats: int, seed: int, check: bool) -> int:
    """Chat, compare, and close everything; the exit code: 1 if a logit is wrong, or if something that had to be shown
    did not happen."""
    weights, talks = make_weights(seed, heads_of(groups)), make_chats(chats, seed)
    with kvpool.KVCacheManager(
        groups=groups,
        device_blocks=blocks,
        host_blocks=blocks,
        device=device,
        max_sequences=Engine.running_max,
        max_sequence_tokens=256,
    ) as cache:
        serving = engine(cache, device, device.create_stream("engine"), GroupsModel(groups, weights, cache), talks)
        serving.run(check)
        counts = counted(cache.stats()) | {"blocks that the window had passed went back": cache.stats().passed_blocks}
        if engine is PlainEngine:
            del counts["blocks reused in part"]
        else:
            counts |= dict(sorted(serving.happened.items()))
        code = report(counts, compare(weights, talks, lambda *arguments: uncached(groups, *arguments)))
    device.close()
    return code


def search(device: Device, groups: Groups, blocks: list[int], *, prompts: int, seed: int, check: bool) -> int:
    """Beams of several prompts at once; the exit code."""
    weights, rng = make_weights(seed, heads_of(groups)), np.random.default_rng(seed)
    with kvpool.KVCacheManager(groups=groups, device_blocks=blocks, device=device, max_sequence_tokens=256) as cache:
        model = GroupsModel(groups, weights, cache)
        beams = BeamSearch(cache, device, device.create_stream("engine"), model, make_prompts(prompts, rng), rng)
        for step in range(STEPS):
            beams.step(step == 0, sampling=False)
            if check:
                cache.verify()
        counts = {
            "blocks copied when they were written": beams.copies,
            "times that a beam went on from another": beams.moved,
        }
        code = report(counts, compare_beams(weights, beams, lambda *arguments: uncached(groups, *arguments)))
        cache.release(beams.ids, stream=beams.stream)
    device.close()
    return code


def main(arguments: list[str] | None = None) -> int:
    parsed = options(("cpu", "sim")).parse_args(arguments)

    def device() -> Device:
        return SimDevice(parsed.seed) if parsed.device == "sim" else get_device("cpu")

    chats: dict[str, Any] = {"chats": parsed.chats, "seed": parsed.seed, "check": parsed.check}
    code = 0
    print("full attention and sliding windows, with guesses")
    code |= serve(device(), GuessingEngine, (FULL, WINDOWED), [26, 20], **chats)
    print("the same with trees of drafts")
    code |= serve(device(), TreesEngine, (FULL, WINDOWED), [30, 24], **chats)
    print("with recurrent layers")
    code |= serve(device(), PlainEngine, (FULL, WINDOWED, RECURRENT), [26, 20, 16], **chats)
    print("and with beams")
    code |= search(
        device(), (FULL, WINDOWED, RECURRENT), [80, 60, 140], prompts=3, seed=parsed.seed, check=parsed.check
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
