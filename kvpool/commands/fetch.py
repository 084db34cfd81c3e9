"""``python -m kvpool fetch``: fetches blocks of a worker that is under memory pressure into another process, and checks
every byte."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.commands.serve import SECRET, add_workload, lacking, layout_of, secret_of
from kvpool.commands.terminal import (
    FAILED,
    INTERRUPTED,
    OK,
    Subparsers,
    complain,
    count_argument,
    declare,
    print_text,
    progress_bar,
    size_argument,
)
from kvpool.errors import InsufficientMemory, KVPoolError

_HELP = f"""\
Fetch blocks from the host tier of another process, `python -m kvpool serve`, while its
scheduler replays a trace. Every byte is compared with what the tokens alone say it must
be, as it comes and again in the pool that it enters; then both pools are verified.

Without --endpoint it starts that process itself, with a secret of its own, and measures
at the end how fast blocks of 64 KiB and 4 KiB come beside a bare ZeroMQ socket. TRACE,
--seed, --block-bytes and --tokens-per-block must be those of the server, and so must the
secret in {SECRET}.

exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
cannot be read, 130 interrupted
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    fetch = declare(subparsers, "fetch", "fetch host blocks from another process and check every byte", _HELP, run)
    add = fetch.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file; none: a synthetic workload")
    add("--endpoint", help="of a server that runs already")
    add("--blocks", type=count_argument(1), default=100_000, metavar="N", help="blocks to fetch (default: 100000)")
    add("--round-bytes", type=size_argument, default=1 << 27, metavar="SIZE",
        help="bytes of each of the rounds whose speed is measured, 0 for none (default: 128MiB)")  # fmt: skip
    add_workload(fetch)
    add("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Fetch, measure, and print the figures."""
    if (lack := lacking()) is not None:
        return complain(lack)
    from kvpool.replay import TraceError, read_trace, synthetic
    from kvpool.replay.workers import FetchConfig, Fetching

    if options.trace == "-":
        options.error("TRACE: the server reads it too, and standard input can be read once")
    layout = layout_of(options)
    secret = secrets.token_bytes(32) if options.endpoint is None else secret_of(options)
    try:
        trace = synthetic(seed=options.seed) if options.trace is None else read_trace(options.trace)
    except TraceError as error:
        return complain(error)
    config = FetchConfig(layout, options.blocks, options.host_blocks, secret, options.seed)
    server: dict[str, Any] = {}
    failure, figures = None, []
    try:
        with _server(options, secret, server) as endpoint, progress_bar(options.blocks, "blocks") as progress:
            with Fetching(trace, config, endpoint, progress=progress) as fetching:
                figures = fetching.run()
                failure = f"wrong bytes, first in {fetching.first_wrong}" if fetching.first_wrong else None
                seconds = fetching.seconds
    except (InsufficientMemory, ValueError) as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except KVPoolError as error:
        failure, seconds = f"{type(error).__name__}: {error}", 0.0
    return _report(options, figures, failure, server, seconds)


def _report(
    options: argparse.Namespace, figures: list[Any], failure: str | None, server: dict[str, Any], seconds: float
) -> int:
    from kvpool.replay.rounds import Figure, figures_text

    served = [Figure(**figure) for figure in server.get("figures", [])]
    failure = failure or server.get("failure")
    speeds = _speeds(options) if options.endpoint is None and options.round_bytes and failure is None else []
    # Speed does not decide the result: on a busy machine, fetches are slow and correct.
    passed = failure is None and all(figure.ok for figure in [*figures, *served])
    if options.json:
        groups = {"fetch": figures, "server": served}
        values: dict[str, Any] = {name: [figure._asdict() for figure in group] for name, group in groups.items()}
        speed = [one.as_dict() for one in speeds]
        print_text(
            json.dumps(
                {"passed": passed, "failure": failure, "seconds": seconds, **values, "throughput": speed}, indent=2
            )
        )
        return OK if passed else FAILED
    lines = [figures_text(f"fetch   {seconds:.1f} s", figures, failure)]
    if served:
        lines.append(figures_text("server, in its own process", served, None))
    for one in speeds:
        name = f"{one.block_bytes:,} bytes x {one.blocks_per_message}: of a bare socket's speed"
        lines.append(f"{'':<7} {name:<56} {one.ratio:>12.2f}")
        lines.append(f"{'':<7} {'':<56} {one.fetch / 1e9:>12.2f}  GB/s of {one.bare / 1e9:.2f} GB/s")
    print_text("\n".join(lines))
    return OK if passed else FAILED


def _speeds(options: argparse.Namespace) -> list[Any]:
    from kvpool.commands.throughput import measure

    return [measure(size, round_bytes=options.round_bytes) for size in (65_536, 4096)]


@contextmanager
def _server(options: argparse.Namespace, secret: bytes, report: dict[str, Any]) -> Iterator[str]:
    """The endpoint of the given server, or of a new one that runs during the context and then fills in ``report``."""
    if options.endpoint is not None:
        yield options.endpoint
        return
    command = [sys.executable, "-m", "kvpool", "serve", "--json", "--until-eof", f"--seed={options.seed}"]
    for name in ("device_blocks", "host_blocks", "block_bytes", "tokens_per_block"):
        command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    command += [] if options.trace is None else [options.trace]
    environment = {**os.environ, SECRET: secret.hex()}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        word, _, endpoint = process.stdout.readline().strip().partition(" ")
        if word != "endpoint":
            raise KVPoolError(f"the server did not start: exit status {process.wait()}")
        yield endpoint
        # The server stops at the end of its input. If an error is raised above, leaving the process closes it as well.
        process.stdin.close()
        report.update(json.loads(process.stdout.read() or "{}") or {"failure": "the server left no figures"})
        if process.wait() and report.get("passed"):
            report["failure"] = f"the server's exit status is {process.returncode}"
