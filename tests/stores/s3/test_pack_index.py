"""An index of packs is the same in whatever order packs and drops become known. Needs no server."""

from __future__ import annotations

import random

import pytest

from kvpool.storage.backends.s3 import pack_index
from kvpool.storage.backends.s3.pack_index import DropLog, Pack, PackIndex, whole

SECRET = b"\1" * 32
TAGS = [b"model-00" + bytes([tag]) * 8 for tag in range(2)] + [b"model-11" + b"\7" * 8]


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def duplicated(pack: Pack, packs: list[Pack]) -> bool:
    """Whether another pack has a block of this one, so that it may be deleted while it counts."""
    return any(other is not pack and set(other.names) & set(pack.names) for other in packs)


@pytest.mark.parametrize("seed", range(200))
def test_what_counts_does_not_depend_on_the_order_in_which_it_becomes_known(seed: int) -> None:
    """A history of saves and drops, with some packs begun long before they arrive, added to an index in any order."""
    random_ = random.Random(seed)
    logs, packs, dropped = [DropLog()], list[Pack](), dict[tuple[str, bytes], bool]()
    for _ in range(random_.randrange(1, 14)):
        if random_.random() < 0.6:
            begun = random_.choice(logs[-3:])
            named = random_.sample(range(12), random_.randrange(1, 7))
            packs.append(Pack.new(len(packs), begun.number, random_.choice(TAGS), [block(number) for number in named]))
        else:
            kind, tag = random_.randrange(3), random_.choice(TAGS)
            what = [[block(random_.randrange(12)), block(random_.randrange(12))], [tag], [whole(tag[:8])]][kind]
            logs.append(logs[-1].then(what, 100 * random_.randrange(3), 0))
    for pack in packs:
        for name in pack.names:
            concerned = (name, pack.tag, whole(pack.tag[:8]))
            last = max([0, *(logs[-1].names.get(key, 0) for key in concerned)])
            dropped[pack.name, name] = last > pack.number
    index, items = PackIndex(1000), [*packs, *logs]
    random_.shuffle(items)
    for item in items:
        if isinstance(item, Pack):
            index.add(item)
            continue
        for pack in index.adopt(item)[1]:
            assert all(dropped[pack.name, name] for name in pack.names) or duplicated(pack, packs), f"seed {seed}"
    for name in map(block, range(12)):
        counting = {pack.name for pack in packs if name in pack.names and not dropped[pack.name, name]}
        (place,) = index.find([name])
        # A block that two namespaces have saved may be missed when one of them is dropped.
        many = len({pack.tag for pack in packs if name in pack.names}) > 1
        assert (place is not None) == bool(counting) or (place is None and many), f"seed {seed}"
        if place is not None:
            assert place[0].name in counting and place[0].names[place[1]] == name


def test_a_log_is_read_as_it_was_written_and_refuses_other_bytes() -> None:
    log = DropLog().then([block(1), TAGS[0]], 50, 0).then([block(2)], 0, 0)
    assert log.number == 51 and log.names == {block(1): 50, TAGS[0]: 50, block(2): 51}
    data = log.encode(SECRET)
    assert DropLog.decode(data, SECRET, "t") == log._replace(e_tag="t")
    assert DropLog.decode(data, b"\2" * 32, "t") is None
    for place in range(len(data)):
        assert DropLog.decode(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], SECRET, "t") is None
    assert DropLog.decode(data[:-24], SECRET, "t") is None and DropLog.decode(b"", SECRET, "t") is None


def test_a_log_that_is_full_drops_what_was_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_index, "DROPS_MAX", 3)
    index, log = PackIndex(100), DropLog().then([block(1), block(2), block(3)], 10, 0)
    index.add(Pack.new(0, log.number, TAGS[0], [block(9)]))
    full = log.then([block(4)], 20, 0)
    assert full.number == full.floor == 20 and not full.names
    assert index.adopt(full)[0] == 1 and index.find([block(9)]) == [None]
    assert index.add(Pack.new(0, 20, TAGS[0], [block(9)]))


def test_the_name_of_a_pack_says_what_is_in_it_and_others_are_left_alone() -> None:
    for count in (1, 4, 5, 300):
        made = Pack.new(1_700_000_000_000, 17, TAGS[0], [block(number) for number in range(count)])
        read = Pack.parse(made.name)
        assert read == made._replace(names=made.names if count <= 4 else ()) and len(made.name) <= 255
        assert made.begins == (0 if count <= 4 else 16 * count)
    for name in ("", "x", made.name + "0" * 9, made.name[1:], made.name.replace("-", "_"), "../" + made.name):
        assert Pack.parse(name) is None


def test_packs_that_arrive_dropped_are_bounded_too() -> None:
    index = PackIndex(4)
    index.adopt(DropLog(9, 9))
    packs = [Pack.new(now, 1, TAGS[0], [block(now)]) for now in range(20)]
    assert not any(map(index.add, packs)) and index.packs <= 4 and len(index) == 0
    assert all(pack.name in index for pack in packs), "none is read again"
