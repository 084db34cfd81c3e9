"""What a request of vLLM changes in the KV of its tokens is in the keys that kvpool's manager gets: by vLLM's own
requests and hashes."""

from __future__ import annotations

from typing import Any

import pytest

import kvpool

vllm = pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

import torch  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

BLOCK, BLOCKS = 16, 4
TOKENS = list(range(BLOCK * BLOCKS))
IDENTITY = kvpool.ModelIdentity("toy", "r1", "uint8", "chunks", "tests 1")
FIRST = torch.zeros(len(TOKENS), 8)


def image(identifier: str, offset: int = 20) -> dict[str, Any]:
    place = PlaceholderRange(offset=offset, length=8)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


def adapter(name: str, path: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, 1, path)}


def keys(algorithm: str = "sha256", **settings: Any) -> list[Any]:
    """The keys of the blocks of a request, as vLLM's connector makes them."""
    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    sampling = settings.pop("sampling", {})
    tokens = None if "prompt_embeds" in settings else TOKENS
    request = Request("r", tokens, SamplingParams(**sampling), None, block_hasher=hasher, **settings)
    return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]


def known(first: list[Any], second: list[Any]) -> int:
    """How many blocks of the second request the manager finds after it has stored those of the first."""
    manager = vllm.KVPoolOffloadingManager(kvpool.HostCache(16, 64, identity=IDENTITY))
    context = ReqContext(req_id="r")
    assert manager.prepare_store(first, context) is not None
    manager.complete_store(set(first), context, True)
    return sum(manager.lookup(key, context) == LookupResult.HIT for key in second)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize(
    ("first", "second", "blocks"),
    [
        ({}, adapter("a", "/a"), 0),
        (adapter("a", "/a"), {}, 0),
        (adapter("a", "/a"), adapter("b", "/a"), 0),
        (adapter("a", "/a"), adapter("a", "/b"), 0),
        ({}, {"cache_salt": "tenant"}, 0),
        ({"cache_salt": "tenant"}, {"cache_salt": "other"}, 0),
        ({}, image("one"), 1),
        (image("one"), image("other"), 1),
        (image("one"), image("one", offset=21), 1),
        ({"prompt_embeds": FIRST}, {"prompt_embeds": FIRST + (torch.arange(len(FIRST)) >= 40)[:, None]}, 2),
    ],
)
def test_what_changes_kv_is_in_the_key(
    first: dict[str, Any], second: dict[str, Any], blocks: int, algorithm: str
) -> None:
    assert known(keys(algorithm, **first), keys(algorithm, **second)) == blocks
    assert known(keys(algorithm, **first), keys(algorithm, **first)) == BLOCKS


def test_how_tokens_are_chosen_is_not_in_the_key() -> None:
    chosen = {"sampling": {"temperature": 0.5, "seed": 3, "max_tokens": 2, "top_k": 4}, "priority": 2}
    assert known(keys(), keys(**chosen)) == BLOCKS
