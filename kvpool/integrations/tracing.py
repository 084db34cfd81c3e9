"""Spans of OpenTelemetry: around admissions, copies between the tiers, loads of storage managers, and jobs of stores.

Nothing is traced before ``trace`` is called, and until then it costs nothing: it replaces the methods that it traces.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kvpool.pool import CachedContent, Imports
from kvpool.pool.manager import KVCacheManager
from kvpool.storage.storage_manager import StorageManager
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.store_worker import StoreWorker

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_CALLS: dict[type, tuple[str, ...]] = {
    KVCacheManager: ("add_sequence", "add_sequence_batch", "plan_batch", "swap_out", "resume"),
    CachedContent: ("prefetch", "offload"),
    Imports: ("reserve", "import_blocks"),
    StorageManager: ("prefetch",),
}
_JOBS = ("find", "load", "save", "forget")

_request: ContextVar[str] = ContextVar("kvpool_request", default="")
_replaced: list[tuple[type, str, Any]] = []
"""The classes that are traced, and what they had under a name: None where a base class has it."""


@contextmanager
def request(name: str) -> Iterator[None]:
    """Attribute calls inside, on this thread or task, to a request.

    Parameters
    ----------
    name : str
        The id of the request: the attribute ``kvpool.request`` of the spans.

    Yields
    ------
    None
        The context has no value.
    """
    token = _request.set(name)
    try:
        yield
    finally:
        _request.reset(token)


def trace(tracer: Tracer | None = None) -> None:
    """Begin to trace all pools, storage managers and queues of stores of this process. A second call does nothing.

    Parameters
    ----------
    tracer : opentelemetry.trace.Tracer, optional
        By default that of the global provider, for which the extra ``otel`` is needed.

    Raises
    ------
    ImportError
        Without a tracer and without OpenTelemetry.

    Notes
    -----
    Not thread-safe: call it before pools are used. Spans have the names ``kvpool.add_sequence_batch``,
    ``kvpool.store.load`` and so on, and no tokens, keys or salts. The span of a store request begins when it is queued,
    and ends in ``StoreWorker.poll``. While calls are traced, a signal handler that raises may do so in the tracer,
    after a call that has happened: use it where handlers do not raise.
    """
    if _replaced:
        return
    if tracer is None:
        try:
            from opentelemetry.trace import get_tracer
        except ModuleNotFoundError as error:
            raise ImportError('tracing needs opentelemetry-api: pip install ".[otel]"') from error
        tracer = get_tracer("kvpool")
    for owner, names in _CALLS.items():
        for name in names:
            _replace(owner, name, _spanned(tracer, name, getattr(owner, name)))
    for name in _JOBS:
        _replace(StoreWorker, name, _begun(tracer, name, getattr(StoreWorker, name)))


def untrace() -> None:
    """Trace nothing any more. Spans of store requests that are in flight do not end."""
    while _replaced:
        owner, name, before = _replaced.pop()
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def _replace(owner: type, name: str, call: Callable[..., Any]) -> None:
    _replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, call)


def _attributes() -> dict[str, str]:
    return {"kvpool.request": _request.get()} if _request.get() else {}


def _spanned(tracer: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with tracer.start_as_current_span(f"kvpool.{name}", attributes=_attributes()):
            return call(*args, **kwargs)

    return traced


def _begun(tracer: Any, name: str, call: Callable[..., StoreRequest]) -> Callable[..., StoreRequest]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def traced(*args: Any, **kwargs: Any) -> StoreRequest:
        bound = signature.bind(*args, **kwargs)
        span, done = tracer.start_span(f"kvpool.store.{name}", attributes=_attributes()), bound.arguments.get("done")

        def end(job: StoreRequest) -> None:
            span.set_attribute("kvpool.blocks", len(job.codes))
            span.end()
            if done is not None:
                done(job)

        bound.arguments["done"] = end
        return call(*bound.args, **bound.kwargs)

    return traced
