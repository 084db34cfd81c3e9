"""The plan for people: as text for a terminal, with what more memory buys and how to choose; and as a picture, with the
hit rate over memory, and when reused blocks come back. And for programs: as a dictionary for JSON."""

from __future__ import annotations

import io
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.tools.planner.capacity_plan import CapacityPlan, StorePlan
from kvpool.tools.planner.policies import MIN, ORACLE, PolicyTable
from kvpool.tools.replay.summary import aligned, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 24
_TENANTS = 5
_MARKERS = {0.5: "o", 0.9: "s"}
"""The shares of the ceiling that the curve marks."""
_BLUE = "#1f5fa8"
_ORANGE = "#c8641e"
_GREY = "#6b6b6b"


def figures(plan: CapacityPlan) -> dict[str, Any]:
    """Return the plan as nested dictionaries, lists, numbers, strings and None only."""
    survey, machine, pool, store, policies = plan.survey, plan.machine, plan.pool(), plan.store(), plan.policies
    break_even = plan.break_even()
    same = ("requests", "prompt_tokens", "output_tokens", "prompt_blocks", "tokens_per_block", "sample")
    return {
        **{name: getattr(survey, name) for name in same},
        "longest_request_blocks": survey.longest_blocks,
        "distinct_blocks": survey.distinct_blocks,
        "machine": {
            "block_bytes": machine.layout.block_bytes,
            "token_bytes": machine.layout.token_bytes,
            "prefill_tokens_per_second": machine.prefill_tokens_per_second,
            "link_gb_per_second": machine.link_bandwidth,
            "link_latency_us": machine.link_latency,
        },
        "ceiling": plan.ceiling._asdict(),
        "table": [plan.row(capacity)._asdict() for capacity in plan.table()],
        "reach": {share: row._asdict() for share, row in plan.reach().items()},
        "pool": None if pool is None else {name: row._asdict() for name, row in pool._asdict().items()},
        "store": None if store is None else _figures_of_store(store),
        "policies": None if policies is None else _figures_of_policies(policies),
        "break_even": None if break_even is None else break_even._asdict(),
        "curve": plan.points(survey.curve),
        "reuse_gaps": asdict(survey.gaps),
        "prefixes": {**asdict(survey.prefixes), "top": [prefix._asdict() for prefix in survey.prefixes.top]},
        "tenants": [
            {
                "name": tenant.name,
                "requests": tenant.requests,
                "prompt_tokens": tenant.prompt_tokens,
                "ceiling_tokens": round(tenant.curve.ceiling) * survey.tokens_per_block,
                "curve": plan.points(tenant.curve),
            }
            for tenant in survey.tenants
        ],
    }


def _figures_of_store(plan: StorePlan) -> dict[str, Any]:
    capacity = plan.store.capacity
    return {
        "save": plan.store.save,
        "gb_per_second": plan.store.bandwidth,
        "latency_us": plan.store.latency,
        "tier_blocks": plan.tier_blocks,
        "asked": None if capacity is None else plan.row(capacity)._asdict(),
        "table": [plan.row(capacity)._asdict() for capacity in plan.table()],
    }


def _figures_of_policies(policies: PolicyTable) -> dict[str, Any]:
    places = range(len(policies.capacities))
    return {
        "said": policies.said,
        "blocks": policies.capacities,
        "hit_rates": {name: [policies.rate(name, place) for place in places] for name in policies.hits},
        "lru_needs_blocks": policies.as_lru,
        "memory_of_lru": {name: [policies.memory(name, place) for place in places] for name in policies.as_lru},
    }


def report(plan: CapacityPlan, title: str, model: str, link: str) -> str:
    """Return the plan as text for a terminal.

    Parameters
    ----------
    plan : CapacityPlan
        The plan.
    title : str
        Names the trace.
    model : str
        Names the layout.
    link : str
        The source of the bandwidth.

    Returns
    -------
    str
        Lines and tables, without a line break at the end.
    """
    parts = (_head(plan, title, model), _table(plan), _pool(plan), _store(plan), _reach(plan), _times(plan, link))
    return "\n\n".join(
        "\n".join(lines) for lines in (*parts, _policies(plan), _gaps(plan), _prefixes(plan), _tenants(plan)) if lines
    )


