"""The replays that are being sent: the place of each client in the history."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.publish.history import History, Place
from kvpool.publish.peers import Peer, Peers

TURN_BYTES = 1 << 20
"""What a client is sent at most before it is the next one's turn."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message, without a payload, that ends a replay."""


class Replays:
    """The replays of the peers of one socket, for one thread. A replay is a place in the history, not a copy of it: of
    the messages to a client, at most one is on its way.

    ``snapshot`` is a function that makes a history cover a message number. ``topic`` is the frame before the number of
    each message; None leaves that frame out. A client has one replay: a new request replaces its last one. The counts
    are: replays that reached their end, replays that ended early, and requests that were none.
    """

    def __init__(self, peers: Peers, history: History, snapshot: Callable[[int], None], topic: bytes | None) -> None:
        self._peers, self._history, self._snapshot, self._topic = peers, history, snapshot, topic
        self._places: dict[Peer, Place | None] = {}
        self.done = self.cut = self.malformed = 0

    def __len__(self) -> int:
        """How many clients have not been sent everything, or have not read all of it."""
        return len(self._places)

    def take_requests(self) -> None:
        """Begin what clients have asked for since the last call. Does not wait."""
        for peer, request in self._peers.poll():
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                self.malformed += 1
            elif not peer.open:
                self.cut += 1
            else:
                self.cut += self._places.get(peer) is not None
                self._places[peer] = Place(int.from_bytes(request[1], "big"))

    def go_on(self) -> bool:
        """Send what clients have room for. Returns whether there is more that can be sent now. Does not wait."""
        more = False
        for peer in list(self._places):
            left = TURN_BYTES
            while peer.open and not peer.unsent and left > 0 and (place := self._places[peer]) is not None:
                left -= self._tell(peer, place)
            if not peer.open:
                self.cut += self._places.pop(peer) is not None
            elif self._places[peer] is not None:
                more |= not peer.unsent
            elif not peer.unsent:
                del self._places[peer]
        return more

    def _tell(self, peer: Peer, place: Place) -> int:
        """Send the next message of a replay. Returns its bytes."""
        if not self._history.covers(place):
            self._snapshot(place.next)
        told = self._history.at(place)
        number, payload = (END, b"") if told is None else (told[0].to_bytes(8, "big"), told[1])
        frames = [b"", number, payload]
        if self._topic is not None:
            frames.insert(1, b"" if told is None else self._topic)
        self._peers.send(peer, frames)
        if told is not None:
            place.next += 1
        elif peer.open:
            self.done, self._places[peer] = self.done + 1, None
        return len(payload) + 1
