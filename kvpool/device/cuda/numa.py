"""Which processors are near a GPU. On machines with several memory nodes, a page lies where the thread runs that
touches it first."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys")


def processors_near(pci: str, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """The processors of the memory node of a PCI device ("0000:3B:00.0"). None if there is one node only, or if nobody
    knows."""
    nodes = sysfs / "devices/system/node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        found = _numbers((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return None
    return found or None


def _numbers(text: str) -> frozenset[int]:
    """The numbers that a list such as "0-3,8" means."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
