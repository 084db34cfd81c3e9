"""One call opens a pool, or a host cache, with its stores: what a process has saved is found after a restart, whatever
ends it; and what fails half-way leaves nothing open."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

import kvpool
from kvpool import opening
from kvpool.storage import HostStorageManager, MemoryStore, StorageManager
from kvpool.storage.backends.disk import DiskStore

LAYOUT = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4)
SIZES: dict[str, Any] = {"device_blocks": 16, "host_blocks": 16, "device": "cpu"}
MODEL: dict[str, Any] = {"model": "tiny", "revision": "1"}
PROMPT = list(range(14))
MEMORY = "memory:?capacity=1MiB"
OTHER = kvpool.ModelIdentity("tiny", "1", "float32", "pages", "mine 1")
SHORT = kvpool.ModelIdentity("tiny", "1", "float16", kvpool.BlockLayout(1, 1, 1, 4), "mine 1")
IDENTITY = kvpool.ModelIdentity("tiny", "1", "uint8", "pages", "mine 1")


def open_pool(*stores: Any, **options: Any) -> opening.OpenPool:
    return kvpool.open(LAYOUT, stores=list(stores), **{**SIZES, **MODEL, **options})


def serve(cache: kvpool.KVCacheManager) -> None:
    """Compute the prompt: each element is the number of its token."""
    sequence = cache.add_sequence(PROMPT)
    for token in range(len(PROMPT)):
        block = cache.block_table(sequence).dense()[0, token // 4]
        cache.memory.device_pool[:, :, block, token % 4] = token
    cache.commit(sequence)
    cache.release(sequence)


def found(opened: opening.OpenPool) -> int:
    """How many tokens of the prompt come back from the stores, with the right bytes."""
    cache, storage = opened
    storage.prefetch(PROMPT, timeout=60.0).wait()
    sequence = cache.add_sequence(PROMPT)
    tokens = cache.cached_tokens(sequence)
    for token in range(tokens):
        block = cache.block_table(sequence).dense()[0, token // 4]
        assert (np.asarray(cache.memory.device_pool[:, :, block, token % 4]) == token).all()
    cache.release(sequence)
    return tokens


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from stores.test_opening import open_pool, serve
cache, storage = open_pool(sys.argv[1])
serve(cache)
assert storage.drain(60.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_finds_its_full_blocks_again(tmp_path: Path) -> None:
    text = f"disk:{tmp_path}/kv?capacity=1MiB"
    command = [sys.executable, "-c", KILLED, text, *map(os.path.abspath, sys.path)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with open_pool(text) as opened:
        assert found(opened) == 12, "the last two tokens fill no block"
    with open_pool(text, revision="2") as opened:
        assert found(opened) == 0, "the blocks of other weights"
    assert opened.cache.closed and opened.storage.closed and opened.close(600), "again"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.filterwarnings("error::ResourceWarning")
def test_an_exception_of_the_block_closes_without_waiting(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    monkeypatch.setattr(StorageManager, "drain", lambda self, timeout: waits.append(timeout))
    with pytest.raises(error) as raised, open_pool(MemoryStore(1 << 20)) as (cache, storage):
        cache.add_sequence(PROMPT)
        raise error
    assert raised.value.__context__ is None and waits == [0.0]
    assert cache.closed and storage.closed


@pytest.fixture
def closings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the classes whose ``close`` has ended, in this order."""
    order, managers = list[str](), (StorageManager, HostStorageManager, kvpool.KVCacheManager)
    for kind in (DiskStore, *managers, kvpool.HostCache, kvpool.HostTier):

        def watched(self: Any, *args: Any, kind: Any = kind, close: Any = kind.close, **options: Any) -> Any:
            result = close(self, *args, **options)
            if kind.__name__ not in order:
                order.append(kind.__name__)
            return result

        monkeypatch.setattr(kind, "close", watched)
    return order


@pytest.mark.parametrize("kind", ["pool", "host"])
def test_a_store_that_does_not_open_is_named_and_closes_the_others(
    kind: str, tmp_path: Path, closings: list[str]
) -> None:
    first, second = f"disk:{tmp_path}/kv?capacity=1MiB", f"{__name__}.Broken:"
    begin: Callable[..., Any] = open_pool if kind == "pool" else open_host
    begin(first).close()
    ends = ["StorageManager", "KVCacheManager"] if kind == "pool" else ["HostStorageManager", "HostCache", "HostTier"]
    assert closings == ["DiskStore", *ends]
    closings.clear()
    for error in (OSError(28, "no room"), RuntimeError("lost"), ImportError("no extra"), KeyboardInterrupt()):
        Broken.error = error
        with pytest.raises(type(error)) as raised:
            begin(first, second)
        if not isinstance(error, KeyboardInterrupt):
            assert f"stores[1] ({second!r}): " in str(raised.value), raised.value
    assert closings == ["DiskStore", *(["KVCacheManager"] if kind == "pool" else ["HostTier", "HostCache"])]


