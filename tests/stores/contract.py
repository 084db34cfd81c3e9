"""What every store must do, whatever it is made of. A test of a store gives these functions a way to open one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvpool.storage import ABSENT, CANCELLED, DAMAGED, OK, REFUSED
from kvpool.storage.mac import BlockNames, Secret
from kvpool.storage.store import TAG_BYTES, Store
from tests.stores.lab import (
    BLOCK_BYTES,
    IDENTITY,
    OTHER,
    Gate,
    Wrong,
    begin_load,
    codes_of,
    content,
    done,
    fill,
    keys_of,
    names,
    open_queue,
    returned,
    right,
    saved,
)

Open = Callable[[int], Store]
"""Opens a new, empty store with room for this many blocks of BLOCK_BYTES."""


class StoreContract:
    """Inherit it in a test class with a fixture ``make``: Callable[[int], Store], a new and empty store for that many
    blocks. Stores that outlive a process inherit ``LastingContract``."""

    def test_what_was_saved_is_found_and_loaded_byte_for_byte(self, make: Open) -> None:
        with open_queue(make(32)) as queue:
            keys = saved(queue, 20)
            assert done(queue.find(keys_of(queue, 24))).codes.tolist() == [OK] * 20 + [ABSENT] * 4
            assert right(queue, begin_load(queue, keys, 30)).ok == 20

    def test_other_bytes_under_a_key_that_is_there_are_not_an_error(self, make: Open) -> None:
        """Two workers may compute a block with other rounding."""
        with open_queue(make(8)) as queue:
            keys = saved(queue, 1)
            fill(queue.memory, 1, first=100)
            returned(queue.save(keys, np.arange(1)))
            assert returned(queue.load(keys, np.arange(1, 2))).ok == 1
            assert any(np.array_equal(queue.memory[1], content(number)) for number in (0, 100))

    def test_a_key_that_two_contents_share_is_a_miss_for_the_second(self, make: Open) -> None:
        """Somebody has found a second prompt with the same key of a pool."""
        with open_queue(make(8)) as queue:
            fill(queue.memory, 3)
            first, other = (BlockNames(names(3), contexts=[b"same", context, b"same"]) for context in (b"one", b"two"))
            returned(queue.save(first, np.arange(3)))
            assert returned(queue.load(first, np.arange(10, 13))).ok == 3
            assert codes_of(queue.load(other, np.arange(10, 13))) == [OK, DAMAGED, OK]
            assert queue.stats().blocks["load", "damaged"] == 1
            assert codes_of(queue.load(first, np.arange(10, 13))) == [OK, ABSENT, OK], "it is dropped"

    def test_the_secret_is_known_before_the_store_is_opened(self, make: Open) -> None:
        store = make(8)
        known = store.secret
        with open_queue(store) as queue:
            keys = keys_of(queue, 2)
            assert store.secret == known and np.array_equal(Secret(known, IDENTITY).derive_keys(names(2)), keys)

    def test_what_is_forgotten_is_absent(self, make: Open) -> None:
        with open_queue(make(8)) as queue:
            keys = saved(queue, 4)
            dropped = done(queue.forget(keys[:2]))
            assert dropped.ok == 2 and dropped.dropped == 2
            assert done(queue.load(keys, np.arange(4))).codes.tolist() == [ABSENT, ABSENT, OK, OK]

    def test_what_was_saved_is_absent_after_a_clear_and_can_be_saved_again(self, make: Open) -> None:
        with open_queue(make(16)) as queue:
            saved(queue, 2, tag=queue.secret.tag(b"tenant"))
            keys = saved(queue, 4)
            dropped = done(queue.clear())
            assert dropped.ok == 1 and dropped.dropped == 4, dropped.error
            assert done(queue.load(keys, np.arange(4))).codes.tolist() == [ABSENT] * 4
            saved(queue, 4)
            assert done(queue.load(keys, np.arange(4))).ok == 4

    def test_after_a_reset_nothing_is_found_from_before_also_if_the_store_drops_nothing(self, make: Open) -> None:
        for clears in (True, False):
            wrong = Wrong(make(16))
            wrong.clears_prefix *= clears
            with open_queue(wrong) as queue:
                fill(queue.memory, 2)
                keys, other = BlockNames(names(2)), BlockNames(names(2, 10))
                returned(queue.save(keys, np.arange(2)))
                done(queue.reset())
                for _ in range(2):
                    assert codes_of(queue.load(keys, np.arange(4, 6))) == [ABSENT] * 2
                    returned(queue.save(other, np.arange(2)))
                    assert returned(queue.load(other, np.arange(4, 6))).ok == 2
                    done(queue.reset())
                    keys, other = other, keys

    def test_a_clear_of_a_namespace_drops_nothing_else(self, make: Open) -> None:
        """A store that does not know namespaces refuses."""
        with open_queue(make(16)) as queue:
            tags = [queue.secret.tag(name) for name in (b"one", b"other")]
            keys = np.concatenate([saved(queue, 2, first=10 * i, tag=tag) for i, tag in enumerate(tags)])
            if queue.clears_prefix < TAG_BYTES:
                with pytest.raises(ValueError, match="can drop the blocks of a namespace"):
                    queue.clear(tags[0])
                return
            dropped = done(queue.clear(tags[0]))
            assert dropped.ok == 1 and dropped.dropped == 2, dropped.error
            assert done(queue.load(keys, np.arange(4))).codes.tolist() == [ABSENT, ABSENT, OK, OK]

    @pytest.mark.parametrize("clears", [False, True])
    def test_a_save_under_way_leaves_nothing_that_was_dropped_meanwhile(self, make: Open, clears: bool) -> None:
        wrong, gate = Wrong(make(16)), Gate()
        with open_queue(wrong) as queue:
            wrong.before["save"], wrong.deaf = gate, True
            keys = keys_of(queue, 4)
            saving = queue.save(keys, np.arange(4))
            assert gate.reached.wait(600)
            dropped = queue.clear() if clears else queue.forget(keys)
            assert saving.codes.tolist() == [CANCELLED] * 4
            gate.open()
            assert dropped.wait(600) and dropped.ok == len(dropped.codes), dropped.error
            assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 4

    def test_a_store_that_is_full_drops_or_refuses_and_serves_no_wrong_byte(self, make: Open) -> None:
        with open_queue(make(8)) as queue:
            codes = []
            for first in range(0, 48, 8):
                fill(queue.memory, 8, first)
                job = returned(queue.save(keys_of(queue, 8, first), np.arange(8)))
                codes += job.codes.tolist()
            assert set(codes) <= {OK, REFUSED}
            right(queue, begin_load(queue, keys_of(queue, 48)))

    def test_a_namespace_has_no_more_than_its_limit(self, make: Open) -> None:
        with open_queue(make(32)) as queue:
            fill(queue.memory, 20)
            keys, tag = keys_of(queue, 20), queue.secret.tag(b"tenant")
            for first in range(0, 20, 4):
                returned(queue.save(keys[first : first + 4], np.arange(first, first + 4), tag=tag, limit=6))
            assert done(queue.find(keys)).ok <= 6

    def test_many_threads_save_and_load_at_once(self, make: Open) -> None:
        with open_queue(make(64), piece_bytes=4 * BLOCK_BYTES) as queue:
            keys = keys_of(queue, 16)
            fill(queue.memory, 16)
            saves = [queue.save(keys, np.arange(16)) for _ in range(4)]
            assert all(job.wait(600, returned=True) for job in saves)
            loads = [begin_load(queue, keys, 16 * i) for i in (1, 2, 3)]
            assert all(right(queue, job).ok == 16 for job in loads), [job.error for job in loads]

    def test_stats_count_what_it_has(self, make: Open) -> None:
        with open_queue(make(8)) as queue:
            saved(queue, 4)
            stats = queue.stats()
            assert stats.blocks["save", "ok"] == 4 and stats.nbytes["save"] == 4 * BLOCK_BYTES
            assert all(isinstance(value, int) for value in stats.store.values())

    def test_the_secret_is_in_no_repr(self, make: Open) -> None:
        store = make(8)
        with open_queue(store) as queue:
            assert queue.secret.tag(b"").hex() not in repr(queue) + repr(store) + repr(queue.secret)
            assert repr(queue.secret) == "Secret()"


class LastingContract(StoreContract):
    """Tests of a store that outlives a process. Needs also a fixture ``again``: Callable[[], Store], the same store
    once more after it was closed."""

    def test_what_was_saved_is_there_after_it_was_closed(self, make: Open, again: Callable[[], Store]) -> None:
        with open_queue(make(32)) as queue:
            keys = saved(queue, 20)
        with open_queue(again()) as queue:
            assert np.array_equal(keys_of(queue, 20), keys)
            assert right(queue, begin_load(queue, keys)).ok == 20

    def test_what_was_dropped_is_absent_after_it_was_closed(self, make: Open, again: Callable[[], Store]) -> None:
        with open_queue(make(32)) as queue:
            keys = saved(queue, 8)
            assert queue.forget(keys[:2]).wait(600) and queue.clear().wait(600)
            kept = saved(queue, 2, first=10)
        with open_queue(again()) as queue:
            assert codes_of(queue.load(np.concatenate([keys, kept]), np.arange(10))) == [ABSENT] * 8 + [OK] * 2

    def test_what_is_saved_after_a_reset_is_there_after_it_was_closed(
        self, make: Open, again: Callable[[], Store]
    ) -> None:
        """Even if the store has not dropped what was there before. A store that has no epochs finds neither."""
        for clears in (True, False):
            wrong = Wrong(make(16))
            wrong.clears_prefix *= clears
            with open_queue(wrong) as queue:
                saved(queue, 4)
                done(queue.reset())
                saved(queue, 2)
                saved(queue, 1, 10)
                lasts = wrong.inner.epoch(queue.secret.model, False) is not None
            for _ in range(2):
                with open_queue(again()) as queue:
                    job = right(queue, begin_load(queue, keys_of(queue, 11)))
                    if lasts:
                        assert job.codes.tolist() == [OK] * 2 + [ABSENT] * 8 + [OK]

    def test_a_reset_is_of_one_model(self, make: Open, again: Callable[[], Store]) -> None:
        with open_queue(make(32)) as queue:
            keys = saved(queue, 4)
        with open_queue(again(), OTHER) as queue:
            done(queue.reset())
        with open_queue(again()) as queue:
            assert done(queue.load(keys, np.arange(4))).ok == 4

    def test_another_model_finds_and_clears_nothing(self, make: Open, again: Callable[[], Store]) -> None:
        with open_queue(make(32)) as queue:
            keys = saved(queue, 4)
        with open_queue(again(), OTHER) as queue:
            assert done(queue.find(keys_of(queue, 4))).codes.tolist() == [ABSENT] * 4
            saved(queue, 2)
            assert done(queue.clear()).dropped == 2
        with open_queue(again()) as queue:
            assert done(queue.load(keys, np.arange(4))).ok == 4
