"""Prompts on their way in: what is cached of them, and their admission by hit, by miss, and by eviction of others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

from .pools import LONG_PROMPT_TOKENS, PROMPT_TOKENS, THREADS, Once, Pooled, blocks_of, make_pool, make_prompts, store

BATCHES = [1, 16, 256]


class CachedPrompt(Pooled):
    """A prompt whose blocks are all on the device, with ready keys unless the name says otherwise."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(4 * blocks_of(tokens))
        (self.prompt,) = make_prompts(1, tokens)
        store(self.cache, [self.prompt])
        self.keys = self.cache.block_keys(self.prompt)

    def time_match(self, tokens: int) -> None:
        self.cache.match_prefix(self.keys)

    def time_match_claim_release(self, tokens: int) -> None:
        self.cache.release(self.cache.add_sequence(self.keys))

    def time_hash_match_claim_release(self, tokens: int) -> None:
        self.cache.release(self.cache.add_sequence(self.cache.block_keys(self.prompt)))


class Claim(Once):
    """Match and claim of one cached prompt with ready keys, without its release."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]
    repeat = 50

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(4 * blocks_of(tokens))
        self.keys = self.cache.block_keys(make_prompts(1, tokens)[0])
        for _ in range(3):
            store(self.cache, [self.keys])

    def time_add_sequence(self, tokens: int) -> None:
        self.cache.add_sequence(self.keys)


class Admit(Once):
    """A batch of prompts with their keys: "hit", all cached in full; "miss", seen by nobody, into empty blocks;
    "evict", seen by nobody, into a pool full of other content, which is forgotten."""

    params = [["hit", "miss", "evict"], BATCHES]
    param_names = ["kind", "batch"]

    def setup(self, kind: str, batch: int) -> None:
        self.cache = make_pool((1 if kind == "evict" else 4) * batch * (blocks_of(PROMPT_TOKENS) + 1))
        self.keys = [self.cache.block_keys(prompt) for prompt in make_prompts(batch, PROMPT_TOKENS)]
        if kind == "hit":
            store(self.cache, self.keys)
        elif kind == "evict":
            store(self.cache, make_prompts(batch + 1, PROMPT_TOKENS, seed=1))

    def time_add_sequence_batch(self, kind: str, batch: int) -> None:
        self.cache.add_sequence_batch(self.keys)


class Plan(Pooled):
    """What an admission of a batch of prompts with their keys would do, beside 128 sequences: "hit", all cached in
    full; "miss", never seen before; "computing", each being computed by one of the sequences."""

    params = [["hit", "miss", "computing"], BATCHES]
    param_names = ["kind", "batch"]
    running = 128

    def setup(self, kind: str, batch: int) -> None:
        rows = self.running + batch
        self.cache = make_pool(rows * (blocks_of(PROMPT_TOKENS) + 1), max_sequences=rows)
        self.keys = [self.cache.block_keys(prompt) for prompt in make_prompts(batch, PROMPT_TOKENS)]
        if kind == "hit":
            store(self.cache, self.keys)
        other = make_prompts(self.running, PROMPT_TOKENS, seed=1)
        same = self.keys if kind == "computing" else []
        self.cache.add_sequence_batch([*same, *other][: self.running])

    def time_plan_batch(self, kind: str, batch: int) -> None:
        self.cache.plan_batch(self.keys)


class ThreadedRequests(Pooled):
    """Whole requests (keys, admission, commit, release) that miss and evict, one after the other and by two threads:
    they share one lock."""

    params = [256, PROMPT_TOKENS]
    param_names = ["tokens"]
    requests = 32

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(8 * blocks_of(tokens))
        self.prompts = make_prompts(self.requests, tokens)
        store(self.cache, self.prompts)
        self.team = ThreadPoolExecutor(THREADS)
        self.time_threads(tokens)

    def teardown(self, *parameters: Any) -> None:
        self.team.shutdown()
        super().teardown()

    def _serve(self, prompt: Any) -> None:
        sequence = self.cache.add_sequence(self.cache.block_keys(prompt))
        self.cache.commit(sequence)
        self.cache.release(sequence)

    def time_serial(self, tokens: int) -> None:
        for prompt in self.prompts:
            self._serve(prompt)

    def time_threads(self, tokens: int) -> None:
        list(self.team.map(self._serve, self.prompts))


class TimedLock:
    """The state lock of a pool, which notes for how long it is held."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.held: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> None:
        self.inner.acquire()
        self.since = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.held.append(perf_counter() - self.since)
        self.inner.release()


class LockHold(Pooled):
    """How long one admission keeps every other caller out; the median of some."""

    params = [["hit", "miss", "evict"], [PROMPT_TOKENS, LONG_PROMPT_TOKENS]]
    param_names = ["kind", "tokens"]
    admissions = 15

    def setup(self, kind: str, tokens: int) -> None:
        self.cache = make_pool((2 if kind == "evict" else self.admissions + 2) * blocks_of(tokens))
        prompts = make_prompts(1 if kind == "hit" else self.admissions, tokens)
        self.keys = [self.cache.block_keys(prompt) for prompt in prompts] * (self.admissions if kind == "hit" else 1)
        if kind != "miss":
            store(self.cache, self.keys[:1] if kind == "hit" else make_prompts(3, tokens, seed=1))

    def track_held(self, kind: str, tokens: int) -> float:
        lock = TimedLock(self.cache.core.lock)
        self.cache.core.lock = lock  # type: ignore[assignment]
        longest = []
        for keys in self.keys:
            lock.held.clear()
            sequence = self.cache.add_sequence(keys)
            longest.append(max(lock.held))
            self.cache.commit(sequence)
            self.cache.release(sequence)
        self.cache.core.lock = lock.inner
        return 1e6 * median(longest)

    track_held.unit = "us"  # type: ignore[attr-defined]
