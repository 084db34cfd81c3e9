"""BlockLayout: what one KV block holds, and where each of its bytes lies in the two tiers.

PoolIds: one numbering of the blocks of all groups. First come all device blocks, group after group, then all host
blocks. Inside a group, ids are as if the group were alone: its device blocks from 0 on, then its host blocks. The state
and block tables use ids of a group. Copies, devices and leases use pool ids. A group of the state is a region of the
device.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np

from kvpool.common.arrays import Array, ElementType, Int64s
from kvpool.common.arrays.dlpack import TYPE_CODES

Tier: TypeAlias = Literal["device", "host"]
BlockOrder: TypeAlias = Literal["layer_first", "block_first"]
TokenOrder: TypeAlias = Literal["NHD", "HND"]
Word = TypeVar("Word", bound=str)
_EXTENT_MAX = 2**31 - 1

# Types that NumPy has no name for are stored as integers of the same width. Only their bytes matter here.
_STORED_AS = {name: "uint16" if name == "bfloat16" else "uint8" for name in TYPE_CODES}


class BlockStrides(NamedTuple):
    """Distances in bytes from one block, layer, plane, token or head of a tier to the next.

    Attributes
    ----------
    block, layer, plane, token, head : int
        Bytes from one of them to the next.
    """

    block: int
    layer: int
    plane: int
    token: int
    head: int


class ModelShape(NamedTuple):
    """The part of a model's published configuration that determines the size of its KV.

    Attributes
    ----------
    layers : int
        Number of layers, all of them with full attention.
    kv_heads : int
        Number of heads of K and of V, after grouping.
    head_dim : int
        Elements of a head.
    planes : int, default 2
        2 for K and V, 1 for MLA.
    dtype : str, default "bfloat16"
        The type in which the model was published.
    """

    layers: int
    kv_heads: int
    head_dim: int
    planes: int = 2
    dtype: str = "bfloat16"


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a model's own ``config.json``, as Hugging Face publishes it. All layers count as full
    attention.

    Raises ValueError, which names the field, if the shape is not in it.
    """
    # Models of several modalities keep the fields of the text model apart.
    fields = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config

    def number(name: str, fallback: int | None = None) -> int:
        value = fields.get(name)
        if value is None and fallback is not None:
            return fallback
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer above 0, got {value!r:.80}")
        return value

    types = [part.get(name) for part in (fields, config) for name in ("torch_dtype", "dtype")]
    dtype = next(filter(None, types), "bfloat16")
    layers = number("num_hidden_layers")
    if fields.get("kv_lora_rank") is not None:
        # MLA keeps one latent and a rotary key for all heads.
        return ModelShape(layers, 1, number("kv_lora_rank") + number("qk_rope_head_dim"), 1, _dtype_name(dtype))
    if fields.get("head_dim") is None:
        heads, hidden = number("num_attention_heads"), number("hidden_size")
        if hidden % heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads={heads}, where head_dim is not given, got "
                f"{hidden}"
            )
        dim = hidden // heads
    else:
        dim = number("head_dim")
    kv_heads = number("num_key_value_heads", fields.get("num_attention_heads"))
    return ModelShape(layers, kv_heads, dim, 2, _dtype_name(dtype))


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3-8b": ModelShape(layers=32, kv_heads=8, head_dim=128),
        "llama-3-70b": ModelShape(layers=80, kv_heads=8, head_dim=128),
        "qwen3-8b": ModelShape(layers=36, kv_heads=8, head_dim=128),
        "qwen3-32b": ModelShape(layers=64, kv_heads=8, head_dim=128),
        # MLA keeps one latent of 512 elements and a rotary key of 64 for all heads.
        "deepseek-v3": ModelShape(layers=61, kv_heads=1, head_dim=512 + 64, planes=1),
        # Every layer counts as full attention, the sliding-window ones too.
        "gpt-oss-20b": ModelShape(layers=24, kv_heads=8, head_dim=64),
        "gpt-oss-120b": ModelShape(layers=36, kv_heads=8, head_dim=64),
    }
)


