"""Sizes as people write them: ``4096``, ``8GiB``, ``1.5 GB``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_size(given: Any) -> int | None:
    """A number of bytes, of an integer or a text. None for anything else."""
    if isinstance(given, int) and not isinstance(given, bool):
        return None if given < 0 else given
    if not isinstance(given, str):
        return None
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", given.strip().lower())
    return None if found is None or found[2] not in _UNITS else int(Fraction(found[1]) * _UNITS[found[2]])
