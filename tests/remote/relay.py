"""A TCP relay in front of a server: held, it is a client that reads nothing; cut, a network that fails."""

from __future__ import annotations

import socket
import threading


class Relay:
    """Passes bytes between clients and the server, and what the server sends only while it is not held. A context
    manager."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(self) -> None:
        self._open.clear()

    def pass_on(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Break every connection; new ones work."""
        for connection in self._sockets:
            _shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket()
            # Little of what the server sends is on its way while nobody reads.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for source, target, gated in ((client, server, False), (server, client, True)):
                self._threads.append(threading.Thread(target=self._pump, args=(source, target, gated), daemon=True))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, gated: bool) -> None:
        try:
            while data := source.recv(65536):
                if gated:
                    self._open.wait()
                target.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(target)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exception: object) -> None:
        # A thread that accepts is woken by a shutdown, not by a close.
        _shut(self._listener)
        self.cut()
        self._open.set()
        for thread in list(self._threads):
            thread.join(600)
        for connection in [self._listener, *self._sockets]:
            connection.close()


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
