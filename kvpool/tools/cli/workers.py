"""``python -m kvpool stress``, ``serve`` and ``fetch``: workers whose host blocks others read while they replay. Every
byte is checked. The reader is a thread of the worker, or another process that fetches what it serves."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.common.errors import InsufficientMemory, KVPoolError
from kvpool.common.progress import shown_progress
from kvpool.tools.cli import terminal
from kvpool.tools.cli.terminal import FAILED, INTERRUPTED, OK, blaming_the_user, count_argument

SECRET = "KVPOOL_SECRET"


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the commands and their options."""
    summary = "replay on one thread, pin and read host blocks on another, and check every byte and count"
    stressing = terminal.declare(subparsers, "stress", summary, stress)
    reads = "pinned reads (default: 1000000)"
    stressing.add_argument("--reads", type=count_argument(1), default=1_000_000, metavar="N", help=reads)
    _add_workload(stressing, host_blocks=128, block_bytes=2048)
    stressing.set_defaults(tokens_per_block=None)
    serving = terminal.declare(subparsers, "serve", "replay, and serve the host tier to other processes", serve)
    endpoint = "where to listen, on this machine (default: tcp://127.0.0.1:*, any free port)"
    serving.add_argument("--endpoint", default="tcp://127.0.0.1:*", help=endpoint)
    serving.add_argument("--until-eof", action="store_true", help="end when standard input does")
    _add_workload(serving, host_blocks=2048, block_bytes=4096)
    summary = "fetch host blocks from another process and check every byte"
    fetching = terminal.declare(subparsers, "fetch", summary, fetch)
    add = fetching.add_argument
    add("--endpoint", help="of a server that runs already")
    add("--blocks", type=count_argument(1), default=100_000, metavar="N", help="blocks to fetch (default: 100000)")
    speed = "bytes of each of the rounds whose speed is measured, 0 for none (default: 128MiB)"
    add("--round-bytes", type=_round_argument, default=1 << 27, metavar="SIZE", help=speed)
    _add_workload(fetching, host_blocks=2048, block_bytes=4096)


def _add_workload(parser: argparse.ArgumentParser, *, host_blocks: int, block_bytes: int) -> None:
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


def _round_argument(text: str) -> int:
    found = terminal.size_argument(text)
    if 0 < found < 1 << 20:
        raise argparse.ArgumentTypeError(f"expected 0, or 1MiB or more, which is one message, got {text!r:.80}")
    return found


