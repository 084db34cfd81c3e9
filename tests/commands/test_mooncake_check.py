"""The doctor says whether Mooncake can be loaded, whether its master answers, and that its clients are open to all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.storage.backends.mooncake import guarded_client as mooncake_client
from kvpool.tools.cli import doctor
from kvpool.tools.cli.doctor import FAILED, OK, WARNING

TESTED = mooncake_client.TESTED
WELL: dict[str, Any] = {"version": TESTED, "tested": TESTED, "error": None, "unreachable": None}
WELL |= {"master": "10.0.0.1:50051", "asked": True, "seen_as": "10.0.0.2"}


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_who_uses_a_master_is_warned_that_clients_are_open_to_all() -> None:
    client, master, security = doctor.judge_mooncake(WELL)
    assert (client.status, master.status, security.status) == (OK, OK, WARNING)
    assert "10.0.0.2" in master.reason
    assert "without a password" in security.reason and "docs/cluster.md" in security.advice


@pytest.mark.parametrize(
    ("changes", "words", "advice"),
    [
        ({"version": "9.9"}, "9.9, tested is", ""),
        ({"error": "Mooncake cannot be loaded: apt-get install x"}, "cannot be loaded", "apt-get install x"),
    ],
)
def test_a_client_that_cannot_be_used_is_named(changes: dict[str, Any], words: str, advice: str) -> None:
    check = doctor.judge_mooncake(WELL | changes)[0]
    assert (check.status, check.advice) == (WARNING, advice) and words in check.reason


def test_where_it_is_not_installed_the_list_of_packages_says_so() -> None:
    assert doctor.judge_mooncake(WELL | {"version": None, "master": None}) == []


def test_the_environment_names_a_master(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", listening)
    report = doctor.look_at_mooncake(None)
    assert report["seen_as"] == "127.0.0.1" and report["unreachable"] is None


@pytest.mark.parametrize("asked", [True, False])
def test_a_master_that_was_asked_for_has_to_be_reached(
    nobody: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", nobody)
    report = doctor.look_at_mooncake(nobody if asked else None)
    assert f"no Mooncake master at {nobody}" in report["unreachable"]
    assert doctor.judge_mooncake(WELL | report)[1].status == (FAILED if asked else WARNING)


@pytest.mark.parametrize("text", ["host", "host:port", ":1 2"])
def test_what_is_not_an_address_is_not_a_crash(text: str) -> None:
    assert "expected HOST:PORT" in doctor.look_at_mooncake(text)["unreachable"]


def test_the_command_has_it(
    listening: str, nobody: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_numba_cuda", lambda version: {"place": "", "error": None})
    assert main(["doctor", "--mooncake", listening, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mooncake"]["seen_as"] == "127.0.0.1"
    assert main(["doctor", "--mooncake", nobody]) == 1
    assert f"mooncake master {nobody}: failed" in capsys.readouterr().out
