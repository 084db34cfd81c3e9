"""A prompt cache for mlx-lm, over a HostCache and stores. Only users of MLX import this module.

It takes the place of ``LRUPromptCache``. Prompts are kept in blocks of tokens, so that a prefix of several prompts is
kept once. What a layer has for a whole prompt only, such as a recurrent state or a rotating window, is kept as a
*snapshot* at the lengths at which mlx-lm hands a cache over.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from kvpool.common.arguments import int64_array
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing
from kvpool.errors import BlockNotFound, PoolClosed
from kvpool.hostcache.identity import ModelIdentity
from kvpool.integrations.local import Bytes, LocalBlocks, Places, prefix_keys, state_key, state_keys
from kvpool.integrations.options import MLX, PromptCacheOptions, files_digest
from kvpool.pool.explain import Missed

with MLX.imports():
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

log = MLX.log

FORMAT = "kvpool 3"
PIECE_BYTES_MIN = 16 << 10
"""The fewest bytes of a block, so that a snapshot is not in too many of them."""
_SETTINGS = ("group_size", "bits", "max_size", "keep", "chunk_size")
"""What the bytes of a cache depend on, besides shapes and types."""
Models = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class PromptCacheStats:
    """Totals since a prompt cache was made.

    Attributes
    ----------
    asked_tokens : int
        Tokens of all prompts that were looked up.
    reused_tokens : int
        Tokens of these whose KV was handed out.
    skipped : dict of str to int
        Caches that were not kept as a whole, by reason: "crowded" (no room), "batched" (of several sequences),
        "unknown" (of another model or layout), "ahead" (a state of more tokens than were named), and snapshots that
        were not used: "gone" (a part of it has left), "damaged" (not a snapshot of these layers).
    """

    asked_tokens: int
    reused_tokens: int
    skipped: dict[str, int]


class _Part(NamedTuple):
    """An array of a layer whose axis -2 is tokens, and where a block has its share of it."""

    leaf: int
    place: int
    heads: int
    width: int
    dtype: mx.Dtype
    first: int
    nbytes: int


class _CacheLayout:
    """How the caches of a model lie in blocks of ``tokens`` tokens.

    ``make`` gives empty caches, and ``filled`` are such caches with at least one token in each.
    """

    def __init__(self, make: Callable[[], list[Any]], filled: list[Any], tokens: int) -> None:
        self.make, self.tokens = make, tokens
        self.parts: list[_Part] = []
        self._leaves = [_described(leaf) for leaf in _leaves(filled)]
        self.block_bytes = 0
        self.states = 0
        """how many layers have a state for a whole prompt only"""
        names = []
        for number, leaf in enumerate(_leaves(filled)):
            arrays = _arrays(leaf)
            for place, array in enumerate(arrays):
                _, heads, _, width = array.shape
                nbytes = heads * tokens * width * array.itemsize
                self.parts.append(_Part(number, place, heads, width, array.dtype, self.block_bytes, nbytes))
                self.block_bytes += nbytes
            if not arrays:
                self.states += 1
            shapes = [(array.shape[1], array.shape[3], str(array.dtype)) for array in arrays]
            names.append((type(leaf).__name__, [getattr(leaf, name, None) for name in _SETTINGS], shapes))
        self.has_states = self.states > 0
        self.quantised = any(isinstance(leaf, QuantizedKVCache) for leaf in _leaves(filled))
        if self.has_states:
            self.block_bytes = max(self.block_bytes, PIECE_BYTES_MIN)
        self.text = hashlib.sha256(repr((tokens, names)).encode()).hexdigest()

    def covers(self, caches: list[Any]) -> bool:
        """Whether these are caches of this layout: of the same kinds, with the same settings and element types."""
        leaves = list(_leaves(caches))
        if [_described(leaf) for leaf in leaves] != self._leaves:
            return False
        arrays = [_arrays(leaf) for leaf in leaves]
        filled = [(part, arrays[part.leaf][part.place]) for part in self.parts if arrays[part.leaf]]
        return all(
            (array.shape[1], array.shape[3], array.dtype) == (part.heads, part.width, part.dtype)
            for part, array in filled
        )

    def write(self, caches: list[Any], places: Places, memory: Bytes, rows: Places) -> None:
        """Copy the blocks at ``places`` of the prompt to rows of the memory."""
        leaves = list(_leaves(caches))
        low, high = int(places.min()), int(places.max()) + 1
        for part in self.parts:
            tokens = _arrays(leaves[part.leaf])[part.place][0, :, low * self.tokens : high * self.tokens]
            blocks = tokens.reshape(part.heads, high - low, self.tokens, part.width).transpose(1, 0, 2, 3)
            block_bytes = _bytes_of(blocks).reshape(high - low, part.nbytes)
            memory[rows, part.first : part.first + part.nbytes] = block_bytes[places - low]
        memory[rows, sum(part.nbytes for part in self.parts) :] = 0

    def read(self, memory: Bytes, rows: Places, snapshot: dict[str, Any] | None) -> list[Any]:
        """Caches with the blocks in ``rows``, in the order of the prompt, and with a snapshot after them."""
        caches = self.make()
        leaf_arrays: dict[int, list[mx.array]] = {}
        for number, part in enumerate(self.parts):
            blocks = memory[rows, part.first : part.first + part.nbytes]
            array = _array_of(blocks, part.dtype, (len(rows), part.heads, self.tokens, part.width))
            array = array.transpose(1, 0, 2, 3).reshape(1, part.heads, -1, part.width)
            if snapshot is not None:
                array = mx.concatenate([array, snapshot["tails"][number]], axis=2)
            leaf_arrays.setdefault(part.leaf, []).append(array)
        states = iter(snapshot["states"] if snapshot is not None else ())
        for number, leaf in enumerate(_leaves(caches)):
            if number in leaf_arrays:
                _fill(leaf, leaf_arrays[number])
            else:
                leaf.state = next(states)
        mx.eval([leaf.state for leaf in _leaves(caches)])
        return caches

    def snapshot(self, caches: list[Any], length: int) -> bytes:
        """What belongs to the first ``length`` tokens and is in no block, in MLX's own form of bytes."""
        leaves = list(_leaves(caches))
        begun = length - length % self.tokens
        tails = [_arrays(leaves[part.leaf])[part.place][:, :, begun:length] for part in self.parts]
        flat = tree_flatten({"states": [leaf.state for leaf in leaves if not _arrays(leaf)], "tails": tails})
        arrays = {path: value for path, value in flat if isinstance(value, mx.array)}
        plain = {path: json.dumps(value) for path, value in flat if path not in arrays}
        file = io.BytesIO()
        mx.save_safetensors(file, arrays, plain)
        return file.getvalue()

    def opened(self, data: bytes) -> dict[str, Any]:
        """The snapshot that ``snapshot`` has put into bytes. Raises ValueError for anything else."""
        try:
            arrays, plain = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
            flat = [*arrays.items(), *((path, json.loads(text)) for path, text in plain.items())]
            snapshot: dict[str, Any] = tree_unflatten(flat)
            counts = len(snapshot.get("states", ())), len(snapshot.get("tails", ()))
        except (RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"no snapshot: {error!r}") from None
        if counts != (self.states, len(self.parts)):
            raise ValueError("no snapshot of these layers")
        return snapshot


