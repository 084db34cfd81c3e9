"""The metrics of pools, host caches, stores and their managers: names, labels, and where a snapshot has the figures.

Names and units follow Prometheus' conventions: base units, and ``_total`` for a counter. Metrics of blocks have the
label ``group``, the group of layers: "0" in a pool with one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from kvpool.pool.stats import GroupStats, Histogram
from kvpool.storage.host_storage_manager import HostStorageManagerStats
from kvpool.storage.storage_manager import StorageManagerStats
from kvpool.storage.store_stats import StoreStats

Value = float | Histogram | None
Read = Callable[[Any], Mapping[tuple[str, ...], Value]]
Figures = str | dict[str, str] | Read
Kind = Literal["counter", "gauge", "histogram"]
COUNTER: Kind = "counter"
GAUGE: Kind = "gauge"
HISTOGRAM: Kind = "histogram"


class Definition(NamedTuple):
    """One metric. ``read`` takes it from a snapshot, as values by the values of ``labels``. A figure that the device
    does not have is None, and is left out."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Read


def _reader(figures: Figures) -> Read:
    """``figures`` is the name of a field, or such names by the value of the one label, or a function."""
    if callable(figures):
        return figures
    named = {(): figures} if isinstance(figures, str) else {(label,): field for label, field in figures.items()}
    fields = {labels: attrgetter(field) for labels, field in named.items()}
    return lambda s: {labels: field(s) for labels, field in fields.items()}


def _by_key(field: str) -> Read:
    """The figures of a field that is a mapping, by its keys."""
    get = attrgetter(field)
    return lambda s: {(key,): value for key, value in get(s).items()}


def _pool(kind: Kind, name: str, help: str, figures: Figures, labels: str = "") -> Definition:
    """A metric with ``labels``, separated by spaces, and the figures of a snapshot."""
    return Definition(kind, name, help, tuple(labels.split()), _reader(figures))


def _group(kind: Kind, name: str, help: str, figures: Figures, labels: str = "") -> Definition:
    """The same figures of every group, by the group's number and then by their other labels."""
    parts = lambda s: {str(g): group for g, group in enumerate(s.groups)}  # noqa: E731
    return _pool(kind, name, help, _each(parts, _reader(figures)), f"group {labels}")


def _store(kind: Kind, name: str, help: str, figures: Figures, labels: str = "") -> Definition:
    """The same figures of every store, by its name and then by their other labels."""
    return _pool(kind, name, help, _each(_stores, _reader(figures)), f"store {labels}")


def _stores(stats: StorageManagerStats | HostStorageManagerStats) -> dict[str, StoreStats]:
    return stats.stores if isinstance(stats.stores, dict) else {store.name: store for store in stats.stores}


def _each(parts: Callable[[Any], Mapping[str, Any]], read: Read) -> Read:
    return lambda s: {(name, *labels): value for name, part in parts(s).items() for labels, value in read(part).items()}


def _states(group: GroupStats) -> dict[tuple[str, ...], Value]:
    """The blocks of each tier by state. Every block is in exactly one state."""
    values: dict[tuple[str, ...], Value] = {}
    for name, tier in (("device", group.device), ("host", group.host)):
        counts = (tier.used, tier.evictable - tier.redundant, tier.redundant, tier.empty)
        values |= {(name, state): n for state, n in zip(("used", "cached", "redundant", "empty"), counts, strict=True)}
    return values


