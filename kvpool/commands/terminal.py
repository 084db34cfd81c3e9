"""What commands share: exit statuses, options, kinds of arguments, messages and the progress bar."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvpool.sizes import parse_size

if TYPE_CHECKING:
    from kvpool.arrays.layout import BlockLayout
    from kvpool.replay import Trace


Group: TypeAlias = "argparse._ArgumentGroup"
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def declare(
    subparsers: Subparsers, name: str, summary: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare a command. Its options have ``run``, and ``error``, which exits with a message."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(name, help=summary, description=description, formatter_class=raw)
    parser.set_defaults(run=run, error=parser.error)
    return parser


def announce_compilation() -> None:
    """Let standard error say that functions are compiled, also where it is no terminal."""
    from kvpool.jit.announcer import announcer

    announcer.speaks = True


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declare the trace and how it is read."""
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file, or - for standard input; none: a synthetic workload")
    add("--format", choices=("auto", "mooncake", "qwen", "native"), default="auto", help="of TRACE (default: auto)")
    add("--limit", type=count_argument(1), metavar="N", help="the first N requests; without TRACE, generate N")


def check_format(options: argparse.Namespace) -> None:
    """Exit with a message if a format is given without a trace."""
    if options.trace is None and options.format != "auto":
        options.error("--format describes a TRACE, and none is given")


def trace_of(options: argparse.Namespace, limit: int | None = None) -> Trace:
    """The given trace, or the synthetic workload of the seed. Raises TraceError."""
    from kvpool.replay import read_trace, synthetic
    from kvpool.replay.workload import REQUESTS

    if options.trace is None:
        return synthetic(limit or REQUESTS, seed=options.seed)
    return read_trace(options.trace, format=getattr(options, "format", "auto"), limit=limit)


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
        options.error(f"--{tier}-memory: {memory} bytes do not hold one block of {layout.block_bytes} bytes")
    return memory // layout.block_bytes


def progress_bar(total: int | None, unit: str) -> Any:
    """A context manager for a progress bar. It gives a function to call with the number of units just done, or None if
    standard error is no terminal or tqdm is absent.

    ``total`` is None if it is unknown.
    """
    if not sys.stderr.isatty():
        return nullcontext()
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()

    @contextmanager
    def bar() -> Any:
        with tqdm(total=total, unit=" " + unit, leave=False, file=sys.stderr) as shown:
            yield shown.update

    return bar()


def print_text(text: str) -> None:
    """Print to standard output. If its reader has closed the pipe, the rest is dropped without an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes standard output again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: Exception) -> int:
    """Print an error that the user made, and return its exit status."""
    print(f"error: {error}", file=sys.stderr)
    return USAGE


def count_argument(lowest: int) -> Callable[[str], int]:
    """The parser of an option that is an integer of at least `lowest`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not lowest <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value} is not within {lowest}..{2**31 - 1}")
        return value

    return parse


def port_argument(text: str) -> int:
    """Parse the number of a TCP port, 0 for any that is free."""
    port = count_argument(0)(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{port} is not within 0..65535")
    return port


def path_argument(text: str) -> Path:
    """Parse the name of a file to write."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: a path cannot have a NUL character")
    return Path(text)


def _number(text: str, fits: Callable[[float], bool], accepted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{value} is not {accepted}")
    return value


def fraction_argument(text: str) -> float:
    """Parse a number from 0 to 1."""
    return _number(text, lambda value: 0 <= value <= 1, "within 0..1")


def seconds_argument(text: str) -> float:
    """Parse a number of seconds, more than 0 and up to an hour."""
    return _number(text, lambda value: 0 < value <= 3600, "more than 0, up to 3600")


def size_argument(text: str) -> int:
    """Parse a number of bytes: ``4096``, ``8GiB``, ``1.5 GB``."""
    found = parse_size(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 512MiB or 8GiB")
    return found
