"""``python -m tests.house.counter``: the tokens and files of every folder that holds code.

Comments and statements that are a text only (docstrings, those of fields too) do not count, and neither do blank lines:
nobody saves a token by leaving out a sentence.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpool", "cuda", "tests", "asv_bench", "docs", "examples")
_SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    tokenize.ENCODING,
}
_CUDA = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\w+|[^\w\s])', re.DOTALL)


def tokens_of(path: Path) -> int:
    """The tokens of one file: Python, or CUDA C++."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(map(bool, _CUDA.findall(text)))
    texts = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _SPACE and token.start not in texts for token in tokens)


def report() -> str:
    """Every folder, without what is below it, and each top folder. The folders of one below a top folder are one layer:
    they count as it."""
    tokens, files = Counter[str](), Counter[str]()
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh") and not {"env", "_build", "__pycache__"} & set(path.parts):
                for name in ("/".join(path.relative_to(ROOT).parts[:-1][:2]), f"{top} in all"):
                    tokens[name] += tokens_of(path)
                    files[name] += 1
    rows = [f"{name:<24} {files[name]:>6} {tokens[name]:>9,}" for name in sorted(tokens)]
    return "\n".join([f"{'folder':<24} {'files':>6} {'tokens':>9}", *rows])


if __name__ == "__main__":
    print(report())
