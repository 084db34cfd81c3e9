"""What commands share: exit statuses, options, types of arguments, and how results are printed."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from kvpool.common.arrays.layout import PRESETS, BlockLayout, shape_of_config
from kvpool.common.progress import watched
from kvpool.common.sizes import parse_size

if TYPE_CHECKING:
    from kvpool.tools.replay import Trace

Group: TypeAlias = "argparse._ArgumentGroup"
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
MODELS = f"a model's config.json, or {', '.join(sorted(PRESETS))}"


class WrongUse(Exception):
    """What the user asks for cannot be done. It ends the command with its message and the exit status USAGE."""


@contextmanager
def blaming_the_user(*kinds: type[BaseException]) -> Iterator[None]:
    """Turn exceptions of these kinds into ``WrongUse``."""
    try:
        yield
    except kinds as error:
        path = getattr(error, "filename", None)
        raise WrongUse(f"{path}: {getattr(error, 'strerror', error)}" if path else str(error)) from error


def declare(
    subparsers: Subparsers, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare a command, whose help is the docstring of ``run``. Its options have ``run``, and ``error``, which exits
    with a message."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        name, help=summary, description=inspect.getdoc(run), formatter_class=raw, allow_abbrev=False
    )
    parser.set_defaults(run=run, error=parser.error)
    return parser


def announce_compilation() -> None:
    """Let standard error say that functions are compiled, also where it is no terminal."""
    from kvpool.common.jit.cache import announcer

    announcer.speaks = True


@contextmanager
def compiling_together(program: str) -> Iterator[None]:
    """A context in which all cores compile what the program needs, on a terminal. Elsewhere this process alone does."""
    from kvpool.common.jit.cache import REPLAY, announcer, cache_root
    from kvpool.common.jit.helpers import Helpers, cores

    root = cache_root()
    with Helpers(program, cores() if watched() else 1) as helpers:
        if root is not None and not any(root.glob("*.nbc")):
            helpers.start()
        with announcer.expecting(REPLAY, helpers.start):
            yield


# -- traces and sizes ----------------------------------------------------------------------------


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declare the trace and how it is read."""
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file, or - for standard input; none: a synthetic workload")
    formats = ("auto", "mooncake", "qwen", "native", "agents")
    add("--format", choices=formats, default="auto", help="of TRACE (default: auto)")
    add("--limit", type=count_argument(1), metavar="N", help="the first N requests; without TRACE, generate N")
    add = parser.add_argument_group("sessions of agents").add_argument
    add("--users", type=count_argument(1), metavar="N", help="who play them at the same time (default: 32)")
    pause = "the longest pause before a request, and between two sessions (default: 60)"
    add("--think-cap", "--pause-max", dest="pause_max", type=seconds_argument, metavar="SECONDS", help=pause)


def reading_of(options: argparse.Namespace, limit: int | None = None) -> dict[str, Any]:
    """How a given trace is read, as arguments of ``read_trace``. Exits with a message for these without a trace."""
    names = ("format", "users", "pause_max")
    reading = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if options.trace is None and reading not in ({}, {"format": "auto"}):
        options.error("--format, --users and --think-cap describe a TRACE, and none is given")
    return {**reading, "limit": limit}


def trace_of(options: argparse.Namespace, limit: int | None = None) -> Trace:
    """The given trace, or the synthetic workload of the seed."""
    from kvpool.tools.replay import TraceError, read_trace, synthetic
    from kvpool.tools.replay.traces import REQUESTS

    reading = reading_of(options, limit)
    if options.trace is None:
        return synthetic(limit or REQUESTS, seed=options.seed)
    with blaming_the_user(TraceError):
        return read_trace(options.trace, **reading)


