"""The public surface: each public name has a precise signature and a numpydoc docstring.

Public is what ``kvpool.__all__`` or a page of docs/reference/ names, with the public methods and properties of its
class. ``python -m tests.house.test_surface ROOM`` prints what is wrong in a room.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvpool

numpydoc = pytest.importorskip("numpydoc")

from numpydoc.docscrape import get_doc_object  # noqa: E402
from numpydoc.validate import Validator, validate  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DONE_ROOMS = (
    "common",
    "device",
    "errors",
    "hostcache",
    "integrations",
    "opening",
    "pool",
    "remote",
    "storage",
    "tools",
)
"""Rooms whose public names all pass."""
CODES = {
    *("GL03", "GL06", "GL07", "GL08", "SS02", "SS03", "SS05", "SS06", "YD01"),
    *("PR01", "PR02", "PR03", "PR04", "PR05", "PR06", "PR07", "PR08", "PR09", "PR10"),
    *("RT01", "RT02", "RT03", "RT04", "RT05"),
}
"""Findings of ``numpydoc.validate`` that count: sections, the summary, each parameter, results."""
KEPT = {"PagedKV.owner", "StridedArray.owner", "Stream.owner", "Table.owner"}
"""What is only kept alive may be any object."""


class Public(NamedTuple):
    """A public name, and the object that it names."""

    name: str
    thing: Any

    @property
    def room(self) -> str:
        return str(self.thing.__module__).partition(".")[2].partition(".")[0]


def named_in_the_reference() -> dict[str, set[str]]:
    """The names that the pages list, and which members of each they exclude."""
    named: dict[str, set[str]] = {f"kvpool.{name}": set() for name in kvpool.__all__ if not name.startswith("_")}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        name = ""
        for line in re.sub(r",\n\s+", ", ", page.read_text(encoding="utf-8")).splitlines():
            if match := re.match(r"\.\. auto(?:class|exception|function)::\s+([\w.]+)", line):
                name = match[1]
                named.setdefault(name, set())
            elif match := re.match(r"\s+:(exclude|no)-members:\s*(.*)", line):
                named[name] |= {word.strip() for word in match[2].split(",")} if match[1] == "exclude" else {"*"}
    return named


def results() -> Iterator[type]:
    """The classes that only calls of the package make: the reference has them as ``autoclass:: kvpool.Name()``."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"\.\. autoclass::\s+([\w.]+)\(\)", page.read_text(encoding="utf-8")):
            module, _, last = name.rpartition(".")
            with contextlib.suppress(ImportError):  # a package that an extra installs
                yield getattr(importlib.import_module(module), last)


RESULTS = set(results())


def is_record(cls: type) -> bool:
    """Whether the fields of a class are what its constructor takes."""
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")


def members_of(name: str, cls: type, excluded: set[str]) -> Iterator[tuple[str, Any]]:
    """The public functions and properties of a class and of its bases in the package, each where it is documented."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("kvpool")]
    seen = {*excluded, *getattr(cls, "_fields", ())}
    for base in bases:
        for member in vars(base):
            if member.startswith("_") or member in seen:
                continue
            versions = [vars(each)[member] for each in bases if member in vars(each)]
            things = [getattr(each, "__func__", each) for each in versions]
            if not isinstance(things[0], property) and not inspect.isfunction(things[0]):
                continue
            seen.add(member)
            yield f"{name}.{member}", next((thing for thing in things if thing.__doc__), things[0])


def public_in(room: str) -> list[Public]:
    """The public names of a room: functions, classes, and their members."""
    found: dict[int, Public] = {}
    for name, excluded in named_in_the_reference().items():
        module, _, last = name.rpartition(".")
        try:
            thing = getattr(importlib.import_module(module), last)
        except ImportError:  # a package that an extra installs
            continue
        public = Public(name, thing)
        if public.room != room or id(thing) in found:
            continue
        found[id(thing)] = public
        if inspect.isclass(thing):
            for member, value in members_of(name, thing, excluded) if "*" not in excluded else ():
                found.setdefault(id(value), Public(member, value))
    return list(found.values())


# ----------------------------------------
# Signatures.


def vague(annotation: Any, scope: Mapping[str, Any]) -> bool:
    """Whether an annotation is or holds ``Any`` or ``object``. NumPy's own types may: ``NDArray[Any]``."""
    if annotation is Any or annotation is object:
        return True
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return vague_text(ast.parse(annotation, mode="eval").body, scope)
    if (typing.get_origin(annotation) or annotation) in (np.ndarray, np.dtype):
        return False
    return any(
        vague(part, scope)
        for argument in typing.get_args(annotation)
        for part in (argument if isinstance(argument, list) else [argument])
        if not isinstance(part, str)
    )


