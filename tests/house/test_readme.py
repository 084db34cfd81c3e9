"""What README.md and the pages of docs/ show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "DESIGN.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
PROGRAMS = [
    pytest.param(page, code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]
NEEDS = {
    "cryptography": ("cryptography",),
    "kvpool.publish": ("msgspec", "zmq"),
    "kvpool.remote": ("zmq",),
    "kvpool.stores": ("blake3",),
    "kvpool.stores.peer.peer_store": ("zmq",),
    "kvpool.observe.metrics": ("prometheus_client",),
}


@pytest.mark.parametrize(("page", "code"), PROGRAMS)
def test_the_programs_that_are_shown_run(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for module, packages in NEEDS.items():
        if module in code:
            for package in packages:
                pytest.importorskip(package)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    shown = re.findall(r"# prints: (.+)", code)
    assert shown, "a program says what it prints"
    for line in shown:
        assert line in said
