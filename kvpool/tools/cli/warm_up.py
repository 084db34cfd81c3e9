"""``python -m kvpool warm-up``: compile all that a pool runs, for example while an image is built."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from kvpool.tools.cli.terminal import FAILED, OK, Subparsers, announce_compilation, count_argument, declare, print_text


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    parser = declare(subparsers, "warm-up", "compile all that a pool runs, for example while an image is built", run)
    place = "keep the machine code in this folder; name it in KVPOOL_CACHE_DIR where it is to be used"
    parser.add_argument("--into", metavar="FOLDER", type=Path, help=place)
    count = "how many processes compile (default: as many as there are cores)"
    parser.add_argument("--processes", type=count_argument(1, 256), metavar="N", help=count)


def run(options: argparse.Namespace) -> int:
    """Compile all that a pool runs, or load it if it is compiled already. The machine code
    fits the processor that this runs on. Another one compiles anew. What is kept in
    FOLDER can be read by all users, and written by this one only.

    exit status: 0 everything is compiled, 1 FOLDER has no code, 2 wrong usage
    """
    into: Path | None = options.into and options.into.absolute()
    missing = [] if into is None else [folder for folder in into.parents if not folder.exists()]
    if into is not None:
        os.environ["KVPOOL_CACHE_DIR"] = str(into)
    from kvpool.common.jit.cache import cache_root
    from kvpool.hostcache.warming import warm_up

    root = cache_root()
    if into is not None and root != into:
        options.error(
            f"--into: expected a folder that can be written, and that others cannot rename, got {options.into}"
        )
    announce_compilation()
    begin = time.monotonic()
    warm_up(processes=options.processes)
    if into is not None and not _let_everybody_read(into, missing):
        print("nothing is kept: without NUMBA_DISABLE_JIT, ask doctor about compiled code", file=sys.stderr)
        return FAILED
    print_text(f"{time.monotonic() - begin:.1f} s; compiled code is in {root or 'no folder'}")
    return OK


def _let_everybody_read(folder: Path, around: list[Path]) -> bool:
    """Let all users read the compiled code: an image is made by root, and runs as somebody else. Returns whether there
    is any."""
    files = [*folder.glob("*.nbc")]
    for path in [*around, folder]:
        path.chmod(path.stat().st_mode | 0o055)
    for path in files:
        path.chmod(path.stat().st_mode | 0o044)
    return bool(files)
