"""``python -m kvpool stress``: runs a replay and a reader on two threads, and checks every count and byte."""

from __future__ import annotations

import argparse

from kvpool.commands import terminal
from kvpool.commands.terminal import blaming_the_user, count_argument
from kvpool.errors import InsufficientMemory
from kvpool.progress import shown_progress


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    summary = "replay on one thread, pin and read host blocks on another, and check every byte and count"
    stress = terminal.declare(subparsers, "stress", summary, run)
    reads = "pinned reads (default: 1000000)"
    stress.add_argument("--reads", type=count_argument(1), default=1_000_000, metavar="N", help=reads)
    add_workload(stress, host_blocks=128, block_bytes=2048)
    stress.set_defaults(tokens_per_block=None)


def add_workload(parser: argparse.ArgumentParser, *, host_blocks: int, block_bytes: int) -> None:
    """Declare what is replayed without a schedule of its own, and the pool that does it."""
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file, or - for standard input; none: a synthetic workload")
    seed = "of the synthetic workload, and of what a reader chooses (default: 0)"
    add("--seed", type=count_argument(0), default=0, metavar="N", help=seed)
    add("--json", action="store_true", help="print the figures as JSON")
    add = parser.add_argument_group("pool").add_argument
    add("--device-blocks", type=count_argument(1), default=1024, metavar="N", help="default: %(default)s")
    add("--host-blocks", type=count_argument(1), default=host_blocks, metavar="N", help="default: %(default)s")
    add("--block-bytes", type=terminal.size_argument, default=block_bytes, metavar="SIZE", help="default: %(default)s")
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16; stress TRACE: 128")


def run(options: argparse.Namespace) -> int:
    """Replay a trace as fast as it goes through a pool with a tiny host tier, while a second
    thread pins host blocks, compares their bytes, lets the first thread on, and compares
    them again before it lets go. Both go on until N blocks were pinned and read, and one
    host block was evicted for every ten; then every count is compared with every other.

    TRACE is what `replay` takes; without it, generated chats are replayed. It starts again
    when it ends.

    exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
    cannot be read, 130 interrupted (the figures so far are printed)
    """
    terminal.announce_compilation()
    from kvpool.replay import ReplayConfig
    from kvpool.replay.stress_run import EVENTS, Stress, StressConfig

    tokens = options.tokens_per_block or (16 if options.trace is None else 128)
    layout, reads = terminal.layout_of(options, options.block_bytes, tokens), options.reads
    trace = terminal.trace_of(options)
    replay = ReplayConfig(layout, options.device_blocks, options.host_blocks, verify=True, events=EVENTS)
    config = StressConfig(replay, reads, evictions=reads // 10, shielded=reads // 100, seed=options.seed)
    with shown_progress(reads, " reads") as progress:
        with blaming_the_user(InsufficientMemory, ValueError):
            stress = Stress(trace, config, progress=progress)
        with stress:
            report = stress.run()
    terminal.print_result(options, report.as_dict(), report.text())
    return terminal.status_of(report)
