"""Stores as texts, for command lines and configuration files: ``disk:/path?capacity=100GiB``."""

from __future__ import annotations

import inspect
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from kvpool.common.arguments import list_argument, text_argument
from kvpool.common.sizes import parse_size
from kvpool.errors import did_you_mean
from kvpool.storage.store import Store, store_argument

_KINDS = {
    "disk": ("kvpool.storage.backends.disk", "DiskStore"),
    "memory": ("kvpool.storage.backends.memory", "MemoryStore"),
    "mooncake": ("kvpool.storage.backends.mooncake.mooncake_store", "MooncakeStore"),
    "peer": ("kvpool.storage.backends.peer.peer_store", "PeerStore"),
    "s3": ("kvpool.storage.backends.s3", "S3Store"),
}
_EVICTING = ("disk", "memory")
"""what evicts by itself, and takes a policy"""
_PLACES = {"disk": "PATH", "mooncake": "HOST:PORT", "peer": "tcp://HOST:PORT", "s3": "//BUCKET/PREFIX"}
"""the place that these kinds need, after the colon"""
_OBJECTS = ("clock", "client", "secret", "system", "token", "transform")
"""parameters that cannot be given as text, or must not appear in one"""
_COUNT: tuple[Callable[[str], float], str, str] = int, "a number", "[0-9]{1,20}"
_NUMBERS = dict.fromkeys(("connections", "index_blocks", "threads"), _COUNT)
_NUMBERS["timeout"] = float, "seconds", r"[0-9]{1,9}(\.[0-9]{0,9})?"
"""Options that are numbers: their type, its name in messages, and how they are written."""


