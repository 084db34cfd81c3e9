"""``python -m kvpool plan``: the hit rate that each amount of memory would give on a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.arrays.layout import PRESETS, BlockLayout, shape_of_config
from kvpool.commands.replay import add_users, reading_of
from kvpool.commands.terminal import (
    INTERRUPTED,
    OK,
    Subparsers,
    add_tiers,
    add_trace,
    check_format,
    complain,
    count_argument,
    declare,
    fraction_argument,
    path_argument,
    print_text,
    progress_bar,
    size_argument,
    tier_blocks,
)

if TYPE_CHECKING:
    from kvpool.planner import Machine, StoreTier, Survey

_MODEL = "llama-3-8b"
_CONFIG_BYTES_MAX = 1 << 20
_SHAPE = ("layers", "kv_heads", "head_dim", "planes", "dtype")

_HELP = """\
Read a request trace once and say what hit rate any amount of KV memory would give on it,
in GiB of a model, what the next 16 GiB would add, and what hits save.

TRACE is what `replay` takes, and is read as a stream; without it, the workload that
`replay` generates. A column "tenant", else the salt, gives a curve for each of its values.

The curve is exact for LRU over full blocks and all requests in order, with answers and
release from the tail as in `replay --no-partial`. Device and host tier together hit like
one cache of the summed size. --sample follows a share of the blocks only, which takes as
much less memory, and shows its error.

exit status: 0 done, 2 wrong usage or a trace that cannot be read, 130 interrupted (the
plan for the requests so far is printed)
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    plan = declare(subparsers, "plan", "hit rate by memory for a request trace", _HELP, run)
    add_trace(plan)
    add_users(plan)
    sample = "of the blocks to follow, such as 0.01 (default: all)"
    plan.add_argument("--sample", type=fraction_argument, default=1.0, metavar="SHARE", help=sample)
    add = plan.add_argument_group("model").add_argument
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16")
    models = f"whose KV it is: a model's config.json, or {', '.join(sorted(PRESETS))} (default: {_MODEL})"
    add("--model", metavar="MODEL", help=models)
    for name in ("layers", "kv-heads", "head-dim"):
        add(f"--{name}", type=count_argument(1), metavar="N", help="instead of --model")
    planes = "instead of --model: 2 for K and V (default), 1 for MLA"
    add("--planes", type=count_argument(1), metavar="N", help=planes)
    add("--dtype", metavar="NAME", help="of an element, with or without --model (default: the model's, else bfloat16)")
    add_tiers(plan.add_argument_group("a pool to ask about"), 0)
    _add_store(plan)
    add = plan.add_argument_group("times").add_argument
    prefill = "how fast prompts are computed: shows what hits save"
    add("--prefill-tokens-per-second", type=float, metavar="N", help=prefill)
    link = "host to device (default: as calibrated on this machine's GPU, else 50)"
    add("--link-bandwidth", type=float, metavar="GB/S", help=link)
    add("--link-latency", type=float, default=50.0, metavar="US", help="of an onboard (default: 50)")
    add = plan.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", type=path_argument, metavar="FILE", help="draw it: .png, .svg or .html; needs the extra 'plot'")


def _add_store(plan: argparse.ArgumentParser) -> None:
    """Declare the options of a store."""
    add = plan.add_argument_group("a store behind that pool").add_argument
    add("--store", action="store_true", help="what stores of all capacities would add")
    add("--store-capacity", type=size_argument, metavar="SIZE", help="ask about this one too, such as 4TiB")
    add("--store-save", choices=("commit", "evict"), help="what is saved when (default: commit)")
    add("--store-bandwidth", type=float, metavar="GB/S", help="of a load (default: 1)")
    add("--store-latency", type=float, metavar="US", help="of a load (default: 1000)")


def run(options: argparse.Namespace) -> int:
    """Read the trace and print the plan."""
    from kvpool.planner import Plan, report
    from kvpool.planner.chart import SUFFIXES, draw, missing
    from kvpool.replay import TraceError

    if options.plot is not None and options.plot.suffix not in SUFFIXES:
        options.error(f"--plot: {str(options.plot)!r} does not end in {', '.join(SUFFIXES)}")
    layout, model = _layout(options)
    machine, link = _machine(options, layout)
    if options.plot is not None and (lack := missing()) is not None:
        return complain(RuntimeError(lack))
    try:
        survey, title, interrupted = _survey(options)
    except (TraceError, ValueError, OverflowError) as error:
        return complain(error)
    plan = Plan(survey, machine)
    text = report(plan, title, model, link)
    if options.json:
        names = {"trace": title, "model": model, "link": link, "interrupted": interrupted}
        print_text(json.dumps({**names, **plan.as_dict()}, indent=2))
    else:
        print_text(text)
    if options.plot is not None:
        try:
            draw(plan, options.plot, title, model, text)
        except OSError as error:
            return complain(error)
    return INTERRUPTED if interrupted else OK


