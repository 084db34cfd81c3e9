"""KVEventPublisher: tells the events of a pool to subscribers, and what they missed to those who ask, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from kvpool.errors import PoolClosed
from kvpool.events import Events
from kvpool.layout import integer_argument
from kvpool.manager import KVCacheManager
from kvpool.publish.history import History
from kvpool.publish.messages import BLOCKS_PER_MESSAGE, HASHES, Encoder, Spec
from kvpool.remote.endpoints import is_loopback
from kvpool.sequence import bool_argument

if TYPE_CHECKING:
    from typing_extensions import Self

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message, without a payload, that ends a replay."""
SNAPSHOT_MESSAGES = 1024
REQUEST_BYTES_MAX = 64
REQUESTS_PER_TURN = 16
_ENDED = "the publisher has ended: it or the pool was closed, or an error that the log has"
_log = logging.getLogger(__name__)


@dataclass
class PublisherStats:
    """What a publisher has done so far."""

    messages: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    lost_blocks: int = 0
    """Blocks whose events the publisher did not get: the pool's buffer was full, or somebody else took them."""
    resyncs: int = 0
    """Times that all subscribers were told to forget everything, and then what is cached: once at the start, and after every loss."""
    overflows: int = 0
    """Times that the queue of some subscriber was found full: it misses that message and all up to when it has read again, and sees the
    gap in the numbers."""
    replays: int = 0
    snapshots: int = 0
    """Snapshots made for replays that began before what is kept."""
    replays_cut: int = 0
    """Replays that ended early: the client has gone, or reads nothing."""
    malformed: int = 0
    """Requests for a replay that were none."""


