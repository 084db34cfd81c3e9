"""The engine of engine_numpy.py with trees of drafts: a batch computes every branch of a guess, and the pool keeps the
path that was right.

    python examples/drafts_numpy.py                 # every logit compared with the model without a cache
    python examples/drafts_numpy.py --device sim    # the same on a stream that runs late

A draft is stored where it was appended. Its position in the text is its depth in the tree. It attends to the text and
to its own ancestors. After the step, `cache.accept_drafts` moves the KV of the accepted path to where it would be if
nothing else had been drafted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_numpy import (
    HEAD_DIM,
    KV_HEADS,
    LAYOUT,
    VOCABULARY,
    Batch,
    Chat,
    Engine,
    Floats,
    Ints,
    PagedModel,
    attention,
    forward,
    options,
    serve,
)

import kvpool
from kvpool.device import get_device
from kvpool.device.sim import SimDevice

BRANCHES, DEPTH = 3, 3
"""The number of drafted continuations, and the length of each: more than the model accepts."""


@dataclass
class Tree:
    """Drafts after a text. The parent of each is an earlier one, or -1 for the last token of the text."""

    tokens: list[int]
    parents: list[int]

    def depths(self) -> list[int]:
        """1 for a child of the text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def stand(self, places: Ints, end: int) -> Ints:
        """Where in their texts the tokens at these places of a sequence of ``end`` tokens stand; the drafts are its
        last ones."""
        text, standing = end - len(self.tokens), places.copy()
        drafts = (places >= text) & (places < end)
        standing[drafts] = text - 1 + np.array(self.depths(), np.int64)[places[drafts] - text]
        return standing

    def seen(self) -> npt.NDArray[np.bool_]:
        """[drafts, drafts]: which ones each attends to, its ancestors and itself."""
        sees = np.eye(len(self.tokens), dtype=bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                sees[i] |= sees[parent]
        return sees

    def child(self, parent: int, token: int) -> int:
        """Return the child of ``parent`` with this token, or -1."""
        places = [i for i, draft in enumerate(self.tokens) if self.parents[i] == parent and draft == token]
        return places[0] if places else -1


def grow_tree(tokens: list[int], depth: int) -> Tree:
    """Return what followed the last occurrences of the last token, as one tree: common beginnings are drafted once.

    Bad guesses come first, so that good ones have to be moved.
    """
    tree = Tree([], [])
    before = [i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]][: BRANCHES - 1]
    for guess in [[(tokens[-1] + 1) % VOCABULARY] * depth, *(tokens[i + 1 : i + 1 + depth] for i in reversed(before))]:
        at = -1
        for token in guess:
            known = tree.child(at, token)
            if known < 0:
                tree.tokens.append(token)
                tree.parents.append(at)
                known = len(tree.tokens) - 1
            at = known
    return tree


def in_tree(positions: Ints, places: Ints, tree: Tree) -> npt.NDArray[np.bool_]:
    """Which tokens [n, m] at ``places`` those at ``positions`` see: the text up to their own, and of the drafts their
    ancestors."""
    end = positions[-1] + 1
    text = end - len(tree.tokens)
    seen = places <= positions[:, None]
    drafts, looking = (places >= text) & (places < end), positions >= text
    seen[np.ix_(looking, drafts)] = tree.seen()[np.ix_(positions[looking] - text, places[drafts] - text)]
    return seen


@dataclass
class TreeBatch(Batch):
    """``positions`` are places in the sequence's blocks; ``trees`` has the drafts of each sequence, its last tokens."""

    trees: list[Tree]

    def standing(self) -> Ints:
        """Where each token stands in its text, which is what rotates it."""
        places = self.positions.copy()
        for row, tree in enumerate(self.trees):
            mine = self.owner == row
            places[mine] = tree.stand(places[mine], places[mine][-1] + 1)
        return places


