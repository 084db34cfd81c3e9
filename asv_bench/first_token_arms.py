"""The arms of ``first_token``: the engine of examples/engine_llama.py, with K and V that are kept in different ways."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.device.cuda import COPY_PATH

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from engine_llama import TINY, Chat, Engine, Model, Shape, check_memory


@dataclass(eq=False)
class Request(Chat):
    """A turn of a chat. Its answer is computed, and continues with the recorded tokens if there are any."""

    name: int = 0
    recorded: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    arrived: float = 0.0
    first_logits: Any = None
    loaded_bytes: int = 0


class Arm(Engine):
    """A pool whose device tier has room for all chats: the ideal."""

    key, title, needs_host, parts_of_load = "D", "all K and V in GPU memory", False, 1
    copy_path: str | None = None
    needs_torch, computes_again, large = False, False, True

    def __init__(self, model: Model, cache: kvpool.KVCacheManager) -> None:
        super().__init__(model, cache)
        self.parts, self.reuse = self.parts_of_load, not self.computes_again
        self.side, self.event = self.cupy.cuda.Stream(non_blocking=True), self.cupy.cuda.Event
        self.cpu: list[float] = []
        """Seconds of the scheduler's thread in each step, without waiting for its tokens."""
        self.gpu: list[float] = []
        """Seconds from the first to the last work of each step on the engine's stream, by events."""
        self.transfers: list[tuple[Any, Any, int]] = []
        """Events around each load, and its bytes."""
        self.ends: list[float] = []
        """When each step had its tokens."""

    def prepare(self, chats: int) -> None:
        """Allocate what an arm needs beside its pool, before anything is measured."""

    def step(self) -> None:
        begin, end = self.event(), self.event()
        begin.record(self.stream)
        before = time.thread_time()
        work = self.enqueue()
        self.cpu.append(time.thread_time() - before)
        end.record(self.stream)
        self.collect(*work)
        self.ends.append(time.perf_counter())
        end.synchronize()
        self.gpu.append(self.cupy.cuda.get_elapsed_time(begin, end) / 1e3)

    def serve(self, request: Request) -> None:
        request.arrived = time.perf_counter()
        self.waiting.append(request)
        while request.answer:
            self.step()

    def take(self, chat: Chat, token: int, logits: Any) -> None:
        if isinstance(chat, Request):
            chat.times.append(time.perf_counter())
            if not chat.sampled:
                chat.first_logits = logits
            chat.sampled.append(token)
            if chat.recorded:
                token = chat.recorded[len(chat.sampled) - 1]
            if chat.answer == 1:
                self.keep(chat)
        super().take(chat, token, logits)

    def start(self, chat: Chat) -> int:
        before, begin = self.cache.stats().onboarded_blocks, self.event()
        begin.record(self.side)
        sequence = super().start(chat)
        blocks = self.cache.stats().onboarded_blocks - before
        if blocks:
            end = self.event()
            chat.loads.wait(self.shape.layers - 1, stream=self.side)
            end.record(self.side)
            self.note_load(chat, begin, end, blocks)
        return sequence

    def note_load(self, chat: Chat, begin: Any, end: Any, blocks: int) -> None:
        nbytes = blocks * self.shape.layout.block_bytes
        self.transfers.append((begin, end, nbytes))
        if isinstance(chat, Request):
            chat.loaded_bytes = nbytes

    def keep(self, request: Request) -> None:
        """Before the blocks of a request are released: kvpool keeps what was committed."""

    def loaded(self) -> tuple[int, float]:
        """Bytes that were loaded, and seconds from the first to the last of each load, by events."""
        seconds = 0.0
        for begin, end, _ in self.transfers:
            end.synchronize()
            seconds += self.cupy.cuda.get_elapsed_time(begin, end) / 1e3
        return sum(nbytes for _, _, nbytes in self.transfers), seconds


