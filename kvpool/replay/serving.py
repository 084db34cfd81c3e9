"""A worker that serves others while it works: a replay that repeats its trace, and a block server on its host
tier."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

from kvpool.errors import KVPoolError
from kvpool.remote import BlockServer, Limits
from kvpool.replay.engine import Replay, ReplayConfig
from kvpool.replay.schedule import worst_blocks
from kvpool.replay.stress_run import Figure
from kvpool.replay.traces import Trace

_SWITCH_SECONDS = 1e-4
"""How long the scheduler's thread may keep the interpreter while the server's thread waits."""


class Serving:
    """Replays a trace again and again until it is stopped, and serves meanwhile. A context manager: leaving it closes
    server and pool.

    After each request its prompt is offloaded, so that other workers find it on the host until it is evicted.
    ``config`` needs ``secret``. It needs ``verify`` too if the bytes are to be compared, since only then are they
    written. Errors of ``Replay`` and ``BlockServer`` propagate.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, endpoint: str) -> None:
        self._requests, self._live = trace.requests, list(trace.requests)
        self.replay = Replay(Trace(trace.name, trace.format, self._live), config, progress=self._admitted)
        self._stop = threading.Event()
        self._done = 0
        self.failure: str | None = None
        try:
            self.server = BlockServer(self.replay.cache, endpoint, limits=Limits(requests_per_client=16))
        except BaseException:
            self.replay.close()
            raise

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.close()
        self.replay.close()

    def stop(self) -> None:
        """Have ``run`` end after the current request. Thread-safe."""
        self._stop.set()

    def run(self) -> list[Figure]:
        """Replay until ``stop`` or KeyboardInterrupt, close the server, and return the figures. Afterwards ``failure``
        says what went wrong."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            self.replay.run()
        except KeyboardInterrupt:
            self.failure = "interrupted"
        except Exception as error:
            self.failure = f"scheduler: {type(error).__name__}: {error}"
        finally:
            sys.setswitchinterval(before)
            self.server.close()
        return self._figures()

    def _admitted(self, count: int) -> None:
        """Called after every request, on the scheduler's thread."""
        request, cache = self._live[self._done], self.replay.cache
        self._done += count
        if worst_blocks(request, cache.tokens_per_block) <= cache.device_blocks:
            cache.offload(cache.block_keys(request.prompt(), salt=request.salt, adapter_id=request.adapter_id))
        if self._stop.is_set():
            del self._live[self._done :]
        elif self._done == len(self._live):
            self._live += [replace(request, index=self._done + place) for place, request in enumerate(self._requests)]

    def _figures(self) -> list[Figure]:
        cache, served = self.replay.cache, self.server.stats()
        try:
            cache.verify()
        except KVPoolError as error:
            self.failure = self.failure or f"after the run: {type(error).__name__}: {error}"
        stats = cache.stats()
        evicted = stats.forgotten_host_blocks + stats.redundant_dropped
        figures = [
            Figure("requests that the scheduler admitted meanwhile", self._done, ">= 1", self._done >= 1),
            Figure("host blocks evicted meanwhile", evicted, "", True),
            Figure("blocks served", served.blocks, "", True),
            Figure("blocks asked for that were not there", served.missing_blocks, "", True),
            Figure("requests refused", served.refused, "", True),
        ]
        zero = {
            "answers dropped": served.dropped,
            "transfers left": served.transfers,
            "leases left": stats.leases,
            "blocks left pinned": stats.device.pinned + stats.host.pinned,
            "blocks lost": stats.lost_blocks,
        }
        return figures + [Figure(name, value, "= 0", value == 0) for name, value in zero.items()]
