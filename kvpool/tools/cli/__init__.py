"""The commands of ``python -m kvpool``, one module each. ``add_parser`` declares a command's options. ``run`` executes
it and returns the exit status."""
