"""What the model does between requests: blocks brought to a tier, and leases."""

from __future__ import annotations

from collections.abc import Sequence

from .admission import Admission
from .batches import EXPIRIES_PER_CALL
from .store import Row
from .tiers import Block, Lease, LeaseExpired, Prompt


class Holds(Admission):
    """Verbs that no sequence takes part in."""

    # -- tiers ---------------------------------------------------------------------------------

    def bring(self, rows: Sequence[Row | None]) -> int:
        """Onboard what of these rows only the host has, as far as there is room."""
        held = [None if row is None else row.device or row.host for row in rows]
        for block in held:
            self._hold(block)
        self.expire(self.clock(), EXPIRIES_PER_CALL)
        onboarded = 0
        for place, row in enumerate(rows):
            if row is not None and row.device is None and self.free("device"):
                self._onboard(row)
                assert row.device is not None and row.host is not None
                row.device.refs, row.device.hold = 0, 1
                held[place] = row.device
                self._let_go(row.host)
                onboarded += 1
        for block in reversed(held):
            if block is not None:
                self._let_go(block)
        return onboarded

    def offload(self, prompt: Prompt) -> int:
        copies = []
        for content in self.contents(prompt):
            row = self.rows.get(content)
            if row is not None and row.device is not None and row.host is None:
                target = self.host_victim(row.device.priority)
                if target is None:
                    break
                copies.append(self.copy_to_host(row.device, target))
                copies[-1].hold += 1
        for block in copies:
            self._let_go(block)
        return len(copies)

    # -- pins ----------------------------------------------------------------------------------

    def lease(self, blocks: list[Block], owner: str) -> int:
        for block in blocks:
            block.pins += 1
            self.tier(block).unlist(block)
        lease = self.next_lease
        self.next_lease += 1
        self.leases[lease] = Lease(blocks, owner)
        return lease

    def close_lease(self, lease: int) -> None:
        if lease not in self.leases:
            raise LeaseExpired(lease)
        for block in self.leases.pop(lease).blocks:
            block.pins -= 1
            self.shelve(block)
