"""The plan for people: as text for a terminal, with what more memory buys and how to choose; and as a picture, with the
hit rate over memory, and when reused blocks come back."""

from __future__ import annotations

import io
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.tools.planner.capacity_plan import CapacityPlan, StorePlan
from kvpool.tools.planner.policies import MIN, ORACLE, PolicyTable
from kvpool.tools.planner.survey import Prefix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TENANTS = 5
_MARKERS = {0.5: "o", 0.9: "s"}
"""The shares of the ceiling that the curve marks."""
_BLUE = "#1f5fa8"
_ORANGE = "#c8641e"
_GREY = "#6b6b6b"


def report(plan: CapacityPlan, title: str, model: str, link: str) -> str:
    """Return the lines. ``title`` names the trace, ``model`` the layout, ``link`` the source of the bandwidth."""
    parts = (_head(plan, title, model), _table(plan), _pool(plan), _store(plan), _reach(plan), _times(plan, link))
    return "\n\n".join(
        "\n".join(lines) for lines in (*parts, _policies(plan), _gaps(plan), _prefixes(plan), _tenants(plan)) if lines
    )


def _head(plan: CapacityPlan, title: str, model: str) -> list[str]:
    survey, layout = plan.survey, plan.machine.layout
    ceiling = plan.row(survey.curve.capacity_for(survey.curve.ceiling))
    shares = f"{ceiling['token_rate']:.2%} of prompt tokens, {ceiling['block_rate']:.2%} of prompt blocks"
    longest, everything = _size(plan.gib(survey.longest_blocks)), _size(plan.gib(survey.distinct_blocks))
    tokens = f"{survey.prompt_tokens:,} tokens in prompts, {survey.output_tokens:,} in answers"
    token = f"{_size(layout.token_bytes / 1024)} KiB a token"
    rows = [
        ("plan", title),
        ("requests", f"{survey.requests:,} with {tokens}"),
        ("model", f"{model}: {token}, blocks of {layout.tokens_per_block} tokens"),
        ("memory", f"{longest} GiB for the longest request, {everything} GiB for everything"),
        ("ceiling", f"{shares} are found again with unbounded memory"),
    ]
    if not survey.curve.exact:
        rows.append(("sample", f"{survey.sample:.3g} of the blocks; ± is two standard errors, estimated from it"))
    return [f"{name:<9} {text}" for name, text in rows]


def _table(plan: CapacityPlan) -> list[str]:
    exact, times = plan.survey.curve.exact, plan.machine.prefill_tokens_per_second is not None
    head = f"{'memory':>12} {'blocks':>12} {'hit rate':>9}{'' if exact else '       ±'}"
    head += f"  {'share of the ceiling':<{_BAR + 7}}"
    lines = [f"{head} {'next 16 GiB':>11}{'  saved per request' if times else ''}"]
    for row in map(plan.row, plan.table()):
        line = f"{_size(row['gib']):>8} GiB {row['blocks']:>12,} {row['token_rate']:>9.2%}"
        line += "" if exact else f" {2 * row['standard_error']:>7.2%}"
        line += f"  {_bar(row['of_ceiling'])} {row['of_ceiling']:>6.1%} {100 * row['next_16_gib']:>+7.2f} pts"
        line += f" {_time(row['saved_seconds_per_request']):>18}" if times else ""
        lines.append(line)
    return lines


def _pool(plan: CapacityPlan) -> list[str]:
    pool = plan.pool()
    if pool is None:
        return []
    lines = []
    rows = {"device alone": pool["device"]} | ({"device + host": pool["both"]} if pool["host_blocks"] else {})
    for name, row in rows.items():
        saved = row["saved_seconds_per_request"]
        times = "" if saved is None else f", {_time(saved)} saved per request"
        hits = f"{row['token_rate']:.2%} of prompt tokens ({row['hit_tokens']:,})"
        lines.append(f"{name:<14} {_size(row['gib'])} GiB: {hits}{times}")
    longest = plan.survey.longest_blocks
    if pool["device_blocks"] < longest:
        lines.append(f"the longest request needs {longest:,} blocks and does not fit into the device tier")
    return lines


