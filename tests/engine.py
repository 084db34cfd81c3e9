"""A tiny fake engine: writes KV bytes that name their content through the block table, and checks every byte that is
reused."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import BlockLayout, KVCacheManager
from tests import debug

Item = tuple[int, int]
"""One token: (token id, extra id), 0 where it has no extra id."""
Bytes = npt.NDArray[np.uint8]


class Clock:
    """Milliseconds that tests set."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def small_layout(tokens_per_block: int, **options: Any) -> BlockLayout:
    """Two layers, two planes, two heads: every coordinate can be wrong."""
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 3, "dtype": "uint16"}
    return BlockLayout(tokens_per_block=tokens_per_block, **(shape | options))


class Digests:
    """A name for each token of a sequence: a digest of its namespace and all tokens from position 0 to it."""

    def of(self, namespace: object, items: Iterable[Item]) -> list[bytes]:
        digest = hashlib.blake2b(repr(namespace).encode(), digest_size=16).digest()
        digests = []
        for item in items:
            digest = hashlib.blake2b(repr(item).encode(), key=digest, digest_size=16).digest()
            digests.append(digest)
        return digests


@functools.cache
def token_bytes(layout: BlockLayout, name: bytes) -> Bytes:
    """What the token of this name is in a layout: uint8[layers, planes, kv_heads, head bytes]."""
    shape = (layout.layers, layout.planes, layout.kv_heads, layout.head_dim * layout.itemsize)
    data = hashlib.shake_128(name).digest(math.prod(shape))
    return np.frombuffer(data, np.uint8).reshape(shape)


