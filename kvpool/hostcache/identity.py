"""ModelIdentity: the model whose KV a host cache has. Keys of two models never agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from kvpool.common.arguments import text_argument
from kvpool.common.arrays.dlpack import TYPE_CODES
from kvpool.common.arrays.layout import BlockLayout

TEXT_MAX = 4096
# What a text names, if it names a type: kvpool's own names, and those that configurations of engines use.
_TYPES: dict[str, tuple[str, ...]] = {
    name: (name,) for name in (*"int8 int16 int32 int64 float16 float32 float64".split(), *TYPE_CODES)
}
_TYPES |= {"fp16": ("float16",), "half": ("float16",), "bf16": ("bfloat16",)}
_TYPES |= {"fp32": ("float32",), "float": ("float32",), "fp64": ("float64",), "double": ("float64",)}
_TYPES |= {"fp8_e4m3": ("float8_e4m3fn", "float8_e4m3fnuz"), "fp8_e5m2": ("float8_e5m2", "float8_e5m2fnuz")}
_TYPES["fp8"] = (*_TYPES["fp8_e4m3"], *_TYPES["fp8_e5m2"])
_BYTES = ("u", "i", "b")
"""Kinds of types in which a pool may keep elements that it has no name for."""


@dataclass(frozen=True)
class ModelIdentity:
    """The properties that two caches must share before one may use the KV of the other.

    Parameters
    ----------
    model : str
        Its name.
    revision : str
        The revision, or a digest, of its weights: new weights of the same shape give other KV.
    kv_dtype : str
        The type of the elements as they are kept, such as ``"bfloat16"`` or ``"fp8_e4m3"``.
    layout : str, BlockLayout or sequence of BlockLayout
        The global layout: all layers, all heads, tokens per block. Of BlockLayouts, the fingerprints are kept.
    hash_version : str
        How the engine makes its keys: its name, its version, its hash function and, where it has one, its seed.
    kv_scales : str, default ""
        Name or digest of the scales of the elements, if there are any.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not a text, is empty (except ``kv_scales``) or has more than 4,096 characters, and for a
        ``kv_dtype`` that none of the layouts has.

    Notes
    -----
    Immutable, hashable, picklable, and safe to share between threads.

    A cache or storage manager whose block layouts are known refuses an identity that contradicts them: with a
    ``kv_dtype`` that names another type, such as ``"float32"`` for blocks of float16, or with BlockLayouts that have
    another ``dtype`` or ``head_dim``, fewer heads and so on. Blocks of integers can hold any type of that size, and
    blocks of ``uint8`` any type at all. Texts without a meaning for kvpool, such as ``"as MLX has it"``, are not
    compared.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=16, tokens_per_block=16, dtype="bfloat16")
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "bfloat16", layout, "my-engine 1")
    >>> len(model.fingerprint)
    32
    """

    model: str
    revision: str
    kv_dtype: str
    layout: str | BlockLayout | Sequence[BlockLayout]
    hash_version: str
    kv_scales: str = ""
    # Class variables are not fields: two identities with the same texts are equal.
    layouts: ClassVar[tuple[BlockLayout, ...]] = ()
    """The BlockLayouts that ``layout`` was given as; none if it was a text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layouts", layouts_of(self.layout))
        if self.layouts:
            object.__setattr__(self, "layout", " ".join(layout.fingerprint for layout in self.layouts))
        for name in (field.name for field in fields(self)):
            text = text_argument(name, getattr(self, name))
            if not text and name != "kv_scales":
                raise ValueError(f"{name}: expected a text that identifies this model's KV, got ''")
            if len(text) > TEXT_MAX:
                raise ValueError(f"{name}: expected up to {TEXT_MAX} characters, got {len(text)}")
            object.__setattr__(self, name, text)
        check_identity(self, self.layouts)

    def __reduce__(self) -> tuple[Any, ...]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelIdentity, tuple({**own, "layout": self.layouts or self.layout}.values())

    @cached_property
    def content(self) -> bytes:
        """All fields, so that no two identities are alike."""
        return repr(("kvpool model identity", 1, *(getattr(self, field.name) for field in fields(self)))).encode()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits, which are equal for equal identities. It contains no secret."""
        return hashlib.blake2b(self.content, digest_size=16).hexdigest()


def identity_argument(identity: object) -> ModelIdentity:
    if not isinstance(identity, ModelIdentity):
        raise TypeError(f"identity: expected a ModelIdentity, got {identity!r:.80}")
    return identity


def check_identity(identity: ModelIdentity, layouts: Sequence[BlockLayout]) -> None:
    """Raise ValueError for an identity that contradicts the layouts of the blocks that its KV lies in."""
    if layouts and not any(_can_be(identity.kv_dtype, layout) for layout in layouts):
        types = " or ".join(sorted({layout.dtype_name for layout in layouts}))
        raise ValueError(f"identity.kv_dtype: expected {types}, as in the blocks, got {identity.kv_dtype!r:.80}")
    for layout in layouts:
        if identity.layouts and not any(_has_part(whole, layout) for whole in identity.layouts):
            raise ValueError(f"identity.layout: expected one that contains {layout}, got {identity.layouts[0]}")


def _can_be(kv_dtype: str, layout: BlockLayout) -> bool:
    """Whether elements of a type can lie in blocks of a layout."""
    names = _TYPES.get(kv_dtype.strip().lower().removeprefix("torch."), ())
    stored = layout.storage_dtype
    if not names or layout.dtype_name in names or layout.dtype_name == "uint8":
        return True
    sizes = {BlockLayout(1, 1, 1, 1, name).itemsize for name in names}
    return np.dtype(stored).kind in _BYTES and layout.dtype_name not in TYPE_CODES and stored.itemsize in sizes


def _has_part(whole: BlockLayout, part: BlockLayout) -> bool:
    """Whether blocks of a layout can hold a worker's share of the layers and heads of another layout."""
    same = all(
        getattr(whole, name) == getattr(part, name)
        for name in ("dtype", "head_dim", "tokens_per_block", "planes", "tokens")
    )
    return same and whole.layers >= part.layers and whole.kv_heads >= part.kv_heads


def layouts_of(layout: object) -> tuple[BlockLayout, ...]:
    """The layouts of an argument that is one or a list of them; none for anything else."""
    layouts = [layout] if isinstance(layout, BlockLayout) else layout
    if isinstance(layouts, (list, tuple)) and all(isinstance(part, BlockLayout) for part in layouts):
        return tuple(layouts)
    return ()
