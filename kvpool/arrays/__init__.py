"""Memory as arrays: the layout of a block, arrays of any package, paged caches of any engine, and copies between
them."""
