"""Stands in for torchvision. SGLang imports it for images, and it has no build for the PyTorch of these tests."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

TOP = "torchvision"


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose members are mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == TOP else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__file__ = [], spec, spec.name, None
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """From here on, torchvision can be imported. Transformers has looked for it before, and not found it."""
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoProcessor  # noqa: F401

    sys.meta_path.append(_Absent())
