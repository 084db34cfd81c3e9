"""What every command shares: exit statuses, kinds of arguments, messages and the progress bar."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvpool.sizes import parse_size

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


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


def fraction_argument(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not within 0..1")
    return value


def seconds_argument(text: str) -> float:
    """Parse a number of seconds, more than 0 and up to an hour."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{value} is not more than 0, up to 3600")
    return value


def size_argument(text: str) -> int:
    """Parse a number of bytes: ``4096``, ``8GiB``, ``1.5 GB``."""
    found = parse_size(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 512MiB or 8GiB")
    return found
