"""``python -m kvpool plan``: the hit rate that each amount of memory would give on a trace."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.progress import shown_progress
from kvpool.integrations.options import POLICIES
from kvpool.tools.cli import terminal
from kvpool.tools.cli.terminal import INTERRUPTED, OK, blaming_the_user, count_argument

if TYPE_CHECKING:
    from kvpool.tools.planner import Machine, StoreTier, Survey, Surveyor
    from kvpool.tools.planner.policies import PolicyTable
    from kvpool.tools.planner.survey import Use

_MODEL = "llama-3-8b"
_SHAPE = ("layers", "kv_heads", "head_dim", "planes", "dtype")
_SUFFIXES = (".png", ".svg", ".html")


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    plan = terminal.declare(subparsers, "plan", "hit rate by memory for a request trace", run)
    plan.set_defaults(seed=0)
    terminal.add_trace(plan)
    sample = "of the blocks to follow, such as 0.01 (default: all)"
    plan.add_argument("--sample", type=terminal.fraction_argument, default=1.0, metavar="SHARE", help=sample)
    add = plan.add_argument_group("model").add_argument
    add("--tokens-per-block", type=count_argument(1), default=16, metavar="N", help="default: 16")
    add("--model", metavar="MODEL", help=f"whose KV it is: {terminal.MODELS} (default: {_MODEL})")
    for name in ("layers", "kv-heads", "head-dim"):
        add(f"--{name}", type=count_argument(1), metavar="N", help="instead of --model")
    planes = "instead of --model: 2 for K and V (default), 1 for MLA"
    add("--planes", type=count_argument(1), metavar="N", help=planes)
    add("--dtype", metavar="NAME", help="of an element, with or without --model (default: the model's, else bfloat16)")
    terminal.add_tiers(plan.add_argument_group("a pool to ask about"), 0)
    add = plan.add_argument_group("a store behind that pool").add_argument
    add("--store", action="store_true", help="what stores of all capacities would add")
    add("--store-capacity", type=terminal.size_argument, metavar="SIZE", help="ask about this one too, such as 4TiB")
    add("--store-save", choices=("commit", "evict"), help="what is saved when (default: commit)")
    add("--store-bandwidth", type=float, metavar="GB/S", help="of a load (default: 1)")
    add("--store-latency", type=float, metavar="US", help="of a load (default: 1000)")
    add = plan.add_argument_group("policies of a pool, on the device").add_argument
    names = "run them through pools of some capacities, beside LRU and what knowing the future finds (default: all)"
    add("--policies", nargs="*", choices=POLICIES, metavar="NAME", help=names)
    said = "what the engine says with each release (default: nothing)"
    add("--say", choices=("nothing", "stop", "future"), help=said)
    add("--at", type=count_argument(1), nargs="+", metavar="BLOCKS", help="the capacities (default: six)")
    add = plan.add_argument_group("times").add_argument
    prefill = "how fast prompts are computed: shows what hits save"
    add("--prefill-tokens-per-second", type=float, metavar="N", help=prefill)
    link = "host to device (default: as calibrated on this machine's GPU, else 50)"
    add("--link-bandwidth", type=float, metavar="GB/S", help=link)
    add("--link-latency", type=float, default=50.0, metavar="US", help="of an onboard (default: 50)")
    add = plan.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print the plan as JSON")
    plot = "draw it: .png, .svg or .html; needs the extra 'plot'"
    add("--plot", type=Path, metavar="FILE", help=plot)


def run(options: argparse.Namespace) -> int:
    """Read a request trace once and say what hit rate any amount of KV memory would give on it,
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
    if options.policies is not None:
        terminal.announce_compilation()  # of pools; a curve alone compiles a second
    from kvpool.tools.planner import CapacityPlan, Surveyor, report
    from kvpool.tools.planner.report import draw, figures, require_matplotlib
    from kvpool.tools.replay import TraceError

    if options.plot is not None and not os.access(options.plot.parent, os.W_OK):
        options.error(f"--plot: expected a file in a folder that exists and can be written, got {str(options.plot)!r}")
    if options.plot is not None and options.plot.suffix not in _SUFFIXES:
        options.error(f"--plot: {str(options.plot)!r} does not end in {', '.join(_SUFFIXES)}")
    layout, model = _layout(options)
    machine, link = _machine(options, layout)
    with blaming_the_user(ImportError):
        if options.plot is not None:
            require_matplotlib()
    with blaming_the_user(TraceError, ValueError, OverflowError):
        surveyor = Surveyor(options.tokens_per_block, options.sample, keep=options.policies is not None)
        title, interrupted = _read(options, surveyor)
        survey = surveyor.survey()
        plan = CapacityPlan(survey, machine, _policies(options, surveyor.uses, survey))
    text = report(plan, title, model, link)
    names = {"trace": title, "model": model, "link": link, "interrupted": interrupted}
    terminal.print_result(options, {**names, **figures(plan)}, text)
    with blaming_the_user(OSError):
        if options.plot is not None:
            draw(plan, options.plot, title, model, text)
    return INTERRUPTED if interrupted else OK


