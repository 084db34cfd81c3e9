"""Blocks as objects of a bucket."""

from kvpool.storage.backends.s3.s3_store import S3Store as S3Store
