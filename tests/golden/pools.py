"""A pool under the synthetic workload: chats through tiers that are too small for them, and every verb on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import numpy as np

from kvpool import EvictionOptions, KVCacheManager, Lease
from kvpool.pool import Reservation
from kvpool.tools.replay import synthetic
from tests.engine import Clock
from tests.golden.recorder import Recorder, record_batches
from tests.grouped import T, pool_of
from tests.model.draws import some_ranges

KINDS = {
    "one": "full",
    "window": "window",
    "recurrent": "recurrent full",
    "cross": "cross full",
    "mixed": "full window recurrent cross",
}
DEVICES = ("cpu", "sim")
SECRET = bytes(range(32))
STEPS, STRIDE, LONGEST = 140, 16, 96
"""Calls of a case; every how many tokens of the workload one is taken, which keeps shared prefixes; their most."""
STEP_MS = 1 << 24
VERBS = {
    "add": 9,
    "append": 10,
    "commit": 8,
    "rewind": 2,
    "fork": 2,
    "reorder": 2,
    "keep": 3,
    "release": 6,
    "swap_out": 2,
    "resume": 2,
    "exclusive": 2,
    "prefetch": 2,
    "offload": 2,
    "pin": 2,
    "unpin": 2,
    "reserve": 2,
    "end_reserved": 2,
    "load": 1,
    "forget": 1,
    "set_priority": 2,
    "look": 2,
    "pass_time": 2,
    "misuse": 1,
    "reset": 0.15,
}
FIGURES = (
    "offloaded_blocks",
    "onboarded_blocks",
    "copied_blocks",
    "forgotten_device_blocks",
    "forgotten_host_blocks",
    "offloads_saved",
    "evicted_offloaded_blocks",
    "evicted_by_rule_blocks",
    "evicted_host_full_blocks",
    "evicted_host_blocks",
    "redundant_dropped",
    "expired_blocks",
    "passed_blocks",
    "forgotten_by_call_blocks",
    "prompt_tokens",
    "reused_device_tokens",
    "reused_host_tokens",
    "partial_tokens",
    "reused_device_blocks",
    "reused_host_blocks",
    "partial_blocks",
    "missed_blocks",
    "bypassed_tokens",
    "appended_tokens",
    "dropped_tokens",
    "recomputed_tokens",
)


def open_pool(kind: str, **options: Any) -> AbstractContextManager[KVCacheManager]:
    """A pool that the calls of a ``Driver`` fill."""
    eviction = EvictionOptions(offload_min_priority=20)
    sizes = {"max_sequences": 8, "max_sequence_tokens": 256, "event_capacity": 4096}
    return pool_of(KINDS[kind], 40, 24, eviction=eviction, **sizes, **options)


def drive(kind: str, device: str, seed: int, secret: bytes = SECRET) -> Recorder:
    """One case: its lines, and in ``seen`` the figures of the pool too."""
    recorder, clock = Recorder(), Clock()
    with open_pool(kind, on=device, secret=secret, clock=clock, policy="lru") as cache:
        record_batches(cache, recorder)
        Driver(cache, recorder, clock, seed).run()
        stats = cache.stats()
        recorder.line("stats", [(name, getattr(stats, name)) for name in FIGURES])
        recorder.seen.update({name: getattr(stats, name) for name in FIGURES})
    return recorder


class Driver:
    """Draws calls and notes what becomes of them. Sequences are named by the pool's ids."""

    def __init__(self, cache: KVCacheManager, recorder: Recorder, clock: Clock, seed: int) -> None:
        self.cache, self.recorder, self.clock, self.random = cache, recorder, clock, Random(seed)
        self.crosses = any(group.kind == "cross" for group in cache.groups)
        self.requests = [self._shorter(request) for request in synthetic(STEPS, seed=seed).requests]
        self.prompts: list[Any] = []
        self.answers: dict[int, list[int]] = {}
        self.live: list[int] = []
        self.away: list[int] = []
        self.leases: list[Lease] = []
        self.reservations: list[Reservation] = []

    @staticmethod
    def _shorter(request: Any) -> tuple[list[int], list[int], dict[str, Any]]:
        text = np.concatenate([request.prompt(), request.output()])[::STRIDE][:LONGEST].tolist()
        prompt = min(-(-request.input_length // STRIDE), len(text) - 1)
        return text[:prompt], text[prompt:], {"salt": request.salt, "adapter_id": request.adapter_id}

    def run(self) -> None:
        weights = list(VERBS.values())
        for _ in range(STEPS):
            verb = self.random.choices(list(VERBS), weights)[0]
            getattr(self, verb)()
            self.look_around()
        self.live = []
        self.call("revoke", lambda: self.cache.revoke(""))
        self.call("cleared", lambda: self.cache.clear(force=True))
        self.look_around()

    def look_around(self) -> None:
        """What can be seen after each call: tables, free blocks and events."""
        for group in self.cache.groups if self.live else ():
            self.recorder.line("table", self.cache.block_table(self.live, group=group.index).dense())
        several = len(self.cache.groups) > 1
        self.recorder.line("free", self.cache.free_blocks_per_group if several else self.cache.free_blocks)
        self.recorder.events(self.cache.events())

    def call(self, verb: str, call: Callable[[], Any], show: Callable[[Any], Any] = lambda result: result) -> Any:
        return self.recorder.outcome(verb, call, show)

    # -- drawing ---------------------------------------------------------------------------------------

    def next_prompt(self) -> tuple[Any, list[int]]:
        """The next request of the workload; and now and then one with other rules, or with extra ids."""
        tokens, answer, names = self.requests.pop(0) if self.requests else ([1, 2, 3, 4, 5], [6], {})
        draw = self.random.random()
        if draw < 0.15:
            extra = [7] + [0] * (len(tokens) - 1)
            names |= [{"reuse": False}, {"publish": False}, {"extra_ids": extra}][int(draw * 20)]
        self.prompts = [*self.prompts[-7:], self.cache.block_keys(tokens, **names)]
        return self.prompts[-1], answer

    def known(self) -> Any:
        """A prompt that came before."""
        return self.random.choice(self.prompts) if self.prompts else self.next_prompt()[0]

    def some(self, most: int = 3) -> list[int]:
        return self.random.sample(self.live, min(len(self.live), self.random.randint(1, most)))

    def encoder(self, count: int) -> list[int] | None:
        return [self.random.randint(1, 3 * T) for _ in range(count)] if self.crosses else None

    def text(self, sequence: int, most: int) -> list[int]:
        """The next tokens of a sequence: of its answer while there are any."""
        count = self.random.randint(0, most)
        answer = self.answers.get(sequence, [])
        tokens = [*answer[:count], *(self.random.randrange(3) for _ in range(count - len(answer)))]
        self.answers[sequence] = answer[count:]
        return tokens

    def lengths(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens, and committed tokens."""
        return self.cache.sequence_length(ids).tolist(), self.cache.committed_tokens(ids).tolist()

    # -- sequences -------------------------------------------------------------------------------------

    def add(self) -> None:
        drawn = [self.next_prompt() for _ in range(self.random.choice((1, 1, 2, 3)))]
        retention = [some_ranges(self.random, len(prompt), T) for prompt, _ in drawn]
        options = {
            "retention": self.random.choice((None, retention)),
            "decode_priority": self.random.choice((35, 35, 10, 60)),
            "allow_partial_batch": self.random.random() < 0.6,
            "encoder_tokens": self.encoder(len(drawn)),
        }
        prompts = [prompt for prompt, _ in drawn]
        self.call("plan", lambda: self.cache.plan_batch(prompts, encoder_tokens=options["encoder_tokens"]))
        admitted = self.call("add", lambda: self.cache.add_sequence_batch(prompts, **options))
        for sequence, (_, answer) in zip(admitted.ids.tolist() if admitted else (), drawn, strict=False):
            if sequence >= 0:
                self.live.append(sequence)
                self.answers[sequence] = answer

    def append(self) -> None:
        ids = [sequence for sequence in self.some() if self.cache.sequence_length(sequence) < LONGEST + 64]
        tokens = [self.text(sequence, 2 * T) for sequence in ids]
        flat = [token for sequence_tokens in tokens for token in sequence_tokens]
        self.call(
            "append", lambda: self.cache.append_tokens(ids, flat, [len(sequence_tokens) for sequence_tokens in tokens])
        )

    def commit(self) -> None:
        ids = self.some()
        low, counts = self.lengths(ids)[::-1] if ids else ([], [])
        if self.random.random() < 0.3:
            counts = [self.random.randint(least, most) for least, most in zip(low, counts, strict=True)]
        self.call("commit", lambda: self.cache.commit(ids, counts))

    def rewind(self) -> None:
        ids = self.some()
        counts = [self.random.randint(0, min(length, 2 * T)) for length in (self.lengths(ids)[0] if ids else ())]
        self.call("rewind", lambda: self.cache.rewind(ids, counts))

    def fork(self) -> None:
        for sequence in self.some(1):
            forked = self.call(
                "fork", lambda sequence=sequence: self.cache.fork(sequence, self.random.choice((1, 1, 2)))
            )
            self.live += [] if forked is None else forked.tolist()

    def reorder(self) -> None:
        ids = self.some(4)
        parents = [self.random.randrange(len(ids)) for _ in ids]
        store = self.random.random() < 0.5
        self.call("reorder", lambda: self.cache.reorder(ids, parents, store=store))

    def keep(self) -> None:
        """Drafts, of which some are accepted, not always the first ones."""
        for sequence in self.some(1):
            drafts = self.random.randint(1, 2 * T)
            accepted = sorted(self.random.sample(range(drafts), self.random.randint(0, drafts)))
            self.call(
                "append", lambda sequence=sequence, drafts=drafts: self.cache.append_tokens(sequence, [5] * drafts)
            )
            kept = sequence, drafts, accepted
            self.call("keep", lambda kept=kept: self.cache.accept_drafts(*kept))

    def release(self) -> None:
        ids = self.some() + [sequence for sequence in self.away if self.random.random() < 0.1]
        store = self.random.random() < 0.8
        if ids and self.random.random() < 0.7:
            self.call("commit", lambda: self.cache.commit([sequence for sequence in ids if sequence in self.live]))
        self.call("release", lambda: self.cache.release(ids, store=store))
        self._gone(ids)

    def _gone(self, ids: Sequence[int]) -> None:
        self.live = [sequence for sequence in self.live if sequence not in ids]
        self.away = [sequence for sequence in self.away if sequence not in ids]

    def swap_out(self) -> None:
        ids = self.some(2)
        if self.call("swap_out", lambda: self.cache.swap_out(ids)) is not None:
            self._gone(ids)
            self.away += ids

    def resume(self) -> None:
        ids = self.away[: self.random.randint(1, 2)]
        if self.call("resume", lambda: self.cache.resume(ids)) is not None:
            self._gone(ids)
            self.live += ids

    def exclusive(self) -> None:
        """A step of an engine in one block, up to the first call that is refused."""
        ids, gone = self.some(2), self.some(1)
        ids = [sequence for sequence in ids if sequence not in gone]
        prompt, answer = self.next_prompt()
        encoder, results = self.encoder(1), list[Any]()

        def step() -> list[Any]:
            with self.cache.exclusive():
                results.append(self.cache.match_prefix(prompt))
                self.cache.commit(ids)
                self.cache.append_tokens(ids, [1] * len(ids), [1] * len(ids))
                self.cache.release(gone)
                self._gone(gone)
                results.append(self.cache.add_sequence_batch([prompt], encoder_tokens=encoder))
            return results

        if self.call("exclusive", step) is not None:
            self.live += results[-1].ids.tolist()
            self.answers[self.live[-1]] = answer

    def misuse(self) -> None:
        bad = [*self.some(), 77 << 32]
        verb = self.random.choice(("release", "commit", "swap_out", "fork"))
        self.call(f"misused {verb}", lambda: getattr(self.cache, verb)(bad))

    def reset(self) -> None:
        force = self.random.random() < 0.5
        if self.call("reset", lambda: self.cache.clear(force) or True):
            self.live, self.away, self.reservations = [], [], []

    # -- content ---------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        prompt = self.known()
        self.call("prefetch", lambda: self.cache.content.prefetch(prompt))

    def offload(self) -> None:
        prompt = self.known()
        self.call("offload prompt", lambda: self.cache.content.offload(prompt))

    def pin(self) -> None:
        prompt, tier = self.known(), self.random.choice((None, "device", "host"))
        keys = prompt.keys
        if self.random.random() < 0.9:
            keys = keys[self.cache.content.cached_blocks(keys, tier=tier).all(axis=0)]
        keys = keys[: self.random.randint(1, 3)]
        if len(keys) and len(self.leases) < 3:
            pin = self.call("pin", lambda: self.cache.pin(keys, tier=tier), lambda lease: lease.blocks)
            self.leases += [pin] if pin else []

    def unpin(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.call("unpin", lease.close)

    def reserve(self) -> None:
        if len(self.reservations) < 2:
            prompt, _ = self.next_prompt()
            encoder_tokens = self.encoder(1)
            reservation = self.call(
                "reserve",
                lambda: self.cache.imports.reserve(
                    prompt, encoder_tokens=encoder_tokens[0] if encoder_tokens else None
                ),
                lambda reservation: [
                    reservation.id,
                    reservation.tokens,
                    *(reservation.blocks_of(group.index) for group in self.cache.groups),
                ],
            )
            self.reservations += [reservation] if reservation else []

    def end_reserved(self) -> None:
        if self.reservations:
            reservation = self.reservations.pop(0)
            if self.random.random() < 0.3:
                self.call("abort", reservation.abort)
            else:
                count = self.random.randint(reservation.skip_prefix_n_tokens, reservation.tokens)
                self.call("load", lambda: reservation.commit(count))

    def load(self) -> None:
        """Blocks that come to the host from elsewhere."""
        prompt, _ = self.next_prompt()
        for group in self.cache.groups:
            blocks = [bytes(group.block_bytes)] * min(len(prompt) // T, 6)
            self.call(
                "import",
                lambda g=group.index, group_blocks=blocks: self.cache.imports.import_blocks(
                    prompt, group_blocks, group=g
                ),
            )

    def forget(self) -> None:
        prompt = self.known()
        if self.random.random() < 0.8:
            self.call("forget", lambda: self.cache.content.forget(prompt))
        else:
            self.call("forget", lambda: self.cache.content.forget(namespace=("tenant-a", None)))

    def set_priority(self) -> None:
        """With a time to live of one block in a group: else several would expire at the same moment."""
        prompt, priority = self.known(), self.random.choice((0, 29, 50, 80))
        keys = prompt.keys[self.cache.content.cached_blocks(prompt).any(axis=0)]
        chosen, ttl = self.random.choice(((keys, None), (keys[:1], self.random.randrange(1, 9 * STEP_MS))))
        if len(keys):
            self.call("set_priority", lambda: self.cache.content.set_priority(chosen, priority, ttl_ms=ttl))

    def look(self) -> None:
        prompt, ids, encoder = self.known(), self.some(), self.encoder(1)
        self.call("match", lambda: self.cache.match_prefix(prompt))
        self.call("cached", lambda: self.cache.content.cached_blocks(prompt))
        there = np.ones((len(self.cache.groups), len(prompt) // T), np.bool_)
        self.call("lacking", lambda: self.cache.content.missing_blocks(prompt, there))
        for group in self.cache.groups:
            encoder_tokens = encoder[0] if encoder and group.kind == "cross" else None
            self.call(
                "need",
                lambda g=group, e=encoder_tokens: self.cache.blocks_needed(prompt, group=g.index, encoder_tokens=e),
            )
            self.call("evictable", lambda g=group: self.cache.evictable_after_release(ids, g.index))

    def pass_time(self) -> None:
        self.clock.now += self.random.randint(1, 9) * STEP_MS
        self.call("refresh", self.cache.content.refresh)
