"""How a run ends early: by its rule, by the keyboard, or killed at any moment; and how it resumes to the same bits."""

import math
import multiprocessing
import os
import random
import resource
import signal
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event

from fedmtl import (
    PMTL,
    Buffered,
    Callback,
    ClientPrivacy,
    EarlyStopping,
    FedAvg,
    FixedCohort,
    Interval,
    Local,
    LocalSGD,
    QuantileClip,
    RecordPrivacy,
    Result,
    ServerOptimizer,
    Trainer,
    _files,
    models,
)
from fedmtl.errors import ConfigError
from fedmtl.privacy import RoundChannel
from fedmtl.schedules import RandomLatency
from fedmtl.trainer.checkpoint import Checkpoint
from fedmtl.trainer.interruption import held_interruption

from ..helpers import library_accountant
from ..small import check_same
from . import test_asynchronous
from .half import by_halves
from .ledgers import charges, participations, read_lines
from .settings import CLIENTS, COHORT, DELTA, NOISE, SOLVER, epsilon, trainer


def rows(*distances: float) -> list[dict[str, float]]:
    return [{"distance": value} for value in distances]


def test_it_waits_for_patience_evaluations_without_a_larger_distance():
    rule = EarlyStopping(patience=2)
    assert not rule.stops(rows(1, 2))
    assert not rule.stops(rows(1, 2, 1.5))
    assert rule.stops(rows(1, 2, 1.5, 2.0))
    assert not rule.stops(rows(1, 2, 1.5, 2.1))
    assert rule.stops(rows(1, 2, math.nan, math.nan))
    assert EarlyStopping(patience=2, min_delta=0.5).stops(rows(1, 2, 2.5, 2.9))
    assert not EarlyStopping(patience=2, min_delta=0.5).stops(rows(1, 2, 2.5, 3.1))


def test_the_distance_is_how_far_the_released_model_has_moved():
    """So the decision is a function of the releases."""
    run = trainer(early_stopping=EarlyStopping(patience=5))
    result = run.fit()
    assert result.final["distance"] == pytest.approx(
        float((result.shared - run.problem().initial).norm()), rel=1e-12
    )
    assert len({row["distance"] for row in result.history}) == len(result.history)


def test_an_algorithm_without_a_shared_model_is_refused():
    with pytest.raises(ConfigError, match="local has none"):
        trainer(early_stopping=EarlyStopping(), algorithm=Local(local=SOLVER)).fit()


def test_a_baseline_without_a_shared_model_runs_to_its_end():
    result = trainer(
        early_stopping=EarlyStopping(patience=1, min_delta=1e9), baselines=["local"]
    ).fit()
    assert result.history[-1]["round"] < result.baselines["local"].history[-1]["round"]


ALWAYS = EarlyStopping(
    patience=1, min_delta=1e9
)  # stops at the second evaluation, after round 4 of 6


def test_a_run_that_stops_early_is_charged_as_planned(tmp_path):
    result = trainer(early_stopping=ALWAYS, folder=tmp_path / "run").fit()
    assert (result.stopped, result.final["round"]) == ("early", 4)
    assert result.epsilon == result.privacy.epsilon == pytest.approx(epsilon(6), rel=1e-3)
    assert result.privacy.remaining_charged
    assert "charged as all the planned rounds" in result.summary()
    assert [
        line["uses"]
        for line in read_lines(tmp_path / "run/private/ledger.jsonl")
        if line["kind"] == "remaining"
    ] == [6]
    again = trainer(early_stopping=ALWAYS, folder=tmp_path / "run").fit(resume=True)
    assert (again.stopped, again.final["round"], again.epsilon) == ("early", 4, result.epsilon)
    whole = trainer(folder=tmp_path / "whole").fit()
    assert (whole.stopped, whole.epsilon) == ("rounds", result.epsilon)
    assert not whole.privacy.remaining_charged


def test_a_stop_at_the_last_round_is_none(tmp_path):
    result = trainer(early_stopping=EarlyStopping(patience=2, min_delta=1e9)).fit()
    assert (result.stopped, result.final["round"]) == ("rounds", 6)
    assert not result.privacy.remaining_charged


def test_where_participations_are_charged_everybody_is_charged_up_to_the_cap():
    result = trainer(early_stopping=ALWAYS, schedule=FixedCohort(cohort=4)).fit()
    assert result.stopped == "early"
    cap = math.ceil(6 * 4 / CLIENTS) + 1
    expected = library_accountant().compose(dp_event.GaussianDpEvent(NOISE), cap).get_epsilon(DELTA)
    assert result.epsilon == pytest.approx(expected, rel=1e-3)


# Interruptions from the keyboard: after the event, with a checkpoint, and nothing is paid for twice


