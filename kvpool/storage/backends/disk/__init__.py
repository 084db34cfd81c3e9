"""DiskStore: blocks in one preallocated file, and what is in it in a small SQLite database beside it."""

from kvpool.storage.backends.disk.disk_store import DiskStore as DiskStore
