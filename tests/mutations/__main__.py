"""``python -m tests.mutations [NAME ...] [--all] [--sample N] [--seed S] [--list]``: take rules out, and see which
tests notice."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from tests.mutations import MUTATIONS
from tests.mutations.bench import bench
from tests.mutations.mutation import Mutation


def chosen(names: Sequence[str], every: bool, sample: int, seed: int) -> list[Mutation]:
    """The mutations that a command line means. Those that need machine code are not drawn: each compiles for a
    minute."""
    if every:
        return [*MUTATIONS.values()]
    quick = sorted(name for name, mutation in MUTATIONS.items() if not mutation.compiled)
    return [MUTATIONS[name] for name in [*names, *random.Random(seed).sample(quick, min(sample, len(quick)))]]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every mutation was killed, 1 if one lived, 2 for a command line that means none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description="Take rules out of a copy, and see which tests notice."
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every mutation: minutes")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many, drawn with --seed")
    parser.add_argument("--seed", type=int, default=None, metavar="S")
    parser.add_argument("--list", action="store_true", help="names and harm of all")
    parser.add_argument("--verbose", action="store_true", help="what pytest said of each")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MUTATIONS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; --list names all")
    if options.list:
        for mutation in MUTATIONS.values():
            print(f"{mutation.name}: {mutation.harm}")
        return 0
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    some = chosen(options.names, options.all, options.sample, seed)
    if not some:
        parser.error("name mutations, or --all, --sample N or --list")
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


if __name__ == "__main__":
    sys.exit(main())
