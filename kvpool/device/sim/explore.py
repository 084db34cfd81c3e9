"""explore: runs a small piece of code under every schedule that is possible on the sim device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.common.arrays.layout import integer_argument
from kvpool.device.sim.scheduler import Choices
from kvpool.device.sim.sim_device import SimDevice
from kvpool.errors import KVPoolError

_WHOLE_MOVE = 2**62


class ListedChoices(Choices):
    """Choices from a list, and the first way after its end.

    Parameters
    ----------
    listed : sequence of int
        The choices, such as those of ``ScheduleFailed.choices``.

    Attributes
    ----------
    made : list of (int, int)
        Every choice so far, and the number of ways that there were.

    Notes
    -----
    Not thread-safe: the device calls it under its lock.
    """

    def __init__(self, listed: Sequence[int] = ()) -> None:
        self._listed = tuple(listed)
        self.made: list[tuple[int, int]] = []

    def choose(self, n: int) -> int:
        if n == 1:
            return 0
        at = len(self.made)
        choice = self._listed[at] if at < len(self._listed) else 0
        if not 0 <= choice < n:
            raise ValueError(f"listed[{at}]: expected one of {n} ways, got {choice}: the list was made for other calls")
        self.made.append((choice, n))
        return choice

    def following(self) -> list[int] | None:
        """Return the choices of the next schedule, depth first.

        Returns
        -------
        list of int or None
            None after the last schedule.
        """
        made = list(self.made)
        while made:
            choice, n = made.pop()
            if choice + 1 < n:
                return [earlier for earlier, _ in made] + [choice + 1]
        return None

    def __repr__(self) -> str:
        return f"choices=ListedChoices({[choice for choice, _ in self.made]})"


class ScheduleFailed(KVPoolError, AssertionError):
    """The function that ``explore`` calls has failed under one schedule.

    Attributes
    ----------
    choices : list of int
        The schedule: ``SimDevice(choices=ListedChoices(choices), ...)`` runs it again.
    """

    def __init__(self, number: int, choices: list[int], error: Exception, device: SimDevice) -> None:
        super().__init__(
            f"schedule {number} failed with {type(error).__name__}: {error}\n[run it again with {device!r}]"
        )
        self.choices = choices


def explore(body: Callable[[SimDevice], None], *, limit: int = 10_000, chunk_bytes: int = _WHOLE_MOVE) -> int:
    """Call a function with a new device for every possible schedule, depth first.

    Parameters
    ----------
    body : callable
        ``(device) -> None``. It must make the same calls each time, as far as the device returns the same results.
    limit : int, default 10,000
        The most schedules.
    chunk_bytes : int, optional
        The bytes that a step of a copy copies. By default a copy takes one step.

    Returns
    -------
    int
        The number of schedules.

    Raises
    ------
    ScheduleFailed
        From the error of the first schedule that fails.
    ValueError
        If there are more than ``limit`` schedules.

    Notes
    -----
    At every call that forces no step, a schedule either continues or takes one more step, of any of the streams. After
    ``body``, the rest runs, and the device is checked and closed.
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
    raise ValueError(
        f"limit: expected as many as there are schedules, got {limit}: enqueue less, or copy in larger chunks"
    )
