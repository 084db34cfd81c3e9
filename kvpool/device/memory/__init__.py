"""The memory of both tiers: allocated, seen as arrays, lent to other packages and processes, and copied to and from the
caches of any engine."""
