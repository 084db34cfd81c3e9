"""The options of stores, and the identity of KV that outlives its engine. They need no engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.engines.stores import lasting_identity, store_options

PASSING = kvpool.ModelIdentity("/models/tiny", "engine 1", "float16", "LBHNC, tp 1", "vllm 0.32.0, 16 tokens")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"stores": "disk:/a"}, "stores='disk:/a'"),
        ({"stores": [1]}, "stores="),
        ({"stores": ["memory:"], "save": "never"}, "save='never'"),
        ({"stores": ["memory:"], "weights": ""}, "weights=''"),
        ({"stores": ["memory:"], "weights": 3}, "weights=3"),
        ({"stores": ["memory:"], "load_seconds": 0}, "load_seconds=0"),
        ({"stores": ["memory:"], "load_seconds": "2"}, "load_seconds='2'"),
    ],
)
def test_bad_options_are_named(extra: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        store_options(extra, {"PYTHONHASHSEED": "0"})


def test_a_lasting_store_needs_a_seed_and_one_in_memory_does_not() -> None:
    for texts in (["disk:/a"], ["memory:", "disk:/a"], ["mooncake:host:1"]):
        for environment in ({}, {"PYTHONHASHSEED": ""}):
            with pytest.raises(ValueError, match="Set the environment variable PYTHONHASHSEED"):
                store_options({"stores": texts}, environment)
        assert store_options({"stores": texts}, {"PYTHONHASHSEED": "0"}).texts == tuple(texts)
    assert store_options({"stores": ["memory:?capacity=1"]}, {}).save == "publish"
    assert not store_options({}, {})


def test_engines_of_one_model_have_one_identity_and_all_others_another() -> None:
    seed = {"PYTHONHASHSEED": "0"}
    own = lasting_identity(PASSING, "r1", "s", "sha256", seed)
    assert lasting_identity(replace(PASSING, revision="engine 2"), "r1", "s", "sha256", seed) == own
    others = [
        lasting_identity(PASSING, "r2", "s", "sha256", seed),
        lasting_identity(PASSING, "r1", "t", "sha256", seed),
        lasting_identity(PASSING, "r1", "s", "sha256_cbor", seed),
        lasting_identity(PASSING, "r1", "s", "sha256", {"PYTHONHASHSEED": "1"}),
        *(
            lasting_identity(replace(PASSING, **{name: "other"}), "r1", "s", "sha256", seed)
            for name in ("model", "kv_dtype", "layout", "hash_version", "kv_scales")
        ),
    ]
    assert len({own, *others}) == 10


def test_without_a_name_the_files_of_the_model_tell_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="name its weights"):
        lasting_identity(replace(PASSING, model=str(tmp_path)), None, "s", "sha256", {})
    with pytest.raises(ValueError, match="name its weights"):
        lasting_identity(replace(PASSING, model="org/name"), None, "s", "sha256", {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    passing = replace(PASSING, model=str(tmp_path))
    own = lasting_identity(passing, None, "s", "sha256", {})
    assert lasting_identity(passing, None, "s", "sha256", {}) == own
    weights.write_bytes(b"2")
    os.utime(weights, (1, 1))
    assert lasting_identity(passing, None, "s", "sha256", {}) != own
