"""``python -m tests.engines build``, ``status``, ``test [PYTEST ARGUMENTS]``, or ``run COMMAND...``, with a real vLLM;
``python -m tests.engines plugins ...`` with the code of SGLang and LMCache; ``python -m tests.engines torchless ...``
with mlx-lm and llama.cpp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.engines import build

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    named = {"plugins": build.PLUGINS, "torchless": build.TORCHLESS}.get("".join(arguments[:1]))
    wheels, command = (build.VLLM, arguments) if named is None else (named, arguments[1:])
    verb, rest = command[:1], command[1:]
    if verb == ["build"] and not rest:
        try:
            print(f"built: {build.build(wheels)}")
        except build.BuildError as error:
            print(f"cannot make the environment of the engines: {error}", file=sys.stderr)
            return 1
        return 0
    if verb == ["status"] and not rest:
        print(f"{build.place(wheels)}: {'built' if build.built(wheels) else 'not built'}")
        return 0 if build.built(wheels) else 1
    if verb == ["test"] or (verb == ["run"] and rest):
        if not build.built(wheels):
            words = ["python -m tests.engines", *arguments[: len(arguments) - len(command)], "build"]
            print(f"not built: {' '.join(words)}", file=sys.stderr)
            return 1
        python = str(build.python(wheels))
        os.chdir(HERE.parents[1])
        words = rest if verb == ["run"] else [python, "-m", "pytest", "--exhaustive", *rest]
        if verb == ["test"] and not any(Path(word.partition("::")[0]).exists() for word in rest):
            words.append(wheels.tests)
        words = [python if words[0] == "python" else words[0], *words[1:]]
        os.execvpe(words[0], words, build.environment())
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
