"""Prompts and sequences: hashing, admission, forks and drafts."""
