"""The plan as text for a terminal: what more memory buys, and how to choose."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpool.planner.capacity_plan import Plan
from kvpool.planner.survey import Prefix

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


def report(plan: Plan, title: str, model: str, link: str) -> str:
    """Return the lines. ``title`` names the trace, ``model`` the layout, ``link`` the source of the bandwidth."""
    parts = (_head(plan, title, model), _table(plan), _pool(plan), _store(plan), _reach(plan), _times(plan, link))
    return "\n\n".join(
        "\n".join(lines) for lines in (*parts, _policies(plan), _gaps(plan), _prefixes(plan), _tenants(plan)) if lines
    )


def _head(plan: Plan, title: str, model: str) -> list[str]:
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


def _table(plan: Plan) -> list[str]:
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


def _pool(plan: Plan) -> list[str]:
    pool = plan.pool()
    if pool is None:
        return []
    lines = []
    rows = {"device alone": pool["device"]} | ({"device + host": pool["both"]} if pool["host_blocks"] else {})
    for name, row in rows.items():
        saved = row["saved_seconds_per_request"]
        times = "" if saved is None else f", {_time(saved)} saved per request"
        found = f"{row['token_rate']:.2%} of prompt tokens ({row['hit_tokens']:,})"
        lines.append(f"{name:<14} {_size(row['gib'])} GiB: {found}{times}")
    longest = plan.survey.longest_blocks
    if pool["device_blocks"] < longest:
        lines.append(f"the longest request needs {longest:,} blocks and does not fit into the device tier")
    return lines


def _store(plan: Plan) -> list[str]:
    found = plan.store()
    if found is None:
        return []
    store, times = found.store, plan.machine.prefill_tokens_per_second is not None
    model = "has the blocks used last" if store.save == "commit" else "has what the tiers evict"
    lines = [
        f"a store behind {_size(plan.gib(found.tier_blocks))} GiB: {store.bandwidth:g} GB/s, {store.latency:g} µs, "
        f"save={store.save}: it {model}",
        f"{'store':>12} {'blocks':>12} {'found in it':>12} {'loads':>9} {'read':>11} {'written':>11}"
        f"{'  saved per request' if times else ''}",
    ]
    for capacity in sorted({*found.table(), *([] if store.capacity is None else [store.capacity])}):
        row = found.row(capacity)
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


def _reach(plan: Plan) -> list[str]:
    if not plan.survey.ceiling_tokens:
        return ["nothing is found again: more memory buys nothing"]
    return [f"to reach {row['of_ceiling']:.0%} of the ceiling you need {_size(row['gib'])} GiB" for row in plan.reach()]


def _times(plan: Plan, link: str) -> list[str]:
    found, machine = plan.break_even(), plan.machine
    if found is None:
        return ["times: give --prefill-tokens-per-second to see what hits save"]
    worth = f"above {found['worthwhile_above_gb_per_second']:.1f} GB/s"
    what = "everything found" if machine.device_blocks is None else "what is found beyond the device tier"
    lines = [f"link: {machine.link_bandwidth:g} GB/s ({link}), {machine.link_latency:g} µs; {what} crosses it"]
    if found["tokens"] is None:
        return [*lines, f"onboarding never beats recomputing here: it would {worth}"]
    tokens = f"{found['tokens']:,} token{'s' if found['tokens'] > 1 else ''}"
    return [*lines, f"onboarding beats recomputing for hits of {tokens} or more, and on any link {worth}"]


def _policies(plan: Plan) -> list[str]:
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


def _gaps(plan: Plan) -> list[str]:
    unit, bars = plan.survey.gaps.bars()
    lines, shown = [f"reused blocks, by the {unit} since their last use"], 0.0
    for label, share in bars:
        shown += share
        label += " requests" if unit == "requests" and label.startswith("below") else ""
        lines.append(f"{label:>24}  {_bar(share)} {share:>6.1%}, {shown:>6.1%} in all")
    return lines if bars else []


def _prefixes(plan: Plan) -> list[str]:
    found, estimate = plan.survey.prefixes, "" if plan.survey.curve.exact else " (of the sample)"
    if not found.top:
        return []
    half, most = (_size(plan.gib(blocks)) for blocks in (found.blocks_for_half, found.blocks_for_most))
    lines = [
        f"reuse{estimate}: {found.reused_blocks:,} of {found.distinct_blocks:,} distinct blocks are ever used again; "
        f"{half} GiB carry half of all hits, {most} GiB nine tenths",
        f"{'prefix of request':>18} {'its tokens':>22} {'reuses':>9} {'hit tokens':>14} {'share':>7}",
    ]
    return lines + [_prefix(prefix) for prefix in found.top]


def _prefix(prefix: Prefix) -> str:
    span = f"{prefix.start:,} to {prefix.start + prefix.tokens:,}"
    return f"{prefix.first_request:>18,} {span:>22} {prefix.reuses:>9,} {prefix.hit_tokens:>14,} {prefix.share:>7.2%}"


def _tenants(plan: Plan) -> list[str]:
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
