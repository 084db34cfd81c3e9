"""A secret that workers share is read from a file that nobody else can read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage.backends.mooncake.mooncake_store import SECRET_FILE, MooncakeStore
from kvpool.storage.backends.shared_secret import default_place, read_or_make_secret, read_secret
from kvpool.storage.mac import BlockNames, Secret, block_context
from kvpool.storage.store import MODEL_BYTES
from tests.stores.lab import IDENTITY, OTHER, memory, names
from tests.waiting import at_once

GOOD = "0123456789abcdef" * 4


def written(path: Path, text: str = GOOD + "\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_made_once_and_read_by_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mooncake.secret"
    secrets = at_once(read_or_make_secret, [path] * 8)
    assert set(secrets) == {read_secret(path)} and len(secrets[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        *((GOOD, mode, "chmod 600") for mode in (0o640, 0o604, 0o602)),
        *((text, 0o600, "64 hex digits") for text in ("", GOOD[:-2], GOOD + "00", GOOD[:-1] + "é", "0" * 10_000)),
    ],
)
def test_a_file_that_others_can_use_or_that_has_no_secret_is_refused_and_not_shown(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_secret(written(tmp_path / "file", text, mode))
    assert "0123456789" not in str(raised.value)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="not a regular file"):
        read_secret(tmp_path / "pipe")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fstat = written(tmp_path / "file"), os.fstat
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*fstat(fd)[:4], owner, *fstat(fd)[5:]]))
    with pytest.raises(ValueError, match="chown it"):
        read_secret(path)
    owner = os.geteuid()
    assert len(read_secret(path)) == 32


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from kvpool.storage.backends.mooncake import guarded_client as mooncake_client

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
    with pytest.raises(ValueError, match="secret_file: expected a file, since the master"):
        MooncakeStore(master)
    assert not at_home.exists()


def test_the_environment_names_a_file(at_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone': No such file"):
        MooncakeStore("10.0.0.1:1")
    monkeypatch.setenv(SECRET_FILE, str(written(tmp_path / "there")))
    MooncakeStore("10.0.0.1:1")
    assert not at_home.exists()


# ----------------------------------------
# Keys of two contents, models, namespaces or purposes never agree, and a secret is never shown.


SECRET = Secret(bytes(range(32)), IDENTITY)
TOKENS = np.arange(12, dtype=np.int32)


def test_no_two_models_or_secrets_share_a_key_or_a_tag() -> None:
    """What is dropped by a model or by a namespace is nobody else's."""
    secrets = Secret(bytes(32), IDENTITY), Secret(bytes(32), OTHER), Secret(bytes([1] * 32), IDENTITY)
    spaces = [b"", b"a", b"b"]
    assert all(secret.tag(name).startswith(secret.model) for secret in secrets for name in spaces)
    assert len({secret.model for secret in secrets}) == 3
    assert len({secret.derive_keys([b"a"]).tobytes() for secret in secrets}) == 3
    tags = {secret.tag(name)[MODEL_BYTES:] for secret in secrets for name in spaces}
    assert len(tags) == 9, "who sees the names learns that two models have one tenant"


def test_a_mac_covers_key_model_secret_and_every_byte() -> None:
    rows, keys = memory(2, 64), SECRET.derive_keys(names(2))
    mac = SECRET.mac(keys[:1], np.array([0]), rows)
    others = [
        SECRET.mac(keys[1:], np.array([0]), rows),
        Secret(bytes(range(32)), OTHER).mac(keys[:1], np.array([0]), rows),
        Secret(bytes(32), IDENTITY).mac(keys[:1], np.array([0]), rows),
        SECRET.mac(keys[:1], np.array([0]), rows[:, :63].copy()),
    ]
    others += [SECRET.mac(keys[:1], np.array([0]), rows, [context]) for context in (b"a", b"b", bytes(8))]
    rows[1, 63] = 1
    others.append(SECRET.mac(keys[:1], np.array([1]), rows))
    assert len({mac.tobytes(), *(other.tobytes() for other in others)}) == 9


def test_no_two_blocks_have_one_context() -> None:
    extra, more, none = np.zeros(12, np.int64), np.zeros(12, np.int64), np.zeros(12, np.int64)
    extra[0] = 1
    more[:2] = TOKENS[8:].view(np.int64)
    differ: list[tuple[bytes, Any, Any, bytes, int]] = [
        (b"parent", TOKENS, None, b"tenant", 0),
        (b"", TOKENS, None, b"parenttenant", 0),
        (b"parentt", TOKENS, None, b"enant", 0),
        (b"parent", TOKENS, extra, b"tenant", 0),
        (b"parent", TOKENS, None, b"tenant", 1),
        (b"parent", TOKENS[:8], None, b"tenant", 0),
        (b"parent", TOKENS[:8], more[:8], b"tenant", 0),
        (b"parent", TOKENS[::-1].copy(), None, b"tenant", 0),
    ]
    contexts = {block_context(*block) for block in differ}
    assert len(contexts) == 8 and block_context(b"parent", TOKENS, none, b"tenant", 0) in contexts


def test_a_part_of_names_has_their_contexts() -> None:
    whole = BlockNames(names(4), [b"a", b"b", b"c", b"d"])
    for part in (whole[1:3], whole[np.array([1, 2])]):
        assert (part.names, part.contexts) == (tuple(names(2, 1)), (b"b", b"c"))
    with pytest.raises(ValueError, match="one for each of the 4 names"):
        BlockNames(names(4), contexts=[b"a"])


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    assert repr(SECRET) == "Secret()"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SECRET)
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(b"short", IDENTITY)
