"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests import emulated

if TYPE_CHECKING:
    from engine import Engine
    from group_engine import GroupsEngine

with suppress(ImportError):
    import zmq

    # What a failing test leaves behind must not keep the collector, and with it all other tests, waiting for a peer.
    zmq.Context.__del__ = lambda context: None  # type: ignore[method-assign]

# Most tests read device memory through NumPy; those of the GPU ask for it by name.
os.environ.setdefault("KVPOOL_DEVICE", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run the tests of the GPU over an emulated driver (python -m tests.emulated build)"
    parser.addoption("--emulated", action="store_true", help=about)
    about = "register host memory in one chunk where tests make many: memcheck takes each for an allocation of its own"
    parser.addoption("--one-chunk", action="store_true", help=about)
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run also the tests marked exhaustive: all schedules, many seeds, builds, browsers, mutations",
    )
    parser.addoption(
        "--request-trace",
        metavar="FILE",
        help="the request trace of the GPU tests' long replay (default: a generated one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start again with the emulated driver in the place of NVIDIA's: it has to be there before a process begins."""
    if not config.getoption("--emulated") or emulated.running():
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    try:
        emulated.start_again(["-m", "pytest", *config.invocation_params.args])
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Make the items without a collection of garbage: they stay, and to look through them takes as long again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked exhaustive unless ``--exhaustive`` is given."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [emulated.header()] if emulated.running() else []


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """What is there before a file of tests stays: its tests that collect garbage need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Over the emulated driver nothing is collected by itself (see ``numba_twins.register``)."""
    if emulated.running():
        gc.collect()


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """A run that was started in the background ignores SIGINT, which some tests raise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def end(opened: Sequence[Engine | GroupsEngine]) -> None:
    """Verify and close the pools that a test has left open."""
    for engine in opened:
        if not engine.cache.closed:
            engine.check_all()
            engine.cache.verify()
            engine.cache.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Opens pools of T tokens per block, P device and S host blocks, each with a fake engine; all are verified and
    closed at the end."""
    from engine import open_engine

    opened: list[Engine] = []

    def build(T: int = 4, P: int = 8, S: int = 0, **options: Any) -> Engine:
        opened.append(open_engine(T, P, S, **options))
        return opened[-1]

    yield build
    end(opened)


@pytest.fixture
def open_() -> Iterator[Callable[..., GroupsEngine]]:
    """Opens pools of groups of 12 device blocks of 4 tokens each; all are verified and closed at the end."""
    from group_engine import open_groups

    opened: list[GroupsEngine] = []

    def build(*groups: dict[str, Any], **options: Any) -> GroupsEngine:
        made = [{"device_blocks": 12} | group for group in groups]
        opened.append(open_groups(made, **{"max_sequence_tokens": 64} | options))
        return opened[-1]

    yield build
    end(opened)
