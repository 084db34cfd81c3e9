"""The plan as a picture: hit rate over memory, and when reused blocks come back."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvpool.planner.capacity_plan import Plan, StorePlan
from kvpool.planner.policies import MIN, ORACLE, PolicyTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TENANTS = 5
_MARKERS = {0.5: "o", 0.9: "s"}
"""The shares of the ceiling that the curve marks."""
_BLUE = "#1f5fa8"
_ORANGE = "#c8641e"
_GREY = "#6b6b6b"


def tenant_label(name: str) -> str:
    """Says "tenant" once, also of one whose name does."""
    return name if name.lower().startswith("tenant") else f"tenant {name}"


def require_matplotlib() -> None:
    """Raise an ImportError that names the extra if a chart cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f'a plot needs matplotlib ({error}): pip install ".[plot]"') from error


def draw(plan: Plan, path: Path, title: str, model: str, text: str) -> None:
    """Write the chart to ``path``, in the format of its suffix. In HTML, ``text`` follows below the chart. Raises
    OSError, ImportError."""
    # A figure of pyplot would need a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpool"}):
        store = plan.store()
        heights = [3, 0.5, 1.25] + [1.75] * (store is not None) + [2.25] * (plan.policies is not None)
        figure = Figure(figsize=(10, 1.9 * sum(heights)), layout="constrained")
        curve, names, gaps, *behind = figure.subplots(len(heights), 1, height_ratios=heights)
        _curve(plan, curve, title, model)
        # No label lies in the plot, so that none lies on a curve.
        names.axis("off")
        names.legend(*curve.get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        _gaps(plan, gaps)
        if store is not None:
            _store(plan, store, behind.pop(0))
        if plan.policies is not None:
            _policies(plan, plan.policies, behind.pop(0))
        if path.suffix == ".png":
            figure.savefig(path, dpi=150)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    path.write_text(svg if path.suffix == ".svg" else _page(svg[svg.index("<svg") :], title, text), encoding="utf-8")


def _curve(plan: Plan, axes: Axes, title: str, model: str) -> None:
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
        own = [100 * plan.tenant_rate(tenant, blocks) for blocks, _ in points]
        label = f"{tenant_label(tenant.name)}, of its own tokens"
        axes.plot(memory, own, color=f"C{number}", linewidth=1.2, label=label)
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


def _gaps(plan: Plan, axes: Axes) -> None:
    unit, shown = plan.survey.gaps.bars()
    bars = axes.bar([label for label, _ in shown], [100 * share for _, share in shown], color=_BLUE)
    axes.bar_label(bars, fmt="%.0f %%", color=_GREY)
    axes.margins(y=0.15)
    axes.set(xlabel=f"{unit} since a block was last used", ylabel="reused blocks, %")
    axes.set_title("When reused blocks come back", loc="left")
    axes.grid(alpha=0.25, axis="y")


def _store(plan: Plan, store: StorePlan, axes: Axes) -> None:
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


def _policies(plan: Plan, table: PolicyTable, axes: Axes) -> None:
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
