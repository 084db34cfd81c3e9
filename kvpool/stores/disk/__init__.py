"""DiskStore: blocks in one preallocated file, and what is in it in a small SQLite database beside it."""

from kvpool.stores.disk.disk_store import DiskStore as DiskStore
