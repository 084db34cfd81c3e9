"""A line that is no longer covered is listed, and one that only moved is not."""

from __future__ import annotations

from pathlib import Path

from tests.house.covered import Line, functions_of, load, lost, save

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
    save([old], tmp_path / "baseline")
    before = load(tmp_path / "baseline")
    moved, second = old._replace(file="kvpool/state/c.py", number=9), old._replace(number=30)
    other = old._replace(text="raise x")
    assert not lost(before, [moved])
    assert lost(before, [old, second, other]) == [second, other]
