"""ZeroMQ contexts that never block the end of their process."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import zmq

GRACE_S = 5.0
_log = logging.getLogger(__name__)
# Contexts that did not end are kept, because their destructors would block too.
_unended: list[zmq.Context[Any]] = []


def new_context() -> zmq.Context[Any]:
    """A context whose sockets drop unsent messages when they are closed, unless a socket is told otherwise.

    With ZeroMQ's own default, collecting a context that nobody has closed waits for a peer that is gone.
    """
    context: zmq.Context[Any] = zmq.Context()
    context.linger = 0
    return context


def end(context: zmq.Context[Any], linger_ms: int = 0) -> None:
    """Close the sockets of a context, which no other thread uses any more, and end it.

    Messages may still leave within ``linger_ms``. Rarely, if sockets were watched by monitors, ZeroMQ waits for itself
    without end here. So this waits some seconds longer than that. Then it warns, and keeps the context until the
    process ends.
    """
    ending = threading.Thread(target=partial(context.destroy, linger=linger_ms), name="kvpool-zmq-end", daemon=True)
    ending.start()
    ending.join(linger_ms / 1000 + GRACE_S)
    if ending.is_alive():
        _unended.append(context)
        _log.warning(
            "ZeroMQ did not end within %.0f s: its threads stay until the process ends", linger_ms / 1000 + GRACE_S
        )
