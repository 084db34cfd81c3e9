"""The proof that DiskStore survives crashes: a recorded log of system calls, replayed into thousands of crash states.

``recorder.c`` records what a program (``workload``) does to a folder. ``log`` reads that. ``model`` says which states a
crash may leave, and builds them. ``promises`` says which blocks must be there. ``check`` opens a state and looks.
``test_proof`` runs all of it.
"""
