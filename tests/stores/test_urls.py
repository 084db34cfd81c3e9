"""A text names a store, and a wrong text names what is wrong."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvpool.common.sizes import parse_size
from kvpool.storage import MemoryStore
from kvpool.storage.urls import bytes_argument, open_store


class GuardedStore(MemoryStore):
    def __init__(self, password_file: str) -> None:
        super().__init__(1 << 20)
        self.password_file = password_file


class NamelessStore(MemoryStore):
    name = ""

    def __init__(self) -> None:
        super().__init__(1)


def test_a_text_names_a_store_of_another_package() -> None:
    store = open_store("kvpool.storage.backends.memory.MemoryStore:?capacity=1MiB")
    assert isinstance(store, MemoryStore)
    guarded = open_store(f"{__name__}.GuardedStore:?password_file=/a/b")
    assert isinstance(guarded, GuardedStore) and guarded.password_file == "/a/b"


WRONG = [
    ("", "store: "),
    ("disk", "store: "),
    ("floppy:/a", "store: "),
    ("disk:", "store: expected disk:PATH, got disk:"),
    ("s3:", "store: expected s3://BUCKET/PREFIX, got s3:"),
    ("peer:", "store: expected peer:tcp://HOST:PORT, got peer:"),
    ("pathlib.Path:/a", "store: "),
    ("kvpool.storage.backends.memory.Nothing:", "store: "),
    ("kvpool.storage:", "store: "),
    ("a..b:", "store: "),
    ("no_such_package.Store:", "store: .*'no_such_package.Store'"),
    (f"{__name__}.NamelessStore:", "store.name: expected 1 to 64"),
    ("disk:/x?capcity=1GiB", "expected options capacity, policy, threads for 'disk', got 'capcity'; did you mean"),
    ("disk:/a?system=mine", "store: "),
    ("disk:/a?threads=\N{SUPERSCRIPT TWO}", "threads"),
    ("disk:/a/{rank}", r"got \{rank\} in "),
    ("disk:/a/{}", r"got \{\} in "),
    ("disk:/a/{dp_rank!r}", r"got \{dp_rank!r\} in "),
    ("memory:?capacity", "store: "),
    ("memory:?capacity=2XB", "capacity: "),
    ("memory:?capacity=-1", "capacity: "),
    ("memory:?capacity=" + "9" * 5000, "capacity: "),
    ("memory:?capacity=\N{ARABIC-INDIC DIGIT ONE}GiB", "capacity: "),
    ("memory:?capacity=1MiB&policy=fifo", "expected one of lru, reuse, agent, adaptive"),
    ("s3://bucket?policy=agent", "expected policy= in disk:..., memory:... alone"),
    ("peer:tcp://127.0.0.1:1?secret_file={}&timeout=\N{ARABIC-INDIC DIGIT THREE}", "timeout"),
    ("peer:tcp://192.0.2.1:1?secret_file={}&keys=any", "keys"),
    ("peer:tcp://127.0.0.1:1", "secret"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_text_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    with pytest.raises((ValueError, ImportError), match=message):
        open_store(text.replace("secret_file={}", f"secret_file={secret}"), dp_rank=0, part="")
    with pytest.raises(TypeError, match="store"):
        open_store(text.encode())


def test_names_in_a_text_are_those_of_the_machine_and_of_the_engine(tmp_path: Path) -> None:
    text = f"disk:{tmp_path}/{{host}}-{{dp_rank}}-{{part}}"
    store = open_store(text, dp_rank=3, part="kv/../a b")
    assert repr(store).startswith(f"DiskStore('{tmp_path}/{platform.node()}-3-kv-..-a-b'")


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
        ("9" * 400 + "GiB", None),
        (10**30, None),
    ],
)
def test_sizes_are_exact(given: object, nbytes: int | None) -> None:
    assert parse_size(given) == nbytes
    if nbytes is not None:
        assert bytes_argument("staging", given) == nbytes
    else:
        with pytest.raises(ValueError, match="staging: .*"):
            bytes_argument("staging", given)


def test_a_secret_in_a_text_is_refused_and_not_repeated() -> None:
    for name in ("Secret", "%73ecret", "client_secret"):
        with pytest.raises(ValueError, match="secret: expected secret_file=") as refused:
            open_store(f"peer:tcp://127.0.0.1:1?{name}=abcdef")
        assert "abcdef" not in str(refused.value)
