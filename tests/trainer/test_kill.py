"""A process killed at any moment resumes to the same bits, and the ledger never goes back."""

import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedmtl import (
    Callback,
    ClientPrivacy,
    FedAvg,
    FixedCohort,
    Interval,
    LocalSGD,
    QuantileClip,
    RecordPrivacy,
    Result,
    ServerOptimizer,
    Trainer,
    _files,
    models,
)
from fedmtl.privacy import Rounds
from fedmtl.trainer.folder import Checkpoint

from ..small import check_same
from .half import Half
from .ledgers import charges, participations
from .settings import COHORT, DELTA, NOISE, epsilon, trainer

ROUNDS = 32
EVERY = 3  # rounds between checkpoints
KILLS = 3  # of each run
PRIVACY: dict[str, Any] = {"clip_norm": 0.7, "noise_multiplier": NOISE, "delta": DELTA}
SOLVER = LocalSGD(lr=0.2, steps=2, batch_size=4, momentum=0.5)
ADAM = ServerOptimizer(optimizer_name="Adam", lr=0.05)
QUANTILE = QuantileClip(initial=0.7, lr=0.3, count_noise=1.2)
CASES: dict[str, dict[str, Any]] = {
    "baseline": {"baselines": ("local",)},
    "fixed": {"schedule": FixedCohort(cohort=COHORT)},
    "plain": {"privacy": None},
    "quantile": {"privacy": ClientPrivacy(**PRIVACY | {"clip_norm": QUANTILE})},
    "records": {"privacy": RecordPrivacy(**PRIVACY)},
    "adam": {"algorithm": FedAvg(local=SOLVER, server_optimizer=ADAM)},
    "canaries": {"algorithm": FedAvg(local=SOLVER), "audit": Interval(canaries=20)},
}
POINTED = ("baseline", "records")  # whose folders hold different files and charges
POINTS = ("begun", "released", "stepped", "appending", "writing", "written", "renamed")
FORK = multiprocessing.get_context("fork")


def run(case: str, folder: Path, *, delay: float | None = None, **settings: Any) -> bool:
    """Run or resume in a process of its own; return whether it was killed, by itself or after ``delay`` seconds."""
    errors = folder.with_name("error.txt")
    process = FORK.Process(target=child, args=(case, folder, errors), kwargs=settings)
    process.start()
    process.join(delay)
    process.kill()  # without effect if it has ended
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the run failed with status {process.exitcode}:\n{errors.read_text()}")
    return process.exitcode == -signal.SIGKILL


def child(case: str, folder: Path, errors: Path, *, point="", step=0, resume=False, **settings: Any) -> None:
    """Run, and die at ``point`` of the first round from ``step`` on; what goes wrong is written to ``errors``."""
    try:
        made = trainer_of(case, folder, **settings)
        replace(made, callbacks=[Killer(point, step)] if point else []).fit(resume=resume)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)


