"""Every test starts alike, whatever ran before it."""

import logging
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

LEFT = "FEDMTL_LEFT_BY_A_TEST"
FOLDER = Path.cwd()
THREADS = torch.get_num_threads()
PRESSED = signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_test_finds_nothing_of_the_one_before(turn: str, tmp_path: Path) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()  # noqa: NPY002 - the global generator
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
    log = logging.getLogger("fedmtl")
    assert LEFT not in os.environ
    assert Path.cwd() == FOLDER
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == THREADS
    assert log.propagate
    assert not any(isinstance(handler, logging.NullHandler) for handler in log.handlers)
    assert logging.root.manager.disable == logging.NOTSET
    assert signal.getsignal(signal.SIGINT) == PRESSED
    os.environ[LEFT] = turn
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS + 1)
    log.propagate = False
    log.addHandler(logging.NullHandler())
    logging.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
