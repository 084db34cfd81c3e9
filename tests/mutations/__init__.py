"""Mutations of the package, and the tests that must fail with them: rules that anyone may take out to see.
``README.md`` says how."""

from __future__ import annotations

from tests.mutations import (
    arguments,
    content,
    control,
    disk,
    durability,
    engines,
    eviction,
    forgetting,
    hostcache,
    interrupts,
    keeper,
    mooncake,
    peers,
    policies,
    races,
    recurrent,
    remote,
    sequences,
    steps,
    stores,
    swaps,
    tiers,
    transfer,
)
from tests.mutations.mutation import Mutation

PARTS = (
    arguments,
    content,
    tiers,
    eviction,
    forgetting,
    sequences,
    recurrent,
    control,
    steps,
    swaps,
    transfer,
    races,
    remote,
    hostcache,
    interrupts,
    engines,
    disk,
    durability,
    keeper,
    stores,
    peers,
    policies,
    mooncake,
)
MUTATIONS: dict[str, Mutation] = {mutation.name: mutation for part in PARTS for mutation in part.MUTATIONS}
