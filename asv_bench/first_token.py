"""Measure the time to a first token by where K and V are kept: in GPU memory, nowhere, in PyTorch's pinned memory, in
kvpool.

``python -m asv_bench.first_token`` needs a GPU and runs for up to ten minutes. It writes ``results.json`` and
``table.md`` to ``build/first_token`` after each arm. The same command again goes on where a run was ended. ``--tiny``
runs every line with a tiny model, over the emulated driver too: it measures nothing.

All arms serve one schedule: chats that take turns, one after the other, with some chats beside them that always
decode. The first arm answers, and the others continue with its answers. A step always has the same shapes. So the
tokens of all arms are equal; only the one that computes everything again is held to a tolerance of logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asv_bench.benchmarks.gpu_cases import EMULATED
from asv_bench.first_token_arms import (
    ARMS,
    TINY,
    Arm,
    Chat,
    Model,
    Request,
    Shape,
    check_memory,
    missing,
    opened,
    verify_copies,
)
from kvpool.device.cuda import describe_gpus, unusable
from kvpool.device.cuda.calibration import PATHS
from kvpool.errors import InsufficientMemory

ROOT = Path(__file__).resolve().parents[1]
LOGIT_TOLERANCE = {"float16": 0.25, "float32": 1e-3}
"""How far the logits of a first token may be from those of the first arm, where everything is computed again."""
LINK = 50e9
"""Bytes per second of the host's link that the gate for the first token assumes."""
NO_GPU = "NOT A GPU: the emulated driver. This shows that everything runs; no figure is of a GPU."


