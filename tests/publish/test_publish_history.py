"""The history tells a reader every number once, behind a snapshot where messages are gone, and keeps to its bounds."""

from __future__ import annotations

from kvpool.publish.replay_server import History, Place


def since(history: History, start: int) -> list[tuple[int, bytes]]:
    """All that is told from a number on, which must be covered."""
    place, found = Place(start), []
    while (told := history.at(place)) is not None:
        found.append(told)
        place.next += 1
    return found


def test_a_history_tells_every_number_once_from_any_start() -> None:
    for limit in (1, 3, 100):
        history = History(limit, 1 << 20)
        for n in range(12):
            history.add(str(n).encode())
            for start in range(15):
                if not history.covers(Place(start)):
                    assert start < history.first
                    history.keep_snapshot([b"a", b"b"][: history.next - start])
                found = since(history, start)
                numbers = [number for number, _ in found]
                assert numbers == list(range(numbers[0], n + 1)) if found else start > n
                assert not found or numbers[0] >= start, "whoever has seen a number skips it"
                assert not found or numbers[0] == start or found[0][1] == b"a"
                assert all(payload == str(number).encode() for number, payload in found if payload not in (b"a", b"b"))


def test_a_snapshot_that_serves_nobody_any_more_is_not_kept() -> None:
    history = History(1, 100)
    for _ in range(3):
        history.add(b"1234")
    history.keep_snapshot([b"a", b"b"])
    assert [payload for _, payload in since(history, 0)] == [b"a", b"b"]
    history.add(b"1234")
    assert history._snapshot and history.covers(Place(0))
    history.add(b"1234")
    assert not history._snapshot and not history.covers(Place(0))


def test_a_reader_in_the_middle_of_a_snapshot_that_has_gone_gets_another_from_its_beginning() -> None:
    for replaced in (False, True):
        history = History(2, 100)
        for n in range(6):
            history.add(str(n).encode())
        place = Place(0)
        history.keep_snapshot([b"a", b"b", b"c"])
        assert history.at(place) == (3, b"a")
        place.next += 1
        if replaced:
            history.keep_snapshot([b"A", b"B", b"C"])
        else:
            for n in range(6, 10):
                history.add(str(n).encode())
        assert not history.covers(place), "its half of the first says nothing together with half of the second"
        history.keep_snapshot([b"x", b"y"])
        told = []
        while (one := history.at(place)) is not None:
            told.append(one)
            place.next += 1
        assert told == [(history.next - 2, b"x"), (history.next - 1, b"y")] and told[0][0] >= 4


def test_a_history_keeps_to_its_bytes() -> None:
    history = History(100, 10)
    for n in range(20):
        history.add(b"1234")
        assert history.next - history.first == min(n + 1, 2)
