"""Beam search and parallel sampling on the model of engine_numpy.py: what the sequences share is computed once and kept
once.

    python examples/beams_numpy.py                 # beams of several prompts in one batch, every logit compared
    python examples/beams_numpy.py --device sim    # the same on a stream that runs late

Read `Search.step`: it makes one `reorder` and one `append_tokens` for all beams of all prompts, and no other call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from engine_numpy import (
    LAYOUT,
    TOLERANCE,
    VOCABULARY,
    Batch,
    Engine,
    Floats,
    Ints,
    PagedModel,
    make_weights,
    options,
    uncached,
)

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device, Stream
from kvpool.device.sim import SimDevice

WIDTH, STEPS = 4, 24


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


class Search:
    """``WIDTH`` continuations of each prompt: the most likely ones (beams), or drawn ones (samples), which never change
    places."""

    table, launch = Engine.table, Engine.launch

    def __init__(
        self,
        cache: kvpool.KVCacheManager,
        device: Device,
        stream: Stream,
        model: Any,
        prompts: list[list[int]],
        rng: Any,
    ):
        self.cache = cache
        self.device = device
        self.stream = stream
        self.model = model
        self.rng = rng
        first = cache.add_sequence_batch(prompts, stream=stream)
        self.tokens = [list(prompt) for prompt in prompts for _ in range(WIDTH)]
        prefill = self.compute(first.ids.tolist(), prompts, first.cached_tokens)
        last_rows = np.cumsum([len(prompt) for prompt in prompts] - first.cached_tokens) - 1
        self.prefilled = list(zip(prompts, prefill[last_rows], strict=True))
        # Row WIDTH * i + k is continuation k of prompt i; the first of each is the prompt's own sequence.
        self.ids = np.concatenate([first.ids[:, None], cache.fork(first.ids, WIDTH - 1, stream=stream)], axis=1).ravel()
        self.scores = np.zeros(len(self.ids))
        self.logits = np.repeat(prefill[last_rows], WIDTH, axis=0)
        self.computed: list[tuple[list[int], Floats]] = []
        self.copies = self.moved = 0

    def compute(self, ids: list[int], tokens: list[list[int]], computed: Any) -> Floats:
        """Logits of all tokens after the ``computed`` ones; their K and V go into the pool."""
        table = self.table(ids)
        positions = [np.arange(start, len(all_)) for start, all_ in zip(computed, tokens, strict=True)]
        owner = np.repeat(np.arange(len(ids)), [len(part) for part in positions])
        new = np.concatenate([np.array(all_)[at] for all_, at in zip(tokens, positions, strict=True)])
        batch = Batch(ids, new, np.concatenate(positions), owner, table.dense())
        result = self.launch(batch)
        self.cache.commit(ids, stream=self.stream)
        self.device.synchronize(self.device.record(self.stream))
        return np.asarray(result.logits)

    def best(self, first_step: bool) -> tuple[Ints, Ints]:
        """For each beam the row that it goes on from, and its next token."""
        total = self.scores[:, None] + log_softmax(self.logits)
        if first_step:  # all beams of a prompt are still the same: one of them counts
            total[np.arange(len(total)) % WIDTH > 0] = -np.inf
        groups = total.reshape(-1, WIDTH * VOCABULARY)
        order = np.argsort(-groups, axis=1)[:, :WIDTH]
        self.scores = np.take_along_axis(groups, order, axis=1).ravel()
        parents = order // VOCABULARY + WIDTH * np.arange(len(groups))[:, None]
        return parents.ravel(), (order % VOCABULARY).ravel()

    def step(self, first_step: bool, sampling: bool) -> None:
        if sampling:
            chances = np.exp(log_softmax(self.logits))
            new = np.array([self.rng.choice(VOCABULARY, p=row) for row in chances])
        else:
            parents, new = self.best(first_step)
            self.cache.reorder(self.ids, parents, stream=self.stream)
            self.tokens = [list(self.tokens[parent]) for parent in parents]
            self.moved += int((parents != np.arange(len(parents))).sum())
        before = self.cache.stats().copied_blocks
        self.cache.append_tokens(self.ids, new, np.ones(len(new), np.int64), stream=self.stream)
        self.copies += self.cache.stats().copied_blocks - before
        for tokens, token in zip(self.tokens, new.tolist(), strict=True):
            tokens.append(token)
        self.logits = self.compute(self.ids.tolist(), self.tokens, [len(tokens) - 1 for tokens in self.tokens])
        self.computed += [(list(tokens), logits) for tokens, logits in zip(self.tokens, self.logits, strict=True)]


def compare(weights: dict[str, Any], search: Search, reference: Callable[..., Floats] = uncached) -> tuple[int, float]:
    """The logits of every step of every beam, dropped ones too, against the model without a cache: how many, the
    largest difference."""
    differences = [
        np.abs(logits - reference(weights, tokens)[-1]).max()
        for tokens, logits in (*search.prefilled, *search.computed)
    ]
    return len(differences), float(max(differences))


def make_prompts(count: int, rng: Any) -> list[list[int]]:
    return [[int(token) for token in rng.integers(VOCABULARY, size=rng.integers(70, 90))] for _ in range(count)]


def run(device: Device, *, prompts: int, seed: int, sampling: bool, check: bool) -> int:
    """Search on a pool that could not hold the beams one by one; the exit code."""
    weights, rng = make_weights(seed), np.random.default_rng(seed)
    talks = make_prompts(prompts, rng)
    alone = sum(WIDTH * -(-(len(talk) + STEPS) // LAYOUT.tokens_per_block) for talk in talks)
    with kvpool.KVCacheManager(LAYOUT, device_blocks=alone * 2 // 3, device=device) as cache:
        stream = device.create_stream("engine")
        search = Search(cache, device, stream, PagedModel(weights, cache), talks, rng)
        most = 0
        for step in range(STEPS):
            search.step(step == 0, sampling)
            most = max(most, cache.stats().device.used)
            if check:
                cache.verify()
        compared, worst = compare(weights, search)
        cache.release(search.ids, stream=stream)
        leaked = cache.stats().device.used
    device.close()
    counts = {"blocks copied when they were written": search.copies, "steps of logits compared": compared}
    if not sampling:
        counts["times that a beam went on from another"] = search.moved
    for name, count in counts.items():
        print(f"{count:7,} {name}")
    print(f"{most:7,} blocks at most, {alone:,} without sharing; largest difference of a logit {worst:.1e}")
    if leaked or not worst <= TOLERANCE or not all(counts.values()):
        print(
            f"failed: {leaked} blocks were left, or the logits differ by more than {TOLERANCE}, or something did not "
            "happen"
        )
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = options(("cpu", "sim"))
    parser.set_defaults(chats=3)
    parsed = parser.parse_args(arguments)
    code = 0
    for sampling in (False, True):
        print("samples" if sampling else "beams")
        device = SimDevice(parsed.seed) if parsed.device == "sim" else get_device("cpu")
        code |= run(device, prompts=parsed.chats, seed=parsed.seed, sampling=sampling, check=parsed.check)
    return code


if __name__ == "__main__":
    sys.exit(main())
