"""A line that is no longer covered is listed, and one that only moved is not."""

from __future__ import annotations

from pathlib import Path

from tests.house.covered import File, Line, functions_of, load, lost, report, save

SOURCE = """\
import a

@a
def outer():
    class Inner:
        x = 1
    return 2
"""


def test_a_line_belongs_to_the_innermost_function_that_has_it() -> None:
    assert functions_of(SOURCE) == {3: "outer", 4: "outer", 5: "outer.Inner", 6: "outer.Inner", 7: "outer"}


def test_lines_that_lost_their_cover_are_listed_once_each(tmp_path: Path) -> None:
    old = Line("kvpool/state/a.py", "f", "return x", 3)
    save({"kvpool/state/a.py": File(10, [old]), "kvpool/b.py": File(0, [])}, tmp_path / "baseline")
    before = load(tmp_path / "baseline")
    moved, second = old._replace(file="kvpool/state/c.py", number=9), old._replace(number=30)
    other = old._replace(text="raise x")
    assert not lost(before, {"kvpool/state/c.py": File(10, [moved])})
    assert lost(before, {"kvpool/state/a.py": File(10, [old, second, other])}) == [second, other]
    table = report(before, {"kvpool/state/a.py": File(8, [old, second])}).splitlines()
    assert [row.split() for row in table[1:]] == [
        ["kvpool/state", "8", "6", "75.00", "%", "90.00", "%"],
        ["in", "all", "8", "6", "75.00", "%", "90.00", "%"],
    ]
