"""ModelIdentity: the model whose KV a host cache has. Keys of two models never agree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvpool.common.arguments import text_argument
from kvpool.common.arrays.layout import BlockLayout

TEXT_MAX = 4096


@dataclass(frozen=True)
class ModelIdentity:
    """What two caches must have in common before one may use the KV of the other.

    Parameters
    ----------
    model
        Its name.
    revision
        The revision, or a digest, of its weights: new weights of the same shape give other KV.
    kv_dtype
        The type of the elements as they are kept, such as ``"bfloat16"`` or ``"fp8_e4m3"``.
    layout
        The global layout: all layers, all heads, tokens per block. A text, or one or more BlockLayouts, of which the
        fingerprints are taken.
    hash_version
        How the engine makes its keys: its name, its version, its hash function and, where it has one, its seed.
    kv_scales
        Name or digest of the scales of the elements, if there are any.

    Raises
    ------
    TypeError, ValueError
        For an argument that is no text, is empty (but for ``kv_scales``) or has more than 4,096 characters.

    Notes
    -----
    Immutable, hashable, picklable, and safe to share between threads.
    """

    model: str
    revision: str
    kv_dtype: str
    layout: Any
    hash_version: str
    kv_scales: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", _layout_text(self.layout))
        for name in (field.name for field in fields(self)):
            text = text_argument(name, getattr(self, name))
            if not text and name != "kv_scales":
                raise ValueError(f"{name}='': accepted is what tells this model's KV apart from any other")
            if len(text) > TEXT_MAX:
                raise ValueError(f"{name} has {len(text)} characters: accepted are up to {TEXT_MAX}")
            object.__setattr__(self, name, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelIdentity, tuple(getattr(self, field.name) for field in fields(self))

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
        raise TypeError(f"identity={identity!r:.80}: accepted is a ModelIdentity")
    return identity


def _layout_text(layout: object) -> Any:
    """The text for layouts. Anything else is returned as it is."""
    layouts = [layout] if isinstance(layout, BlockLayout) else layout
    if isinstance(layouts, (list, tuple)) and layouts and all(isinstance(part, BlockLayout) for part in layouts):
        return " ".join(part.fingerprint for part in layouts)
    return layout
