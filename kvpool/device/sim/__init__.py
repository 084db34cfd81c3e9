"""The sim device: its streams run late and in any order. It tests the pool, and engines that use it."""

from kvpool.device.sim.explore import ListedChoices, ScheduleFailed, explore
from kvpool.device.sim.order import Access, Deadlock, Race, RaceError, UndeclaredWrite
from kvpool.device.sim.scheduler import Choices, SeededChoices
from kvpool.device.sim.shadow import POISON
from kvpool.device.sim.sim_device import Gate, SimDevice

__all__ = [
    "POISON",
    "Access",
    "Choices",
    "Deadlock",
    "Gate",
    "ListedChoices",
    "Race",
    "RaceError",
    "ScheduleFailed",
    "SeededChoices",
    "SimDevice",
    "UndeclaredWrite",
    "explore",
]
