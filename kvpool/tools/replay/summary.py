"""The figures of a replay, as text for people and as a dictionary for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

PHASES = ("keys", "match_allocate", "append", "commit", "release")
_NAMED_SKIPS = 5


@dataclass(frozen=True)
class Hits:
    """Prompt tokens found in the pool: in full blocks, by the tier that held them, and in blocks copied in part."""

    device_tokens: int
    host_tokens: int
    partial_tokens: int
    tokens: int
    rate: float
    """The share of prompt tokens that were hits."""


@dataclass(frozen=True)
class MovedBlocks:
    """Numbers of blocks that were moved between the tiers, copied inside one, or evicted."""

    offloaded: int
    onboarded: int
    forgotten_device: int
    forgotten_host: int
    offloads_saved: int
    """Evictions that needed no copy because the host still had one."""
    partial_copies: int
    """Copies of the first tokens of a block."""


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes that the device copied, and the time it took. A partial copy counts by the tier of its source."""

    offloaded_bytes: int
    onboarded_bytes: int
    within_tier_bytes: int
    seconds: float
    gigabytes_per_second: float | None


@dataclass
class Verified:
    """The amounts that were compared byte by byte."""

    reused_tokens: int = 0
    released_tokens: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    partial_copies: int = 0
    loaded_blocks: int = 0
    """Blocks that came from a store."""


_ADAPTIVE = "adaptive follows LRU until another policy hits more by a clear margin; until then the hits are LRU's"
_NO_RACE = "no race was found: every copy and kernel was ordered, and every write was declared"


@dataclass(frozen=True)
class Stored:
    """What the store of a replay did."""

    name: str
    saved_blocks: int
    loaded_blocks: int
    found_blocks: int
    """Blocks that the store said to have, out of those that the pool had not."""
    hit_tokens: int
    """Prompt tokens that were reused because the store had them."""
    earlier_tokens: int
    """Those of them that this run had neither computed nor reused before: they come from an earlier run."""
    dropped: dict[str, int]
    """Blocks that were not saved, by reason."""
    not_loaded: dict[str, int]
    """Blocks that were asked for and did not come, by reason."""
    prefetches: dict[str, int]
    """By how they ended."""
    call_seconds: dict[str, float]
    """Time in calls of the store, of all threads, by kind."""
    wait_seconds: float
    """How long the replay has waited for the store."""
    store: dict[str, int]
    """Figures of the store itself."""