def stress(options: argparse.Namespace) -> int:
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
    from kvpool.tools.replay import ReplayConfig
    from kvpool.tools.replay.stress_run import EVENTS, Stress, StressConfig

    tokens = options.tokens_per_block or (16 if options.trace is None else 128)
    layout, reads = terminal.layout_of(options, options.block_bytes, tokens), options.reads
    trace = terminal.trace_of(options)
    replay = ReplayConfig(layout, options.device_blocks, options.host_blocks, verify=True, events=EVENTS)
    config = StressConfig(replay, reads, evictions=reads // 10, shielded=reads // 100, seed=options.seed)
    with shown_progress(reads, " reads") as progress:
        with blaming_the_user(InsufficientMemory, ValueError):
            stressed = Stress(trace, config, progress=progress)
        with stressed:
            report = stressed.run()
    terminal.print_result(options, report.as_dict(), report.text())
    return terminal.status_of(report)


def _secret_of(options: argparse.Namespace) -> bytes:
    """The secret in the environment. If there is none that is valid, exits with a message that does not show it."""
    try:
        secret = bytes.fromhex(os.environ.get(SECRET, ""))
    except ValueError:
        secret = b""
    if not 16 <= len(secret) <= 64:
        options.error(f"{SECRET}: expected 32 to 128 hex digits in this environment variable, got another text or none")
    return secret


def serve(options: argparse.Namespace) -> int:
    """Replay a trace again and again through a pool with a tiny host tier, and serve that tier
    to other processes: `python -m kvpool fetch --endpoint ENDPOINT`. Both need the same
    secret, 32 to 128 hex digits in the environment variable KVPOOL_SECRET.

    TRACE is what `replay` takes; without it, generated chats are replayed. Prints
    "endpoint ENDPOINT" once it serves, and the figures when it ends, by Ctrl-C or at the end
    of standard input with --until-eof.

    exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
    cannot be read, 130 interrupted (the figures so far are printed)
    """
    with blaming_the_user(ImportError):
        from kvpool.tools.replay.serving import Serving
    import zmq

    from kvpool.tools.replay import ReplayConfig

    layout = terminal.layout_of(options, options.block_bytes, options.tokens_per_block)
    secret, trace = _secret_of(options), terminal.trace_of(options)
    with blaming_the_user(InsufficientMemory, ValueError, zmq.ZMQError):
        config = ReplayConfig(layout, options.device_blocks, options.host_blocks, verify=True, secret=secret)
        serving = Serving(trace, config, options.endpoint)
    with serving:
        terminal.print_text(f"endpoint {serving.server.endpoint}")
        if options.until_eof:
            threading.Thread(target=_stop_at_eof, args=(serving,), daemon=True).start()
        report = serving.run()
    terminal.print_result(options, report.as_dict(), report.text())
    return terminal.status_of(report)


def _stop_at_eof(serving: Any) -> None:
    # This does not read sys.stdin: a thread that waits there would keep its lock when the interpreter ends.
    while os.read(0, 4096):
        pass
    serving.stop()


def fetch(options: argparse.Namespace) -> int:
    """Fetch blocks from the host tier of another process, `python -m kvpool serve`, while its
    scheduler replays a trace. Every byte is compared with what the tokens alone say it must
    be, as it comes and again in the pool that it enters; then both pools are verified.

    Without --endpoint it starts that process itself, with a secret of its own, and measures
    at the end how fast blocks of 64 KiB and 4 KiB come beside a bare ZeroMQ socket. TRACE,
    --seed, --block-bytes and --tokens-per-block must be those of the server, and so must the
    secret in KVPOOL_SECRET.

    exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
    cannot be read, 130 interrupted
    """
    with blaming_the_user(ImportError):
        from kvpool.tools.replay import serving
    from kvpool.tools.replay.engine import Figure, Report

    if options.trace == "-":
        options.error("TRACE: the server reads it too, and standard input can be read once")
    layout = terminal.layout_of(options, options.block_bytes, options.tokens_per_block)
    secret = secrets.token_bytes(32) if options.endpoint is None else _secret_of(options)
    how = {"blocks": options.blocks, "host_blocks": options.host_blocks, "secret": secret, "seed": options.seed}
    trace = terminal.trace_of(options)
    served: dict[str, Any] = {"figures": [], "failure": None}
    failure, figures, seconds = None, [], 0.0
    if options.endpoint is not None:
        print(f"fetch: asking {options.endpoint}", file=sys.stderr, flush=True)
    bar = shown_progress(options.blocks, " blocks")
    with blaming_the_user(InsufficientMemory, ValueError):
        try:
            with (
                _server(options, secret, served) as endpoint,
                bar as progress,
                serving.Fetching(trace, layout, endpoint, **how, progress=progress) as fetching,
            ):
                figures, seconds = fetching.run(), fetching.seconds
                failure = f"wrong bytes, first in {fetching.first_wrong}" if fetching.first_wrong else None
        except KeyboardInterrupt:
            return INTERRUPTED
        except KVPoolError as error:
            if isinstance(error, InsufficientMemory):
                raise
            failure = _in_words(error, options)
    failure = failure or served["failure"]
    ours = Report(f"fetch   {seconds:.1f} s" if figures else "fetch   nothing", figures, failure)
    theirs = Report("server, in its own process", [Figure(**figure) for figure in served["figures"]])
    sizes = (65_536, 4096) if options.endpoint is None and options.round_bytes and failure is None else ()
    speeds = [serving.measure(size, round_bytes=options.round_bytes) for size in sizes]
    # Speed does not decide the result: on a busy machine, fetches are slow and correct.
    passed = ours.passed and theirs.passed
    values = {"passed": passed, "failure": failure, "seconds": seconds, "fetch": ours.as_dict()["figures"]}
    values |= {"server": served["figures"], "throughput": [one._asdict() for one in speeds]}
    shown = [ours, theirs] if theirs.figures else [ours]
    terminal.print_result(options, values, "\n".join([*(one.text() for one in shown), *map(_speed_text, speeds)]))
    return OK if passed else FAILED


def _in_words(error: KVPoolError, options: argparse.Namespace) -> str:
    """Return why the server could not be read, in terms of options and environment variables."""
    if options.endpoint is None:
        return f"{type(error).__name__}: {error}"
    reasons = {
        "secret": f"{SECRET}: expected the value that the server was started with, got another one",
        "impostor": f"--endpoint: expected a server of python -m kvpool serve with the same {SECRET}, got another "
        f"program or another secret at {options.endpoint}",
        "layout": f"--block-bytes, --tokens-per-block: expected those of the server, got {options.block_bytes} and "
        f"{options.tokens_per_block}",
        "timeout": f"--endpoint: expected an answer of python -m kvpool serve, got none from {options.endpoint}",
    }
    return reasons.get(getattr(error, "code", ""), f"{type(error).__name__}: {error}")


def _speed_text(one: Any) -> str:
    name = f"{one.block_bytes:,} bytes x {one.blocks_per_message}: of a bare socket's speed"
    speeds = f"{one.fetch / 1e9:>12.2f}  GB/s of {one.bare / 1e9:.2f} GB/s"
    return f"{'':<7} {name:<56} {one.ratio:>12.2f}\n{'':<7} {'':<56} {speeds}"


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
        report.update(json.loads(process.stdout.read() or '{"failure": "the server left no figures"}'))
        if process.wait() and report.get("passed"):
            report["failure"] = f"the server's exit status is {process.returncode}"