class ComputeAgain(Arm):
    """Nothing is reused."""

    key, title, computes_again, large = "A", "compute again", True, False


class Whole(Arm):
    """kvpool, where a chunk waits for its whole prefix."""

    key, title, needs_host, large = "C1", "kvpool", True, False


class ByLayers(Whole):
    """kvpool, where each part of the layers waits for its own part of the prefix."""

    key, title, parts_of_load = "C2", "kvpool, layer by layer", 8


class Batched(ByLayers):
    key, title, copy_path = "C3", "kvpool, layer by layer, by batched copies", "batched"


class TorchCopies(Arm):
    """A host cache of PyTorch: pinned tensors, one for each chat, and a copy for each block, layer and plane."""

    key, title, needs_torch, computes_again, large = "B1", "torch, a copy for each block and layer", True, True, False

    def __init__(self, model: Model, cache: kvpool.KVCacheManager) -> None:
        super().__init__(model, cache)
        import torch

        self.torch, self.on = torch, torch.cuda.ExternalStream(self.stream.ptr)
        # [blocks, layers, K and V, tokens, kv_heads, head_dim]
        self.rows = torch.from_dlpack(cache.memory.device_pool).movedim(2, 0)
        self.kept: dict[int, Any] = {}
        self.counts: dict[int, int] = {}

    def prepare(self, chats: int) -> None:
        shape = (self.shape.tokens_max // self.shape.block_tokens, *self.rows.shape[1:])
        self.kept = {name: self.torch.empty(shape, dtype=self.rows.dtype, pin_memory=True) for name in range(chats)}

    def start(self, chat: Chat) -> int:
        sequence = super().start(chat)
        count = self.counts.get(chat.name, 0) if isinstance(chat, Request) else 0
        if isinstance(chat, Request) and count:
            begin, end = self.event(), self.event()
            begin.record(self.stream)
            with self.torch.cuda.stream(self.on):
                self.load(self.blocks(sequence)[:count], self.kept[chat.name][:count])
            end.record(self.stream)
            self.note_load(chat, begin, end, count)
            self.cache.commit(sequence, count * self.shape.block_tokens, stream=self.stream)
        return sequence

    def keep(self, request: Request) -> None:
        before = self.counts.get(request.name, 0)
        count = int(self.cache.committed_tokens(request.sequence)) // self.shape.block_tokens
        with self.torch.cuda.stream(self.on):
            self.save(self.blocks(request.sequence)[before:count], self.kept[request.name][before:count])
        self.counts[request.name] = count

    def blocks(self, sequence: int) -> Any:
        return self.cache.block_table(sequence, stream=self.stream).dense()[0].astype(np.int64)

    def load(self, blocks: Any, kept: Any) -> None:
        for block, row in zip(blocks.tolist(), kept, strict=True):
            for layer in range(self.shape.layers):
                for plane in range(2):
                    self.rows[block, layer, plane].copy_(row[layer, plane], non_blocking=True)

    def save(self, blocks: Any, kept: Any) -> None:
        for block, row in zip(blocks.tolist(), kept, strict=True):
            for layer in range(self.shape.layers):
                for plane in range(2):
                    row[layer, plane].copy_(self.rows[block, layer, plane], non_blocking=True)


class TorchGather(TorchCopies):
    """A host cache of PyTorch: gather and scatter on the GPU, and one copy between them and pinned memory."""

    key, title = "B2", "torch, gather and one pinned copy"

    def load(self, blocks: Any, kept: Any) -> None:
        staged = self.torch.empty_like(kept, device=self.rows.device)
        staged.copy_(kept, non_blocking=True)
        self.rows[self.torch.from_numpy(blocks).to(self.rows.device)] = staged

    def save(self, blocks: Any, kept: Any) -> None:
        kept.copy_(self.rows[self.torch.from_numpy(blocks).to(self.rows.device)], non_blocking=True)


ARMS = (Arm, ComputeAgain, TorchGather, ByLayers, TorchCopies, Whole, Batched)
"""In the order in which they are measured."""


def missing(arm: type[Arm]) -> str | None:
    """Why an arm cannot run here, or None."""
    if arm.needs_torch and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return None


@contextmanager
def copies_by(path: str | None) -> Iterator[None]:
    """Have pools that are made meanwhile copy in one way."""
    before = os.environ.pop(COPY_PATH, None)
    try:
        if path is not None:
            os.environ[COPY_PATH] = path
        yield
    finally:
        os.environ.pop(COPY_PATH, None)
        if before is not None:
            os.environ[COPY_PATH] = before


@contextmanager
def opened(arm: type[Arm], model: Model, tiers: dict[str, int]) -> Iterator[Arm]:
    """The arm with a pool of its own, with ``large``, ``device`` or ``host`` blocks of ``tiers``."""
    blocks = {"device_blocks": tiers["large" if arm.large else "device"]}
    blocks |= {"host_blocks": tiers["host"]} if arm.needs_host else {}
    with (
        copies_by(arm.copy_path),
        kvpool.KVCacheManager(model.shape.layout, **blocks, device="cuda", max_sequences=4 * model.shape.rows) as cache,
    ):
        engine = arm(model, cache)
        yield engine
        engine.close()


def verify_copies(model: Model, path: str, tokens: int) -> tuple[int, int]:
    """Save and load a pattern by one way of copying, beside decodes. Return bytes, and how many of them are wrong."""
    cupy, shape = model.cupy, model.shape
    count = tokens // shape.block_tokens
    tiers = {"device_blocks": count + 4 * shape.rows, "host_blocks": 2 * count + 8 * shape.rows}
    with (
        copies_by(path),
        kvpool.KVCacheManager(shape.layout, **tiers, device="cuda", max_sequences=4 * shape.rows) as cache,
    ):
        engine, prompt = Engine(model, cache), list(range(tokens + 1))
        beside = Chat([1, 2, 3], shape.block_tokens * 2)
        engine.waiting.append(beside)
        engine.step()
        sequence = cache.add_sequence(prompt, stream=engine.stream)
        with engine.stream:
            rows = cupy.moveaxis(cache.memory.device_pool, 2, 0)
            places = cupy.asarray(cache.block_table(sequence, stream=engine.stream).dense()[0][:count])
            pattern = (cupy.arange(count * rows[0].size, dtype=np.uint32) * np.uint32(2654435761)) >> 9
            pattern = pattern.astype(np.uint8 if rows.itemsize == 1 else f"u{rows.itemsize}")
            rows[places] = pattern.view(rows.dtype).reshape(count, *rows.shape[1:])
        cache.commit(sequence, stream=engine.stream)
        cache.release(sequence, stream=engine.stream)
        engine.step()
        filler = cache.block_keys([5] * (cache.free_blocks * shape.block_tokens), reuse=False, publish=False)
        cache.release(cache.add_sequence(filler, stream=engine.stream), stream=engine.stream)  # evicts the pattern
        engine.step()
        sequence = cache.add_sequence(prompt, stream=engine.stream)
        if not cache.stats().onboarded_blocks:
            raise RuntimeError(f"{path}: nothing was loaded")
        with engine.stream:
            places = cupy.asarray(cache.block_table(sequence, stream=engine.stream).dense()[0][:count])
            back = cupy.ascontiguousarray(rows[places]).ravel().view(pattern.dtype)
            wrong = int((back != pattern).sum().get())
        cache.release(sequence, stream=engine.stream)
        while beside.answer:
            engine.step()
        engine.close()
    return pattern.nbytes, wrong * pattern.itemsize


__all__ = [
    "ARMS",
    "TINY",
    "Arm",
    "Chat",
    "Model",
    "Request",
    "Shape",
    "check_memory",
    "missing",
    "opened",
    "verify_copies",
]
