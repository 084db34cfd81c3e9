"""Every benchmark of asv_bench runs once, at its smallest size, and closes what it opens."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import pytest
from zmq.utils.garbage import GarbageCollectorThread

from kvpool.device.memory.pools import MemoryPools
from kvpool.pool.manager import KVCacheManager
from tests.waiting import until

PACKAGE = "asv_bench.benchmarks"
KINDS = {"mem", "peakmem", "time", "timeraw", "track"}


class Benchmark(NamedTuple):
    module: str
    owner: type[Any]
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.owner.__name__}.{self.name}"

    @property
    def params(self) -> list[list[Any]]:
        """The values of each parameter; asv takes a plain list where there is one."""
        parameters = list(getattr(self.owner, "params", []))
        return parameters if not parameters or isinstance(parameters[0], (list, tuple)) else [parameters]


def discover() -> list[Benchmark]:
    package = importlib.import_module(PACKAGE)
    benchmarks = []
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        classes = [item for item in vars(module).values() if inspect.isclass(item)]
        for owner in [item for item in classes if item.__module__ == module.__name__]:
            benchmarks += [Benchmark(name, owner, method) for method in dir(owner) if method.partition("_")[0] in KINDS]
    return benchmarks


BENCHMARKS = discover()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[MemoryPools]:
    """The memory of every pool that is made; every pool is verified before it is closed."""
    made: list[MemoryPools] = []
    init, close = MemoryPools.__init__, KVCacheManager.close

    def noted(self: MemoryPools, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def verified(self: KVCacheManager, force: bool = False) -> Any:
        if not self.closed:
            self.verify()
        return close(self, force)

    monkeypatch.setattr(MemoryPools, "__init__", noted)
    monkeypatch.setattr(KVCacheManager, "close", verified)
    return made


def thread_count() -> int:
    """All threads but the one that pyzmq keeps for memory that is sent from its place. Those of a store that was closed
    have nothing left to do, and end when the interpreter comes to them."""
    return sum(not isinstance(thread, GarbageCollectorThread) for thread in threading.enumerate())


def run_once(benchmark: Benchmark, parameters: list[Any]) -> None:
    """As asv does: set up, run, and tear down, also what was skipped. A value that is tracked is a number with a unit.
    The difference of two times of the clock may be below 0. A cache holds what was measured with the parameters."""
    made = benchmark.owner()
    body = getattr(made, benchmark.name)
    if hasattr(made, "setup_cache"):
        made.params = [[value] for value in parameters]
        parameters = [made.setup_cache(), *parameters]
    try:
        if hasattr(made, "setup"):
            made.setup(*parameters)
        result = body(*parameters)
    finally:
        if hasattr(made, "teardown"):
            made.teardown(*parameters)
    if benchmark.name.startswith("track_"):
        assert isinstance(result, Real) and isfinite(result) and isinstance(body.unit, str)


@pytest.mark.exhaustive
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=str)
def test_benchmark_runs_at_its_smallest_size_and_closes_what_it_opens(
    benchmark: Benchmark, opened: list[MemoryPools]
) -> None:
    threads = thread_count()
    try:
        run_once(benchmark, [values[0] for values in benchmark.params])
    except NotImplementedError as error:
        pytest.skip(f"{benchmark}: {error}")
    finally:
        assert all(pools.closed for pools in opened)
        until(lambda: thread_count() <= threads, "end of threads")
    without = ("disk", "hostcache", "kv_copies", "peers", "signals", "start", "words")
    assert opened or benchmark.module in without, "a pool was expected, and none was seen"


OWNERS = sorted({benchmark.owner for benchmark in BENCHMARKS}, key=str)


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_parameters_are_named_and_start_with_the_smallest(owner: type[Any]) -> None:
    params = Benchmark("", owner, "").params
    assert len(params) == len(getattr(owner, "param_names", []))
    for values in params:
        assert values and (isinstance(values[0], str) or list(values) == sorted(values))