class TokenBytes:
    """The bytes of tokens in one layout, which ``Digests`` names."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    def of(self, namespace: object, items: Iterable[Item]) -> list[Bytes]:
        return [token_bytes(self.layout, name) for name in Digests().of(namespace, items)]


@dataclass
class Request:
    """What the engine knows of a running request."""

    id: int
    namespace: object
    items: list[Item]
    cached: int
    bytes: list[Bytes] = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)


def block_of(cache: KVCacheManager, block_id: int, group: int = 0, part: int = 0) -> Bytes:
    """Writable bytes of a block of either tier by its id in the group, uint8[layers, planes, T, kv_heads, head
    bytes]."""
    layers = cache.groups[group]
    layout, memory = layers.layouts[part], cache.memory
    if block_id >= layers.device_blocks:
        view = memory.host_pools[group][part][block_id - layers.device_blocks]
    else:
        pool = memory.device_pools[group][part]
        view = pool[:, :, block_id] if layout.order == "layer_first" else pool[block_id]
    return (view.swapaxes(2, 3) if layout.tokens == "HND" else view).view(np.uint8)


class Engine:
    """Runs requests through a pool as an engine would; every reuse is compared byte by byte.

    Each verb ends with ``cache.verify()`` and a comparison of all bytes of the sequences that it touched.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.T = cache.tokens_per_block
        self.expected = TokenBytes(cache.layout)
        self.live: dict[int, Request] = {}
        self.clock = Clock()

    # -- looking -------------------------------------------------------------------------------

    def free(self, tier: str = "device") -> int:
        return int(getattr(self.cache.stats(), tier).free)

    def order(self, tier: str = "device") -> list[int]:
        """Blocks that nobody holds, the next victim first."""
        return debug.lists(self.cache.core.tokens)[tier]

    def cached(self, tier: str = "device") -> dict[bytes, int]:
        """Keys of full blocks that the tier has, with their block ids."""
        return debug.cached(self.cache.core.tokens)[tier]

    def keys(self, tokens: Sequence[int], **names: Any) -> list[bytes]:
        """Keys of the full blocks of a prompt."""
        return [key.tobytes() for key in self.prompt(tokens, **names).keys]

    def priorities(self, sequence: Request) -> list[int]:
        return [int(self.cache.core.tokens.blocks["priority"][b]) for b in self.table(sequence)]

    def reusable(self, tokens: Sequence[int], **names: Any) -> int:
        """Tokens that an admission would reuse now."""
        return int(self.cache.match_prefix(self.prompt(tokens, **names)).tokens)

    # -- bytes ---------------------------------------------------------------------------------

    def block(self, block_id: int, group: int = 0, part: int = 0) -> Bytes:
        return block_of(self.cache, block_id, group, part)

    def write(self, sequence: Request, start: int) -> None:
        """Write the bytes of all tokens from `start` on."""
        table = self.table(sequence)
        for i in range(start, len(sequence)):
            self.block(table[i // self.T])[:, :, i % self.T] = sequence.bytes[i]

    def check(self, sequence: Request, count: int | None = None) -> None:
        """Compare the first `count` tokens (None: all) with what was written under their content."""
        table = self.table(sequence)
        for i in range(len(sequence) if count is None else count):
            if table[i // self.T] < 0:
                assert self.unseen(sequence, i), f"token {i} of {sequence} has no block"
            else:
                self.check_token(table[i // self.T], i % self.T, sequence.bytes[i], f"token {i} of {sequence}")

    def check_token(self, block_id: int, slot: int, expected: Bytes, what: str) -> None:
        same = np.array_equal(self.block(block_id)[:, :, slot], expected)
        assert same, f"block {block_id}, slot {slot} does not hold the bytes of {what}"

    def check_content(self, block_id: int, namespace: object, items: Sequence[Item], first: int) -> None:
        """Compare a cached block with tokens `first`.. of a prefix."""
        for i, expected in enumerate(self.expected.of(namespace, items)):
            if i >= first:
                self.check_token(block_id, i - first, expected, f"token {i} of {namespace}, {items}")

    def table(self, sequence: Request) -> list[int]:
        row = self.cache.block_table(sequence.id).dense()[0]
        return [int(b) for b in row]

    def unseen(self, sequence: Request, token: int) -> bool:
        """Whether the window of the next token has passed a token, which is not a sink either."""
        window, sinks = self.cache.groups[0].window or 0, self.cache.groups[0].sinks
        return 0 < window <= int(self.cache.committed_tokens(sequence.id)) - token and token >= sinks

    # -- verbs ---------------------------------------------------------------------------------

    def prompt(self, tokens: Sequence[int], **names: Any) -> Any:
        return self.cache.block_keys(list(tokens), **names)

    def add(self, tokens: Sequence[int], **options: Any) -> Request:
        """Admit one prompt; salt, adapter_id and extra_ids name its namespace, the rest goes to the pool."""
        names = {name: options.pop(name) for name in ("salt", "adapter_id", "extra_ids") if name in options}
        new = self.cache.add_sequence(self.prompt(tokens, **names), **options)
        return self.admitted(new, tokens, **names)

    def add_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Request]:
        admission = self.cache.add_sequence_batch([self.prompt(tokens) for tokens in prompts], **options)
        assert len(admission.ids) == admission.admitted
        new = [self.admitted(int(i), p) for i, p in zip(admission.ids, prompts, strict=False)]
        assert [s.cached for s in new] == admission.cached_tokens.tolist()
        return new

    def admitted(
        self,
        new: int,
        tokens: Sequence[int],
        *,
        salt: object = None,
        adapter_id: object = None,
        extra_ids: Sequence[int] | None = None,
    ) -> Request:
        """Check what an admission reused, then compute the rest of the prompt."""
        items = list(zip(map(int, tokens), map(int, extra_ids or [0] * len(tokens)), strict=True))
        namespace = (salt, adapter_id)
        sequence = Request(new, namespace, items, self.cache.cached_tokens(new), self.expected.of(namespace, items))
        self.check(sequence, sequence.cached)
        self.write(sequence, sequence.cached)
        self.live[new] = sequence
        return self._done(sequence)

    def append(self, sequence: Request, tokens: Sequence[int]) -> Request:
        self.cache.append_tokens(sequence.id, list(tokens))
        return self.appended(sequence, tokens)

    def appended(self, sequence: Request, tokens: Sequence[int]) -> Request:
        start = len(sequence)
        sequence.items += [(int(token), 0) for token in tokens]
        sequence.bytes = self.expected.of(sequence.namespace, sequence.items)
        self.write(sequence, start)
        return self._done(sequence)

    def commit(self, sequence: Request, count: int | None = None) -> Request:
        self.cache.commit(sequence.id, None if count is None else [count])
        return self._done(sequence)

    def rewind(self, sequence: Request, count: int) -> Request:
        self.cache.rewind(sequence.id, [count])
        return self.rewound(sequence, count)

    def rewound(self, sequence: Request, count: int) -> Request:
        if count:
            del sequence.items[len(sequence) - count :]
            del sequence.bytes[len(sequence) :]
            self._write_states(sequence, len(sequence) - 1)
        return self._done(sequence)

    def fork(self, sequence: Request, n: int = 1, **options: Any) -> list[Request]:
        return [self.forked(sequence, new) for new in self.cache.fork(sequence.id, n, **options).tolist()]

    def forked(self, parent: Request, new: int) -> Request:
        self.live[new] = replace(parent, id=new, items=[*parent.items], bytes=[*parent.bytes])
        return self._done(self.live[new])

    def reorder(self, sequences: Sequence[Request], parents: Sequence[int], **options: Any) -> None:
        self.cache.reorder([sequence.id for sequence in sequences], parents, **options)
        self.reordered(sequences, parents)

    def reordered(self, sequences: Sequence[Request], parents: Sequence[int]) -> None:
        before = [replace(sequence) for sequence in sequences]
        for sequence, place in zip(sequences, parents, strict=True):
            parent = before[place]
            sequence.items, sequence.bytes = [*parent.items], [*parent.bytes]
            sequence.namespace, sequence.cached = parent.namespace, parent.cached
        for sequence in sequences:
            self._done(sequence)

    def draft(self, sequence: Request, tokens: Sequence[int], parents: Sequence[int]) -> Request:
        """Append a tree of drafts: the parent of each is an earlier one, or -1. Their bytes are those of the path to
        them."""
        self.cache.append_tokens(sequence.id, list(tokens))
        return self.drafted(sequence, tokens, parents)

    def drafted(self, sequence: Request, tokens: Sequence[int], parents: Sequence[int]) -> Request:
        start, paths = len(sequence), list[list[Item]]()
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else sequence.items), (token, 0)])
        sequence.items = [*sequence.items, *(path[-1] for path in paths)]
        sequence.bytes = [*sequence.bytes, *(self.expected.of(sequence.namespace, path)[-1] for path in paths)]
        self.write(sequence, start)
        return self._done(sequence)

    def accept_drafts(self, sequence: Request, drafts: int, accepted: Sequence[int]) -> Request:
        """Keep a path of a tree of drafts."""
        self.cache.accept_drafts(sequence.id, drafts, list(accepted))
        return self.kept(sequence, drafts, accepted)

    def kept(self, sequence: Request, drafts: int, accepted: Sequence[int]) -> Request:
        start = len(sequence) - drafts
        sequence.items = [*sequence.items[:start], *(sequence.items[start + i] for i in accepted)]
        sequence.bytes = self.expected.of(sequence.namespace, sequence.items)
        if drafts:
            self._write_states(sequence, start if accepted else start - 1)
        return self._done(sequence)

    def _write_states(self, sequence: Request, start: int) -> None:
        """Compute the running state again where tokens are gone: in groups only."""

    def release(self, *sequences: Request, store: bool = True, **said: Any) -> None:
        for sequence in sequences:
            self.check(self.live.pop(sequence.id))
        self.cache.release([s.id for s in sequences], store=store, **said)
        self.cache.verify()

    def swap_out(self, *sequences: Request, **options: Any) -> int:
        copied = self.cache.swap_out([request.id for request in sequences], **options)
        for sequence in sequences:
            del self.live[sequence.id]
        self.cache.verify()
        return copied

    def resume(self, *sequences: Request, **options: Any) -> int:
        """Every byte of what comes back is compared."""
        copied = self.cache.resume([request.id for request in sequences], **options)
        for sequence in sequences:
            self.live[sequence.id] = sequence
            self._done(sequence)
        return copied

    def finish(self, sequence: Request, committed: int | None = None) -> None:
        """Commit all but the last token, whose KV an engine does not have yet (or `committed`), and release."""
        self.commit(sequence, max(len(sequence) - 1, sequence.cached) if committed is None else committed)
        self.release(sequence)

    def seed(self, tokens: Sequence[int], committed: int | None = None, **options: Any) -> int:
        """Add, commit, release with storing; how many tokens were cached."""
        sequence = self.add(tokens, **options)
        self.finish(sequence, committed)
        return sequence.cached

    def check_all(self) -> None:
        for sequence in self.live.values():
            self.check(sequence)

    def _done(self, sequence: Request) -> Request:
        self.check(sequence)
        self.cache.verify()
        return sequence


def open_engine(T: int, P: int, S: int, *, layout: dict[str, Any] | None = None, **options: Any) -> Engine:
    """An engine on a pool of its own; ``engine.clock`` is the pool's clock."""
    clock = Clock()
    cache = KVCacheManager(
        small_layout(T, **(layout or {})), device_blocks=P, host_blocks=S, device="cpu", clock=clock, **options
    )
    engine = Engine(cache)
    engine.clock = clock
    return engine


Make = Callable[..., Engine]


@dataclass
class EventReplay:
    """The set of cached keys per tier, rebuilt from events alone."""

    cached: dict[Any, set[bytes]] = field(default_factory=lambda: {"device": set(), "host": set()})
    last: int | None = None

    def feed(self, events: Iterable[Any]) -> None:
        for event in events:
            assert self.last is None or event.number == self.last, "a gap"
            self.last = event.next
            if event.kind == "cleared":
                for keys in self.cached.values():
                    keys.clear()
            elif event.kind in ("stored", "removed"):
                self._change(event)

    def place(self, event: Any) -> Any:
        return event.tier

    def _change(self, event: Any) -> None:
        known = self.cached[self.place(event)]
        keys = {key.tobytes() for key in np.asarray(event.keys)}
        if event.kind == "stored":
            assert not keys & known, "stored twice"
            known |= keys
        else:
            assert keys <= known, "removed what was not there"
            known -= keys
