"""KVEventPublisher: a thread that sends the events of a pool to subscribers, and replays of missed messages on
request."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import zmq

from kvpool.common.arguments import bool_argument, number_argument, text_argument
from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.common.threads import Bell
from kvpool.errors import PoolClosed
from kvpool.integrations.kv_events.messages import BLOCKS_PER_MESSAGE, HASHES, Encoder, HashFormat, Spec
from kvpool.integrations.kv_events.replay_server import History, ReplayServer
from kvpool.pool.events import Events
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.connections import Connections, end, new_context
from kvpool.remote.listener import binding, endpoint_argument
from kvpool.storage.storage_manager import StorageManager

SNAPSHOT_MESSAGES = 1024
SUBSCRIPTION_BYTES_MAX, SAID_BYTES_MAX = 256, 64 << 10
"""The most bytes of one subscription beside the publisher's own topic, and of all that a subscriber ever sends. ZeroMQ
takes some 40 bytes for each byte of a topic, and the publisher's thread stores it."""
POLL_MS = 100
"""How often the thread looks for peers that say too much, or do not end their handshakes."""
END_EVERY_S = 0.1
"""Memory that an ended connection has held is freed within this time."""
MESSAGE_BYTES = 512
"""Bytes of a message besides its payload."""
_ENDED = "the publisher has ended: it or the pool was closed, or an error that the log has"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublisherLimits:
    """The most that a publisher keeps, for replays and for slow readers.

    Parameters
    ----------
    replay_messages, replay_bytes : int, default 10,000 and 64 MiB
        The most that is kept for replays.
    hwm : int, default 100,000
        Messages that may wait for one subscriber. The subscriber misses further ones.
    queue_bytes : int, default 256 MiB
        Bytes that may wait for all subscribers. Beyond it, the slowest one is disconnected.
    connections : int, default 64
        Peers of each of the two sockets. More are refused.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    """

    replay_messages: int = 10_000
    replay_bytes: int = 64 << 20
    hwm: int = 100_000
    queue_bytes: int = 256 << 20
    connections: int = 64

    def __post_init__(self) -> None:
        integer_argument("replay_messages", self.replay_messages, 1, 1 << 24)
        integer_argument("replay_bytes", self.replay_bytes, 0, 1 << 50)
        integer_argument("hwm", self.hwm, 1, 1 << 24)
        integer_argument("queue_bytes", self.queue_bytes, 1, 1 << 50)
        integer_argument("connections", self.connections, 1, 1 << 16)


@dataclass
class PublisherStats:
    """What a publisher has done so far.

    Attributes
    ----------
    messages, stored_blocks, removed_blocks : int
        Messages that were published, and the blocks in their events.
    lost_blocks : int
        Blocks whose events the publisher did not get, because the pool's buffer was full or another reader took them.
    resyncs : int
        How often all subscribers got AllBlocksCleared and then everything that is cached: once at the start, and after
        every loss.
    overflows : int
        How often a subscriber's queue was full. The subscriber misses that message and all until it has read again, and
        detects the gap in the numbers.
    disconnected : int
        Subscribers that were disconnected because they read too slowly and ``queue_bytes`` were waiting.
    connections_refused : int
        Connections that were ended at once, because their socket already had ``connections`` of them.
    talkers : int
        Subscribers that were disconnected because they had sent more than any subscriber has to say.
    queued_bytes : int
        Bytes that wait now, for the slowest subscriber and for clients of the replay socket.
    replays, snapshots : int
        Replays that were sent, and snapshots for replays that began before the oldest message that is kept.
    replays_cut : int
        Replays that ended early: the client has gone, or has sent another request meanwhile.
    replays_displaced : int
        Clients of the replay socket that had requested nothing for longest, and lost their place to another.
    malformed : int
        Malformed requests for a replay.
    """

    messages: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    lost_blocks: int = 0
    resyncs: int = 0
    overflows: int = 0
    disconnected: int = 0
    connections_refused: int = 0
    talkers: int = 0
    queued_bytes: int = 0
    replays: int = 0
    snapshots: int = 0
    replays_cut: int = 0
    replays_displaced: int = 0
    malformed: int = 0


