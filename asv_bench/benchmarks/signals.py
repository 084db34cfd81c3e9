"""What it costs that handlers of signals wait: a short call in the main thread, with as many handlers as a program may
have."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from .pools import Pooled, make_pool, make_prompts

NUMBERS = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)


class Signals(Pooled):
    """A commit that finds nothing to do, with Python's handler of SIGINT and some more."""

    params = [0, 1, 3]
    param_names = ["more_handlers"]

    before: Sequence[tuple[int, Any]] = ()

    def setup(self, more_handlers: int) -> None:
        self.cache = make_pool(64)
        (prompt,) = make_prompts(1, 64)
        self.sequence = self.cache.add_sequence(prompt)
        self.cache.commit(self.sequence)
        self.before = [
            (number, signal.signal(number, lambda number, frame: None)) for number in NUMBERS[:more_handlers]
        ]

    def time_commit(self, more_handlers: int) -> None:
        self.cache.commit(self.sequence)

    def teardown(self, more_handlers: int) -> None:
        for number, handler in self.before:
            signal.signal(number, handler)
        super().teardown(more_handlers)
