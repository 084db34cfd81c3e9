"""Run the benchmarks of a GPU under asv, compare with the machine's baseline, and render the tables.

``python -m asv_bench.gpu_bench`` writes to ``build/gpu``. Without a GPU it runs quick sizes over the emulated driver
of ``tests/emulated``, and marks all it writes. ``--record RESULT.json`` keeps a result as the machine's baseline.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

from asv_bench.benchmarks.gpu_cases import EMULATED, SIZES_VARIABLE
from asv_bench.gpu_table import Result, render
from kvpool.device.cuda import describe_gpus, unusable
from tests import emulated

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("baseline")
RESULTS = Path(__file__).with_name("RESULTS.md")
FACTOR = 1.3
ASV = """
import signal, sys
from asv.machine import MachineCollection
from asv.main import main
machines = sys.argv.pop(1)
MachineCollection.get_machine_file_path = staticmethod(lambda: machines)
signal.signal(signal.SIGTERM, signal.default_int_handler)
main()
"""
"""asv's command line, with the description of this machine in a given file and not in the home folder. A signal to end
it also ends the processes that measure, which are in groups of their own."""
NO_GPU = "NOT A GPU: quick sizes over the emulated driver. They show that everything runs; no figure is of a GPU."


def link() -> str:
    """Return what nvidia-smi reports of the machine: the generation and lanes of the link, and clocks."""
    fields = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem,power.limit"
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except OSError as error:
        return f"nvidia-smi did not run: {error.strerror}"
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    return "; ".join(map(" ".join, zip(*lines, strict=False))) or f"nvidia-smi failed: {done.stderr.strip()}"


def asv(out: Path, command: str, *arguments: str, output: int | IO[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of asv with the configuration in ``out``. Its benchmarks import this checkout."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # asv drops PYTHONPATH from the environment of a benchmark, and uses the other variable.
    environment = os.environ | {"PYTHONPATH": paths, "ASV_PYTHONPATH": paths}
    asv_command = [
        sys.executable,
        "-c",
        ASV,
        str(out / "machines.json"),
        command,
        "--config",
        str(out / "asv.conf.json"),
    ]
    return subprocess.run(
        [*asv_command, *arguments], env=environment, text=True, stdout=output, stderr=subprocess.STDOUT
    )


def describe_machine(name: str | None, out: Path) -> tuple[str, bool]:
    """Describe this machine to asv under a name, by default that of its GPU. Return the name, and if it is emulated."""
    from asv.machine import Machine, MachineCollection

    gpu = describe_gpus()[0]
    is_emulated = gpu.name.endswith(EMULATED)
    name = "emulated-driver" if is_emulated else name or re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    cuda = f"CUDA {gpu.driver // 1000}.{gpu.driver % 1000 // 10}"
    about = f"{gpu.name}, {cuda}, compute capability {gpu.capability}. {link()}"
    description = {**Machine.get_defaults(), "machine": name, "gpu": about}
    MachineCollection.save(name, description, _path=str(out / "machines.json"))
    return name, is_emulated


def write_config(out: Path) -> None:
    """Write asv's configuration, with absolute paths and with results in ``out``."""
    config = json.loads(Path(__file__).with_name("asv.conf.json").read_text(encoding="utf-8"))
    places = {"repo": ROOT, "benchmark_dir": BASELINE.with_name("benchmarks"), "results_dir": out / "asv"}
    text = json.dumps(config | {name: str(place) for name, place in places.items()})
    (out / "asv.conf.json").write_text(text, encoding="utf-8")


def last_baseline(machine: str) -> Path | None:
    """Return the baseline of a machine whose commit is the newest."""
    return max((BASELINE / machine).glob("*-*.json"), key=lambda path: Result.load(path).date, default=None)


