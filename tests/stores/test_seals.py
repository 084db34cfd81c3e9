"""Keys of two contents, models, namespaces or purposes never agree, and a secret is never shown."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvpool.stores.seals import BlockNames, Secret, block_context
from kvpool.stores.store import MODEL_BYTES
from tests.stores.lab import IDENTITY, OTHER, memory, names

SECRET = Secret(bytes(range(32)), IDENTITY)
TOKENS = np.arange(12, dtype=np.int32)


def test_two_models_share_no_key_and_no_namespace() -> None:
    other = Secret(bytes(range(32)), OTHER)
    assert not np.array_equal(SECRET.opaque([b"a"]), other.opaque([b"a"]))
    assert len({one.tag(name) for one in (SECRET, other) for name in (b"", b"tenant")}) == 4


def test_a_seal_is_of_key_model_secret_and_every_byte() -> None:
    rows, keys = memory(2, 64), SECRET.opaque(names(2))
    seal = SECRET.seal(keys[:1], np.array([0]), rows)
    others = [
        SECRET.seal(keys[1:], np.array([0]), rows),
        Secret(bytes(range(32)), OTHER).seal(keys[:1], np.array([0]), rows),
        Secret(bytes(32), IDENTITY).seal(keys[:1], np.array([0]), rows),
        SECRET.seal(keys[:1], np.array([0]), rows[:, :63].copy()),
    ]
    others += [SECRET.seal(keys[:1], np.array([0]), rows, [context]) for context in (b"a", b"b", bytes(8))]
    rows[1, 63] = 1
    others.append(SECRET.seal(keys[:1], np.array([1]), rows))
    assert len({seal.tobytes(), *(other.tobytes() for other in others)}) == 9


def test_no_two_blocks_have_one_context() -> None:
    extra, more = np.zeros(12, np.int64), np.zeros(12, np.int64)
    extra[0] = 1
    more[:2] = TOKENS[8:].view(np.int64)
    found = {
        block_context(b"parent", TOKENS, None, b"tenant", 0),
        block_context(b"", TOKENS, None, b"parenttenant", 0),
        block_context(b"parentt", TOKENS, None, b"enant", 0),
        block_context(b"parent", TOKENS, extra, b"tenant", 0),
        block_context(b"parent", TOKENS, None, b"tenant", 1),
        block_context(b"parent", TOKENS[:8], None, b"tenant", 0),
        block_context(b"parent", TOKENS[:8], more[:8], b"tenant", 0),
        block_context(b"parent", TOKENS[::-1].copy(), None, b"tenant", 0),
    }
    assert len(found) == 8
    assert block_context(b"parent", TOKENS, np.zeros(12, np.int64), b"tenant", 0) in found


def test_a_part_of_names_has_their_contexts() -> None:
    whole = BlockNames(names(4), [b"a", b"b", b"c", b"d"])
    for part in (whole[1:3], whole[np.array([1, 2])]):
        assert (part.names, part.contexts) == (tuple(names(2, 1)), (b"b", b"c"))
    with pytest.raises(ValueError, match="one for each of the 4 names"):
        BlockNames(names(4), contexts=[b"a"])


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    assert repr(SECRET) == "Secret()"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SECRET)
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(b"short", IDENTITY)


def test_the_tags_of_a_model_begin_alike_and_those_of_others_do_not() -> None:
    """What is dropped by a model or by a namespace is nobody else's."""
    one, other, shared = Secret(bytes(32), IDENTITY), Secret(bytes(32), OTHER), Secret(bytes([1] * 32), IDENTITY)
    spaces = [b"", b"a", b"b"]
    assert all(secret.tag(name).startswith(secret.model) for secret in (one, other, shared) for name in spaces)
    assert len({secret.model for secret in (one, other, shared)}) == 3
    assert len({secret.tag(name)[MODEL_BYTES:] for secret in (one, other, shared) for name in spaces}) == 9
