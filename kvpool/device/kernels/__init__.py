"""Kernels that run on a GPU: their launches as data, and the place of their CUDA sources."""