def _head(plan: CapacityPlan, title: str, model: str) -> list[str]:
    survey, layout, ceiling = plan.survey, plan.machine.layout, plan.ceiling
    shares = f"{ceiling.token_rate:.2%} of prompt tokens, {ceiling.block_rate:.2%} of prompt blocks"
    longest, everything = _size(plan.gib(survey.longest_blocks)), _size(plan.gib(survey.distinct_blocks))
    tokens = f"{survey.prompt_tokens:,} tokens in prompts, {survey.output_tokens:,} in answers"
    token = f"{_size(layout.token_bytes / 1024)} KiB a token"
    sample = f"{survey.sample:.3g} of the blocks; ± is two standard errors, estimated from it"
    return aligned(
        {
            "plan": [title],
            "requests": [f"{survey.requests:,} with {tokens}"],
            "model": [f"{model}: {token}, blocks of {layout.tokens_per_block} tokens"],
            "memory": [f"{longest} GiB for the longest request, {everything} GiB for everything"],
            "ceiling": [f"{shares} are found again with unbounded memory"],
            "sample": [] if survey.curve.exact else [sample],
        }
    )


def _table(plan: CapacityPlan) -> list[str]:
    exact, saves = plan.survey.curve.exact, _saves(plan)
    rows = [("memory", "blocks", "hit rate", "" if exact else "±", "share of the ceiling", "next 16 GiB", saves)]
    for row in map(plan.row, plan.table()):
        error = "" if exact else f"{2 * row.standard_error:.2%}"
        next_16_gib = f"{100 * row.next_16_gib:+.2f} pts"
        saved = _time(row.saved_seconds_per_request)
        bar = _bar(row.of_ceiling)
        rows.append((_gib(row.gib), f"{row.blocks:,}", f"{row.token_rate:.2%}", error, bar, next_16_gib, saved))
    return table(*rows)


def _pool(plan: CapacityPlan) -> list[str]:
    pool, longest = plan.pool(), plan.survey.longest_blocks
    if pool is None:
        return []
    lines = []
    for name, row in (("device alone", pool.device), ("device + host", pool.both)):
        if name == "device alone" or row != pool.device:
            saved = _time(row.saved_seconds_per_request)
            hits = f"{row.token_rate:.2%} of prompt tokens ({row.hit_tokens:,})"
            lines.append(f"{name:<14} {_gib(row.gib)}: {hits}{saved and f', {saved} saved per request'}")
    if pool.device.blocks < longest:
        lines.append(f"the longest request needs {longest:,} blocks and does not fit into the device tier")
    return lines


def _store(plan: CapacityPlan) -> list[str]:
    planned = plan.store()
    if planned is None:
        return []
    store = planned.store
    rows = [("store", "blocks", "found in it", "loads", "read", "written", _saves(plan), "")]
    for capacity in sorted({*planned.table(), *([] if store.capacity is None else [store.capacity])}):
        row = planned.row(capacity)
        flow = (row.read_bytes_per_second or 0) + (row.written_bytes_per_second or 0)
        mark = "more than its bandwidth " if flow > store.bandwidth * 1e9 else ""
        mark += "<- asked" if capacity == store.capacity else ""
        read = _flow(row.read_bytes, row.read_bytes_per_second)
        written = _flow(row.written_bytes, row.written_bytes_per_second)
        figures = (f"{capacity:,}", f"{row.token_rate:.2%}", f"{row.loads:,}")
        rows.append((_gib(row.gib), *figures, read, written, _time(row.saved_seconds_per_request), mark))
    speed = f"{store.bandwidth:g} GB/s, {store.latency:g} µs, save={store.save}"
    return [f"a store behind {_gib(plan.gib(planned.tier_blocks))}: {speed}", *table(*rows)]


def _flow(nbytes: int, speed: float | None) -> str:
    """Bytes per second, or in all for a trace without times."""
    return f"{_size(nbytes / 1e9)} GB" if speed is None else f"{_size(speed / 1e9)} GB/s"


def _reach(plan: CapacityPlan) -> list[str]:
    if not plan.survey.ceiling_tokens:
        return ["nothing is found again: more memory buys nothing"]
    return [f"to reach {share:.0%} of the ceiling you need {_gib(row.gib)}" for share, row in plan.reach().items()]


def _times(plan: CapacityPlan, link: str) -> list[str]:
    break_even, machine = plan.break_even(), plan.machine
    if break_even is None:
        return ["times: give --prefill-tokens-per-second to see what hits save"]
    worth = f"above {break_even.worthwhile_above_gb_per_second:.1f} GB/s"
    what = "everything found" if machine.device_blocks is None else "what is found beyond the device tier"
    line = f"link: {machine.link_bandwidth:g} GB/s ({link}), {machine.link_latency:g} µs; {what} crosses it"
    if break_even.tokens is None:
        return [line, f"onboarding never beats recomputing here: it would {worth}"]
    tokens = f"{break_even.tokens:,} token{'s' if break_even.tokens > 1 else ''}"
    return [line, f"onboarding beats recomputing for hits of {tokens} or more, and on any link {worth}"]


