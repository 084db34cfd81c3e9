"""``python -m kvpool store``: a store that stays open for all engines of a machine."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack

from kvpool.tools.cli import terminal
from kvpool.tools.cli.terminal import FAILED, OK, blaming_the_user, count_argument, size_argument


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    parser = terminal.declare(subparsers, "store", "keep a store open for the engines of this machine", run)
    add = parser.add_argument
    add("store", metavar="STORE", help="such as disk:/var/lib/kvpool?capacity=200GiB")
    add("--listen", required=True, metavar="ENDPOINT", help="where, such as ipc:///run/kvpool/store")
    add("--block-bytes", required=True, type=size_argument, metavar="SIZE", help="of each block")
    add("--secret-file", required=True, metavar="PATH", help="64 hex digits, which the engines have too")
    add("--connections", type=count_argument(1), default=64, metavar="N", help="most calls at a time (default: 64)")
    port = "serve /metrics and /health on this machine; 0: any free port"
    add("--metrics-port", type=terminal.port_argument, metavar="N", help=port)


def run(options: argparse.Namespace) -> int:
    """Open STORE, and serve it to each engine that has a store "peer:ENDPOINT?secret_file=PATH".
    Several engines then share one folder and its capacity. What was saved is on the disk
    when the engine hears of it.

    Prints "endpoint ENDPOINT" once it serves, and with --metrics-port "metrics ADDRESS". Ends
    at SIGTERM and Ctrl-C: calls under way are ended, and the store is closed.

    exit status: 0 ended so, 1 a call of the store hung and was left, 2 wrong usage, or a store
    that cannot be opened
    """
    with blaming_the_user(ImportError):
        from kvpool.storage.backends.peer.store_server import StoreServer  # says which extra is missing
    import zmq

    from kvpool.storage.urls import open_store

    ends = {signal.SIGTERM, signal.SIGINT}
    with ExitStack() as stack:
        # Before any thread is started, so that all leave the signals to the call that waits for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        with blaming_the_user(ImportError, OSError, TypeError, ValueError, zmq.ZMQError):
            server = StoreServer(
                open_store(options.store),
                options.listen,
                block_bytes=options.block_bytes,
                secret_file=options.secret_file,
                connections=options.connections,
            )
            stack.callback(server.close)
            if options.metrics_port is not None:
                from kvpool.integrations.metrics import served

                metrics, address = stack.enter_context(served(options.metrics_port, health=server.trouble))
                metrics.add("store", server)
                terminal.print_text(f"metrics {address}")
        terminal.print_text(f"endpoint {server.endpoint}")
        signal.sigwait(ends)
        if not server.close():
            print("a call of the store hangs, and is left", file=sys.stderr)
            return FAILED
    return OK
