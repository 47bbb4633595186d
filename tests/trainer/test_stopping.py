"""How a run ends before its last round: early stopping saves time, not budget; an interruption wastes neither."""

import math
import os
import signal
from dataclasses import replace

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedmtl import (
    Callback,
    EarlyStopping,
    FixedCohort,
    Local,
)
from fedmtl.errors import ConfigError
from fedmtl.trainer.run import held_interruption

from ..small import check_same
from . import test_asynchronous
from .ledgers import charges, read_lines
from .settings import CLIENTS, DELTA, NOISE, SOLVER, epsilon, trainer


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
    assert result.final["distance"] == pytest.approx(float((result.shared - run.problem().initial).norm()), rel=1e-12)
    assert len({row["distance"] for row in result.history}) == len(result.history)


def test_an_algorithm_without_a_shared_model_is_refused():
    with pytest.raises(ConfigError, match="local has none"):
        trainer(early_stopping=EarlyStopping(), algorithm=Local(local=SOLVER)).fit()


def test_a_baseline_without_a_shared_model_runs_to_its_end():
    result = trainer(early_stopping=EarlyStopping(patience=1, min_delta=1e9), baselines=["local"]).fit()
    assert result.history[-1]["round"] < result.baselines["local"].history[-1]["round"]


ALWAYS = EarlyStopping(patience=1, min_delta=1e9)  # stops at the second evaluation, after round 4 of 6


def test_a_run_that_stops_early_is_charged_as_planned(tmp_path):
    result = trainer(early_stopping=ALWAYS, folder=tmp_path / "run").fit()
    assert (result.stopped, result.final["round"]) == ("early", 4)
    assert result.epsilon == result.privacy.epsilon == pytest.approx(epsilon(6), rel=1e-3)
    assert result.privacy.remaining_charged
    assert "charged as all the planned rounds" in result.summary()
    assert [
        line["uses"] for line in read_lines(tmp_path / "run/private/ledger.jsonl") if line["kind"] == "remaining"
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
    expected = PLDAccountant().compose(dp_event.GaussianDpEvent(NOISE), cap).get_epsilon(DELTA)
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

    def on_event(self, event, state) -> None:
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
    assert charges(tmp_path / "private" / "ledger.jsonl") == dict.fromkeys(range(result.final["round"]), 1)


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
