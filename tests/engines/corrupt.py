"""kvpool's plug-in for vLLM with a fault in it, which a comparison of tokens and logprobs has to find, or a failure
that it must survive."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvpool
from kvpool.integrations.vllm.spec import KVPoolOffloadingSpec


class FaultyCopies:
    """A copy engine whose copies of two or more host blocks go wrong, as ``fault`` says."""

    def __init__(self, copies: Any, fault: str) -> None:
        self._copies, self._fault, self._calls = copies, fault, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def copy_in(self, blocks: Any, host_blocks: Any, **options: Any) -> Any:
        self._calls += bool(np.any(blocks))  # block 0 is vLLM's null block, by which copies are compiled
        if self._fault == "failing_stores" and self._calls % 2:
            raise kvpool.errors.DeviceError("a store that a test lets fail")
        return self._copies.copy_in(blocks, host_blocks, **options)

    def copy_out(self, blocks: Any, host_blocks: Any, **options: Any) -> Any:
        self._calls += bool(np.any(blocks))
        if self._fault == "failing_loads" and self._calls % 2:
            raise kvpool.errors.DeviceError("a load that a test lets fail")
        blocks, host_blocks = np.array(blocks), np.array(host_blocks)
        if len(host_blocks) > 1:
            if self._fault == "swapped":
                host_blocks[:2] = host_blocks[1::-1]
            elif self._fault == "doubled":
                host_blocks[0] = host_blocks[1]
            elif self._fault == "stale":
                blocks[0] = -1
        return self._copies.copy_out(blocks, host_blocks, **options)


class FaultySpec(KVPoolOffloadingSpec):
    """The option ``fault`` names the fault."""

    def get_copies(self, groups: Any) -> Any:
        return FaultyCopies(super().get_copies(groups), self.extra_config["fault"])
