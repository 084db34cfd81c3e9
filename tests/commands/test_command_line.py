"""The command line says its version and its name, and what is wrong before how it is used."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.__main__ import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The exit status, and the lines on both streams."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, (captured.out + captured.err).splitlines()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, [f"kvpool {kvpool.__version__}"])


def test_the_name_is_the_one_that_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for script, name in (("/usr/bin/kvpool", "kvpool"), ("/x/kvpool/__main__.py", "python -m kvpool")):
        monkeypatch.setattr("sys.argv", [script])
        assert said(capsys, "replay", "--help")[1][0].startswith(f"usage: {name} replay ")


def test_an_unknown_option_is_named_first_with_the_one_that_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = said(capsys, "replay", "--devcie-blocks", "4")
    assert status == 2 and lines[0].endswith("unrecognized arguments: --devcie-blocks; did you mean --device-blocks?")
    assert lines[2].startswith("usage: ")
    assert "did you mean" not in said(capsys, "replay", "--zzz")[1][0]
