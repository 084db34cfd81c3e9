"""Tests of the kernels, none of which needs a GPU."""
