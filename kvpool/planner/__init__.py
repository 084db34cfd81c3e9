"""The capacity planner: LRU hit rates of a trace for all amounts of memory at once, from one pass over it."""

from kvpool.planner.capacity_plan import LINK_BANDWIDTH as LINK_BANDWIDTH
from kvpool.planner.capacity_plan import STORE_BANDWIDTH as STORE_BANDWIDTH
from kvpool.planner.capacity_plan import STORE_LATENCY as STORE_LATENCY
from kvpool.planner.capacity_plan import Machine as Machine
from kvpool.planner.capacity_plan import Plan as Plan
from kvpool.planner.capacity_plan import StorePlan as StorePlan
from kvpool.planner.capacity_plan import StoreTier as StoreTier
from kvpool.planner.policies import PolicyTable as PolicyTable
from kvpool.planner.policies import choose_capacities as choose_capacities
from kvpool.planner.policies import compare as compare
from kvpool.planner.report import report as report
from kvpool.planner.survey import Curve as Curve
from kvpool.planner.survey import Survey as Survey
from kvpool.planner.survey import Surveyor as Surveyor
from kvpool.planner.survey import Use as Use
from kvpool.planner.survey import survey_of as survey_of
