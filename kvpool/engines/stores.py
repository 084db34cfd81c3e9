"""Stores behind the host tier of an engine's plug-in: its options, and whose KV a store has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kvpool

SEED = "PYTHONHASHSEED"
_IN_PROCESS = "memory:"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class StoreOptions(NamedTuple):
    """What ``kv_connector_extra_config`` says of stores."""

    texts: tuple[str, ...]
    """as ``open_store`` takes them, the nearest first; none without stores"""
    save: str
    weights: str | None
    """names the model's weights; None: the files of the model do"""
    load_seconds: float = 2.0
    """how long a request waits for the stores"""

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def lasting(self) -> list[str]:
        """Those that outlive the process, or are shared with others."""
        return [text for text in self.texts if not text.startswith(_IN_PROCESS)]


def store_options(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> StoreOptions:
    """The options ``stores``, ``save``, ``weights`` and ``load_seconds``. Raises ValueError for what cannot work.

    A store that outlives the process needs keys that outlive it: PYTHONHASHSEED must be set.
    """
    texts, save, weights = extra.get("stores", []), extra.get("save", "publish"), extra.get("weights")
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stores={texts!r:.80} in kv_connector_extra_config: a list is needed, such as ['disk:/path']")
    if save not in ("publish", "reuse"):
        raise ValueError(f"save={save!r:.80} in kv_connector_extra_config: accepted are 'publish' and 'reuse'")
    if weights is not None and (not isinstance(weights, str) or not weights):
        raise ValueError(f"weights={weights!r:.80} in kv_connector_extra_config: a text is needed, such as a revision")
    seconds = extra.get("load_seconds", 2.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 3600:
        raise ValueError(f"load_seconds={seconds!r:.80} in kv_connector_extra_config: accepted are seconds below 3600")
    found = StoreOptions(tuple(texts), save, weights, float(seconds))
    if found.lasting and not environment.get(SEED):
        raise ValueError(
            f"stores={found.lasting}: the keys of vLLM's blocks may begin with a random seed, so that nothing would be "
            f"found after a restart. Set the environment variable {SEED} to one number for all engines that use this "
            f"store, such as {SEED}=0"
        )
    return found


def lasting_identity(
    passing: kvpool.ModelIdentity, weights: str | None, settings: str, hash_algorithm: str,
    environment: Mapping[str, str] = os.environ,
) -> kvpool.ModelIdentity:  # fmt: skip
    """The identity of KV that outlives its engine.

    ``passing`` is that of the engine's host tier, whose revision names the engine. Here ``weights`` takes its place, or
    the digest of names, sizes and times of the model's files. ``settings`` stands for all else that the model computes
    with. How keys are hashed and the seed are part of it too. Raises ValueError if nothing tells these weights from
    others.
    """
    seed = hashlib.sha256(environment.get(SEED, "").encode()).hexdigest()[:16]
    return kvpool.ModelIdentity(
        model=passing.model,
        revision=f"weights {weights}" if weights is not None else f"files {_files(passing.model)}",
        kv_dtype=passing.kv_dtype,
        layout=f"{passing.layout}, settings {settings}",
        hash_version=f"{passing.hash_version}, {hash_algorithm}, seed {seed}",
        kv_scales=passing.kv_scales,
    )


def _files(model: str) -> str:
    """A digest of the files of a model in a folder, that changes when one is replaced."""
    folder = Path(model)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if not any(file.suffix in _WEIGHTS for file in files):
        raise ValueError(
            f"model={model!r:.200} is no folder with weights: with stores, name its weights in "
            'kv_connector_extra_config, such as "weights": "revision 1a2b3c". Other weights need another name'
        )
    content = hashlib.sha256((folder / "config.json").read_bytes() if (folder / "config.json").exists() else b"")
    for file in files:
        if file.suffix in _WEIGHTS:
            found = file.stat()
            content.update(repr((file.name, found.st_size, found.st_mtime_ns)).encode())
    return content.hexdigest()[:32]
