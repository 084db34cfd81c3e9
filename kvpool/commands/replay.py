"""``python -m kvpool replay``: replays a trace, and reports what it reuses, moves and costs."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool.arrays.layout import PRESETS, BlockLayout
from kvpool.commands.terminal import (
    FAILED,
    INTERRUPTED,
    OK,
    Subparsers,
    add_tiers,
    add_trace,
    announce_compilation,
    check_format,
    complain,
    count_argument,
    declare,
    fraction_argument,
    port_argument,
    print_text,
    progress_bar,
    seconds_argument,
    size_argument,
    tier_blocks,
    trace_of,
)
from kvpool.errors import DeviceError, InsufficientMemory

if TYPE_CHECKING:
    from kvpool.pool.manager import KVCacheManager
    from kvpool.replay import ReplayConfig, Trace

_TRACE_BLOCKS = 50_000
# The sim device makes each copy in steps. So it gets a small pool and few requests, cut so short that many fit into
# the pool at once.
_SIM_BLOCKS, _SIM_REQUESTS, _SIM_SHARE = 2_000, 1_000, 32

_HELP = """\
Replay a request trace through a pool and report what it reused, moved and cost.

TRACE is a jsonl file, plain or gzip, or - for standard input, one request a line:
  mooncake  timestamp, input_length, output_length, hash_ids (512 tokens per id)
  qwen      the same with chat_id, parent_chat_id, type and turn (16 tokens per id)
  native    tokens, and output_tokens or output_length; salt, adapter_id, tenant, timestamp if any
A line may be a session of an agent instead, and TRACE a folder with one in each *.json: packed (session,
block, requests) or as recorded (id, block_size, requests). --users play them, each waits for its answers.
Without TRACE, a synthetic workload of chats with shared system prompts is replayed.

--device sim runs the pool's copies and a fake engine's kernels late and in any order that streams and
events allow, and fails on accesses that nothing orders and on writes that nobody declared.

exit status: 0 done, 1 verification failed or had nothing to verify, 2 wrong usage or a trace that cannot be read,
130 interrupted (the summary so far is printed)
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    replay = declare(subparsers, "replay", "replay a request trace and report reuse, moves and cost", _HELP, run)
    add_trace(replay)
    add_users(replay)
    seed = "of the synthetic workload and of --device sim (default: 0)"
    replay.add_argument("--seed", type=count_argument(0), default=0, metavar="N", help=seed)
    cut = "cut requests to N tokens (--device sim: default 1/32 of the device tier)"
    replay.add_argument("--cut", type=count_argument(2), metavar="N", help=cut)
    shape = replay.add_argument_group("pool")
    add_tiers(shape, 1)
    add = shape.add_argument
    add("--model", choices=sorted(PRESETS), help="block layout of a model, instead of --block-bytes")
    add("--block-bytes", type=size_argument, metavar="SIZE", help="bytes of a block (default: 4096)")
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16")
    device = "what holds and copies the blocks (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda", "sim"), default="auto", help=device)
    early = "how early --device sim works: 0 late, 1 at once (default: 0.5)"
    add("--progress", type=fraction_argument, metavar="P", help=early)
    _add_store(replay)
    add = replay.add_argument_group("run").add_argument
    active = "requests at the same time, at most (default: 64)"
    add("--active", type=count_argument(1), default=64, metavar="N", help=active)
    add("--partial", action=argparse.BooleanOptionalAction, default=True, help="reuse parts of blocks (default: on)")
    add("--verify", action="store_true", help="write all KV bytes; compare them at every reuse, copy and release")
    add("--json", action="store_true", help="print the summary as JSON")
    port = "serve metrics for Prometheus on this machine meanwhile; 0: any free port"
    add("--metrics-port", type=port_argument, metavar="N", help=port)


def add_users(parser: argparse.ArgumentParser) -> None:
    """Declare who plays the sessions of agents."""
    add = parser.add_argument_group("sessions of agents").add_argument
    add("--users", type=count_argument(1), metavar="N", help="who play them at the same time (default: 32)")
    pause = "the longest pause before a request, and between two sessions (default: 60)"
    add("--pause-max", type=seconds_argument, metavar="SECONDS", help=pause)


