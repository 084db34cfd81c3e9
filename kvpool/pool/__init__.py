"""The pool: ``KVCacheManager`` and its parts, and what its calls take and return. A public name is imported when it is
first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.common.lazy import lazy_names

if TYPE_CHECKING:
    from kvpool.pool.block_tables import BlockTables as BlockTables
    from kvpool.pool.block_tables import GraphTables as GraphTables
    from kvpool.pool.cached_content import CachedContent as CachedContent
    from kvpool.pool.config import split_blocks as split_blocks
    from kvpool.pool.events import Event as Event
    from kvpool.pool.events import Events as Events
    from kvpool.pool.explain import Explanation as Explanation
    from kvpool.pool.explain import Missed as Missed
    from kvpool.pool.hints import HintAnswer as HintAnswer
    from kvpool.pool.imports import Imports as Imports
    from kvpool.pool.keys import MissingBlocks as MissingBlocks
    from kvpool.pool.keys import Plan as Plan
    from kvpool.pool.pool_memory import PoolMemory as PoolMemory
    from kvpool.pool.prompts import LayerLoads as LayerLoads
    from kvpool.pool.reservations import LoadTarget as LoadTarget
    from kvpool.pool.reservations import Reservation as Reservation
    from kvpool.pool.shutdown import CloseReport as CloseReport
    from kvpool.pool.stats import GroupStats as GroupStats
    from kvpool.pool.stats import RequestStats as RequestStats
    from kvpool.pool.stats import Stats as Stats
    from kvpool.pool.stats import TierStats as TierStats
    from kvpool.pool.tables.block_table import BlockTable as BlockTable
    from kvpool.pool.tables.step_tables import StepTables as StepTables

_NAMES = {
    "kvpool.pool.block_tables": "BlockTables GraphTables",
    "kvpool.pool.cached_content": "CachedContent",
    "kvpool.pool.config": "split_blocks",
    "kvpool.pool.events": "Event Events",
    "kvpool.pool.explain": "Explanation Missed",
    "kvpool.pool.hints": "HintAnswer",
    "kvpool.pool.imports": "Imports",
    "kvpool.pool.keys": "MissingBlocks Plan",
    "kvpool.pool.pool_memory": "PoolMemory",
    "kvpool.pool.prompts": "LayerLoads",
    "kvpool.pool.reservations": "LoadTarget Reservation",
    "kvpool.pool.shutdown": "CloseReport",
    "kvpool.pool.stats": "GroupStats RequestStats Stats TierStats",
    "kvpool.pool.tables.block_table": "BlockTable",
    "kvpool.pool.tables.step_tables": "StepTables",
}
__all__ = [name for names in _NAMES.values() for name in names.split()]

if not TYPE_CHECKING:  # a name that is not public is an error there
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
