"""A tiny but real language model in NumPy whose attention reads the pool through block tables: the logits are those
without a cache.

    python examples/engine_numpy.py                 # chats on a pool far too small for them, every logit compared
    python examples/engine_numpy.py --device sim    # the same on a stream that runs late

Read it in this order: `forward` (the model, which knows nothing of caches), `PagedModel` (its attention through block
tables), `Engine.step` (all calls that an engine makes), `compare` (the proof).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device, Stream
from kvpool.device.sim import SimDevice

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 2, 4, 2, 8, 32, 61
# In float64 the order of summation, which differs from batch to batch, shows in the last digits only: a wrong token
# shows in the first.
LAYOUT = kvpool.BlockLayout(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, tokens_per_block=8, dtype="float64")
TOLERANCE = 1e-9


# -- the model ---------------------------------------------------------------------------------------------------------


def make_weights(seed: int, kv_heads: Sequence[int] = (KV_HEADS,) * LAYERS) -> dict[str, Any]:
    """Random weights of layers with so many KV heads: what the model says is nonsense, but every token depends on all
    before it."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Floats:
        return rng.normal(0, 1.5 / np.sqrt(rows), (rows, columns))

    layers = [
        {
            "q": matrix(WIDTH, HEADS * HEAD_DIM),
            "k": matrix(WIDTH, heads * HEAD_DIM),
            "v": matrix(WIDTH, heads * HEAD_DIM),
            "out": matrix(HEADS * HEAD_DIM, WIDTH),
            "gate": matrix(WIDTH, 64),
            "up": matrix(WIDTH, 64),
            "down": matrix(64, WIDTH),
        }
        for heads in kv_heads
    ]
    frequencies = 100.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    return {
        "embed": rng.normal(0, 1, (VOCABULARY, WIDTH)),
        "layers": layers,
        "head": matrix(WIDTH, VOCABULARY),
        "rope": frequencies,
    }


def rms_norm(x: Any) -> Any:
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5


def rope(x: Any, positions: Any, frequencies: Any, np: Any = np) -> Any:
    """Rotate the halves of each head by its token's position: x [n, heads, head_dim], positions [n]."""
    angle = positions[:, None, None] * frequencies
    left, right = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), left * np.sin(angle) + right * np.cos(angle)], -1
    )


def forward(weights: dict[str, Any], tokens: Any, positions: Any, attend: Callable[..., Any], np: Any = np) -> Any:
    """Logits [n, vocabulary] of n tokens. Tokens meet each other only in ``attend(layer, q, k, v)``, which gives [n,
    heads, head_dim].

    Written without an array package of its own (``np`` is any with NumPy's interface), so that other engines take it
    as it is.
    """
    n, x = len(tokens), weights["embed"][tokens]
    for layer, w in enumerate(weights["layers"]):
        h = rms_norm(x)
        q = rope((h @ w["q"]).reshape(n, HEADS, HEAD_DIM), positions, weights["rope"], np)
        k = rope((h @ w["k"]).reshape(n, -1, HEAD_DIM), positions, weights["rope"], np)
        v = (h @ w["v"]).reshape(n, -1, HEAD_DIM)
        x = x + attend(layer, q, k, v).reshape(n, HEADS * HEAD_DIM) @ w["out"]
        h = rms_norm(x)
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return rms_norm(x) @ weights["head"]