@pytest.fixture(autouse=True)
def keyboard():
    """Python's own handler, also where the tests were started by a shell that ignores SIGINT in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(Callback):
    """Presses Ctrl-C while the event of ``step`` is being dealt with."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, []

    def on_block(self, event, state) -> None:
        self.seen.append(event.step)
        if event.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stops_after_the_event_and_goes_on_to_the_same_bits(tmp_path):
    whole = trainer(folder=tmp_path / "whole").fit()
    part = trainer(folder=tmp_path / "part", checkpoint_every=None)
    pressed = Interrupting(2)
    with pytest.raises(KeyboardInterrupt):
        replace(part, callbacks=(pressed,)).fit()
    assert pressed.seen == [0, 1, 2]
    rest = Interrupting(-1)
    result = replace(part, callbacks=(rest,)).fit(resume=True)
    assert rest.seen == [3, 4, 5], "nothing is computed again"
    check_same(result, whole)


def test_a_secure_run_pays_once_for_every_answer(tmp_path):
    run = test_asynchronous.trainer("learner", folder=tmp_path)
    run = replace(run, privacy=replace(run.privacy, source="secure"))
    with pytest.raises(KeyboardInterrupt):
        replace(run, callbacks=(Interrupting(25),)).fit()
    result = run.fit(resume=True)
    assert result.stopped == "rounds"
    assert charges(tmp_path / "private" / "ledger.jsonl") == dict.fromkeys(
        range(result.final["round"]), 1
    )


def test_a_second_one_interrupts_at_once_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with held_interruption() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_others_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with held_interruption() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == [1]
            assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


ROUNDS = 24
EVERY = 2  # rounds between checkpoints
KILLS = 3  # of each run
PRIVACY: dict[str, Any] = {"clip_norm": 0.7, "noise_multiplier": NOISE, "delta": DELTA}
SHORT = LocalSGD(lr=0.2, steps=2, batch_size=4)
MOMENTUM = replace(SHORT, momentum=0.5)
ADAM = ServerOptimizer(optimizer_name="Adam", lr=0.05)
QUANTILE = QuantileClip(initial=0.7, lr=0.3, count_noise=1.2)
CASES: dict[str, dict[str, Any]] = {
    "baseline": {"baselines": ("local",)},
    "fixed": {"schedule": FixedCohort(cohort=COHORT)},
    "plain": {"privacy": None},
    "quantile": {"privacy": ClientPrivacy(**PRIVACY | {"clip_norm": QUANTILE})},
    "records": {"privacy": RecordPrivacy(**PRIVACY)},
    "buffered": {
        "schedule": Buffered(latency=RandomLatency("lognorm", {"s": 1.5}), concurrency=6, buffer=2)
    },
    "adam": {"algorithm": FedAvg(local=MOMENTUM, server_optimizer=ADAM)},
    "canaries": {"algorithm": FedAvg(local=MOMENTUM), "audit": Interval(canaries=20)},
}
POINTED = ("baseline", "records")  # whose folders hold different files and charges
POINTS = ("begun", "released", "stepped", "appending", "writing", "written", "renamed")
FORK = multiprocessing.get_context("fork")


def run(case: str, folder: Path, **settings: Any) -> bool:
    """Run or resume in a process of its own, with the arguments of :func:`child`; return whether it was killed."""
    errors = folder.with_name("error.txt")
    process = FORK.Process(target=child, args=(case, folder, errors), kwargs=settings)
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL, -signal.SIGPROF):
        raise AssertionError(
            f"the run failed with status {process.exitcode}:\n{errors.read_text()}"
        )
    return process.exitcode != 0