def reading_of(options: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """How a given trace is read, as arguments of ``read_trace``."""
    names = ("format", "users", "pause_max")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {**given, "limit": limit}


def _add_store(replay: argparse.ArgumentParser) -> None:
    add = replay.add_argument_group("store").add_argument
    add(
        "--store",
        metavar="STORE",
        help="keep blocks in disk:PATH, mooncake:HOST:PORT, peer:tcp://HOST:PORT or memory:, with ?option=value&... "
        "(extra `stores`); what an earlier run has left there is used, and the summary says how much",
    )
    wait = "how long to wait for saves, and for loads, before each request and at the end (default: 10)"
    add("--store-wait", type=seconds_argument, metavar="SECONDS", help=wait)


def run(options: argparse.Namespace) -> int:
    """Read the trace, replay it and print the summary."""
    announce_compilation()
    from kvpool.replay import ReplayConfig
    from kvpool.replay.workload import DEVICE_BLOCKS, HOST_BLOCKS

    check_format(options)
    sim = options.device == "sim"
    if options.progress is not None and not sim:
        options.error("--progress is of --device sim")
    layout, store = _layout(options), _store(options)
    defaults = (DEVICE_BLOCKS, HOST_BLOCKS) if options.trace is None else (_TRACE_BLOCKS, _TRACE_BLOCKS)
    device_default, host_default = (_SIM_BLOCKS, _SIM_BLOCKS) if sim else defaults
    config = ReplayConfig(
        layout,
        device_blocks=_blocks(options, "device", layout, device_default),
        host_blocks=_blocks(options, "host", layout, host_default),
        active=options.active,
        partial=options.partial,
        device=options.device,
        verify=options.verify,
        seed=options.seed,
        progress=0.5 if options.progress is None else options.progress,
        **store,
    )
    with ExitStack() as stack:
        try:
            show = stack.enter_context(_served(options.metrics_port))
        except (ImportError, OSError) as error:
            return complain(error)
        return _read_and_replay(options, config, show)


def _read_and_replay(options: argparse.Namespace, config: ReplayConfig, show: Callable[[KVCacheManager], None]) -> int:
    """Read or make the trace, replay it, and return the exit status."""
    from kvpool.replay import TraceError, read_trace

    sim = options.device == "sim"
    limit = options.limit or (_SIM_REQUESTS if sim else None)
    try:
        given = options.trace is not None
        trace = read_trace(options.trace, **reading_of(options, limit)) if given else trace_of(options, limit)
    except TraceError as error:
        return complain(error)
    cut = options.cut or (max(2, config.device_blocks * options.tokens_per_block // _SIM_SHARE) if sim else None)
    if cut is not None:
        trace = trace.cut(cut)
    # The trace lives until the end, so the collector need not scan it during a timed call.
    gc.collect()
    gc.freeze()
    try:
        return _replay(trace, config, show, as_json=options.json)
    finally:
        gc.unfreeze()


@contextmanager
def _served(port: int | None) -> Iterator[Callable[[KVCacheManager], None]]:
    """A function to call with the pool. From then on, the pool's metrics are served to this machine, until the context
    ends. Without a port the function does nothing."""
    if port is None:
        yield lambda cache: None
        return
    from kvpool.observe.metrics import served

    with served(port) as (metrics, address):
        print(f"metrics: {address}", file=sys.stderr, flush=True)
        yield partial(metrics.add, "replay")


def _replay(trace: Trace, config: ReplayConfig, show: Callable[[KVCacheManager], None], *, as_json: bool) -> int:
    """Replay, print the summary, and return the exit status. ``show`` is called with the pool before it is used."""
    from kvpool.replay import Replay

    status, interrupted = OK, False
    failure: AssertionError | None = None
    with progress_bar(len(trace.requests), "requests") as progress:
        try:
            replay = Replay(trace, config, progress=progress)
        except (DeviceError, InsufficientMemory, ValueError, ImportError, OSError) as error:
            return complain(error)
        show(replay.cache)
        try:
            replay.run()
        except KeyboardInterrupt:
            status, interrupted = INTERRUPTED, True
        except AssertionError as error:
            status, failure = FAILED, error
        try:
            replay.close()
        except AssertionError as error:
            status, failure = FAILED, failure or error
        summary = replay.summary(interrupted=interrupted, failure=failure)
        if status == OK and summary.verified is not None and not summary.verified.released_tokens:
            # A verification that compared no byte proves nothing.
            counts = f"{summary.requests:,} requests were replayed, {len(summary.skipped):,} skipped"
            status, failure = FAILED, AssertionError(f"nothing was verified: {counts}")
            summary = replay.summary(failure=failure)
    if failure is not None:
        complain(failure)
    print_text(json.dumps(summary.as_dict(), indent=2) if as_json else summary.text())
    return status


def _store(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the configuration that tell of a store."""
    if options.store is None:
        if options.store_wait is not None:
            options.error("--store-wait is of --store")
        return {}
    if options.device == "sim":
        options.error("--store has no --device sim, whose copies are made by one thread")
    from kvpool.stores.urls import open_store

    try:
        store = open_store(options.store)
    except (ValueError, ImportError, OSError) as error:
        return options.error(f"--store: {error}")
    return {"store": store, "store_wait": 10.0 if options.store_wait is None else options.store_wait}


def _layout(options: argparse.Namespace) -> BlockLayout:
    nbytes, tokens = options.block_bytes, options.tokens_per_block
    if options.model is not None:
        if nbytes is not None:
            options.error("--model decides the bytes of a block: leave out --block-bytes")
        if options.device_blocks is None and options.device_memory is None:
            options.error("--model needs --device-memory or --device-blocks")
        return BlockLayout.for_model(options.model, tokens_per_block=tokens)
    try:
        return BlockLayout.of_block_bytes(4096 if nbytes is None else nbytes, tokens)
    except ValueError as error:
        return options.error(f"--block-bytes: {error}")


def _blocks(options: argparse.Namespace, tier: str, layout: BlockLayout, default: int) -> int:
    """The blocks of a tier as given, or the workload's default."""
    given = tier_blocks(options, tier, layout)
    if given is None:
        # The blocks of a model are so large that it gets a host tier only if the user asks for one.
        return default if options.model is None else 0
    return given
