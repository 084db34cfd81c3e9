"""A pool on a cuda device, its tables, its calibration and its choice by name, on a CuPy without a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.__main__ import main
from kvpool.device import calibration, cuda, get_device
from kvpool.device.base import Stream
from kvpool.device.calibration import PATHS, Calibration, Measurement
from kvpool.device.cuda import CudaDevice
from kvpool.device.fragments import Cutter
from kvpool.device.measure import measure
from kvpool.device.tables import StagedRows, staged_bytes, write_rows
from kvpool.errors import DeviceError, PoolClosed
from kvpool.layout import BlockLayout
from tests.device.fake_cupy import FakeArray, FakeCupy
from tests.device.pools import seen

Fake = Callable[..., FakeCupy]
LAYOUT = BlockLayout(2, 2, 16, 4)


def test_a_missing_package_or_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_DEVICE", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"needs CuPy.*kvpool\[cuda12\].*kvpool\[cuda13\]"):
        get_device("cuda")

    def count() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count))))
    with pytest.raises(DeviceError, match="driver: cudaErrorInsufficientDriver"):
        get_device("cuda")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 0))))
    with pytest.raises(DeviceError, match="NVIDIA GPU"):
        get_device("cuda")
    assert get_device("auto").name == "cpu"


def test_auto_is_the_gpu_where_there_is_one_unless_the_environment_says_otherwise(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    monkeypatch.delenv("KVPOOL_DEVICE", raising=False)
    device = get_device("auto")
    assert device.name == "cuda"
    device.close()
    monkeypatch.setenv("KVPOOL_DEVICE", "cpu")
    assert get_device("auto").name == "cpu"
    monkeypatch.setenv("KVPOOL_DEVICE", "tpu")
    with pytest.raises(ValueError, match="KVPOOL_DEVICE='tpu'"):
        get_device("auto")


# Calibration


def test_calibrating_measures_every_path_and_keeps_it_for_the_next_device(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cuda()

    def small(make: Callable[[str], CudaDevice], paths: list[str]) -> list[Measurement]:
        return measure(make, paths, sizes=(4096, 16384), counts=(2, 8), batch_bytes_max=8 * 16384 - 1)

    monkeypatch.setattr(cuda, "measure", small)
    with KVCacheManager(LAYOUT, device_blocks=4, host_blocks=4, device="cuda") as cache:
        found = cache.calibrate()
    assert isinstance(found, Calibration) and (found.device, found.driver) == ("Fake GPU", 13000)
    measured = {(m.path, m.direction, m.nbytes, m.fragments) for m in found.measurements}
    sizes = [(4096, 2), (4096, 8), (16384, 2)]
    assert measured == {(path, direction, *size) for path in PATHS for direction in calibration.DIRECTIONS for size in sizes}
    device = CudaDevice()
    assert device.calibration == found
    device.close()
    gc.collect()
    assert not cupy.runtime.registered and not cupy.runtime.allocated and list(cupy.runtime.streams) == [0]


def test_a_stored_calibration_that_cannot_be_read_is_said_and_not_used(fake_cuda: Fake) -> None:
    fake_cuda()
    path = calibration.place("Fake GPU", 13000)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.warns(UserWarning, match="by rule"):
        device = CudaDevice()
    assert device.calibration.measurements == ()
    device.close()


def test_devices_with_nothing_to_choose_have_no_calibration() -> None:
    with KVCacheManager(LAYOUT, device_blocks=2, device="cpu") as cache:
        assert cache.calibrate() is None
    with pytest.raises(PoolClosed):
        cache.calibrate()


# Tables


@pytest.mark.parametrize(("rows", "width", "columns", "planes"), [(1, 0, 3, 1), (3, 5, 5, 2), (2, 7, 130, 2), (4, 600, 601, 1)])
def test_shim_staged_rows_are_written_when_the_stream_comes_to_them(
    fake_cuda: Fake, rows: int, width: int, columns: int, planes: int
) -> None:
    cupy = fake_cuda()
    device = CudaDevice()
    stream, random = device.create_stream("engine"), np.random.default_rng(rows)
    target = FakeArray(np.full((planes, 6, columns + 2), 77, np.int32))
    view = target[:, :, :columns]
    table = device.as_table(view)
    buffer = device.allocate(staged_bytes(planes, rows, width), "host")
    staged = StagedRows(buffer, buffer.ctypes.data, planes, rows, width, columns)
    behind_ids = -(-4 * rows * width // 8) * 8
    buffer[: 4 * rows * width].view(np.int32)[:] = random.integers(-1, 50, rows * width)
    numbers = buffer[behind_ids:].view(np.int64)
    numbers[:rows] = random.permutation(6)[:rows]
    numbers[rows:].reshape(planes, 3)[:] = [(start, 2 + plane, plane) for plane, start in enumerate(table.starts())]
    expected = target.get()
    write_rows(*staged[1:], expected.ctypes.data, expected.strides[-2])
    cupy.runtime.stalled.add(stream.handle)
    device.stage_rows(table, staged, stream)
    assert (target.inner == 77).all()
    cupy.runtime.stalled.clear()
    device.synchronize()
    np.testing.assert_array_equal(target.inner, expected)
    device.free(buffer)
    device.close()


def test_tables_are_int32_arrays_of_the_gpu(fake_cuda: Fake) -> None:
    fake_cuda()
    device = CudaDevice()
    for bad in (np.zeros((2, 2), np.int32), FakeArray(np.zeros((2, 2), np.int64)), None):
        with pytest.raises(TypeError, match="target"):
            device.as_table(bad)
    for bad in (FakeArray(np.zeros(2, np.int32)), FakeArray(np.zeros((2, 4), np.int32)[:, ::2])):
        with pytest.raises(ValueError, match="target"):
            device.as_table(bad)
    device.close()


# The whole pool


def test_a_pool_offloads_and_onboards_through_the_gpu_that_is_not_there(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    with KVCacheManager(LAYOUT, device_blocks=3, host_blocks=6, device="cuda", max_sequences=2) as cache:
        engine = Stream(cupy.runtime.streamCreateWithFlags(1))
        prompts = [list(range(first, first + 9)) for first in (0, 100)]
        for value, prompt in enumerate((*prompts, prompts[0])):
            sequence = cache.add_sequence(prompt, stream=engine)
            ids = cache.block_table(sequence).dense()[0]
            if value == 2:
                assert cache.cached_tokens(sequence) == 8
                cupy.runtime.deviceSynchronize()
                assert (seen(cache.device_pool)[:, :, ids[:2]] == 1).all()
            pool = cache.device_pool

            def prefill(pool: FakeArray = pool, ids: np.ndarray = ids, value: int = value) -> None:
                pool.inner[:, :, ids] = value + 1

            if value < 2:
                cupy.runtime.enqueue(engine.handle, "work", prefill)
            cache.commit(sequence, stream=engine)
            cache.release(sequence, stream=engine)
        lease = cache.pin(cache.block_keys(prompts[1]).keys, tier="host")
        assert (cache.host_pool[lease.blocks - 3] == 2).all()
        lease.close()
        cache.verify()
    assert not cupy.runtime.registered


@pytest.mark.parametrize("path", PATHS)
def test_a_replay_finds_every_byte(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str) -> None:
    cupy = fake_cuda()
    monkeypatch.setenv(cuda.COPY_PATH, path)
    sizes = ["--device-blocks", "300", "--host-blocks", "300", "--cut", "600", "--active", "8", "--limit", "40"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes]) == 0
    assert "verified  every byte" in capsys.readouterr().out
    assert {"plain": True, "batched": bool(cupy.batched), "kernel": bool(cupy.launched)}[path]
    assert not cupy.runtime.registered


def test_a_replay_finds_a_fragment_that_was_left_out(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    whole = Cutter.cut
    monkeypatch.setattr(Cutter, "cut", lambda cutter, moves, count: whole(cutter, moves, count)[:-1])
    sizes = ["--device-blocks", "300", "--host-blocks", "300", "--cut", "600", "--active", "8", "--limit", "40"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes]) == 1


def test_a_replay_without_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["replay", "--device", "cuda"]) == 2
    assert "needs CuPy" in capsys.readouterr().err


def test_a_handed_over_table_is_the_one_of_the_call_however_late_the_gpu_comes_to_it(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    with KVCacheManager(LAYOUT, device_blocks=8, device="cuda", max_sequences=4) as cache:
        engine = Stream(cupy.runtime.streamCreateWithFlags(1))
        target = FakeArray(np.full((2, 6), -7, np.int32))
        first = cache.add_sequence(list(range(9)), stream=engine)
        expected = cache.block_table(first).dense()[0].copy()
        cupy.runtime.stalled.add(engine.handle)
        cache.copy_batch_block_offsets(target, [first], stream=engine)
        cache.release(first, store=False, stream=engine)
        second = cache.add_sequence(list(range(50, 63)), stream=engine)
        cache.copy_batch_block_offsets(target, [second], rows=[1], scale=2, stream=engine)
        assert (target.inner == -7).all()
        cupy.runtime.stalled.clear()
        cupy.runtime.deviceSynchronize()
        np.testing.assert_array_equal(target.inner[0], [*expected, *[-1] * (6 - len(expected))])
        blocks = 2 * cache.block_table(second).dense()[0]
        np.testing.assert_array_equal(target.inner[1], [*blocks, *[-1] * (6 - len(blocks))])
        cache.release(second)


def test_a_table_handed_over_as_csr_is_the_one_of_the_call_however_late_the_gpu_comes_to_it(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    with KVCacheManager(LAYOUT, device_blocks=8, device="cuda", max_sequences=4) as cache:
        engine = Stream(cupy.runtime.streamCreateWithFlags(1))
        given = [[FakeArray(np.full(size, -7, np.int32)) for size in (2, 6, 1)] for _ in range(2)]
        cupy.runtime.allocated.update({part.inner.ctypes.data: part.inner for parts in given for part in parts})
        wanted = []
        cupy.runtime.stalled.add(engine.handle)
        for turn, prompt in enumerate((range(9), range(50, 63))):
            sequence = cache.add_sequence(list(prompt), stream=engine)
            wanted.append(cache.block_table(sequence).csr())
            cache.copy_batch_block_csr(*given[turn], sequence, stream=engine)
            cache.release(sequence, store=False, stream=engine)
        assert all((part.inner == -7).all() for parts in given for part in parts)
        assert cache.stats().hand_overs == cache.stats().most_hand_overs == 2
        cupy.runtime.stalled.clear()
        cupy.runtime.deviceSynchronize()
        for parts, expected in zip(given, wanted, strict=True):
            for part, one in zip(parts, expected, strict=True):
                np.testing.assert_array_equal(part.inner[: len(one)], one)
            assert (parts[1].inner[len(expected.indices) :] == -7).all()
        assert cache.stats().hand_overs == 0
        with pytest.raises(TypeError, match="indices.*host memory"):
            cache.copy_batch_block_csr(given[0][0], np.zeros(6, np.int32), given[0][2], [])
