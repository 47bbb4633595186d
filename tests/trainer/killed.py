"""Processes to kill: children of a fork server that has imported, once, all that a run imports."""

import multiprocessing
import os
import signal
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmtl import (
    PMTL,
    Callback,
    ClientPrivacy,
    FedAvg,
    FixedCohort,
    Interval,
    Local,
    LocalSGD,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    ServerOptimizer,
    Trainer,
    _files,
    models,
)
from fedmtl.privacy import Rounds
from tests.helpers import ragged_classification
from tests.trainer.half import Half
from tests.trainer.settings import CLIENTS, COHORT, DELTA, NOISE

ROUNDS = 32
EVERY = 3  # rounds between checkpoints
CLIP = 0.7
SOLVER = LocalSGD(lr=0.2, steps=2, batch_size=4, momentum=0.5)
PRIVACY = {"clip_norm": CLIP, "noise_multiplier": NOISE, "delta": DELTA}
ADAM = ServerOptimizer(optimizer_name="Adam", lr=0.05)
CASES: dict[str, dict[str, Any]] = {
    "pmtl-global": {"baselines": ("local",)},
    "pmtl-local": {"algorithm": PMTL(lam=0.5, local=SOLVER, delta="local")},
    "pmtl-fixed": {"schedule": FixedCohort(cohort=COHORT)},
    "pmtl-plain": {"privacy": None},
    "pmtl-adaptive": {
        "privacy": ClientPrivacy(**PRIVACY | {"clip_norm": QuantileClip(initial=CLIP, lr=0.3, count_noise=1.2)})
    },
    "pmtl-records": {"privacy": RecordPrivacy(**PRIVACY)},
    "fedavg": {"algorithm": FedAvg(local=SOLVER)},
    "fedavg-adam": {"algorithm": FedAvg(local=SOLVER, server_optimizer=ADAM)},
    "fedavg-canaries": {"algorithm": FedAvg(local=SOLVER), "audit": Interval(canaries=20)},
    "local": {"algorithm": Local(local=SOLVER)},
}
POINTED = ("pmtl-global", "pmtl-records")  # whose folders hold different files and charges
POINTS = ("begun", "released", "stepped", "appending", "writing", "written", "renamed")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.trainer.warm"])


def run(
    case: str,
    folder: Path,
    *,
    delay: float | None = None,
    point: str = "",
    step: int = 0,
    resume: bool = False,
    **settings: Any,
) -> tuple[bool, float]:
    """Run or resume in ``folder``: (whether the process was killed, its seconds); raises if it failed.

    Args:
        case: one of CASES.
        folder: of the run.
        delay: seconds after which the process is killed.
        point: at which it kills itself, in the first round from ``step`` on.
        step: see ``point``.
        resume: whether to resume.
        settings: of the trainer; ``privacy`` is a dictionary of what differs.
    """  # fmt: skip
    errors, began = folder.with_name("error.txt"), time.monotonic()
    process = SERVER.Process(target=child, args=(case, folder, errors, point, step, resume, settings))
    process.start()
    process.join(delay)
    process.kill()  # without effect if it has ended
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the run failed with status {process.exitcode}:\n{errors.read_text()}")
    return process.exitcode == -signal.SIGKILL, time.monotonic() - began


def child(case: str, folder: Path, errors: Path, point: str, step: int, resume: bool, settings: dict[str, Any]) -> None:
    """Run, and exit with status 0; with status 1 after an error, which is written to ``errors``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        callbacks = (arm(point, step),) if point else ()
        trainer_of(case, folder=folder, callbacks=callbacks, **settings).fit(resume=resume)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)


def trainer_of(case: str, *, privacy: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    """The trainer of a case with other ``settings``; ``privacy`` are those that differ from the case."""
    defaults: dict[str, Any] = {
        "algorithm": PMTL(lam=0.5, local=SOLVER),
        "data": ragged_classification(CLIENTS),
        "model": models.mlp(hidden=4, dropout=0.25),
        "schedule": PoissonSampling(cohort=COHORT),
        "privacy": ClientPrivacy(**PRIVACY),
        "rounds": ROUNDS,
        "eval_every": 16,
        "checkpoint_every": EVERY,
        "progress": False,
    }
    defaults |= CASES[case] | settings
    if privacy:
        defaults["privacy"] = replace(defaults["privacy"], **privacy)
    return Trainer(**defaults)


def arm(point: str, step: int) -> Any:
    """Make this process die at a point of the first round from ``step`` on; returns a callback."""
    current = -1

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Count(Callback):
        def on_event(self, event: Any, state: Any) -> None:
            nonlocal current
            current = event.step
            if point == "stepped" and current >= step:
                die()

    begin, release = Rounds.begin, Rounds.release

    def begin_and_die(self: Rounds, at: int, ranks: Any) -> None:
        begin(self, at, ranks)
        if at >= step:
            die()

    def release_and_die(self: Rounds, *args: Any) -> Any:
        value = release(self, *args)
        if current + 1 >= step:
            die()
        return value

    def open_half(path: Path, mode: str) -> Any:
        file = open(path, mode)  # noqa: SIM115 - closed by its user
        here = path.parent.name == "clients" if point == "appending" else path.name.startswith("checkpoint")
        return Half(file, die) if current >= step and here else file

    rename = os.replace

    def replace_and_die(source: Any, target: Any) -> None:
        here = current >= step and Path(target).name == "checkpoint.safetensors"
        if point == "written" and here:
            die()
        rename(source, target)
        if here:
            die()

    if point == "begun":
        Rounds.begin = begin_and_die  # type: ignore[method-assign]
    elif point == "released":
        Rounds.release = release_and_die  # type: ignore[method-assign]
    elif point in ("appending", "writing"):
        _files.open = open_half  # type: ignore[attr-defined]
    elif point in ("written", "renamed"):
        os.replace = replace_and_die
    return Count()