class KVEventPublisher:
    """Publishes what a pool has cached, on both tiers, to routers that read the events of vLLM. A context manager.

    Messages are ``[topic, number, payload]``: the number counts messages, 8 bytes big-endian; the payload is MessagePack, ``[time,
    [events], rank]``, each event a map with ``type`` BlockStored, BlockRemoved or AllBlocksCleared; medium "GPU" is the device tier, "CPU"
    the host tier. The first message begins with AllBlocksCleared and all that is cached already. So does the next one after a loss of
    events, and the last one, when the publisher or the pool is closed, is AllBlocksCleared: nobody goes on believing in what is gone.

    Whoever asks the replay socket with ``["", number]`` gets ``["", number, payload]`` for each message from there on, and one with number
    -1 and no payload at the end. Where the first of them are gone, a snapshot that begins with AllBlocksCleared takes their place.

    Parameters
    ----------
    cache : the pool, with ``event_capacity``; the publisher takes its events, and nobody else should. To be closed after the publisher.
    endpoint : ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too.
    replay_endpoint : the same for the replay socket; None: no replays.
    topic : what subscribers may filter by.
    bind : False connects to a subscriber that listens at ``endpoint``.
    allow_remote : let other machines read. There is no encryption and no password: who reaches the sockets reads every prompt's token ids.
    data_parallel_rank : this worker's.
    group : of layers: the only one to tell of, for routers that know no groups. None: all; where there are several, their messages say
        ``group_idx``, ``kv_cache_spec_kind`` and ``kv_cache_spec_sliding_window``.
    block_hashes : "int", the first 64 bits of a key, which every router takes; or "bytes", all 16, by which kvpool finds blocks.
    interval_ms : how often the pool is asked for events.
    replay_messages, replay_bytes : what is kept for replays, at most.
    hwm : messages that may wait for one subscriber.

    Token ids and extra ids below zero are told modulo 2**32 and 2**64; salts and adapter names as they are. Thread-safe. Raises ValueError,
    TypeError, and zmq.ZMQError for an endpoint that cannot be had. Does not change what is cached.
    """

    def __init__(
        self, cache: KVCacheManager, endpoint: str = "tcp://127.0.0.1:*", *, replay_endpoint: str | None = "tcp://127.0.0.1:*",
        topic: str = "", bind: bool = True, allow_remote: bool = False, data_parallel_rank: int = 0, group: int | None = None,
        block_hashes: str = "int", interval_ms: int = 10, replay_messages: int = 10_000, replay_bytes: int = 64 << 20, hwm: int = 100_000,
    ) -> None:  # fmt: skip
        if not isinstance(cache, KVCacheManager):
            raise TypeError(f"cache={cache!r:.80}: accepted is a KVCacheManager")
        if not isinstance(topic, str):
            raise TypeError(f"topic={topic!r:.80}: accepted is a string")
        if block_hashes not in HASHES:
            raise ValueError(f"block_hashes={block_hashes!r:.80}: accepted are {', '.join(HASHES)}")
        remote = bool_argument("allow_remote", allow_remote)
        for name, one in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            if one is not None or name == "endpoint":
                _check_endpoint(name, one, remote)
        bool_argument("bind", bind)
        rank = integer_argument("data_parallel_rank", data_parallel_rank, 0, (1 << 31) - 1)
        self._interval = integer_argument("interval_ms", interval_ms, 1, 60_000)
        kept = integer_argument("replay_messages", replay_messages, 1, 1 << 24)
        self._history = History(kept, integer_argument("replay_bytes", replay_bytes, 0, 1 << 50))
        waiting = integer_argument("hwm", hwm, 1, 1 << 24)
        self._cache, self._topic = cache, topic.encode()
        self._encoder = Encoder(cache.tokens_per_block, block_hashes, rank, _specs(cache, group))
        self._stats = PublisherStats()
        self._lock, self._flushes, self._ended = threading.Lock(), list[Future[None]](), False
        self._stopping, self._linger_ms = threading.Event(), 0
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._sockets(endpoint, bind, replay_endpoint, waiting, kept)
            # In the caller's thread, so that a pool that cannot be published is refused here.
            events = cache.events(snapshot=True)
            self._expected = events.next
            self._resync(events)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvpool-publisher", daemon=True)
        self._thread.start()

    def _sockets(self, endpoint: str, bind: bool, replay_endpoint: str | None, hwm: int, kept: int) -> None:
        self._pub, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.ipv6, self._replay.ipv6 = "[" in endpoint, "[" in (replay_endpoint or "")
        self._pub.sndhwm = hwm
        # What a full queue would drop in silence is an error first.
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        if bind:
            self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)
        self.endpoint = str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        self.replay_endpoint: str | None = None
        self._replay.maxmsgsize = REQUEST_BYTES_MAX
        # A replay fits a client's queue; one that asks again without reading gets an error here, not memory without end.
        self._replay.router_mandatory, self._replay.sndhwm, self._replay.rcvhwm = True, kept + SNAPSHOT_MESSAGES + 1, REQUESTS_PER_TURN
        if replay_endpoint is not None:
            self._replay.bind(replay_endpoint)
            self.replay_endpoint = str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    # -- for other threads -----------------------------------------------------------------------

    def stats(self) -> PublisherStats:
        """A copy; each figure is right, and they may be some microseconds apart."""
        return replace(self._stats)

    def flush(self) -> None:
        """Wait until everything decided before this call is published: at most about ``interval_ms``. Raises PoolClosed where the publisher
        has ended, or ends before that."""
        done: Future[None] = Future()
        with self._lock:
            if self._ended:
                raise PoolClosed(_ENDED)
            self._flushes.append(done)
        done.result()

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or has ended because the pool was."""
        return self._ended

    def close(self, linger_ms: int = 1000) -> None:
        """Tell subscribers to forget everything and end; give them ``linger_ms`` to take what waits for them. Closing twice is fine."""
        self._linger_ms = integer_argument("linger_ms", linger_ms, 0, 1 << 30)
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                asked = self._replay.poll(self._interval)
                with self._lock:
                    asked_before = len(self._flushes)
                self._publish_new()
                with self._lock:
                    flushes, self._flushes = self._flushes[:asked_before], self._flushes[asked_before:]
                for done in flushes:
                    done.set_result(None)
                if asked:
                    self._answer_some()
        except PoolClosed:
            pass
        except Exception:
            _log.exception("the publisher has ended")
        finally:
            with self._lock:
                self._ended = True
                for done in self._flushes:
                    done.set_exception(PoolClosed(_ENDED))
            self._send(self._encoder.cleared())
            self._stopping.wait()
            self._replay.close(linger=0)
            self._pub.close(linger=self._linger_ms)
            self._context.term()

    def _take(self, snapshot: bool = False) -> tuple[Events, bool]:
        """What is new, and whether something before it was lost."""
        events = self._cache.events(snapshot=snapshot)
        lost, self._expected = events.number - self._expected, events.next
        self._stats.lost_blocks += lost
        return events, lost > 0

    def _publish_new(self) -> None:
        events, lost = self._take()
        if lost:
            self._resync(self._take(snapshot=True)[0])
        else:
            self._publish(events, 0, len(events))

    def _publish(self, events: Events, start: int, stop: int) -> None:
        for payload, stored, removed in self._encoder.payloads(events, start, stop):
            self._send(payload, stored, removed)

    def _resync(self, events: Events) -> None:
        """Tell everybody to forget everything, and then the snapshot in these events."""
        self._stats.resyncs += 1
        self._publish(events, events.before_snapshot, len(events))

    def _snapshot(self, start: int) -> None:
        """Publish what is new, and keep what is cached then for those who missed message ``start`` and may have seen all before."""
        events, lost = self._take(snapshot=True)
        if lost:
            self._resync(events)
        else:
            self._publish(events, 0, events.before_snapshot)
        # It takes the numbers of messages that were missed, and there must be as many: who has seen a number skips it.
        messages = min(SNAPSHOT_MESSAGES, self._history.next - start)
        blocks = max(BLOCKS_PER_MESSAGE, -(-len(events.records) // messages))
        told = self._encoder.payloads(events, events.before_snapshot, len(events), blocks)
        self._history.keep_snapshot([payload for payload, _, _ in told])
        self._stats.snapshots += 1

    def _send(self, payload: bytes, stored: int = 0, removed: int = 0) -> None:
        """Publish a message. If some subscriber's queue is full it goes to the others, and is counted."""
        frames = [self._topic, self._history.next.to_bytes(8, "big"), payload]
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._stats.overflows += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._history.add(payload)
        self._stats.messages += 1
        self._stats.stored_blocks += stored
        self._stats.removed_blocks += removed

    def _answer_some(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                client, *request = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                self._stats.malformed += 1
            else:
                self._answer(client, int.from_bytes(request[1], "big"))

    def _answer(self, client: bytes, start: int) -> None:
        if self._history.needs_snapshot(start):
            self._snapshot(start)
        try:
            for number, payload in self._history.since(start):
                self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            self._replay.send_multipart([client, b"", END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._stats.replays_cut += 1
        else:
            self._stats.replays += 1


def _specs(cache: KVCacheManager, group: Any) -> dict[int, Spec]:
    """The groups to tell of, and how."""
    if group is None and len(cache.groups) > 1:
        return {one.index: Spec.of(one) for one in cache.groups}
    index = 0 if group is None else integer_argument("group", group, 0, len(cache.groups) - 1)
    if cache.groups[index].kind == "cross":
        raise ValueError(f"group={index}: accepted is None, or a group that is not for cross attention, of which nothing is cached")
    return {index: Spec()}


def _check_endpoint(name: str, endpoint: Any, remote: bool) -> None:
    if not isinstance(endpoint, str):
        raise TypeError(f"{name}={endpoint!r:.80}: accepted is a string")
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest:
        raise ValueError(f"{name}={endpoint!r:.80}: accepted are tcp://HOST:PORT and ipc://PATH")
    if scheme == "tcp" and not remote and not is_loopback(rest.rpartition(":")[0]):
        raise ValueError(f"{name}={endpoint!r:.80}: without allow_remote=True, accepted are addresses of this machine")