def vague_text(node: ast.AST, scope: Mapping[str, Any]) -> bool:
    """The same, of the source of an annotation."""
    if isinstance(node, ast.Subscript):
        if ast.unparse(node.value).partition(".")[0] in ("np", "npt"):
            return False
        if ast.unparse(node.value) == "Literal":
            return False
    if isinstance(node, ast.Attribute):
        return node.attr == "Any"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return vague(node.value, scope)
    if isinstance(node, ast.Name):
        alias = scope.get(node.id)
        return node.id in ("Any", "object") or (not inspect.isclass(alias) and vague(alias, scope))
    return any(vague_text(child, scope) for child in ast.iter_child_nodes(node))


def annotations_of(thing: Any) -> dict[str, Any]:
    """The annotations of what a caller passes, reads and gets."""
    if isinstance(thing, property):
        return {"return": thing.fget.__annotations__.get("return")}
    if not inspect.isclass(thing):
        return dict(thing.__annotations__)
    fields = {name: value for name, value in vars(thing).get("__annotations__", {}).items() if name[0] != "_"}
    return fields if is_record(thing) else {**fields, **getattr(thing.__init__, "__annotations__", {})}


def wrong_types(public: Public) -> list[str]:
    thing = public.thing.fget if isinstance(public.thing, property) else public.thing
    scope = vars(sys.modules[thing.__module__])
    return [
        f"{name}: expected a precise type, got {annotation}"
        for name, annotation in annotations_of(public.thing).items()
        if f"{public.name.rpartition('.')[2]}.{name}" not in KEPT and vague(annotation, scope)
    ]


# ----------------------------------------
# Docstrings.


class Docstring(Validator):  # type: ignore[misc, unused-ignore]
    """A docstring as numpydoc reads it. A record documents its fields as Parameters or as Attributes."""

    def __init__(self, obj_name: Any) -> None:
        super().__init__(get_doc_object(obj_name, config={"show_class_members": False}))

    @property
    def signature_parameters(self) -> tuple[str, ...]:
        if inspect.isclass(self.obj) and (issubclass(self.obj, (enum.Enum, BaseException)) or self.obj in RESULTS):
            return tuple(self.doc_parameters)
        return tuple(super().signature_parameters)

    def _doc_parameters(self, sections: list[str]) -> dict[str, Any]:
        if inspect.isclass(self.obj) and is_record(self.obj):
            sections = [*sections, "Attributes"]
        return dict(super()._doc_parameters(sections))

    def names_in(self, section: str) -> set[str]:
        """The names that a section documents: as ``name : type``, or types alone."""
        return {
            name.strip()
            for entry in self.doc[section]
            for name in (entry.name or entry.type).replace(" or ", ", ").split(",")
        }


def raised_in(function: Callable[..., Any]) -> set[str]:
    """The exceptions that a function raises by name in its own lines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {ast.unparse(exc.func if isinstance(exc, ast.Call) else exc).rpartition(".")[2] for exc in raised}
    return {name for name in names if name[0].isupper()}


def is_shared(thing: Any) -> bool:
    """Whether threads can share an object of a class so that it matters: it has methods, and can change."""
    if not inspect.isclass(thing) or issubclass(thing, (BaseException, enum.Enum, tuple)):
        return False
    if dataclasses.is_dataclass(thing) and thing.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return False
    return any(inspect.isfunction(member) for _, member in members_of("", thing, set()))


def wrong_docstring(public: Public) -> list[str]:
    findings = [f"{code} {text}" for code, text in validate(public.thing, Docstring)["errors"] if code in CODES]
    docstring = Docstring(public.thing)
    function = public.thing.fget if isinstance(public.thing, property) else public.thing
    if inspect.isfunction(function):
        missing = raised_in(function) - docstring.names_in("Raises")
        findings += [f"Raises: expected {name}, which the function raises" for name in sorted(missing)]
    if is_shared(public.thing) and "thread" not in " ".join(docstring.doc["Notes"]).lower():
        findings.append("Notes: expected a sentence about threads")
    return findings


CHECKED = [pytest.param(public, id=public.name) for room in DONE_ROOMS for public in public_in(room)]


@pytest.mark.parametrize("public", CHECKED)
def test_no_signature_takes_or_returns_anything(public: Public) -> None:
    assert not wrong_types(public)


@pytest.mark.parametrize("public", CHECKED)
def test_each_public_name_has_a_numpydoc_docstring(public: Public) -> None:
    assert not wrong_docstring(public)


def test_a_vague_signature_and_a_docstring_without_sections_are_found() -> None:
    def vague_function(items: dict[str, Any], flag: object = None) -> int:
        """does things"""
        if flag is None:
            raise ValueError
        raise KeyError(items)

    public = Public("vague_function", vague_function)
    assert [text.partition(":")[0] for text in wrong_types(public)] == ["items", "flag"]
    codes = {text.partition(" ")[0] for text in wrong_docstring(public)}
    assert codes == {"SS02", "SS03", "SS05", "PR01", "Raises:"}


if __name__ == "__main__":
    for public in public_in(sys.argv[1]):
        for finding in (*wrong_types(public), *wrong_docstring(public)):
            print(f"{public.name}: {finding}")
