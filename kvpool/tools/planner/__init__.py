"""The capacity planner: LRU hit rates of a trace for all amounts of memory at once, from one pass over it."""

from kvpool.tools.planner.capacity_plan import (
    LINK_BANDWIDTH,
    STORE_BANDWIDTH,
    STORE_LATENCY,
    BreakEven,
    CapacityPlan,
    CapacityRow,
    Machine,
    PoolPlan,
    StorePlan,
    StoreRow,
    StoreTier,
)
from kvpool.tools.planner.policies import PolicyTable, choose_capacities, compare
from kvpool.tools.planner.report import report
from kvpool.tools.planner.survey import Curve, Gaps, Prefix, Prefixes, Survey, Surveyor, Tenant, Use, survey_of

__all__ = [
    "BreakEven",
    "CapacityPlan",
    "CapacityRow",
    "Curve",
    "Gaps",
    "LINK_BANDWIDTH",
    "Machine",
    "PolicyTable",
    "PoolPlan",
    "Prefix",
    "Prefixes",
    "STORE_BANDWIDTH",
    "STORE_LATENCY",
    "StorePlan",
    "StoreRow",
    "StoreTier",
    "Survey",
    "Surveyor",
    "Tenant",
    "Use",
    "choose_capacities",
    "compare",
    "report",
    "survey_of",
]
