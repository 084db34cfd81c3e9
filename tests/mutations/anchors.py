"""Where mutations are made. Code is found by what defines it and by its syntax tree, not by its file and its lines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations.mutation import Mutation


class Owner(NamedTuple):
    """The innermost function, class, constant or file with some code. What a function defines is a part of it.

    The last ``depth`` parts of ``name`` are in the file, and those before are modules. Definitions in what is ``open``
    are owners themselves.
    """

    file: Path
    name: tuple[str, ...]
    depth: int = 0
    open: bool = True

    def of(self, node: ast.AST) -> Owner:
        """Who owns a node, of which this is what it stands in."""
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name) if self.open:
                return Owner(self.file, (*self.name, name), self.depth + 1, isinstance(node, ast.ClassDef))
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)) if self.open:
                return Owner(self.file, (*self.name, name), self.depth + 1, False)
        return self


class Place(NamedTuple):
    """A field of a node of the tree; of a list, the nodes from ``start`` on."""

    owner: Owner
    parent: ast.AST
    field: str
    start: int

    def nodes(self) -> list[ast.AST]:
        """What stands there, to the end of the list."""
        value = getattr(self.parent, self.field)
        return value[self.start :] if isinstance(value, list) else [value]

    def code(self) -> ast.AST:
        """The first of the nodes; for an operator, the expression that it is in."""
        node = self.nodes()[0]
        return self.parent if isinstance(node, (ast.cmpop, ast.boolop)) else node


def places(node: ast.AST, owner: Owner, skipped: tuple[type[ast.AST], ...] = ()) -> Iterator[Place]:
    """All nodes below ``node``, which ``owner`` owns, in the order of the text. Nodes of the ``skipped`` types are left
    out, with all below them."""
    for field, value in ast.iter_fields(node):
        for start, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, skipped):
                inner = owner.of(child)
                yield Place(inner, node, field, start)
                yield from places(child, inner, skipped)


class Package:
    """The syntax trees of a package, and who owns what. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.trees: dict[Path, ast.Module] = {}
        self._places: dict[type, list[Place]] = defaultdict(list)
        for path in sorted(folder.rglob("*.py")):
            self.trees[path] = ast.parse(path.read_text(encoding="utf-8"))
            for place in places(self.trees[path], Owner(path, path.relative_to(folder).with_suffix("").parts)):
                self._places[type(place.nodes()[0])].append(place)

    def within(self, room: str) -> Iterator[Place]:
        """What is in the functions of a folder or a file, in the order of the text."""
        for path, tree in self.trees.items():
            module = path.relative_to(self._folder).with_suffix("").parts
            if f"{'/'.join(module)}/".startswith(f"{room}/"):
                functions = set()
                for place in places(tree, Owner(path, module), skipped=(ast.Raise, ast.Assert)):
                    if isinstance(place.nodes()[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
                        functions.add(place.owner)
                    elif place.owner in functions:
                        yield place

    def place(self, mutation: Mutation) -> Place:
        """Raises ValueError where what a mutation replaces does not stand in its function exactly once."""
        matches = self._found(mutation, mutation.function.split("."))
        if len(matches) != 1:
            raise ValueError(
                f"{mutation.name}: {mutation.function} has {len(matches)} times, and not once: {mutation.before!r}"
            )
        return matches[0]

    def applied(self, mutation: Mutation) -> tuple[Path, str]:
        """A file, and its text with the mutation made. Raises ValueError like ``place``."""
        before, after = mutation.code()
        return self.changed(self.place(mutation), len(before), after)

    def changed(self, place: Place, count: int, after: Sequence[ast.AST]) -> tuple[Path, str]:
        """A file, and its text with ``after`` in place of ``count`` nodes. The tree itself is as before."""
        owner, parent, field, start = place
        old = getattr(parent, field)
        if isinstance(old, list):
            setattr(parent, field, [*old[:start], *after, *old[start + count :]] or [ast.Pass()])
        else:
            setattr(parent, field, after[0])
        try:
            return owner.file, ast.unparse(self.trees[owner.file])
        finally:
            setattr(parent, field, old)

    def anchored(self, mutation: Mutation) -> Mutation | None:
        """The mutation in the function that now has its code: one whose name ends alike, else any. None where no
        function has it, or several have."""
        parts = mutation.function.split(".")
        for first in range(len(parts) + 1):
            matches = self._found(mutation, parts[first:])
            if len(matches) == 1:
                _, name, depth, _ = matches[0].owner
                endings = (name[-length:] for length in range(max(depth, 1), len(name) + 1))
                best = next((ending for ending in endings if len(self._found(mutation, ending)) == 1), name)
                return mutation._replace(function=".".join(best))
        return None

    def _found(self, mutation: Mutation, ending: Sequence[str]) -> list[Place]:
        """Where the code stands in what has such an ending of its name."""
        wanted = [ast.dump(node) for node in mutation.code()[0]]
        return [
            place
            for place in self._places[type(mutation.code()[0][0])]
            if place.owner.name[len(place.owner.name) - len(ending) :] == tuple(ending)
            and [ast.dump(node) for node in place.nodes()[: len(wanted)]] == wanted
        ]
