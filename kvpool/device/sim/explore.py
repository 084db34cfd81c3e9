"""explore: a small piece of code under every schedule that the sim device can run it with."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.device.sim.choices import ListedChoices
from kvpool.device.sim.device import SimDevice
from kvpool.errors import KVPoolError
from kvpool.layout import integer_argument

_WHOLE_MOVE = 2**62


class ScheduleFailed(KVPoolError, AssertionError):
    """``body`` failed under one schedule. ``choices`` runs it again: ``SimDevice(choices=ListedChoices(choices), ...)``."""

    def __init__(self, number: int, choices: list[int], error: Exception, device: SimDevice) -> None:
        super().__init__(f"schedule {number} failed with {type(error).__name__}: {error}\n[run it again with {device!r}]")
        self.choices = choices


def explore(body: Callable[[SimDevice], object], *, limit: int = 10_000, chunk_bytes: int = _WHOLE_MOVE) -> int:
    """Call ``body(device)`` with a new device for every schedule there is, depth first; returns how many there are.

    At every call that forces nothing each schedule stops or takes one more step, of each stream in turn. After ``body`` the rest runs,
    and the device is checked and closed. ``body`` must do the same in every call but for what the device answers. A move is copied in
    one step, or with ``chunk_bytes`` in several. Raises ScheduleFailed from the error of the first schedule that fails, and ValueError
    when ``limit`` schedules were not all.
    """
    limit = integer_argument("limit", limit, 1, 2**62)
    listed: list[int] | None = []
    for number in range(1, limit + 1):
        choices = ListedChoices(listed or ())
        device = SimDevice(choices=choices, chunk_bytes=chunk_bytes)
        try:
            body(device)
            if not device.closed:
                device.synchronize()
                device.close()
        except Exception as error:
            raise ScheduleFailed(number, [choice for choice, _ in choices.made], error, device) from error
        listed = choices.following()
        if listed is None:
            return number
    raise ValueError(f"limit={limit}: there are more schedules; allow more, enqueue less, or copy in larger chunks")
