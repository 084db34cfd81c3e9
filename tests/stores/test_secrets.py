"""A secret that workers share is read from a file that nobody else can read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvpool.stores.mooncake.mooncake_store import SECRET_FILE, MooncakeStore
from kvpool.stores.seals import default_place, read_or_make_secret, read_secret

GOOD = "0123456789abcdef" * 4


def written(path: Path, text: str = GOOD + "\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_made_once_and_read_by_all(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "mooncake.secret", list[bytes]()
    threads = [threading.Thread(target=lambda: found.append(read_or_make_secret(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(found) == 8 and set(found) == {read_secret(path)} and len(found[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(written(tmp_path / "file", mode=mode))


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fstat = written(tmp_path / "file"), os.fstat
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*fstat(fd)[:4], owner, *fstat(fd)[5:]]))
    with pytest.raises(ValueError, match="chown it"):
        read_secret(path)
    owner = os.geteuid()
    assert len(read_secret(path)) == 32


@pytest.mark.parametrize("text", ["", GOOD[:-1], GOOD[:-2], GOOD + "00", "x" * 64, GOOD[:-1] + "é", "0" * 10_000])
def test_what_is_no_secret_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits") as raised:
        read_secret(written(tmp_path / "file", text))
    assert "0123456789" not in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="no regular file"):
        read_secret(tmp_path / "pipe")


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from kvpool.stores.mooncake import guarded_client as mooncake_client

    monkeypatch.setattr(mooncake_client, "library", lambda: object)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(SECRET_FILE, raising=False)
    return tmp_path / "kvpool" / "mooncake.secret"


@pytest.mark.parametrize("master", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_workers_of_one_machine_need_to_name_no_secret(at_home: Path, master: str) -> None:
    MooncakeStore(master)
    assert default_place("mooncake") == at_home and read_secret(at_home)


@pytest.mark.parametrize("master", ["10.0.0.1:1", "kv.example.org:1"])
def test_workers_of_several_machines_have_to_name_one(at_home: Path, master: str) -> None:
    """A secret that each machine makes by itself would find nothing, and say nothing."""
    with pytest.raises(ValueError, match="secret_file: needed with the master"):
        MooncakeStore(master)
    assert not at_home.exists()


def test_the_environment_names_a_file(at_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone' cannot be read: No such file"):
        MooncakeStore("10.0.0.1:1")
    monkeypatch.setenv(SECRET_FILE, str(written(tmp_path / "there")))
    MooncakeStore("10.0.0.1:1")
    assert not at_home.exists()
