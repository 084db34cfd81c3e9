"""``python -m kvpool replay``: replays a trace, and reports what it reuses, moves and costs."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.progress import shown_progress
from kvpool.errors import DeviceError, InsufficientMemory
from kvpool.integrations.options import POLICIES
from kvpool.tools.cli import terminal
from kvpool.tools.cli.terminal import FAILED, INTERRUPTED, OK, blaming_the_user, count_argument

if TYPE_CHECKING:
    from kvpool.pool.manager import KVCacheManager
    from kvpool.tools.replay import ReplayConfig, Summary, Trace

_TRACE_BLOCKS = 50_000
# The sim device makes each copy in steps. So it gets a small pool and few requests, cut so short that many fit into
# the pool at once.
_SIM_BLOCKS, _SIM_REQUESTS, _SIM_SHARE = 2_000, 1_000, 32
_SMALL = "--limit 12 --cut 64 --device-blocks 24 --host-blocks 24 --active 4"
"""Options of a replay that calls what others call, on the CPU, and takes a moment in the interpreter."""


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    replay = terminal.declare(subparsers, "replay", "replay a request trace and report reuse, moves and cost", run)
    terminal.add_trace(replay)
    seed = "of the synthetic workload and of --device sim (default: 0)"
    replay.add_argument("--seed", type=count_argument(0), default=0, metavar="N", help=seed)
    cut = "cut requests to N tokens (--device sim: default 1/32 of the device tier)"
    replay.add_argument("--cut", type=count_argument(2), metavar="N", help=cut)
    shape = replay.add_argument_group("pool")
    terminal.add_tiers(shape, 1)
    add = shape.add_argument
    add("--model", metavar="MODEL", help=f"block layout of a model, instead of --block-bytes: {terminal.MODELS}")
    add("--block-bytes", type=terminal.size_argument, metavar="SIZE", help="bytes of a block (default: 4096)")
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16")
    which = shape.add_mutually_exclusive_group()
    which.add_argument("--policy", choices=POLICIES, default="lru", help="which cached block goes next")
    names = "only hits, of these policies beside LRU and what knowing the future finds (default: all); copies nothing"
    which.add_argument("--policies", nargs="*", choices=POLICIES, metavar="NAME", help=names)
    device = "what holds and copies the blocks (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda", "sim"), default="auto", help=device)
    early = "how early --device sim works: 0 late, 1 at once (default: 0.5)"
    add("--progress", type=terminal.fraction_argument, metavar="P", help=early)
    add = replay.add_argument_group("store").add_argument
    store = (
        "keep blocks in disk:PATH, mooncake:HOST:PORT, peer:tcp://HOST:PORT, s3://BUCKET/PREFIX or memory:, with "
        "?option=value&... (extra `stores`); what an earlier run has left there is used, and the summary says how much"
    )
    add("--store", metavar="STORE", help=store)
    wait = "how long to wait for saves, and for loads, before each request and at the end (default: 10)"
    add("--store-wait", type=terminal.seconds_argument, metavar="SECONDS", help=wait)
    add = replay.add_argument_group("run").add_argument
    active = "requests at the same time, at most (default: 64)"
    add("--active", type=count_argument(1), default=64, metavar="N", help=active)
    add("--partial", action=argparse.BooleanOptionalAction, default=True, help="reuse parts of blocks (default: on)")
    add("--verify", action="store_true", help="write all KV bytes; compare them at every reuse, copy and release")
    add("--json", action="store_true", help="print the summary as JSON")
    port = "serve metrics for Prometheus on this machine meanwhile; 0: any free port"
    add("--metrics-port", type=terminal.port_argument, metavar="N", help=port)


def run(options: argparse.Namespace) -> int:
    """Replay a request trace through a pool and report what it reused, moved and cost.

    TRACE is a jsonl file, plain or gzip, or - for standard input, one request a line:
      mooncake  timestamp, input_length, output_length, hash_ids (512 tokens per id)
      qwen      the same with chat_id, parent_chat_id, type and turn (16 tokens per id)
      native    tokens, and output_tokens or output_length; salt, adapter_id, tenant, timestamp if any
    A line may be a session of an agent instead, and TRACE a folder with one in each *.json: packed (session,
    block, requests) or as recorded (id, block_size, requests). --users play them, each waits for its answers.
    Without TRACE, a synthetic workload of chats with shared system prompts is replayed.

    The pool's clock has the times of the trace; without times, a request comes each second.

    --policies prints one table: the hits in full blocks of each policy. MIN evicts the block whose next use is last:
    no cache of both tiers' size finds more.

    --device sim runs the pool's copies and a fake engine's kernels late and in any order that streams and
    events allow, and fails on accesses that nothing orders and on writes that nobody declared.

    exit status: 0 done, 1 verification failed or had nothing to verify, 2 wrong usage or a trace that cannot be read,
    130 interrupted (the summary so far is printed)
    """
    terminal.announce_compilation()
    sim = options.device == "sim"
    small = ["replay", *_SMALL.split(), "--policy", options.policy]
    with ExitStack() as stack:
        stack.enter_context(terminal.compiling_together(f"from kvpool.__main__ import main; main({small})"))
        config = _config(options, sim)
        with blaming_the_user(ImportError, OSError):
            show = stack.enter_context(_served(options.metrics_port))
        trace = terminal.trace_of(options, options.limit or (_SIM_REQUESTS if sim else None))
        if options.cut or sim:
            tokens = config.device_blocks * config.layout.tokens_per_block
            trace = trace.cut(options.cut or max(2, tokens // _SIM_SHARE))
        if options.policies is not None:
            return _compare(options, trace, config)
        stack.callback(gc.enable)
        stack.callback(gc.unfreeze)
        gc.disable()
        status, summary = _replay(trace, config, show)
    if summary.failure is not None:
        terminal.complain(AssertionError(summary.failure))
    terminal.print_result(options, summary.as_dict(), summary.text())
    return status


def _config(options: argparse.Namespace, sim: bool) -> ReplayConfig:
    """What is replayed how. Exits with a message if options do not fit each other."""
    from kvpool.tools.replay import ReplayConfig
    from kvpool.tools.replay.traces import DEVICE_BLOCKS, HOST_BLOCKS

    terminal.reading_of(options)
    if options.progress is not None and not sim:
        options.error("--progress is of --device sim")
    if options.store_wait is not None and options.store is None:
        options.error("--store-wait is of --store")
    if options.policies is not None:
        switches = {"--verify": options.verify, "--store": options.store, "--device sim": sim}
        switches["--metrics-port"] = options.metrics_port is not None
        for name in [name for name, wanted in switches.items() if wanted]:
            options.error(f"{name} is not for --policies, which copies nothing")
    layout = _layout(options)
    device, host = (_TRACE_BLOCKS, _TRACE_BLOCKS) if options.trace else (DEVICE_BLOCKS, HOST_BLOCKS)
    device, host = (_SIM_BLOCKS, _SIM_BLOCKS) if sim else (device, host)
    # The blocks of a model are so large that it gets a host tier only if the user asks for one.
    asked_blocks = [terminal.tier_blocks(options, tier, layout) for tier in ("device", "host")]
    defaults = device, host if options.model is None else 0
    device, host = (
        default if blocks is None else blocks for blocks, default in zip(asked_blocks, defaults, strict=True)
    )
    return ReplayConfig(
        layout,
        device,
        host,
        **{name: getattr(options, name) for name in ("active", "partial", "device", "policy", "verify", "seed")},
        progress=0.5 if options.progress is None else options.progress,
        store=_store(options),
        store_wait=10.0 if options.store_wait is None else options.store_wait,
    )


def _compare(options: argparse.Namespace, trace: Trace, config: ReplayConfig) -> int:
    """Print the table of policies. Returns the exit status."""
    from kvpool.tools.planner.replayed import compare_replayed

    policies = options.policies or POLICIES
    runs = len({"lru", *policies})
    with shown_progress(runs * len(trace.requests), " requests") as progress:
        table, interrupted = compare_replayed(trace.requests, config, policies, progress=progress)
    found = {name: {"device": hits.device, "host": hits.host} for name, hits in table.hits.items()}
    rates = {name: table.rate(sum(hits)) for name, hits in table.hits.items()} | {"MIN": table.rate(table.optimum)}
    names = {"trace": trace.name, "format": trace.format, "active": config.active, "interrupted": interrupted}
    figures = {**names, **asdict(table), "hits": found, "hit_rates": rates}
    terminal.print_result(options, figures, f"replay    {trace.name} ({trace.format})\n{table.text()}")
    return INTERRUPTED if interrupted else OK


@contextmanager
def _served(port: int | None) -> Iterator[Callable[[KVCacheManager], None]]:
    """A function to call with the pool. From then on, the pool's metrics are served to this machine, until the context
    ends. Without a port the function does nothing."""
    if port is None:
        yield lambda cache: None
        return
    from kvpool.integrations.metrics import served

    with served(port) as (metrics, address):
        print(f"metrics: {address}", file=sys.stderr, flush=True)
        yield partial(metrics.add, "replay")


def _replay(trace: Trace, config: ReplayConfig, show: Callable[[KVCacheManager], None]) -> tuple[int, Summary]:
    """The exit status and the summary of a replay. ``show`` is called with the pool before it is used."""
    from kvpool.tools.replay import Replay

    status, interrupted = OK, False
    failure: AssertionError | None = None
    with shown_progress(len(trace.requests), " requests") as progress:
        with blaming_the_user(DeviceError, InsufficientMemory, ValueError, ImportError, OSError):
            replay = Replay(trace, config, progress=progress)
        # What lives until the end, the trace and what compilation has left, need not be scanned during a timed call.
        gc.freeze()
        gc.enable()
        show(replay.cache)
        try:
            replay.run()
        except KeyboardInterrupt:
            status, interrupted = INTERRUPTED, True
        except AssertionError as error:
            failure = error
        try:
            replay.close()
        except AssertionError as error:
            failure = failure or error
    summary = replay.summary(interrupted=interrupted, failure=failure)
    if not (interrupted or failure):
        summary = replace(summary, failure=_nothing_done(summary, trace, config))
    return status if summary.failure is None else FAILED, summary


def _nothing_done(summary: Summary, trace: Trace, config: ReplayConfig) -> str | None:
    """Return why a replay proves nothing, or None."""
    if summary.verified is not None and not summary.verified.released_tokens:
        return f"nothing was verified: {summary.requests:,} requests were replayed, {len(summary.skipped):,} skipped"
    if config.verify or summary.requests or not summary.skipped:
        return None
    most = config.device_blocks * config.layout.tokens_per_block
    wanted = f"expected requests of at most {most:,} tokens, which {config.device_blocks:,} device blocks hold"
    got = f"{min(request.length for request in trace.requests):,} or more"
    return f"nothing was replayed: {wanted}, got {got}"


def _store(options: argparse.Namespace) -> Any:
    """The store of the options, if there is one."""
    if options.store is None:
        return None
    if options.device == "sim":
        options.error("--store has no --device sim, whose copies are made by one thread")
    from kvpool.storage.urls import open_store

    try:
        return open_store(options.store)
    except (ValueError, ImportError, OSError) as error:
        return options.error(f"--store: {error}")


def _layout(options: argparse.Namespace) -> BlockLayout:
    nbytes, tokens = options.block_bytes, options.tokens_per_block
    if options.model is None:
        try:
            return BlockLayout.of_block_bytes(4096 if nbytes is None else nbytes, tokens)
        except ValueError as error:
            return options.error(f"--block-bytes: {error}")
    if nbytes is not None:
        options.error("--model decides the bytes of a block: leave out --block-bytes")
    layout = terminal.layout_of_model(options, options.model)
    if options.device_blocks is None and options.device_memory is None:
        options.error("--model needs --device-memory or --device-blocks")
    return layout
