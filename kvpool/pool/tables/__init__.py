"""Block tables on their way out of a pool."""