def _store(plan: CapacityPlan) -> list[str]:
    planned = plan.store()
    if planned is None:
        return []
    store, times = planned.store, plan.machine.prefill_tokens_per_second is not None
    model = "has the blocks used last" if store.save == "commit" else "has what the tiers evict"
    lines = [
        f"a store behind {_size(plan.gib(planned.tier_blocks))} GiB: {store.bandwidth:g} GB/s, {store.latency:g} µs, "
        f"save={store.save}: it {model}",
        f"{'store':>12} {'blocks':>12} {'found in it':>12} {'loads':>9} {'read':>11} {'written':>11}"
        f"{'  saved per request' if times else ''}",
    ]
    for capacity in sorted({*planned.table(), *([] if store.capacity is None else [store.capacity])}):
        row = planned.row(capacity)
        line = f"{_size(row['gib']):>8} GiB {row['blocks']:>12,} {row['token_rate']:>12.2%} {row['loads']:>9,}"
        line += f" {_flow(row, 'read'):>11} {_flow(row, 'written'):>11}"
        line += f" {_time(row['saved_seconds_per_request']):>18}" if times else ""
        flow = (row["read_bytes_per_second"] or 0) + (row["written_bytes_per_second"] or 0)
        line += "  more than its bandwidth" if flow > store.bandwidth * 1e9 else ""
        lines.append(f"{line}{'  <- asked' if capacity == store.capacity else ''}")
    return lines


def _flow(row: dict[str, Any], way: str) -> str:
    """Bytes per second, or in all for a trace without times."""
    speed = row[f"{way}_bytes_per_second"]
    return f"{_size(row[f'{way}_bytes'] / 1e9)} GB" if speed is None else f"{_size(speed / 1e9)} GB/s"


def _reach(plan: CapacityPlan) -> list[str]:
    if not plan.survey.ceiling_tokens:
        return ["nothing is found again: more memory buys nothing"]
    return [f"to reach {row['of_ceiling']:.0%} of the ceiling you need {_size(row['gib'])} GiB" for row in plan.reach()]


def _times(plan: CapacityPlan, link: str) -> list[str]:
    break_even, machine = plan.break_even(), plan.machine
    if break_even is None:
        return ["times: give --prefill-tokens-per-second to see what hits save"]
    worth = f"above {break_even['worthwhile_above_gb_per_second']:.1f} GB/s"
    what = "everything found" if machine.device_blocks is None else "what is found beyond the device tier"
    lines = [f"link: {machine.link_bandwidth:g} GB/s ({link}), {machine.link_latency:g} µs; {what} crosses it"]
    if break_even["tokens"] is None:
        return [*lines, f"onboarding never beats recomputing here: it would {worth}"]
    tokens = f"{break_even['tokens']:,} token{'s' if break_even['tokens'] > 1 else ''}"
    return [*lines, f"onboarding beats recomputing for hits of {tokens} or more, and on any link {worth}"]


def _policies(plan: CapacityPlan) -> list[str]:
    table = plan.policies
    if table is None:
        return []
    heads = [f"{name:>{_wide(name)}}" + (f" {'memory':>7}" if name in table.as_lru else "") for name in table.hits]
    lines = [
        f"policies on the device: found of the blocks looked up, where the engine says {table.said}; memory: with this "
        "share of LRU's memory the same hits",
        f"{'memory':>12} {'blocks':>12} {' '.join(heads)}",
    ]
    for place, blocks in enumerate(table.capacities):
        line = f"{_size(plan.gib(blocks)):>8} GiB {blocks:>12,}"
        for name in table.hits:
            line += f" {table.rate(name, place):>{_wide(name)}.2%}"
            line += f" {table.memory(name, place):>7.0%}" if name in table.as_lru else ""
        lines.append(line)
    for name in table.as_lru:
        best = min(range(len(table.capacities)), key=partial(table.memory, name))
        if (share := table.memory(name, best)) < 1:
            gib = _size(plan.gib(table.capacities[best]))
            lines.append(f"{name}: the same hits as LRU with {share:.0%} of the memory, at {gib} GiB")
    return lines


def _wide(name: str) -> int:
    return max(len(name), 8)


def _gaps(plan: CapacityPlan) -> list[str]:
    unit, bars = plan.survey.gaps.bars()
    lines, shown = [f"reused blocks, by the {unit} since their last use"], 0.0
    for label, share in bars:
        shown += share
        label += " requests" if unit == "requests" and label.startswith("below") else ""
        lines.append(f"{label:>24}  {_bar(share)} {share:>6.1%}, {shown:>6.1%} in all")
    return lines if bars else []


def _prefixes(plan: CapacityPlan) -> list[str]:
    reuse, estimate = plan.survey.prefixes, "" if plan.survey.curve.exact else " (of the sample)"
    if not reuse.top:
        return []
    half, most = (_size(plan.gib(blocks)) for blocks in (reuse.blocks_for_half, reuse.blocks_for_most))
    lines = [
        f"reuse{estimate}: {reuse.reused_blocks:,} of {reuse.distinct_blocks:,} distinct blocks are ever used again; "
        f"{half} GiB carry half of all hits, {most} GiB nine tenths",
        f"{'prefix of request':>18} {'its tokens':>22} {'reuses':>9} {'hit tokens':>14} {'share':>7}",
    ]
    return lines + [_prefix(prefix) for prefix in reuse.top]


