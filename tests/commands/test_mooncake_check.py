"""The doctor says whether Mooncake can be loaded, whether its master answers, and that its clients are open to all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvpool.__main__ import main
from kvpool.storage.backends.mooncake import guarded_client as client
from kvpool.tools.cli import doctor
from kvpool.tools.cli.doctor import FAILED, OK, WARNING
from tests.ports import free_ports

MASTER = "10.0.0.1:50051"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that can be loaded, and no master in the environment."""
    monkeypatch.setattr(client, "version", lambda: client.TESTED)
    monkeypatch.setattr(client, "library", lambda: None)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    return f"127.0.0.1:{free_ports()[0]}"


def test_who_uses_a_master_is_warned_that_clients_are_open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "reach", lambda master: "10.0.0.2")
    loaded, master, security = doctor.check_mooncake(MASTER)
    assert (loaded.status, master.status, security.status) == (OK, OK, WARNING)
    assert "10.0.0.2" in master.reason
    assert "without a password" in security.reason and "docs/cluster.md" in security.advice


def test_a_client_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise ImportError("Mooncake cannot be loaded: apt-get install x")

    monkeypatch.setattr(client, "version", lambda: "9.9")
    loaded, security = doctor.check_mooncake(None)
    assert (loaded.status, security.status) == (WARNING, OK) and "9.9, tested is" in loaded.reason
    monkeypatch.setattr(client, "library", library)
    (loaded,) = doctor.check_mooncake(None)
    assert loaded.status == WARNING and loaded.reason == "Mooncake cannot be loaded: apt-get install x"


@pytest.mark.parametrize("asked", [True, False])
def test_a_master_that_was_asked_for_has_to_be_reached(
    nobody: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", nobody)
    _, master, _ = doctor.check_mooncake(nobody if asked else None)
    assert f"no Mooncake master at {nobody}" in master.reason
    assert master.status == (FAILED if asked else WARNING)


@pytest.mark.parametrize("text", ["host", "host:port", ":1 2"])
def test_what_is_not_an_address_is_not_a_crash(text: str) -> None:
    assert "expected HOST:PORT" in doctor.check_mooncake(text)[1].reason


def test_the_command_has_it(
    listening: str, nobody: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the master of the environment, and with that of the command."""
    monkeypatch.setattr(doctor, "check_numba_cuda", lambda version: [])
    monkeypatch.setenv("MOONCAKE_MASTER", listening)
    assert main(["doctor"]) == 0
    assert f"mooncake master {listening}: ok" in capsys.readouterr().out
    assert main(["doctor", "--mooncake", nobody]) == 1
    assert f"mooncake master {nobody}: failed" in capsys.readouterr().out
