"""Measure every GPU benchmark once on this machine and write the table of results: ``python -m asv_bench.gpu_table``.

The table names the hardware, the driver's CUDA, the commit and the command. Run it from the root of a checkout, on an
idle GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from asv_bench.benchmarks.gpu import BlockCopies, KvCopies, Scenes, StagedTables, Tiers, close_tiers
from asv_bench.gpu_peers import peer_rows
from kvpool.device.cuda import CudaDevice, describe_gpus, unusable
from kvpool.device.cuda.calibration import DIRECTIONS, KERNELS, PATHS, difference, prove

RESULTS = Path(__file__).with_name("RESULTS.md")
FRAGMENT_BYTES = (4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
FRAGMENTS = (16, 256, 4096)
PLACEMENTS = ("apart", "neighbours")
ORDERS = ("layer_first", "block_first")


def measured(benchmark: type[Any], parameters: tuple[Any, ...]) -> dict[str, float] | None:
    """Every ``track_*`` of a benchmark by name, or None where it cannot run."""
    made = benchmark()
    try:
        made.setup(*parameters)
    except NotImplementedError:
        return None
    try:
        return {
            name.removeprefix("track_"): getattr(made, name)(*parameters)
            for name in dir(made)
            if name.startswith("track_")
        }
    finally:
        made.teardown(*parameters)


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def block_cell(figures: dict[str, float]) -> str:
    return f"{figures['speed']:.1f} ({figures['share_of_peak']:.0f} %), {figures['call']:.0f}"


def block_tables() -> Iterator[str]:
    """One table for each direction and placement: a row for each path and number of fragments, a column for each
    size."""
    for direction, placement in product(DIRECTIONS, PLACEMENTS):
        rows = []
        for path, count in product(PATHS, FRAGMENTS):
            cells = []
            for nbytes in FRAGMENT_BYTES:
                found = measured(BlockCopies, (direction, path, nbytes, count, placement))
                cells.append("" if found is None else block_cell(found))
            rows.append([path, f"{count:,}", *cells])
        head = ["path", "fragments", *(f"{nbytes >> 10:,} KiB" for nbytes in FRAGMENT_BYTES)]
        yield f"### {direction}, {placement}\n\n{markdown(head, rows)}"


def scene_table() -> str:
    rows = []
    for scene, run_bytes, path in product(Scenes.params[0], Tiers.run_sizes, PATHS):
        found = measured(Scenes, (scene, path, run_bytes))
        if found is not None:
            speeds = [f"{found[name]:.1f}" for name in ("speed", "p99", "call")]
            rows.append([scene, f"{run_bytes:,}", path, *speeds, f"{found['slowdown_of_matmul']:.0f} %"])
    return markdown(["scene", "bytes of a run", "path", "GB/s", "p99 ms", "call µs", "matmul slower by"], rows)


def link() -> str:
    """What the driver's tool says of the machine: the generation and lanes of the link, and clocks."""
    fields = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem,power.limit"
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except OSError as error:
        return f"nvidia-smi says nothing: {error.strerror}"
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    return "; ".join(map(" ".join, zip(*lines, strict=False))) or f"nvidia-smi says nothing: {done.stderr.strip()}"


def prove_kernels() -> list[str]:
    """Record each kernel that copies the right bytes on this GPU, and what is wrong with the others."""
    device, said = CudaDevice(), []
    device.kernels = set(KERNELS)
    try:
        stream = device.create_stream("proof")
        for path in device._load_kernels():
            wrong = difference(device, stream, path)
            if not wrong:
                prove(path, device.capability, device.device_name, device.driver)
            said.append(f"{path}: {wrong or f'proven for compute capability {device.capability}'}")
    finally:
        device.close()
    return said


def token_table() -> str:
    rows = []
    for parameters in product(*KvCopies.params, ORDERS):
        found = measured(KvCopies, parameters)
        if found is not None:
            speed, share = f"{found['speed']:.1f}", f"{found['share_of_plain_copy']:.0f} %"
            rows.append([*parameters, speed, share, f"{found['call']:.1f}"])
    return markdown([*KvCopies.param_names, "order", "GB/s", "of a plain copy", "call µs"], rows)


def staging_table() -> str:
    rows = []
    for used in StagedTables.params:
        found = measured(StagedTables, (used,))
        if found is not None:
            names = ("cpu_time", "cpu_time_of_memcpy", "gpu_time", "gpu_time_of_memcpy_async")
            rows.append([f"{used:,}", *(f"{found[name]:.1f}" for name in names)])
    return markdown(["columns in use", "CPU µs", "memcpy µs", "GPU µs", "memcpyAsync µs"], rows)


def report(command: str) -> Iterator[str]:
    """The parts of the table, each measured when it is asked for."""
    gpu = describe_gpus()[0]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=RESULTS.parent, capture_output=True, text=True
    ).stdout.strip()
    machine = (
        f"{gpu.name}, CUDA {gpu.driver // 1000}.{gpu.driver % 1000 // 10}, compute capability {gpu.capability}, commit "
        f"{commit or 'unknown'}, `{command}`. {link()}."
    )
    yield "# Copies on a GPU"
    yield (
        f"{machine} Medians of {BlockCopies.__module__.rpartition('.')[2]}.py's events; see README.md for what "
        "each figure counts."
    )
    yield "## Blocks: GB/s, percent of one large copy in the same direction, and the call's µs of CPU"
    yield from block_tables()
    yield f"## What a server does, in batches of 16 MiB\n\n{scene_table()}"
    yield f"## Tokens between the device tier and staging\n\n{token_table()}"
    yield f"## Block tables of 256 sequences into a target of 1,024 columns\n\n{staging_table()}"
    yield "## Peers, in turn with the path beside them"
    yield from peer_rows()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m asv_bench.gpu_table", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file to write (default: %(default)s)")
    parser.add_argument("--command", help="what the table says it was made by (default: this command)")
    given = sys.argv[1:] if arguments is None else arguments
    parser.add_argument("--prove", action="store_true", help="only record the kernels that copy the right bytes here")
    options = parser.parse_args(given)
    missing = unusable()
    if missing is not None:
        sys.exit(f"nothing was measured: {missing}")
    if options.prove:
        print(*prove_kernels(), sep="\n")
        return
    with options.output.open("w", encoding="utf-8") as file:
        # What was measured stays when the rest fails.
        for number, part in enumerate(report(options.command or " ".join([parser.prog, *given]))):
            file.write(f"\n{part}\n" if number else f"{part}\n")
            file.flush()
    close_tiers()
    print(options.output)


if __name__ == "__main__":
    main()