def _prefix(prefix: Prefix) -> str:
    span = f"{prefix.start:,} to {prefix.start + prefix.tokens:,}"
    return f"{prefix.first_request:>18,} {span:>22} {prefix.reuses:>9,} {prefix.hit_tokens:>14,} {prefix.share:>7.2%}"


def _tenants(plan: CapacityPlan) -> list[str]:
    if not plan.survey.tenants:
        return []
    # For a tenant, a third, the middle and the end of the table are enough.
    table = plan.table()
    columns = sorted({table[len(table) // 3], table[len(table) * 2 // 3], table[-1]})
    head = "".join(f"{_size(plan.gib(blocks)) + ' GiB':>13}" for blocks in columns)
    lines = [
        f"{'tenant':<24} {'requests':>9} {'prompt tokens':>15}{head}   hit rate of its own tokens, cache shared by all"
    ]
    for tenant in plan.survey.tenants:
        rates = "".join(f"{plan.tenant_rate(tenant, blocks):>13.2%}" for blocks in columns)
        name = tenant.name if len(tenant.name) <= 24 else tenant.name[:21] + "..."
        lines.append(f"{name:<24} {tenant.requests:>9,} {tenant.prompt_tokens:>15,}{rates}")
    return lines


def _bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * _BAR * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{bar:<{_BAR}}"


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
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
        store = plan.store()
        heights = [3, 0.5, 1.25]
        if store is not None:
            heights.append(1.75)
        if plan.policies is not None:
            heights.append(2.25)
        figure = Figure(figsize=(10, 1.9 * sum(heights)), layout="constrained")
        curve, names, gaps, *behind = figure.subplots(len(heights), 1, height_ratios=heights)
        _draw_curve(plan, curve, title, model)
        # No label lies in the plot, so that none lies on a curve.
        names.axis("off")
        names.legend(*curve.get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        _draw_gaps(plan, gaps)
        if store is not None:
            _draw_store(plan, store, behind.pop(0))
        if plan.policies is not None:
            _draw_policies(plan, plan.policies, behind.pop(0))
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
    for row in plan.reach() if survey.ceiling_tokens else []:
        if row["of_ceiling"] in _MARKERS:
            gib = f"{row['gib']:,.0f}" if row["gib"] >= 10 else f"{row['gib']:.2g}"
            label = f"{row['of_ceiling']:.0%} of the ceiling: {gib} GiB"
            marker = _MARKERS[row["of_ceiling"]]
            axes.plot(row["gib"], 100 * row["token_rate"], marker, color=_BLUE, zorder=4, label=label)
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


def _draw_store(plan: CapacityPlan, store: StorePlan, axes: Axes) -> None:
    tokens, size = max(plan.survey.prompt_tokens, 1), plan.survey.tokens_per_block
    tiers, ceiling = 100 * plan.rate(store.tier_blocks), 100 * plan.survey.ceiling_tokens / tokens
    table = store.table()
    capacities = np.unique(np.geomspace(max(table[0] // 2, 1), table[-1] + 1, 128).astype(np.int64)).tolist()
    memory = [plan.gib(capacity) for capacity in capacities]
    axes.plot(memory, [tiers + 100 * store.hits(capacity) * size / tokens for capacity in capacities], color=_BLUE)
    axes.axhline(tiers, color=_GREY, linewidth=1, label="tiers alone")
    axes.axhline(ceiling, color=_GREY, linewidth=1, linestyle="--", label="unbounded")
    if store.store.capacity:
        axes.axvline(plan.gib(store.store.capacity), color=_ORANGE, linewidth=1)
    axes.set(xlabel="store, GiB", ylabel="found in tiers or store, %")
    axes.set_title(f"What a store behind the tiers adds (save={store.store.save})", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    _over_memory(axes)


def _draw_policies(plan: CapacityPlan, table: PolicyTable, axes: Axes) -> None:
    memory = [plan.gib(blocks) for blocks in table.capacities]
    for name in table.hits:
        style = "-" if name in table.as_lru else "--" if name in (MIN, ORACLE) else ":"
        rates = [100 * table.rate(name, place) for place in range(len(memory))]
        axes.plot(memory, rates, style, marker="o", markersize=3, label=name)
    axes.set(xlabel="device memory, GiB", ylabel="blocks found, %")
    axes.set_title(f"What a policy finds (the engine says {table.said})", loc="left")
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
