"""WrappedDevice: a device that forwards every call to another one. Its subclasses watch or change a few calls."""

from __future__ import annotations

from typing import Any

from kvpool.device.base import Device


def _forwarded(name: str) -> Any:
    def call(self: WrappedDevice, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*args, **named)

    return call


class WrappedDevice(Device):
    """Forwards to ``inner``, under the name of that device. Subclasses override what they change."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name, self.synchronous, self.one_memory = inner.name, inner.synchronous, inner.one_memory
        self.views = inner.views

    @property
    def at_once(self) -> int | None:  # type: ignore[override]
        return self.inner.at_once

    allocate, adopt, free = (_forwarded(name) for name in ("allocate", "adopt", "free"))
    available_bytes, as_stream, create_stream = (
        _forwarded(name) for name in ("available_bytes", "as_stream", "create_stream")
    )
    bind, copy_blocks, enqueue = (_forwarded(name) for name in ("bind", "copy_blocks", "enqueue"))
    record, wait, query = (_forwarded(name) for name in ("record", "wait", "query"))
    synchronize, calibrate = (_forwarded(name) for name in ("synchronize", "calibrate"))
    host_access, close = (_forwarded(name) for name in ("host_access", "close"))
