"""Choosing sizes and processes, covering every client once, and the threads of operations."""

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from fedmtl.local import Execution, Executor, operation_threads

CPU = torch.device("cpu")
LINEAR, CNN = nn.Linear(4, 3), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_convolutions_and_large_perceptrons_take_several_processes_on_a_cpu_only():
    assert Execution().resolve(CNN, CPU, 3).processes == 3
    assert Execution().resolve(nn.Linear(1 << 13, 4), CPU, 3).processes == 3
    assert Execution().resolve(LINEAR, CPU, 3).processes == 1
    assert (
        Execution().resolve(nn.Sequential(nn.Linear(1 << 13, 4), nn.LayerNorm(4)), CPU, 3).processes
        == 1
    )
    assert Execution().resolve(CNN, torch.device("cuda"), 3).processes == 1
    assert Execution(5, 1).resolve(CNN, CPU, 3) == Execution(5, 1)
    assert Execution(processes=2).resolve(CNN, CPU, 3) == Execution(8, 2)


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


def test_stacks_are_bounded_by_memory():
    large = nn.Sequential(
        nn.Linear(1 << 14, 1 << 12, bias=False), nn.LayerNorm(1 << 12, elementwise_affine=False)
    )
    assert Execution().resolve(large, CPU).chunk == (1 << 28) // (1 << 26)


@pytest.mark.parametrize("count", [0, 1, 12, 61])
@pytest.mark.parametrize(
    ("chunk", "width", "size"),
    [(5, None, 5), (3, 8, 1), (5, 8, 4), (20, 16, 20), (20, 4, 16), (20, 5, 4), (40, 5, 32)],
)
def test_every_client_is_visited_once_in_stacks_that_fill_registers(count, chunk, width, size):
    """Or in stacks of one client for each lane, if a chunk has too few clients for that."""
    executor = Executor(Execution(chunk), LINEAR, device=CPU, dtype=torch.float32)
    parts = list(executor.slices(count, width=width))
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(count))
    assert all(part.stop - part.start == size for part in parts[:-1])


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
        return {
            library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
        }

    with threadpool_limits(2, user_api="blas"):
        assert threads() == {2}
        with operation_threads(1, 1000):
            assert threads() == {1}
        with operation_threads(1, 1e9), operation_threads(1):
            assert threads() == {2}
        with pytest.raises(ValueError, match="inside"), operation_threads(1, 1):
            raise ValueError("inside")
        assert threads() == {2}
