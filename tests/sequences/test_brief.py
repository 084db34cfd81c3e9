"""Small calls keep the interpreter's lock: beside a busy thread, who gives it away gets it back milliseconds later."""

from __future__ import annotations

from typing import Any

import pytest

import kvpool
from kvpool.device import cpu
from kvpool.pool import core, prompts
from kvpool.state import admit, verbs


def test_small_calls_keep_the_lock_of_the_interpreter_and_large_ones_give_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, bool]] = []

    class Watched:
        """A jitted function, of which calls are noted."""

        def __init__(self, module: Any, name: str) -> None:
            self.name, self.plain = name, getattr(module, name)
            monkeypatch.setattr(module, name, self)

        def __call__(self, *args: Any) -> Any:
            calls.append((self.name, False))
            return self.plain(*args)

        def keep_gil(self, *args: Any) -> Any:
            calls.append((self.name, True))
            return self.plain(*args)

    for module, name in ((admit, "admit"), (verbs, "commit"), (verbs, "offload"), (cpu, "copy_in_order")):
        Watched(module, name)
    monkeypatch.setattr(core, "KEEP_GIL_SEQUENCES", 1)
    monkeypatch.setattr(prompts, "KEEP_GIL_TOKENS", 8)
    layout = kvpool.BlockLayout(1, 1, 2, 4, dtype="uint8")
    with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
        a, b = cache.add_sequence(list(range(8))), cache.add_sequence(list(range(100, 109)))
        cache.commit([a, b])
        cache.commit(a)
        cache.swap_out(a)
        monkeypatch.setattr(cpu, "KEEP_GIL_BYTES", 0)
        cache.swap_out(b)
        cache.resume([a, b])
        cache.content.offload([9, 8, 7, 6])
        cache.release([a, b])
    expected = [("admit", True), ("admit", False), ("commit", False), ("commit", True)]
    assert calls[:6] == [*expected, ("copy_in_order", True), ("copy_in_order", False)]
    assert calls[-1] == ("offload", False), "of no sequence"
