"""The memory of both tiers: allocated, seen as arrays, lent to other packages and processes, and copied to and from the
caches of any engine. A public name is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.common.lazy import lazy_names

if TYPE_CHECKING:
    from kvpool.common.arrays.strided import StridedArray as StridedArray
    from kvpool.device.memory.attachments import Attachment as Attachment
    from kvpool.device.memory.attachments import SharedTier as SharedTier
    from kvpool.device.memory.export import Export as Export

_NAMES = {
    "kvpool.common.arrays.strided": "StridedArray",
    "kvpool.device.memory.attachments": "Attachment SharedTier",
    "kvpool.device.memory.export": "Export",
}
__all__ = [name for names in _NAMES.values() for name in names.split()]

if not TYPE_CHECKING:  # a name that is not public is an error there
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
