"""A tier of a pool is attached by what describes it: in place, by whoever may, for as long as the pool is there."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import mmap
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, LayerGroup, MemoryOptions, PoolClosed, attach
from kvpool.device.cuda import open_gpu_memory, unusable
from kvpool.device.memory import SharedTier
from kvpool.device.memory.attachments import SharedGroup, SharedPart
from kvpool.device.memory.main_memory import GpuMemory, is_there, open_shared
from kvpool.errors import DeviceError
from tests.share.pools import LAYOUT, open_pool
from tests.share.processes import attach_as_nobody, hold, own_pool
from tests.share.spawned import Spawn
from tests.share.spawned import spawn as spawn


def descriptors() -> set[str]:
    """Files of shared memory that this process has open."""
    gc.collect()
    links = {
        fd: os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    return {fd for fd, link in links.items() if "memfd:kvpool" in link}


def in_a_fork(run: Callable[[], object]) -> int:
    """How a forked child ended that did this: 0, 1 where it raised, or minus the signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# -- arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(
    "channel",
    [lambda description: description, lambda description: pickle.loads(pickle.dumps(description)), SharedTier.to_json],
)
def test_an_attachment_is_the_tier_in_place(device: str, tier: str, channel: Any) -> None:
    with open_pool(device) as cache, attach(channel(cache.memory.share(tier))) as attached:
        pool = cache.memory.device_pool if tier == "device" else cache.memory.host_pool
        assert (attached.pool.shape, attached.pool.dtype) == (pool.shape, pool.dtype) and not np.shares_memory(
            attached.pool, pool
        )
        rows = [(block, 0, 4) for block in range(11)]
        with cache.core.device.host_access(writes=rows):
            attached.pool[...] = np.random.default_rng(0).integers(0, 2**16, pool.shape)
        np.testing.assert_array_equal(pool, attached.pool)
        with cache.core.device.host_access(writes=rows):
            pool[...] = 3
        assert (attached.pool == 3).all() and attached.alive


def test_every_group_and_part_has_its_array() -> None:
    wide = [BlockLayout(2, 2, 8, 4), BlockLayout(1, 4, 16, 4, dtype="bfloat16", order="block_first", tokens="HND")]
    groups = [LayerGroup(wide), LayerGroup(BlockLayout(3, 1, 8, 4, planes=1), window=8)]
    options: dict[str, Any] = {"device": "cpu", "memory": MemoryOptions(shared=True), "max_sequence_tokens": 64}
    with KVCacheManager(groups=groups, device_blocks=[6, 7], host_blocks=[5, 0], **options) as cache:
        for tier, pools in (("device", cache.memory.device_pools), ("host", cache.memory.host_pools)):
            with attach(cache.memory.share(tier)) as attached:
                theirs, ours = ([part for parts in each for part in parts] for each in (attached.pools, pools))
                assert [(part.shape, part.dtype) for part in theirs] == [(part.shape, part.dtype) for part in ours]
                assert attached.layouts == (tuple(wide), groups[1].layouts)
                for number, part in enumerate(theirs, 1):
                    part[...] = number
                assert [int(part.max(initial=0)) for part in ours] == [1, 2, 3 if tier == "device" else 0]
                with pytest.raises(ValueError, match=r"pools\[group\]\[part\]"):
                    attached.pool  # noqa: B018


# -- what cannot be shared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_memory_that_others_cannot_open_is_refused_by_name(device: str) -> None:
    mine = np.frombuffer(mmap.mmap(-1, 6 * LAYOUT.block_bytes), np.uint8)
    with open_pool(device, memory=MemoryOptions(device_memory=mine, shared=True)) as cache:
        with pytest.raises(ValueError, match="shared=True took itself, which alone can be shared"):
            cache.memory.share()
        cache.memory.share("host")
    with (
        open_pool(device, memory=MemoryOptions(shared=False)) as cache,
        pytest.raises(ValueError, match="shared=True took itself, which alone can be shared"),
    ):
        cache.memory.share()
    with open_pool(device, host_blocks=0) as cache:
        cache.memory.share()
        with pytest.raises(ValueError, match="expected one with blocks"):
            cache.memory.share("host")
        with pytest.raises(ValueError, match="tier: .*'gpu'"):
            cache.memory.share("gpu")
    with pytest.raises(PoolClosed):
        cache.memory.share()


