"""A Llama on a GPU, in CuPy alone: cuBLAS, eight kernels (llama.cu), continuous batching, decodes in a CUDA graph.

    python examples/engine_llama.py          # needs an NVIDIA GPU, and CuPy: pip install ".[cuda12]" or ".[cuda13]"
    python -m tests.emulated run python examples/engine_llama.py --tiny    # without a GPU: see docs/gpu.md

Read it in this order: `Model.forward` (the model), `Engine.step` (the scheduler), `Engine.fill` (a chunk of a prompt
after its cached prefix), `Engine.capture` and `Engine.decode` (the graph), `main` (chats on a pool that is far too
small for them).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.device.cuda import unusable
from kvpool.device.memory.main_memory import available_ram
from kvpool.storage import StorageManager

SOURCE = Path(__file__).with_name("llama.cu")
TOLERANCE = {"float16": 0.25, "float32": 1e-3}
"""How far the logit of a generated token may be below the largest logit of the model without a cache."""

SWAPPED_OUT, CAME_BACK = "chats that were swapped out", "chats that came back from the host"
STARTED_AGAIN = "chats that started again"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of the steps of its engine. The defaults keep 112 KiB of K and V for each token."""

    layers: int = 28
    width: int = 3072
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 8192
    vocabulary: int = 32000
    dtype: str = "float16"
    block_tokens: int = 16
    tokens_max: int = 8192
    """Tokens of the longest sequence."""
    rows: int = 16
    """Sequences that decode at once: the rows of the graph."""
    chunk: int = 512
    """Tokens of a prompt that a step computes."""
    threads: int = 512
    """Threads of a block: a power of two, and a multiple of ``head_dim``."""

    @property
    def layout(self) -> kvpool.BlockLayout:
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return kvpool.BlockLayout(**sizes, tokens_per_block=self.block_tokens, dtype=self.dtype)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer."""
        attention, qkv = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        width, hidden = self.width, self.hidden
        return {"qkv": (width, qkv), "out": (attention, width), "gate_up": (width, 2 * hidden), "down": (hidden, width)}

    @property
    def bytes_needed(self) -> int:
        """Bytes on the GPU beside the device tier: the weights, and the arrays of the largest steps, with half as much
        again for fragmentation."""
        layer = sum(rows * columns for rows, columns in self.matrices.values()) + 2 * self.width
        weights = self.layers * layer + 2 * self.vocabulary * self.width
        chunk = self.heads * self.chunk * self.tokens_max + 2 * self.kv_heads * self.head_dim * self.tokens_max
        chunk += self.chunk * (4 * self.width + 3 * self.hidden)
        return (weights + 3 * (chunk + self.rows * self.vocabulary) // 2) * np.dtype(self.dtype).itemsize


TINY = Shape(2, 32, 4, 2, 8, 64, 64, "float32", 4, 128, 4, 16, 16)


def check_memory(shape: Shape, device_blocks: int, host_blocks: int, cupy: Any) -> None:
    """Raise InsufficientMemory if the model and the tiers do not fit. Allocates nothing."""
    tier, free = device_blocks * shape.layout.block_bytes, cupy.cuda.runtime.memGetInfo()[0]
    if tier + shape.bytes_needed > free:
        reason = f"{shape.bytes_needed / (1 << 30):.2f} GiB of it for the model, {device_blocks} blocks for the tier"
        raise kvpool.errors.InsufficientMemory("device", tier + shape.bytes_needed, free, reason)
    host, ram = host_blocks * shape.layout.block_bytes, available_ram()
    if ram is not None and host > ram:
        raise kvpool.errors.InsufficientMemory("host", host, ram, f"{host_blocks} blocks for the tier")


class Model:
    """A Llama with random weights: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    On a GPU in half precision; in single precision on the emulated driver, whose matrix products are slow.
    """

    def __init__(self, shape: Shape, seed: int, cupy: Any) -> None:
        self.shape, self.cupy, self.seed = shape, cupy, seed
        macros = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "THETA": "10000.0f"}
        macros |= {"BLOCK_TOKENS": shape.block_tokens, "ROWS": shape.rows, "THREADS": shape.threads}
        macros |= {"scalar_t": {"float16": "float16", "float32": "float"}[shape.dtype]}
        options = ("-std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))
        self.module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
        self.embed = self.random(shape.vocabulary, shape.width, spread=1.7)
        self.head = self.random(shape.width, shape.vocabulary)
        self.norm = self.random(shape.width, mean=1.0, spread=0.2)
        self.layers = [
            {name: self.random(*sizes) for name, sizes in shape.matrices.items()}
            | {name: self.random(shape.width, mean=1.0, spread=0.2) for name in ("before_attention", "before_mlp")}
            for _ in range(shape.layers)
        ]

    def random(self, *sizes: int, mean: float = 0.0, spread: float | None = None) -> Any:
        out, self.seed = self.cupy.empty(sizes, self.shape.dtype), self.seed + 1
        # By default the products with a matrix have as large numbers as what it is multiplied with.
        numbers = np.uint32(self.seed), np.float32(mean), np.float32(spread or (3 / sizes[0]) ** 0.5)
        self.launch("fill_random", (-(-out.size // 256),), 256, out, np.int64(out.size), *numbers)
        return out

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        self.module.get_function(kernel)(grid, (threads,), arguments)

    def normed(self, x: Any, weight: Any) -> Any:
        out = self.cupy.empty_like(x)
        self.launch("rms_norm", (len(x),), self.shape.threads, out, x, weight, np.int32(self.shape.width))
        return out

    def multiply(self, x: Any, matrix: Any) -> Any:
        """By cuBLAS, which CuPy refuses during a capture; so the rows of a decode by a kernel."""
        if len(x) != self.shape.rows:
            return x @ matrix
        out, (inner, columns) = self.cupy.empty((len(x), matrix.shape[1]), x.dtype), matrix.shape
        numbers = np.int32(inner), np.int32(columns)
        self.launch("multiply_rows", (columns // 32,), self.shape.threads, out, x, matrix, *numbers)
        return out

    def forward(
        self,
        tokens: Any,
        pool: Any,
        step: kvpool.pool.StepTables,
        cached: int = 0,
        wait: Callable[[int], None] | None = None,
    ) -> Any:
        """Compute the rows of a step: a chunk of one sequence, of whose rows the first ``cached`` are in the pool, or
        one row of each sequence. Call ``wait`` before each layer. Return [rows, width], which ``head`` makes logits."""
        shape, cupy, n = self.shape, self.cupy, len(tokens)
        x, each = self.embed[tokens], n // len(step.seq_lens)
        tables = step.seq_lens, step.query_start_loc, step.slot_mapping
        plane = np.int64(pool[0, 0].size)  # from the keys of a layer to its values
        for number, w in enumerate(self.layers):
            if wait is not None:
                wait(number)
            qkv = self.multiply(self.normed(x, w["before_attention"]), w["qkv"])
            queries = cupy.empty((shape.heads, n, shape.head_dim), shape.dtype)
            grid, numbers = (n, shape.heads + 2 * shape.kv_heads), (np.int32(each), np.int32(cached), plane)
            self.launch("rope_and_store", grid, shape.head_dim // 2, queries, pool[number], qkv, *tables, *numbers)
            attend = self.attend_chunk if len(step.seq_lens) == 1 < n else self.attend_last
            x += self.multiply(attend(queries, pool[number], step, plane), w["out"])
            gate_up = self.multiply(self.normed(x, w["before_mlp"]), w["gate_up"])
            product = cupy.empty((n, shape.hidden), shape.dtype)
            self.launch("silu_times", (n, -(-shape.hidden // 256)), 256, product, gate_up, np.int32(shape.hidden))
            x += self.multiply(product, w["down"])
        return self.normed(x, self.norm)

    def attend_last(self, queries: Any, layer: Any, step: kvpool.pool.StepTables, plane: Any) -> Any:
        """Attention of the last token of each sequence, through the block table."""
        shape, (heads, n, head_dim) = self.shape, queries.shape
        out = self.cupy.empty((n, heads * head_dim), shape.dtype)
        arguments = out, queries, layer, step.table, np.int32(step.table.shape[1]), step.seq_lens, plane
        self.launch("paged_decode", (n, shape.kv_heads), shape.threads, *arguments)
        return out

    def attend_chunk(self, queries: Any, layer: Any, step: kvpool.pool.StepTables, plane: Any) -> Any:
        """Attention of a chunk to all up to its end: the sequence is gathered once, cuBLAS multiplies.

        CuPy multiplies matrices of halves as they are, and stacks of them as floats. So it gets one head at a time.
        """
        shape, (heads, n, head_dim), tokens = self.shape, queries.shape, step.table.size * self.shape.block_tokens
        keys, values = (self.cupy.empty((shape.kv_heads, tokens, head_dim), shape.dtype) for _ in range(2))
        grid = tokens, shape.kv_heads
        self.launch("gather", grid, head_dim, keys, values, layer, step.table, step.seq_lens, plane)
        scores, out = self.cupy.empty((heads, n, tokens), shape.dtype), self.cupy.empty_like(queries)
        grouped = queries.reshape(shape.kv_heads, -1, head_dim)
        for head, mine in enumerate(scores.reshape(shape.kv_heads, -1, tokens)):
            self.cupy.matmul(grouped[head], keys[head].T, out=mine)
        tables = step.seq_lens, step.query_start_loc, step.slot_mapping
        self.launch("causal_softmax", (n, heads), shape.threads, scores, *tables, np.int32(tokens))
        for head, mine in enumerate(out.reshape(shape.kv_heads, -1, head_dim)):
            self.cupy.matmul(scores.reshape(shape.kv_heads, -1, tokens)[head], values[head], out=mine)
        return out.transpose(1, 0, 2).reshape(n, heads * head_dim)


@dataclass(eq=False)
class Chat:
    tokens: list[int]
    answer: int
    """Tokens that are still to be generated."""
    sequence: int = -1
    filling: bool = True
    """Whether a part of the prompt is still to be computed."""
    coming: Any = None
    """The prefetch from the stores."""
    loads: Any = None
    """What is coming from the host, layer by layer."""
    logits: list[Any] = field(default_factory=list)
    """Of each generated token, if the engine keeps them."""


class Engine:
    """Continuous batching: a step generates a token of each running chat, and computes a chunk of one prompt.

    All chunks begin at multiples of ``Shape.chunk``, and the graph always has ``Shape.rows`` rows. So the shapes of all
    matrix products, and with them the order of all sums, depend on the tokens alone, and not on what is cached.
    """

    def __init__(self, model: Model, cache: kvpool.KVCacheManager, storage: StorageManager | None = None) -> None:
        self.model, self.cache, self.storage, self.shape = model, cache, storage, model.shape
        self.cupy = model.cupy
        self.waiting, self.running, self.swapped = deque[Chat](), list[Chat](), deque[Chat]()
        self.happened: Counter[str] = Counter()
        self.keep_logits, self.reuse, self.parts = False, True, 8
        model.cupy.cuda.get_current_stream().synchronize()  # the weights
        self.stream = model.cupy.cuda.Stream(non_blocking=True)
        chunk, tokens = self.shape.chunk, self.shape.tokens_max
        self.chunk_steps = [self.tables(1, chunk, end) for end in range(chunk, tokens + chunk, chunk)]
        self.capture()

    def tables(self, sequences: int, rows: int, tokens_max: int) -> kvpool.pool.StepTables:
        zeros = self.cupy.zeros
        return kvpool.pool.StepTables(
            slot_mapping=zeros(rows, np.int64),
            seq_lens=zeros(sequences, np.int32),
            query_start_loc=zeros(sequences + 1, np.int32),
            table=zeros((sequences, -(-tokens_max // self.shape.block_tokens)), np.int32),
        )

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self, chats: list[Chat]) -> None:
        """Answer all chats."""
        for chat in chats:
            chat.filling = True
            if self.storage is not None:
                chat.coming = self.storage.prefetch(chat.tokens)
        self.waiting += chats
        while self.waiting or self.running or self.swapped:
            self.step()

    def step(self) -> None:
        """Enqueue the work of a step, then wait for its tokens: the host waits nowhere else."""
        self.collect(*self.enqueue())

    def enqueue(self) -> tuple[list[Chat], tuple[Chat, Any] | None]:
        """Enqueue a decode and a chunk. Return the chats of the decode, and what ``fill`` returns."""
        decoded = self.decode()
        self.admit()
        return decoded, self.fill()

    def collect(self, decoded: list[Chat], filled: tuple[Chat, Any] | None) -> None:
        if decoded:
            tokens = self.next.get(stream=self.stream).tolist()
            logits = self.logits.get(stream=self.stream) if self.keep_logits else [None] * len(tokens)
            for row, chat in enumerate(decoded):
                self.take(chat, tokens[row], logits[row])
        if filled:
            chat, logits = filled[0], filled[1].get(stream=self.stream)
            self.take(chat, int(logits.argmax()), logits)

    def admit(self) -> None:
        """Go on with a chat that was swapped out, or start one: its prefix comes while its first chunk is computed."""
        while self.swapped:
            try:
                self.cache.resume(self.swapped[0].sequence, stream=self.stream)
            except kvpool.OutOfBlocks:  # and nothing has changed
                return
            self.running.append(self.swapped.popleft())
            self.happened[CAME_BACK] += 1
        if not self.waiting or len(self.running) == self.shape.rows or any(chat.filling for chat in self.running):
            return
        chat = self.waiting[0]
        if chat.coming is not None and not chat.coming.done:
            if self.running:
                return
            chat.coming.wait()
        try:
            chat.sequence = self.start(chat)
        except kvpool.OutOfBlocks:  # and nothing has changed
            return
        self.running.append(self.waiting.popleft())

    def start(self, chat: Chat) -> int:
        """Add a chat to the pool. Return its sequence. Raise OutOfBlocks."""
        chat.loads = self.cache.imports.layer_loads(self.stream, parts=self.parts)
        prompt = self.cache.block_keys(chat.tokens, reuse=self.reuse)
        return int(self.cache.add_sequence_batch([prompt], loads=chat.loads).ids[0])

    def fill(self) -> tuple[Chat, Any] | None:
        """Compute a chunk of a prompt. At its end, return the chat and logits on the GPU."""
        chat = next((chat for chat in self.running if chat.filling), None)
        if chat is None:
            return None
        begin = int(self.cache.committed_tokens(chat.sequence))
        hidden, end = self.compute(chat.sequence, chat.tokens, begin, chat.loads.wait)
        self.cache.commit(chat.sequence, end, stream=self.stream)
        self.happened["chunks of prompts"] += 1
        chat.filling = end < len(chat.tokens)
        with self.stream:
            return None if chat.filling else (chat, (hidden[-1:] @ self.model.head)[0])

    def compute(self, sequence: int, tokens: list[int], begin: int, wait: Any = None) -> tuple[Any, int]:
        """Compute from token ``begin`` to the end of its chunk. The rows before it are computed too, for the shapes."""
        first = begin - begin % self.shape.chunk
        end = min(first + self.shape.chunk, len(tokens))
        step = self.chunk_steps[first // self.shape.chunk]
        self.cache.tables.copy_step_tables(step, sequence, first, end - first, stream=self.stream)
        with self.stream:
            ids = self.cupy.asarray(np.resize(tokens[first:end], self.shape.chunk))
            hidden = self.model.forward(ids, self.cache.memory.device_pool, step, begin - first, wait)
        return hidden[: end - first], end

    def capture(self) -> None:
        """Capture the decode: the upload of the tables, the model, and the choice of the tokens."""
        rows = self.shape.rows
        self.step_tables, self.ids = self.tables(rows, rows, self.shape.tokens_max), self.cupy.zeros(rows, np.int64)
        # The graph owns the memory of its intermediate arrays: nothing else is allocated from this pool.
        self.memory = self.cupy.cuda.MemoryPool()

        def decode() -> tuple[Any, Any]:
            hidden = self.model.forward(self.ids, self.cache.memory.device_pool, self.step_tables)
            logits = self.model.multiply(hidden, self.model.head)
            return logits, logits.argmax(axis=1)

        self.cupy.cuda.Device().synchronize()
        with self.stream, self.cupy.cuda.using_allocator(self.memory.malloc):
            decode()  # loads the kernels, and fills the memory pool; tables of zeros are padding
            self.stream.synchronize()
            gc.collect()  # what is freed during a capture can end it
            self.stream.begin_capture()
            self.graph_tables = self.cache.tables.capture_step_tables(self.step_tables, rows, stream=self.stream)
            self.logits, self.next = decode()
            self.graph = self.stream.end_capture()

    def decode(self) -> list[Chat]:
        """Launch the graph for all chats whose prompts are computed. The last one gives way if there is no room."""
        while chats := [chat for chat in self.running if not chat.filling]:
            ids, last = [chat.sequence for chat in chats], [chat.tokens[-1] for chat in chats]
            try:
                self.cache.append_tokens(ids, last, [1] * len(ids), stream=self.stream)
            except kvpool.OutOfBlocks:  # and nothing has changed
                self.preempt()
                continue
            self.graph_tables.stage(ids, stream=self.stream)
            self.ids[: len(ids)].set(np.array(last), stream=self.stream)
            self.graph.launch(self.stream)
            self.cache.commit(ids, stream=self.stream)
            self.happened["tokens decoded"] += len(ids)
            return chats
        return []

    def preempt(self) -> None:
        """The chat that came last waits on the host. If that has no room, it starts again: what it has committed stays
        cached until its blocks are needed."""
        chat = self.running.pop()
        try:
            self.cache.swap_out(chat.sequence, stream=self.stream)
        except kvpool.OutOfBlocks:  # and nothing has changed
            self.cache.release(chat.sequence, stream=self.stream)
            chat.filling = True
            self.waiting.appendleft(chat)
            self.happened[STARTED_AGAIN] += 1
        else:
            self.swapped.appendleft(chat)
            self.happened[SWAPPED_OUT] += 1

    def take(self, chat: Chat, token: int, logits: Any) -> None:
        chat.tokens.append(token)
        chat.answer -= 1
        if self.keep_logits:
            chat.logits.append(logits)
        if chat.answer == 0:
            self.cache.release(chat.sequence, stream=self.stream)
            self.running.remove(chat)

    # -- the proof -----------------------------------------------------------------------------------------------------

    def uncached(self, tokens: list[int]) -> Any:
        """All logits of a conversation, with nothing reused and nothing kept."""
        sequence = self.cache.add_sequence(
            self.cache.block_keys(tokens, reuse=False, publish=False), stream=self.stream
        )
        logits, end = [], 0
        while end < len(tokens):
            hidden, end = self.compute(sequence, tokens, end)
            self.cache.commit(sequence, end, stream=self.stream)
            with self.stream:
                logits.append((hidden @ self.model.head).get())
        self.cache.release(sequence, stream=self.stream)
        return np.concatenate(logits)

    def close(self) -> None:
        self.stream.synchronize()
        self.graph_tables.close()


def serve(engine: Engine, count: int, turns: int, seed: int) -> list[Chat]:
    """Let chats take turns, each with one of three system prompts, up to the longest sequence. Return them."""
    rng, longest = np.random.default_rng(seed), engine.shape.tokens_max

    def say(tokens: int) -> list[int]:
        return [int(token) for token in rng.integers(engine.shape.vocabulary, size=rng.integers(tokens // 2, tokens))]

    system = [say(longest // 3) for _ in range(3)]
    chats = [Chat(list(system[i % 3]), 0) for i in range(count)]
    for _ in range(turns):
        for chat in chats:
            chat.tokens += say(longest // 3 // turns)
            chat.answer = longest // 4 // turns
        engine.run(chats)
    return chats


def shortfall(engine: Engine, chats: list[Chat]) -> float:
    """How far the logit of any token of the last answers is below the largest without a cache."""
    answer, most = engine.shape.tokens_max // 12, 0.0
    for chat in chats:
        logits, tokens = engine.uncached(chat.tokens)[-answer - 1 : -1], np.array(chat.tokens[-answer:])
        most = max(most, float((logits.max(1) - logits[np.arange(answer), tokens]).max()))
    return most


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of two layers in single precision")
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if missing := unusable():
        sys.exit(f"engine_llama.py cannot run here: {missing}")
    import cupy

    shape = TINY if parsed.tiny else Shape()
    longest = shape.tokens_max // shape.block_tokens
    tiers = {"device_blocks": 3 * longest // 2, "host_blocks": 6 * longest}
    try:
        check_memory(shape, **tiers, cupy=cupy)
    except kvpool.errors.InsufficientMemory as error:
        sys.exit(f"engine_llama.py needs more memory: {error}")
    model = Model(shape, parsed.seed, cupy)
    with kvpool.KVCacheManager(shape.layout, **tiers, device="cuda", max_sequences=4 * shape.rows) as cache:
        engine = Engine(model, cache)
        chats = serve(engine, parsed.chats, 3, parsed.seed)
        stats, below = cache.stats(), shortfall(engine, chats)
        engine.close()
    counts = {"blocks reused on the device": stats.reused_device_blocks, "blocks offloaded": stats.offloaded_blocks}
    counts |= {"blocks onboarded": stats.onboarded_blocks, SWAPPED_OUT: 0, CAME_BACK: 0} | engine.happened
    for name, count in counts.items():
        print(f"{count:8,} {name}")
    print(f"the logit of a generated token is at most {below:.1e} below the largest without a cache")
    return 0 if all(counts.values()) and below <= TOLERANCE[shape.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
