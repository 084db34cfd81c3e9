"""Eviction policies: LRU within a priority, agents' sessions, reuse, and the choice among them."""