# -- when the pool is gone ---------------------------------------------------------------------------------------------


def close(cache: KVCacheManager) -> None:
    cache.close()


def drop(cache: KVCacheManager) -> None:
    """Nobody closes it."""


@pytest.mark.parametrize("end", [close, drop])
def test_a_pool_that_is_gone_says_so_and_what_was_attached_stays(end: Callable[[KVCacheManager], None]) -> None:
    cache = open_pool()
    cache.memory.device_pool[...] = 9
    shared, host = cache.memory.share(), cache.memory.share("host")
    attached = attach(shared)
    end(cache)
    del cache
    gc.collect()
    for description in (shared, host):
        with pytest.raises(PoolClosed, match="the pool is gone"):
            attach(description)
    assert not attached.alive and (attached.pool == 9).all()
    with next_descriptor_is(shared.sign.fd), open_pool() as another:
        fds = {another.memory.share(tier).groups[0].parts[0].memory.fd for tier in ("device", "host")} | {
            another.memory.share().sign.fd
        }
        assert shared.sign.fd in fds, "its number means other memory now"
        with pytest.raises(PoolClosed, match="the pool is gone"):
            attach(shared)
        assert not attached.alive


@contextmanager
def next_descriptor_is(number: int) -> Iterator[None]:
    """Other tests may have left lower numbers free."""
    with ExitStack() as held:
        while (lower := os.open(os.devnull, os.O_RDONLY)) < number:
            held.callback(os.close, lower)
        os.close(lower)
        yield


def test_a_pool_that_is_closed_under_a_view_is_gone_for_others() -> None:
    cache = open_pool()
    shared, view = cache.memory.share(), cache.memory.device_pool
    places = [shared.sign, shared.groups[0].parts[0].memory]
    assert all(is_there(shared.pid, place) for place in places)
    cache.close()
    assert not any(is_there(shared.pid, place) for place in places)
    with pytest.raises(PoolClosed, match="the pool is gone"):
        attach(shared)
    assert not view.any()


def test_memory_that_was_given_back_is_not_opened_under_its_number() -> None:
    """Between a look at the pool's sign and the opening of its memory."""
    with open_pool() as cache:
        shared = cache.memory.share()
    place = shared.groups[0].parts[0].memory
    with open_pool() as other:
        used = other.memory.share().groups[0].parts[0].memory
        assert place.fd == used.fd
        with pytest.raises(PoolClosed):
            open_shared(shared.pid, place, 6 * LAYOUT.block_bytes)


def test_when_the_pools_process_is_killed_attached_arrays_stay_and_nothing_else_does(spawn: Spawn) -> None:
    owner = spawn(own_pool)
    description = owner.recv()
    attached = attach(description)
    with open(f"/proc/{description.pid}/maps", encoding="ascii", errors="replace") as maps:
        assert not [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)\n")]
    assert attached.alive and (attached.pool == 7).all()
    owner.kill()
    assert not attached.alive and (attached.pool == 7).all()
    attached.pool[...] = 8
    with pytest.raises(PoolClosed, match="the pool is gone"):
        attach(description)


def test_a_loader_that_is_killed_leaves_the_pool_whole(spawn: Spawn) -> None:
    with open_pool() as cache:
        held = cache.add_sequence(list(range(9)))
        table = cache.block_table(held).dense()[0]
        cache.memory.device_pool[:, :, table] = 4
        reservation = cache.imports.reserve(list(range(100, 108)), owner="loader")
        loader = spawn(hold)
        loader.send((cache.memory.share(), reservation.blocks, 5))
        assert loader.recv() is True
        while not (cache.memory.device_pool[:, :, reservation.blocks] == 5).all():
            pass
        loader.kill()
        assert (cache.memory.device_pool[:, :, table] == 4).all()
        assert [reservation.owner for reservation in cache.imports.reservations] == ["loader"] and cache.revoke(
            "loader"
        ) == 1
        assert cache.match_prefix([*range(100, 108), 1]).tokens == 0
        cache.verify()
        cache.release(held)
        assert cache.stats().device.free == 6