def _policies(plan: CapacityPlan) -> list[str]:
    policies = plan.policies
    if policies is None:
        return []
    rows = [["memory", "blocks"]]
    rows += [[_gib(plan.gib(blocks)), f"{blocks:,}"] for blocks in policies.capacities]
    best = []
    for name in policies.hits:
        shares = [f"{policies.rate(name, place):.2%}" for place in range(len(policies.capacities))]
        for row, cell in zip(rows, [name, *shares], strict=True):
            row.append(cell)
        if name in policies.as_lru:
            memory = list(map(partial(policies.memory, name), range(len(policies.capacities))))
            for row, cell in zip(rows, ["memory", *map("{:.0%}".format, memory)], strict=True):
                row.append(cell)
            if min(memory) < 1:
                gib = _gib(plan.gib(policies.capacities[memory.index(min(memory))]))
                best.append(f"{name}: the same hits as LRU with {min(memory):.0%} of the memory, at {gib}")
    head = f"policies on the device: found of the blocks looked up, where the engine says {policies.said}"
    return [f"{head}; memory: with this share of LRU's memory the same hits", *table(*rows), *best]


def _gaps(plan: CapacityPlan) -> list[str]:
    unit, bars = plan.survey.gaps.bars()
    rows, shown = [], 0.0
    for label, share in bars:
        shown += share
        rows.append((label, _bar(share), f"{shown:.1%} in all"))
    return [f"reused blocks, by the {unit} since their last use", *table(*rows)] if rows else []


def _prefixes(plan: CapacityPlan) -> list[str]:
    reuse, estimate = plan.survey.prefixes, "" if plan.survey.curve.exact else " (of the sample)"
    if not reuse.top:
        return []
    half, most = (_gib(plan.gib(blocks)) for blocks in (reuse.blocks_for_half, reuse.blocks_for_most))
    rows = [("prefix of request", "its tokens", "reuses", "hit tokens", "share")]
    for prefix in reuse.top:
        span = f"{prefix.start:,} to {prefix.start + prefix.tokens:,}"
        counts = f"{prefix.reuses:,}", f"{prefix.hit_tokens:,}"
        rows.append((f"{prefix.first_request:,}", span, *counts, f"{prefix.share:.2%}"))
    blocks = f"{reuse.reused_blocks:,} of {reuse.distinct_blocks:,} distinct blocks are ever used again"
    return [f"reuse{estimate}: {blocks}; {half} carry half of all hits, {most} nine tenths", *table(*rows)]


