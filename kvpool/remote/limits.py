"""What a server does for its clients at most, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpool.layout import integer_argument
from kvpool.remote.messages import BLOCKS_MAX


@dataclass(frozen=True)
class Limits:
    """What a server does for its clients, at most. ``None`` in ``bytes_in_total``: half of the host tier.

    ``requests_per_client`` and the two sums of bytes count what has been sent and not yet released.
    """

    blocks_per_request: int = 64
    requests_per_client: int = 8
    bytes_per_client: int = 64 << 20
    bytes_in_total: int | None = None

    def __post_init__(self) -> None:
        integer_argument("blocks_per_request", self.blocks_per_request, 1, BLOCKS_MAX)
        integer_argument("requests_per_client", self.requests_per_client, 1, 1 << 16)
        integer_argument("bytes_per_client", self.bytes_per_client, 1, 1 << 62)
        if self.bytes_in_total is not None:
            integer_argument("bytes_in_total", self.bytes_in_total, 1, 1 << 62)


@dataclass
class ServerStats:
    """What a server has done so far, and what it has under way."""

    requests: int = 0
    """Requests for blocks that were answered with blocks, or with the word that there are none."""
    refused: int = 0
    """Requests that were answered with an error, malformed messages among them."""
    malformed: int = 0
    dropped: int = 0
    """Answers that could not be sent: the client has gone, or has too many unread."""
    blocks: int = 0
    bytes: int = 0
    missing_blocks: int = 0
    """Keys that were asked for and had no host block."""
    revoked: int = 0
    """Requests whose leases somebody revoked before the blocks were released; the client was told to discard them."""
    transfers: int = 0
    """Under way now: sent and not yet released. The same in bytes follows."""
    transfer_bytes: int = 0


def fitting(limits: Limits, block_bytes: int, host_blocks: int) -> Limits:
    """Limits under which every request that they accept can be served: at least one block, and no more in total than was said."""
    size = block_bytes
    total = max(size, host_blocks * size // 2) if limits.bytes_in_total is None else limits.bytes_in_total
    each = min(limits.bytes_per_client, total)
    if each < size:
        raise ValueError(f"limits: {each} bytes do not hold one block of {size} bytes")
    return replace(limits, blocks_per_request=min(limits.blocks_per_request, each // size), bytes_per_client=each, bytes_in_total=total)
