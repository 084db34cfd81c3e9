"""The host tier of an engine that keeps its own blocks."""
