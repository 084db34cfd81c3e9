"""Workflows of a public forge run scripts of the project and nothing else, so that each step runs on any machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra docs brings")
ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return jobs


def commands() -> list[tuple[str, str]]:
    """The file and the command of each step that runs one, and of each hook."""
    steps = [
        (path.name, step["run"])
        for path in WORKFLOWS
        for job in jobs_of(path).values()
        for step in job["steps"]
        if "run" in step
    ]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    return steps + [(".pre-commit-config.yaml", hook["entry"]) for hook in hooks]


@pytest.mark.parametrize(("where", "command"), commands())
def test_a_step_runs_a_script_of_the_project_with_a_verb_that_it_has(where: str, command: str) -> None:
    script, *verbs = command.split()
    path = ROOT / script
    assert path.parent == ROOT / ".ci" and os.access(path, os.X_OK), f"{where}: {command}"
    text = path.read_text(encoding="utf-8")
    known = {verb for line in re.findall(r"^ +([a-z| ]+)\)", text, re.MULTILINE) for verb in line.split(" | ")}
    assert len(verbs) <= 1 and set(verbs) <= known, f"{where}: {command}"


def test_the_suite_runs_on_each_python_that_the_package_accepts_as_readme_says() -> None:
    pythons = jobs_of(ROOT / ".github" / "workflows" / "checks.yml")["suite"]["strategy"]["matrix"]["python"]
    accepted = re.search(r"python_requires = >=(\S+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert accepted and pythons[0] == accepted[1]
    assert pythons == [f"3.{minor}" for minor in range(11, 11 + len(pythons))]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ *(python3 -m venv .* pytest .*)$", (ROOT / ".ci" / "check").read_text(), re.MULTILINE)
    assert command in readme and command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