@dataclass(frozen=True)
class BlockLayout:
    """The shape of one block of ``tokens_per_block`` tokens, in the device tier and in the host tier.

    Parameters
    ----------
    layers, kv_heads, head_dim, tokens_per_block : int
        Extents, each at least 1.
    dtype : str, dtype or scalar type, default "float16"
        A NumPy integer, float or bool type of 1, 2, 4 or 8 bytes in native byte order, its name, or one of
        ``bfloat16``, ``float8_e4m3fn``, ``float8_e4m3fnuz``, ``float8_e5m2``, ``float8_e5m2fnuz``, ``float8_e8m0fnu``,
        which are stored as ``uint16`` or ``uint8``. The attribute holds the canonical name.
    planes : int, default 2
        2 for K and V, 1 for a single plane (MLA).
    order : {"layer_first", "block_first"}, default "layer_first"
        The axes of the device tier. ``"layer_first"`` is ``[layers, planes, blocks, ...]``, ``"block_first"`` is
        ``[blocks, layers, planes, ...]``. The host tier is always block first, so that each of its blocks is
        contiguous.
    tokens : {"NHD", "HND"}, default "NHD"
        The axes inside a block, in both tiers. ``"NHD"`` is ``[tokens, heads, head_dim]``, ``"HND"`` is
        ``[heads, tokens, head_dim]``.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it.

    Notes
    -----
    Immutable, hashable, and safe to share between threads.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=32, kv_heads=8, head_dim=128, tokens_per_block=16, dtype="bfloat16")
    >>> layout.block_bytes, layout.device_shape(100), layout.host_shape(100)
    (2097152, (32, 2, 100, 16, 8, 128), (100, 32, 2, 16, 8, 128))
    >>> layout == kvpool.BlockLayout.for_model("llama-3-8b", tokens_per_block=16)
    True
    """

    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: ElementType = "float16"
    planes: int = 2
    order: BlockOrder = "layer_first"
    tokens: TokenOrder = "NHD"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tokens_per_block"):
            object.__setattr__(self, name, integer_argument(name, getattr(self, name), 1, _EXTENT_MAX))
        object.__setattr__(self, "planes", integer_argument("planes", self.planes, 1, 2))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "order", choice_argument("order", self.order, get_args(BlockOrder)))
        object.__setattr__(self, "tokens", choice_argument("tokens", self.tokens, get_args(TokenOrder)))

    @classmethod
    def for_model(
        cls,
        name: str,
        *,
        tokens_per_block: int,
        dtype: ElementType | None = None,
        order: BlockOrder = "layer_first",
        tokens: TokenOrder = "NHD",
    ) -> BlockLayout:
        """Return the layout of a published model.

        Parameters
        ----------
        name : str
            A key of ``PRESETS``.
        tokens_per_block : int
            At least 1.
        dtype : str, dtype or scalar type, optional
            By default the type in which the model was published.
        order : {"layer_first", "block_first"}, default "layer_first"
            As for ``BlockLayout``.
        tokens : {"NHD", "HND"}, default "NHD"
            As for ``BlockLayout``.

        Returns
        -------
        BlockLayout
            The layout of all layers of the model.

        Raises
        ------
        TypeError, ValueError
            For an argument of the wrong type or value; the message names it.
        """
        choice_argument("name", name, tuple(PRESETS))
        model = PRESETS[name]
        element_type = model.dtype if dtype is None else dtype
        return cls(
            model.layers, model.kv_heads, model.head_dim, tokens_per_block, element_type, model.planes, order, tokens
        )

    @classmethod
    def of_block_bytes(
        cls,
        block_bytes: int,
        tokens_per_block: int,
        *,
        dtype: ElementType = "uint8",
        order: BlockOrder = "layer_first",
        tokens: TokenOrder = "NHD",
    ) -> BlockLayout:
        """Return a layout whose block has exactly ``block_bytes`` bytes, for tests and replays.

        It has one head, and two layers and two planes if the bytes of a token can be divided that far.

        Parameters
        ----------
        block_bytes : int
            Bytes of a block, at least 1.
        tokens_per_block : int
            At least 1.
        dtype : str, dtype or scalar type, default "uint8"
            As for ``BlockLayout``.
        order : {"layer_first", "block_first"}, default "layer_first"
            As for ``BlockLayout``.
        tokens : {"NHD", "HND"}, default "NHD"
            As for ``BlockLayout``.

        Returns
        -------
        BlockLayout
            The layout.

        Raises
        ------
        TypeError, ValueError
            For an argument of the wrong type or value, and if ``block_bytes`` is not a whole number of elements for
            each token.
        """
        block_bytes = integer_argument("block_bytes", block_bytes, 1, 2**62)
        tokens_per_block = integer_argument("tokens_per_block", tokens_per_block, 1, _EXTENT_MAX)
        name = _dtype_name(dtype)
        elements, rest = divmod(block_bytes, tokens_per_block * _storage_dtype(name).itemsize)
        if rest:
            raise ValueError(
                f"block_bytes: expected a multiple of tokens_per_block={tokens_per_block} elements of {name}, got "
                f"{block_bytes}"
            )
        layers = 2 if elements % 2 == 0 else 1
        planes = 2 if elements % 4 == 0 else 1
        return cls(layers, 1, elements // (layers * planes), tokens_per_block, name, planes, order, tokens)

    @property
    def dtype_name(self) -> str:
        """Canonical name of the element type."""
        return str(self.dtype)

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The NumPy type of the pool's arrays: the element type itself, or an unsigned integer of its width."""
        return _storage_dtype(self.dtype_name)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.storage_dtype.itemsize

    @property
    def segment_bytes(self) -> int:
        """Bytes of one block in one layer and plane. They are contiguous in every layout."""
        return self.tokens_per_block * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and planes."""
        return self.layers * self.planes * self.segment_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers and planes."""
        return self.block_bytes // self.tokens_per_block

    def axes(self, tier: Tier) -> str:
        """Return the axes of a tier, outermost first.

        Parameters
        ----------
        tier : {"device", "host"}
            The tier.

        Returns
        -------
        str
            Six letters: L is layers, P planes, B blocks, T tokens, H heads, D elements.
        """
        outer = "LPB" if tier == "device" and self.order == "layer_first" else "BLP"
        return outer + ("THD" if self.tokens == "NHD" else "HTD")

    def device_shape(self, blocks: int) -> tuple[int, ...]:
        """Return the shape of a device tier.

        Parameters
        ----------
        blocks : int
            Number of blocks, 0 or more.

        Returns
        -------
        tuple of int
            Extents in elements, in the order of ``axes("device")``.
        """
        return self.tier_shape("device", blocks)

    def host_shape(self, blocks: int) -> tuple[int, ...]:
        """Return the shape of a host tier.

        Parameters
        ----------
        blocks : int
            Number of blocks, 0 or more.

        Returns
        -------
        tuple of int
            Extents in elements, in the order of ``axes("host")``.
        """
        return self.tier_shape("host", blocks)

    def tier_shape(self, tier: Tier, blocks: int) -> tuple[int, ...]:
        """Return ``device_shape`` or ``host_shape``, by the name of the tier.

        Parameters
        ----------
        tier : {"device", "host"}
            The tier.
        blocks : int
            Number of blocks, 0 or more.

        Returns
        -------
        tuple of int
            Extents in elements, in the order of ``axes(tier)``.
        """
        blocks = integer_argument("blocks", blocks, 0, _EXTENT_MAX)
        extents = self.layers, self.planes, blocks, self.tokens_per_block, self.kv_heads, self.head_dim
        return tuple(extents["LPBTHD".index(axis)] for axis in self.axes(tier))

    def device_strides(self, blocks: int) -> BlockStrides:
        """Return the strides of a device tier.

        Parameters
        ----------
        blocks : int
            Number of blocks, 0 or more.

        Returns
        -------
        BlockStrides
            In bytes.
        """
        return self._strides("device", blocks)

    def host_strides(self, blocks: int) -> BlockStrides:
        """Return the strides of a host tier.

        Parameters
        ----------
        blocks : int
            Number of blocks, 0 or more.

        Returns
        -------
        BlockStrides
            In bytes.
        """
        return self._strides("host", blocks)

    def _strides(self, tier: Tier, blocks: int) -> BlockStrides:
        shape, axes = self.tier_shape(tier, blocks), self.axes(tier)
        return BlockStrides(*(self.itemsize * math.prod(shape[axes.index(axis) + 1 :]) for axis in "BLPTH"))

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify what a host block holds.

        They are equal for two layouts exactly if a host block of one can be read as a block of the other.
        """
        shape = self.layers, self.planes, self.kv_heads, self.head_dim, self.tokens_per_block
        parts = *shape, self.dtype_name, self.tokens
        return hashlib.blake2b(repr(("kvpool host block", 1, *parts)).encode(), digest_size=16).hexdigest()


def integer_argument(name: str, value: Any, low: int, high: int) -> int:
    """The argument ``name`` as an int within ``[low, high]``. Raises TypeError (for bools and floats too) or
    ValueError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got {value!r:.80}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r:.80}") from None
    if not low <= number <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {number}")
    return number


