"""A process that has imported what most tests import, and forks for each run of pytest: to start Python and import all
of that takes longer than most runs. It reads lines of JSON and answers each with a line."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import numba
import numpy as np
import pytest

IMPORTED = hypothesis, numba, np
LONG_S = 5


class Outcomes:
    """A plugin of pytest: which tests failed, and how long those that passed took."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        if report.failed and name not in self.failed:
            self.failed.append(name)
        if report.passed:
            self.seconds[name] = self.seconds.get(name, 0.0) + report.duration


class ReachWriter:
    """A plugin of pytest that writes to a file which lines each test reaches. Tests that take long are interrupted, and
    fail."""

    def __init__(self, file: str) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            data_file=file, source_pkgs=["kvpool"], config_file=False, messages=False, check_preimported=False
        )
        self._coverage.set_option("run:core", "ctrace")
        self._coverage.start()
        self._tracer = sys.gettrace()
        signal.signal(signal.SIGVTALRM, _interrupt)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        sys.settrace(self._tracer)  # tests that trace calls themselves have replaced it
        self._coverage.switch_context(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        signal.setitimer(signal.ITIMER_VIRTUAL, LONG_S, 1)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def _interrupt(*_: Any) -> None:
    raise TimeoutError


def run(request: dict[str, Any]) -> None:
    """Run pytest in this process, and write what it says and what came of it."""
    with open(request["said"], "w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    outcomes, reach = Outcomes(), request["reach"]
    status = pytest.main(request["arguments"], plugins=[outcomes, *([ReachWriter(reach)] if reach else [])])
    spec = importlib.util.find_spec("kvpool")  # that of the module that was imported, if it was
    package = str(spec and spec.origin)
    result = {"status": int(status), "package": package, "failed": outcomes.failed, "seconds": outcomes.seconds}
    Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        request = json.loads(line)
        process = context.Process(target=run, args=(request,))
        process.start()
        process.join(request["patience"])
        late = process.exitcode is None
        process.kill()
        process.join()
        print("hung" if late else f"ended with status {process.exitcode}", flush=True)


if __name__ == "__main__":
    main()
