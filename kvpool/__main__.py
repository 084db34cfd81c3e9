"""The command line: ``python -m kvpool COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpool.commands import doctor, fetch, plan, replay, serve, stress, warm_up
from kvpool.commands.terminal import INTERRUPTED

COMMANDS = (replay, plan, stress, serve, fetch, doctor, warm_up)


def command_line(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line, or that of one of its commands."""
    parser = argparse.ArgumentParser(prog="python -m kvpool", description="A paged KV cache in two tiers.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(subparsers)
    found: argparse.ArgumentParser = parser if command is None else subparsers.choices[command]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: those of the process) and return the exit status."""
    options = command_line().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
