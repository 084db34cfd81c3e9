"""The commands of ``python -m kvpool``, a module each: ``add_parser`` declares its options, ``run`` does it and returns the exit status."""
