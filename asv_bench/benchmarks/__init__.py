"""Benchmarks by subject, run by asv from the folder above."""
