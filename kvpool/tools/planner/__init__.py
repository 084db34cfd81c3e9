"""The capacity planner: LRU hit rates of a trace for all amounts of memory at once, from one pass over it."""

from kvpool.tools.planner.capacity_plan import LINK_BANDWIDTH as LINK_BANDWIDTH
from kvpool.tools.planner.capacity_plan import STORE_BANDWIDTH as STORE_BANDWIDTH
from kvpool.tools.planner.capacity_plan import STORE_LATENCY as STORE_LATENCY
from kvpool.tools.planner.capacity_plan import BreakEven as BreakEven
from kvpool.tools.planner.capacity_plan import CapacityPlan as CapacityPlan
from kvpool.tools.planner.capacity_plan import CapacityRow as CapacityRow
from kvpool.tools.planner.capacity_plan import Machine as Machine
from kvpool.tools.planner.capacity_plan import PoolPlan as PoolPlan
from kvpool.tools.planner.capacity_plan import StorePlan as StorePlan
from kvpool.tools.planner.capacity_plan import StoreRow as StoreRow
from kvpool.tools.planner.capacity_plan import StoreTier as StoreTier
from kvpool.tools.planner.policies import PolicyTable as PolicyTable
from kvpool.tools.planner.policies import choose_capacities as choose_capacities
from kvpool.tools.planner.policies import compare as compare
from kvpool.tools.planner.report import report as report
from kvpool.tools.planner.survey import Curve as Curve
from kvpool.tools.planner.survey import Gaps as Gaps
from kvpool.tools.planner.survey import Prefix as Prefix
from kvpool.tools.planner.survey import Prefixes as Prefixes
from kvpool.tools.planner.survey import Survey as Survey
from kvpool.tools.planner.survey import Surveyor as Surveyor
from kvpool.tools.planner.survey import Tenant as Tenant
from kvpool.tools.planner.survey import Use as Use
from kvpool.tools.planner.survey import survey_of as survey_of