class _Shelf(NamedTuple):
    """The caches of one layout of a model, in blocks."""

    layout: _CacheLayout
    blocks: LocalBlocks

    def find(self, tokens: list[int]) -> int:
        """How many first tokens of a prompt are here, or come from a store in time, and not its last one."""
        most, step = len(tokens) - 1, self.layout.tokens
        if not self.layout.has_states:
            return step * self.blocks.here(prefix_keys(tokens[:most], step)[1:])
        place = self.blocks.longest_state(state_keys(tokens, step, range(most, 0, -1)))
        return 0 if place is None else most - place

    def story(self, tokens: list[int], found: int) -> tuple[Mapping[str, int], Sequence[Missed]]:
        """For the log, before it is restored: from where the first tokens come that are ``found``, and why others do
        not, as far as they fill blocks."""
        step = self.layout.tokens
        came, missed = self.blocks.story(prefix_keys(tokens[:-1], step)[1:], found // step, step)
        came["host"] += found % step
        return came, missed

    def restore(self, tokens: list[int]) -> list[Any] | None:
        """Caches of these tokens. None if they have left, or the content is not a snapshot of these layers."""
        step, snapshot = self.layout.tokens, None
        keys = prefix_keys(tokens, step)[1:]
        try:
            if self.layout.has_states:
                data = self.blocks.state(state_key(tokens, step))
                if data is None:
                    return None
                snapshot = self.layout.opened(data)
            with self.blocks.opened(keys) as (memory, rows):
                return self.layout.read(memory, rows, snapshot)
        except BlockNotFound:
            self.blocks.skipped["gone"] += 1
        except ValueError:
            self.blocks.skipped["damaged"] += 1
        return None

    def insert(self, tokens: list[int], caches: list[Any]) -> None:
        """Keep the caches of a prompt, as far as they are not here yet."""
        leaves = list(_leaves(caches))
        step, blocks = self.layout.tokens, self.blocks
        held = min([leaf.offset for leaf in leaves if hasattr(leaf, "offset")], default=len(tokens))
        if not held or not tokens:
            return
        if any(array.shape[0] != 1 for leaf in leaves for array in _arrays(leaf)):
            blocks.skipped["batched"] += 1
            return
        kept_tokens = tokens[: min(held, len(tokens))]
        if self.layout.has_states and held > len(kept_tokens):
            blocks.skipped["ahead"] += 1
            return
        blocks.put(
            prefix_keys(kept_tokens, step)[1:],
            lambda places, rows: self.layout.write(caches, places, blocks.memory, rows),
        )
        if self.layout.has_states:
            blocks.put_state(state_key(kept_tokens, step), self.layout.snapshot(caches, len(kept_tokens)))
        blocks.poll()


class PromptCache(Closing):
    """Keeps prompts of mlx-lm in host memory and in stores, in blocks. It has the interface of ``LRUPromptCache``.

    Parameters
    ----------
    models : mlx.nn.Module or callable
        The model, or a callable that gives the models whose caches are handed over together: the model, and a draft
        model if there is one. It is called when a new model is named.
    tokens_per_block : int, default 64
        Tokens of a block.
    kv_bits : int or None, default None
        As for mlx-lm, if caches may be quantised.
    kv_group_size : int, default 64
        As for mlx-lm.
    quantized_kv_start : int, default 0
        As for mlx-lm.
    **options : PromptCacheOptions
        ``host_bytes``, and optionally others.

    Raises
    ------
    TypeError, ValueError
        For options that are missing or not accepted. The first call for a model raises ValueError if no block fits into
        the memory or if nothing identifies its weights, and what opening a store raises.

    Notes
    -----
    Memory is bounded by ``host_bytes``: for one model at a time, whose memory is allocated when it is named first. If
    another one is named, the blocks of the last are dropped; what is in stores stays. With ``kv_bits``, half of it is
    for quantised caches.

    Thread-safe, but MLX's arrays are not: call it from the thread that computes. ``fetch_nearest_cache`` waits for
    stores, for at most ``load_seconds`` a question. A thread begins the saves.
    """

    def __init__(
        self,
        models: Any,
        *,
        tokens_per_block: int = 64,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        **options: Unpack[PromptCacheOptions],
    ) -> None:
        self._models: Models = models if callable(models) and not hasattr(models, "layers") else lambda: [models]
        self._tokens = integer_argument("tokens_per_block", tokens_per_block, 1, 1 << 16)
        self._bits = None if kv_bits is None else integer_argument("kv_bits", kv_bits, 1, 16)
        self._group = integer_argument("kv_group_size", kv_group_size, 1, 1 << 16)
        self._quantised_from = integer_argument("quantized_kv_start", quantized_kv_start, 0, 1 << 62)
        self._options, self._version = MLX.read(options), MLX.checked_version()
        self._lock, self._closed = threading.RLock(), False
        self._name: Hashable = None
        self._shelves: list[_Shelf] = []
        self._asked = self._reused = 0
        self._skipped: Counter[str] = Counter()

    # -- what mlx-lm calls ---------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Hashable, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Caches with the longest known beginning of a prompt, and the tokens that are left: at least one.

        ``model`` names the model. The caches belong to the caller. (None, tokens) if nothing is known. Raises TypeError
        and ValueError for anything but integers in the int64 range, as ``insert_cache`` does.
        """
        int64_array("tokens", tokens)  # of any sign: the server names images by hashes
        with self._lock:
            self._turn_to(model)
            self._asked += len(tokens)
            hits = [(shelf.find(tokens), shelf) for shelf in self._shelves] if len(tokens) > 1 else []
            for count, shelf in sorted(hits, key=lambda hit: -hit[0]):
                story = shelf.story(tokens, count) if MLX.logs_requests() else None
                caches = shelf.restore(tokens[:count]) if count else None
                if story is not None and caches is not None:
                    MLX.log_request(*story)
                if caches is not None:
                    self._reused += count
                    return caches, tokens[count:]
            if MLX.logs_requests() and hits:
                MLX.log_request(*hits[0][1].story(tokens, 0))
            return None, tokens

    def insert_cache(
        self, model: Hashable, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep the caches of the first tokens of a prompt. They are copied, and stay the caller's. ``cache_type`` is
        not used: what is used least recently goes first."""
        int64_array("tokens", tokens)  # of any sign: the server names images by hashes
        with self._lock:
            self._turn_to(model)
            for shelf in self._shelves:
                if shelf.layout.covers(prompt_cache):
                    shelf.insert(tokens, prompt_cache)
                    return
            self._skipped["unknown"] += 1

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Does nothing: the memory has the size that ``host_bytes`` says, whatever is in it."""

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """The blocks in memory, for the log of ``mlx_lm.server``."""
        return {"blocks": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    def __len__(self) -> int:
        """The number of blocks in memory."""
        with self._lock:
            return sum(shelf.blocks.used for shelf in self._shelves)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in memory that have content."""
        with self._lock:
            return sum(shelf.blocks.used * shelf.blocks.block_bytes for shelf in self._shelves)

    # -- for its owner -------------------------------------------------------------------------------

    def stats(self) -> PromptCacheStats:
        with self._lock:
            skipped = sum((shelf.blocks.skipped for shelf in self._shelves), Counter(self._skipped))
            return PromptCacheStats(self._asked, self._reused, {name: n for name, n in skipped.items() if n})

    def clear(self) -> None:
        """Drop all blocks of the model that was named last, in memory and in its stores."""
        with self._lock:
            for shelf in self._shelves:
                shelf.blocks.clear()

    def drain(self, timeout: float) -> bool:
        """Wait until what was inserted is saved, at most ``timeout`` seconds for each layout. Returns whether it is."""
        with self._lock:
            return all(shelf.blocks.drain(timeout) for shelf in self._shelves)

    def close(self) -> None:
        """Close stores and free the memory. What is being saved is given up: call ``drain`` before."""
        with self._lock:
            self._closed = True
            self._drop()

    # -- models --------------------------------------------------------------------------------------

    def _turn_to(self, model: Hashable) -> None:
        """Have the shelves of a model."""
        if self._closed:
            raise PoolClosed("the prompt cache is closed")
        if self._shelves and self._name == model:
            return
        self._drop()
        models = [loaded for loaded in self._models() if loaded is not None]

        def plain() -> list[Any]:
            return [cache for part in models for cache in make_prompt_cache(part)]

        def quantised() -> list[Any]:
            return [
                cache.to_quantized(group_size=self._group, bits=self._bits) if isinstance(cache, KVCache) else cache
                for cache in plain()
            ]

        makers = [plain] if self._bits is None else [plain, quantised]
        try:
            for make in makers:
                layout = _CacheLayout(make, _filled(models, make()), self._tokens)
                if layout.has_states and self._options.policy != "lru":
                    raise ValueError(
                        "policy: expected 'lru' for this model, which needs the states at the ends that others evict, "
                        f"got {self._options.policy!r} in {MLX.place}"
                    )
                identity, memory = self._identity(model, layout), self._options.host_bytes // len(makers)
                blocks = LocalBlocks(layout.block_bytes, identity, memory, self._options, self._lock, MLX.history())
                self._shelves.append(_Shelf(layout, blocks))
        except BaseException:
            self._drop()
            raise
        self._name = model

    def _identity(self, model: Hashable, layout: _CacheLayout) -> ModelIdentity:
        """Whose KV it is. Raises ValueError if stores outlive the process and nothing identifies the weights."""
        # (model, adapter, draft model) of ``mlx_lm.server``, each of which may be None.
        folders = [str(part) for part in (model if isinstance(model, tuple) else (model,)) if part is not None]
        quantised = layout.quantised and self._quantised_from
        revision = self._options.weights
        if revision is None:
            lasts = bool(self._options.persistent)
            revision = " ".join(files_digest(folder, MLX.place) for folder in folders) if lasts else "of this process"
        return ModelIdentity(
            model=(repr(model) if isinstance(model, tuple) else " ".join(folders)) or "model",
            revision=revision or "of this process",
            kv_dtype=f"as MLX has it, quantised from token {quantised}" if quantised else "as MLX has it",
            layout=layout.text,
            hash_version=f"{FORMAT}, mlx-lm {self._version}, {mx.default_device().type}",
        )

    def _drop(self) -> None:
        for shelf in self._shelves:
            self._skipped += shelf.blocks.skipped
            shelf.blocks.close()
        self._shelves = []


def _filled(models: Sequence[Any], caches: list[Any]) -> list[Any]:
    """The caches after one token."""
    rest = list(caches)
    for model in models:
        count = len(make_prompt_cache(model))
        mx.eval(model(mx.array([[0]]), cache=rest[:count]))
        rest = rest[count:]
    return caches


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of single layers."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _described(leaf: Any) -> tuple[Any, ...]:
    """The settings and shapes that identify the caches of a layer: other ones have other KV."""
    return (type(leaf), *(getattr(leaf, name, None) for name in _SETTINGS))


def _arrays(leaf: Any) -> list[mx.array]:
    """The arrays of a cache that can be cut between any two tokens; none, if it cannot be cut, or is empty."""
    if getattr(leaf, "keys", None) is None:
        return []
    if isinstance(leaf, KVCache):
        return [leaf.keys, leaf.values]
    return [*leaf.keys, *leaf.values] if isinstance(leaf, QuantizedKVCache) else []


def _fill(leaf: Any, arrays: list[mx.array]) -> None:
    """Give a cache its arrays, which have as many tokens as it shall have."""
    half = len(arrays) // 2
    keys, values = (arrays[0], arrays[1]) if isinstance(leaf, KVCache) else (arrays[:half], arrays[half:])
    leaf.keys, leaf.values, leaf.offset = keys, values, arrays[0].shape[2]


def _bytes_of(array: mx.array) -> Bytes:
    """The bytes of an array in C order."""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8), copy=False)