DEFINITIONS = (
    _group(
        GAUGE,
        "kvpool_blocks",
        "Blocks now, by state: used (held), cached (reusable until evicted), redundant (a host copy of content that "
        "is also on the device), empty.",
        _states,
        "tier state",
    ),
    _group(
        GAUGE,
        "kvpool_pinned_blocks",
        "Blocks that leases pin now.",
        {"device": "device.pinned", "host": "host.pinned"},
        "tier",
    ),
    _pool(GAUGE, "kvpool_sequences", "Sequences that run now.", "sequences"),
    _pool(GAUGE, "kvpool_swapped_sequences", "Sequences that are swapped out now.", "swapped"),
    _pool(GAUGE, "kvpool_leases", "Leases that are open now.", "leases"),
    _pool(GAUGE, "kvpool_reservations", "Reservations of loaders that are open now.", "reservations"),
    _pool(
        GAUGE,
        "kvpool_overdue_reservations",
        "Reservations that are open after their deadline. Their blocks wait for the loader's abort.",
        "overdue_reservations",
    ),
    _pool(
        COUNTER,
        "kvpool_expired_reservations",
        "Reservations that were not committed before their deadline.",
        "expired_reservations",
    ),
    _pool(
        GAUGE,
        "kvpool_oldest_lease_age_seconds",
        "Age of the oldest open lease, 0 if none is open.",
        lambda s: {(): s.oldest_lease_ms / 1e3},
    ),
    _pool(GAUGE, "kvpool_staging_uploads", "Block tables that are on their way to the device now.", "uploads"),
    _pool(GAUGE, "kvpool_staging_uploads_peak", "The most block tables on their way at once.", "most_uploads"),
    _pool(
        COUNTER,
        "kvpool_query_tokens",
        "Prompt tokens that were looked up: on the device all of them, on the host those that no full block on the "
        "device had.",
        lambda s: {("device",): s.prompt_tokens, ("host",): s.prompt_tokens - s.reused_device_tokens},
        "tier",
    ),
    _pool(
        COUNTER,
        "kvpool_hit_tokens",
        "Prompt tokens that were reused in full blocks.",
        {"device": "reused_device_tokens", "host": "reused_host_tokens"},
        "tier",
    ),
    _pool(
        COUNTER,
        "kvpool_partial_hit_tokens",
        "Prompt tokens that were copied from blocks that matched in part.",
        "partial_tokens",
    ),
    _pool(
        COUNTER,
        "kvpool_request_tokens",
        "Tokens of requests: appended, dropped (by a rewind, or as rejected drafts), recomputed (cached already when "
        "they were committed), bypassed (in prompts that may not reuse).",
        {kind: f"{kind}_tokens" for kind in ("appended", "dropped", "recomputed", "bypassed")},
        "kind",
    ),
    _group(
        COUNTER,
        "kvpool_evicted_blocks",
        "Blocks that were evicted. From the device: offloaded, on_host (the host had a copy), rule (not worth an "
        "offload, or no host tier), host_full. From the host: redundant (the device had the content), capacity.",
        lambda g: {
            ("device", "offloaded"): g.evicted_offloaded_blocks,
            ("device", "on_host"): g.offloads_saved,
            ("device", "rule"): g.evicted_by_rule_blocks,
            ("device", "host_full"): g.evicted_host_full_blocks,
            ("host", "redundant"): g.redundant_dropped,
            ("host", "capacity"): g.evicted_host_blocks,
        },
        "tier reason",
    ),
    _group(
        COUNTER,
        "kvpool_forgotten_blocks",
        "Blocks whose content is on no tier any more: evicted, superseded, rewound, or released without storing.",
        {"device": "forgotten_device_blocks", "host": "forgotten_host_blocks"},
        "tier",
    ),
    _group(
        COUNTER,
        "kvpool_moved_bytes",
        "Bytes that the device accepted to copy, by direction: offload, onboard, or within a tier.",
        {"offload": "offloaded_bytes", "onboard": "onboarded_bytes", "within": "within_bytes"},
        "direction",
    ),
    _group(
        COUNTER,
        "kvpool_moved_seconds",
        "Time that copies took, by direction. Absent for a device that copies after the call has returned.",
        {way: f"{way}_seconds" for way in ("offload", "onboard", "within")},
        "direction",
    ),
    _group(
        COUNTER,
        "kvpool_lost_blocks",
        "Blocks that lost their content because the device refused a copy.",
        "lost_blocks",
    ),
    _group(COUNTER, "kvpool_expired_blocks", "Blocks whose time to live has ended.", "expired_blocks"),
    _group(
        COUNTER,
        "kvpool_passed_blocks",
        "Blocks that sequences gave back because their sliding window had passed them.",
        "passed_blocks",
    ),
    _group(
        COUNTER,
        "kvpool_forgotten_by_call_blocks",
        "Blocks that a call of forget made unfindable.",
        "forgotten_by_call_blocks",
    ),
    _pool(COUNTER, "kvpool_events_dropped", "Events that were overwritten before they were read.", "events_dropped"),
    _group(
        HISTOGRAM,
        "kvpool_block_lifetime_seconds",
        "Time from storing a block to its eviction. On the host, only of content that was nowhere else.",
        {"device": "lifetime_ms", "host": "host_lifetime_ms"},
        "tier",
    ),
    _group(
        HISTOGRAM,
        "kvpool_block_idle_before_eviction_seconds",
        "Time from the last use of a block to its eviction. On the host, only of content that was nowhere else.",
        {"device": "idle_ms", "host": "host_idle_ms"},
        "tier",
    ),
    _group(
        HISTOGRAM,
        "kvpool_block_reuse_gap_seconds",
        "Time from the last use of a block to the next hit on it.",
        "reuse_gap_ms",
    ),
)

