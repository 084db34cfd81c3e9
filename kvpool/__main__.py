"""The command line: ``python -m kvpool COMMAND``, or ``kvpool COMMAND`` where the package is installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvpool import __version__
from kvpool.tools.cli import doctor, plan, replay, serve_store, warm_up
from kvpool.tools.cli.terminal import INTERRUPTED, WrongUse, complain

COMMANDS = (replay, plan, serve_store, doctor, warm_up)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    prog = "kvpool" if os.path.basename(sys.argv[0]) == "kvpool" else "python -m kvpool"
    parser = argparse.ArgumentParser(prog=prog, description="A paged KV cache in two tiers.")
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for module in COMMANDS:
        module.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: those of the process) and return the exit status."""
    options = command_line().parse_args(arguments)
    try:
        status: int = options.run(options)
    except WrongUse as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
