"""Ports for servers of other programs."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int = 1) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
