"""``python -m kvpool stress``: runs a replay and a reader on two threads, and checks every count and byte."""

from __future__ import annotations

import argparse
import json

from kvpool.arrays.layout import BlockLayout
from kvpool.commands.terminal import (
    FAILED,
    INTERRUPTED,
    OK,
    Subparsers,
    announce_compilation,
    complain,
    count_argument,
    declare,
    print_text,
    progress_bar,
    size_argument,
    trace_of,
)
from kvpool.errors import InsufficientMemory

_HELP = """\
Replay a trace as fast as it goes through a pool with a tiny host tier, while a second
thread pins host blocks, compares their bytes, lets the first thread on, and compares
them again before it lets go. Both go on until N blocks were pinned and read, and one
host block was evicted for every ten; then every count is compared with every other.

TRACE is what `replay` takes; without it, generated chats are replayed. It starts again
when it ends.

exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
cannot be read, 130 interrupted (the figures so far are printed)
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    summary = "replay on one thread, pin and read host blocks on another, and check every byte and count"
    stress = declare(subparsers, "stress", summary, _HELP, run)
    add = stress.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file, or - for standard input; none: a synthetic workload")
    add("--reads", type=count_argument(1), default=1_000_000, metavar="N", help="pinned reads (default: 1000000)")
    seed = "of the reader's choices and the synthetic workload (default: 0)"
    add("--seed", type=count_argument(0), default=0, metavar="N", help=seed)
    add = stress.add_argument_group("pool").add_argument
    add("--device-blocks", type=count_argument(1), default=1024, metavar="N", help="default: 1024")
    add("--host-blocks", type=count_argument(1), default=128, metavar="N", help="default: 128")
    add("--block-bytes", type=size_argument, default=2048, metavar="SIZE", help="default: 2048")
    add("--tokens-per-block", type=count_argument(1), metavar="N", help="default: 128 with TRACE, 16 without")
    add("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Read the trace, run both threads and print the figures."""
    announce_compilation()
    from kvpool.replay import ReplayConfig, TraceError
    from kvpool.replay.stress_run import EVENTS, Stress, StressConfig

    tokens = options.tokens_per_block or (16 if options.trace is None else 128)
    try:
        layout = BlockLayout.of_block_bytes(options.block_bytes, tokens)
    except ValueError as error:
        options.error(f"--block-bytes: {error}")
    try:
        trace = trace_of(options)
    except TraceError as error:
        return complain(error)
    replay = ReplayConfig(layout, options.device_blocks, options.host_blocks, verify=True, events=EVENTS)
    config = StressConfig(
        replay, options.reads, evictions=options.reads // 10, shielded=options.reads // 100, seed=options.seed
    )
    with progress_bar(options.reads, "reads") as progress:
        try:
            stress = Stress(trace, config, progress=progress)
        except (InsufficientMemory, ValueError) as error:
            return complain(error)
        with stress:
            report = stress.run()
    print_text(json.dumps(report.as_dict(), indent=2) if options.json else report.text())
    return INTERRUPTED if report.interrupted else OK if report.passed else FAILED