HOST_DEFINITIONS = (
    _pool(
        GAUGE,
        "kvpool_host_cache_blocks",
        "Blocks of a host cache: used (pinned or pending), cached (reusable until evicted), empty.",
        {"used": "used", "cached": "evictable", "empty": "empty"},
        "state",
    ),
    _pool(GAUGE, "kvpool_host_cache_pinned_blocks", "Blocks that leases hold.", "pinned"),
    _pool(GAUGE, "kvpool_host_cache_pending_blocks", "Blocks that wait for their bytes.", "pending"),
    _pool(GAUGE, "kvpool_host_cache_leases", "Open leases.", "leases"),
    _pool(
        GAUGE,
        "kvpool_host_cache_oldest_lease_age_seconds",
        "Age of the oldest open lease, 0 without any.",
        lambda s: {(): s.oldest_lease_ms / 1e3},
    ),
    _pool(
        COUNTER,
        "kvpool_host_cache_keys",
        "Keys that were reserved, published, aborted, reused (pinned), evicted, forgotten (evicted ones included).",
        {name: f"{name}_blocks" for name in ("reserved", "published", "aborted", "reused", "evicted", "forgotten")},
        "what",
    ),
    _pool(
        GAUGE,
        "kvpool_host_cache_overdue_blocks",
        "Pending blocks whose reservation has expired. They wait for the writer's abort.",
        "overdue",
    ),
    _pool(
        COUNTER,
        "kvpool_host_cache_expired_reservations",
        "Blocks that were not published before the deadline of their reservation.",
        "expired_reservations",
    ),
    _pool(COUNTER, "kvpool_host_cache_events_dropped", "Events that were not taken in time.", "events_dropped"),
    _pool(HISTOGRAM, "kvpool_host_cache_lifetime_seconds", "From publishing to eviction.", "lifetime_ms"),
    _pool(HISTOGRAM, "kvpool_host_cache_idle_before_eviction_seconds", "From the last use to eviction.", "idle_ms"),
    _pool(HISTOGRAM, "kvpool_host_cache_reuse_gap_seconds", "From the last use to the next.", "reuse_gap_ms"),
)
"""The metrics of a ``HostCache``."""

STORE_DEFINITIONS = (
    _store(
        COUNTER,
        "kvpool_store_blocks",
        "Blocks of jobs of a store, by kind (find, load, save, forget, clear) and code: absent, ok, failed, damaged "
        "(other bytes than were saved), late, cancelled, refused.",
        lambda s: s.blocks,
        "kind code",
    ),
    _store(
        COUNTER,
        "kvpool_store_bytes",
        "Bytes that a store has loaded or saved.",
        lambda s: {(kind,): s.nbytes[kind] for kind in ("load", "save")},
        "kind",
    ),
    _store(
        COUNTER, "kvpool_store_seconds", "Time in calls of a store, of all its threads.", _by_key("seconds"), "kind"
    ),
    _pool(
        COUNTER,
        "kvpool_store_dropped_saves",
        "Blocks that were not saved, by reason: queue_full, evicted (before they were copied), quota, suspended, "
        "forgotten, failed, late, refused, cancelled; of a HostStorageManager also busy and crowded.",
        lambda s: s.dropped,
        "store reason",
    ),
    _pool(
        COUNTER,
        "kvpool_store_suspensions",
        "How often a store was suspended because its jobs failed.",
        lambda s: {(name,): health.suspensions for name, health in s.health.items()},
        "store",
    ),
    _pool(
        GAUGE,
        "kvpool_store_suspended",
        "1 while the reads or the writes of a store are suspended.",
        lambda s: {
            (name, kind): float(getattr(health, f"{kind}s_suspended"))
            for name, health in s.health.items()
            for kind in ("read", "write")
        },
        "store kind",
    ),
    _store(GAUGE, "kvpool_store_queued_blocks", "Blocks of jobs that wait for a store now.", "queued_blocks"),
    _store(
        GAUGE,
        "kvpool_store_unconfirmed_drops",
        "Forgets and clears that a store has not confirmed.",
        "unconfirmed_drops",
    ),
    _store(
        GAUGE,
        "kvpool_store_figure",
        "Figures that a store reports of itself, such as capacity, blocks and evicted.",
        _by_key("store"),
        "figure",
    ),
)
"""The metrics of the stores of a ``StorageManager`` or a ``HostStorageManager``."""

