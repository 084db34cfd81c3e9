"""The source of the sim device's decisions: a seed, or a list that can be replayed and enumerated."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Choices(ABC):
    """The only source of what is undetermined in a SimDevice. Equal choices and equal calls give equal schedules."""

    @abstractmethod
    def choose(self, n: int) -> int:
        """Choose one of ``n`` (1 or more) ways to go on: an int in ``[0, n)``."""

    def early(self, n: int) -> int:
        """At a call that forces no step, choose which of ``n`` streams takes a step now, or -1 for none."""
        return self.choose(n + 1) - 1

    def permutation(self, n: int) -> NDArray[np.int64]:
        """An order of ``n`` things."""
        left = list(range(n))
        return np.array([left.pop(self.choose(len(left))) for _ in range(n)], np.int64)


class SeededChoices(Choices):
    """Random choices. ``progress`` (0 to 1) is the probability that one more step is taken early. Raises ValueError for
    another number."""

    def __init__(self, seed: int, progress: float) -> None:
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
            raise ValueError(f"progress={progress!r}: a number from 0 to 1 is needed")
        self._seed, self._progress = seed, progress
        self._random = random.Random(seed)
        self._array_random = np.random.default_rng(seed)

    def choose(self, n: int) -> int:
        return self._random.randrange(n) if n > 1 else 0

    def early(self, n: int) -> int:
        return self.choose(n) if self._random.random() < self._progress else -1

    def permutation(self, n: int) -> NDArray[np.int64]:
        return self._array_random.permutation(n)

    def __repr__(self) -> str:
        return f"seed={self._seed}, progress={self._progress}"


class ListedChoices(Choices):
    """The listed choices, then always the first way. ``made`` has every choice so far, with its number of ways."""

    def __init__(self, listed: Sequence[int] = ()) -> None:
        self._listed = tuple(listed)
        self.made: list[tuple[int, int]] = []

    def choose(self, n: int) -> int:
        if n == 1:
            return 0
        at = len(self.made)
        choice = self._listed[at] if at < len(self._listed) else 0
        if not 0 <= choice < n:
            raise ValueError(
                f"listed[{at}]={choice}: there are {n} ways here; the calls are not those that the list was made for"
            )
        self.made.append((choice, n))
        return choice

    def following(self) -> list[int] | None:
        """The list of the next schedule, depth first, or None after the last."""
        made = list(self.made)
        while made:
            choice, n = made.pop()
            if choice + 1 < n:
                return [earlier for earlier, _ in made] + [choice + 1]
        return None

    def __repr__(self) -> str:
        return f"choices=ListedChoices({[choice for choice, _ in self.made]})"
