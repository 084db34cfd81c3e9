"""The plan as a picture: hit rate over memory, and when reused blocks come back."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from kvpool.planner.plan import Plan
from kvpool.planner.report import duration

SUFFIXES = (".png", ".svg", ".html")
_TENANTS = 5
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8641e", "#6b6b6b"


def missing() -> str | None:
    """What is missing for a chart, and how to get it; None where nothing is."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"a plot needs matplotlib ({error}): pip install 'kvpool[plot]'"
    return None


def draw(plan: Plan, path: Path, title: str, model: str, text: str) -> None:
    """Write the chart to ``path``, as its suffix says; ``text`` stands below it in HTML. Raises OSError, ImportError."""
    # No figure of pyplot's, which would ask for a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpool"}):
        figure = Figure(figsize=(10, 8.2), layout="constrained")
        curve, gaps = figure.subplots(2, 1, height_ratios=(3, 1.25))
        _curve(plan, curve, title, model)
        _gaps(plan, gaps)
        if path.suffix == ".png":
            figure.savefig(path, dpi=150)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    path.write_text(svg if path.suffix == ".svg" else _page(svg[svg.index("<svg") :], title, text), encoding="utf-8")


def _curve(plan: Plan, axes: Any, title: str, model: str) -> None:
    survey, machine = plan.survey, plan.machine
    tokens = max(survey.prompt_tokens, 1)
    points = [(blocks, hits) for blocks, hits in plan.points(survey.curve) if blocks >= min(survey.longest_blocks, plan.table()[0])]
    memory, rates = [plan.gib(blocks) for blocks, _ in points], [100 * hits / tokens for _, hits in points]
    ceiling = 100 * survey.ceiling_tokens / tokens
    axes.plot(memory, rates, color=_BLUE, linewidth=2.5, label="all requests", zorder=3)
    if not survey.curve.exact:
        errors = [200 * survey.curve.error(blocks) * survey.tokens_per_block / tokens for blocks, _ in points]
        low, high = ([rate + sign * error for rate, error in zip(rates, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(memory, low, high, color=_BLUE, alpha=0.15, label="two standard errors of the sample")
    for number, tenant in enumerate(survey.tenants[:_TENANTS], start=1):
        own = [100 * round(tenant.curve.hits(blocks)) * survey.tokens_per_block / max(tenant.prompt_tokens, 1) for blocks, _ in points]
        axes.plot(memory, own, color=f"C{number}", linewidth=1.2, label=f"tenant {tenant.name}, of its own tokens")
    axes.axhline(ceiling, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate(f"unbounded memory: {ceiling:.1f} %", (0.01, ceiling), xycoords=("axes fraction", "data"), xytext=(0, 4),
                  textcoords="offset points", color=_GREY)  # fmt: skip
    for row in plan.reach() if survey.ceiling_tokens else []:
        if row["of_ceiling"] in (0.5, 0.9):
            axes.plot(row["gib"], 100 * row["token_rate"], "o", color=_BLUE, zorder=4)
            axes.annotate(f"{row['of_ceiling']:.0%} of the ceiling\n{row['gib']:,.0f} GiB" if row["gib"] >= 10 else
                          f"{row['of_ceiling']:.0%} of the ceiling\n{row['gib']:.2g} GiB", (row["gib"], 100 * row["token_rate"]),
                          xytext=(8, -28), textcoords="offset points", color=_BLUE)  # fmt: skip
    if machine.device_blocks:
        for name, blocks in (("device", machine.device_blocks), ("device + host", machine.device_blocks + machine.host_blocks)):
            if name == "device" or machine.host_blocks:
                axes.axvline(plan.gib(blocks), color=_ORANGE, linewidth=1)
                axes.annotate(name, (plan.gib(blocks), 0.02), xycoords=("data", "axes fraction"), rotation=90, xytext=(3, 0),
                              textcoords="offset points", color=_ORANGE)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.3g}")
    axes.set(xlabel=f"KV memory, device and host together, GiB ({model})", ylabel="prompt tokens found in the cache, %")
    axes.set_ylim(bottom=0)
    axes.set_title(f"What more KV memory buys\n{title}", loc="left")
    axes.grid(alpha=0.25)
    if not survey.curve.exact or survey.tenants:
        axes.legend(loc="lower right", frameon=False)


def _gaps(plan: Plan, axes: Any) -> None:
    gaps = plan.survey.gaps
    rows, name = (gaps.seconds, duration) if gaps.seconds else (gaps.requests, "{:,}".format)
    total = max(sum(count for _, count in rows), 1)
    labels = ["longer" if edge is None else f"< {name(edge)}" for edge, _ in rows]
    bars = axes.bar(labels, [100 * count / total for _, count in rows], color=_BLUE)
    axes.bar_label(bars, fmt="%.0f %%", color=_GREY)
    axes.margins(y=0.15)
    axes.set(xlabel=f"{'time' if gaps.seconds else 'requests'} since a block was last used", ylabel="reused blocks, %")
    axes.set_title("When reused blocks come back", loc="left")
    axes.grid(alpha=0.25, axis="y")


def _page(svg: str, title: str, text: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>kvpool plan: {escape(title)}</title>\n<style>body {{ font-family: sans-serif; margin: 2em; max-width: 75em }} "
        "svg { width: 100%; height: auto } pre { overflow-x: auto }</style></head>\n"
        f"<body>\n{svg}\n<pre>{escape(text)}</pre>\n</body></html>\n"
    )
