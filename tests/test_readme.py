"""What README.md shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


CODE = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("code", "says"), list(zip(CODE, ["Lease(", "nothing orders two accesses", "gathered", "4 blocks"], strict=True)))
def test_the_examples_of_the_readme_run(code: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, str(README), "exec"), {})
    assert says in capsys.readouterr().out
