"""kvpool: a paged KV cache in two tiers, device blocks and host blocks, for any LLM inference engine."""

from kvpool.block_table import BlockTable as BlockTable
from kvpool.errors import BlockNotFound as BlockNotFound
from kvpool.errors import DeviceError as DeviceError
from kvpool.errors import InsufficientMemory as InsufficientMemory
from kvpool.errors import IntegrityError as IntegrityError
from kvpool.errors import KVPoolError as KVPoolError
from kvpool.errors import LeaseExpired as LeaseExpired
from kvpool.errors import OutOfBlocks as OutOfBlocks
from kvpool.errors import OutOfSequences as OutOfSequences
from kvpool.errors import PoolBusy as PoolBusy
from kvpool.errors import PoolClosed as PoolClosed
from kvpool.errors import ReservationExpired as ReservationExpired
from kvpool.errors import UnknownSequence as UnknownSequence
from kvpool.events import Event as Event
from kvpool.events import Events as Events
from kvpool.export import Export as Export
from kvpool.groups import LayerGroup as LayerGroup
from kvpool.groups import split_blocks as split_blocks
from kvpool.kv_copy import gather_kv as gather_kv
from kvpool.kv_copy import scatter_kv as scatter_kv
from kvpool.kv_layout import PagedKV as PagedKV
from kvpool.layout import BlockLayout as BlockLayout
from kvpool.leases import Lease as Lease
from kvpool.manager import KVCacheManager as KVCacheManager
from kvpool.reservations import Loadable as Loadable
from kvpool.reservations import Reservation as Reservation
from kvpool.retention import RetentionRange as RetentionRange
from kvpool.sequence import Admission as Admission
from kvpool.sequence import BlockKeys as BlockKeys
from kvpool.sequence import Match as Match
from kvpool.stats import GroupStats as GroupStats
from kvpool.stats import Stats as Stats
from kvpool.stats import TierStats as TierStats
from kvpool.strided import StridedArray as StridedArray
from kvpool.warming import warm_up as warm_up

__version__ = "0.1.0"
