"""Render asv's results of a GPU as tables: ``python -m asv_bench.gpu_table RESULT.json``.

``asv_bench.gpu_bench`` makes such a file. The tables name the machine and the commit, and say whether anything makes
the figures unfit for a baseline, such as an emulated driver.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

Cell = Callable[[dict[str, float]], str]


def speed(name: str = "time_per_byte") -> Cell:
    """GB/s, of a figure in ps/B."""
    return lambda figures: f"{1000 / figures[name]:.1f}"


def share(name: str) -> Cell:
    """The speed as a share of a plain copy's, of a ratio of times."""
    return lambda figures: f"{100 / figures[name]:.0f} %"


def number(name: str, digits: int = 1) -> Cell:
    return lambda figures: f"{figures[name]:.{digits}f}"


def block_cell(figures: dict[str, float]) -> str:
    cell = f"{speed()(figures)} ({share('times_large_copy')(figures)}), {number('call', 0)(figures)}"
    gpu = "gpu_time_per_byte"  # earlier results have no such figure
    return f"{cell}, {speed(gpu)(figures)}" if gpu in figures else cell


@dataclass(frozen=True)
class Table:
    """How a class of benchmarks is shown: a table for each combination of the first ``split`` parameters, a row for
    each of the others, and columns of figures, or one column for each value of the last parameter."""

    title: str
    names: tuple[str, ...]
    cells: dict[str, Cell]
    split: int = 0
    across: Cell | None = None


TABLES = {
    "BlockCopies": Table(
        "Blocks: GB/s, percent of one large copy in the same direction, the call's µs of CPU, and the GPU's own GB/s",
        ("path", "fragments"),
        {},
        split=2,
        across=block_cell,
    ),
    "Scenes": Table(
        "What a server does, in batches",
        ("scene", "bytes of a run", "path"),
        {
            "GB/s": speed(),
            "p99 ms": number("p99"),
            "call µs": number("call"),
            "matmul slower by": lambda figures: f"{100 * (figures['matmul_time'] - 1):.0f} %",
        },
    ),
    "KvCopies": Table(
        "Tokens between the device tier and staging",
        ("direction", "staging", "order"),
        {
            "GB/s": speed(),
            "of a plain copy": share("times_plain_copy"),
            "call µs": number("call"),
            "the GPU's own GB/s": speed("gpu_time_per_byte"),
        },
    ),
    "StagedTables": Table(
        "Block tables into a target on the device",
        ("columns in use",),
        {
            "CPU µs": number("cpu_time"),
            "memcpy µs": number("cpu_time_of_memcpy"),
            "GPU µs": number("gpu_time"),
            "memcpyAsync µs": number("gpu_time_of_memcpy_async"),
        },
    ),
    "PeerCopies": Table(
        "Fragments of an engine, in turn with a peer",
        ("peer", "way", "bytes of a fragment", "path"),
        {"GB/s": speed(), "peer's GB/s": speed("time_per_byte_of_peer")},
    ),
    "PeerTokens": Table(
        "Tokens, in turn with LMCache",
        ("direction", "staging"),
        {"GB/s": speed(), "peer's GB/s": speed("time_per_byte_of_peer")},
    ),
}
CONDITIONS = {
    "emulated": "the driver is emulated, and no figure is of a GPU",
    "quick": "the sizes are quick ones, which measure nothing",
    "changed_files": "files differ from the commit",
}
"""What makes a result unfit for a baseline, by the figure of ``gpu.Conditions`` that is not 0 then."""


@dataclass(frozen=True)
class Result:
    """One file of asv: by class and parameters, the figures that were measured."""

    machine: dict[str, str]
    commit: str
    date: int
    params: dict[str, list[list[Any]]]
    figures: dict[str, dict[tuple[Any, ...], dict[str, float]]]
    failed: list[str]

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a file of asv's ``results``."""
        data = json.loads(path.read_text(encoding="utf-8"))
        params: dict[str, list[list[Any]]] = {}
        figures: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {}
        failed = []
        for name, row in sorted(data["results"].items()):
            columns = dict(zip(data["result_columns"], row, strict=False))
            module, owner, method = name.split(".")
            if module != "gpu":
                continue
            params[owner] = [[ast.literal_eval(value) for value in values] for values in columns["params"]]
            cases = list(product(*params[owner]))
            for case, value in zip(cases, columns["result"] or [None] * len(cases), strict=True):
                if value is None:
                    failed.append(f"{name}{case}")
                elif value == value:  # NaN: skipped
                    figures.setdefault(owner, {}).setdefault(case, {})[method.removeprefix("track_")] = value
        return cls(data["params"], data["commit_hash"], data["date"], params, figures, failed)

    @property
    def emulated(self) -> bool:
        return self.conditions.get("emulated") != 0

    @property
    def conditions(self) -> dict[str, float]:
        return self.figures.get("Conditions", {}).get((), {})

    def faults(self) -> list[str]:
        """Return what makes these figures unfit for a baseline. What is not known is taken for a fault."""
        faults = [text for name, text in CONDITIONS.items() if self.conditions.get(name) != 0]
        return faults + [f"{len(self.failed)} benchmarks failed"] * bool(self.failed)


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text_of(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def cell_of(cell: Cell, figures: dict[str, float]) -> str:
    """A cell, empty where a figure is missing."""
    try:
        return cell(figures)
    except KeyError:
        return ""


def rows_of(table: Table, params: list[list[Any]], figures: dict[tuple[Any, ...], dict[str, float]]) -> Iterator[str]:
    """The tables of one class, each with its heading."""
    for first in product(*params[: table.split]):
        inner = params[table.split :]
        if table.across is not None:
            *inner, across = inner
            head = [*table.names, *(f"{value >> 10:,} KiB" for value in across)]
        else:
            head = [*table.names, *table.cells]
        rows = []
        for rest in product(*inner):
            case = (*first, *rest)
            if table.across is not None:
                cells = [cell_of(table.across, figures.get((*case, value), {})) for value in across]
            elif case in figures:
                cells = [cell_of(cell, figures[case]) for cell in table.cells.values()]
            else:
                continue
            rows.append([*map(text_of, rest), *cells])
        if first:
            yield f"### {', '.join(first)}"
        yield markdown(head, rows)


def render(result: Result) -> str:
    """Return the tables of a result as Markdown."""
    mark = " (not a GPU: an emulated driver)" if result.emulated else ""
    parts = [f"# Copies on a GPU{mark}"]
    parts += [f"**Unfit for a baseline: {'; '.join(faults)}.**"] if (faults := result.faults()) else []
    machine = result.machine.get("gpu", f"GPU of {result.machine.get('machine')}")
    parts.append(f"{machine}, commit {result.commit[:8]}. See README.md for what each figure counts.")
    for name, table in TABLES.items():
        if name not in result.params:
            continue
        parts.append(f"## {table.title}{mark}")
        if result.figures.get(name):
            parts += rows_of(table, result.params[name], result.figures[name])
        else:
            parts.append("Not measured on this machine.")
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m asv_bench.gpu_table", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="a file of asv's results")
    print(render(Result.load(parser.parse_args(arguments).result)), end="")


if __name__ == "__main__":
    main()