def open_store(text: str, **names: str | int | None) -> Store:
    """Make the store that a text names: ``kind:place?option=value&...``.

    Kinds are ``disk:PATH``, ``mooncake:HOST:PORT``, ``peer:tcp://HOST:PORT``, ``s3://BUCKET/PREFIX`` and ``memory:``;
    and ``package.module.Class:PLACE`` for a class of your own, which is imported. Options are the keyword arguments of
    that class, as texts; ``capacity`` and ``segment`` are bytes, such as ``64GiB``, and ``timeout`` is in seconds.
    ``name`` is the store's name in figures and logs.

    Parameters
    ----------
    text : str
        The text. ``{host}`` in it stands for the name of this machine, and ``{name}`` for the value of that one of
        ``names``, with "-" in the place of characters that file names do not have.
    **names : str or int
        The values. One that is None or "" cannot be used.

    Returns
    -------
    Store
        The store, which is not open yet.

    Raises
    ------
    TypeError, ValueError
        For a text that names no store, or has a wrong option.
    ImportError
        Without the extra or the module, which it names.

    Examples
    --------
    >>> from kvpool.storage.urls import open_store
    >>> open_store("memory:?capacity=1MiB").name
    'memory'
    """
    kind, colon, rest = text_argument("store", text).partition(":")
    if not colon or (kind not in _KINDS and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", kind)):
        accepted = ", ".join(f"{name}:..." for name in (*_KINDS, "package.module.Class"))
        meant = f"; did you mean disk:{text:.80}?" if str(text).startswith(("/", ".", "~")) else ""
        raise ValueError(f"store: expected {accepted}{meant}, got {text!r:.80}")
    place, _, query = _filled(rest, {"host": platform.node(), **names}).partition("?")
    try:
        options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ValueError(f"store: expected option=value, joined by '&', after '?', got {text!r:.80}") from None
    # A secret would be in logs and in lists of processes. The message does not have the text.
    if any(re.search("secret|token|password", name.lower()) and not name.endswith("_file") for name in options):
        raise ValueError(
            "secret: expected secret_file=, or another ..._file= with the path of a file, got it in the text"
        )
    if "policy" in options and kind in _KINDS and kind not in _EVICTING:
        accepted = ", ".join(f"{name}:..." for name in _EVICTING)
        raise ValueError(
            f"store: expected policy= in {accepted} alone, since others choose what goes, got {text!r:.80}"
        )
    own_name = options.pop("name", None) if kind in _KINDS else None
    for name, value in options.items():
        if name in ("capacity", "segment"):
            options[name] = bytes_argument(name, value)
        elif name in _NUMBERS:
            number, what, pattern = _NUMBERS[name]
            if not re.fullmatch(pattern, value):
                raise ValueError(f"store.{name}: expected {what}, got {value!r:.80} in {text!r:.80}")
            options[name] = number(value)
    make = _class_of(kind)
    _check_options(kind, make, place, options)
    try:
        opened = make(*([place] if place else []), **options)
    except TypeError as error:
        raise ValueError(f"store: expected a text that can be opened, got {text!r:.80}: {error}") from None
    if own_name is not None:
        opened.name = own_name
    store = store_argument("store", opened)
    store.url = str(text)
    return store


def open_stores(stores: object) -> list[Store]:
    """The stores of a list that may have texts. Raises what ``open_store`` raises, with the place of the store in the
    message."""
    chosen, opened = list_argument("stores", stores), list[Store]()
    if not 1 <= len(chosen) <= 16:
        raise ValueError(f"stores: expected 1 to 16 stores, got {len(chosen)}")
    for place, store in enumerate(chosen):
        with naming(f"stores[{place}]"):
            new = open_store(store) if isinstance(store, str) else store
        opened.append(store_argument(f"stores[{place}]", new))
    return opened


def place_of(store: Store, place: int) -> str:
    """How a message names a store of a list."""
    return f"stores[{place}] ({store.url or store!r:.200})"


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Begin the message of an exception that leaves the block with ``where``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.strerror is not None:
            error.strerror = f"{where}: {error.strerror}"
        elif isinstance(error, ImportError):
            error.msg = f"{where}: {error.msg}"
        elif error.args:
            error.args = (f"{where}: {error.args[0]}", *error.args[1:])
        raise


def _check_options(kind: str, make: Any, place: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that the class does not take as a text, or for a place or option that is
    missing."""
    try:
        first, *others = inspect.signature(make).parameters.values()
    except ValueError:
        return  # a class of somebody else's that shows no signature
    if kind in _PLACES and not place and first.default is first.empty:
        raise ValueError(f"store: expected {kind}:{_PLACES[kind]}, got {kind}:")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in others):
        return
    parameters = others if place else [first, *others]
    known = sorted(p.name for p in parameters if p.name not in _OBJECTS)
    for name in options:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"store: expected options {', '.join(known)} for {kind!r}, got {name!r:.80}{meant}")
    required = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if missing := required - options.keys():
        raise ValueError(f"store: expected ?{min(missing)}=... for {kind!r}, got {kind}:{place:.80}")


def _filled(text: str, names: Mapping[str, str | int | None]) -> str:
    """A text with the values of the names in braces. Raises ValueError for a name that has none."""

    def value(match: re.Match[str]) -> str:
        if names.get(match[1]) in (None, ""):
            accepted = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"store: expected some of {accepted}, got {match[0]:.80} in {text!r:.80}")
        return re.sub(r"[^\w.-]", "-", str(names[match[1]]))

    return re.sub(r"\{(.*?)\}", value, text)


def _class_of(kind: str) -> Any:
    """The class of a kind of stores. Raises ImportError, and ValueError for anything but a ``Store``."""
    if kind in _KINDS:
        module, name = _KINDS[kind]
        return getattr(import_module(module), name)
    module, _, name = kind.rpartition(".")
    try:
        store_class = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ImportError(f"store: expected a class that can be imported, got {kind!r:.80}: {error}") from error
    if not isinstance(store_class, type) or not issubclass(store_class, Store):
        raise ValueError(f"store: expected a subclass of Store, got {store_class!r:.80} for {kind!r:.80}")
    return store_class


def bytes_argument(name: str, value: object) -> int:
    """A size in bytes: an integer, or a text such as ``"64GiB"``. Raises ValueError."""
    nbytes = parse_size(value)
    if nbytes is None:
        raise ValueError(f"{name}: expected bytes, such as 1048576 or 64GiB, got {value!r:.80}")
    return nbytes