def choice_argument(name: str, value: object, accepted: tuple[Word, ...]) -> Word:
    """The argument ``name`` as one of the accepted strings. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(accepted)}, got {value!r:.80}")
    text = str.__str__(value)
    if text not in accepted:
        raise ValueError(f"{name}: expected one of {', '.join(accepted)}, got {text!r:.80}")
    return accepted[accepted.index(text)]


def _dtype_name(dtype: Any) -> str:
    """The canonical name of an element type. It may be given as a name, a NumPy type or scalar class, or another
    package's dtype."""
    accepted = f"a NumPy integer, float or bool of 1, 2, 4 or 8 bytes, or one of {', '.join(_STORED_AS)}"
    if isinstance(dtype, str) and dtype in _STORED_AS:
        return dtype
    # PyTorch's types are not NumPy types. Their text is the package and the name: torch.bfloat16.
    package, _, type_name = str(dtype).rpartition(".")
    if package.isidentifier() and hasattr(dtype, "itemsize") and not isinstance(dtype, (str, type, np.dtype)):
        return _dtype_name(type_name)
    # np.dtype(None) is float64, which nobody means.
    if dtype is None:
        raise TypeError(f"dtype: expected {accepted}, got None")
    try:
        element_type = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        error = ValueError if isinstance(dtype, str) else TypeError
        raise error(f"dtype: expected {accepted}, got {dtype!r:.80}") from None
    if element_type.name in _STORED_AS:
        return element_type.name
    if element_type.kind not in "biuf" or element_type.itemsize not in (1, 2, 4, 8) or not element_type.isnative:
        raise ValueError(f"dtype: expected {accepted}, in native byte order, got {dtype!r:.80}")
    return element_type.name