def _read(options: argparse.Namespace, surveyor: Surveyor) -> tuple[str, bool]:
    """Record all requests. Returns the name of the trace, and whether it was cut short."""
    from kvpool.tools.replay import stream_trace

    interrupted, reading = False, terminal.reading_of(options, options.limit)
    if options.trace is None:
        trace = terminal.trace_of(options, options.limit)
        title, total = trace.name, len(trace.requests)
        stream = iter([(trace.format, request) for request in trace.requests])
    else:
        stream, total = stream_trace(options.trace, **reading), options.limit
        title = "<stdin>" if options.trace == "-" else Path(options.trace).name
    with shown_progress(total, " requests") as progress:
        try:
            for entry in stream:
                surveyor.record(entry[1])
                progress(1)
        except KeyboardInterrupt:
            interrupted = True
    title += f" ({entry[0]})" if surveyor.requests else ""
    return title + (f", interrupted after {surveyor.requests:,} requests" if interrupted else ""), interrupted


def _policies(options: argparse.Namespace, uses: list[Use], survey: Survey) -> PolicyTable | None:
    """The policies that are asked about. Raises ValueError."""
    if options.policies is None:
        if options.say or options.at:
            options.error(f"--{'say' if options.say else 'at'} needs --policies")
        return None
    from kvpool.tools.planner.policies import LRU, choose_capacities, compare

    names = [name for name in options.policies or POLICIES if name != LRU]
    capacities = sorted(options.at or choose_capacities(survey))
    if capacities[0] < survey.longest_blocks:
        options.error(f"--at {capacities[0]}: the longest request needs {survey.longest_blocks} blocks")
    with shown_progress(None, " runs") as progress:
        return compare(uses, survey, capacities, names, said=options.say or "nothing", progress=progress)


def _layout(options: argparse.Namespace) -> tuple[BlockLayout, str]:
    """The layout, and the name of the model."""
    shape = {name: getattr(options, name) for name in _SHAPE if getattr(options, name) is not None}
    dimensions, name = shape.keys() - {"dtype"}, options.model or _MODEL
    if dimensions and options.model is not None:
        options.error(f"--{min(dimensions).replace('_', '-')} is instead of --model")
    lacking = [f"--{name.replace('_', '-')}" for name in ("layers", "kv_heads", "head_dim") if name not in shape]
    if dimensions and lacking:
        options.error(f"without --model, {', '.join(lacking)} must be given too")
    try:
        if dimensions:
            layout = BlockLayout(tokens_per_block=options.tokens_per_block, **{"dtype": "bfloat16", **shape})
            heads = f"{layout.kv_heads} KV heads of {layout.head_dim}, {layout.planes} planes, {layout.dtype_name}"
            return layout, f"{layout.layers} layers, {heads}"
    except (TypeError, ValueError) as error:
        return options.error(str(error))
    layout = terminal.layout_of_model(options, name, **shape)
    return layout, f"{Path(name).name}, {layout.dtype_name}"


def _machine(options: argparse.Namespace, layout: BlockLayout) -> tuple[Machine, str]:
    """The machine, and where its bandwidth comes from."""
    from kvpool.tools.planner import Machine

    bandwidth, link = (options.link_bandwidth, "as given") if options.link_bandwidth is not None else _calibrated()
    device, host = (terminal.tier_blocks(options, tier, layout) for tier in ("device", "host"))
    if device is None and host is not None:
        options.error("a host tier needs --device-memory or --device-blocks")
    try:
        prefill, store = options.prefill_tokens_per_second, _store(options, layout)
        return Machine(layout, prefill, bandwidth, options.link_latency, device, host or 0, store), link
    except ValueError as error:
        return options.error(str(error))


def _store(options: argparse.Namespace, layout: BlockLayout) -> StoreTier | None:
    """The store, if one is asked about. Raises ValueError."""
    from kvpool.tools.planner import StoreTier

    names = ("capacity", "save", "bandwidth", "latency")
    settings = {name: value for name in names if (value := getattr(options, f"store_{name}")) is not None}
    if not settings and not options.store:
        return None
    if options.device_memory is None and options.device_blocks is None:
        options.error("a store needs --device-memory or --device-blocks")
    if "capacity" in settings:
        settings["capacity"] //= layout.block_bytes
    return StoreTier(**settings)


def _calibrated() -> tuple[float, str]:
    """The bandwidth of onboarding many blocks in the stored calibration of this machine's first GPU, if there is one,
    and its source."""
    from kvpool.device.cuda import calibration, describe_gpus, unusable
    from kvpool.tools.planner import LINK_BANDWIDTH

    stored = None
    if not unusable():
        gpu = describe_gpus()[0]
        with suppress(OSError, ValueError):
            stored = calibration.stored(gpu)
    measured = stored.measurements if stored else ()
    speeds = [
        measurement.gigabytes_per_second for measurement in measured if measurement.direction == calibration.ONBOARD
    ]
    return (max(speeds), f"as calibrated on {gpu.name}") if speeds else (LINK_BANDWIDTH, "assumed: PCIe 5.0, 16 lanes")
