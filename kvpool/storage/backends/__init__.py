"""The stores: memory, a folder on disk, a bucket, Mooncake, another process."""
