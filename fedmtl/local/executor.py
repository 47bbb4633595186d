"""Execution of client work: the number of clients that one batched program computes, and the number
of processes that share a run's clients.

The numbers are the same for any choice up to the order of floating-point sums, and for perceptrons
and networks of convolutions on a CPU to the bit. The faster one depends on the model and the
device. On a CPU small stacks win for convolutions, whose batching rule is a grouped convolution,
and for perceptrons, whose batched products cost little to call: a stack that stays in a core's
cache through all of its local steps is read from memory once. Operations on so few numbers gain
nothing from several threads, and Python has one interpreter for all of a process's threads: further
cores are used by further processes. One batched program, whose operations divide themselves over
threads, wins elsewhere.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._check import Checked, Count
from .._extras import installed, threadpoolctl
from ..errors import ConfigError
from ..ranks import SINGLE, Ranks
from .layout import Layout
from .module import StackedModule
from .per_example import ALIKE, MICROBATCH
from .products import Perceptron
from .stacking import LANES, max_clients, stack_sizes

_SMALL = 1 << 20
_CLIENTS = 8  # of a stack: enough to spread the cost of a call, few enough to stay in the cache
# parameters of a convolutional network from which a call costs little beside the work of a client
_ALONE = 1 << 16
_CACHE_BYTES = 3 << 20  # of parameters in a stack
_WORTH_A_PROCESS = 1 << 15  # parameters of a perceptron; a network of convolutions always is
_FEW = 8  # examples that cost less one by one than 32 at once
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class Execution(Checked):
    """Sets the number of clients that are computed at once, and of processes.

    Args:
        chunk: clients computed in one batched program, at most; ``None`` takes on a CPU 8 of a
            network of convolutions, or 1 if it has 2**16 parameters or more, and of a perceptron
            as many as have 3 MiB of parameters but at least 4; else as many as would have about 1
            GiB of parameters if none of the model's were frozen. Local training takes fewer than 4
            one by one, and without padding.
        processes: number of processes that compute the clients of a run by :meth:`Trainer.fit
            <fedmtl.Trainer.fit>`, each with its own clients (see :class:`~fedmtl.ranks.Ranks`); the
            others are copies of this process (by ``fork``, on Linux), and end with the run.
            ``None`` takes, on a CPU, the number of available cores for networks of convolutions and
            for perceptrons of 2**15 parameters or more, at most one for 8 clients of a round; and 1
            for all other models, and if the run needs a single process.

    Example:
        >>> from fedmtl import Execution
        >>> Execution(chunk=16, processes=2)
        Execution(chunk=16, processes=2)
    """

    chunk: Count | None = None
    processes: Count | None = None

    def resolve(
        self, module: nn.Module, device: torch.device, cores: int | None = None
    ) -> Execution:
        """Fills in the settings that are None, for a model on a device.

        Args:
            module: the model; its size and its layers decide.
            device: that computes it.
            cores: for processes; None for those that this process may use.

        Returns:
            Settings with numbers in place of None.
        """
        size = sum(p.numel() for p in module.parameters())
        chunk = max_clients(size)
        processes = 1
        if in_small_stacks(module, device):
            # A stack that stays in the cache of a core is read from memory once for all local
            # steps.
            row = size * next(module.parameters()).element_size()
            chunk = max(1, min(_CACHE_BYTES // row, chunk) // LANES) * LANES
            convolutional = _is_convolutional(module)
            if convolutional and size >= _ALONE:
                chunk = 1
            elif convolutional:
                chunk = _CLIENTS
            # A smaller model ends before a further process has started.
            if convolutional or size >= _WORTH_A_PROCESS:
                processes = cores or available_cores()
        return Execution(self.chunk or chunk, self.processes or processes)


class Executor:
    """Computes clients as stacks, a chunk at a time.

    Args:
        execution: resolved settings.
        module: a prepared module.
        device, dtype: of the parameters and the computation.
        batched: True if :func:`torch.func.vmap` takes the module; without it a chunk is one client.

    Attributes:
        batched: see above.
        stack: computes up to a chunk of clients as one batch; its buffers are overwritten by every
            call.
        one_thread: True if operations gain nothing from several threads.

    Example:
        >>> import torch
        >>> from fedmtl import Execution
        >>> from fedmtl.local import Executor, prepare_module
        >>> module = prepare_module(torch.nn.Linear(3, 1), torch.zeros(2, 3), seed=0)
        >>> cpu = torch.device("cpu")
        >>> executor = Executor(Execution(chunk=8), module, device=cpu, dtype=torch.float32)
        >>> [(part.start, part.stop) for part in executor.slices(20)]
        [(0, 8), (8, 16), (16, 20)]
    """

    def __init__(
        self,
        execution: Execution,
        module: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batched: bool = True,
    ) -> None:
        assert execution.chunk is not None
        self.batched = batched
        self.execution = execution
        self.chunk = execution.chunk
        self.one_thread = in_small_stacks(module, device) or (execution.processes or 1) > 1
        # Buffers grow with the first chunk; a stack of one is enough for a run that trains nothing.
        self.stack = StackedModule(module, capacity=1, device=device, dtype=dtype)

    def slices(self, count: int, *, width: int | None = None) -> Iterator[slice]:
        """Yields the clients that are computed at once, as slices.

        Args:
            count: number of clients in all.
            width: examples in the batches of each, see :func:`~.stacking.stack_sizes`; None for
                slices of ``chunk`` clients.

        Yields:
            Consecutive slices of ``range(count)``, of at most ``chunk`` clients.
        """
        size = self.chunk
        if width is not None:
            _, size = stack_sizes(width, self.chunk)
        for first in range(0, count, size):
            yield slice(first, min(first + size, count))

    def examples_at_once(self, expected: float) -> int:
        """Returns the ``width`` of :func:`~fedmtl.local.per_example.example_gradients` for batches
        of ``expected`` examples, a number that is the same for all clients, and public.

        Args:
            expected: examples of a batch, above 0.
        """
        if self.chunk >= LANES:
            return MICROBATCH
        if not self.batched or expected <= _FEW:
            return 1
        return ALIKE


def in_small_stacks(module: nn.Module, device: torch.device) -> bool:
    """Returns true for perceptrons and convolutional networks on a CPU, which are fastest in small
    stacks."""
    perceptron = Perceptron.of(module, Layout.of(module)) is not None
    return device.type == "cpu" and (perceptron or _is_convolutional(module))


def _is_convolutional(module: nn.Module) -> bool:
    return any(isinstance(m, _CONVOLUTIONS) for m in module.modules())


@contextmanager
def operation_threads(elements: float, products: float = math.inf) -> Iterator[None]:
    """Limits the operations of the block to one thread if they move few numbers.

    Handing a small operation to other threads costs more than it saves, and very much more on a
    busy machine.

    Args:
        elements: numbers that a typical operation of PyTorch moves, such as cohort size times
            parameters.
        products: numbers in the larger factor of a typical product of NumPy, whose threads are
            others. They take one thread if threadpoolctl is installed.

    Yields:
        Nothing; the threads of PyTorch are as before after the block.

    Example:
        >>> import torch
        >>> from fedmtl.local import operation_threads
        >>> with operation_threads(elements=1000):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    if elements < _SMALL:
        torch.set_num_threads(1)
    limit: AbstractContextManager[Any] = nullcontext()
    if products < _SMALL and installed("threadpoolctl"):
        limit = _numpy_products().limit(limits=1)
    try:
        with limit:
            yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _numpy_products() -> threadpoolctl.ThreadpoolController:
    """Returns the libraries by which NumPy and SciPy compute products; to look for them takes
    long."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_device(device: str, ranks: Ranks = SINGLE) -> torch.device:
    """Returns the device of a run.

    Several ranks on one machine take the next GPU each.

    Args:
        device: a name as of :class:`torch.device`, or ``"auto"`` for the first GPU, or the CPU
            without one.
        ranks: the processes of the run.

    Raises:
        ConfigError: the device does not exist here.
    """
    if device in ("auto", "cuda") and ranks.beside > 1 and torch.cuda.is_available():
        return torch.device("cuda", ranks.local % torch.cuda.device_count())
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("cpu")
    try:
        place = torch.device(device)
        # Clips and sums need float64, which mps lacks.
        torch.zeros(1, dtype=torch.float64, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"device is {device!r}, which is not available here; accepted: {', '.join(here)}."
        ) from error
    return place