def layout_of_model(options: argparse.Namespace, name: str, **shape: Any) -> BlockLayout:
    """The layout of one of the ``MODELS``, with what else is given. Exits with a message if there is none."""
    try:
        if os.path.isdir(name):
            name = os.path.join(name, "config.json")
        if name.endswith(".json"):
            shape = {**shape_of_config(_config(name))._asdict(), **shape}
            return BlockLayout(tokens_per_block=options.tokens_per_block, **shape)
        if name in PRESETS:
            return BlockLayout.for_model(name, tokens_per_block=options.tokens_per_block, **shape)
    except (TypeError, ValueError, OSError, RecursionError) as error:
        return options.error(f"{name}: {error}" if name.endswith(".json") else str(error))
    return options.error(f"--model: expected a config.json or one of {', '.join(sorted(PRESETS))}, got {name!r}")


def _config(path: str) -> dict[str, Any]:
    """Read a model's own description. Raises OSError, or ValueError if the file is no such description."""
    with open(path, encoding="utf-8") as file:
        description = json.load(file)
    if not isinstance(description, dict):
        raise ValueError("no object in it")
    return description


def add_tiers(group: Group, lowest: int) -> None:
    """Declare the sizes of both tiers, in blocks or in bytes. ``lowest`` is the least number of device blocks."""
    for tier, least in (("device", lowest), ("host", 0)):
        size = group.add_mutually_exclusive_group()
        text = f"blocks of the {tier} tier"
        size.add_argument(f"--{tier}-blocks", type=count_argument(least), metavar="N", help=text)
        text = "the same as bytes, such as 8GiB"
        size.add_argument(f"--{tier}-memory", type=size_argument, metavar="SIZE", help=text)


def tier_blocks(options: argparse.Namespace, tier: str, layout: BlockLayout) -> int | None:
    """The blocks of a tier: the given number, or what fits the given memory. None if neither is given."""
    blocks, memory = getattr(options, f"{tier}_blocks"), getattr(options, f"{tier}_memory")
    if memory is None:
        return blocks
    if memory < layout.block_bytes and (memory or tier == "device"):
        least = f"one block of {layout.block_bytes} bytes or more, such as 512MiB or 8GiB"
        options.error(f"--{tier}-memory: expected {least}, got {memory} bytes")
    from kvpool.device.regions import BLOCKS_MAX

    if memory // layout.block_bytes > BLOCKS_MAX:
        most = BLOCKS_MAX * layout.block_bytes
        options.error(
            f"--{tier}-memory: expected at most {most} bytes with blocks of {layout.block_bytes}, got {memory}"
        )
    return memory // layout.block_bytes


# -- what is printed -----------------------------------------------------------------------------


def print_result(options: argparse.Namespace, values: Any, text: str) -> None:
    """Print ``values`` as JSON where that is asked for, else the text."""
    print_text(json.dumps(values, indent=2) if options.json else text)


def print_text(text: str) -> None:
    """Print to standard output. If its reader has closed the pipe, the rest is dropped without an error. Characters
    that it cannot have are question marks. Raises WrongUse if it cannot be written."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:
        # The interpreter flushes standard output again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise WrongUse(f"standard output: {error.strerror}") from error


def complain(error: BaseException) -> int:
    """Print an error that the user made, and return its exit status."""
    print(f"error: {error}", file=sys.stderr)
    return USAGE


# -- types of arguments --------------------------------------------------------------------------


def number_argument(kind: type[int] | type[float], lowest: float, highest: float) -> Callable[[str], Any]:
    """Return the parser of an option that is a number in this range. argparse reports what is not a number."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"expected {lowest} to {highest}, got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def count_argument(lowest: int, highest: int = 2**31 - 1) -> Callable[[str], int]:
    """Return the parser of an option that is an integer of at least `lowest`."""
    return number_argument(int, lowest, highest)


port_argument = count_argument(0, 65535)
"""Parses the number of a TCP port, 0 for any that is free."""
fraction_argument = number_argument(float, 0, 1)
seconds_argument = number_argument(float, 0.001, 3600)


def size_argument(text: str) -> int:
    """Parse a number of bytes: ``4096``, ``8GiB``, ``1.5 GB``."""
    nbytes = parse_size(text)
    if nbytes is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 4096, 512MiB or 8GiB, got {text!r}")
    return nbytes
