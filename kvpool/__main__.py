"""The command line: ``python -m kvpool COMMAND``, or ``kvpool COMMAND`` where the package is installed."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvpool import __version__
from kvpool.commands import doctor, fetch, plan, replay, serve, stress, warm_up
from kvpool.commands.terminal import INTERRUPTED, USAGE

COMMANDS = (replay, plan, stress, serve, fetch, doctor, warm_up)


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong before how it is used, since the usage can fill a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n\n{self.format_usage()}")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit, since no option has these names."""
        known = [name for action in self._actions for name in action.option_strings]
        near = [*difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)]
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def command_line(command: str | None = None) -> CommandParser:
    """The parser of the command line, or that of one of its commands."""
    script = os.path.basename(sys.argv[0])
    prog = "kvpool" if script == "kvpool" else "python -m kvpool"
    parser = CommandParser(prog=prog, description="A paged KV cache in two tiers.")
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(subparsers)
    found: CommandParser = parser if command is None else subparsers.choices[command]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: those of the process) and return the exit status."""
    options, unknown = command_line().parse_known_args(arguments)
    if unknown:
        command_line(options.command).refuse(unknown)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
