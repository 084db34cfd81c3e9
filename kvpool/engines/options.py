"""EngineOptions: what an engine's configuration says of kvpool, in the same words for each plug-in; and EnginePlugin:
which engine a plug-in is for, and which of the options it takes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import kvpool
from kvpool.sizes import parse_size

SEED = "PYTHONHASHSEED"
PART = "{part}"
SHARED = ("mooncake", "peer")
"""Kinds of stores that several processes can have open at a time."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SECONDS_MAX = 3600.0
STAGED_OPTIONS = {
    "stores": (), "weights": None, "kv_dtype": "", "staging": 256 << 20, "find_seconds": 5.0, "load_seconds": 5.0,
    "save_seconds": 5.0,
}  # fmt: skip
"""What plug-ins take that keep their blocks by ``StagedBlocks``, with the defaults."""
_OLD_WORDS = {
    "store": ("stores",),
    "revision": ("weights",),
    "deadline": ("find_seconds", "load_seconds", "save_seconds"),
}
"""Options by words that are accepted for one release more, and the words that take their place."""
_OLD_VALUES = {("save", "publish"): "commit"}
_ACCEPTED = {
    "stores": "a text such as 'disk:/var/kv?capacity=100GiB', or a list of them",
    "weights": "a text that tells these weights apart from all others, such as a commit or a digest",
    "kv_dtype": "a text that names the type of the KV's elements, such as 'fp8_e4m3' or 'fp8_e5m2'",
    "save": "'commit' and 'reuse'",
    "host_memory": "bytes, or text such as '8GiB'",
    "staging": "bytes, or text such as '256MiB'",
}


class ElementType(Protocol):
    """A ``torch.dtype``."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of all plug-ins. Each takes some of them, with defaults of its own."""

    stores: tuple[str, ...] = ()
    """As ``open_store`` takes them, the nearest first. In a plug-in that has one store for each part of the KV,
    ``{part}`` is the name of the part."""
    weights: str | None = None
    """What tells the model's weights from others, such as a revision or a digest."""
    kv_dtype: str = ""
    """The type of the elements, where that of the engine's memory does not name it."""
    save: str = "commit"
    """Which blocks are saved: each when it has its content ("commit"), or when it is used again ("reuse")."""
    host_memory: int = 0
    """Bytes of host memory of all workers together."""
    staging: int = 256 << 20
    """Bytes of memory for the blocks of one part on their way to and from its store, at least two blocks."""
    find_seconds: float = 5.0
    load_seconds: float = 5.0
    save_seconds: float = 5.0
    """The most that is waited for a store to find, load and save."""
    remember_seconds: float = 1.0
    """For so long the answer of a store is used again."""

    @property
    def lasting(self) -> list[str]:
        """The stores that outlive the process, or are shared with others."""
        return [text for text in self.stores if not text.startswith("memory:")]

    @property
    def kind(self) -> str:
        """``disk``, ``mooncake`` or another kind of store, of the first."""
        return self.stores[0].partition(":")[0]

    @property
    def separate(self) -> bool:
        """Whether several parts can have stores at a time."""
        return PART in self.stores[0] or self.kind in ("memory", *SHARED)

    def store_of(self, part: str) -> str:
        """The text of the store of a part."""
        return self.stores[0].replace(PART, re.sub(r"[^\w.-]", "-", part))

    def check_dtypes(self, dtypes: Iterable[ElementType]) -> None:
        """Raises ValueError where the types of memory do not say what its elements are, and nobody has said it.

        A floating-point type of PyTorch names the elements. Engines keep several 8-bit types as plain bytes.
        """
        plain = sorted({str(dtype) for dtype in dtypes if not dtype.is_floating_point})
        if plain and not self.kv_dtype:
            raise ValueError(
                f"kv_dtype is missing, and {', '.join(plain)} may be any type: accepted is {_ACCEPTED['kv_dtype']}"
            )

    def check_seed(self, environment: Mapping[str, str] = os.environ) -> None:
        """Raises ValueError for a store that outlives the process where the keys of vLLM's blocks may not."""
        if self.lasting and not environment.get(SEED):
            raise ValueError(
                f"stores={self.lasting}: the keys of vLLM's blocks may begin with a random seed, so that nothing would "
                f"be found after a restart. Set the environment variable {SEED} to one number for all engines that use "
                f"this store, such as {SEED}=0"
            )