class TreeModel(PagedModel):
    """A PagedModel whose last tokens of each sequence are a tree."""

    def run(self, batch: Batch) -> Floats:
        assert isinstance(batch, TreeBatch)
        pool, trees = self.cache.memory.device_pool, batch.trees
        blocks, tokens = np.divmod(batch.slots, LAYOUT.tokens_per_block)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            pool[layer, 0, blocks, tokens], pool[layer, 1, blocks, tokens] = k, v
            out = np.empty_like(q)
            for row, table in enumerate(batch.table):
                mine = batch.owner == row
                keys, values = pool[layer][:, table[table >= 0]].reshape(2, -1, KV_HEADS, HEAD_DIM)
                out[mine] = attention(
                    q[mine], keys, values, in_tree(batch.positions[mine], np.arange(len(keys)), trees[row])
                )
            return out

        return np.asarray(forward(self.weights, batch.tokens, batch.standing(), attend))


class TreeEngine(Engine):
    """The engine, whose guesses are trees. Drafts are never committed, so that other prompts cannot find them. A prompt
    is computed in one step."""

    chunk = 1 << 30

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trees: dict[Chat, Tree] = {}

    def grow(self) -> None:
        while answering := [
            chat for chat in self.running if self.cache.sequence_length(chat.sequence) < len(chat.tokens)
        ]:
            trees = [grow_tree(chat.tokens, min(DEPTH, chat.answer - 1)) for chat in answering]
            new = [
                token for chat, tree in zip(answering, trees, strict=True) for token in (chat.tokens[-1], *tree.tokens)
            ]
            counts = [1 + len(tree.tokens) for tree in trees]
            try:
                self.cache.append_tokens([chat.sequence for chat in answering], new, counts, stream=self.stream)
            except kvpool.OutOfBlocks:
                self.preempt()
                continue
            for chat, tree in zip(answering, trees, strict=True):
                chat.guessed, self.trees[chat] = tree.tokens, tree
            return

    def batch(self) -> Batch:
        batch = super().batch()
        trees = [self.trees[chat] if chat.guessed else Tree([], []) for chat in self.running]
        return TreeBatch(batch.sequences, batch.tokens, batch.positions, batch.owner, batch.table, trees)

    def sample(self, chats: list[Chat], batch: Batch, logits: Floats) -> None:
        """Follow the model through each tree from the root; what it walked is kept."""
        assert isinstance(batch, TreeBatch)
        drafts: list[int] = []
        paths: list[list[int]] = []
        standing = batch.standing()
        for row, chat in enumerate(chats):
            mine, tree = np.flatnonzero(batch.owner == row), batch.trees[row]
            text = len(mine) - len(tree.tokens)
            sampled, path, at = [int(logits[mine[text - 1]].argmax())], list[int](), -1
            while (at := tree.child(at, sampled[-1])) >= 0:
                path.append(at)
                sampled.append(int(logits[mine[text + at]].argmax()))
            good = [*mine[:text], *(mine[text + i] for i in path)]
            chat.logits += [(int(standing[i]), logits[i]) for i in good]
            chat.computed = len(chat.tokens) + len(path)
            chat.tokens += sampled
            chat.answer -= len(sampled)
            chat.guessed = []
            drafts.append(len(tree.tokens))
            paths.append(path)
            self.happened["drafts that were accepted"] += len(path)
            self.happened["drafts that were dropped"] += len(tree.tokens) - len(path)
            self.happened["accepted drafts that were moved"] += sum(i != j for j, i in enumerate(path))
        staying = [i for i, chat in enumerate(chats) if chat in self.running]
        ids = [chats[i].sequence for i in staying]
        accepted = [draft for i in staying for draft in paths[i]]
        self.cache.accept_drafts(
            ids, [drafts[i] for i in staying], accepted, [len(paths[i]) for i in staying], stream=self.stream
        )
        self.cache.commit(ids, [chats[i].computed for i in staying], stream=self.stream)
        self.leave([chats[i] for i in staying if chats[i].answer == 0])
        for chat in chats:
            if chat.answer == 0 and chat.turns:
                chat.next_turn()
                self.waiting.append(chat)


def main(arguments: list[str] | None = None) -> int:
    parsed = options(("cpu", "sim")).parse_args(arguments)
    device = SimDevice(parsed.seed) if parsed.device == "sim" else get_device("cpu")
    model = lambda weights, cache, stream: TreeModel(weights, cache)  # noqa: E731
    return serve(device, model, chats=parsed.chats, seed=parsed.seed, check=parsed.check, engine=TreeEngine, blocks=30)


if __name__ == "__main__":
    sys.exit(main())