def child(
    case: str,
    folder: Path,
    errors: Path,
    *,
    delay=0.0,
    point="",
    step=0,
    resume=False,
    **settings: Any,
) -> None:
    """Run, and die after ``delay`` seconds of processor time, which no other process shortens, or at ``point`` of the
    first round from ``step`` on; what goes wrong is written to ``errors``."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the system ends the process, wherever it is
    signal.setitimer(signal.ITIMER_PROF, delay)
    try:
        made = trainer_of(case, folder, **settings)
        replace(made, callbacks=[Killer(point, step)] if point else []).fit(resume=resume)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)


def trainer_of(
    case: str, folder: Path, *, privacy: dict[str, Any] | None = None, **settings: Any
) -> Trainer:
    """The trainer of a case with other ``settings``; ``privacy`` are those that differ from the case."""
    defaults = {
        "algorithm": PMTL(lam=0.5, local=SHORT),
        "model": models.mlp(hidden=4, dropout=0.25),
        "dtype": "float32",
        "rounds": ROUNDS,
        "eval_every": 12,
    }
    made = trainer(
        **defaults | {"checkpoint_every": EVERY, "folder": folder} | CASES[case] | settings
    )
    return made if privacy is None else replace(made, privacy=replace(made.privacy, **privacy))


class Killer(Callback):
    """Ends its process at a point of the first round from ``step`` on."""

    def __init__(self, point: str, step: int) -> None:
        self.point, self.step, self.current = point, step, -1
        begin, release, rename = RoundChannel.begin, RoundChannel.release, os.replace

        def begun(rounds: RoundChannel, at: int, ranks: Any) -> None:
            begin(rounds, at, ranks)
            self.pass_("begun", at)

        def released(rounds: RoundChannel, *args: Any) -> Any:
            value = release(rounds, *args)
            self.pass_("released", self.current + 1)
            return value

        def opened(path: Path, mode: str) -> Any:
            file = open(path, mode)  # noqa: SIM115 - closed by its user
            kind = "appending" if path.parent.name == "clients" else "writing"
            here = kind == "appending" or path.name.startswith("checkpoint")
            return by_halves(file, partial(self.pass_, kind)) if here else file

        def renamed(source: Any, target: Any) -> None:
            here = Path(target).name == "checkpoint.safetensors"
            self.pass_("written" if here else "", self.current)
            rename(source, target)
            self.pass_("renamed" if here else "", self.current)

        RoundChannel.begin, RoundChannel.release = begun, released  # type: ignore[method-assign]
        _files.open, os.replace = opened, renamed  # type: ignore[attr-defined]

    def on_block(self, event: Any, state: Any) -> None:
        self.current = event.step
        self.pass_("stepped")

    def pass_(self, point: str, step: int | None = None) -> None:
        """Die where this is the point, in the current round unless another is given."""
        if point == self.point and (self.current if step is None else step) >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def spent() -> float:
    """Return the seconds of the processor that ended processes took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """case -> (result, seconds of the processor) of a run that is not killed."""
    done: dict[str, tuple[Result, float]] = {}

    def get(case: str) -> tuple[Result, float]:
        if case not in done:
            folder = tmp_path_factory.mktemp("reference")
            whole = trainer_of(
                case, folder / "whole"
            ).fit()  # here: all processes inherit the epsilons it computes
            began = spent()
            run(case, folder / "timed")
            done[case] = whole, spent() - began
        return done[case]

    return get


def check_files(folder: Path, expected: Result, *, charged: bool = True) -> None:
    """Check that the files of a run, and of its baselines, give the bits of another one, and that each round is charged
    once."""
    found = Result.load(folder)
    assert found.baselines.keys() == expected.baselines.keys()
    for one, other in (
        (found, expected),
        *((found.baselines[name], run) for name, run in expected.baselines.items()),
    ):
        check_same(one, other)
    assert charges(ledger(folder)) == (dict.fromkeys(range(ROUNDS), 1) if charged else {})


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
    assert case == "plain" or set(range(checkpointed(folder))) <= set(now), (
        "a release without a charge is saved"
    )
    return now


@pytest.mark.parametrize("case", CASES)
def test_random_times(case, reference, tmp_path):
    expected, seconds = reference(case)
    folder, clock, kills, killed = tmp_path / "run", random.Random(f"times of {case}"), 0, True
    before: Counter[int] = Counter()
    while killed:
        delay = clock.uniform(0, 0.4 * seconds) if kills < KILLS else 0.0  # never
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
    folder = tmp_path / "run"
    step = EVERY + 1
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
        step += EVERY + 1
    assert not run(case, folder, resume=True)
    check_files(folder, reference(case)[0])


def test_a_finished_run_resumed_and_killed_keeps_its_files(reference, tmp_path):
    expected, seconds = reference("baseline")
    folder, clock = tmp_path / "run", random.Random("finished")
    run("baseline", folder)
    for _ in range(KILLS):
        run("baseline", folder, resume=True, delay=clock.uniform(0, 0.4 * seconds))
        if (
            folder / "private" / "result.json"
        ).exists():  # else the mark of a finished run is to be written again
            check_files(folder, expected)
    assert not run("baseline", folder, resume=True)
    check_files(folder, expected)


# Secure mode: noise is fresh in every process, so a replay is a new release.


@pytest.mark.parametrize("case", POINTED)
def test_secure_replays_are_charged_again(case, tmp_path):
    """The budget of rounds pays for them, and the run ends before its last round."""
    folder, budget = tmp_path / "run", (epsilon(ROUNDS) + epsilon(ROUNDS + 1)) / 2
    privacy = {"source": "secure", "epsilon": budget if case == "baseline" else 1e3}
    assert run(case, folder, privacy=privacy, point="stepped", step=11)
    lost = charges(ledger(folder)).total()
    assert charges(ledger(folder)) == dict.fromkeys(range(lost), 1)
    assert lost > 11
    assert not run(case, folder, privacy=privacy, resume=True)
    found = Result.load(folder)
    rounds = found.final["round"]
    twice = range(10, lost)  # the checkpoint holds 10
    assert charges(ledger(folder)) == {step: 1 + (step in twice) for step in range(rounds)}
    assert found.epsilon <= privacy["epsilon"]
    if case == "baseline":
        assert (found.stopped, rounds, found.privacy.releases) == (
            "budget",
            ROUNDS - len(twice),
            ROUNDS,
        )
        assert found.epsilon == pytest.approx(epsilon(ROUNDS), rel=1e-3)