def compare(out: Path, path: Path) -> str:
    """Compare a result with its machine's last baseline, by ``asv compare``. Return a report."""
    result = Result.load(path)
    machine = result.machine["machine"]
    if result.emulated:
        return f"{NO_GPU}\nThere is no baseline for it.\n"
    baseline = last_baseline(machine)
    if baseline is None:
        return (
            f"There is no baseline for {machine} in asv_bench/baseline: nothing was compared. To record this result:\n"
            f"    python -m asv_bench.gpu_bench --record {path}\n"
        )
    # asv looks for both in one folder, by the start of the file's name, and compares results of one environment.
    env_name = json.loads(path.read_text(encoding="utf-8"))["env_name"]
    data = json.loads(baseline.read_text(encoding="utf-8")) | {"env_name": env_name, "commit_hash": "baseline"}
    before = path.with_name(f"baseline-{env_name}.json")
    before.write_text(json.dumps(data), encoding="utf-8")
    options = ["--machine", machine, "--factor", str(FACTOR), "--only-changed", "baseline", result.commit]
    done = asv(out, "compare", *options, output=subprocess.PIPE)
    before.unlink()
    if done.returncode:
        raise SystemExit(f"asv compare ended with status {done.returncode}: {done.stdout}")
    changes = done.stdout.strip() or f"No figure differs by a factor of {FACTOR}."
    return f"Compared with {baseline}. A ratio below 1 is better, for every figure.\n{changes}\n"


def run(out: Path, machine: str | None) -> int:
    """Measure, compare and render. Return asv's status."""
    if importlib.util.find_spec("asv") is None:
        raise SystemExit("nothing was measured: asv is not installed: pip install -e '.[bench]'")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if commit.returncode:
        raise SystemExit(f"nothing was measured: asv keeps results by commit: {commit.stderr.strip()}")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "asv", ignore_errors=True)
    write_config(out)
    name, is_emulated = describe_machine(machine, out)
    if is_emulated:
        print(NO_GPU, flush=True)
        os.environ[SIZES_VARIABLE] = "quick"
    # Looking a figure up takes no time: the processes that do it are forked, and none of them uses the GPU.
    options = ["--machine", name, "-E", "existing", "--launch-method", "forkserver", "--show-stderr"]
    options += ["--bench", r"^gpu\.", "--set-commit-hash", commit.stdout.strip()]
    with (out / "asv.log").open("w", encoding="utf-8") as log:
        print(f"asv run: its output is in {log.name}", flush=True)
        done = asv(out, "run", *options, output=log)
    for path in (out / "asv" / name).glob("*-*.json"):
        (out / "RESULTS.md").write_text(render(Result.load(path)), encoding="utf-8")
        report = compare(out, path)
        (out / "compare.txt").write_text(report, encoding="utf-8")
        print(report, out / "RESULTS.md", path, sep="\n")
    if done.returncode:
        print(f"asv run ended with status {done.returncode}: see {out / 'asv.log'}", file=sys.stderr)
    return done.returncode


def record(path: Path) -> None:
    """Keep a result as its machine's baseline, and render it. Raises ValueError for what is unfit."""
    result = Result.load(path)
    if faults := result.faults():
        raise ValueError(f"record: expected a result that is fit for a baseline, got {path}: {'; '.join(faults)}")
    folder = BASELINE / result.machine["machine"]
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path.with_name("machine.json"), folder)
    # Without the places of this machine, which asv names the environment by.
    data = json.loads(path.read_text(encoding="utf-8"))
    data |= {"env_name": "existing", "python": "python", "params": data["params"] | {"python": "python"}}
    kept = folder / f"{result.commit[:8]}-existing.json"
    kept.write_text(json.dumps(data), encoding="utf-8")
    RESULTS.write_text(render(result), encoding="utf-8")
    print(kept, RESULTS, sep="\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asv_bench.gpu_bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="the folder to write (default: %(default)s)"
    )
    parser.add_argument("--machine", help="a name of this machine (default: the name of its GPU)")
    parser.add_argument("--record", type=Path, metavar="RESULT", help="only keep this result as a baseline")
    command_line = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(command_line)
    if options.record is not None:
        try:
            record(options.record)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        return 0
    missing = unusable()
    if missing is not None:
        if emulated.running():
            raise SystemExit(f"nothing was measured: {missing}")
        print(f"no GPU: {missing}", flush=True)
        try:
            emulated.start_again(["-m", "asv_bench.gpu_bench", *command_line])
        except RuntimeError as error:
            raise SystemExit(f"nothing was measured: {missing}; {error}") from error
    return run(options.out, options.machine)


if __name__ == "__main__":
    sys.exit(main())
