"""Early stopping saves time, not budget."""

import copy
import math

import pytest

from fedmtl import ClientPrivacy, EarlyStopping, FixedCohort, Local
from fedmtl.errors import ConfigError
from fedmtl.privacy import open_channel

from .ledgers import read_lines
from .settings import CLIENTS, DATA, DELTA, NOISE, SOLVER, epsilon, trainer


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


def test_the_decision_is_a_function_of_the_releases(tmp_path):
    """Other data, the same releases: the same distances, so the same decision; accuracies differ."""
    import fedmtl.trainer.engine as engine

    recordings: list = []

    def run(data=None, **options):
        def opened(*args, **kept):
            channel = open_channel(*args, **kept | options)
            if "replay" not in options:
                channel.record = []
                recordings.append(channel.record)
            return channel

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "open_channel", opened)
            settings = {} if data is None else {"data": data}
            return trainer(early_stopping=EarlyStopping(patience=5), **settings).fit()

    first = run()
    other = copy.deepcopy(DATA)
    other.train.x.neg_()
    other.test.x.neg_()
    second = run(other, replay=recordings[0])
    assert [row["distance"] for row in first.history] == [row["distance"] for row in second.history]
    assert [row["accuracy"] for row in first.history] != [row["accuracy"] for row in second.history]


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
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA)
    schedule = FixedCohort(cohort=4)
    result = trainer(early_stopping=ALWAYS, schedule=schedule, privacy=privacy).fit()
    plan = trainer(schedule=schedule, privacy=privacy)
    assert result.stopped == "early"
    cap = math.ceil(plan.rounds * 4 / CLIENTS) + 1
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    expected = PLDAccountant().compose(dp_event.GaussianDpEvent(NOISE), cap).get_epsilon(DELTA)
    assert result.epsilon == pytest.approx(expected, rel=1e-3)


def test_an_interrupted_early_stop_stays_charged(tmp_path):
    """The ledger says it before the result does."""
    from fedmtl.privacy import PoissonSampling, ReleasePlan

    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA)
    plan = ReleasePlan(name="update", dimension=3, uses=6)

    def opened(resume: bool):
        return open_channel(
            privacy, (plan,), PoissonSampling(4).bind(12), seed=0, steps=6, ledger_path=tmp_path / "l", resume=resume
        )

    first = opened(False)
    first.begin(0, first.draw(0))
    first.charge_remaining(1)
    first.account.ledger._file.close()  # killed
    second = opened(True)
    second.start(1)
    assert second.epsilon == pytest.approx(epsilon(6), rel=1e-3)
    second.close()
