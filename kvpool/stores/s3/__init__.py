"""Blocks as objects of a bucket."""
