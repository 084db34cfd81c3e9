"""What users write in an engine's configuration, in the same words for each plug-in; and the identity of KV that
outlives its engine. They need no engine."""

from __future__ import annotations

import logging
import os
import typing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool
from kvpool.integrations import options
from kvpool.integrations.options import (
    LLAMACPP,
    LMCACHE,
    MLX,
    SGLANG,
    VLLM,
    EngineOptions,
    EnginePlugin,
    lasting_identity,
)
from kvpool.state.arrays import POLICIES

PASSING = kvpool.ModelIdentity("/models/tiny", "engine 1", "float16", "LBHNC, tp 1", "vllm 0.32.0, 16 tokens")
ONE_STORE = replace(options.LMCACHE, packages=("toy",), place="its file", others=("module_path",))
HOST_TIER = replace(options.VLLM, packages=("toy",), place="its file")
GOOD = {"stores": "memory:?capacity=1MiB", "weights": "1"}


def test_a_plug_in_takes_its_options_and_leaves_the_others_to_the_engine() -> None:
    read = ONE_STORE.read({**GOOD, "staging_bytes": "64KiB", "load_seconds": 2, "module_path": "x"})
    assert read == EngineOptions(stores=(GOOD["stores"],), weights="1", staging_bytes=1 << 16, load_seconds=2.0)
    assert (read.kind, read.separate, read.persistent) == ("memory", True, [])
    host = HOST_TIER.read({"host_bytes": "1GiB", "stores": ["memory:", "disk:/a"], "block_size": 64})
    assert host == EngineOptions(host_bytes=1 << 30, stores=("memory:", "disk:/a"), load_seconds=2.0, save_seconds=60.0)
    assert not HOST_TIER.read({"host_bytes": 1}).stores


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stores": ""}, "stores: expected a text such as .*got none in its file"),
        ({"stores": ["memory:", "disk:/a"]}, "stores: expected one store, got .* in its file"),
        ({"stores": [1]}, r"stores: expected .*, got \[1\] in"),
        ({"weights": ""}, "weights: expected .*, got none in its file"),
        ({"kv_dtype": "auto"}, "kv_dtype: expected a text that names the type.*got 'auto' in its file"),
        ({"staging_bytes": "much"}, "staging_bytes: expected .*, got 'much' in"),
        ({"find_seconds": float("nan")}, "find_seconds: expected .*, got nan in"),
        ({"save_seconds": "2"}, "save_seconds: expected .*, got '2' in"),
        ({"eviction": 1}, "options: expected some of stores, weights.*got eviction.* in its file"),
        ({"store": "memory:"}, r"options: expected .*, got store \(is stores meant\?\) in its file"),
    ],
)
def test_options_that_are_not_accepted_say_so(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ONE_STORE.read({**GOOD, **change})


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("host_bytes", 8 << 30, (None, "", "8GX", -1, "much", 1.5, True, [8])),
        ("save", "reuse", ("never",)),
        ("load_share", 1, (1.01,)),
        ("save_share", 0.1, (0,)),
        ("retry_seconds", 0.5, (0,)),
        ("save_seconds", 60, (3601,)),
    ],
)
def test_options_of_a_host_tier_have_their_range(option: str, good: Any, bad: tuple[Any, ...]) -> None:
    assert getattr(HOST_TIER.read({"host_bytes": 1, option: good}), option) == good
    for value in bad:
        with pytest.raises(ValueError, match=f"{option}: expected .*in its file"):
            HOST_TIER.read({"host_bytes": 1, option: value})


@pytest.mark.parametrize(
    ("options", "named", "accepted"),
    [({}, True, True), ({}, False, False), ({"kv_dtype": " "}, False, False), ({"kv_dtype": "fp8_e5m2"}, False, True)],
)
def test_memory_of_bytes_needs_the_type_of_its_elements(options: dict[str, str], named: bool, accepted: bool) -> None:
    read = ONE_STORE.read({**GOOD, **options})
    plain, bfloat16 = SimpleNamespace(is_floating_point=named), SimpleNamespace(is_floating_point=True)
    with nullcontext() if accepted else pytest.raises(ValueError, match="kv_dtype: expected .*, got none"):
        read.check_dtypes([bfloat16, plain])


