"""Wheel, sdist and editable installs work from any directory, and one may replace another."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import kvpool
from kvpool.common.jit.cache import cache_root

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".?*", "__pycache__", "build", "dist", "*.egg-info", "env")

PROBE = """
import pathlib, sys
import numpy as np
import kvpool
from kvpool.device.launches import cuda_sources
place = pathlib.Path(kvpool.__file__).resolve()
assert sys.argv[1] in str(place), place
assert (place.parent / "py.typed").is_file()
assert (place.parent / "integrations" / "dashboards" / "grafana.json").is_file()
sources = [path.name for path in cuda_sources().iterdir() if path.suffix in (".md", ".cu", ".cuh", ".json")]
assert sorted(sources) == sys.argv[2].split()
layout = kvpool.BlockLayout.of_block_bytes(4096, 16)
with kvpool.KVCacheManager(layout, device_blocks=4, host_blocks=4, device="cpu") as cache:
    sequence = cache.add_sequence(np.arange(40, dtype=np.int32))
    cache.commit(sequence)
    cache.release(sequence)
    print(kvpool.__version__, cache.match_prefix(np.arange(40, dtype=np.int32)).tokens)
"""


def copy_compiled_code(target: Path) -> None:
    """Save children the compilation of what this environment has compiled already; it goes by content, not by place."""
    root = cache_root()
    if root is not None:
        shutil.copytree(root, target)
        target.chmod(0o700)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing behind in it."""
    folder = tmp_path_factory.mktemp("install") / "checkout"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    return folder


@pytest.fixture(scope="module")
def artefacts(source: Path) -> dict[str, list[str]]:
    """What to give to `pip install` for each form."""
    built = source.parent / "built"
    # Both hooks run in a process of their own each, as build front ends do.
    for kind in ("sdist", "wheel"):
        script = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
        subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    return {
        "wheel": [str(*built.glob("*.whl"))],
        "sdist": [str(*built.glob("*.tar.gz"))],
        "editable": ["-e", str(source)],
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a child with a user of its own, who has run this version before."""
    home = tmp_path_factory.mktemp("home")
    copy_compiled_code(home / ".cache" / "kvpool")
    dropped = ("NUMBA_CACHE_DIR", "PIP_", "PYTHON", "XDG_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | {"HOME": str(home)}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a new virtual environment that sees the packages of this one, kvpool excepted."""
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    # A folder of links, since this environment's own may hold a kvpool. Editable installs in it are not followed.
    links = tmp_path / "packages"
    links.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}:
        for entry in Path(folder).iterdir() if folder.endswith("-packages") else ():
            if "kvpool" not in entry.name and not (links / entry.name).is_symlink():
                (links / entry.name).symlink_to(entry)
    (site / "outer.pth").write_text(f"{links}\n", encoding="utf-8")
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, what: list[str], environment: dict[str, str]) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check(python: Path, form: str, source: Path, environment: dict[str, str], folder: Path) -> None:
    """Use the package from a folder that has nothing to do with it, as a library and as a command."""
    place = str(source) if form == "editable" else "site-packages"
    files = sorted(path.name for path in (source / "cuda").iterdir())
    command = [str(python), "-c", PROBE, place, " ".join(files)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kvpool.__version__, "39"]
    subprocess.run(
        [str(python.parent / "kvpool"), "--help"], cwd=folder, env=environment, check=True, capture_output=True
    )


@pytest.mark.exhaustive
def test_each_form_works_from_any_directory_in_the_place_of_another(
    source: Path, artefacts: dict[str, list[str]], python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    for form in ("sdist", "editable", "wheel"):
        install(python, artefacts[form], environment)
        check(python, form, source, environment, tmp_path)


def test_every_package_is_listed() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(settings["options"]["packages"].split())
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "kvpool").rglob("*.py")}
    assert listed == packages | {"kvpool.cuda"}
    assert settings["metadata"]["version"] == kvpool.__version__
