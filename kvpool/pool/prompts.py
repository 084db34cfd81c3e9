"""Prompts: calls that take them. What a prompt is hashed to, what it would reuse and need, sequences for a batch of
prompts, and which prompts a pool can never admit, however long they wait. LayerLoads: what one
admission brings from the host, some layers after the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from kvpool.common.arguments import (
    INTEGERS,
    TOKENS,
    Ids,
    Integers,
    adapter_argument,
    bool_argument,
    count_array,
    encoder_argument,
    extra_array,
    id_array,
    is_integer,
    list_argument,
    salt_argument,
    token_array,
)
from kvpool.common.arrays import Int32s, Int64s, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, StreamLike
from kvpool.device.regions import Layers
from kvpool.pool.core import KEEP_GIL_TOKENS, Core
from kvpool.pool.exclusive import allowed_inside
from kvpool.pool.keys import Admission, BlockKeys, Match, Plan, Prompt, Scope, request_of
from kvpool.pool.prompt_requests import NO_KEYS, Arrivals, PromptRequests, Retention, Rows
from kvpool.state import admission_plan, admit, records, requests, verbs
from kvpool.state.arrays import State

PARTS_MAX = 1 << 16
_ID, _REUSED = records.OUT.id, slice(records.OUT.cached, records.OUT.missed + 1)


class LayerLoads:
    """The loads of an admission from the host, split by layers. Made by ``Imports.layer_loads``.

    Pass it as ``loads`` to ``KVCacheManager.add_sequence_batch``, and call ``wait`` for each layer before its kernel is
    enqueued: until then, the blocks of the layer may contain anything.

    Attributes
    ----------
    stream : Stream
        The stream of the admission.
    parts : int
        The number of parts into which the layers are split.
    events : list of DeviceEvent
        One for each part; empty where nothing is loaded.

    Notes
    -----
    Thread-safe, for one admission at a time. A call that reports work on the stream, such as ``commit`` and
    ``release``, makes the stream wait for all layers. So make such calls before the admission, or after the last layer.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=4, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
    ...     loads = cache.imports.layer_loads(parts=2)
    ...     admission = cache.add_sequence_batch([[1, 2, 3, 4, 5]], loads=loads)
    ...     for layer in range(4):
    ...         loads.wait(layer)  # then enqueue the kernels of that layer
    ...     cache.commit(admission.ids)
    ...     cache.release(admission.ids)
    """

    def __init__(self, core: Core, stream: Stream, parts: int) -> None:
        self.core, self.stream, self.parts = core, stream, parts
        self.events: list[DeviceEvent] = []

    def wait(self, layer: int, *, stream: StreamLike = None, group: int | None = None) -> None:
        """Make work that is enqueued from now on wait for a layer. The caller does not wait.

        Parameters
        ----------
        layer : int
            The index of the layer in its group, over all layouts of the group.
        stream : Stream, int, or stream of another package, optional
            The stream that waits, by default the one of the admission.
        group : int, optional
            The index of a group of layers, required where there are several.

        Raises
        ------
        TypeError, ValueError
            For a layer or a group that the pool does not have, and for a stream on which no work can be enqueued.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.
        """
        config = self.core.config
        layers = sum(layout.layers for layout in config.groups[config.group(group)].layouts)
        layer = integer_argument("layer", layer, 0, layers - 1)
        on = self.core.as_stream(self.stream if stream is None else stream)
        events = self.events  # another admission may begin meanwhile
        if events:
            self.core.transfer.wait_for(on, events[Layers.that_has(layer, layers, self.parts)])


def loads_argument(core: Core, loads: object, stream: object) -> Stream:
    """The stream of an admission with ``loads``. Raises TypeError, ValueError: for those of another pool, and for a
    ``stream`` beside them. Raises RuntimeError inside ``exclusive``."""
    if not isinstance(loads, LayerLoads):
        raise TypeError(f"loads: expected what layer_loads gave, got {loads!r:.80}")
    if loads.core is not core or stream is not None:
        raise ValueError(
            f"loads, stream: expected what layer_loads of this pool gave, without stream=, got stream={stream!r:.80}"
        )
    if core.is_exclusive:
        raise RuntimeError("loads: expected None inside exclusive, got LayerLoads")
    return loads.stream


class Prompts:
    """The calls of a pool that take prompts. Thread-safe."""

    def __init__(self, core: Core, requests: PromptRequests) -> None:
        self.core, self._requests = core, requests

    # -- keys ------------------------------------------------------------------------------------

    def block_keys(
        self,
        tokens: Prompt,
        *,
        salt: bytes | str | None = None,
        adapter_id: int | str | None = None,
        extra_ids: Integers | None = None,
        reuse: bool = True,
        publish: bool = True,
    ) -> BlockKeys:
        """Hash a prompt once, for every call that takes a prompt.

        Parameters
        ----------
        tokens : array_like of int, shape (n,), or BlockKeys
            Token ids from 0 to 2**31 - 1; or, without other arguments, BlockKeys that were copied or unpickled, to be
            verified so that they can be extended.
        salt : bytes or str, optional
            With ``adapter_id``, the namespace. Equal tokens in different namespaces never match.
        adapter_id : int or str, optional
            The adapter, such as a LoRA, with which the KV is computed.
        extra_ids : array_like of int, shape (n,), optional
            Distinguish tokens whose ids are equal, such as placeholders of images. Any int64; 0 is none.
        reuse : bool, default True
            With False, a request with this prompt computes all of its tokens, as for logprobs of the prompt:
            ``match_prefix`` and admission find nothing. What it computes is cached for others, as with vLLM's
            ``skip_reading_prefix_cache``. It counts as ``bypassed_tokens``, and in no other figure of prompts.
        publish : bool, default True
            With False, others never find what a request with this prompt computes. With both False, it leaves no trace
            in the cache.

        Returns
        -------
        BlockKeys
            The prompt with the keys of its full blocks.

        Raises
        ------
        TypeError
            For a bad argument, and for other arguments with BlockKeys.
        ValueError
            For a bad argument.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Reads no state, and takes no lock.
        """
        self.core.check_open()
        plain = salt is None and adapter_id is None and reuse is True and publish is True
        if plain:
            scope = self._requests.plain
        else:
            switches = bool_argument("reuse", reuse), bool_argument("publish", publish)
            names = salt_argument(salt), adapter_argument(adapter_id)
            scope = Scope(*names, self._requests.root(*names), self._requests.origin, *switches)
        if isinstance(tokens, BlockKeys):
            if not plain or extra_ids is not None:
                raise TypeError(
                    "salt, adapter_id, extra_ids, reuse, publish: expected none with BlockKeys, which have them"
                    ", got some"
                )
            return self._requests.own([tokens])[0]
        ids = token_array("tokens", tokens)
        # Of private tokens: what is hashed is what is compared and stored, whatever becomes of the caller's buffer.
        return BlockKeys.of_private(ids, NO_KEYS, extra_array(extra_ids, len(ids)), scope, self.core.states.groups)

    @overload
    def keys_of(self, ids: int | np.integer[Any]) -> BlockKeys: ...
    @overload
    def keys_of(self, ids: Integers) -> list[BlockKeys]: ...
    def keys_of(self, ids: Ids) -> BlockKeys | list[BlockKeys]:
        """Return the tokens of live sequences, decoded ones included, as prompts.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.

        Returns
        -------
        BlockKeys or list of BlockKeys
            One for one id, a list for several. They have the namespace of the sequence, and the keys that are computed
            already: ``keys_of(id).extend(text)``, for the next turn of a conversation, hashes only new blocks. For a
            sequence that publishes nothing, they have ``publish=False``.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, for a sequence without tokens, and where no group of layers has all tokens any more:
            then extend the BlockKeys that the sequence was added with.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        which, state = id_array("ids", ids), self._whole()
        with self.core.lock, self.core.changes:
            rows = [self._read(state, row) for row in self.core.rows(which).tolist()]
        prompts = [BlockKeys.of_private(*row, self.core.states.groups) for row in rows]
        return prompts[0] if is_integer(ids) else prompts

    def _whole(self) -> State:
        """The group whose rows have most of their tokens: all, unless it has a window. Raises ValueError."""
        with_tokens = [group for group in self.core.config.groups if group.kind == "attention"]
        if not with_tokens:
            raise ValueError(
                "keys_of: the states of recurrent layers have no tokens: extend the BlockKeys that were added"
            )
        whole = [group for group in with_tokens if group.window is None]
        return self.core.states[(whole or with_tokens)[0].index]

    def _read(self, state: State, row: int) -> tuple[Int32s, Uint64s, Int64s | None, Scope]:
        """What is known of a live row. The state lock is held by the caller."""
        sequence, width = state.sequences[row], self.core.config.tokens_per_block
        length = int(sequence["length"])
        if length == 0:
            raise ValueError(f"ids: sequence {int(sequence['generation']) << 32 | row} has no tokens, and so no keys")
        tokens, keys = np.empty(length, np.int32), np.empty((length // width, 2), np.uint64)
        extra = np.zeros(length if state.header.has_extra else 0, np.int64)
        known = requests.read_row(state.groups, state.group, row, tokens, extra, keys)
        if known < 0:
            raise ValueError(
                "ids: a window has passed tokens of a sequence: extend the BlockKeys that it was added with"
            )
        tag, root = int(sequence["namespace"]), (int(sequence["root0"]), int(sequence["root1"]))
        name = self.core.names.known[tag]
        scope = Scope(name.salt, name.adapter_id, (tag, *root), self._requests.origin, publish=not sequence["private"])
        return tokens, keys[:known], extra if extra.any() else None, scope

    # -- what would be reused and needed ---------------------------------------------------------

    @allowed_inside
    def match_prefix(self, prompt: Prompt) -> Match:
        """Return what a prompt would reuse if it were added now. Its last token is never reused.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt.

        Returns
        -------
        Match
            The tokens in full blocks, which an admission gets in any batch, and those in a part of a block, which it
            gets unless blocks are short: ``plan_batch`` plans a batch.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        return self._requests.match(self._requests.keys(prompt))

    def blocks_needed(
        self,
        prompt: Prompt | None = None,
        *,
        sequences: Ids | None = None,
        new_tokens: Ids = 0,
        group: int | None = None,
        encoder_tokens: int | None = None,
    ) -> int:
        """Return how many free device blocks a prompt needs, or the growth of live sequences.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,), optional
            The prompt, with room for ``new_tokens`` more. Not with ``sequences``.
        sequences : int or array_like of int, shape (m,), optional
            Ids of live sequences, each to grow by ``new_tokens``.
        new_tokens : int or array_like of int, shape (m,), default 0
            Number of tokens, one for all or one for each sequence.
        group : int, optional
            The index of a group of layers, required where there are several.
        encoder_tokens : int, optional
            The tokens of the encoder, required with a prompt if the group is for cross attention.

        Returns
        -------
        int
            Number of blocks. A reusable block reduces it only if somebody holds it: a cached block that nobody holds
            counts as free.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        UnknownSequence
            For an id that is not a live sequence.
        DeviceError, PoolClosed
            Where a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        if (prompt is None) == (sequences is None):
            raise TypeError(f"prompt, sequences: expected exactly one of them, got {prompt!r:.80}, {sequences!r:.80}")
        if sequences is None:
            return self._needed(prompt, new_tokens, group, encoder_tokens)
        if encoder_tokens is not None:
            raise ValueError(
                "encoder_tokens: expected None for sequences, which have their encoder's blocks, got "
                f"{encoder_tokens!r:.80}"
            )
        core, which, ids = self.core, self.core.config.group(group), id_array("sequences", sequences)
        counts = count_array("new_tokens", np.full(len(ids), new_tokens) if is_integer(new_tokens) else new_tokens, ids)
        with core.lock, core.changes:
            core.check_open()
            # A private array, since a signal handler may decide before it is read.
            needs = np.empty(len(core.states), np.int64)
            error = verbs.growth_needs(core.states.groups, ids, counts, needs)
            if error:
                raise core.refusal(error, ids)
        return int(needs[which])

    def _needed(self, prompt: object, new_tokens: object, group: object, encoder_tokens: object) -> int:
        """The free device blocks of a group that a prompt and ``new_tokens`` more tokens take."""
        keys, config, which = self._requests.keys(prompt), self.core.config, self.core.config.group(group)
        more = integer_argument("new_tokens", new_tokens, 0, (1 << 31) - 1)
        crosses = config.groups[which].kind == "cross"
        tokens = len(keys) + more
        if crosses or encoder_tokens is not None:
            tokens = int(encoder_argument("encoder_tokens", encoder_tokens, 1, crosses)[0])
        columns, match = -(-tokens // self._requests.width), self._requests.look_up(request_of(keys))[0][which]
        if config.groups[which].kind == "recurrent":
            columns = match[3] + requests.fresh_of(self.core.states.groups, which, request_of(keys), match[3], columns)
        return int(columns - match[4])

    def plan_batch(self, prompts: Sequence[Prompt], *, encoder_tokens: Integers | None = None) -> Plan:
        """Return what ``add_sequence_batch`` would do with prompts now, without doing it.

        Parameters
        ----------
        prompts : sequence of BlockKeys or of array_like of int
            The prompts.
        encoder_tokens : array_like of int, shape (n,), optional
            As in ``add_sequence_batch``.

        Returns
        -------
        Plan
            How many prompts fit, what each would reuse, and the blocks that all take together; also which live sequence
            is computing what a prompt lacks.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing. The plan is exact until the pool changes: if it has all prompts and refuses none,
        the batch is admitted whole; otherwise its head is, with ``allow_partial_batch``. A scheduler can hold a prompt
        back until the sequence ``Plan.computing`` has committed ``Plan.computing_tokens``, so that these are computed
        once.
        """
        core, keys = self.core, self._requests.all_keys(list_argument("prompts", prompts))
        rows = self._requests.rows(keys, encoder_tokens)
        refused = self._requests.refused(keys, rows)
        kept = [i for i in range(len(keys)) if i not in refused]
        rows, groups = rows[kept], len(core.states)
        out = np.full((groups, len(kept), records.OUTCOME_COLUMNS), records.NONE, np.int64)
        blocks, computing = np.empty(groups, np.int64), np.empty((len(kept), 2), np.int64)
        with core.lock, core.changes:
            core.check_open()
            # The same call undoes its claims.
            n = core.changes.run(partial(admission_plan.plan, core.states.groups, rows, out, blocks, computing))
        outcomes, ahead = self._joined(out[:, :n]), computing[:n]
        if refused:
            outcomes, ahead = (_spread(each, kept, len(keys)) for each in (outcomes, ahead))
        cached, device, host, part, missed = outcomes[:, records.OUT.cached : records.OUT.missed + 1].T.astype(np.int32)
        taken = int(blocks[0]) if groups == 1 else blocks
        tokens = ahead[:, 1].astype(np.int32)
        return Plan(cached, device, host, part, missed, taken, ahead[:, 0].copy(), tokens, refused)

    # -- admission -------------------------------------------------------------------------------

    @allowed_inside
    def add_sequence(
        self,
        prompt: Prompt,
        *,
        retention: Retention | None = None,
        decode_priority: int = records.DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None,
        stream: StreamLike = None,
        encoder_tokens: int | None = None,
    ) -> int:
        """Admit one prompt: reuse its cached prefix, and take blocks for the rest.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt. ``block_keys`` gives it a salt, an adapter or extra ids.
        retention : sequence of RetentionRange, optional
            How long to keep the blocks of ranges of its tokens.
        decode_priority : int, default 35
            0 (evicted first) to 100 (evicted last), of blocks that are filled after the prompt.
        decode_ttl_ms : int, optional
            Milliseconds after release from which these blocks have the default priority. By default they keep theirs.
        stream : Stream, int, or stream of another package, optional
            The stream of the engine, which uses the blocks.
        encoder_tokens : int, optional
            The tokens of the encoder, required if there is a group for cross attention.

        Returns
        -------
        int
            The id of the sequence.

        Raises
        ------
        OutOfBlocks, OutOfSequences
            Where too few device blocks or rows are free. The prompt may fit later.
        TypeError, ValueError
            For a bad argument, and for a prompt that can never fit.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool.
        """
        ranges = None if retention is None else [retention]
        keys = self._requests.hashed("prompt", prompt)
        arrivals = self._requests.arrivals([keys], ranges, decode_priority, decode_ttl_ms, False, encoder_tokens)
        return int(self._admit(arrivals, stream)[0][0, records.OUT.id])

    @allowed_inside
    def add_sequence_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        retention: Sequence[Retention | None] | None = None,
        decode_priority: int = records.DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None,
        stream: StreamLike = None,
        allow_partial_batch: bool = False,
        encoder_tokens: Integers | None = None,
        loads: LayerLoads | None = None,
    ) -> Admission:
        """Admit prompts: reuse what is cached on either tier, and take blocks for the rest.

        Parameters
        ----------
        prompts : sequence of BlockKeys or of array_like of int
            The prompts.
        retention : sequence of (sequence of RetentionRange or None), optional
            How long to keep the blocks of ranges of the tokens, for each prompt.
        decode_priority : int, default 35
            0 (evicted first) to 100 (evicted last), of blocks that are filled after the prompt.
        decode_ttl_ms : int, optional
            Milliseconds after release from which these blocks have the default priority. By default they keep theirs.
        stream : Stream, int, or stream of another package, optional
            The stream of the engine, which uses the blocks.
        allow_partial_batch : bool, default False
            Whether to admit the first prompts that fit, if not all do. A prompt that can never fit does not end them:
            ``Admission.refused`` names it.
        encoder_tokens : array_like of int, shape (n,), optional
            The tokens of the encoder for each prompt, required if there is a group for cross attention.
        loads : LayerLoads, optional
            For an engine that computes the first layers while others are loaded from the host: the result of
            ``Imports.layer_loads``, whose stream then waits for a layer only in ``LayerLoads.wait``. Not with
            ``stream``.

        Returns
        -------
        Admission
            The ids of the sequences, and what each reuses.

        Raises
        ------
        OutOfBlocks, OutOfSequences
            Where too few device blocks or rows are free. The batch may fit later.
        TypeError, ValueError
            For a bad argument, and for a prompt that can never fit.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool, for the whole batch or not at all, unless ``allow_partial_batch`` is set. All
        prompts are matched before anything is taken, so each gets the full blocks that ``match_prefix`` returned
        immediately before.
        """
        arrivals = self._requests.arrivals(
            prompts, retention, decode_priority, decode_ttl_ms, allow_partial_batch, encoder_tokens
        )
        on = stream if loads is None else loads_argument(self.core, loads, stream)
        return as_admission(*self._admit(arrivals, on, loads=loads))

    def _admit(
        self,
        arrivals: Arrivals,
        stream: Stream | Any,
        loads: LayerLoads | None = None,
    ) -> tuple[Rows, dict[int, str]]:
        """Admit a batch. Returns the outcome rows (see ``state.records``) of the first requests, with the groups
        joined, and which requests of the batch can never fit, and why: their rows have the id -1."""
        core, (keys, rows, _, some) = self.core, arrivals
        refused = self._requests.refused(keys, rows)
        if refused and not some:
            first = next(iter(refused))
            raise ValueError(f"{'prompt' if len(keys) == 1 else f'prompts[{first}]'}: {refused[first]}")
        kept = [i for i in range(len(keys)) if i not in refused] if refused else None
        if kept is not None:
            rows, keys = rows[kept], [keys[i] for i in kept]
        out = np.empty((len(core.tables), len(keys), records.OUTCOME_COLUMNS), INTEGERS)
        out.fill(records.NONE)
        on = NULL_STREAM if stream is None else stream
        run = admit.admit
        if sum(map(len, keys)) <= KEEP_GIL_TOKENS:
            run = getattr(run, "keep_gil", run)
        learn = partial(core.names.learn, keys)  # Events will name the namespaces of the prompts.
        finish = None if loads is None else partial(self._load, loads)
        n = core.decide(on, run, rows, out, core.now(), some, first=learn, finish=finish)
        outcomes = out[0, :n] if len(out) == 1 else self._joined(out[:, :n])
        return outcomes if kept is None else _spread(outcomes, kept, len(kept) + len(refused)), refused

    def _load(self, loads: LayerLoads, admitted: int) -> None:
        if admitted >= 0:
            self.core.transfer.put_layers(loads)

    def _joined(self, out: Rows) -> Rows:
        """The outcomes of all groups as one, as ``Admission`` has them."""
        joined = out[int(self.core.tokens.group)].copy()
        full, host = (
            joined[:, records.OUT.cached] - joined[:, records.OUT.partial],
            out[:, :, records.OUT.host_tokens].max(axis=0),
        )
        joined[:, records.OUT.device_tokens], joined[:, records.OUT.host_tokens] = full - host, host
        return joined

    # -- what a pool has room for if nothing else lives in it ------------------------------------


def _spread(outcomes: Rows, kept: list[int], count: int) -> Rows:
    """Spread the outcomes of the ``kept`` requests over the rows of a batch of ``count``, up to the first request that
    waits."""
    end = kept[len(outcomes)] if len(outcomes) < len(kept) else count
    rows = np.zeros((end, outcomes.shape[1]), np.int64)
    rows[:, records.OUT.id] = records.NONE
    rows[kept[: len(outcomes)]] = outcomes
    return rows


def as_admission(out: Int64s, refused: dict[int, str]) -> Admission:
    columns = out.T
    cached, device, host, part, missed = columns[_REUSED].astype(TOKENS)
    return Admission(columns[_ID].copy(), cached, device, host, part, missed, refused)
