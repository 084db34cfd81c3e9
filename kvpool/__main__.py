"""The command line: ``python -m kvpool COMMAND``, or ``kvpool COMMAND`` where the package is installed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvpool import __version__
from kvpool.tools.cli import doctor, plan, replay, warm_up
from kvpool.tools.cli import serve_store as store
from kvpool.tools.cli.terminal import INTERRUPTED, USAGE, WrongUse, complain, near

COMMANDS = (replay, plan, store, doctor, warm_up)


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, since the usage can fill a screen."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        options = [name for action in self._actions for name in action.option_strings]
        hint = near(choice[1], [*re.findall(r"[\w.-]+", choice[2]), *options]) if choice else ""
        self.exit(USAGE, f"{self.prog}: error: {message}{hint} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit, since no option has these names."""
        known = [name for action in self._actions for name in action.option_strings]
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near(unknown[0].partition('=')[0], known)}")


def command_line(command: str | None = None) -> CommandParser:
    """The parser of the command line, or that of one of its commands."""
    script = os.path.basename(sys.argv[0])
    prog = "kvpool" if script == "kvpool" else "python -m kvpool"
    parser = CommandParser(prog=prog, description="A paged KV cache in two tiers.")
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    subparsers = parser.add_subparsers(dest="command")
    for module in COMMANDS:
        module.add_parser(subparsers)
    found: CommandParser = parser if command is None else subparsers.choices[command]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: those of the process) and return the exit status."""
    options, unknown = command_line().parse_known_args(arguments)
    if unknown:
        command_line(options.command).refuse(unknown)
    if options.command is None:
        command_line().error("a command is missing")
    try:
        return options.run(options)
    except WrongUse as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
