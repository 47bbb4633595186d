"""A run leaves the process in which it is made as it was."""

import ctypes
import signal
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedmtl import Execution, FedAvg

from ..small import Ends
from .settings import SOLVER, trainer


def state() -> tuple[object, ...]:
    """What of a process its parts share: threads, precision, random numbers, warnings and signals."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        (torch.get_num_threads(), [pool["num_threads"] for pool in threadpool_info()]),
        (torch.get_default_dtype(), torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32),
        (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        (list(warnings.filters), warnings.showwarning),
        (signal.getsignal(signal.SIGINT), np.geterr()),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_leaves_its_process_as_it_was(workers, fails, monkeypatch):
    opened, library = [], ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name=None, **options: opened.append(name) or library(name, **options))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        run = trainer(
            algorithm=FedAvg(local=SOLVER),
            execution=Execution(processes=workers),
            rounds=2,
            callbacks=[Ends(0, RuntimeError)] * fails,
        )
        with pytest.raises(RuntimeError, match="at the end") if fails else nullcontext():
            run.fit()
        assert state() == before
        assert None not in opened, "what is set in the C library, such as mallopt, stays for good"
    finally:
        torch.set_num_threads(threads)