@pytest.mark.parametrize("kind", ["pool", "host"])
def test_stores_of_one_name_get_numbers_unless_their_texts_name_them(kind: str, tmp_path: Path) -> None:
    texts = [f"disk:{tmp_path}/{number}?capacity=1MiB" for number in range(4)]
    texts[2] += "&name=slow"
    begin: Callable[..., Any] = open_pool if kind == "pool" else open_host
    opened = begin(*texts)
    assert list(opened.storage.stats().health) == ["disk", "disk-2", "slow", "disk-3"]
    assert opened.close(600)
    with pytest.raises(ValueError, match=r"stores\[0\]: store.name: expected"):
        begin("memory:?capacity=1MiB&name=A")


def test_a_pool_that_is_refused_leaves_no_folder_of_its_store(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(0o700)
    for wrong in ({"device_blocks": -1}, {"save": "always"}):
        for folder in ("new", "old"):
            with pytest.raises(ValueError, match="device_blocks|save"):
                open_pool(f"disk:{tmp_path}/{folder}?capacity=1MiB", **wrong)
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    open_pool(f"disk:{tmp_path}/new?capacity=1MiB").close()
    with pytest.raises(ValueError, match="save"):
        open_pool(f"disk:{tmp_path}/new?capacity=1MiB", save="always")
    assert (tmp_path / "new" / "secret").exists(), "what was there before stays"


class Broken(MemoryStore):
    """A store that does not open."""

    name = "broken"
    error: BaseException = OSError()

    def __init__(self) -> None:
        super().__init__(1 << 20)

    def open(self, space: Any) -> bytes:
        raise self.error


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stores": []}, ValueError, "stores: expected 1 to 16 stores, got 0"),
    ({"stores": MEMORY}, TypeError, "stores: expected a list, got 'memory:.*'"),
    ({"stores": [MEMORY, "/var/kv"]}, ValueError, r"stores\[1\]: store: expected .*did you mean disk:/var/kv\?"),
    ({"stores": ["memory:"]}, ValueError, r"stores\[0\]: store: expected \?capacity=... for 'memory', got memory:$"),
    ({"stores": ["memory:?secret=abc"]}, ValueError, r"stores\[0\]: secret: expected secret_file=, .* it in the text$"),
    (
        {"stores": ["disk:/nope/deep/x"]},
        FileNotFoundError,
        r"stores\[0\] \('disk:/nope/deep/x'\): expected that .*/nope",
    ),
    ({"model": 5}, TypeError, "model: expected a string, got 5"),
    ({"revision": None}, ValueError, "revision: expected a text with the name of a model, .* got None"),
    ({"model": IDENTITY}, ValueError, "revision: expected .* None with a ModelIdentity, got '1'"),
    ({"model": OTHER, "revision": None}, ValueError, "identity.kv_dtype: expected float16, as in the blocks, got 'fl"),
    ({"model": SHORT, "revision": None}, ValueError, "identity.layout: expected .+, got "),
    ({"model": ""}, ValueError, "model: expected a text"),
    ({"secret": b"short"}, ValueError, "secret: expected 16 to 64 bytes, got 5 bytes"),
    ({"host_blocks": 0}, ValueError, "pool: expected a host tier for all groups of layers, got host_blocks=0"),
    ({"event_capacity": 0}, ValueError, "pool: expected one that records events"),
    ({"save": "never"}, ValueError, "save: expected one of commit, evict, reuse, got 'never'"),
    ({"savee": "evict"}, TypeError, r"open\(\) got an unexpected keyword argument 'savee'; did you mean save\?"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        kvpool.open(LAYOUT, **{**SIZES, **MODEL, "stores": [MEMORY], **options})
    assert "abc" not in str(raised.value), "a secret"
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpool-storage"]


def test_each_argument_of_the_constructors_can_be_passed_on() -> None:
    for options, kind, own in (
        (
            opening.PoolOptions,
            kvpool.KVCacheManager,
            {"layout", "device_blocks", "host_blocks", "secret", "event_capacity"},
        ),
        (opening.StorageOptions, StorageManager, {"pool", "stores", "identity", "clock"}),
        (opening.HostCacheOptions, kvpool.HostCache, {"host_blocks", "block_bytes", "identity"}),
        (opening.HostStorageOptions, HostStorageManager, {"cache", "tier", "stores", "identity", "clock"}),
    ):
        parameters = {*inspect.signature(kind.__init__).parameters} - {"self"} - own
        assert options.__optional_keys__ == parameters, kind


def test_options_reach_the_pool_and_the_storage_manager() -> None:
    with open_pool(MEMORY, policy="agent", window=8, save="evict") as (cache, storage):
        assert (cache.groups[0].window, cache.core.config.settings.policy) == (8, "agent")
        serve(cache)
        assert storage.drain(10.0) and storage.stats().saved_blocks == 0, "nothing was about to be evicted"
    groups = [kvpool.LayerGroup(LAYOUT), kvpool.LayerGroup(kvpool.BlockLayout(2, 1, 8, 4, "float32"), window=8)]
    sizes = {**SIZES, "device_blocks": [16, 16], "host_blocks": [16, 16]}
    with kvpool.open(groups=groups, stores=[MEMORY], **sizes, **MODEL) as (cache, storage):
        assert len(cache.groups) == 2


# ----------------------------------------
# Secrets.


class NoSecret(MemoryStore):
    """A persistent store that has its secret once it is open."""

    name = "other"
    persistent = True

    @property
    def secret(self) -> bytes:
        raise NotImplementedError


def test_the_secret_is_that_of_the_first_store_that_outlives_the_process(tmp_path: Path) -> None:
    memory, disk = MemoryStore(1 << 20), DiskStore(f"{tmp_path}/kv", 1 << 20)
    other = NoSecret(1 << 20)
    for stores, secret in (([memory], memory.secret), ([memory, other, disk], disk.secret)):
        with open_pool(*stores) as opened:
            keys = opened.cache.block_keys(PROMPT).keys
        with kvpool.KVCacheManager(LAYOUT, **SIZES, secret=secret) as pool:
            assert (pool.block_keys(PROMPT).keys == keys).all()
    with pytest.raises(ValueError, match="secret: expected 16 to 64 bytes, since no store has a secret before it is"):
        open_pool(memory, other)
    open_pool(memory, other, secret=bytes(32)).close()


# ----------------------------------------
# A store that is too slow.


def test_a_pool_that_is_closed_too_soon_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    class Slow(MemoryStore):
        def save(self, *args: Any) -> Any:
            go_on.wait(60.0)
            return super().save(*args)

    opened = open_pool(Slow(1 << 20))
    serve(opened.cache)
    threading.Timer(0.5, go_on.set).start()
    with caplog.at_level(logging.WARNING, "kvpool.storage"):
        assert not opened.close(0.1)
    assert "closed after 0.1 s, before all blocks were saved" in caplog.text and opened.cache.closed


# ----------------------------------------
# A host cache.


def open_host(*stores: Any, **options: Any) -> opening.OpenHostCache:
    return kvpool.open_host_cache(8, 4096, stores=list(stores), **{"identity": IDENTITY, **options})


def test_a_host_cache_finds_its_keys_again(tmp_path: Path) -> None:
    text = f"disk:{tmp_path}/kv?capacity=1MiB"
    with open_host(text, policy="agent", save="commit") as (cache, tier, storage):
        reserved = cache.reserve([b"a"])
        tier.blocks[reserved.blocks] = 7
        storage.publish(reserved.keys)
    assert cache.closed and storage.closed
    with pytest.raises(kvpool.PoolClosed):
        tier.share()
    memory = np.zeros((8, 4096), np.uint8)
    with open_host(text, memory=memory) as (cache, tier, storage):
        while storage.find(b"a") == cache.PENDING:
            storage.drain(1.0)
        with storage.pin([b"a"]) as lease:
            assert (memory[lease.blocks[0]] == 7).all()
    with pytest.raises(ZeroDivisionError), open_host(text) as opened:
        raise ZeroDivisionError
    assert opened.cache.closed and opened.storage.closed
    with pytest.raises(TypeError, match=r"open_host_cache\(\) got .* 'hystory'; did you mean history\?"):
        open_host(text, hystory=5)


def test_importing_the_package_loads_no_store() -> None:
    script = "import sys, kvpool; print([name for name in sys.modules if name.startswith(('kvpool.st', 'kvpool.op'))])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
