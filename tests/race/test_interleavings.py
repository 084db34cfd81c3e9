"""Interleavings of two calls, up to a bound on preemptions, end right; and with a guard taken out the explorer finds
one that does not. Some run always, drawn anew each time, and every one with ``--exhaustive``, which takes long;
``KVPOOL_RACE_SCHEDULES`` bounds the number of each scene in both cases.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = os.environ.get("KVPOOL_RACE_SCHEDULES", "")
SEED = os.environ.get("KVPOOL_RACE_SEED", str(random.randrange(1 << 32)))

# What is promised, the scene that shows it, and the guards without which it does not hold.
PROMISES = [
    ("two admissions never evict one victim", "victim", ["state_lock", "transfer_lock"]),
    ("nor one that a policy has chosen", "victim_of_a_policy", ["state_lock", "transfer_lock"]),
    ("an admission and a growing sequence never evict one victim", "victim_of_growth", ["state_lock", "transfer_lock"]),
    ("a host block is pinned or evicted, not both", "host_pin", ["state_lock"]),
    ("a device block is pinned or evicted, not both", "device_pin", ["state_lock"]),
    (
        "a pinned copy has its bytes, though its copy was only decided",
        "pin_of_a_copy",
        ["state_lock", "others_batches_too"],
    ),
    (
        "an admission reads a copy that was only decided after it is made",
        "admission_of_a_copy",
        ["state_lock", "transfer_lock"],
    ),
    ("a closing lease and an eviction agree who holds the block", "unpin_and_eviction", ["state_lock"]),
    ("of two who close a lease, one is told that it came late", "two_unpins", ["state_lock"]),
    ("a lease is closed or revoked, not both", "unpin_and_revoke", ["state_lock"]),
    ("a reservation is committed or revoked, not both", "load_and_revoke", ["state_lock"]),
    ("a reservation is committed or expires, not both", "load_and_expire", ["state_lock"]),
    ("content that two sequences commit is published once", "two_commits", ["state_lock"]),
    ("a block is reused while its last holder releases it", "release_and_hit", ["state_lock"]),
    ("what is forgotten does not come back by a commit", "forget_and_commit", ["state_lock"]),
    ("a block is forgotten and reused, or not reused", "forget_and_hit", ["state_lock"]),
    ("a sequence leaves whole while others reuse its blocks", "swap_and_hit", ["state_lock"]),
    ("of two that write an end that they share, one copies it", "two_writers", ["state_lock"]),
    ("no call of another thread comes between those of a block", "block_and_admission", ["state_lock"]),
    ("a pinned copy has its bytes, though a block holds it back", "block_and_pin", ["state_lock"]),
    ("a word gains a reference and a pin", "word_gains_both", ["compare_exchange"]),
    ("a word loses a reference and a pin", "word_loses_both", ["compare_exchange"]),
    ("a word loses its last reference once", "word_loses_last_twice", ["compare_exchange"]),
    ("a word changes for three threads", "word_of_three", ["compare_exchange"]),
    ("two locks are taken in one order", "two_locks", ["lock_order"]),
    ("a wait ends", "a_wait", ["the_other"]),
]


@functools.cache
def explorer() -> subprocess.Popen[str]:
    """One process without machine code for all scenes; it ends with this one."""
    environment = {
        **os.environ,
        "NUMBA_DISABLE_JIT": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    command = [sys.executable, "-m", "tests.race.scenes", "serve"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def explored(scene: str, *arguments: str) -> str:
    """What the explorer says."""
    process = explorer()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([scene, *arguments]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        explorer.cache_clear()
        raise AssertionError("the explorer has ended; its standard error says why")
    return json.loads(answer)


def report_of(scene: str, *arguments: str) -> Any:
    report = json.loads(explored(scene, "--seed", SEED, *arguments))
    print(f"KVPOOL_RACE_SEED={SEED} {scene}: {report['schedules']} schedules, failed {report['failed']!r}")
    print(report["failure"] or "")
    return report


EACH_SCENE = pytest.mark.parametrize("scene", [pytest.param(scene, id=promise) for promise, scene, _ in PROMISES])


@EACH_SCENE
def test_interleavings_keep_the_promise(scene: str) -> None:
    report = report_of(scene, "--most", SCHEDULES or "10")
    assert report["failed"] is None, f"schedule {report['failed']!r}: {report['failure']}"


@pytest.mark.exhaustive
@EACH_SCENE
def test_every_interleaving_keeps_the_promise(scene: str) -> None:
    report = report_of(scene, *(("--most", SCHEDULES) if SCHEDULES else ()))
    assert report["failed"] is None, f"schedule {report['failed']!r}: {report['failure']}"


@pytest.mark.parametrize(
    ("scene", "guard"),
    [
        pytest.param(scene, guard, id=f"{promise}: {guard}", marks=[pytest.mark.exhaustive] if number else [])
        for promise, scene, guards in PROMISES
        for number, guard in enumerate(guards)
    ],
)
def test_some_interleaving_breaks_the_promise_without_its_guard(scene: str, guard: str) -> None:
    assert report_of(scene, "--without", guard)["failed"] is not None


@pytest.mark.parametrize("scene", [scene for _, scene, guards in PROMISES if "state_lock" in guards])
def test_whoever_changes_a_reference_word_holds_the_state_lock(scene: str) -> None:
    """Every change of these scenes is watched. What a call does does not depend on who else runs, so no preemption is
    needed."""
    report = report_of(scene, "--watch-words", "--preemptions", "0")
    assert report["failed"] is None, report["failure"]


def test_explorer_runs_each_interleaving_of_two_threads_of_two_steps_once() -> None:
    assert report_of("word_gains_both")["schedules"] == 6


def test_explorer_switches_inside_calls_of_the_pool() -> None:
    assert report_of("unpin_and_eviction", "--most", "101")["schedules"] == 101


def test_a_failing_schedule_fails_again_when_run_alone() -> None:
    report = report_of("host_pin", "--without", "state_lock")
    assert report["failure"].splitlines()[-1] in explored(
        "host_pin", "--without", "state_lock", "--schedule", report["failed"]
    )
    assert explored("host_pin", "--schedule", report["failed"].split()[0]).strip() == "right"


@pytest.mark.parametrize(
    ("scene", "guard", "symptom"), [("two_locks", "lock_order", "deadlock"), ("a_wait", "the_other", "no end")]
)
def test_what_cannot_go_on_is_a_failure(scene: str, guard: str, symptom: str) -> None:
    assert symptom in report_of(scene, "--without", guard)["failure"]