def _survey(options: argparse.Namespace) -> tuple[Survey, str, bool]:
    """The survey, the name of the trace, and whether the trace was cut short."""
    from kvpool.planner import Surveyor
    from kvpool.replay import stream_trace, synthetic
    from kvpool.replay.workload import REQUESTS

    surveyor = Surveyor(options.tokens_per_block, options.sample)
    check_format(options)
    if options.trace is None:
        trace = synthetic(options.limit or REQUESTS)
        title, total = f"{trace.name} ({trace.format})", len(trace.requests)
        stream = iter([(trace.format, request) for request in trace.requests])
    else:
        stream, total = stream_trace(options.trace, **reading_of(options, options.limit)), options.limit
        title = "<stdin>" if options.trace == "-" else Path(options.trace).name
    interrupted = False
    with progress_bar(total, "requests") as progress:
        try:
            for found in stream:
                surveyor.record(found[1])
                if progress is not None:
                    progress(1)
        except KeyboardInterrupt:
            interrupted = True
    if options.trace is not None and surveyor.requests:
        title += f" ({found[0]})"
    if interrupted:
        title += f", interrupted after {surveyor.requests:,} requests"
    return surveyor.survey(), title, interrupted


def _layout(options: argparse.Namespace) -> tuple[BlockLayout, str]:
    """The layout, and the name of the model."""
    given = {name: getattr(options, name) for name in _SHAPE if getattr(options, name) is not None}
    own = given.keys() - {"dtype"}
    if own and options.model is not None:
        options.error(f"--{min(own).replace('_', '-')} is instead of --model")
    lacking = [f"--{name.replace('_', '-')}" for name in ("layers", "kv_heads", "head_dim") if name not in given]
    if own and lacking:
        options.error(f"without --model, {', '.join(lacking)} must be given too")
    try:
        if own:
            layout = BlockLayout(tokens_per_block=options.tokens_per_block, **{"dtype": "bfloat16", **given})
            heads = f"{layout.kv_heads} KV heads of {layout.head_dim}, {layout.planes} planes, {layout.dtype_name}"
            return layout, f"{layout.layers} layers, {heads}"
        name = options.model or _MODEL
        if name.endswith(".json"):
            shape = shape_of_config(_config(name))
            given = shape._asdict() | ({} if options.dtype is None else {"dtype": options.dtype})
            layout = BlockLayout(tokens_per_block=options.tokens_per_block, **given)
            return layout, f"{Path(name).name}, {layout.dtype_name}"
        if name not in PRESETS:
            return options.error(f"--model: {name!r} is neither a config.json nor one of {', '.join(sorted(PRESETS))}")
        layout = BlockLayout.for_model(name, tokens_per_block=options.tokens_per_block, dtype=options.dtype)
        return layout, f"{name}, {layout.dtype_name}"
    except (TypeError, ValueError, OSError) as error:
        return options.error(f"{options.model}: {error}" if (options.model or "").endswith(".json") else str(error))


def _config(path: str) -> dict[str, Any]:
    """Read a model's own description. Raises OSError, or ValueError if the file is no such description."""
    with open(path, encoding="utf-8") as file:
        text = file.read(_CONFIG_BYTES_MAX)
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("no object in it, but lists in lists") from None
    if not isinstance(found, dict):
        raise ValueError("no object in it")
    return found


def _machine(options: argparse.Namespace, layout: BlockLayout) -> tuple[Machine, str]:
    """The machine, and where its bandwidth comes from."""
    from kvpool.planner import LINK_BANDWIDTH, Machine

    bandwidth, link = options.link_bandwidth, "as given"
    if bandwidth is None:
        bandwidth, link = _calibrated()
    device, host = (tier_blocks(options, tier, layout) for tier in ("device", "host"))
    if device is None and host is not None:
        options.error("a host tier needs --device-memory or --device-blocks")
    try:
        machine = Machine(
            layout,
            options.prefill_tokens_per_second,
            LINK_BANDWIDTH if bandwidth is None else bandwidth,
            options.link_latency,
            device,
            host or 0,
            _store(options, layout),
        )
    except ValueError as error:
        options.error(str(error))
    return machine, link


def _store(options: argparse.Namespace, layout: BlockLayout) -> StoreTier | None:
    """The store, if one is asked about. Raises ValueError."""
    from kvpool.planner import StoreTier

    names = ("capacity", "save", "bandwidth", "latency")
    given = {name: value for name in names if (value := getattr(options, f"store_{name}")) is not None}
    if not given and not options.store:
        return None
    if options.device_memory is None and options.device_blocks is None:
        options.error("a store needs --device-memory or --device-blocks")
    if "capacity" in given:
        given["capacity"] //= layout.block_bytes
    return StoreTier(**given)


def _calibrated() -> tuple[float | None, str]:
    """The bandwidth of onboarding many blocks in the stored calibration of this machine's first GPU, if there is one,
    and its source."""
    from kvpool.device.cuda import calibration, describe_gpus, unusable

    assumed = None, "assumed: PCIe 5.0, 16 lanes"
    if unusable():
        return assumed
    gpu = describe_gpus()[0]
    try:
        stored = calibration.load(calibration.place(gpu.name, gpu.driver))
    except (OSError, ValueError):
        return assumed
    speeds = (
        [m.gigabytes_per_second for m in stored.measurements if m.direction == calibration.ONBOARD] if stored else []
    )
    return (max(speeds), f"as calibrated on {gpu.name}") if speeds else assumed
