"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package. ``homes`` maps a module to the names that it defines,
    separated by spaces. Each of ``submodules`` is an attribute that ``dir`` does not list."""
    modules = {name: module for module, names in homes.items() for name in names.split()}
    parts = frozenset(submodules)

    def get(name: str) -> Any:
        if name in parts:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*modules, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, listed