@dataclass(frozen=True)
class EnginePlugin:
    """An engine, and what its plug-in takes of ``EngineOptions``."""

    module: str
    """where the plug-in is, in ``kvpool.engines``"""
    engine: str
    packages: tuple[str, ...]
    """names under which the engine is installed"""
    tested: tuple[str, ...]
    """the versions that the tests run"""
    place: str
    """where the engine's users write the options"""
    options: Mapping[str, Any]
    """the options that it takes, by name, with the defaults"""
    needs: Collection[str] = ()
    """those that must be given"""
    one_store: bool = False
    others: Collection[str] | None = ()
    """what else may stand there, which is the engine's; None: anything"""

    @property
    def log(self) -> logging.Logger:
        """A logger below that of the engine, which shows its own."""
        return logging.getLogger(f"{self.packages[0]}.kvpool")

    def version(self) -> str:
        """The version of the engine that is installed."""
        for name in self.packages:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    def checked_version(self) -> str:
        """The version of the engine that is installed, with a warning if it was not tested."""
        found = self.version()
        if found not in self.tested:
            self.log.warning("kvpool was tested with %s %s; this is %s", self.engine, ", ".join(self.tested), found)
        return found

    @contextmanager
    def imports(self) -> Iterator[None]:
        """What the plug-in imports of its engine. Raises ImportError with the versions that it works with."""
        try:
            yield
        except ImportError as error:
            raise ImportError(
                f"kvpool.engines.{self.module} works with {self.engine} {', '.join(self.tested)}; {self.engine} "
                f"{self.version()} is installed: {error}"
            ) from error

    def read(self, given: Mapping[str, Any]) -> EngineOptions:
        """The options that a user has written. Raises ValueError or TypeError, which name what is accepted.

        Old words are accepted, with one warning that names the new ones.
        """
        options = self._in_new_words(given)
        unknown = sorted(set(options) - {*self.options, *self.others}) if self.others is not None else []
        if unknown:
            accepted = ", ".join((*self.options, *(self.others or ())))
            raise ValueError(f"unknown options {', '.join(unknown)} in {self.place}: accepted are {accepted}")
        for name in self.needs:
            if not options.get(name):
                raise ValueError(f"{name} is missing in {self.place}: accepted is {_ACCEPTED[name]}")
        found = {name: self._value(name, options.get(name, default)) for name, default in self.options.items()}
        if self.one_store and len(found["stores"]) != 1:
            raise ValueError(f"stores={found['stores']!r:.80} in {self.place}: accepted is one store")
        return EngineOptions(**found)

    def _in_new_words(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options by the words of this release."""
        found, said = dict(given), []
        for old, words in _OLD_WORDS.items():
            new = [word for word in words if word in self.options]
            if old in given and new:
                both = [word for word in new if word in given]
                if both:
                    raise ValueError(f"{old} and {', '.join(both)} in {self.place} say the same: accepted is one")
                found |= dict.fromkeys(new, found.pop(old))
                said.append(f"{old} is now {', '.join(new)}")
        for (name, old), value in _OLD_VALUES.items():
            if name in self.options and found.get(name) == old:
                found[name] = value
                said.append(f"{name}={old!r} is now {name}={value!r}")
        if said:
            self.log.warning("kvpool: old words in %s, which the next release refuses: %s", self.place, "; ".join(said))
        return found

    def _value(self, name: str, value: Any) -> Any:
        """An option in the form that ``EngineOptions`` has. Raises ValueError."""
        found: Any = None
        if name == "stores":
            texts = (value,) if isinstance(value, str) else value
            if isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts):
                found = tuple(texts)
        elif name in ("host_memory", "staging"):
            found = parse_size(value)
        elif name == "save":
            found = value if value in ("commit", "reuse") else None
        elif name == "kv_dtype":
            found = value.strip() if isinstance(value, str) and value.strip() != "auto" else None
        elif name == "weights":
            if value is None or (isinstance(value, str) and value):
                return value
        elif not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= _SECONDS_MAX:
            found = float(value)
        if found is None:
            accepted = _ACCEPTED.get(name, f"more than 0 and up to {_SECONDS_MAX:.0f} seconds")
            raise ValueError(f"{name}={value!r:.80} in {self.place}: accepted is {accepted}")
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
