"""The project names no path outside its checkout: neither somebody's folder nor one beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.counter import ROOT

TOPS = (".ci", "asv_bench", "cuda", "docker", "docs", "examples", "kvpool", "tests")
SUFFIXES = {"", ".c", ".cfg", ".cff", ".cu", ".cuh", ".h", ".json", ".md", ".py", ".toml", ".txt", ".Dockerfile"}
MADE = {"_build", "__pycache__", "env", "html", "results"}
FOLDERS = re.compile(r"(?<![\w.~$}-])/(?:home|mnt|root|work|Users)(?![\w-])|\bshared[/]|\bROOT\.parents?\b")
"""Where people keep their things, a folder beside the checkout, and what is above its root."""
RELATIVE = re.compile(r"(?<![\w./])(?:\.\./)+\w[\w./-]*")
ALLOWED = {
    ("DESIGN.md", "../cuda/"),  # of kvpool/, whose folders and files these list
    ("docs/design/rooms.md", "../cuda/"),
    ("tests/share/test_share.py", "../../etc/passwd"),  # a name that is refused
}


def files() -> Iterator[Path]:
    """The text files of a checkout, without what is made in it."""
    paths = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    for path in sorted([*paths, *(path for top in TOPS for path in (ROOT / top).rglob("*"))]):
        if path.is_file() and path.suffix in SUFFIXES and not MADE.intersection(path.relative_to(ROOT).parts):
            if path != Path(__file__).resolve():  # It has the samples below.
                yield path


def leaving(name: str, text: str) -> list[str]:
    """The paths in a file that lead out of the checkout. ``name``: its path from the root."""
    place, wrong = ROOT / name, FOLDERS.findall(text)
    for path in RELATIVE.findall(text):
        if (name, path) not in ALLOWED and not (place.parent / path.rstrip(".")).exists():
            wrong.append(path)
    return wrong


@pytest.mark.exhaustive
def test_no_path_leads_out_of_the_checkout() -> None:
    wrong = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if links := leaving(name, path.read_text(encoding="utf-8")):
            wrong[name] = links
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("README.md", "in /work/x"),
        ("docs/x.md", "see ../shared/traces"),
        ("docs/x.md", "see ../../traces"),
        ("tests/a/x.py", "path = '/home/me/trace'"),
        ("tests/a/x.py", "path = ROOT.parent / 'x'"),
    ],
)
def test_such_a_path_is_found(name: str, words: str) -> None:
    assert leaving(name, words)
