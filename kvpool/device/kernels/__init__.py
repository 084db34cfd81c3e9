"""Kernels that run on a GPU, and the place of their CUDA sources."""

from __future__ import annotations

from pathlib import Path


def cuda_sources() -> Path:
    """The folder with the ``.cu`` and ``.cuh`` files, installed or in a checkout.

    Raises
    ------
    FileNotFoundError
        Neither place has it.
    """
    package = Path(__file__).resolve().parents[2]
    places = package / "cuda", package.parent / "cuda"
    for place in places:
        # A folder alone proves nothing: beside an installed package, `cuda` is NVIDIA's.
        if (place / "README.md").is_file():
            return place
    raise FileNotFoundError(f"no CUDA sources of kvpool in {places[0]} or {places[1]}")
