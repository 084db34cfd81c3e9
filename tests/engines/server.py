"""Starts runs of the engine without importing it for each: imports vLLM, then forks a process for each line of its
input.

A line is JSON, the arguments of ``serve.main``. The answer is a line with the exit status. What a run prints goes to a
file beside its answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress

from tests.engines import serve

SECONDS = 600
"""After which a run is taken for one that hangs."""


def run(arguments: list[str]) -> int:
    """Exit status of a run in a process of its own, which is ended with all that it started."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return status
    status = 1
    try:
        os.setsid()
        signal.alarm(SECONDS)
        log = os.open(f"{arguments[-1]}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        serve.main(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    os.environ.update(serve.SETTINGS)
    import vllm.v1.engine.llm_engine  # noqa: F401

    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        os.write(answers, f"{run(json.loads(line))}\n".encode())


if __name__ == "__main__":
    main()
