"""An S3Store keeps the contract of stores, against SeaweedFS on the loopback interface."""

from __future__ import annotations

from tests.stores.contract import LastingContract


class TestS3Store(LastingContract):
    pass
