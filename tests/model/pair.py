"""The pool and its model side by side: one verb is done to both, then everything visible is compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import note

from engine import Clock, EventReplay, Request
from group_engine import Side, open_groups
from kvpool import EvictionOptions
from kvpool.state import records, saving
from kvpool.state.records import DEFAULT_PRIORITY
from tests import debug

from .figures import COUNTERS
from .groups import GroupsModel
from .model import Model
from .outcomes import Choices, Failed, outcome
from .tiers import Content, Prompt

EVICTION = ("offload_min_priority", "offload_min_reuse")
KINDS_OF_LIST = (records.EMPTY, records.CLEAN)


def ids_of(blocks: Sequence[Any]) -> list[int]:
    return [-1 if block is None else block.id for block in blocks]


class Pair:
    """Sequences and leases are named by the model's ids; block ids are the same on both sides."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, tokens_per_block: int, **options: Any) -> None:
        """``groups`` has the options of each: parts (of its layouts), and those of the model's groups."""
        self.clock = Clock()
        policy = options.pop("policy", "lru")
        rules = [{name: value for name, value in group.items() if name != "parts"} for group in groups]
        self.model = GroupsModel(rules, tokens_per_block=tokens_per_block, clock=self.clock, **options)
        eviction = EvictionOptions(**{name: options.pop(name) for name in EVICTION if name in options})
        self.engine = open_groups(
            groups,
            tokens_per_block=tokens_per_block,
            max_sequence_tokens=64,
            event_capacity=4096,
            clock=self.clock,
            policy=policy,
            eviction=eviction,
            **options,
        )
        self.choices = (
            Choices(self.engine.states()) if self.engine.cache.core.states[0].policy_state is not None else None
        )
        self.cache, self.sides = self.engine.cache, self.engine.sides
        self.requests: dict[int, Request] = {}
        self.away: dict[int, Request] = {}
        self.leases: dict[int, Any] = {}
        self.reservations: dict[int, Any] = {}
        self.expired: set[int] = set()
        """Reservations that were not committed before their deadline."""
        self.released: list[tuple[int, int]] = []
        self.events = [EventReplay() for _ in groups]
        self.listed = [list[int]() for _ in groups]
        """For each group, the host blocks of the default priority, in their previous order."""
        self.next_event = 0
        self.keys: dict[Content, bytes] = {}
        core = self.cache.core
        self.cursor, self.at = core.decide(None, saving.open_dirty_cursor, True), np.array([0, records.NONE, 0])
        self.check()

    def both(self, real: Callable[[], Any], model: Callable[[], Any], *, compare: bool = True) -> Any:
        """Do one thing to both sides; returns the model's outcome, None where both raised the same."""
        got = outcome(real)
        if self.choices is not None:  # the pool's policy chooses for the model, which checks that it may
            for group, chosen in zip(self.model.groups, self.choices.read(), strict=True):
                group.chosen = chosen
        expected = outcome(model)
        assert isinstance(expected, Failed) or not any(group.chosen for group in self.model.groups), "chosen, not taken"
        note(f"# model: {expected!r}\n# pool: {got!r}")
        if isinstance(expected, Failed) or isinstance(got, Failed):
            if got != expected:
                self._raise_unexpected(got)
                raise AssertionError(f"the pool: {got}, the model: {expected}")
            return None
        assert not compare or got == expected, f"the pool: {got}, the model: {expected}"
        return expected

    @staticmethod
    def _raise_unexpected(got: Any) -> None:
        if isinstance(got, Failed) and got.name not in ("OutOfBlocks", "OutOfSequences"):
            raise got.error

    def real_ids(self, ids: Sequence[int]) -> list[int]:
        return [(self.requests | self.away)[i].id for i in ids]

    def keyed(self, prompt: Prompt) -> Any:
        extra = None if prompt.extra_ids is None else np.asarray(prompt.extra_ids, np.int64)
        names = {"salt": prompt.salt, "adapter_id": prompt.adapter_id, "extra_ids": extra}
        return self.cache.block_keys(list(prompt.tokens), **names, reuse=prompt.reuse, publish=prompt.publish)

    def key_of(self, content: Content) -> bytes:
        """The pool's key of a content, 16 bytes."""
        if content not in self.keys:
            (salt, adapter), items = content
            tokens, extra = zip(*items, strict=True)
            prompt = Prompt(tokens, salt, adapter, extra if any(extra) else None)
            self.keys[content] = self.keyed(prompt).keys[-1].tobytes()
        return self.keys[content]

    def each(self, call: Callable[..., Any]) -> list[Any]:
        """Return the answer of a call for each group."""
        return [call(**self.engine.named(side.index)) for side in self.sides]

    # -- verbs that change this file's records ----------------------------------------------------

    def add(self, prompts: Sequence[Prompt], **options: Any) -> None:
        options = {name: value for name, value in options.items() if name != "encoder_tokens" or value is not None}
        note(f"add({prompts}, {options})")
        admissions: list[Any] = []
        keyed = [self.keyed(prompt) for prompt in prompts]
        planned, free = self.plan(prompts, keyed, options.get("encoder_tokens")), self.engine.free_blocks()
        promised = [self.model.match_prefix(prompt) for prompt in prompts]
        never = {
            i
            for i, tokens in enumerate(options.get("encoder_tokens") or [0] * len(prompts))
            if self._never(prompts[i], tokens)
        }
        admitted = self.both(
            lambda: admissions.append(self.cache.add_sequence_batch(keyed, **options)),
            lambda: self.model.add_sequence_batch(prompts, **options),
            compare=False,
        )
        if admitted is None:
            assert options.get("retention") or planned.admitted < len(prompts), "a plan that was not kept"
            return
        (got,) = admissions
        self._check_kept(planned, got, [was - is_ for was, is_ in zip(free, self.engine.free_blocks(), strict=True)])
        assert len(admitted) == len(got.ids) and got.admitted == sum(admission is not None for admission in admitted)
        assert set(got.refused) == never
        encoded = options.get("encoder_tokens") or [0] * len(prompts)
        for i, (ours, prompt, match, encoder) in enumerate(zip(admitted, prompts, promised, encoded, strict=False)):
            if ours is None:
                assert i in never and got.ids[i] == -1 and got.cached_tokens[i] == 0
                continue
            actual = (got.device_tokens[i], got.host_tokens[i], got.partial_tokens[i], got.missed_blocks[i])
            expected = (ours.match.device_tokens, ours.match.host_tokens, ours.match.partial_tokens, ours.missed_blocks)
            assert actual == expected, f"request {i} got {actual}, the model expects {expected}"
            assert got.cached_tokens[i] == ours.match.tokens
            assert expected[:2] == (match.device_tokens, match.host_tokens), "full blocks that were promised"
            request = self.engine.admitted(
                int(got.ids[i]),
                prompt.tokens,
                salt=prompt.salt,
                adapter_id=prompt.adapter_id,
                extra_ids=prompt.extra_ids,
                encoder_tokens=encoder,
            )
            self.requests[ours.id] = request

    def plan(self, prompts: Sequence[Prompt], keyed: Sequence[Any], encoder_tokens: Sequence[int] | None) -> Any:
        """What the pool plans, which changes no byte of it, as the model does."""
        named = {} if encoder_tokens is None else {"encoder_tokens": encoder_tokens}
        before = debug.dump_all(self.cache.core.states)
        got, expected = self.cache.plan_batch(keyed, **named), self.model.plan_batch(prompts, **named)
        assert debug.dump_all(self.cache.core.states) == before, "a plan has changed the pool"
        assert np.atleast_1d(got.blocks).tolist() == expected.blocks
        plan = [
            (admission.match.tokens, admission.missed_blocks) if admission else (0, 0)
            for admission in expected.admitted
        ]
        assert list(zip(got.cached_tokens, got.missed_blocks, strict=True)) == plan
        names = {request.id: i for i, request in self.requests.items()}
        for i, tokens, (ids, ahead) in zip(got.computing, got.computing_tokens, expected.computing, strict=True):
            assert tokens == ahead and (names.get(int(i)) in ids if ids else i == -1)
        return got

    def _check_kept(self, planned: Any, got: Any, taken: list[int]) -> None:
        """An admission is what was planned right before."""
        for name in ("cached_tokens", "device_tokens", "host_tokens", "partial_tokens", "missed_blocks"):
            np.testing.assert_array_equal(getattr(planned, name), getattr(got, name), name)
        assert planned.refused == got.refused and planned.admitted == got.admitted
        assert np.atleast_1d(planned.blocks).tolist() == taken
        np.testing.assert_array_equal(planned.full_tokens + planned.partial_tokens, planned.cached_tokens)

    def _never(self, prompt: Prompt, encoder_tokens: int) -> bool:
        return bool(prompt.tokens) and self.model.never_fits(prompt, encoder_tokens)

    def append(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        note(f"append({ids}, {tokens})")
        if self._append(ids, tokens):
            for i, new in zip(ids, tokens, strict=True):
                self.engine.appended(self.requests[i], new)

    def _append(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> bool:
        flat = [token for new in tokens for token in new]
        done = self.both(
            lambda: self.cache.append_tokens(self.real_ids(ids), flat, [len(new) for new in tokens]),
            lambda: self.model.append_tokens(ids, tokens) or True,
            compare=False,
        )
        return bool(done)

    def commit(self, ids: Sequence[int], counts: Sequence[int] | None) -> None:
        note(f"commit({ids}, {counts})")
        real = self.real_ids(ids)
        self.both(lambda: self.cache.commit(real, counts), lambda: self.model.commit(ids, counts))

    def rewind(self, ids: Sequence[int], counts: Sequence[int]) -> None:
        note(f"rewind({ids}, {counts})")
        done = self.both(
            lambda: self.cache.rewind(self.real_ids(ids), counts),
            lambda: self.model.rewind(ids, counts) or True,
            compare=False,
        )
        if done:
            for i, count in zip(ids, counts, strict=True):
                self.engine.rewound(self.requests[i], count)

    def fork(self, ids: Sequence[int], n: int) -> list[list[int]]:
        note(f"fork({ids}, {n})")
        forked: list[Any] = []
        ours = self.both(
            lambda: forked.append(self.cache.fork(self.real_ids(ids), n)),
            lambda: self.model.fork(ids, n),
            compare=False,
        )
        for parent, new, real in zip(ids, ours or [], forked[0] if ours else [], strict=False):
            for i, number in zip(new, real.tolist(), strict=True):
                self.requests[i] = self.engine.forked(self.requests[parent], number)
        return ours or []

    def reorder(self, ids: Sequence[int], parents: Sequence[int], store: bool) -> None:
        note(f"reorder({ids}, {parents}, store={store})")
        real = self.real_ids(ids)
        self.both(
            lambda: self.cache.reorder(real, parents, store=store),
            lambda: self.model.reorder(ids, parents, store=store),
        )
        self.engine.reordered([self.requests[i] for i in ids], parents)

    def draft(self, ids: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> bool:
        """Append a tree of drafts to each; whether there was room."""
        note(f"draft({ids}, {tokens}, {parents})")
        done = self._append(ids, tokens)
        for i, new, above in zip(ids if done else (), tokens, parents, strict=False):
            self.engine.drafted(self.requests[i], new, above)
        return done

    def accept_drafts(self, ids: Sequence[int], drafts: Sequence[int], accepted: Sequence[Sequence[int]]) -> bool:
        """Keep a path of each tree; whether it was done."""
        note(f"keep({ids}, {drafts}, {accepted})")
        flat, counts = [i for path in accepted for i in path], [len(path) for path in accepted]
        done = self.both(
            lambda: self.cache.accept_drafts(self.real_ids(ids), drafts, flat, counts),
            lambda: self.model.accept_drafts(ids, drafts, accepted) or True,
            compare=False,
        )
        for i, count, path in zip(ids if done else (), drafts, accepted, strict=False):
            self.engine.kept(self.requests[i], count, path)
        return bool(done)

    def swap_out(self, ids: Sequence[int]) -> None:
        note(f"swap_out({ids})")
        real = self.real_ids(ids)
        if self.both(lambda: self.cache.swap_out(real), lambda: self.model.swap_out(ids)) is not None:
            for i in ids:
                self.away[i] = self.requests.pop(i)
                del self.engine.live[self.away[i].id]

    def resume(self, ids: Sequence[int]) -> None:
        note(f"resume({ids})")
        real = self.real_ids(ids)
        if self.both(lambda: self.cache.resume(real), lambda: self.model.resume(ids)) is not None:
            for i in ids:
                self.requests[i] = self.away.pop(i)
                self.engine.live[self.requests[i].id] = self.requests[i]

    def exclusive(
        self, ids: Sequence[int], tokens: Sequence[Sequence[int]], gone: Sequence[int], prompt: Prompt
    ) -> None:
        """Commit and grow some, release others, and add a prompt, in one block. Each call is done or refused."""
        note(f"exclusive({ids}, {tokens}, {gone}, {prompt})")
        real, left, keyed, added = self.real_ids(ids), self.real_ids(gone), self.keyed(prompt), list[int]()
        flat, counts = [token for new in tokens for token in new], [len(new) for new in tokens]
        with self.cache.exclusive():
            self.both(lambda: self.cache.commit(real), lambda: self.model.commit(ids))
            self.both(lambda: self.cache.release(left, stop="tool_use"), lambda: self.model.release(gone))
            grown = self.both(
                lambda: self.cache.append_tokens(real, flat, counts),
                lambda: self.model.append_tokens(ids, tokens) or True,
                compare=False,
            )
            admitted = self.both(
                lambda: added.append(self.cache.add_sequence(keyed)),
                lambda: self.model.add_sequence(prompt),
                compare=False,
            )
        for i in gone:
            self.drop(i)
        for i, new in zip(ids if grown else (), tokens, strict=False):
            self.engine.appended(self.requests[i], new)
        if admitted is not None:
            names = {"salt": prompt.salt, "adapter_id": prompt.adapter_id, "extra_ids": prompt.extra_ids}
            self.requests[admitted.id] = self.engine.admitted(added[0], prompt.tokens, **names)

    def release(self, ids: Sequence[int], store: bool, **said: Any) -> None:
        """``said`` is what the policy hears, and the model does not."""
        note(f"release({ids}, store={store}, {said})")
        real = self.real_ids(ids)
        self.both(lambda: self.cache.release(real, store=store, **said), lambda: self.model.release(ids, store=store))
        for i in ids:
            self.drop(i)

    def reset(self, force: bool) -> None:
        self.both(lambda: self.cache.clear(force), lambda: self.model.reset(force))
        for i in [
            i for i in [*self.requests, *self.away] if i not in self.model.sequences and i not in self.model.swapped
        ]:
            self.drop(i)

    def drop(self, sequence: int) -> None:
        away = sequence in self.away
        request = (self.away if away else self.requests).pop(sequence)
        if not away:
            del self.engine.live[request.id]
        self.released.append((sequence, request.id))

    def save(
        self, verb: Callable[..., int], args: Sequence[Any], rows: int, expected: Callable[[], Sequence[list[Content]]]
    ) -> None:
        """Advance the dirty-block cursor, some rows at a time. ``expected``: what the model returns, for each group.
        The events report all groups together, in another order. The next victims that a policy names go in front."""
        note(f"save({verb}, {args}, {rows})")
        buffer, reported = np.empty((rows, saving.FOUND), np.int64), list[tuple[int, bytes]]()
        before: object = None
        while before != (now := (self.at.tolist(), len(reported))):
            before = now
            count = self.cache.core.decide(None, verb, self.cursor, *args, buffer)
            reported += [(int(row[0]), row[1:3].tobytes()) for row in buffer[:count]]
            for group, chosen in zip(self.model.groups, self.choices.read() if self.choices else (), strict=False):
                order = group.host.by_priority[DEFAULT_PRIORITY]
                first = {block: group.host.blocks[block] for block in chosen}
                assert first.keys() <= {block.id for block in order}, f"the policy has chosen {chosen}"
                order[:] = [*first.values(), *(block for block in order if block.id not in first)]
            if verb is saving.sweep and self.at[saving.PLACE] == records.NONE:
                break
        ours = [(g, self.key_of(content)) for g, group_contents in enumerate(expected()) for content in group_contents]
        if verb is saving.stored:
            reported, ours = sorted(reported), sorted(ours)
        assert reported == ours, f"the cursor returns {reported}, the model {ours}"
        assert self.at[saving.MISSED] == 0

    def lease(self, real: Callable[[], Any], model: Callable[[], int | None]) -> None:
        leases: list[Any] = []
        new = self.both(lambda: leases.append(real()), model, compare=False)
        if new is not None:
            self.leases[new] = leases[0]
            pinned = [(g, block) for g, group in enumerate(self.model.groups) for block in group.leases[new].blocks]
            got, ours = leases[0].blocks.tolist(), [self.model.global_id(g, block) for g, block in pinned]
            assert got == ours if len(self.sides) == 1 else sorted(got) == sorted(ours)
        else:
            assert leases in ([], [None])

    def reserve(self, prompt: Prompt, **options: Any) -> None:
        """Reserve, and write what the pool lacks."""
        note(f"reserve({prompt}, {options})")
        made: list[Any] = []
        ours = self.both(
            lambda: made.append(self.cache.imports.reserve(self.keyed(prompt), **options)),
            lambda: self.model.reserve(prompt, **options),
            compare=False,
        )
        if ours is None:
            return
        (reservation,) = made
        self.reservations[ours.id] = reservation
        assert reservation.skip_prefix_n_tokens == ours.match.tokens
        expected = self.engine.expected.of(prompt.namespace, prompt.items)
        for side in self.sides:
            self.engine.fill(side, self.reserved(ours.id, side.index), expected, ours.match.tokens)

    def reserved(self, reservation: int, group: int) -> list[int]:
        """The row of a reservation."""
        return self.engine.reserved(self.reservations[reservation], group)

    def end_reserved(self, reservation: int, count: int | None) -> None:
        """Commit ``count`` tokens, or abort."""
        note(f"end_reserved({reservation}, {count})")
        real = self.reservations[reservation]
        if count is None:
            self.both(real.abort, lambda: self.model.abort_reserved(reservation))
        else:
            self.both(lambda: real.commit(count), lambda: self.model.commit_reserved(reservation, count))

    # -- comparison ----------------------------------------------------------------------------

    def check(self) -> None:
        for g, group in enumerate(self.model.groups):
            tables = [(i, ids_of(s.blocks), len(s.items), s.committed) for i, s in group.sequences.items()]
            note(f"# group {g}: (sequence, blocks, tokens, committed): {tables}")
        self.model.check()
        self.cache.verify()
        for side, group, state in zip(self.sides, self.model.groups, self.engine.states(), strict=True):
            self._check_tiers(side, group, state)
            self._check_cached_bytes(side, group)
        self._check_sequences()
        self._check_stats()
        self.engine.check_all()
        self._check_reserved_bytes()
        self._check_swapped_bytes()
        self._check_events()

    def _follow_chains(self, index: int, group: Model, state: Any, order: list[int]) -> None:
        """A host block that joins others of its chain comes after them: there the model takes the pool's place. They
        may have gone since."""
        model_order, owners = group.host.by_priority[DEFAULT_PRIORITY], state.blocks["owner"]
        ours = {block.id for block in model_order}
        listed, before = [block for block in order if block in ours], self.listed[index]
        joined = {b for a, b in itertools.pairwise(listed) if owners[a] == owners[b] != records.NONE}
        joined |= {block for block in listed if block not in before and owners[block] != records.NONE}
        self.listed[index] = listed
        if [block for block in listed if block not in joined] == [b.id for b in model_order if b.id not in joined]:
            model_order[:] = [group.host.blocks[block] for block in listed]

    def _check_tiers(self, side: Side, group: Model, state: Any) -> None:
        lists, cached, where = debug.lists(state), debug.cached(state), f"group {side.index}, "
        if self.choices is not None:
            self._follow_chains(side.index, group, state, lists["host"])
        for name in ("device", "host"):
            assert lists[name] == group.order(name), (
                f"{where}{name}: eviction order {lists[name]}, the model's {group.order(name)}"
            )
            expected = {self.key_of(content): block for content, block in group.cached(name).items()}
            assert cached[name] == expected, f"{where}{name}: cached keys"
            tier = getattr(group, name)
            empty, redundant = state.lists[
                [getattr(records, name.upper()) * records.LISTS_PER_TIER + which for which in KINDS_OF_LIST], 2
            ]
            assert (empty, redundant) == (len(tier.empty), len(tier.redundant)), f"{where}{name}: empty, redundant"
            for block in tier.victims()[empty + redundant :]:
                assert state.blocks["priority"][block.id] == block.priority, f"{where}priority of {block}"
        saved = [block.saved for block in group.every_block() if block.indexed and block.content is not None]
        shown = [block.id for block in group.every_block() if block.indexed and block.content is not None]
        assert (state.blocks["saved"][shown] >> self.cursor & 1).tolist() == saved, f"{where}what the cursor has read"
        counted = dict(zip(records.COUNTERS, state.counters.tolist(), strict=True))
        assert {name: counted[name] for name in COUNTERS} == {name: group.counts[name] for name in COUNTERS}, (
            f"{where}counters"
        )

    def _check_stats(self) -> None:
        """Compare the figures of each group, and of all together."""
        stats = self.cache.stats()
        open_now = [
            len(each) for each in (self.model.sequences, self.model.swapped, self.model.reservations, self.model.leases)
        ]
        assert [stats.sequences, stats.swapped, stats.reservations, stats.leases] == open_now
        overdue = self.model.overdue
        self.expired |= overdue
        assert (stats.expired_reservations, stats.overdue_reservations) == (len(self.expired), len(overdue))
        assert {i for i, reservation in self.reservations.items() if reservation.overdue} == overdue
        compared = [
            *zip(stats.groups, ([group] for group in self.model.groups), strict=True),
            (stats, self.model.groups),
        ]
        for name in ("device", "host"):
            for part, groups in compared:
                tiers, got = [getattr(group, name) for group in groups], getattr(part, name)
                capacity, free = sum(tier.capacity for tier in tiers), sum(len(tier.victims()) for tier in tiers)
                empty, redundant = sum(len(tier.empty) for tier in tiers), sum(len(tier.redundant) for tier in tiers)
                pinned = sum(block.pins > 0 for tier in tiers for block in tier.blocks.values())
                counts = (capacity, free, capacity - free, free - empty, pinned, empty, redundant)
                assert (
                    got.capacity,
                    got.free,
                    got.used,
                    got.evictable,
                    got.pinned,
                    got.empty,
                    got.redundant,
                ) == counts, name
        lead = next(group for group in self.model.groups if group.matches)
        for counter in COUNTERS:
            each = [group.counts[counter] for group in self.model.groups]
            if hasattr(stats.groups[0], counter):
                assert [getattr(group_stats, counter) for group_stats in stats.groups] == each, counter
                assert getattr(stats, counter) == sum(each), counter
            else:
                assert getattr(stats, counter) == lead.counts[counter], counter

    def _check_sequences(self) -> None:
        ids = sorted(self.model.sequences)
        assert (ids, sorted(self.model.swapped)) == (sorted(self.requests), sorted(self.away))
        for i in ids:
            seq, request = self.model.sequences[i], self.requests[i]
            for g, group in enumerate(self.model.groups):
                got, ours = self.engine.table(request, g), ids_of(group.sequences[i].blocks)
                assert got == ours, f"group {g}: blocks of sequence {i}: {got}, the model's {ours}"
            actual = [
                int(getattr(self.cache, name)(request.id))
                for name in ("sequence_length", "committed_tokens", "cached_tokens")
            ]
            assert actual == [len(seq.items), seq.committed, seq.cached]
            assert request.items == seq.items
            assert self.cache.request_stats(request.id) == self._figures(i)
        assert {reservation.id for reservation in self.cache.imports.reservations} == {
            self.reservations[i].id for i in self.model.reservations
        }
        for g, group in enumerate(self.model.groups):
            for i, seq in group.reservations.items():
                assert self.reserved(i, g) == ids_of(seq.blocks), f"group {g}: blocks of reservation {i}"
        assert sorted(lease.id for lease in self.cache.leases) == sorted(self.leases[i].id for i in self.model.leases)

    def _figures(self, i: int) -> tuple[int, ...]:
        """What ``request_stats`` says of a sequence."""
        sequence = next(group for group in self.model.groups if group.matches).sequences[i]
        host = max(group.sequences[i].from_host for group in self.model.groups if group.matches)
        partial = sequence.cached % self.engine.T
        reused = (sequence.cached - partial - host, host, partial)
        return (
            sequence.prompt,
            *reused,
            len(sequence.items) - sequence.prompt,
            sequence.committed,
            sequence.dropped,
            sequence.recomputed,
        )

    def check_keys(self, ids: Sequence[int]) -> None:
        """What live sequences are a prompt of, where the pool can compute it: that of all their tokens, hashed anew."""
        keys_found = outcome(lambda: self.cache.keys_of(self.real_ids(ids)))
        full = any(group.matches and not group.leaves_holes for group in self.model.groups)
        if isinstance(keys_found, Failed):
            assert isinstance(keys_found.error, ValueError)
            assert not full or any(not self.model.sequences[i].items for i in ids), keys_found
            return
        for i, keys in zip(ids, keys_found, strict=True):
            seq = self.model.sequences[i]
            tokens, extra = zip(*seq.items, strict=True)
            (salt, adapter), private = seq.namespace, seq.private
            anew = self.keyed(Prompt(tokens, salt, adapter, extra if any(extra) else None))
            assert (keys.tokens.tolist(), keys.keys.tolist()) == (list(tokens), anew.keys.tolist())
            assert (keys.salt, keys.adapter_id, keys.namespace, keys.root) == (salt, adapter, anew.namespace, anew.root)
            assert (keys.reuse, keys.publish) == (True, not private)
            assert (keys.extra_ids is None) == (anew.extra_ids is None)
            assert keys.extra_ids is None or keys.extra_ids.tolist() == list(extra)

    def _check_reserved_bytes(self) -> None:
        for i, seq in self.model.reservations.items():
            expected = self.engine.expected.of(seq.namespace, seq.items)
            for side in self.sides:
                for token, block, slot in side.places(self.reserved(i, side.index), len(expected)):
                    if block >= 0:
                        self.engine.compare(side, block, slot, expected[token], f"token {token} of reservation {i}")

    def _check_swapped_bytes(self) -> None:
        """What sequences that are swapped out have on the host is all that they had on the device."""
        for i, request in self.away.items():
            slot = request.id & 0xFFFFFFFF
            for side, group, state in zip(self.sides, self.model.groups, self.engine.states(), strict=True):
                ours = ids_of(group.swapped[i].blocks)
                assert state.swapped[slot, : len(ours)].tolist() == ours, f"group {side.index}: blocks of sequence {i}"
                digests = self.engine.digests(side, request)
                for token, block, place in side.places(ours, len(digests)):
                    if block >= 0:
                        self.engine.compare(
                            side, block, place, digests[token], f"token {token} of swapped sequence {i}"
                        )

    def _check_cached_bytes(self, side: Side, group: Model) -> None:
        for name in ("device", "host"):
            for (namespace, items), block in group.cached(name).items():
                self.engine.check_cached(side, block, namespace, items, group.T)
        for block in group.device.blocks.values():
            if block.tail:
                namespace, items = block.parent
                self.engine.check_cached(side, block.id, namespace, items + block.tail, len(block.tail))

    def _check_events(self) -> None:
        """Each group's events add up to what it has."""
        events = self.cache.events()
        for event, group in zip(events, events.records["group"][events.bounds[:-1]].tolist(), strict=True):
            assert event.number == self.next_event, "a gap"
            self.next_event = event.next
            for g, replay in enumerate(self.events):
                if event.kind == "cleared" or group == g:
                    replay.last = None
                    replay.feed([event])
        for replay, state in zip(self.events, self.engine.states(), strict=True):
            for tier, cached in debug.cached(state).items():
                assert replay.cached[tier] == set(cached), f"{tier}: events do not rebuild the cached keys"
