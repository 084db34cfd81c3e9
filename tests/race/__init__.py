"""Threads of production code run through all their interleavings, up to a bound, in the interpreter."""
