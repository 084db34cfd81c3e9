"""What a public call does before it decides: its arguments are checked, signals wait until it has ended, and a child of
``os.fork()`` is refused."""
