"""``python -m tests.house.counter``: the tokens and net lines of every folder that holds code.

A net line has a token that is not a comment, and no statement that is a text only (docstrings, those of fields too). So
neither words nor blank lines count, and nobody saves a line by leaving out a sentence.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpool", "cuda", "tests", "asv_bench", "docs", "examples")
_SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    tokenize.ENCODING,
}
_CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CUDA_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]')


class Size(NamedTuple):
    """Sizes of a file or of a folder."""

    lines: int
    tokens: int
    files: int

    def __add__(self, other: object) -> Size:
        assert isinstance(other, Size)
        return Size(*map(sum, zip(self, other, strict=True)))


def size_of(path: Path) -> Size:
    """The size of one file: Python, or CUDA C++."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        bare = _CUDA_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
        return Size(sum(1 for line in bare.splitlines() if line.strip()), len(_CUDA_TOKEN.findall(bare)), 1)
    texts = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    counted, inside, lines = 0, False, set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside = inside and token.type not in (tokenize.NEWLINE, tokenize.NL) or token.start in texts
        if token.type in _SPACE or inside and token.type == tokenize.STRING:
            continue
        counted += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return Size(len(lines), counted, 1)


@functools.cache
def sizes() -> dict[str, Size]:
    """The size of every folder, without what is below it. The folders of one below a top folder are one layer: they
    count as it."""
    table: dict[str, Size] = {}
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in (".py", ".cu", ".cuh") or {"env", "_build", "__pycache__"} & set(path.parts):
                continue
            name = "/".join(path.relative_to(ROOT).parts[:-1][:2])
            table[name] = table.get(name, Size(0, 0, 0)) + size_of(path)
    return table


def totals(table: dict[str, Size]) -> dict[str, Size]:
    """The size of each top folder."""
    return {
        top: sum((size for name, size in table.items() if name.split("/")[0] == top), Size(0, 0, 0)) for top in FOLDERS
    }


def report(table: dict[str, Size]) -> str:
    """The table as text."""
    rows = [f"{'folder':<24} {'lines':>7} {'files':>6} {'tokens':>9}"]
    for top, total in totals(table).items():
        parts = [(name, size) for name, size in table.items() if name.split("/")[0] == top]
        parts = parts if len(parts) > 1 else []
        for name, size in [*parts, (f"{top} in all", total)]:
            rows.append(f"{name:<24} {size.lines:>7,} {size.files:>6} {size.tokens:>9,}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(report(sizes()))
