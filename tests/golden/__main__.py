"""``python -m tests.golden [CASE...]`` compares cases (default: all) with ``digests.json``; ``--write`` makes the file
anew and says which have changed; ``--show CASE`` prints the lines of one."""

from __future__ import annotations

import argparse
import json
import sys

from tests.golden.cases import CASES, FILE, changed, read


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="such as 'window on sim, seed 3'")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true")
    what.add_argument("--show", action="store_true")
    options = parser.parse_args(arguments)
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"case: expected one of {'; '.join(CASES)}, got {unknown[0]!r}")
    chosen, known = options.cases or list(CASES), read()
    if options.show:
        for case in chosen:
            print(*CASES[case]().lines, sep="\n")
        return 0
    digests = {case: CASES[case]().digest for case in chosen}
    if not options.write:
        print(changed(digests, known) or f"{len(digests)} cases are as they were")
        return int(bool(changed(digests, known)))
    after = {case: (known | digests)[case] for case in CASES if case in known | digests}
    for case in {**known, **after}:
        if known.get(case) != after.get(case):
            print(f"{'new' if case not in known else 'gone' if case not in after else 'changed'}: {case}")
    FILE.write_text(json.dumps(after, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