def attention(q: Floats, k: Floats, v: Floats, seen: Any) -> Floats:
    """Grouped-query attention within one sequence: q [n, heads, d] sees those of k, v [m, kv_heads, d] that ``seen``
    [n, m] says."""
    q = q.reshape(len(q), k.shape[1], -1, HEAD_DIM)
    scores = np.einsum("nkgd,mkd->nkgm", q, k) / np.sqrt(HEAD_DIM)
    scores[np.broadcast_to(~seen[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nkgm,mkd->nkgd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), HEADS, HEAD_DIM)


def uncached(weights: dict[str, Any], tokens: list[int]) -> Floats:
    """The same model without any cache: all logits of a whole conversation at once."""
    positions = np.arange(len(tokens))
    seen = positions <= positions[:, None]
    return np.asarray(forward(weights, np.array(tokens), positions, lambda layer, q, k, v: attention(q, k, v, seen)))


# -- the model on a paged cache ----------------------------------------------------------------------------------------


@dataclass
class Batch:
    """The tokens that a step computes, of all its sequences one after the other: int64[n] each.

    ``owner`` is the place of each token's sequence in ``sequences`` and in ``table``, the block ids int32[sequences,
    most blocks] with -1 after the last. ``slots`` is where its K and V go: block * tokens_per_block + token in the
    block.
    """

    sequences: list[int]
    tokens: Ints
    positions: Ints
    owner: Ints
    table: npt.NDArray[np.int32]

    @property
    def slots(self) -> Ints:
        size = LAYOUT.tokens_per_block
        return self.table[self.owner, self.positions // size] * size + self.positions % size

    def touched(self) -> tuple[list[Any], list[Any]]:
        """What is read and what is written: blocks, with the first token and the one after the last."""
        size, last = (
            LAYOUT.tokens_per_block,
            {int(row): int(end) for row, end in zip(self.owner, self.positions, strict=True)},
        )
        reads = [
            (b, 0, min(size, end + 1 - i * size))
            for row, end in last.items()
            for i, b in enumerate(self.table[row])
            if b >= 0
        ]
        return reads, [(slot // size, slot % size, slot % size + 1) for slot in self.slots]


class PagedModel:
    """``forward`` with an attention that writes the new K and V to the pool, and reads everything from there."""

    def __init__(self, weights: dict[str, Any], cache: kvpool.KVCacheManager) -> None:
        self.weights, self.cache = weights, cache

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        pool = self.cache.memory.device_pool  # [layers, K and V, blocks, tokens, kv_heads, head_dim]
        blocks, tokens = np.divmod(batch.slots, LAYOUT.tokens_per_block)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            pool[layer, 0, blocks, tokens], pool[layer, 1, blocks, tokens] = k, v
            out = np.empty_like(q)
            for row, table in enumerate(batch.table):
                mine = batch.owner == row
                # [K and V, blocks of this sequence, tokens, kv_heads, head_dim]
                paged = pool[layer][:, table[table >= 0]]
                keys, values = paged.reshape(2, -1, KV_HEADS, HEAD_DIM)
                # What comes after the last position, in a block that is not full, is masked out with the future.
                out[mine] = attention(q[mine], keys, values, np.arange(len(keys)) <= batch.positions[mine, None])
            return out

        return np.asarray(forward(self.weights, batch.tokens, batch.positions, attend))


# -- the engine --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Chat:
    """A conversation. ``tokens`` is all of it so far: system prompt, the user's message of each turn, and what the
    model answered."""

    tokens: list[int]
    turns: list[tuple[list[int], int]]
    """Future turns: the user's message, and how many tokens the model answers."""
    answer: int = 0
    """Tokens that the model still has to answer in this turn."""
    sequence: int = -1
    computed: int = 0
    """Leading tokens whose K and V are in the pool."""
    guessed: list[int] = field(default_factory=list)
    """What the sequence holds after ``tokens`` in this step: the engine's guess of what the model will sample."""
    wrong: int = 0
    """Guesses of the last step that the model did not sample."""
    logits: list[tuple[int, Floats]] = field(default_factory=list)
    """What was computed: position, logits [vocabulary]."""

    def next_turn(self) -> None:
        message, self.answer = self.turns.pop(0)
        self.tokens += message

    def draft(self, most: int) -> list[int]:
        """Return what followed the last occurrence of the last token: the cheapest guess, right often enough."""
        for i in range(len(self.tokens) - 2, -1, -1):
            if self.tokens[i] == self.tokens[-1]:
                return self.tokens[i + 1 : i + 1 + most]
        return []


def make_chats(count: int, seed: int) -> list[Chat]:
    """Chats of three turns with one of three system prompts, none of them a whole number of blocks."""
    rng = np.random.default_rng(seed)

    def say(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(VOCABULARY, size=rng.integers(low, high))]

    system = [say(18, 30) for _ in range(3)]
    return [Chat(list(system[i % 3]), [(say(3, 10), int(rng.integers(4, 12))) for _ in range(3)]) for i in range(count)]


class Engine:
    """Continuous batching: each step computes prompts that were just admitted and the next token of all others, in one
    batch.

    ``model.run(batch)`` gives the logits [n, vocabulary] of a Batch.
    """

    running_max, guesses_max, chunk = 6, 3, 24
    """Sequences at once; tokens that are guessed; tokens of a prompt that a step computes."""

    def __init__(
        self, cache: kvpool.KVCacheManager, device: Device, stream: Stream, model: Any, chats: list[Chat]
    ) -> None:
        self.cache, self.device, self.stream, self.model = cache, device, stream, model
        self.waiting, self.running, self.swapped = deque(chats), list[Chat](), deque[Chat]()
        self.happened: Counter[str] = Counter()
        for chat in chats:
            chat.next_turn()

    def run(self, check: bool = False) -> None:
        """All chats to their ends; ``check``: the pool verifies its own state after every step."""
        while self.running or self.waiting or self.swapped:
            self.step()
            if check:
                self.cache.verify()

    def step(self) -> None:
        """One step. Every call names the stream, which is all the synchronization there is; the host waits only for
        logits."""
        self.grow()
        if not self.running:
            self.admit()
            self.grow()
        batch, chats = self.batch(), list(self.running)
        result = self.launch(batch)
        # The kernels may not have run yet, and need not have: what the pool does with their blocks from now on comes
        # after them. So prompts are shared before they are computed, and chats whose last token comes now make room
        # for others at once. Guesses are not committed: other prompts must not find them.
        held = [min(self.length(chat), len(chat.tokens)) for chat in chats]
        self.cache.commit([chat.sequence for chat in chats], held, stream=self.stream)
        self.leave(
            [chat for chat, end in zip(chats, held, strict=True) if chat.answer == 1 and end == len(chat.tokens)]
        )
        self.admit()
        self.device.synchronize(self.device.record(self.stream))
        self.sample(chats, batch, result.logits)

    def admit(self) -> None:
        """Go on with chats that were swapped out, then start waiting ones, while there is room.

        What is still cached of a new one is not computed again. It gets blocks for the first chunk after that:
        those of what is computed later go to others until then.
        """
        while self.swapped:
            try:
                self.cache.resume(self.swapped[0].sequence, stream=self.stream)
            except kvpool.OutOfBlocks:  # and nothing has changed
                return
            self.running.append(self.swapped.popleft())
            self.happened["preempted chats that came back from the host"] += 1
        ready = list(self.waiting)[: self.running_max - len(self.running)]
        heads = [chat.tokens[: self.cache.match_prefix(chat.tokens).tokens + self.chunk] for chat in ready]
        admitted = self.cache.add_sequence_batch(heads, stream=self.stream, allow_partial_batch=True)
        if admitted.refused:
            raise RuntimeError(f"the pool is too small for a chat: {admitted.refused}")
        for sequence, cached in zip(admitted.ids.tolist(), admitted.cached_tokens.tolist(), strict=True):
            chat = self.waiting.popleft()
            chat.sequence, chat.computed = sequence, cached
            self.running.append(chat)

    def grow(self) -> None:
        """Room for the next chunk of each chat of which all that has room is computed: the last token of one that is
        answering, and guesses after it. The last one to be admitted gives way to the others."""
        while growing := [chat for chat in self.running if chat.computed == self.length(chat) < len(chat.tokens)]:
            new = [chat.tokens[chat.computed :][: self.chunk] for chat in growing]
            whole = [chat.computed + len(more) == len(chat.tokens) for chat, more in zip(growing, new, strict=True)]
            drafts = [
                chat.draft(min(self.guesses_max, chat.answer - 1)) if last else []
                for chat, last in zip(growing, whole, strict=True)
            ]
            counts = [len(more) + len(draft) for more, draft in zip(new, drafts, strict=True)]
            flat = [token for more, draft in zip(new, drafts, strict=True) for token in (*more, *draft)]
            try:
                self.cache.append_tokens([chat.sequence for chat in growing], flat, counts, stream=self.stream)
            except kvpool.OutOfBlocks:  # and nothing has changed
                self.preempt()
                continue
            self.happened["chunks of prompts after their first one"] += sum(len(more) > 1 for more in new)
            for chat, draft in zip(growing, drafts, strict=True):
                chat.guessed = draft
            return

    def length(self, chat: Chat) -> int:
        """Tokens that have room in the pool."""
        return int(self.cache.sequence_length(chat.sequence))

    def preempt(self) -> None:
        """The last chat waits on the host with all that it has. Where the host has no room it waits in front of the
        others, and goes on where it was as far as its blocks, which stay cached, are not evicted."""
        chat = self.running[-1]
        self.happened["preemptions"] += 1
        try:
            self.cache.swap_out(chat.sequence, stream=self.stream)
        except kvpool.OutOfBlocks:  # and nothing has changed
            self.leave([chat])
            self.waiting.appendleft(chat)
        else:
            self.swapped.appendleft(self.running.pop())

    def batch(self) -> Batch:
        """What is not computed yet of the running sequences."""
        sequences = [chat.sequence for chat in self.running]
        table = self.table(sequences)
        spans = [np.arange(chat.computed, end) for chat, end in zip(self.running, table.lengths, strict=True)]
        known = (
            (chat.tokens + chat.guessed)[: len(span) + chat.computed]
            for chat, span in zip(self.running, spans, strict=True)
        )
        tokens = [token for chat, text in zip(self.running, known, strict=True) for token in text[chat.computed :]]
        owner = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        return Batch(sequences, np.array(tokens), np.concatenate(spans), owner, table.dense())

    def table(self, sequences: Any) -> kvpool.pool.BlockTable:
        return self.cache.block_table(sequences, stream=self.stream)

    def launch(self, batch: Batch) -> SimpleNamespace:
        """Enqueue the computation of a batch on the stream; ``logits`` of the result are there when it is done."""
        result = SimpleNamespace()

        def work() -> None:
            result.logits = self.model.run(batch)

        if isinstance(self.device, SimDevice):
            # Asynchronously, as on a GPU. The accesses of the kernels are declared to the device, which looks for
            # races.
            reads, writes = batch.touched()
            self.device.launch(self.stream, work, reads=reads, writes=writes)
        else:
            work()
        return result

    def sample(self, chats: list[Chat], batch: Batch, logits: Floats) -> None:
        """Take the model's next token, and as many guesses as it agrees with; what was guessed wrong is taken back."""
        for row, chat in enumerate(chats):
            mine = batch.owner == row
            computed, positions = logits[mine], batch.positions[mine].tolist()
            if positions[-1] + 1 < len(chat.tokens):  # more of the prompt is to come
                chat.computed, chat.wrong = positions[-1] + 1, 0
                chat.logits += zip(positions, computed, strict=True)
                continue
            sampled = computed[len(computed) - 1 - len(chat.guessed) :].argmax(-1).tolist()
            agreed = 0
            while agreed < len(chat.guessed) and chat.guessed[agreed] == sampled[agreed]:
                agreed += 1
            chat.computed = len(chat.tokens) + agreed
            chat.logits += [
                (at, token_logits) for at, token_logits in zip(positions, computed, strict=True) if at < chat.computed
            ]
            chat.tokens += sampled[: agreed + 1]
            chat.answer -= agreed + 1
            chat.wrong, chat.guessed = len(chat.guessed) - agreed, []
            self.happened["guessed tokens that were right"] += agreed
            self.happened["guessed tokens that were wrong, and rewound"] += chat.wrong
        staying = [chat for chat in chats if chat in self.running]
        ids = [chat.sequence for chat in staying]
        self.cache.rewind(ids, [chat.wrong for chat in staying], stream=self.stream)
        self.cache.commit(ids, [chat.computed for chat in staying], stream=self.stream)
        self.leave([chat for chat in staying if chat.answer == 0])
        for chat in chats:
            if chat.answer == 0 and chat.turns:  # the user's next turn comes after all others
                chat.next_turn()
                self.waiting.append(chat)

    def leave(self, chats: list[Chat]) -> None:
        """Give blocks back. What was committed stays cached until its room is needed."""
        self.cache.release([chat.sequence for chat in chats], stream=self.stream)
        for chat in chats:
            self.running.remove(chat)


# -- the proof ---------------------------------------------------------------------------------------------------------


def compare(
    weights: dict[str, Any], chats: list[Chat], reference: Callable[..., Floats] = uncached
) -> tuple[int, float]:
    """Every logit that was computed against the model without a cache: tokens compared, and the largest difference."""
    differences = []
    for chat in chats:
        expected = reference(weights, chat.tokens)
        differences += [np.abs(logits - expected[position]).max() for position, logits in chat.logits]
    return len(differences), float(np.max(differences))


def counted(stats: kvpool.pool.Stats) -> dict[str, int]:
    reused = {"blocks reused on the device": stats.reused_device_blocks, "blocks reused in part": stats.partial_blocks}
    return reused | {"blocks offloaded": stats.offloaded_blocks, "blocks onboarded": stats.onboarded_blocks}


def report(counts: dict[str, int], compared: tuple[int, float]) -> int:
    """Print what happened; the exit code: 1 if a logit is wrong, or if something that had to be shown did not
    happen."""
    tokens, worst = compared
    for name, count in counts.items():
        print(f"{count:7,} {name}")
    print(f"{tokens:7,} tokens compared with the model without a cache, largest difference of a logit {worst:.1e}")
    missing = [name for name, count in counts.items() if not count]
    if missing:
        print("did not happen: " + ", ".join(missing))
    if not worst <= TOLERANCE:
        print(f"the logits differ by more than {TOLERANCE}")
    return 1 if missing or not worst <= TOLERANCE else 0


def serve(
    device: Device,
    make_model: Any,
    *,
    chats: int,
    seed: int,
    check: bool = False,
    engine: Any = Engine,
    blocks: int = 26,
    **pool: Any,
) -> int:
    """Chat on a pool that is far too small for it, compare, and close everything; the exit code. ``make_model(weights,
    cache, stream)``. ``pool``: more arguments of the pool."""
    weights, talks = make_weights(seed), make_chats(chats, seed)
    with kvpool.KVCacheManager(
        LAYOUT, device_blocks=blocks, host_blocks=30, device=device, max_sequences=Engine.running_max, **pool
    ) as cache:
        stream = device.create_stream("engine")
        serving = engine(cache, device, stream, make_model(weights, cache, stream), talks)
        serving.run(check)
        code = report(counted(cache.stats()) | dict(sorted(serving.happened.items())), compare(weights, talks))
    device.close()
    return code


def at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not lowest <= int(text) < 1 << 63:
            raise argparse.ArgumentTypeError(f"{text} is not {lowest} or more, and below 2**63")
        return int(text)

    return number


def options(devices: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--chats",
        type=at_least(1),
        default=24,
        help="chats of three turns (default 24; with few, not everything happens)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of weights, chats and the schedule of the sim device (default 0)"
    )
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--check", action="store_true", help="have the pool verify its own state after every step, too")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parsed = options(("cpu", "sim")).parse_args(arguments)
    device = SimDevice(parsed.seed) if parsed.device == "sim" else get_device("cpu")
    return serve(
        device,
        lambda weights, cache, stream: PagedModel(weights, cache),
        chats=parsed.chats,
        seed=parsed.seed,
        check=parsed.check,
    )


if __name__ == "__main__":
    sys.exit(main())
