"""Descriptions of memory: the layout of a block, arrays of any package, paged caches of any engine."""