@dataclass(frozen=True)
class Sizes:
    """How much is served. A message and an answer together are whole blocks."""

    chats: int = 24
    turns: int = 4
    message: int = 64
    answer: int = 32
    beside: int = 4
    beside_tokens: int = 512
    device_blocks: int = 3510
    """6 GiB of the model of ``Shape()``"""
    host_blocks: int = 12870
    """22 GiB"""
    verified_tokens: int = 2048

    def length(self, shape: Shape, chat: int) -> int:
        """Tokens of a chat at its end: about an eighth, a quarter, a half or all of the longest sequence.

        All but the last token are whole blocks, and so are they after each turn: a block that is not full is reused
        where it is still on the GPU, and computed again elsewhere, which rounds otherwise.
        """
        return (shape.tokens_max >> (3 - chat % 4)) - shape.block_tokens + 1

    def tiers(self, shape: Shape) -> dict[str, int]:
        """Blocks of the tiers; ``large`` has room for all chats and the longest sequences beside them."""
        chats = sum(-(-self.length(shape, chat) // shape.block_tokens) + 1 for chat in range(self.chats))
        beside = self.beside * shape.tokens_max // shape.block_tokens
        return {"large": chats + beside + 1, "device": self.device_blocks, "host": self.host_blocks}


TINY_SIZES = Sizes(4, 3, 2, 2, 1, 4, 50, 120, 64)


def schedule(shape: Shape, sizes: Sizes, seed: int) -> list[list[list[int]]]:
    """What users write: for each chat, the tokens of each turn. The first turn of a chat has most of them."""
    rng, turns = np.random.default_rng(seed), []
    for chat in range(sizes.chats):
        first = sizes.length(shape, chat) - sizes.turns * sizes.answer - (sizes.turns - 1) * sizes.message
        counts = [first] + [sizes.message] * (sizes.turns - 1)
        turns.append([rng.integers(shape.vocabulary, size=count).tolist() for count in counts])
    return turns


def seconds_of_arms(step: float, chunk: float, shape: Shape, sizes: Sizes) -> dict[str, float]:
    """About how long each arm serves, from the measured seconds of a decode and of a chunk."""
    estimate = {}
    for arm in ARMS:
        chunks = 0
        for chat in range(sizes.chats):
            whole = -(-sizes.length(shape, chat) // shape.chunk)
            chunks += whole * sizes.turns if arm.computes_again and not arm.needs_torch else whole + 2 * sizes.turns
        estimate[arm.key] = chunks * (chunk + step) + sizes.chats * sizes.turns * sizes.answer * step
    return estimate


def fitted(step: float, chunk: float, shape: Shape, sizes: Sizes, seconds: float) -> Sizes:
    """The sizes with as many turns and chats as let one round of all arms end in time."""
    while sum(seconds_of_arms(step, chunk, shape, sizes).values()) > seconds and sizes.turns > 2:
        sizes = dataclasses.replace(sizes, turns=sizes.turns - 1)
    while sum(seconds_of_arms(step, chunk, shape, sizes).values()) > seconds and sizes.chats > 4:
        # As many tokens for each block of the device tier, so that prefixes are evicted as before.
        least = shape.tokens_max * 2 // shape.block_tokens
        blocks = max(least, sizes.device_blocks * (sizes.chats - 4) // sizes.chats)
        sizes = dataclasses.replace(sizes, chats=sizes.chats - 4, device_blocks=blocks)
    return sizes


def measure_a_step(model: Model, sizes: Sizes) -> tuple[float, float]:
    """Seconds of a decode, and of the last chunk of the longest sequence."""
    shape = model.shape
    with opened(Arm, model, {"large": 2 * shape.tokens_max // shape.block_tokens + 1}) as engine:
        times = []
        request = Request(list(range(3)), 3)
        engine.waiting.append(request)
        while request.answer:
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        longest = shape.tokens_max - shape.chunk
        sequence = engine.cache.add_sequence([1] * shape.tokens_max, stream=engine.stream)
        for _ in range(2):  # the first one compiles
            begin = time.perf_counter()
            engine.compute(sequence, [1] * shape.tokens_max, longest)
            engine.stream.synchronize()
            chunk = time.perf_counter() - begin
        engine.cache.release(sequence, stream=engine.stream)
    return min(times[1:]), chunk


def percentile(values: list[float], which: float) -> float:
    return float(np.percentile(values, which)) if values else float("nan")


def run_arm(
    arm: type[Arm], model: Model, sizes: Sizes, seed: int, recorded: list[list[int]] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Serve the schedule. Return the figures, with 256 logits of each first token, and the answers."""
    shape, written = model.shape, schedule(model.shape, sizes, seed)
    with opened(arm, model, sizes.tiers(shape)) as engine:
        engine.prepare(sizes.chats)
        beside = [Chat([7 + i] * sizes.beside_tokens, shape.tokens_max) for i in range(sizes.beside)]
        for chat in beside:
            chat.answer -= len(chat.tokens)
            engine.waiting.append(chat)
        while any(chat.filling for chat in beside):
            engine.step()
        for measured in (engine.cpu, engine.gpu, engine.ends):
            measured.clear()
        requests = serve_all(engine, written, sizes, recorded)
        for chat in engine.running[:]:  # those beside
            engine.cache.release(chat.sequence, stream=engine.stream)
            engine.running.remove(chat)
        nbytes, seconds = engine.loaded()
        engine.cache.verify()
    # The chats beside get a token in each step, whatever else it computes.
    gaps = np.diff(engine.ends).tolist()
    wall = requests[-1].times[-1] - requests[0].arrived
    figures = {
        "arm": arm.key,
        "title": arm.title,
        "first_token_s": first_tokens(requests, shape, sizes),
        "requests_per_s": len(requests) / wall,
        "between_tokens_s": {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99)},
        "cpu_per_step_s": {"p50": percentile(engine.cpu, 50), "p99": percentile(engine.cpu, 99)},
        "gpu_per_step_s": {"p50": percentile(engine.gpu, 50), "p99": percentile(engine.gpu, 99)},
        "loaded_bytes": nbytes,
        "load_bytes_per_s": nbytes / seconds if seconds else None,
        "largest_load_bytes": max(request.loaded_bytes for request in requests),
        "first_logits": [request.first_logits[:: max(1, shape.vocabulary // 256)].tolist() for request in requests],
    }
    return figures, [request.sampled for request in requests]


def serve_all(
    engine: Arm, written: list[list[list[int]]], sizes: Sizes, recorded: list[list[int]] | None
) -> list[Request]:
    """Serve the turns of all chats in round robin, each request alone beside those that always decode."""
    requests: list[Request] = []
    histories: list[list[int]] = [[] for _ in written]
    for turn in range(sizes.turns):
        for name, messages in enumerate(written):
            history = histories[name] + messages[turn]
            known = recorded[len(requests)] if recorded else []
            request = Request(list(history), sizes.answer, name=name, recorded=known)
            engine.serve(request)
            requests.append(request)
            histories[name] = request.tokens
    return requests


def first_tokens(requests: list[Request], shape: Shape, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Seconds from arrival to the first token by the length of chats, without their first turns."""
    result = {}
    for kind in range(min(4, sizes.chats)):
        later = [each for each in requests[sizes.chats :] if each.name % 4 == kind]
        times = [each.times[0] - each.arrived for each in later]
        result[str(shape.tokens_max >> (3 - kind))] = {"p50": percentile(times, 50), "p99": percentile(times, 99)}
    return result


def compare(figures: dict[str, Any], answers: list[list[int]], ideal: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Compare the tokens, and the logits of first tokens, with those of the first arm. ``right`` is if they are as
    close as they have to be, and if K and V were loaded just where the arm keeps them elsewhere."""
    pairs = [
        pair
        for sampled, wanted in zip(answers, ideal["answers"], strict=True)
        for pair in zip(sampled, wanted, strict=True)
    ]
    logits = np.array(figures.pop("first_logits"), np.float32)
    far = float(np.abs(logits - np.array(ideal["first_logits"], np.float32)).max())
    equal = sum(sampled == wanted for sampled, wanted in pairs)
    right = far <= LOGIT_TOLERANCE[shape.dtype] if figures["arm"] == "A" else equal == len(pairs)
    right = right and (figures["arm"] in "DA") == (figures["loaded_bytes"] == 0)
    return figures | {"tokens": len(pairs), "equal_tokens": equal, "logits_apart": far, "right": bool(right)}


# -- results -----------------------------------------------------------------------------------------------------------


class Results:
    """What is finished, in ``results.json`` and ``table.md``: each write replaces the whole file at once."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out, self.path = out, out / "results.json"
        out.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {"settings": settings, "arms": [], "left_out": {}, "verified": []}
        if self.path.exists():
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["settings"] != settings:
                raise SystemExit(
                    f"--out: expected a folder without results, or with those of {settings}, got {data['settings']}"
                )
            self.data = data

    def done(self, arm: type[Arm], turn: int) -> bool:
        return any(each["arm"] == arm.key and each["round"] == turn for each in self.data["arms"])

    def write(self) -> None:
        for path, text in ((self.path, json.dumps(self.data)), (self.out / "table.md", render(self.data))):
            new = path.with_name(f"{path.name}.new")
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)


def middle(arms: list[dict[str, Any]], key: str, *path: str) -> float:
    """The median over the rounds of an arm; NaN if it has not run."""
    values = []
    for each in arms:
        if each["arm"] == key:
            value: Any = each
            for name in path:
                value = value[name]
            values.append(float("nan") if value is None else value)
    return percentile(values, 50)


def gates(arms: list[dict[str, Any]]) -> list[tuple[str, float, float, bool]]:
    """Each gate with its figure, its limit, and if it is met. NaN, and so missed, if an arm has not run."""
    lengths = list(arms[0]["first_token_s"])
    longest = lengths[-1]

    def first(key: str) -> float:
        return middle(arms, key, "first_token_s", longest, "p50")

    nbytes = middle(arms, "C2", "largest_load_bytes")
    limit = first("D") + 1.15 * nbytes / LINK
    wrong = sum(not each["right"] for each in arms)
    between = [middle(arms, key, "between_tokens_s", "p99") for key in ("C2", "D")]
    return [
        (f"C2: first token at {longest}, s", first("C2"), limit, first("C2") <= limit),
        (f"A / C2 at {longest}", first("A") / first("C2"), 4.0, first("A") / first("C2") >= 4),
        (f"B2 / C2 at {longest}", first("B2") / first("C2"), 1.0, first("B2") / first("C2") > 1),
        ("C2 / D: p99 between tokens beside", between[0] / between[1], 1.05, between[0] / between[1] <= 1.05),
        ("arms with wrong tokens, logits or loads", wrong, 0, wrong == 0),
    ]


def render(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    settings, arms = data["settings"], data["arms"]
    lines = ["# First token", "", f"{settings['gpu']}, commit {settings['commit']}, seed {settings['seed']}.", ""]
    if settings["emulated"]:
        lines += [NO_GPU, ""]
    if arms:
        lengths = list(arms[0]["first_token_s"])
        head = ["arm", "round", *(f"first token at {n}, p50 / p99 ms" for n in lengths), "requests/s"]
        head += [
            "between tokens beside, p50 / p99 ms",
            "CPU ms/step",
            "GPU ms/step",
            "load GB/s",
            "equal tokens",
            "logits apart",
        ]
        lines += [" | ".join(["", *head, ""]).strip(), "|" + " --- |" * len(head)]
        for each in arms:
            row = [f"{each['arm']}: {each['title']}", str(each["round"])]
            row += [pair(each["first_token_s"][n]) for n in lengths]
            row += [f"{each['requests_per_s']:.2f}", pair(each["between_tokens_s"])]
            row += [f"{each[name]['p50'] * 1e3:.3f}" for name in ("cpu_per_step_s", "gpu_per_step_s")]
            rate = each["load_bytes_per_s"]
            row += ["-" if rate is None else f"{rate / 1e9:.2f}", f"{each['equal_tokens']} of {each['tokens']}"]
            lines.append(" | ".join(["", *row, f"{each['logits_apart']:.1e}", ""]).strip())
        lines += ["", "| gate | figure | limit | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {name} | {value:.4g} | {limit:.4g} | {'met' if met else 'missed'} |"
            for name, value, limit, met in gates(arms)
        ]
    lines += ["", *(f"- {key} was left out: {why}" for key, why in data["left_out"].items())]
    lines += [
        f"- {path}: {nbytes:,} bytes saved and loaded, {wrong:,} wrong" for path, nbytes, wrong in data["verified"]
    ]
    return "\n".join(lines).rstrip() + "\n"


def pair(figures: dict[str, float]) -> str:
    return f"{figures['p50'] * 1e3:.2f} / {figures['p99'] * 1e3:.2f}"


# -- the command -------------------------------------------------------------------------------------------------------


def describe(shape: Shape, seed: int) -> dict[str, Any]:
    """What a result is of. Results of other settings are never mixed."""
    gpu = describe_gpus()[0]
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    about = {"gpu": gpu.name, "driver": gpu.driver, "emulated": gpu.name.endswith(EMULATED)}
    return about | {"commit": done.stdout.strip() or "unknown", "seed": seed, "shape": dataclasses.asdict(shape)}


def measure(results: Results, model: Model, sizes: Sizes, seed: int, rounds: int, deadline: float) -> None:
    """Measure what is not finished yet, as long as there is time. Keep the last minute for verification."""
    data, shape = results.data, model.shape
    data["left_out"] = {}
    if "sizes" not in data:
        data["step_s"], data["chunk_s"] = measure_a_step(model, sizes)
        left = deadline - time.monotonic()
        data["sizes"] = dataclasses.asdict(fitted(data["step_s"], data["chunk_s"], shape, sizes, left))
        results.write()
    sizes = Sizes(**data["sizes"])
    estimate = seconds_of_arms(data["step_s"], data["chunk_s"], shape, sizes)
    for turn in range(rounds):
        for arm in ARMS:
            reason = missing(arm)
            if reason is None and not results.done(arm, turn) and time.monotonic() + estimate[arm.key] > deadline:
                reason = f"no time for round {turn}"
            if reason is not None:
                data["left_out"].setdefault(arm.key, reason)
            elif not results.done(arm, turn):
                begin = time.monotonic()
                figures, answers = run_arm(arm, model, sizes, seed, (data.get("ideal") or {}).get("answers"))
                estimate[arm.key] = time.monotonic() - begin
                data.setdefault("ideal", {"answers": answers, "first_logits": figures["first_logits"]})
                data["arms"].append({"round": turn} | compare(figures, answers, data["ideal"], shape))
                results.write()
                print(render(data), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and schedule, in single precision")
    parser.add_argument("--out", type=Path, default=ROOT / "build/first_token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="of all arms, if there is time (default 3, with --tiny 1)")
    parser.add_argument("--seconds", type=float, default=540, help="after which no arm begins (default 540)")
    parsed = parser.parse_args(arguments)
    begin = time.monotonic()
    if reason := unusable():
        raise SystemExit(f"nothing was measured: {reason}")
    import cupy

    shape, sizes = (TINY, TINY_SIZES) if parsed.tiny else (Shape(), Sizes())
    tiers, rounds = sizes.tiers(shape), parsed.rounds or (1 if parsed.tiny else 3)
    try:
        check_memory(shape, max(tiers["large"], tiers["device"]), tiers["host"], cupy)
    except InsufficientMemory as error:
        raise SystemExit(f"nothing was measured: {error}") from None
    results = Results(parsed.out, describe(shape, parsed.seed))
    if results.data["settings"]["emulated"]:
        print(NO_GPU, flush=True)
    model = Model(shape, parsed.seed, cupy)
    measure(results, model, sizes, parsed.seed, rounds, begin + parsed.seconds - min(60.0, parsed.seconds / 9))
    verified = {path for path, _, _ in results.data["verified"]}
    for path in PATHS:
        if path not in verified:
            results.data["verified"].append([path, *verify_copies(model, path, sizes.verified_tokens)])
            results.write()
    print(render(results.data), flush=True)
    wrong = sum(wrong for _, _, wrong in results.data["verified"])
    return 1 if wrong or not all(arm["right"] for arm in results.data["arms"]) else 0


if __name__ == "__main__":
    sys.exit(main())
