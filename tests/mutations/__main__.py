"""``python -m tests.mutations [NAME ...] [--all] [--sample N] [--seed S] [--list]``: take rules out, and see which
tests notice. ``--check`` and ``--reanchor`` are for those whose code has moved."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.anchors import Package
from tests.mutations.bench import bench
from tests.mutations.mutation import ROOT, Mutation


def chosen(names: Sequence[str], every: bool, sample: int, seed: int) -> list[Mutation]:
    """The mutations that a command line means."""
    if every:
        return [*MUTATIONS.values()]
    drawn = random.Random(seed).sample(sorted(MUTATIONS), min(sample, len(MUTATIONS)))
    return [MUTATIONS[name] for name in [*names, *drawn]]


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
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MUTATIONS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; --list names all")
    if options.list:
        for mutation in MUTATIONS.values():
            print(f"{mutation.name}: {mutation.harm}")
        return 0
    if options.check or options.reanchor:
        lost = unfit(Package(ROOT / "kvpool"), MUTATIONS.values(), Path(__file__).parent if options.reanchor else None)
        for mutation in lost:
            print(f"LOST {mutation.name} in {mutation.function}: {mutation.harm}", *mutation.tests, sep="\n    ")
        return 1 if lost else 0
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    some = chosen(options.names, options.all, options.sample, seed)
    if not some:
        parser.error("name mutations, or --all, --sample N, --list, --check or --reanchor")
    if options.sample:
        print(f"seed {seed}")
    return run(some, options.verbose)


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