@dataclass(frozen=True)
class Summary:
    """All figures of a replay. The names say whether a size is in tokens, blocks or bytes."""

    requests: int
    planned: int
    peak_active: int
    skipped: list[str]
    interrupted: bool
    failure: str | None
    prompt_tokens: int
    output_tokens: int
    hits: Hits
    blocks: MovedBlocks
    moved: CopiedBytes
    control_us_per_request: dict[str, float]
    verified: Verified | None
    stored: Stored | None
    wall_seconds: float
    peak_memory_bytes: int | None
    config: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as nested dictionaries, lists and numbers, which ``json.dumps`` accepts."""
        return asdict(self)

    def text(self) -> str:
        """Return the figures as a few aligned lines."""
        hits = self.hits
        blocks = self.blocks
        moved = self.moved
        stored = self.stored
        nbytes = moved.offloaded_bytes + moved.onboarded_bytes + moved.within_tier_bytes
        speed = f", {moved.gigabytes_per_second:.2f} GB/s" if moved.gigabytes_per_second else ""
        control = self.control_us_per_request
        phases = ", ".join(f"{name.replace('_', ' + ')} {value:.1f}" for name, value in control.items())
        settings = (f"{key} {value}" for key, value in self.config.items() if key not in ("trace", "format"))
        rows = {
            "replay": [f"{self.config['trace']} ({self.config['format']})"],
            "requests": [f"{self.requests:,} replayed, at most {self.peak_active:,} active", *self._skipped()],
            "tokens": [f"{self.prompt_tokens:,} in prompts, {self.output_tokens:,} in answers"],
            "hits": [
                f"{hits.tokens:,} prompt tokens, {hits.rate:.2%}",
                f"full blocks: {hits.device_tokens:,} device, {hits.host_tokens:,} host",
                f"partial blocks: {hits.partial_tokens:,}",
            ],
            "blocks": [
                f"{blocks.offloaded:,} offloaded, {blocks.onboarded:,} onboarded",
                f"{blocks.offloads_saved:,} offloads saved: the host had kept its copy",
                f"{blocks.forgotten_device:,} forgotten on the device, {blocks.forgotten_host:,} on the host",
                f"{blocks.partial_copies:,} copied for partial reuse",
            ],
            "store": [] if stored is None else _store_lines(stored, hits.tokens),
            "moved": [f"{format_bytes(nbytes)} in {moved.seconds:.2f} s{speed}" if nbytes else "nothing"],
            "control": [f"{sum(control.values()):.1f} µs per request: {phases}"],
            "policy": [_ADAPTIVE] if self.config.get("policy") == "adaptive" else [],
            "races": [_NO_RACE] if self.config.get("device") == "sim" and self.failure is None else [],
            "verified": self._verified(),
            "memory": [f"{'unknown' if (peak := self.peak_memory_bytes) is None else format_bytes(peak)} at the peak"],
            "time": [f"{self.wall_seconds:.1f} s in all"],
            "config": wrap(", ".join(setting.replace(" ", "\xa0") for setting in settings), 90),
        }
        if self.interrupted:
            rows["replay"].append(f"interrupted after {self.requests:,} of {self.planned:,} requests")
        return "\n".join(aligned(rows)).replace("\xa0", " ")

    def _skipped(self) -> list[str]:
        count = len(self.skipped)
        lines = [f"  {name}" for name in self.skipped[:_NAMED_SKIPS]]
        lines += [f"  and {count - _NAMED_SKIPS:,} more (--json names all)"] if count > _NAMED_SKIPS else []
        return [f"{count:,} skipped, larger than the device tier:", *lines] if count else []

    def _verified(self) -> list[str]:
        done = self.verified
        if self.failure is not None:
            return [f"FAILED: {self.failure}"]
        if done is None:
            return []
        return [
            f"every byte of {done.reused_tokens:,} reused and {done.released_tokens:,} released tokens, "
            f"{done.offloaded_blocks:,} offloads, {done.onboarded_blocks:,} onboards, {done.partial_copies:,} partial "
            "copies" + (f", {done.loaded_blocks:,} blocks of the store" if self.stored is not None else "")
        ]


def _store_lines(stored: Stored, hits: int) -> list[str]:
    seconds, warm = stored.call_seconds, "warm" if stored.earlier_tokens else "cold"
    return [
        f"{stored.name}: {stored.saved_blocks:,} blocks saved, {stored.loaded_blocks:,} loaded",
        f"{stored.hit_tokens:,} prompt tokens reused because of it, {stored.hit_tokens / max(hits, 1):.2%} of the hits",
        f"{stored.earlier_tokens:,} of them from an earlier run: it started {warm}",
        f"not saved: {_counts(stored.dropped)}; not loaded: {_counts(stored.not_loaded)}",
        f"calls took {seconds['save']:.1f} s to save, {seconds['load']:.1f} s to load, {seconds['find']:.1f} s to "
        f"find; the replay waited {stored.wait_seconds:.1f} s",
    ]


def aligned(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return lines of text, the first of each group after its name. A group without lines is left out."""
    return [f"{'' if place else name:<9} {line}" for name, lines in rows.items() for place, line in enumerate(lines)]


def table(*rows: Sequence[str]) -> list[str]:
    """Return rows of cells as lines with right-aligned columns. A column of empty cells is left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()) or "none"


def format_bytes(count: int) -> str:
    """Return a byte count in the binary unit that keeps it short, such as ``1.5 GiB``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def peak_memory_bytes() -> int | None:
    """Return the largest resident size of this process so far, or None where the system does not say."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
