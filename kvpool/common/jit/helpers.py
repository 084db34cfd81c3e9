"""Helpers: processes that compile what a program will need, while the program compiles too. They share what is kept.

A helper runs the program in the interpreter first, which takes a second, and so learns which functions are called with
which types, also by each other. Then it compiles them, the last one first, since the program begins with the first one.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from operator import attrgetter
from typing import IO, Any

from numba.core import config

from kvpool.common import jit
from kvpool.common.process import Closing

_log = logging.getLogger(__name__)


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


class Helpers(Closing):
    """``processes - 1`` helpers of this process for a program, a text in Python. None begins where nothing is kept.

    They begin with ``start``, end with ``close`` or with this process, and are killed by either: what they have not
    done is compiled by whoever needs it. One that failed or was killed by others is named in the log. Not thread-safe.
    """

    def __init__(self, program: str, processes: int) -> None:
        self._program, self._count = program, processes - 1
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self) -> int:
        """Let them begin, if they have not. Returns how many processes compile now, with this one."""
        # Isolated, and with our path: what is in the working directory must not be imported unless we would.
        path = f"import sys; sys.path[:] = {list(map(os.path.abspath, sys.path))}"
        some = self._count if jit.keeps() and sys.executable and not self._running else 0
        for place in range(some):
            call = f"compile_ahead({self._program!r}, {place}, {self._count}, {os.getpid()})"
            command = [sys.executable, "-Ic", f"{path}; from kvpool.common.jit.helpers import compile_ahead; {call}"]
            said = tempfile.TemporaryFile()
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            except OSError as error:
                said.close()
                self._count = 0
                _log.warning("no other process compiles ahead: %s", error)
                break
            self._running.append((process, said))
        return 1 + len(self._running)

    def close(self) -> None:
        """End them."""
        for process, said in self._running:
            status = process.poll()
            process.kill()
            process.wait()
            if status:
                said.seek(0)
                words = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                _log.warning(
                    "a process that compiled ahead ended with status %d (%s); others do its work", status, words
                )
            said.close()
        self._running.clear()


def compile_ahead(program: str, place: int, count: int, parent: int) -> None:
    """What a helper does: first what is for the helper at this place, then what others have left."""
    recorded, record = os.pipe()
    if not os.fork():
        os.close(recorded)
        with open(record, "wb") as file:
            pickle.dump(_calls_of(program), file)
        return
    os.close(record)
    import_module("kvpool.pool.manager")
    with open(recorded, "rb") as file:
        content = file.read()
    if not content:
        sys.exit(1)  # the program failed, and its error is the last line that was said
    calls = pickle.loads(content)[::-1]
    gc.disable()  # this process ends soon
    for module, name, by, kinds in [*calls[place::count], *calls]:
        if os.getppid() != parent:
            return
        function = attrgetter(name)(import_module(module))
        (function.compile if by == "Python" else function.prepare)(kinds)


def _calls_of(program: str) -> list[tuple[str, str, str, tuple[Any, ...]]]:
    """The jitted functions that a program calls, by whom (Python, or jitted code), and with which types, in the order
    of their first calls. The program runs in the interpreter."""
    calls: dict[tuple[str, str, str, tuple[Any, ...]], None] = {}
    config.DISABLE_JIT = 1
    intrinsics = import_module("kvpool.common.jit.intrinsics")  # as the interpreter has it
    entry_of = intrinsics.entry_of
    plainly = jit.interpreted
    depth = 0

    def noted(function: Callable[..., Any], by: str, arguments: tuple[Any, ...]) -> None:
        kinds = tuple(map(intrinsics.type_of, arguments))
        if "<" not in function.__qualname__:
            calls[function.__module__, function.__qualname__, by, kinds] = None

    def asked(function: Callable[..., Any], *arguments: Any) -> int:
        noted(function, "Python", arguments)
        return int(entry_of(function, *arguments))

    def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = plainly(function)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            nonlocal depth
            noted(function, "jitted code" if depth else "Python", args)
            depth += 1
            try:
                return plain(*args)
            finally:
                depth -= 1

        return call

    jit.interpreted, vars(intrinsics)["entry_of"] = interpreted, asked
    with redirect_stdout(io.StringIO()):
        exec(program, {})
    return [*calls]
