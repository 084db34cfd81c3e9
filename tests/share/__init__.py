"""The memory of a pool in other processes."""
