"""Sizes as people write them: ``4096``, ``8GiB``, ``8Gi``, ``1.5 GB``."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("i", 1024), ("ib", 1024))
}

_SIZE = r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-z]*)"
_LIMIT = 1 << 63


def parse_size(given: object) -> int | None:
    """A number of bytes, of an integer or a text. None for anything else."""
    if isinstance(given, int) and not isinstance(given, bool):
        return int(given) if 0 <= given < _LIMIT else None
    found = re.fullmatch(_SIZE, given.strip().lower()) if isinstance(given, str) else None
    if found is None or found[2] not in _UNITS:
        return None
    size = int(Fraction(found[1]) * _UNITS[found[2]])
    return size if size < _LIMIT else None
