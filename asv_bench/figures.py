"""``python -m asv_bench.figures``: measures the page docs/figures.md on this machine, and writes it.

Some calls of this suite are timed, and the control planes of other engines are driven by a harness beside kvpool's::

    python -m asv_bench.figures
    python -m asv_bench.figures --harness PATH --trace PATH --python PEERS/bin/python

``--harness`` is a folder with ``replay.py`` and ``adapters/``, as ``peerbench_kvpool.py`` takes it, and ``--python``
the interpreter of the environment in which the others are installed. Everything works without either. The page lists
what was left out, and why.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures.md"
PEERS = ("vllm:sha256", "sglang:radix", "sglang:rust", "lmcache")
OURS = {"kvpool": "kvpool:policy=lru", "kvpool, adaptive": "kvpool:policy=adaptive"}
"""The rows of kvpool, and their names in the harness."""
PARTS = ("ingest", "admit", "append", "finish")
LOAD_MAX = 1.0
"""The load average above which nothing is measured unless it is asked for: other work doubles the times."""
SECONDS, ROUNDS = 0.2, 7
"""How long each call is repeated in a round; rounds that count."""


class Call(NamedTuple):
    """One benchmark of the suite with its parameters and its title on the page."""

    title: str
    place: str
    """``module.Class.method``."""
    parameters: tuple[Any, ...]


CALLS = (
    Call("hash the keys of a prompt of 4,096 tokens", "hashing.BlockKeys.time_array", (4096,)),
    Call("find a cached prompt of 4,096 tokens, with its keys", "admission.CachedPrompt.time_match", (4096,)),
    Call("claim that prompt, and release it", "admission.CachedPrompt.time_match_claim_release", (4096,)),
    Call("hash, claim and release it", "admission.CachedPrompt.time_hash_match_claim_release", (4096,)),
    Call("pin 16 host blocks by their keys, and close the lease", "pins.Pins.time_pin", (16,)),
)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, help="a folder with replay.py and adapters/")
    parser.add_argument("--trace", type=Path, help="a trace for the harness; its own is taken without it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the others")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--capacity", type=int, default=50_000, help="blocks of 16 tokens")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--any-load", action="store_true", help="measure on a machine that does other work, too")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if load > LOAD_MAX and not options.any_load:
        parser.error(f"load average: expected at most {LOAD_MAX:g}, got {load:.1f}; --any-load measures nevertheless")
    options.machine = machine()
    rows = [(call.title, call.place, microseconds(call)) for call in CALLS]
    options.page.write_text(page(rows, *beside(options), options), encoding="utf-8")
    print(f"written: {options.page}")


def microseconds(call: Call) -> float:
    """The median time of a call over the rounds. One that changes what it measures is set up anew each time."""
    module, owner, method = call.place.split(".")
    made = getattr(importlib.import_module(f"asv_bench.benchmarks.{module}"), owner)()
    once, times = getattr(made, "number", 0) == 1, []
    for round in range(ROUNDS + 1):
        if once or not round:
            made.setup(*call.parameters)
        begin, count = perf_counter(), 0
        while not count or not once and perf_counter() - begin < SECONDS:
            getattr(made, method)(*call.parameters)
            count += 1
        times.append((perf_counter() - begin) / count * 1e6)
        if once or round == ROUNDS:
            made.teardown(*call.parameters)
    return median(times[1:])


def beside(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of the harness, the median of three runs each, and what was left out for which reason."""
    if options.harness is None:
        return [], dict.fromkeys(PEERS, "no harness was given")
    kvpool_command = [
        sys.executable,
        str(Path(__file__).with_name("peerbench_kvpool.py")),
        "--harness",
        str(options.harness),
    ]
    results, missing = [], {}
    for name in (*OURS, *PEERS, "kvpool"):
        start = kvpool_command if name in OURS else [options.python, str(options.harness / "replay.py")]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.jsonl"
            command = [
                *start,
                "--adapter",
                OURS.get(name, name),
                "--limit",
                str(options.requests),
                "--capacity",
                str(options.capacity),
            ]
            command += ["--reps", "3", "--out", str(out)] + (["--trace", str(options.trace)] if options.trace else [])
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            runs = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if done.returncode or not runs:
            missing[name] = (done.stderr.strip().splitlines() or ["it gave no result"])[-1]
            continue
        parts = ("us_per_req", "hit_tokens", *(f"us_{part}" for part in PARTS))
        stand_in = median(run.get("slot_kernel_s", 0.0) / run["requests"] * 1e6 for run in runs)
        results.append(
            {"name": name, "stand_in": stand_in, **{part: median(run[part] for run in runs) for part in parts}}
        )
    return results, missing


