"""The figures of a replay, as text for people and as a dictionary for JSON."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
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
        lines = [f"{label:<9} {text}" if text else "" for label, text in self._lines()]
        return "\n".join(line.rstrip() for line in lines)

    def _lines(self) -> list[tuple[str, str]]:
        hits, blocks = self.hits, self.blocks
        rows = [("replay", f"{self.config['trace']} ({self.config['format']})")]
        if self.interrupted:
            rows.append(("", f"interrupted after {self.requests:,} of {self.planned:,} requests"))
        rows.append(("requests", f"{self.requests:,} replayed, at most {self.peak_active:,} active"))
        if self.skipped:
            rows.append(("", f"{len(self.skipped):,} skipped, larger than the device tier:"))
            rows += [("", f"  {name}") for name in self.skipped[:_NAMED_SKIPS]]
            if len(self.skipped) > _NAMED_SKIPS:
                rows.append(("", f"  and {len(self.skipped) - _NAMED_SKIPS:,} more (--json names all)"))
        rows += [
            ("tokens", f"{self.prompt_tokens:,} in prompts, {self.output_tokens:,} in answers"),
            ("hits", f"{hits.tokens:,} prompt tokens, {hits.rate:.2%}"),
            ("", f"full blocks: {hits.device_tokens:,} device, {hits.host_tokens:,} host"),
            ("", f"partial blocks: {hits.partial_tokens:,}"),
            ("blocks", f"{blocks.offloaded:,} offloaded, {blocks.onboarded:,} onboarded"),
            ("", f"{blocks.offloads_saved:,} offloads saved: the host had kept its copy"),
            ("", f"{blocks.forgotten_device:,} forgotten on the device, {blocks.forgotten_host:,} on the host"),
            ("", f"{blocks.partial_copies:,} copied for partial reuse"),
            *self._store_lines(),
            ("moved", self._moved_text()),
            ("control", self._control_text()),
        ]
        if self.verified is not None or self.failure is not None:
            rows.append(("verified", self._verified_text()))
        peak = "unknown" if self.peak_memory_bytes is None else format_bytes(self.peak_memory_bytes)
        rows += [("memory", f"{peak} at the peak"), ("time", f"{self.wall_seconds:.1f} s in all")]
        return rows + [("config" if not i else "", text) for i, text in enumerate(self._config_lines())]

    def _store_lines(self) -> list[tuple[str, str]]:
        stored = self.stored
        if stored is None:
            return []
        share = stored.hit_tokens / max(self.hits.tokens, 1)
        seconds = stored.call_seconds
        return [
            ("store", f"{stored.name}: {stored.saved_blocks:,} blocks saved, {stored.loaded_blocks:,} loaded"),
            ("", f"{stored.hit_tokens:,} prompt tokens reused because of it, {share:.2%} of the hits"),
            ("", f"{stored.earlier_tokens:,} of them from an earlier run: it started {_warm(stored)}"),
            ("", f"not saved: {_counts(stored.dropped)}; not loaded: {_counts(stored.not_loaded)}"),
            (
                "",
                f"calls took {seconds['save']:.1f} s to save, {seconds['load']:.1f} s to load, "
                f"{seconds['find']:.1f} s to find; the replay waited {stored.wait_seconds:.1f} s",
            ),
        ]

    def _moved_text(self) -> str:
        moved = self.moved
        total = moved.offloaded_bytes + moved.onboarded_bytes + moved.within_tier_bytes
        if not total:
            return "nothing"
        speed = f", {moved.gigabytes_per_second:.2f} GB/s" if moved.gigabytes_per_second else ""
        return f"{format_bytes(total)} in {moved.seconds:.2f} s{speed}"

    def _control_text(self) -> str:
        total = sum(self.control_us_per_request.values())
        parts = (f"{name.replace('_', ' + ')} {value:.1f}" for name, value in self.control_us_per_request.items())
        return f"{total:.1f} µs per request: {', '.join(parts)}"

    def _verified_text(self) -> str:
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        assert self.verified is not None
        done = self.verified
        return (
            f"every byte of {done.reused_tokens:,} reused and {done.released_tokens:,} released tokens, "
            f"{done.offloaded_blocks:,} offloads, {done.onboarded_blocks:,} onboards, {done.partial_copies:,} partial "
            "copies" + (f", {done.loaded_blocks:,} blocks of the store" if self.stored is not None else "")
        )

    def _config_lines(self) -> list[str]:
        pairs = [f"{key} {value}" for key, value in self.config.items() if key not in ("trace", "format")]
        lines = [""]
        for pair in pairs:
            if lines[-1] and len(lines[-1]) + len(pair) > 90:
                lines[-1] += ","
                lines.append("")
            lines[-1] += f", {pair}" if lines[-1] else pair
        return lines


def _warm(stored: Stored) -> str:
    return "warm" if stored.earlier_tokens else "cold"


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