def trainer_of(case: str, folder: Path, *, privacy: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    """The trainer of a case with other ``settings``; ``privacy`` are those that differ from the case."""
    defaults = {"model": models.mlp(hidden=4, dropout=0.25), "dtype": "float32", "rounds": ROUNDS, "eval_every": 16}
    made = trainer(**defaults | {"checkpoint_every": EVERY, "folder": folder} | CASES[case] | settings)
    return made if privacy is None else replace(made, privacy=replace(made.privacy, **privacy))


class Killer(Callback):
    """Ends its process at a point of the first round from ``step`` on."""

    def __init__(self, point: str, step: int) -> None:
        self.point, self.step, self.current = point, step, -1
        begin, release, rename = Rounds.begin, Rounds.release, os.replace

        def begun(rounds: Rounds, at: int, ranks: Any) -> None:
            begin(rounds, at, ranks)
            self.pass_("begun", at)

        def released(rounds: Rounds, *args: Any) -> Any:
            value = release(rounds, *args)
            self.pass_("released", self.current + 1)
            return value

        def opened(path: Path, mode: str) -> Any:
            file = open(path, mode)  # noqa: SIM115 - closed by its user
            kind = "appending" if path.parent.name == "clients" else "writing"
            here = kind == "appending" or path.name.startswith("checkpoint")
            return Half(file, partial(self.pass_, kind)) if here else file

        def renamed(source: Any, target: Any) -> None:
            here = Path(target).name == "checkpoint.safetensors"
            self.pass_("written" if here else "", self.current)
            rename(source, target)
            self.pass_("renamed" if here else "", self.current)

        Rounds.begin, Rounds.release = begun, released  # type: ignore[method-assign]
        _files.open, os.replace = opened, renamed  # type: ignore[attr-defined]

    def on_event(self, event: Any, state: Any) -> None:
        self.current = event.step
        self.pass_("stepped")

    def pass_(self, point: str, step: int | None = None) -> None:
        """Die where this is the point, in the current round unless another is given."""
        if point == self.point and (self.current if step is None else step) >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """case -> (result, seconds) of a run that is not killed."""
    done: dict[str, tuple[Result, float]] = {}

    def get(case: str) -> tuple[Result, float]:
        if case not in done:
            folder = tmp_path_factory.mktemp("reference")
            whole = trainer_of(case, folder / "whole").fit()  # here: all processes inherit the epsilons it computes
            began = time.monotonic()
            run(case, folder / "timed")
            done[case] = whole, time.monotonic() - began
        return done[case]

    return get


def check_files(folder: Path, expected: Result, *, charged: bool = True) -> None:
    """Check that the files of a run, and of its baselines, give the bits of another one, and that each round is charged
    once."""
    found = Result.load(folder)
    assert found.baselines.keys() == expected.baselines.keys()
    for one, other in ((found, expected), *((found.baselines[name], run) for name, run in expected.baselines.items())):
        check_same(one, other)
    assert charges(ledger(folder)) == (dict.fromkeys(range(ROUNDS), 1) if charged else {})


def result(folder: Path) -> dict:
    return json.loads((folder / "private/result.json").read_text())


def ledger(folder: Path) -> Path:
    return folder / "private/ledger.jsonl"


def checkpointed(folder: Path) -> int:
    """Rounds in the checkpoint; it must be readable after every kill."""
    path = folder / "private/checkpoint.safetensors"
    return Checkpoint.read(path).step if path.exists() else 0


def looked_at(case: str, folder: Path, before: Counter[int]) -> Counter[int]:
    """Return what the ledger says after a kill, and check it beside what it said before and the checkpoint."""
    now = charges(ledger(folder))
    assert before <= now, "a charge has gone"
    assert case == "plain" or set(range(checkpointed(folder))) <= set(now), "a release without a charge is saved"
    return now


@pytest.mark.parametrize("case", CASES)
def test_random_times(case, reference, tmp_path):
    expected, seconds = reference(case)
    folder, clock, kills, killed = tmp_path / "run", random.Random(f"times of {case}"), 0, True
    before: Counter[int] = Counter()
    while killed:
        delay = clock.uniform(0, 0.4 * seconds) if kills < KILLS else None
        killed = run(case, folder, resume=True, delay=delay)
        kills += killed
        before = looked_at(case, folder, before)
    assert kills
    check_files(folder, expected, charged=case != "plain")
    if case == "fixed":
        assert participations(ledger(folder)).total() == ROUNDS * COHORT


@pytest.mark.parametrize("case", POINTED)
def test_exact_points(case, reference, tmp_path):
    """Between reserve, release, update and checkpoint, and within the writing of clients' rows and of a checkpoint."""
    folder, step = tmp_path / "run", 4
    before: Counter[int] = Counter()
    for point in POINTS:
        assert run(case, folder, resume=True, point=point, step=step), f"{point} was never reached"
        before = looked_at(case, folder, before)
        assert step in before, "the noise was drawn before its charge was on the disk"
        done = checkpointed(folder)
        if point in ("begun", "released", "stepped"):
            assert done == step // EVERY * EVERY
        elif point == "renamed":
            assert step < done <= step + EVERY
        else:
            assert done <= step, "an unfinished checkpoint has replaced the old one"
        step += 4
    assert not run(case, folder, resume=True)
    check_files(folder, reference(case)[0])


def test_a_finished_run_resumed_and_killed_keeps_its_files(reference, tmp_path):
    expected, seconds = reference("baseline")
    folder, clock = tmp_path / "run", random.Random("finished")
    run("baseline", folder)
    for _ in range(KILLS):
        run("baseline", folder, resume=True, delay=clock.uniform(0, 0.4 * seconds))
        if (folder / "private" / "result.json").exists():  # else the mark of a finished run is to be written again
            check_files(folder, expected)
    assert not run("baseline", folder, resume=True)
    check_files(folder, expected)


# Secure mode: noise is fresh in every process, so a replay is a new release.


@pytest.mark.parametrize("case", POINTED)
def test_secure_replays_are_charged_again(case, tmp_path):
    """The budget of rounds pays for them, and the run ends before its last round."""
    folder, budget = tmp_path / "run", (epsilon(ROUNDS) + epsilon(ROUNDS + 1)) / 2
    privacy = {"source": "secure", "epsilon": budget if case == "baseline" else 1e3}
    assert run(case, folder, privacy=privacy, point="stepped", step=10)
    lost = charges(ledger(folder)).total()
    assert charges(ledger(folder)) == dict.fromkeys(range(lost), 1)
    assert lost > 10
    assert not run(case, folder, privacy=privacy, resume=True)
    found = result(folder)
    twice = range(9, lost)  # the checkpoint holds 9
    assert charges(ledger(folder)) == {step: 1 + (step in twice) for step in range(found["rounds"])}
    assert found["epsilon"] <= privacy["epsilon"]
    if case == "baseline":
        assert (found["stopped"], found["rounds"], found["releases"]) == ("budget", ROUNDS - len(twice), ROUNDS)
        assert found["epsilon"] == pytest.approx(epsilon(ROUNDS), rel=1e-3)
