"""Folders of compiled code: which are tried, which are trusted, and what of them is read, replaced and removed."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
from numba.core import config

from kvpool.common.jit import cache

open_lock = cache._lock.__wrapped__


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to choose places in. What the process knows of its own is forgotten, and comes back."""
    for name in ("cache_root", "_read_folders", "_is_trusted"):
        monkeypatch.setattr(cache, name, getattr(cache, name).__wrapped__)
    for name in ("KVPOOL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(cache, "_lock", lambda: -1)
    return tmp_path


def choose(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setenv("KVPOOL_CACHE_DIR", os.pathsep.join(map(str, folders)))


def test_places_are_tried_in_turn_and_made_for_this_user_only(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        private = places / "temporary" / f"kvpool-{os.getuid()}"
        roots = [cache.cache_root()]
        (places / "home").mkdir(mode=0o700)
        monkeypatch.setenv("HOME", str(places / "home"))
        (places / "home" / ".cache").mkdir(mode=0o700)
        roots.append(cache.cache_root())
        monkeypatch.setenv("XDG_CACHE_HOME", str(places / "home" / "xdg"))
        roots.append(cache.cache_root())
        monkeypatch.setattr(config, "CACHE_DIR", str(places / "new" / "numba"))
        roots.append(cache.cache_root())
        choose(monkeypatch, places / "new" / "chosen")
        roots.append(cache.cache_root())
    finally:
        os.umask(before)
    home = places / "home"
    assert roots == [
        *(private, home / ".cache" / "kvpool", home / "xdg" / "kvpool"),
        *(places / "new" / "numba" / "kvpool", places / "new" / "chosen"),
    ]
    made = [folder for folder in (*roots, places / "new") if folder is not None]
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in made)


@pytest.mark.parametrize("danger", ["writable", "foreign", "link", "group", "renamable", "inside", "by a link"])
def test_folder_that_others_can_write_or_replace_is_passed_over_with_a_warning(
    places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, danger: str
) -> None:
    """What lies there would be unpickled."""
    chosen = places / "around" / "chosen"
    chosen.mkdir(parents=True, mode=0o700)
    if danger == "link":
        chosen.rmdir()
        (places / "elsewhere").mkdir(mode=0o700)
        chosen.symlink_to(places / "elsewhere")
    elif danger == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(chosen, 65534, 65534)
    elif danger in ("writable", "group"):
        chosen.chmod(0o777 if danger == "writable" else 0o770)
    else:
        chosen.parent.chmod(0o777)
    if danger == "inside":
        chosen = chosen / "deeper"
        chosen.mkdir(mode=0o700)
    elif danger == "by a link":
        (chosen / "deeper").mkdir(mode=0o700)
        (places / "link").symlink_to(chosen)
        chosen = places / "link" / "deeper"
    choose(monkeypatch, chosen)
    with caplog.at_level(logging.WARNING):
        assert cache.cache_root() == places / "temporary" / f"kvpool-{os.getuid()}"
        assert str(chosen) in caplog.text
    assert chosen not in cache._read_folders() and not [*chosen.iterdir()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_folder_that_is_reached_by_a_link_of_somebody_else_is_refused(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can make it lead to another folder, whoever may rename it."""
    (places / "mine" / "deep").mkdir(parents=True, mode=0o700)
    (places / "temporary" / "link").symlink_to(places / "mine")
    os.lchown(places / "temporary" / "link", 65534, 65534)
    choose(monkeypatch, places / "temporary" / "link" / "deep")
    assert cache.cache_root() == places / "temporary" / f"kvpool-{os.getuid()}"


def test_a_second_folder_of_a_list_is_read_and_never_written(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baked, chosen = places / "baked", places / "own"
    choose(monkeypatch, baked)
    cache.write("code", b"baked")
    choose(monkeypatch, chosen, baked)
    assert cache.read("code") == b"baked"
    cache.write("code", b"new")
    assert cache.read("code") == b"new" and len([*baked.iterdir()]) == 1
    shutil.rmtree(chosen)
    baked.chmod(0o777)
    assert cache.read("code") is None


DANGERS = {
    "a wrong byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "a part of it": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "the start of it": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "the file of other code": lambda path: shutil.copy(path.with_name("other.nbc"), path),
    "nothing": lambda path: path.unlink(),
    "one that others could write": lambda path: path.chmod(0o666),
    "one that was another user's": lambda path: os.chown(path, 65534, 65534),
}


@pytest.mark.parametrize("danger", DANGERS)
def test_a_file_that_is_not_whole_or_not_ours_is_not_read_and_is_replaced(
    places: Path, monkeypatch: pytest.MonkeyPatch, danger: str
) -> None:
    """Anybody who can write a file can have written it, while its folder was open."""
    if "user" in danger and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    choose(monkeypatch, places / "chosen")
    cache.write("code", b"content")
    cache.write("other", b"content")
    assert cache.read("code") == b"content"
    DANGERS[danger](places / "chosen" / "code.nbc")
    assert cache.read("code") is None
    cache.write("code", b"again")
    assert cache.read("code") == b"again"
    assert stat.S_IMODE((places / "chosen" / "code.nbc").stat().st_mode) == 0o600


def test_old_code_does_not_pile_up(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, places / "chosen")
    for number in range(6):
        cache.write(f"code{number}", b"")
        os.utime(places / "chosen" / f"code{number}.nbc", (number, number))
    assert cache.read("code0") == b"", "it was used just now"
    monkeypatch.setattr(cache, "_KEPT", 3)
    os.close(open_lock())
    assert {path.name for path in (places / "chosen").glob("*.nbc")} == {"code0.nbc", "code4.nbc", "code5.nbc"}
