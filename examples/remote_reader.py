"""Two workers: one computes prompts and serves the host tier of its pool, another process fetches prompts from it and
computes less.

    python examples/remote_reader.py                  # starts the worker itself, and fetches 200 blocks from it
    python examples/remote_reader.py serve            # a worker, until its standard input ends; prints its endpoint
    python examples/remote_reader.py read ENDPOINT    # fetches from one that runs

Both read the secret of the pools, 64 hex digits, as a line of standard input. The host tier of the worker is so small
that it evicts blocks all the time. The KV of a token depends on all tokens up to its own, so the reader can check every
value that it reuses. On another machine, give the server and the client CURVE keys: `ServerKeys`, `ClientKeys`.
"""

from __future__ import annotations

import argparse
import random
import secrets
import select
import subprocess
import sys

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.remote import BlockClient, BlockServer

LAYOUT = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4, dtype="float32")
PROMPTS, PROMPT_TOKENS = 64, 33


def prompt_of(number: int) -> list[int]:
    """One of the prompts that both workers get. Four of them begin alike."""
    shared, unique = random.Random(number // 4), random.Random(1000 + number)
    return [source.randrange(32_000) for source in [shared] * 16 + [unique] * (PROMPT_TOKENS - 16)]


def kv_of(tokens: list[int]) -> npt.NDArray[np.float32]:
    """What a model would compute: [layers, K and V, tokens, kv_heads, head_dim]."""
    state = np.cumsum(np.array(tokens) * np.arange(1, len(tokens) + 1) ** 2) % 1_000_003
    places = np.arange(2 * 2 * 2 * 8).reshape(2, 2, 1, 2, 8)
    return (places * 1_000 + state[:, None, None]).astype(np.float32)


def slots_of(cache: kvpool.KVCacheManager, sequence: int, count: int) -> tuple[npt.NDArray[np.int32], ...]:
    """The block and the place in it of each of the first ``count`` tokens."""
    blocks, places = np.divmod(np.arange(count), LAYOUT.tokens_per_block)
    return cache.block_table(sequence).dense()[0][blocks], places


def compute(cache: kvpool.KVCacheManager, tokens: list[int]) -> tuple[int, int]:
    """Serve one prompt as an engine does. Returns how many cached tokens it reused, and how many values of them were
    wrong."""
    sequence = cache.add_sequence(tokens)
    cached = cache.cached_tokens(sequence)
    blocks, places = slots_of(cache, sequence, len(tokens))
    kv, pool = kv_of(tokens), cache.memory.device_pool  # [layers, K and V, blocks, tokens, kv_heads, head_dim]
    wrong = np.count_nonzero(pool[:, :, blocks[:cached], places[:cached]] != kv[:, :, :cached])
    pool[:, :, blocks[cached:], places[cached:]] = kv[:, :, cached:]
    cache.commit(sequence)
    cache.release(sequence)
    return cached, int(wrong)


def serve(secret: bytes) -> int:
    """Compute prompts and serve them until standard input ends."""
    with (
        kvpool.KVCacheManager(LAYOUT, device_blocks=32, host_blocks=128, device="cpu", secret=secret) as cache,
        BlockServer(cache) as server,
    ):
        print(server.endpoint, flush=True)
        choice = random.Random(0)
        while not select.select([sys.stdin], [], [], 0)[0]:
            tokens = prompt_of(choice.randrange(PROMPTS))
            compute(cache, tokens)
            cache.content.offload(tokens)  # so that others find it on the host
    return 0


def read(endpoint: str, secret: bytes, blocks: int) -> int:
    """Fetch this many blocks, reuse them, and compare every value. Returns 1 if one is wrong."""
    fetched = calls = reused = wrong = 0
    choice = random.Random(1)
    with (
        kvpool.KVCacheManager(LAYOUT, device_blocks=32, host_blocks=64, device="cpu", secret=secret) as cache,
        BlockClient(endpoint, cache) as client,
    ):
        while fetched < blocks:
            tokens = prompt_of(choice.randrange(PROMPTS))
            fetched += client.fetch(tokens)
            calls += 1
            cached, differ = compute(cache, tokens)
            reused += cached
            wrong += differ
    print(f"{fetched:,} blocks fetched in {calls:,} calls; {reused:,} tokens reused, {wrong:,} values wrong")
    return 1 if wrong else 0


def both(blocks: int) -> int:
    """Start a worker in another process, and read from it."""
    secret = secrets.token_bytes(32)
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(f"{secret.hex()}\n")
        worker.stdin.flush()
        endpoint = worker.stdout.readline().strip()
        code = read(endpoint, secret, blocks)
        worker.stdin.close()
        return code or worker.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=("both", "serve", "read"), default="both")
    parser.add_argument("endpoint", nargs="?", help="of a worker that runs")
    parser.add_argument("--blocks", type=int, default=200, help="how many to fetch (default: 200)")
    options = parser.parse_args(arguments)
    if (options.role == "read") != (options.endpoint is not None):
        parser.error("endpoint: expected one for `read`, and none otherwise")
    if options.role == "both":
        return both(options.blocks)
    secret = bytes.fromhex(sys.stdin.readline())
    return serve(secret) if options.role == "serve" else read(options.endpoint, secret, options.blocks)


if __name__ == "__main__":
    sys.exit(main())