STORAGE_DEFINITIONS = (
    _pool(
        COUNTER,
        "kvpool_storage_blocks",
        "Blocks that were saved, that have entered the host tier (loaded), and that stores were found to have when a "
        "prompt came (found).",
        {"saved": "saved_blocks", "loaded": "loaded_blocks", "found": "found_blocks"},
        "kind",
    ),
    _pool(
        COUNTER,
        "kvpool_storage_prefetches",
        "Prefetches that have ended, by reason: loaded, cached, absent, declined (to compute is faster), late, full, "
        "failed, cancelled, forgotten, cleared, closed.",
        _by_key("prefetches"),
        "reason",
    ),
    _pool(
        GAUGE,
        "kvpool_storage_waiting",
        "Blocks that wait to be saved (saves), that were brought and wait for their request (promoted), and prefetches "
        "that are under way.",
        {"saves": "waiting_blocks", "promoted": "promoted_blocks", "prefetches": "prefetching"},
        "kind",
    ),
    _pool(
        COUNTER,
        "kvpool_storage_events_dropped",
        "Rows of events that a storage manager, or a reader of its events, was too late for.",
        "events_dropped",
    ),
)
"""The metrics of a ``StorageManager``."""

HOST_STORAGE_DEFINITIONS = (
    _pool(
        COUNTER,
        "kvpool_host_storage_blocks",
        "Keys that stores were asked for, or were not as there was no room (refused), and blocks that came from them "
        "(loaded) and that they have kept (saved).",
        {"asked": "asked", "refused": "refused", "loaded": "loaded_blocks", "saved": "saved_blocks"},
        "kind",
    ),
    _pool(
        COUNTER,
        "kvpool_host_storage_missed",
        "Keys that did not come, by reason: absent, damaged, failed, late, crowded (no room in the cache), suspended, "
        "busy, taken, declined, cancelled.",
        _by_key("missed"),
        "reason",
    ),
    _pool(
        GAUGE,
        "kvpool_host_storage_waiting",
        "Keys that are looked for (searching), and blocks that are reserved for loads (loading; hung: those that were "
        "given up), pinned for saves (saving) and that wait to be saved (waiting).",
        {"waiting": "waiting_blocks", **{name: name for name in ("searching", "loading", "hung", "saving")}},
        "kind",
    ),
)
"""The metrics of a ``HostStorageManager``."""

SERVER_DEFINITIONS = (
    _pool(
        COUNTER,
        "kvpool_store_server_calls",
        "Calls of clients, by outcome: answered, failed (an error, or its client had stopped waiting).",
        {"answered": "calls", "failed": "failed"},
        "outcome",
    ),
    _pool(
        COUNTER,
        "kvpool_store_server_blocks",
        "Blocks that the store has found, saved and loaded for clients, and those of which it has failed to.",
        {kind: f"{kind}_blocks" for kind in ("found", "saved", "loaded", "failed")},
        "kind",
    ),
    _pool(
        COUNTER,
        "kvpool_store_server_refused",
        "What was refused: messages that no client sends (malformed), clients with blocks of another size (size), "
        "clients beyond the number of connections; and answers that were not taken (answers).",
        {"malformed": "malformed", "size": "refused", "connections": "connections_refused", "answers": "dropped"},
        "what",
    ),
    _pool(
        GAUGE,
        "kvpool_store_server_calls_now",
        "Calls now: that wait for the store or are made (in_flight), and of these late ones (hanging).",
        {"in_flight": "in_flight", "hanging": "hanging"},
        "state",
    ),
    _pool(GAUGE, "kvpool_store_server_connections", "Connections of clients now.", "connections"),
    _pool(
        GAUGE,
        "kvpool_store_server_figure",
        "Figures that the store reports of itself, such as capacity and blocks.",
        _by_key("store"),
        "figure",
    ),
)
"""The metrics of a ``StoreServer``."""
