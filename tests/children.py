"""Runs functions in forked children, which must not hang."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

import pytest

from kvpool.errors import ForkedProcess


def in_child(call: Callable[[], object]) -> None:
    """Run a function in a forked child, which must end by itself within 60 s."""
    with warnings.catch_warnings():
        # What is tested is what Python 3.12 warns of.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def refuses(*calls: Callable[[], object]) -> None:
    """In a child: these raise ForkedProcess."""
    for call in calls:
        with pytest.raises(ForkedProcess):
            call()
