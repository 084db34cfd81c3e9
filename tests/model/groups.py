"""The model of a pool of several groups of layers: a model of each, whose sequences, leases and reservations have the
same numbers.

Every verb is done to all groups, and a call that raises in one leaves all as they were. What a prompt reuses is decided
together; what is taken, evicted and expires is each group's own affair, since groups share no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .admission import Seq
from .batches import Batches, all_or_nothing
from .cross import Cross
from .model import Model
from .recurrent import Recurrent
from .tiers import Content, Lease, Namespace, NeverFits, OutOfBlocks, Prompt

KINDS: dict[str, type[Model]] = {"attention": Model, "recurrent": Recurrent, "cross": Cross}


class GroupsModel(Batches):
    """``groups`` has the options of each: device_blocks, host_blocks, kind, window, sinks, snapshot_tokens."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, partial_reuse: bool = True, **common: Any) -> None:
        kinds = [group.get("kind", "attention") for group in groups]
        common["partial_reuse"] = partial_reuse and "recurrent" not in kinds
        options = [{name: value for name, value in group.items() if name != "kind"} for group in groups]
        self.groups: list[Model] = [
            KINDS[kind](**group_options, **common) for kind, group_options in zip(kinds, options, strict=True)
        ]

    @property
    def sequences(self) -> dict[int, Seq]:
        """Those of the first group: tokens are counted alike in all."""
        return self.groups[0].sequences

    @property
    def swapped(self) -> dict[int, Seq]:
        return self.groups[0].swapped

    @property
    def reservations(self) -> dict[int, Seq]:
        return self.groups[0].reservations

    @property
    def overdue(self) -> set[int]:
        return self.groups[0].overdue

    @property
    def leases(self) -> dict[int, Lease]:
        return self.groups[0].leases

    def _each(self, verb: str, *args: Any, **options: Any) -> list[Any]:
        with all_or_nothing(self.groups):
            return [getattr(group, verb)(*args, **options) for group in self.groups]

    # -- sequences -----------------------------------------------------------------------------

    def blocks_needed(
        self, prompt: Prompt | None = None, *, sequences: Sequence[int] = (), new_tokens: int = 0
    ) -> list[int]:
        if prompt is not None:
            return self.needs_of_prompt(prompt, new_tokens)
        return self._each("blocks_needed", sequences=sequences, new_tokens=new_tokens)

    def evictable_after_release(self, ids: Sequence[int]) -> list[int]:
        return self._each("evictable_after_release", ids)

    def append_tokens(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        try:
            self._each("append_tokens", ids, tokens)
        except OutOfBlocks:
            counts = [len(new) for new in tokens]
            if any(group.never_fits(ids, counts) for group in self.groups):
                raise NeverFits from None
            raise

    def commit(self, ids: Sequence[int], counts: Sequence[int] | None = None) -> None:
        self._each("commit", ids, counts)

    def rewind(self, ids: Sequence[int], counts: Sequence[int]) -> None:
        self._each("rewind", ids, counts)

    def accept_drafts(self, ids: Sequence[int], drafts: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        self._each("accept_drafts", ids, drafts, accepted)

    def release(self, ids: Sequence[int], *, store: bool = True) -> None:
        self._each("release", ids, store=store)

    def swap_out(self, ids: Sequence[int]) -> int:
        return sum(self._each("swap_out", ids))

    def resume(self, ids: Sequence[int]) -> int:
        return sum(self._each("resume", ids))

    def fork(self, ids: Sequence[int], n: int) -> list[list[int]]:
        return self._each("fork", ids, n)[0]

    def reorder(self, ids: Sequence[int], parents: Sequence[int], *, store: bool = False) -> None:
        self._each("reorder", ids, parents, store=store)

    # -- reservations, leases, tiers -----------------------------------------------------------

    def commit_reserved(self, reservation: int, count: int) -> None:
        self._each("commit_reserved", reservation, count)

    def abort_reserved(self, reservation: int) -> None:
        self._each("abort_reserved", reservation)

    def close_lease(self, lease: int) -> None:
        self._each("close_lease", lease)

    def revoke(self, owner: str) -> int:
        """Groups whose part of a lease is empty count it too."""
        return self._each("revoke", owner)[0]

    def offload(self, prompt: Prompt) -> int:
        return sum(self._each("offload", prompt))

    def forget(self, prompt: Prompt) -> int:
        """A sequence that has a block of the prompt, whether it is cached or not, publishes nothing any more."""
        contents = [group.contents(prompt) for group in self.groups]
        done = sum(
            group.erase_contents(group_contents)
            for group, group_contents in zip(self.groups, contents, strict=True)
            if group.matches
        )
        self._withdraw(set(contents[0]))
        return done + sum(group.erase_tails(prompt) for group in self.groups if group.partial_reuse and group.matches)

    def forget_keys(self, contents: Sequence[Content]) -> int:
        done = sum(group.erase_contents(contents) for group in self.groups)
        self._withdraw(set(contents))
        return done

    def _withdraw(self, contents: set[Content]) -> None:
        for i in [*self.sequences, *self.swapped, *self.reservations]:
            blocks = [block for group in self.groups for block in group.row(i).blocks if block is not None]
            if any(block.content in contents for block in blocks):
                self._make_private(i)

    def forget_namespace(self, namespace: Namespace) -> int:
        done = sum(group.erase_namespace(namespace) for group in self.groups)
        for i in [*self.sequences, *self.swapped, *self.reservations]:
            if self.groups[0].row(i).namespace == namespace:
                self._make_private(i)
        return done

    def _make_private(self, i: int) -> None:
        for group in self.groups:
            group.row(i).private = True

    def set_priority(self, contents: Sequence[Content], priority: int, ttl: int | None) -> int:
        return sum(group.set_priority(contents, priority, ttl) for group in self.groups)

    def refresh(self, now_ms: int | None = None) -> int:
        return sum(self._each("refresh", now_ms))

    def reset(self, force: bool = False) -> None:
        self._each("reset", force)

    def check(self) -> None:
        """The invariants of each group, and that all know the same sequences."""
        for group in self.groups:
            group.check()
            for name in ("sequences", "swapped", "reservations"):
                mine, other = (
                    {i: (seq.items, seq.committed, seq.cached) for i, seq in getattr(owner, name).items()}
                    for owner in (group, self)
                )
                assert mine == other, f"{name} differ"
            assert [*group.leases] == [*self.leases]