class _Sent:
    """The bytes of messages that ZeroMQ holds. ZeroMQ itself counts messages, which can be of any size."""

    def __init__(self) -> None:
        self._messages: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.nbytes = 0

    def add(self, frame: zmq.Frame) -> None:
        nbytes = len(frame) + MESSAGE_BYTES
        self._messages.append((frame.tracker, nbytes))
        self.nbytes += nbytes

    def settle(self) -> None:
        """Forget what ZeroMQ has let go of."""
        while self._messages and self._messages[0][0].done:
            self.nbytes -= self._messages.popleft()[1]


class KVEventPublisher(Closing):
    """Publishes what a pool has cached, on both tiers, to routers that read the events of vLLM. A context manager.

    Parameters
    ----------
    cache : KVCacheManager
        The pool, with ``event_capacity``. The publisher reads its events, and nothing else should. Close the pool after
        the publisher.
    endpoint : str, default ``"tcp://127.0.0.1:*"``
        ``*`` takes any free port; ``ipc://PATH`` works too.
    replay_endpoint : str or None, default ``"tcp://127.0.0.1:*"``
        The same for the replay socket. None serves no replays.
    topic : str, default ""
        Subscribers can filter by it.
    bind : bool, default True
        False connects to a subscriber that listens at ``endpoint``.
    allow_remote : bool, default False
        Let other machines read. There is no encryption and no password: every client that reaches the sockets can read
        the token ids of every prompt.
    data_parallel_rank : int, default 0
        The rank of this worker.
    group : int, optional
        Publish only this group of layers, for routers that know no groups. By default all. With several groups,
        messages have ``group_idx``, ``kv_cache_spec_kind`` and ``kv_cache_spec_sliding_window``.
    storage : StorageManager, optional
        The storage manager of this pool, if it has one. Then its events are published: blocks in its stores have the
        name of the store, in capitals, as medium.
    block_hashes : {"int", "bytes"}, default "int"
        "int" sends the first 64 bits of a key, which every router accepts. "bytes" sends all 16 bytes, by which kvpool
        finds blocks.
    interval_seconds : float, default 0.01
        How often the pool is asked for events.
    limits : PublisherLimits, optional
        The most that is kept.
    replay_topic : bool, default True
        False leaves the topic out of replays, ``["", number, payload]``, for readers of vLLM before 0.33.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    zmq.ZMQError
        For an endpoint that is not available.
    ForkedProcess
        From all calls in a child of ``os.fork()``.

    Notes
    -----
    Thread-safe. Does not change what is cached.

    A message is ``[topic, number, payload]``. The number counts messages, as 8 bytes big-endian. The payload is
    MessagePack, ``[time, [events], rank]``. Each event is a map with ``type`` BlockStored, BlockRemoved or
    AllBlocksCleared. Its medium is "GPU" for the device tier and "CPU" for the host tier. Extra ids below zero are
    sent modulo 2**64, salts and adapter names as they are.

    The first message begins with AllBlocksCleared and all that is cached already. So does the first message after a
    loss of events. When the publisher or the pool is closed, the last message is AllBlocksCleared. So no router keeps
    entries of blocks that are gone.

    A client asks the replay socket with ``["", number]``. It gets ``["", topic, number, payload]`` for each message
    from that number on, and ``["", "", -1, ""]`` at the end, as in vLLM 0.33. If the first of these messages are gone,
    a snapshot that begins with AllBlocksCleared replaces them.

    A client has one replay: a new request replaces a replay that has not ended. A replay is as fast as its client
    reads, with one message and at most 1 MiB of the system on the way. A client that is too slow gets a snapshot in
    the middle.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        replay_endpoint: str | None = "tcp://127.0.0.1:*",
        topic: str = "",
        bind: bool = True,
        allow_remote: bool = False,
        data_parallel_rank: int = 0,
        group: int | None = None,
        storage: StorageManager | None = None,
        block_hashes: HashFormat = "int",
        interval_seconds: float = 0.01,
        limits: PublisherLimits | None = None,
        replay_topic: bool = True,
    ) -> None:
        if not isinstance(cache, KVCacheManager):
            raise TypeError(f"cache: expected a KVCacheManager, got {cache!r:.80}")
        if storage is not None and (not isinstance(storage, StorageManager) or storage.pool is not cache):
            raise ValueError(f"storage: expected the StorageManager of this pool, or None, got {storage!r:.80}")
        if limits is not None and not isinstance(limits, PublisherLimits):
            raise TypeError(f"limits: expected PublisherLimits or None, got {limits!r:.80}")
        most = limits or PublisherLimits()
        topic, hashes = text_argument("topic", topic), choice_argument("block_hashes", block_hashes, HASHES)
        needs = "" if bool_argument("allow_remote", allow_remote) else "allow_remote=True"
        endpoint_argument("endpoint", endpoint, needs)
        if replay_endpoint is not None:
            endpoint_argument("replay_endpoint", replay_endpoint, needs)
        bool_argument("bind", bind)
        topics = bool_argument("replay_topic", replay_topic)
        rank = integer_argument("data_parallel_rank", data_parallel_rank, 0, (1 << 31) - 1)
        self._wait_s = min(number_argument("interval_seconds", interval_seconds, 1e-3, 60.0), POLL_MS / 1e3)
        self._history = History(most.replay_messages, most.replay_bytes)
        self._queue_bytes, peers = most.queue_bytes, most.connections
        self._source, self._topic = storage or cache, topic.encode()
        self._encoder = Encoder(cache.tokens_per_block, hashes, rank, _specs(cache, group))
        self._stats = PublisherStats()
        stays_here(self)
        self._lock = threading.Lock()
        self._asked = 0
        self._answered = 0
        self._bell = Bell()
        self._stopping = False
        self._ended = False
        self._linger_ms = 0
        self._sent = _Sent()
        self._unsent = 0
        self._may_end = 0.0
        named = self._topic if topics else None
        self._replays = ReplayServer(replay_endpoint, peers, self._history, self._snapshot, named)
        self.replay_endpoint = self._replays.endpoint
        self._context: zmq.Context[Any] = new_context()
        try:
            self._publish_at(endpoint, bind, most.hwm, peers)
            # This runs in the caller's thread, so that a pool that cannot be published is refused here.
            events = self._source.events(snapshot=True)
            self._expected = events.next
            self._resync(events)
        except BaseException:
            end(self._context)
            self._replays.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvpool-publisher", daemon=True)
        self._thread.start()

    def _publish_at(self, endpoint: str, bind: bool, hwm: int, peers: int) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.ipv6 = "[" in endpoint
        self._pub.sndhwm = hwm
        # A full queue would drop a message in silence. It raises an error first.
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._pub.maxmsgsize = SUBSCRIPTION_BYTES_MAX + len(self._topic)
        # What waits for a subscriber that has left is dropped, even if the publisher connects.
        self._pub.immediate = True
        self._subscribers = Connections(self._pub, peers, SAID_BYTES_MAX + len(self._topic))
        if bind:
            with binding(endpoint):
                self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)
        self.endpoint = str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    # -- for other threads -----------------------------------------------------------------------

    def stats(self) -> PublisherStats:
        """Return a copy of the figures.

        Returns
        -------
        PublisherStats
            Each figure is right, but they may be some microseconds apart.
        """
        replays, sent = self._replays, self._sent
        return replace(
            self._stats,
            replays=replays.done,
            replays_cut=replays.cut,
            queued_bytes=sent.nbytes + self._unsent,
            malformed=replays.malformed,
            replays_displaced=replays.displaced,
            talkers=self._subscribers.talkers,
            connections_refused=self._subscribers.refused + replays.refused,
        )

    def flush(self) -> None:
        """Wait until everything decided before this call is published: at most about ``interval_seconds``.

        Raises
        ------
        PoolClosed
            If the publisher has ended, or ends before that.
        """
        with self._lock:
            self._asked += 1
            mine = self._asked
        self._bell.wait_for(lambda: self._answered >= mine or self._ended)
        if self._answered < mine:
            raise PoolClosed(_ENDED)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or has ended because the pool was closed."""
        return self._ended

    def close(self, timeout: float = 1.0) -> None:
        """Have subscribers drop everything, and end. A second call does nothing.

        Parameters
        ----------
        timeout : float, default 1.0
            Seconds that subscribers have to read what waits for them.
        """
        self._linger_ms = round(1e3 * number_argument("timeout", timeout, 0.0, 1e6))
        self._stopping = True
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            _log.exception("the publisher has ended")
        finally:
            self._end()
            self._replays.close()
            self._subscribers.close()
            self._pub.close(linger=self._linger_ms)
            end(self._context, self._linger_ms)

    async def _serve(self) -> None:
        await self._replays.listen()
        # Connections beyond the limit are refused as they come.
        asyncio.get_running_loop().add_reader(self._subscribers.events, self._subscribers.poll)
        # The sockets listen until the publisher is closed, and their bounds hold until then.
        while not self._stopping:
            self._subscribers.poll()
            self._unsent = self._replays.unsent()
            if not self._ended:
                self._turn()
            await asyncio.sleep(self._wait_s)

    def _turn(self) -> None:
        """Publish new events, for all calls that have asked for that before."""
        asked = self._asked
        try:
            self._publish_new()
            self._answered = asked
            self._sent.settle()
        except PoolClosed:
            self._end()
        except Exception:
            _log.exception("the publisher has ended")
            self._end()
        self._bell.ring()

    def _end(self) -> None:
        """Have subscribers forget everything, once."""
        if not self._ended:
            self._ended = True
            self._bell.ring()
            self._send(self._encoder.cleared())

    def _take(self, snapshot: bool = False) -> tuple[Events, bool]:
        """Take new events. Returns them, and whether earlier ones were lost."""
        events = self._source.events(snapshot=snapshot)
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
        """Have all subscribers drop everything, then send the snapshot in these events."""
        self._stats.resyncs += 1
        self._publish(events, events.before_snapshot, len(events))

    def _snapshot(self, start: int) -> None:
        """Publish new events, and keep a snapshot for clients that missed message ``start`` and may have seen all
        before it."""
        events, lost = self._take(snapshot=True)
        if lost:
            self._resync(events)
        else:
            self._publish(events, 0, events.before_snapshot)
        # The snapshot takes the numbers of messages that were missed, and needs as many: a client skips a number that
        # it has seen.
        messages = min(SNAPSHOT_MESSAGES, self._history.next - start)
        blocks = max(BLOCKS_PER_MESSAGE, -(-len(events.records) // messages))
        snapshot = self._encoder.payloads(events, events.before_snapshot, len(events), blocks)
        self._history.keep_snapshot([payload for payload, _, _ in snapshot])
        self._stats.snapshots += 1

    def _send(self, payload: bytes, stored: int = 0, removed: int = 0) -> None:
        """Publish a message. If a subscriber's queue is full, the others still get it, and the overflow is counted."""
        frame = zmq.Frame(payload, track=True, copy=False)
        frames: list[Any] = [self._topic, self._history.next.to_bytes(8, "big"), frame]
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._stats.overflows += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._sent.add(frame)
        self._bound_queue()
        self._history.add(payload)
        self._stats.messages += 1
        self._stats.stored_blocks += stored
        self._stats.removed_blocks += removed

    def _bound_queue(self) -> None:
        """Disconnect the slowest subscriber if too many bytes wait. After it has connected again, it sees the gap in
        the numbers."""
        self._sent.settle()
        now = time.monotonic()
        if self._sent.nbytes <= self._queue_bytes or now < self._may_end:
            return
        self._subscribers.poll()
        if self._subscribers.end_slowest():
            self._may_end = now + END_EVERY_S
            if not self._stats.disconnected:
                _log.warning("%d bytes wait for subscribers: the slowest is disconnected", self._sent.nbytes)
            self._stats.disconnected += 1


def _specs(cache: KVCacheManager, group: Any) -> dict[int, Spec]:
    """The groups to publish, and their fields in messages."""
    if group is None and len(cache.groups) > 1:
        return {one.index: Spec.of(one) for one in cache.groups}
    index = 0 if group is None else integer_argument("group", group, 0, len(cache.groups) - 1)
    if cache.groups[index].kind == "cross":
        raise ValueError(f"group: expected None or a group without cross attention, got {index}")
    return {index: Spec()}
