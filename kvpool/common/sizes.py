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


def parse_size(value: object) -> int | None:
    """A number of bytes, of an integer or a text. None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if 0 <= value < _LIMIT else None
    matched = re.fullmatch(_SIZE, value.strip().lower()) if isinstance(value, str) else None
    if matched is None or matched[2] not in _UNITS:
        return None
    size = int(Fraction(matched[1]) * _UNITS[matched[2]])
    return size if size < _LIMIT else None
