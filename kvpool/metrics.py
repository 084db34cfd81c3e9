"""``PoolMetrics`` under its old name, for this version: it is in ``kvpool.observe.metrics`` now."""

from kvpool.observe.metrics import PoolMetrics as PoolMetrics
