"""What a project owes its users: variables are on one page, extras are installed from a checkout, versions agree, and
the images name what is there."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest

from kvpool.__main__ import command_line

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpool", "tests", "asv_bench", "examples", "docs", "docker", ".ci", "cuda")
TEXTS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and not {"__pycache__", "_build", "env"} & set(path.parts) and path.suffix not in (".svg", ".xz")
]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_the_page_of_variables_has_those_of_the_code_and_no_others() -> None:
    pattern = r"\bKVPOOL_[A-Z]+(?:_[A-Z]+)*\b"
    code = {name for path in TEXTS if path.suffix != ".md" for name in re.findall(pattern, read(path))}
    page = set(re.findall(rf"`({pattern[2:-2]})`", read(ROOT / "docs" / "environment.md")))
    assert code - page == set(), "read, and not on the page"
    assert page - code == set(), "on the page, and not read"
    assert len(page) > 15


def test_no_page_says_to_install_a_name_that_is_not_published() -> None:
    unpublished = re.compile(r"pip install [^\n]*['\"]?kvpool" + r"\[")
    readable = [*TEXTS, *ROOT.glob("*.md")]
    assert not [str(path) for path in readable if path != Path(__file__) and unpublished.search(read(path))]


def test_the_versions_of_the_project_are_one() -> None:
    version = settings()["metadata"]["version"]
    assert f"\nversion: {version}\n" in read(ROOT / "CITATION.cff")
    assert f"\n## {version}" in read(ROOT / "CHANGELOG.md")


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_an_image_copies_installs_and_runs_what_is_there(image: Path) -> None:
    lines = [line for line in read(image).replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    arguments = dict(line.removeprefix("ARG ").split("=") for line in lines if line.startswith("ARG "))
    extras = settings()["options.extras_require"].keys()
    text = "\n".join(lines)
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    (asked,) = re.findall(r'pip install .*"\.\[([\w,]+)\]"', text)
    assert set(asked.split(",")) <= set(extras)
    commands = re.findall(r"^RUN python -m kvpool (.*)$", text, re.MULTILINE)
    (words,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    for command in [*map(shlex.split, commands), [word.strip(' "') for word in words.split(",")]]:
        command_line().parse_args(command)
    assert lines[0].startswith("FROM python:3.11") and 'ENTRYPOINT ["kvpool"]' in text
    (number,) = re.findall(r"^RUN useradd .*--uid (\d+)", text, re.MULTILINE)
    assert f"\nUSER {number}\n" in text, "a number, by which Kubernetes sees that it is not root"
    assert f"KVPOOL_CACHE_DIR={shlex.split(commands[0])[-1]}" in text, "what is compiled is where it is looked for"


def test_what_git_ignores_is_not_copied_into_an_image() -> None:
    ignored = [line.rstrip("/") for line in read(ROOT / ".gitignore").splitlines()]
    copied = [line if "/" in line else f"**/{line}" for line in ignored]
    assert read(ROOT / ".dockerignore").splitlines() == [".git", *copied]