def page(
    rows: list[tuple[str, str, float]],
    results: list[dict[str, Any]],
    missing: dict[str, str],
    options: argparse.Namespace,
) -> str:
    """The page as Markdown."""
    lines = [
        "# Figures",
        "",
        "This page is written by `python -m asv_bench.figures`, which measures on the machine that runs it. Times on a",
        "machine with other work differ by a factor of two from run to run: compare the rows of one table, and measure",
        "yours. No figure here is of a GPU.",
        "",
        f"Measured on {options.machine}.",
        "",
        "```sh",
        f"python -m asv_bench.figures {arguments(options)}".rstrip(),
        "```",
        "",
        "## Calls",
        "",
        f"Medians of {ROUNDS} rounds, in a pool with blocks of 16 tokens on the `cpu` device.",
        "",
        "| call | µs | benchmark |",
        "|---|---|---|",
        *(f"| {title} | {time:,.1f} | `{place}` |" for title, place, time in rows),
        "",
        "## Beside other engines",
        "",
        f"The control planes alone replay the first {options.requests:,} requests of a chat trace through "
        f"{options.capacity:,} blocks of 16",
        "tokens, one after the other, and move no KV. Microseconds a request, medians of three runs. kvpool runs first",
        "and last, and the difference of the two rows shows how much the machine has changed in between. The last",
        "column is the time of a row divided by that of the last row, so the first row need not be 1.0. For SGLang it",
        "uses `without`: its time without the stand-in for kernels that a GPU would run.",
        "",
    ]
    if results:
        last = results[-1]["us_per_req"] if results[-1]["name"] == "kvpool" else None
        lines += [
            "| | in all | without | keys | admit | append | finish | hit tokens | times kvpool |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in results:
            without = row["us_per_req"] - row["stand_in"]
            ratio = f"{without / last:.1f}" if last else ""
            times = [without if row["stand_in"] else "", *(row[f"us_{part}"] for part in PARTS)]
            cells = " | ".join(time and f"{time:,.0f}" for time in [row["us_per_req"], *times])
            lines.append(f"| `{row['name']}` | {cells} | {row['hit_tokens']:,.0f} | {ratio} |")
        lines.append("")
    lines += ["Left out:", "", *(f"- `{name}`: {reason}" for name, reason in missing.items())] if missing else []
    return "\n".join([*lines, *NOTES]) + "\n"


NOTES = """
The others run the Python and the compiled parts of their control planes; the harness replaces parts that need a GPU.
SGLang's slot kernels are PyTorch on the CPU there; `without` is its time without them. LMCache keeps
prompts only, and takes chunks of 16 tokens here instead of 256. So a row isn't an engine's speed under load.
""".splitlines()


def arguments(options: argparse.Namespace) -> str:
    """The options that were given, with names in the place of paths."""
    shown = ["--harness PATH"] * (options.harness is not None) + ["--trace PATH"] * (options.trace is not None)
    shown += ["--python PATH"] * (options.python != sys.executable)
    return " ".join(shown)


def machine() -> str:
    """The processor, and the versions that matter."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "numba", "llvmlite"))
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = f"with a load average of {load:.1f} before"
    return f"{cores} cores of {model} {busy}, Python {platform.python_version()}, {versions}"


if __name__ == "__main__":
    main()
