"""MooncakeStore keeps the contract of stores, in a cluster that another process lends memory to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from kvpool.storage.urls import open_store
from tests.stores.contract import LastingContract
from tests.stores.mooncake.cluster import Cluster


class TestMooncakeStore(LastingContract):
    @pytest.fixture
    def make(self, cluster: Cluster, secret: bytes) -> Callable[[int], MooncakeStore]:
        """The secret is a test's own: nobody's blocks are there. There is more room than the test asks for."""
        return lambda blocks: MooncakeStore(cluster.address, secret=secret)

    @pytest.fixture
    def again(self, cluster: Cluster, secret: bytes) -> Callable[[], MooncakeStore]:
        return lambda: MooncakeStore(cluster.address, secret=secret)


def test_a_text_opens_it(installed: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("secret") / "file"
    file.write_text("ab" * 32)
    file.chmod(0o600)
    store = open_store(f"mooncake:10.0.0.7:50051?segment=16MiB&threads=2&secret_file={file}")
    assert isinstance(store, MooncakeStore) and store.threads == 2
    assert repr(store) == "MooncakeStore('10.0.0.7:50051', segment=16777216)"