def _array_of(data: Bytes, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """An array of these bytes, which are copied."""
    return mx.array(np.ascontiguousarray(data).reshape(-1)).view(dtype).reshape(shape)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``mlx_lm.server`` with a ``PromptCache``.

    For example ``python -m kvpool.integrations.mlx --host-bytes 8GiB --model ...``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvpool.integrations.mlx",
        allow_abbrev=False,
        description="mlx_lm.server with kvpool's prompt cache. Other options are those of mlx_lm.server.",
    )
    parser.add_argument("--host-bytes", required=True, help="memory for prompts, such as 8GiB")
    parser.add_argument("--store", action="append", default=[], help="such as disk:/var/kv?capacity=100GiB")
    parser.add_argument("--weights", help="a name of the weights; for a folder, its files identify them")
    parser.add_argument("--tokens-per-block", type=int, default=64)
    options, rest = parser.parse_known_args(arguments)
    with MLX.imports():
        from mlx_lm import server
    providers: list[Any] = []
    make_provider: Any = server.ModelProvider

    def provider(*values: Any) -> Any:
        providers.append(make_provider(*values))
        return providers[-1]

    def prompt_cache(*_: Any) -> PromptCache:
        arguments = providers[-1].cli_args
        return PromptCache(
            lambda: [providers[-1].model, providers[-1].draft_model],
            tokens_per_block=options.tokens_per_block,
            kv_bits=arguments.kv_bits,
            kv_group_size=arguments.kv_group_size,
            quantized_kv_start=arguments.quantized_kv_start,
            host_bytes=options.host_bytes,
            stores=options.store,
            weights=options.weights,
        )

    vars(server).update(ModelProvider=provider, LRUPromptCache=prompt_cache)
    sys.argv = ["mlx_lm.server", *rest]
    server.main()


if __name__ == "__main__":
    main()
