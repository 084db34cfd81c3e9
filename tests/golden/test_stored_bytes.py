"""Bytes that are data: what stores have kept and what other processes send stays readable when code is renamed."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import fields
from pathlib import Path

import numpy as np

import kvpool
from kvpool.remote import session
from kvpool.state import hashing
from kvpool.storage.backends.peer import peer_store
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.mac import BlockNames, Secret, block_context

PACKAGE = Path(kvpool.__file__).parent
SECRET = bytes(range(32))
LABELS = {
    b"kvpool",
    b"kvpool disk store",
    b"kvpool mooncake",
    b"kvpool s3",
    b"kvpool s3 drops",
    b"kvpool settings",
    b"kvpool state",
    b"kvpool store 4 ",
    b"kvpool wire ",
    b"kvpool.blocks",
    b"kvpool.groups",
    b"kvpool.password",
    b"kvpool.public",
    b"kvpool.root",
    b"kvpool.storedoor",
    b"kvpool.storeseal",
    b"kvpool.tag",
}
MESSAGES = {
    "Message": "id",
    "Failed": "id code reason",
    "Hello": "id client layout origin transport",
    "Welcome": "id block_bytes blocks_per_request requests bytes",
    "Get": "id group",
    "Find": "id",
    "Found": "id",
    "Blocks": "id found",
    "StoreHello": "id block_bytes",
    "StoreWelcome": "id blocks_per_call",
    "StoreCall": "id call wait_ms session era tag limit",
    "StoreDone": "id count holds capacity",
}
"""A kind of message, and the fields of its header, are what a process of another version reads."""

DIGESTS = {
    "model": "5715d47364928838",
    "tag": "b7feb6422b544953",
    "keys": "36e2df8ea10cd3e4",
    "in epoch": "095fe63954fe604d",
    "seals": "b0b1bac786d5816c",
    "store": "8b663da5157241d7",
    "pool": "37a9566824aaec4d",
    "public": "f2b685e5259c350e",
}


def constants() -> set[bytes]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, bytes)}


def test_the_labels_of_what_is_derived_stay() -> None:
    assert {value for value in constants() if value.startswith(b"kvpool")} == LABELS


def test_the_messages_between_processes_stay() -> None:
    kinds = [
        kind
        for module in (session, peer_store)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, session.Message)
    ]
    assert {kind.__name__: " ".join(field.name for field in fields(kind)) for kind in kinds} == MESSAGES
    greeting = session.encode(session.Hello(7, "engine", "layout", "origin", "inline"))
    assert greeting == (
        b'{"kind": "hello", "id": 7, "client": "engine", "layout": "layout", "origin": "origin", "transport": "inline"}'
    )


def test_keys_tags_and_codes_of_stored_blocks_stay() -> None:
    identity = kvpool.ModelIdentity("model", "revision", "uint8", "layout", "hash", "scales")
    secret = Secret(SECRET, identity)
    keys = secret.keys(BlockNames([b"one", b"two"]))
    memory = np.arange(128, dtype=np.uint8).reshape(2, 64)
    context = block_context(b"parent", np.arange(4, dtype=np.int32), None, b"namespace", 1)
    derived = {
        "model": secret.model,
        "tag": secret.tag(b"namespace"),
        "keys": keys.tobytes(),
        "in epoch": secret.in_epoch(keys, b"epoch 1").tobytes(),
        "seals": secret.mac(keys, np.arange(2), memory, [context, b""]).tobytes(),
        "store": SharedSecret(SECRET).derived(b"kvpool.storeseal"),
        "pool": repr((hashing.block_secret(SECRET), hashing.namespace_root(SECRET, "salt", 7))).encode(),
        "public": (hashing.fingerprint(SECRET) + hashing.remote_password(SECRET)).encode(),
    }
    digests = {name: hashlib.blake2b(value, digest_size=8).hexdigest() for name, value in derived.items()}
    assert digests == DIGESTS
