"""Sizes as people write them: ``4096``, ``8GiB``, ``1.5 GB``."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_size(given: Any) -> int | None:
    """A number of bytes, of an integer or a text. None for anything else."""
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(given).strip().lower())
    return None if found is None or found[2] not in _UNITS else int(float(found[1]) * _UNITS[found[2]])
