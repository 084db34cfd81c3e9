"""The doctor's checks of Mooncake: whether its client can be loaded, whether a master answers, and who can reach the
memory of its clients."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

from kvpool.commands.checks import FAILED, OK, WARNING, Check

MASTER = "MOONCAKE_MASTER"
"""Names the master where no option does. Mooncake's own tools read it too."""

OPEN_TO_ALL = (
    "every client listens on all interfaces, without a password or encryption: who reaches its ports can read and "
    "write the memory that it lends, and the host tier"
)


def look(asked: str | None) -> dict[str, Any]:
    """What is installed, and whether the master that an option or the environment names can be reached."""
    found: dict[str, Any] = dict.fromkeys(("version", "tested", "error", "seen_as", "unreachable"))
    found |= {"master": asked or os.environ.get(MASTER) or None, "asked": asked is not None}
    try:
        # Imported here, so that the doctor runs where kvpool cannot be imported.
        from kvpool.stores.mooncake import guarded_client as client
    except ImportError:
        return found | {"unreachable": found["master"] and "kvpool cannot be imported"}
    found |= {"version": client.version(), "tested": client.TESTED}
    if found["version"] is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client.library()
        except ImportError as raised:
            found["error"] = str(raised)
    return found | _reached(found["master"], client.reach)


def _reached(master: str | None, reach: Callable[[str], str]) -> dict[str, Any]:
    if master is None:
        return {}
    if not re.fullmatch(r"\S+:[0-9]+", master):
        return {"unreachable": f"{master!r:.80} is no address: accepted is HOST:PORT"}
    try:
        return {"seen_as": reach(master)}
    except (OSError, ValueError, OverflowError) as error:
        return {"unreachable": str(error)}


def judge(found: dict[str, Any]) -> list[Check]:
    """The verdicts on what ``look`` has found."""
    checks = [_client(found)] if found["version"] else []
    if found["master"] is not None:
        checks.append(_master(found))
    if found["version"] is not None and not found["error"]:
        remedy = "keep the ports of its clients and master in a network of their own; docs/cluster.md says how"
        checks.append(Check("mooncake security", WARNING if found["seen_as"] else OK, OPEN_TO_ALL, remedy))
    return checks


def _client(found: dict[str, Any]) -> Check:
    name, version = "mooncake client", found["version"]
    if found["error"]:
        words, _, remedy = found["error"].rpartition(": ")
        return Check(name, WARNING, words or found["error"], remedy if "install" in remedy else "")
    if version != found["tested"]:
        return Check(name, WARNING, f"{version}, which was not tested with kvpool ({found['tested']} was)")
    return Check(name, OK, "can be loaded")


def _master(found: dict[str, Any]) -> Check:
    name = f"mooncake master {found['master']}"
    if found["unreachable"]:
        status = FAILED if found["asked"] else WARNING
        return Check(name, status, found["unreachable"], "start mooncake_master there, or name its --rpc_port")
    return Check(name, OK, f"accepts connections; it sees this machine as {found['seen_as']}")
