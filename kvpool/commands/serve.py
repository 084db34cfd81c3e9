"""``python -m kvpool serve``: a worker that replays a trace and serves its host tier to ``python -m kvpool fetch``."""

from __future__ import annotations

import argparse
import json
import os
import threading
from typing import Any

from kvpool.arrays.layout import BlockLayout
from kvpool.commands.terminal import (
    FAILED,
    INTERRUPTED,
    OK,
    Subparsers,
    complain,
    count_argument,
    declare,
    print_text,
    size_argument,
)
from kvpool.errors import InsufficientMemory

SECRET = "KVPOOL_SECRET"

_HELP = f"""\
Replay a trace again and again through a pool with a tiny host tier, and serve that tier
to other processes: `python -m kvpool fetch --endpoint ENDPOINT`. Both need the same
secret, 32 to 128 hex digits in the environment variable {SECRET}.

TRACE is what `replay` takes; without it, generated chats are replayed. Prints
"endpoint ENDPOINT" once it serves, and the figures when it ends, by Ctrl-C or at the end
of standard input with --until-eof.

exit status: 0 all figures as they must be, 1 one is not, 2 wrong usage or a trace that
cannot be read, 130 interrupted (the figures so far are printed)
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    serve = declare(subparsers, "serve", "replay, and serve the host tier to other processes", _HELP, run)
    add = serve.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file, or - for standard input; none: a synthetic workload")
    add(
        "--endpoint",
        default="tcp://127.0.0.1:*",
        help="where to listen, on this machine (default: tcp://127.0.0.1:*, any free port)",
    )
    add("--until-eof", action="store_true", help="end when standard input does")
    add_workload(serve)
    add("--json", action="store_true", help="print the figures as JSON")


def add_workload(parser: Any) -> None:
    """Declare the options on which a server and its clients must agree, and the size of the server's pool."""
    parser.add_argument(
        "--seed", type=count_argument(0), default=0, metavar="N", help="of the synthetic workload (default: 0)"
    )
    add = parser.add_argument_group("pool").add_argument
    add("--device-blocks", type=count_argument(1), default=1024, metavar="N", help="default: 1024")
    add("--host-blocks", type=count_argument(1), default=2048, metavar="N", help="default: 2048")
    add("--block-bytes", type=size_argument, default=4096, metavar="SIZE", help="default: 4096")
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16")


def lacking() -> ImportError | None:
    """The error of importing ``kvpool.remote``, which names the extra to install, or None if nothing is missing."""
    try:
        import kvpool.remote  # noqa: F401
    except ImportError as error:
        return error
    return None


def layout_of(options: argparse.Namespace) -> BlockLayout:
    """The layout that the options describe. Exits with a message if they describe none."""
    try:
        return BlockLayout.of_block_bytes(options.block_bytes, options.tokens_per_block)
    except ValueError as error:
        return options.error(f"--block-bytes: {error}")


def secret_of(options: argparse.Namespace) -> bytes:
    """The secret in the environment. If there is none that is valid, exits with a message that does not show it."""
    try:
        secret = bytes.fromhex(os.environ.get(SECRET, ""))
    except ValueError:
        secret = b""
    if not 16 <= len(secret) <= 64:
        options.error(f"{SECRET}: accepted are 32 to 128 hex digits in this environment variable")
    return secret


def run(options: argparse.Namespace) -> int:
    """Serve, and print the figures."""
    if (lack := lacking()) is not None:
        return complain(lack)
    import zmq

    from kvpool.replay import ReplayConfig, TraceError, read_trace, synthetic
    from kvpool.replay.rounds import INTERRUPTED as STOPPED
    from kvpool.replay.rounds import figures_text
    from kvpool.replay.workers import Serving

    layout, secret = layout_of(options), secret_of(options)
    try:
        trace = synthetic(seed=options.seed) if options.trace is None else read_trace(options.trace)
        config = ReplayConfig(layout, options.device_blocks, options.host_blocks, verify=True, secret=secret)
        serving = Serving(trace, config, options.endpoint)
    except (TraceError, InsufficientMemory, ValueError, zmq.ZMQError) as error:
        return complain(error)
    with serving:
        print_text(f"endpoint {serving.server.endpoint}")
        if options.until_eof:
            threading.Thread(target=_stop_at_eof, args=(serving,), daemon=True).start()
        figures = serving.run()
    interrupted = serving.failure == STOPPED
    passed = serving.failure is None and all(figure.ok for figure in figures)
    report = {"passed": passed, "failure": serving.failure, "figures": [figure._asdict() for figure in figures]}
    print_text(json.dumps(report) if options.json else figures_text("serve", figures, serving.failure))
    return INTERRUPTED if interrupted else OK if passed else FAILED


def _stop_at_eof(serving: Any) -> None:
    # This does not read sys.stdin: a thread that waits there would keep its lock when the interpreter ends.
    while os.read(0, 4096):
        pass
    serving.stop()
