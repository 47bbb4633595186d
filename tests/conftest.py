"""Settings of all tests."""

import gc
import importlib.util
import logging
import os
import random
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # one worker for each core, one thread for each worker

# what `pytest -m quick` runs: every layer once, with the recorded numbers of every method, in less than a minute
QUICK = {
    "test_settings.py", "golden", "graphs", "data/test_dataset.py", "models/test_models.py", "local/test_batches.py",
    "local/test_local.py", "local/test_optimizers.py", "local/test_products.py", "schedules/test_rounds.py",
    "privacy/test_clip.py", "privacy/test_samplers.py", "privacy/test_channel.py", "privacy/test_ledger.py",
    "privacy/test_records.py", "algorithms/test_fedavg.py", "algorithms/test_ditto.py", "algorithms/test_linear.py",
    "algorithms/test_client_half.py", "trainer/test_evaluation.py", "trainer/test_trainer.py",
}  # fmt: skip


gc.disable()  # what is made while tests are collected stays: looking through it is a fifth of the time


def pytest_collection_finish() -> None:
    """Collects garbage from here on, but not among the modules and the tests."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        if {path.as_posix(), path.parts[0]} & QUICK:
            item.add_marker("quick")


LOGGERS = ("", "fedmtl", "flwr")
GPU = torch.cuda.is_available()


def seed_generators() -> None:
    """Seed the generators of the process, from which layers of torch and some libraries draw."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries; tests have generators of their own
    if GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # in a thousandth of the time


def pytest_collectstart() -> None:
    """What a module makes while it is imported is the same beside all others and alone."""
    seed_generators()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Seeds the global generators before each test, and takes back what it changed in the settings of the process.

    These are the folder, the environment, the loggers of the packages, the handler of Ctrl-C, and the dtype, gradients,
    threads and precision of torch. The filters of warnings pytest itself takes back.
    """
    seed_generators()
    folder = Path.cwd()
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    told = [(log.level, log.propagate, log.disabled, log.handlers[:]) for log in loggers]
    silenced = logging.root.manager.disable
    pressed = signal.getsignal(signal.SIGINT)
    dtype = torch.get_default_dtype()
    graded = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    yield
    os.chdir(folder)
    restore_environment(environment)
    for log, (level, propagates, disabled, handlers) in zip(loggers, told, strict=True):
        log.setLevel(level)
        log.propagate = propagates
        log.disabled = disabled
        log.handlers[:] = handlers
    logging.disable(silenced)
    signal.signal(signal.SIGINT, pressed)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(graded)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def restore_environment(before: dict[str, str]) -> None:
    """Give every variable its value of ``before``, and remove the others but the one in which pytest names the test."""
    ours = "PYTEST_CURRENT_TEST"
    for name in os.environ.keys() - before.keys() - {ours}:
        del os.environ[name]
    for name in before.keys() - {ours}:
        if os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True, scope="session")
def no_sync() -> Iterator[None]:
    """Leaves it to the system when files are written to the disk: tests kill processes, but no machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_composition() -> Iterator[None]:
    """Spares Hydra half of the time of its compositions, of which the tests make more than a thousand.

    It reads the same version numbers again for every entry of a list of defaults. For every list it makes a map of the
    choices, by which it resolves the references of the list, of which most have none.
    """
    # the tests that need a GPU run where PyTorch is installed and little else
    if importlib.util.find_spec("hydra") is None:
        yield
        return
    from hydra import version
    from hydra._internal import defaults_list

    make_map = defaults_list._create_interpolation_map

    def with_references(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        if "${" in repr(defaults):
            return make_map(overrides, defaults, self_added)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "_get_version", cache(version._get_version))
        patch.setattr(defaults_list, "_create_interpolation_map", with_references)
        yield


def quick_figures(patch: pytest.MonkeyPatch) -> None:
    """Let runs write a line of text in place of each figure: drawing takes seconds, and has tests of its own."""
    import fedmtl.report.figures as figures

    def plot(*args: Any, **options: Any) -> None:
        next(a for a in args if isinstance(a, Path)).write_text("a figure")

    for name in ("plot_rounds", "plot_clients"):
        patch.setattr(figures, name, plot)


@pytest.fixture(autouse=True, scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Patches the figures of every module that is not marked by ``pytest.mark.figures``."""
    with pytest.MonkeyPatch.context() as patch:
        drawn = importlib.util.find_spec("matplotlib") is not None
        if drawn and request.node.get_closest_marker("figures") is None:
            quick_figures(patch)
        yield patch


@pytest.fixture
def real_figures(figures: pytest.MonkeyPatch) -> Iterator[None]:
    """Draws the figures of one test."""
    figures.undo()
    yield
    quick_figures(figures)
