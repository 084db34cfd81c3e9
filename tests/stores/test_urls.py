"""A text names a store, and a wrong text names what is wrong."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from kvpool.common.sizes import parse_size
from kvpool.storage import MemoryStore, Space
from kvpool.storage.urls import bytes_argument, open_store


class GuardedStore(MemoryStore):
    def __init__(self, password_file: str) -> None:
        super().__init__(1 << 20)
        self.password_file = password_file


class NamelessStore(MemoryStore):
    name = ""

    def __init__(self) -> None:
        super().__init__(1)


def test_a_text_opens_a_store() -> None:
    store = open_store("memory:?capacity=2MiB")
    assert isinstance(store, MemoryStore) and repr(store)


def test_a_text_names_a_store_of_another_package() -> None:
    store = open_store("kvpool.storage.backends.memory.MemoryStore:?capacity=1MiB")
    assert isinstance(store, MemoryStore)
    guarded = open_store(f"{__name__}.GuardedStore:?password_file=/a/b")
    assert isinstance(guarded, GuardedStore) and guarded.password_file == "/a/b"
    with pytest.raises(ValueError, match="store.name: expected 1 to 64"):
        open_store(f"{__name__}.NamelessStore:")


@pytest.mark.parametrize(
    "text",
    [
        "pathlib.Path:/a",
        "kvpool.storage.backends.memory.Nothing:",
        "kvpool.storage:",
        ".memory:",
        "a..b:",
        "os.system:a",
    ],
)
def test_a_text_that_names_no_store_of_another_package_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="store: .*"):
        open_store(text)
    with pytest.raises(ImportError, match=r"store: .*'no_such_package.Store'"):
        open_store("no_such_package.Store:")


@pytest.mark.parametrize(
    "text", ["", "disk", "floppy:/a", "memory:?capacity=2XB", "memory:?capacity=-1", "memory:?capacity", "memory:?a=1"]
)
def test_a_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"store.*: .*|capacity: "):
        open_store(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk:", "store: expected disk:PATH, got disk:"),
        ("s3:", "store: expected s3://BUCKET/PREFIX, got s3:"),
        ("peer:", "store: expected peer:tcp://HOST:PORT, got peer:"),
        (
            "disk:/x?capcity=1GiB",
            "expected options capacity, policy, threads for 'disk', got 'capcity'; did you mean capacity?",
        ),
        ("memory:?capacity=1MiB&size=2", "store: expected options capacity, .*got 'size'"),
    ],
)
def test_a_text_without_its_place_or_with_an_unknown_option_says_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(text)


def test_a_disk_in_a_folder_that_does_not_exist_names_that_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"expected that the folder {tmp_path}/deep exists"):
        open_store(f"disk:{tmp_path}/deep/x").open(Space(bytes(16), np.zeros((1, 64), np.uint8)))


def test_names_in_a_text_are_those_of_the_machine_and_of_the_engine(tmp_path: Path) -> None:
    text = f"disk:{tmp_path}/{{host}}-{{dp_rank}}-{{part}}"
    store = open_store(text, dp_rank=3, part="kv/../a b")
    assert repr(store).startswith(f"DiskStore('{tmp_path}/{platform.node()}-3-kv-..-a-b'")


@pytest.mark.parametrize("name", ["{rank}", "{dp}", "{}", "{part}", "{dp_rank!r}"])
def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {name} in ")):
        open_store(f"disk:/a/{name}", dp_rank=0, part="")


@pytest.mark.parametrize(
    "text",
    [
        "memory:?capacity=" + "9" * 5000,
        "memory:?capacity=1e400",
        "memory:?capacity=\N{ARABIC-INDIC DIGIT ONE}GiB",
        "memory:?capacity=\N{SUPERSCRIPT TWO}",
        "disk:/a?threads=" + "9" * 5000,
        "disk:/a?threads=\N{SUPERSCRIPT TWO}",
        "disk:/a?system=mine",
        "peer:tcp://127.0.0.1:1?secret_file={}&timeout=\N{ARABIC-INDIC DIGIT THREE}",
        "peer:tcp://127.0.0.1:1?secret_file={}&connections=" + "9" * 5000,
        "peer:tcp://192.0.2.1:1?secret_file={}&keys=any",
        "peer:tcp://127.0.0.1:1?secret_file={}&keys=any",
        "peer:tcp://127.0.0.1:1",
    ],
)
def test_what_an_option_cannot_be_is_refused_by_name(text: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    with pytest.raises(ValueError, match=r"store.*: .*|capacity: |secret"):
        open_store(text.format(secret))


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("9007199254740993", 9007199254740993),
        (2**60 + 1, 2**60 + 1),
        ("0.1GB", 10**8),
        ("1.5 TiB", 3 << 39),
        (-1, None),
        ("-1", None),
        (True, None),
        (1.0, None),
        ("1e3", None),
        ("9" * 21, None),
        (10**30, None),
    ],
)
def test_sizes_are_exact(given: object, nbytes: int | None) -> None:
    assert parse_size(given) == nbytes


@pytest.mark.parametrize("text", [None, 3, b"disk:/a"])
def test_no_text_is_refused(text: object) -> None:
    with pytest.raises(TypeError, match="store"):
        open_store(text)


def test_a_secret_in_a_text_is_refused_and_not_repeated() -> None:
    for name in ("secret", "Secret", "secret_", "%73ecret", "client_secret"):
        with pytest.raises(ValueError, match="secret: expected secret_file=") as refused:
            open_store(f"peer:tcp://127.0.0.1:1?{name}=abcdef")
        assert "abcdef" not in str(refused.value)


@pytest.mark.parametrize(
    "size", [10**400, 1 << 63, -1, True, 1.5, "9" * 400, "9" * 400 + "GiB", "1e3", "nan", "inf", None]
)
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="staging: .*"):
        bytes_argument("staging", size)


@pytest.mark.parametrize("size", [0, (1 << 53) + 1, (1 << 63) - 1])
def test_a_size_in_bytes_is_exact(size: int) -> None:
    assert bytes_argument("staging", size) == size


@pytest.mark.parametrize("text", ["s3://bucket?policy=agent", "peer:tcp://a:1?policy=lru", "mooncake:a:1?policy=agent"])
def test_a_policy_is_refused_where_others_choose_what_goes(text: str) -> None:
    with pytest.raises(ValueError, match="expected policy= in disk:..., memory:... alone"):
        open_store(text)
    with pytest.raises(ValueError, match="expected one of lru, reuse, agent, adaptive"):
        open_store("memory:?capacity=1MiB&policy=fifo")
