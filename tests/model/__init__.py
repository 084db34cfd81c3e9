"""A slow, obvious model of the pool's state, and the tests that compare the pool with it."""