def _tenants(plan: CapacityPlan) -> list[str]:
    if not plan.survey.tenants:
        return []
    # For a tenant, a third, the middle and the end of the table are enough.
    capacities = plan.table()
    columns = sorted({capacities[len(capacities) // 3], capacities[len(capacities) * 2 // 3], capacities[-1]})
    rows = [("tenant", "requests", "prompt tokens", *(_gib(plan.gib(blocks)) for blocks in columns))]
    for tenant in plan.survey.tenants:
        rates = (f"{plan.tenant_rate(tenant, blocks):.2%}" for blocks in columns)
        rows.append((f"{tenant.name:.24}", f"{tenant.requests:,}", f"{tenant.prompt_tokens:,}", *rates))
    return ["hit rate of each tenant's own tokens, cache shared by all", *table(*rows)]


def _bar(share: float) -> str:
    return f"{'█' * round(_BAR * share):<{_BAR}} {share:>6.1%}"


def _gib(value: float) -> str:
    return f"{_size(value)} GiB"


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _saves(plan: CapacityPlan) -> str:
    """The head of a column of times, which is left out without a prefill speed."""
    return "" if plan.machine.prefill_tokens_per_second is None else "saved per request"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:,.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


# -- the picture ---------------------------------------------------------------------------------


def tenant_label(name: str) -> str:
    """Says "tenant" once, also of one whose name does."""
    return name if name.lower().startswith("tenant") else f"tenant {name}"


def require_matplotlib() -> None:
    """Raise an ImportError that names the extra if a chart cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f'a plot needs matplotlib ({error}): pip install ".[plot]"') from error


def draw(plan: CapacityPlan, path: Path, title: str, model: str, text: str) -> None:
    """Write the chart to ``path``, in the format of its suffix. In HTML, ``text`` follows below the chart. Raises
    OSError, ImportError."""
    # A figure of pyplot would need a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpool"}):
        heights = [3, 0.5, 1.25] if plan.policies is None else [3, 0.5, 1.25, 2.25]
        figure = Figure(figsize=(10, 1.9 * sum(heights)), layout="constrained")
        curve, names, gaps, *last = figure.subplots(len(heights), 1, height_ratios=heights)
        _draw_curve(plan, curve, title, model)
        # No label lies in the plot, so that none lies on a curve.
        names.axis("off")
        names.legend(*curve.get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        _draw_gaps(plan, gaps)
        if plan.policies is not None:
            _draw_policies(plan, plan.policies, last[0])
        if path.suffix == ".png":
            figure.savefig(path, dpi=150)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    path.write_text(svg if path.suffix == ".svg" else _page(svg[svg.index("<svg") :], title, text), encoding="utf-8")


def _draw_curve(plan: CapacityPlan, axes: Axes, title: str, model: str) -> None:
    survey, machine = plan.survey, plan.machine
    tokens = max(survey.prompt_tokens, 1)
    lowest = min(survey.longest_blocks, plan.table()[0])
    points = [(blocks, hits) for blocks, hits in plan.points(survey.curve) if blocks >= lowest]
    memory, rates = [plan.gib(blocks) for blocks, _ in points], [100 * hits / tokens for _, hits in points]
    ceiling = 100 * survey.ceiling_tokens / tokens
    axes.plot(memory, rates, color=_BLUE, linewidth=2.5, label="all requests", zorder=3)
    if not survey.curve.exact:
        errors = [200 * survey.curve.error(blocks) * survey.tokens_per_block / tokens for blocks, _ in points]
        low, high = ([rate + sign * error for rate, error in zip(rates, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(memory, low, high, color=_BLUE, alpha=0.15, label="two standard errors of the sample")
    for number, tenant in enumerate(survey.tenants[:_TENANTS], start=1):
        tenant_rates = [100 * plan.tenant_rate(tenant, blocks) for blocks, _ in points]
        label = f"{tenant_label(tenant.name)}, of its own tokens"
        axes.plot(memory, tenant_rates, color=f"C{number}", linewidth=1.2, label=label)
    axes.axhline(ceiling, color=_GREY, linestyle="--", linewidth=1, label=f"unbounded memory: {ceiling:.1f} %")
    for share, row in plan.reach().items() if survey.ceiling_tokens else ():
        if marker := _MARKERS.get(share):
            label = f"{share:.0%} of the ceiling: {_gib(row.gib)}"
            axes.plot(row.gib, 100 * row.token_rate, marker, color=_BLUE, zorder=4, label=label)
    device, host = machine.device_blocks or 0, machine.host_blocks
    for name, blocks, style in (("device", device, ":"), ("device + host", device + host if host else 0, "-")):
        if blocks:
            axes.axvline(plan.gib(blocks), color=_ORANGE, linewidth=1, linestyle=style, label=name)
    axes.set(xlabel=f"KV memory, device and host together, GiB ({model})", ylabel="prompt tokens found in the cache, %")
    axes.set_title(f"What more KV memory buys\n{title}", loc="left", pad=20)
    _over_memory(axes)


def _over_memory(axes: Axes) -> None:
    """Scale the axes for shares over memory."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.3g}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _draw_gaps(plan: CapacityPlan, axes: Axes) -> None:
    unit, shown = plan.survey.gaps.bars()
    bars = axes.bar([label for label, _ in shown], [100 * share for _, share in shown], color=_BLUE)
    axes.bar_label(bars, fmt="%.0f %%", color=_GREY)
    axes.margins(y=0.15)
    axes.set(xlabel=f"{unit} since a block was last used", ylabel="reused blocks, %")
    axes.set_title("When reused blocks come back", loc="left")
    axes.grid(alpha=0.25, axis="y")


def _draw_policies(plan: CapacityPlan, policies: PolicyTable, axes: Axes) -> None:
    memory = [plan.gib(blocks) for blocks in policies.capacities]
    for name in policies.hits:
        style = "-" if name in policies.as_lru else "--" if name in (MIN, ORACLE) else ":"
        rates = [100 * policies.rate(name, place) for place in range(len(memory))]
        axes.plot(memory, rates, style, marker="o", markersize=3, label=name)
    axes.set(xlabel="device memory, GiB", ylabel="blocks found, %")
    axes.set_title(f"What a policy finds (the engine says {policies.said})", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    _over_memory(axes)


def _page(svg: str, title: str, text: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>kvpool plan: {escape(title)}</title>\n<style>body "
        f"{{ font-family: sans-serif; margin: 2em; max-width: 75em }} "
        "svg { width: 100%; height: auto } pre { overflow-x: auto }</style></head>\n"
        f"<body>\n{svg}\n<pre>{escape(text)}</pre>\n</body></html>\n"
    )
