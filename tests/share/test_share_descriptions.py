"""A description comes from outside: what is none is refused by name, before anything is opened."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from kvpool import DeviceError, SharedTier, attach
from kvpool.device.cuda import open_gpu_memory, unusable
from kvpool.device.main_memory import GpuMemory
from kvpool.memory.attachments import SharedGroup, SharedPart
from tests.share.pools import LAYOUT, open_pool


def changed(description: SharedTier, **fields: Any) -> str:
    """The description as text, with other fields; ``owner`` and ``group`` (the first) are merged."""
    text = json.loads(description.to_json())
    text["owner"] |= fields.pop("owner", {})
    text["groups"][0] |= fields.pop("group", {})
    return json.dumps(text | fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"kvpool": 2}, "version 1"),
    "no tier": ({"tier": "gpu"}, "tier='gpu'"),
    "no groups": ({"groups": []}, "0 groups"),
    "no list of groups": ({"groups": 3}, "TypeError"),
    "another fingerprint": ({"fingerprint": "0" * 32}, "fingerprint"),
    "a device that is no name": ({"device": 5}, "device=5"),
    "a negative pid": ({"owner": {"pid": -1}}, "pid=-1"),
    "a pid that is no number": ({"owner": {"pid": "1/../2"}}, "pid='1/../2'"),
    "a pid that is a bool": ({"owner": {"pid": True}}, "pid=True"),
    "no sign": ({"owner": {"sign": None}}, "sign=None"),
    "a sign that is a path": ({"owner": {"sign": {"fd": 3, "name": "../../etc/passwd"}}}, "name='../../etc/passwd'"),
    "a sign with a name that goes on": (
        {"owner": {"sign": {"fd": 3, "name": "kvpool-" + "a" * 60}}},
        "name='kvpool-aa",
    ),
    "a sign of another name": ({"owner": {"sign": {"fd": 3, "name": "another"}}}, "name='another'"),
    "a descriptor that is none": ({"owner": {"sign": {"fd": -1, "name": "kvpool-00"}}}, "fd=-1"),
    "too many blocks": ({"group": {"blocks": 2**31}}, "blocks=2147483648"),
    "blocks without memory": ({"group": {"blocks": 0}}, "0 blocks"),
    "no parts": ({"group": {"parts": []}}, "0 parts"),
    "a layout that is none": ({"group": {"parts": [{"layout": {"layers": 0}, "memory": None}]}}, "TypeError"),
    "a part without a layout": ({"group": {"parts": [{"memory": None}]}}, "KeyError: 'layout'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_description_that_is_none_is_refused(case: str) -> None:
    fields, message = WRONG[case]
    with open_pool() as cache:
        text = changed(cache.share(), **fields)
        with pytest.raises(ValueError, match="description") as caught:
            attach(text)
        assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "x" * (2 << 20), '{"kvpool": 1}'])
def test_text_that_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="description"):
        attach(text)


def test_text_that_is_too_long_is_not_read() -> None:
    with open_pool() as cache:
        text = cache.share().to_json()
        attach(text + " " * 1000)
        with pytest.raises(ValueError, match="characters; accepted are up to"):
            attach(text + " " * (1 << 20))


@pytest.mark.parametrize("given", [None, b"{}", {}, 5])
def test_what_is_no_description_at_all_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="description="):
        attach(given)


def test_a_description_that_was_made_by_hand_is_checked_too() -> None:
    with open_pool() as cache:
        one = cache.share()
        with pytest.raises(ValueError, match="pid=0"):
            attach(dataclasses.replace(one, pid=0))
        with pytest.raises(ValueError, match="pid=0"):
            pickle.loads(pickle.dumps(dataclasses.replace(one, pid=0)))


def test_memory_of_another_size_than_its_blocks_is_refused() -> None:
    with open_pool() as cache:
        one = cache.share()
        for blocks in (5, 7):
            wrong = dataclasses.replace(one, groups=(one.groups[0]._replace(blocks=blocks),))
            with pytest.raises(ValueError, match=f"accepted are exactly {blocks * LAYOUT.block_bytes}"):
                attach(wrong)


def test_a_pool_of_another_machine_or_pid_namespace_is_named() -> None:
    with open_pool() as cache:
        one = cache.share()
        for name, wrong in (("machine", "another"), ("namespace", 1)):
            with pytest.raises(ValueError, match=name):
                attach(dataclasses.replace(one, **{name: wrong}))


def test_memory_of_a_gpu_is_opened_in_another_process_that_has_the_gpu() -> None:
    memory = GpuMemory(b"\1" * 16, b"\0" * 64, 512)
    with open_pool() as cache:
        one = cache.share()
        gpu = dataclasses.replace(one, groups=(SharedGroup(6, (SharedPart(LAYOUT, memory),)),))
        assert pickle.loads(pickle.dumps(gpu)).groups[0].parts[0].memory == memory
        with pytest.raises(ValueError, match="in this process"):
            attach(gpu)
        for wrong in (memory._replace(handle=b"\0" * 63), memory._replace(offset=-1), memory._replace(uuid=b"\1" * 17)):
            with pytest.raises(ValueError, match="description"):
                attach(dataclasses.replace(one, groups=(SharedGroup(6, (SharedPart(LAYOUT, wrong),)),)))
    if unusable() is not None:
        with pytest.raises(DeviceError, match="cuda device needs"):
            open_gpu_memory(memory, 6 * LAYOUT.block_bytes)
