"""Choosing a strategy, covering every client once, and borrowing threads."""

import threading

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from fedmtl.local import Execution, Executor, operation_threads

CPU = torch.device("cpu")
LINEAR, CNN = nn.Linear(4, 3), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_auto_takes_threads_for_convolutions_and_perceptrons_on_a_cpu_only():
    assert Execution().resolve(LINEAR, CPU, 3).threads == 3
    assert Execution().resolve(CNN, CPU, 3).threads == 3
    assert Execution().resolve(nn.Sequential(LINEAR, nn.LayerNorm(3)), CPU, 3).threads == 0
    assert Execution().resolve(LINEAR, torch.device("cuda"), 3).threads == 0
    assert Execution().resolve(CNN, torch.device("cuda"), 3).threads == 0
    assert Execution(5, 0).resolve(CNN, CPU) == Execution(5, 0)
    assert Execution(threads=3).resolve(CNN, CPU) == Execution(8, 3)


@pytest.mark.parametrize(
    ("module", "chunk"),
    [
        (nn.Linear(784, 62), 16),  # 195 kB a row
        (nn.Linear(784, 62).double(), 8),
        (nn.Linear(784, 1000), 4),  # none would do, but a stack has lanes
    ],
)
def test_stacks_of_perceptrons_stay_in_the_cache(module, chunk):
    assert Execution().resolve(module, CPU).chunk == chunk


def test_clients_with_large_convolutions_are_computed_one_by_one():
    assert Execution().resolve(CNN, CPU).chunk == 8
    assert Execution().resolve(nn.Conv2d(64, 256, 3), CPU).chunk == 1


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.Conv2d(64, 256, 3), {3: 1, 8: 2, 100: 8}),  # 147,712 numbers
        (LINEAR, {3: 3, 8: 8, 100: 8}),  # too small to be worth a thread
    ],
)
def test_small_cohorts_are_spread_over_the_threads(module, sizes):
    executor = Executor(Execution(8, 2), module, device=CPU, dtype=torch.float32)
    found: list[int] = []
    for count, expected in sizes.items():
        found.clear()
        executor.map(lambda stack, part: found.append(part.stop - part.start), count)
        assert sum(found) == count
        assert max(found) == expected
    executor.close()


def test_stacks_are_bounded_by_memory():
    large = nn.Linear(1 << 14, 1 << 12, bias=False)
    assert Execution(threads=0).resolve(large, CPU).chunk == (1 << 28) // (1 << 26)


@pytest.mark.parametrize("execution", [Execution(4, 0), Execution(3, 2)])
@pytest.mark.parametrize("count", [0, 1, 12, 13])
def test_every_client_is_visited_once_by_a_stack_of_its_own(execution, count):
    executor = Executor(execution, LINEAR, device=CPU, dtype=torch.float32)
    visits, busy, lock = [], set(), threading.Lock()

    def work(stack, part):
        with lock:
            assert id(stack) not in busy, "a stack was used by two workers at once"
            busy.add(id(stack))
        visits.extend(range(part.start, part.stop))
        with lock:
            busy.remove(id(stack))

    executor.map(work, count)
    executor.close()
    assert sorted(visits) == list(range(count))


def test_few_numbers_take_one_thread_and_the_setting_comes_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with operation_threads(1000):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with operation_threads(1e9):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="inside"), operation_threads(1):
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_small_products_of_numpy_take_one_thread_and_the_setting_comes_back():
    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        assert threads() == {2}
        with operation_threads(1, 1000):
            assert threads() == {1}
        with operation_threads(1, 1e9), operation_threads(1):
            assert threads() == {2}
        with pytest.raises(ValueError, match="inside"), operation_threads(1, 1):
            raise ValueError("inside")
        assert threads() == {2}


def test_worker_threads_leave_the_callers_threads_alone():
    before = torch.get_num_threads()
    executor = Executor(Execution(1, 2), LINEAR, device=CPU, dtype=torch.float32)
    seen = []
    executor.map(lambda stack, part: seen.append(torch.get_num_threads()), 4)
    executor.close()
    assert seen == [1] * 4
    assert torch.get_num_threads() == before
