"""Strategies for computing many clients: all stacked in one batched program, or a few in each of several threads.

Both give the same numbers up to the order of floating-point sums. Which is faster depends on the model and the device.
On a CPU several small stacks in threads win for convolutions, whose batching rule is a grouped convolution, and for
perceptrons, whose batched products cost little to call: a stack that stays in a core's cache through all of its local
steps is read from memory once. One batched program wins elsewhere. Operations within a thread use one thread: nothing
waits for a core that is busy with other work.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from threadpoolctl import ThreadpoolController
from torch import nn

from .._check import Checked, Count, Whole
from .._threads import Threads
from .batches import LANES, max_clients
from .module import Layout, StackedModule, place_module
from .products import Perceptron

_SMALL = 1 << 20
_A_THREADS_CLIENTS = 8  # enough to spread the cost of a call, few enough to stay in the cache
_ALONE = 1 << 16  # parameters of a convolutional network from which a call costs little beside the work of a client
_CACHE_BYTES = 3 << 20  # of parameters in a stack
_WORTH_A_THREAD = 1 << 17  # parameters in a stack
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Execution(Checked):
    """How client work runs.

    Args:
        chunk: clients computed in one batched program, at most; ``None`` takes in a worker thread 8, or 1 where a model
            has 2**16 parameters or more, and of a perceptron as many as have 3 MiB of parameters but at least 4;
            without worker threads as many as would have about 1 GiB of parameters if none of the model's were frozen.
            Local training takes fewer than 4 one by one, and without padding.
        threads: worker threads over which clients are spread; 0 for none, and operations divide themselves; ``None``
            takes the number of available cores for convolutions and perceptrons on a CPU, and 0 otherwise.

    Example:
        >>> from fedmtl import Execution
        >>> Execution(chunk=16, threads=2)
        Execution(chunk=16, threads=2)
    """

    chunk: Count | None = None
    threads: Whole | None = None

    def resolve(self, module: nn.Module, device: torch.device, cores: int | None = None) -> Execution:
        """Return the same settings with every choice made for this module and device, on so many cores; None for those
        that this process may use."""
        threads, size = self.threads, sum(p.numel() for p in module.parameters())
        perceptron = Perceptron.of(module, Layout.of(module)) is not None
        if threads is None:
            convolutional = any(isinstance(m, _CONVOLUTIONS) for m in module.modules())
            spread = (convolutional or perceptron) and device.type == "cpu"
            threads = (cores or available_cores()) if spread else 0
        row = size * next(module.parameters()).element_size()
        cached = max(1, min(_CACHE_BYTES // row, max_clients(size)) // LANES) * LANES
        few = cached if perceptron else 1 if size >= _ALONE else _A_THREADS_CLIENTS
        return Execution(self.chunk or (few if threads else max_clients(size)), threads)


class Executor:
    """Runs a function over chunks of clients, each call with a :class:`StackedModule` of its own.

    Args:
        execution: resolved settings.
        module: a prepared module.
        device, dtype: of the parameters and the computation.
    """

    def __init__(self, execution: Execution, module: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        self.execution = execution
        assert execution.chunk is not None
        assert execution.threads is not None
        self.chunk = execution.chunk
        self._least = _WORTH_A_THREAD // sum(p.numel() for p in module.parameters())
        module = place_module(module, device=device, dtype=dtype)  # once: all stacks share its frozen parameters
        self._stacks: SimpleQueue[StackedModule] = SimpleQueue()
        for _ in range(max(1, execution.threads)):
            self._stacks.put(StackedModule(module, capacity=1, device=device, dtype=dtype))
        self._threads = Threads(execution.threads) if execution.threads else None

    def map(self, work: Callable[[StackedModule, slice], None], count: int, *, grain: int | None = None) -> None:
        """Call ``work(stack, slice)`` for consecutive slices of ``range(count)``, at most ``chunk`` long.

        With a ``grain`` of :func:`~fedmtl.local.batches.grain_of` all but the last slice are a multiple of it long,
        and of 1 exactly 1.
        """
        size = self.chunk
        if self._threads is not None:  # at least two slices a thread, so that none waits long for the last
            size = min(size, max(1, self._least, count // (2 * self._threads.count)))
        if grain is not None:
            size = 1 if grain == 1 else max(1, size // grain) * grain
        slices = [slice(a, min(a + size, count)) for a in range(0, count, size)]

        def run(part: slice) -> None:
            with self.stack() as stack:
                work(stack, part)

        if self._threads is not None and len(slices) > 1:
            self._threads.map(run, slices)
        else:
            for part in slices:
                run(part)

    @contextmanager
    def one_thread(self) -> Iterator[Threads | None]:
        """Inside the block, the caller's operations use one thread where clients are spread over several.

        What is divided within an operation waits for its slowest part every time; beside other work that is most of the
        time, and the parts are small.

        Yields:
            The threads over which clients are spread; None without such.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(before if self._threads is None else 1)
        try:
            yield self._threads
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def stack(self) -> Iterator[StackedModule]:
        """Borrow one of the stacked modules."""
        stack = self._stacks.get()
        try:
            yield stack
        finally:
            self._stacks.put(stack)

    def close(self) -> None:
        """Stop the worker threads."""
        if self._threads is not None:
            self._threads.close()


@contextmanager
def operation_threads(elements: float, products: float = math.inf) -> Iterator[None]:
    """Inside the block, operations use one thread when they move few numbers.

    Handing a small operation to other threads costs more than it saves, and very much more on a busy machine.

    Args:
        elements: numbers that a typical operation of PyTorch moves, such as cohort size times parameters.
        products: numbers in the larger factor of a typical product of NumPy, whose threads are others.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if elements < _SMALL else before)
    try:
        with _numpy_products().limit(limits=1) if products < _SMALL else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _numpy_products() -> ThreadpoolController:
    """Return the libraries by which NumPy and SciPy compute products; to look for them takes long."""
    libraries: ThreadpoolController = ThreadpoolController().select(user_api="blas")
    return libraries


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
