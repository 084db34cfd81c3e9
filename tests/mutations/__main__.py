"""``python -m tests.mutations [NAME ...] [--all] [--sample N] [--seed S] [--list]``: take rules out, and see which
tests notice. ``--check`` and ``--reanchor`` are for those whose code has moved.

``python -m tests.mutations --generated [NAME ...] [--room FOLDER] [--tests PATH ...] [--all] [--sample N] [--seed S]``:
the same with mutants that are made by rule."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.mutations import MUTATIONS
from tests.mutations.anchors import Package
from tests.mutations.bench import bench
from tests.mutations.generated import ROOMS, TESTS, Reach, killer, mutants
from tests.mutations.mutation import ROOT, Mutation

Change = TypeVar("Change")


def chosen(known: Mapping[str, Change], options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Change]:
    """Those that a command line names or draws; it ends with an error if there are none."""
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; --list names all")
    names = sorted(known)
    if not options.all:
        seed = random.randrange(1 << 32) if options.seed is None else options.seed
        if options.sample:
            print(f"seed {seed}")
        names = [*options.names, *random.Random(seed).sample(names, min(options.sample, len(names)))]
    if not names:
        parser.error("name some, or --all, --sample N or --list")
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every mutation was killed or fits, 1 if one lived or does not, 2 for a command line that means none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description="Take rules out of a copy, and see which tests notice."
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every mutation: minutes")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many, drawn with --seed")
    parser.add_argument("--seed", type=int, default=None, metavar="S")
    parser.add_argument("--list", action="store_true", help="names and harm of all")
    parser.add_argument("--check", action="store_true", help="those that do not fit their functions")
    parser.add_argument("--reanchor", action="store_true", help="write down where the code of these is now")
    parser.add_argument("--verbose", action="store_true", help="what pytest said of each")
    parser.add_argument("--generated", action="store_true", help="of the mutants that are made by rule")
    parser.add_argument("--room", action="append", metavar="FOLDER", help="those of a folder or file of the package")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="the tests that may kill them")
    options = parser.parse_args(arguments)
    if options.generated:
        return run_generated(options, parser)
    if options.list:
        for mutation in MUTATIONS.values():
            print(f"{mutation.name}: {mutation.harm}")
        return 0
    if options.check or options.reanchor:
        lost = unfit(Package(ROOT / "kvpool"), MUTATIONS.values(), Path(__file__).parent if options.reanchor else None)
        for mutation in lost:
            print(f"LOST {mutation.name} in {mutation.function}: {mutation.harm}", *mutation.tests, sep="\n    ")
        return 1 if lost else 0
    return run(chosen(MUTATIONS, options, parser), options.verbose)


def run(some: Sequence[Mutation], verbose: bool) -> int:
    """1 if one lived."""
    lived = 0
    with bench() as copy:
        copy.check(some)
        for mutation in some:
            verdict = copy.run(mutation)
            lived += bool(verdict.lived)
            print(f"{'LIVED' if verdict.lived else 'killed'} {mutation.name}", *verdict.lived, sep="\n    ", flush=True)
            if verbose:
                print(verdict.text)
    print(f"{len(some) - lived} of {len(some)} killed")
    return 1 if lived else 0


def run_generated(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Return 0 even if mutants live: they may change nothing that anybody sees."""
    with bench() as copy:
        known = {mutant.name: mutant for room in options.room or ROOMS for mutant in mutants(copy.package, room)}
        if options.list:
            print(*known.values(), sep="\n")
            return 0
        some = chosen(known, options, parser)
        reach, lived = Reach(copy, options.tests), 0
        for mutant in some:
            tests = reach.tests(mutant.place)
            test = killer(copy, mutant, tests)
            lived += not test
            print(f"killed {mutant} by {test}" if test else f"LIVED {mutant}, with {len(tests)} tests", flush=True)
    print(f"{len(some) - lived} of {len(some)} killed")
    return 0


def unfit(package: Package, mutations: Iterable[Mutation], folder: Path | None) -> list[Mutation]:
    """The mutations that fit no function. Those whose code is in another one are not among them if there is a folder of
    lists: it is written there."""
    lost = []
    for mutation in mutations:
        try:
            package.place(mutation)
        except ValueError:
            moved = package.anchored(mutation) if folder else None
            if folder is None or moved is None:
                lost.append(mutation)
                continue
            for path in folder.glob("*.py"):
                text = path.read_text(encoding="utf-8")
                name = rf'("{mutation.name}",\s*)"{re.escape(mutation.function)}"'
                changed = re.sub(name, rf'\g<1>"{moved.function}"', text)
                if changed != text:
                    path.write_text(changed, encoding="utf-8")
            print(f"{mutation.name}: {mutation.function} -> {moved.function}")
    return lost


if __name__ == "__main__":
    sys.exit(main())
