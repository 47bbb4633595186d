"""Worker threads: their results, their order, and what an exception leaves."""

import threading

import pytest

from fedmtl._threads import Threads


@pytest.fixture
def threads():
    made = Threads(2)
    yield made
    made.close()


def test_results_are_in_the_order_of_the_parts(threads) -> None:
    waiting = threading.Event()

    def work(part: int) -> int:
        if part == 0:  # the others are done before it
            assert waiting.wait(10)
        elif part == 4:
            waiting.set()
        return part * part

    assert threads.map(work, range(5)) == [0, 1, 4, 9, 16]
    assert threads.map(work, []) == []


def test_nothing_runs_on_after_an_exception(threads) -> None:
    begun, running = [], threading.Event()

    def work(part: int) -> None:
        begun.append(part)
        if part == 0:
            assert running.wait(10)
            raise ValueError("part 0")
        running.set()
        threading.Event().wait(0.05)

    with pytest.raises(ValueError, match="part 0"):
        threads.map(work, range(100))
    count = len(begun)
    assert count < 100
    threading.Event().wait(0.1)
    assert len(begun) == count
    assert threads.map(str, range(3)) == ["0", "1", "2"]