# -- who may, and what they cannot -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused(spawn: Spawn) -> None:
    with open_pool() as cache:
        other = spawn(attach_as_nobody)
        other.send(cache.memory.share())
        assert other.recv().startswith(
            f"PermissionError: process {os.getpid()} has the pool and belongs to another user"
        )


def test_the_memory_is_for_its_user_alone_and_nobody_cuts_it_off() -> None:
    with open_pool() as cache:
        for tier in ("device", "host"):
            path = f"/proc/{os.getpid()}/fd/{cache.memory.share(tier).groups[0].parts[0].memory.fd}"
            assert os.stat(path).st_mode & 0o777 == 0o600
            fd = os.open(path, os.O_RDWR)
            for size in (0, 1 << 20):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            os.close(fd)
            assert not os.get_inheritable(cache.memory.share(tier).groups[0].parts[0].memory.fd)
        cache.memory.host_pool[...] = 1


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_an_attachment_that_is_closed_gives_nothing_and_its_views_live() -> None:
    with open_pool() as cache:
        cache.memory.device_pool[...] = 6
        attached = attach(cache.memory.share())
        view = attached.pool[0, 1]
        with attached:
            assert not attached.closed
        assert attached.closed
        with pytest.raises(PoolClosed, match="attachment is closed"):
            attached.pools  # noqa: B018
        attached.close()
        assert (view == 6).all()
        cache.memory.device_pool[...] = 7
        assert (view == 7).all()


def test_nothing_is_kept_open() -> None:
    before = descriptors()
    cache = open_pool()
    for _ in range(20):
        attach(cache.memory.share()).close()
        attach(cache.memory.share("host")).close()
        with pytest.raises(ValueError, match="expected exactly"):
            shared = cache.memory.share()
            attach(dataclasses.replace(shared, groups=(shared.groups[0]._replace(blocks=5),)))
    assert len(descriptors() - before) <= 6, "two descriptors for each tier, and for the sign"
    cache.close()
    del cache
    assert descriptors() == before
    open_pool()
    assert descriptors() == before, "nor by a pool that nobody closed"


def test_a_forked_child_attaches_and_uses_what_was_attached() -> None:
    with open_pool() as cache:
        shared = cache.memory.share()
        attached = attach(shared)

        def write() -> None:
            attached.pool[:, :, 1] = 11
            with attach(shared) as mine:
                mine.pool[:, :, 2] = 12

        assert in_a_fork(write) == 0
        assert cache.memory.device_pool[0, 0, :, 0, 0, 0].tolist() == [0, 11, 12, 0, 0, 0]
        assert attached.alive and (attached.pool[:, :, 1] == 11).all()


def test_a_forked_child_cannot_write_into_the_pool_of_its_parent() -> None:
    with open_pool() as cache:
        assert in_a_fork(lambda: cache.memory.device_pool.fill(13)) == -signal.SIGSEGV
        assert not cache.memory.device_pool.any()
        cache.close()
    with open_pool(memory=MemoryOptions(shared=False)) as cache:
        assert in_a_fork(lambda: cache.memory.device_pool.fill(13)) == 0
        assert not cache.memory.device_pool.any()


# ----------------------------------------
# A description comes from outside: what is none is refused by name, before anything is opened.