@pytest.mark.parametrize(("slip", "meant"), [("weigths", "weights"), ("loadshare", "load_share")])
def test_a_slip_of_an_option_is_refused_with_the_name_that_is_meant(slip: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"options: expected .*, got {slip} \(is {meant} meant\?\)"):
        HOST_TIER.read({"host_bytes": 1, slip: "1"})


def test_only_a_host_tier_of_kvpool_takes_a_policy() -> None:
    for plugin in (LLAMACPP, SGLANG, LMCACHE):
        with pytest.raises(ValueError, match=f"options: expected some of .*stores.*got .*policy in {plugin.place}"):
            plugin.read({"policy": "agent", "host_bytes": 1, **GOOD})
    for plugin in (VLLM, MLX):
        assert [plugin.read({"host_bytes": 1, "policy": name}).policy for name in POLICIES] == list(POLICIES)
        with pytest.raises(ValueError, match="policy: expected 'lru', 'reuse', 'agent', 'adaptive'.*got 'fifo' in .*"):
            plugin.read({"host_bytes": 1, "policy": "fifo"})


def test_an_editor_knows_each_option_of_a_plugin() -> None:
    for plugin, typed in (
        (VLLM, options.VLLMOptions),
        (options.VLLM_TIER, options.SecondaryTierOptions),
        (SGLANG, options.StagedOptions),
        (LMCACHE, options.StagedOptions),
        (MLX, options.PromptCacheOptions),
        (LLAMACPP, options.LocalOptions),
    ):
        hints = typing.get_type_hints(typed, include_extras=True)
        required = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Required}
        assert set(hints) == set(plugin.options) and required == set(plugin.needs)


def test_what_nobody_knows_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    read = {"host_bytes": 1, "eviction_policy": "arc", "cpu_bytes_to_use": 1, "offload_prompt_only": False}
    with caplog.at_level(logging.WARNING, "toy.kvpool"):
        assert HOST_TIER.read(read) == HOST_TIER.read({"host_bytes": 1}) == HOST_TIER.read(read, quiet=True)
    (record,) = caplog.records
    assert record.getMessage().endswith("ignored in its file: cpu_bytes_to_use, eviction_policy")


def test_a_version_that_was_not_tested_is_named_in_the_log_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EnginePlugin, "version", lambda self: "9.9.9")
    for plugin in (VLLM, SGLANG, LMCACHE):
        monkeypatch.setattr(logging.getLogger(plugin.log.name.partition(".")[0]), "propagate", True)
        plugin.checked_version()
        assert f"tested with {plugin.engine} {plugin.tested[0]}; this is 9.9.9" in caplog.text


def test_warnings_of_stores_are_shown_where_the_engine_shows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    package, engine, seen = logging.getLogger("kvpool"), logging.getLogger("toy"), logging.Handler()
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(seen, "emit", records.append)
    monkeypatch.setattr(engine, "handlers", [seen])
    for shown in (False, True):
        monkeypatch.setattr(package, "handlers", [])
        monkeypatch.setattr(package, "propagate", not shown)
        HOST_TIER.show_warnings()
        logging.getLogger("kvpool.storage").warning("the disk is full")
        assert len(records) == shown, "nobody has said where it is to be written"


def test_sizes_are_read_as_people_write_them() -> None:
    for given in ("8Gi", "8GiB", "8 gib", "8192Mi"):
        assert HOST_TIER.read({"host_bytes": given}).host_bytes == 8 << 30


def test_engines_of_one_model_have_one_identity_and_all_others_another() -> None:
    seed = {"PYTHONHASHSEED": "0"}
    lasting = lasting_identity(PASSING, "r1", "s", "sha256", seed)
    assert lasting_identity(replace(PASSING, revision="engine 2"), "r1", "s", "sha256", seed) == lasting
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
    assert len({lasting, *others}) == 10


def test_without_a_name_the_files_of_the_model_identify_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="name its weights"):
        lasting_identity(replace(PASSING, model=str(tmp_path)), None, "s", "sha256", {})
    with pytest.raises(ValueError, match="name its weights"):
        lasting_identity(replace(PASSING, model="org/name"), None, "s", "sha256", {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    passing = replace(PASSING, model=str(tmp_path))
    lasting = lasting_identity(passing, None, "s", "sha256", {})
    assert lasting_identity(passing, None, "s", "sha256", {}) == lasting
    weights.write_bytes(b"2")
    os.utime(weights, (1, 1))
    assert lasting_identity(passing, None, "s", "sha256", {}) != lasting