def _storage_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(_STORED_AS.get(name, name))


class PoolIds:
    """The numbering of one pool. Immutable.

    ``edges`` int64[2 * groups + 1] has the first pool id of the device blocks of each group, then that of the host
    blocks of each group, and the end. ``shifts`` int64[2 * groups] is added to a pool id between two edges to make it
    an id of its group.
    """

    def __init__(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        counts = np.array([device_blocks, host_blocks], np.int64)
        self.groups, self.device_blocks, self.blocks = counts.shape[1], int(counts[0].sum()), int(counts.sum())
        self.edges: Int64s = np.concatenate([[0], np.cumsum(counts)])
        self.shifts: Int64s = np.concatenate([np.zeros_like(counts[0]), counts[0]]) - self.edges[:-1]

    def place(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """The group of each block, and the block's id there. The ids must be of this pool."""
        if self.groups == 1:
            return np.zeros_like(ids), ids
        columns = np.searchsorted(self.edges, ids, "right") - 1
        return columns % self.groups, ids + self.shifts[columns]

    def of(self, group: int, blocks: Int64s) -> Int64s:
        """The pool ids of blocks of a group: the reverse of ``place``."""
        host = blocks >= self.edges[group + 1] - self.edges[group]
        ids: Int64s = blocks - self.shifts[group + host * self.groups]
        return ids

    def each(self, of_groups: Any) -> Array:
        """For each block what its group has, [blocks], of one number for each group."""
        return np.tile(of_groups, 2).repeat(np.diff(self.edges))

    def first(self, group: int) -> tuple[int, int]:
        """The pool ids of the first device block and of the first host block of a group."""
        return int(self.edges[group]), int(self.edges[self.groups + group])
