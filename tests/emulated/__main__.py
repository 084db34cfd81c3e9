"""``python -m tests.emulated build``, ``status``, or ``run COMMAND...``: a command over the emulated driver."""

from __future__ import annotations

import os
import sys

from tests.emulated import build


def main(arguments: list[str]) -> int:
    if arguments == ["build"]:
        try:
            print(f"built: {build.build()}")
        except build.BuildError as error:
            print(f"cannot build the emulated driver: {error}", file=sys.stderr)
            return 1
        return 0
    if arguments == ["status"]:
        print(f"{build.place()}: {'built' if build.built() else 'not built'}")
        return 0 if build.built() else 1
    if arguments[:1] == ["run"] and len(arguments) > 1:
        if not build.built():
            print("not built: python -m tests.emulated build", file=sys.stderr)
            return 1
        os.execvpe(arguments[1], arguments[1:], {**os.environ, **build.environment()})
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