def changed(description: SharedTier, **fields: Any) -> str:
    """The description as text, with other fields; ``owner`` and ``group`` (the first) are merged."""
    text = json.loads(description.to_json())
    text["owner"] |= fields.pop("owner", {})
    text["groups"][0] |= fields.pop("group", {})
    return json.dumps(text | fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"kvpool": 2}, "version 1"),
    "no tier": ({"tier": "gpu"}, "tier: expected a tier"),
    "no groups": ({"groups": []}, "0 groups"),
    "no list of groups": ({"groups": 3}, "TypeError"),
    "another fingerprint": ({"fingerprint": "0" * 32}, "fingerprint"),
    "a device that is not a name": ({"device": 5}, "device: expected a string, got 5"),
    "a negative pid": ({"owner": {"pid": -1}}, "pid: expected 1 to 4611686018427387904, got -1"),
    "a pid that is not a number": ({"owner": {"pid": "1/../2"}}, "pid: expected an integer, got '1/../2'"),
    "a pid that is a bool": ({"owner": {"pid": True}}, "pid: expected an integer, got True"),
    "no sign": ({"owner": {"sign": None}}, "sign=None"),
    "a sign that is a path": (
        {"owner": {"sign": {"fd": 3, "name": "../../etc/passwd"}}},
        "name: expected a file of a kvpool, got '../../etc/passwd'",
    ),
    "a sign with a name that goes on": (
        {"owner": {"sign": {"fd": 3, "name": "kvpool-" + "a" * 60}}},
        "got 'kvpool-aa",
    ),
    "a sign of another name": ({"owner": {"sign": {"fd": 3, "name": "another"}}}, "got 'another'"),
    "a descriptor that is none": (
        {"owner": {"sign": {"fd": -1, "name": "kvpool-00"}}},
        "fd: expected 0 to 2147483647, got -1",
    ),
    "too many blocks": ({"group": {"blocks": 2**31}}, "blocks: expected 0 to 2147483647, got 2147483648"),
    "blocks without memory": ({"group": {"blocks": 0}}, "0 blocks"),
    "no parts": ({"group": {"parts": []}}, "groups: expected one part or more"),
    "a layout that is none": ({"group": {"parts": [{"layout": {"layers": 0}, "memory": None}]}}, "TypeError"),
    "a part without a layout": ({"group": {"parts": [{"memory": None}]}}, "KeyError: 'layout'"),
}


def test_a_description_that_is_none_is_refused() -> None:
    with open_pool() as cache:
        shared = cache.memory.share()
        for fields, message in WRONG.values():
            with pytest.raises(ValueError, match="description") as caught:
                attach(changed(shared, **fields))
            assert message in str(caught.value)
        attach(shared.to_json() + " " * 1000)
        for text in ("", "{", "[]", "null", "[" * 100_000, shared.to_json() + " " * (1 << 20), '{"kvpool": 1}'):
            with pytest.raises(ValueError, match="description"):
                attach(text)
        for given in (None, b"{}", {}, 5):
            with pytest.raises(TypeError, match="description: .*"):
                attach(given)  # type: ignore[arg-type]
        by_hand = dataclasses.replace(shared, pid=0)
        for call in (lambda: attach(by_hand), lambda: pickle.loads(pickle.dumps(by_hand))):
            with pytest.raises(ValueError, match="pid: .*0"):
                call()


def test_a_pool_of_another_machine_or_pid_namespace_is_named() -> None:
    with open_pool() as cache:
        shared = cache.memory.share()
        for name, wrong in (("machine", "another"), ("namespace", 1)):
            with pytest.raises(ValueError, match=name):
                attach(dataclasses.replace(shared, **{name: wrong}))


def test_memory_of_a_gpu_is_opened_in_another_process_that_has_the_gpu() -> None:
    memory = GpuMemory(b"\1" * 16, b"\0" * 64, 512)
    with open_pool() as cache:
        shared = cache.memory.share()
        gpu = dataclasses.replace(shared, groups=(SharedGroup(6, (SharedPart(LAYOUT, memory),)),))
        assert pickle.loads(pickle.dumps(gpu)).groups[0].parts[0].memory == memory
        with pytest.raises(ValueError, match="in this process"):
            attach(gpu)
        for wrong in (memory._replace(handle=b"\0" * 63), memory._replace(offset=-1), memory._replace(uuid=b"\1" * 17)):
            with pytest.raises(ValueError, match="description"):
                attach(dataclasses.replace(shared, groups=(SharedGroup(6, (SharedPart(LAYOUT, wrong),)),)))
    if unusable() is not None:
        with pytest.raises(DeviceError, match="cuda device needs"):
            open_gpu_memory(memory, 6 * LAYOUT.block_bytes)
