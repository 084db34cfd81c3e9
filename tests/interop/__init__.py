"""The pool's memory in the hands of other packages, and theirs in the pool's."""
