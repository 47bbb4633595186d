"""Rounds with a deadline: who is left out, what stays charged, and that no number depends on data."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedmtl import (
    Callback,
    ClientPrivacy,
    Deadline,
    FedAvg,
    FixedCohort,
    FullParticipation,
    Interval,
    LocalSGD,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    SecureAggregation,
    models,
    simulate,
)
from fedmtl.audit import verify
from fedmtl.errors import ConfigError, DataError
from fedmtl.schedules import RandomLatency, TraceLatency
from tests.helpers import ragged_classification
from tests.methods import NETWORKS
from tests.small import check_resumed, check_same, trainer
from tests.trainer.ledgers import charges, participations

N = 12
LOGNORMAL = RandomLatency("lognorm", {"s": 1.0})
COHORTS = PoissonSampling(cohort=6)
LATE = Deadline(latency=LOGNORMAL, limit=1.2, sampler=COHORTS)
NOISE = ClientPrivacy(clip_norm=0.5, epsilon=4.0, delta=1e-5)
RECORDS = RecordPrivacy(clip_norm=0.5, epsilon=4.0, delta=1e-4)


def made(**settings):
    defaults = {"data": ragged_classification(N), "schedule": LATE, "privacy": NOISE, "rounds": 9}
    return trainer(**defaults | settings)


class Watch(Callback):
    """The clients and the time of every round."""

    def __init__(self):
        self.rounds = []

    def on_block(self, block, state):
        self.rounds.append((set(block.cohort.tolist()), float(block.time[0, 0])))


def watched(**settings):
    watch = Watch()
    return made(callbacks=(watch,), **settings).fit(), watch.rounds


@pytest.mark.parametrize("name", ["fedavg", "pmtl", "scaffold", "mp_mtl_layers"])
@pytest.mark.parametrize("privacy", [NOISE, None])
def test_a_deadline_that_nobody_misses_changes_no_bit(name, privacy):
    patient = replace(LATE, limit=1e9)
    settings = {"algorithm": NETWORKS[name], "privacy": privacy, "rounds": 3}
    settings["model"] = models.mlp(hidden=5)
    check_same(made(schedule=patient, **settings).fit(), made(schedule=COHORTS, **settings).fit())


def test_who_is_late_is_left_out_of_the_same_cohorts():
    """The others send what they would send, and the sum is divided by the same number."""
    scale = [1.0 + place / 4 for place in range(N)]
    schedule = replace(LATE, scale=scale)
    data = ragged_classification(N)
    _, found = watched(schedule=schedule, privacy=None)
    _, asked = watched(schedule=COHORTS, privacy=None)
    in_time = schedule.in_time(data.ids, data.keys, 0)
    expected = [
        {client for client in cohort if in_time(step)[client]}
        for step, (cohort, _) in enumerate(asked)
    ]
    assert [cohort for cohort, _ in found] == expected
    assert sum(map(len, expected)) < sum(len(cohort) for cohort, _ in asked)
    assert [time for _, time in found] == pytest.approx([1.2 * (step + 1) for step in range(9)])
    # one round by hand
    sgd = LocalSGD(lr=0.1, epochs=1, batch_size=100)
    one = made(schedule=schedule, privacy=None, rounds=1, algorithm=FedAvg(local=sgd))
    (step,) = simulate(one)
    alone = []
    for client in expected[0]:
        single = made(
            data=data.subset([data.ids[client]]), schedule=FullParticipation(),
            privacy=None, rounds=1, algorithm=FedAvg(local=sgd),
        )  # fmt: skip
        alone.append(single.fit().shared - single.problem().initial)
    start = one.problem().initial
    assert torch.allclose(step.shared, start + torch.stack(alone).sum(0) / 6, rtol=0, atol=1e-12)


def test_latencies_follow_the_law_and_no_client_that_is_added_moves_them():
    names = [f"c{place}" for place in range(400)]
    keys = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    slow = [10.0 if place % 10 == 9 else 1.0 for place in range(400)]
    schedule = Deadline(latency=LOGNORMAL, limit=2.0, scale=slow)
    in_time = schedule.in_time(names, keys, 3)
    found = np.stack([in_time(step).numpy() for step in range(200)])
    late = np.arange(400) % 10 == 9
    for who, factor in ((~late, 1.0), (late, 10.0)):
        rate = norm.cdf(math.log(2.0 / factor))
        error = math.sqrt(rate * (1 - rate) / found[:, who].size)
        assert found[:, who].mean() == pytest.approx(rate, abs=4 * error)
    fewer = replace(schedule, scale=slow[:100]).in_time(names[:100], keys[:100], 3)
    assert all(np.array_equal(fewer(step).numpy(), found[step, :100]) for step in (0, 7, 199))
    assert not np.array_equal(schedule.in_time(names, keys, 4)(0).numpy(), found[0])


def test_everybody_in_the_cohort_is_charged(tmp_path):
    late = made(folder=tmp_path / "late").fit()
    all_of_them = made(schedule=COHORTS, folder=tmp_path / "all").fit()
    assert late.epsilon == all_of_them.epsilon
    assert late.privacy.noise_multiplier == all_of_them.privacy.noise_multiplier
    ledger = tmp_path / "late" / "private" / "ledger.jsonl"
    assert charges(ledger) == dict.fromkeys(range(9), 1)
    # a late client, too, where participations are charged
    never = Deadline(latency=5.0, limit=1.0, sampler=FixedCohort(cohort=4))
    made(schedule=never, folder=tmp_path / "never").fit()
    counts = participations(tmp_path / "never" / "private" / "ledger.jsonl")
    assert sum(counts.values()) == 9 * 4
    for run in ("late", "never"):
        assert all(check.verdict != "FAILED" for check in verify(tmp_path / run).checks)


def test_the_data_of_the_late_do_not_matter_and_nobodys_say_who_is_late():
    never = [1.0] * 11 + [1e9]
    schedule = replace(LATE, scale=never)
    data = ragged_classification(N)
    last = slice(int(data.train.offsets[11]), int(data.train.offsets[12]))
    changed = data.train.x.clone()
    changed[last] = 7.0
    other = replace(data, train=replace(data.train, x=changed), verify=False)
    first, rounds = watched(schedule=schedule)
    second, others = watched(schedule=schedule, data=other)
    assert rounds == others
    assert torch.equal(first.shared, second.shared)


@pytest.mark.parametrize(
    ("name", "privacy"), [("pmtl", NOISE), ("scaffold", NOISE), ("fedavg", RECORDS)]
)
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, name, privacy):
    def make(folder, callbacks=()):
        run = made(algorithm=NETWORKS[name], privacy=privacy, checkpoint_every=4)
        return replace(run, folder=folder, callbacks=callbacks)

    check_resumed(make, tmp_path, 6)


def test_local_training_waits_for_nobody_and_canaries_are_never_late():
    never = Deadline(latency=5.0, limit=1.0, sampler=COHORTS)
    run = {"algorithm": NETWORKS["local"], "privacy": None}
    check_same(made(schedule=never, **run).fit(), made(schedule=COHORTS, **run).fit())
    audited = made(audit=Interval(canaries=30)).fit()
    assert audited.privacy.interval is not None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sampler": LATE}, ConfigError, "Deadline.sampler is .*; give one of cohorts"),
        ({"scale": [1.0, 2.0]}, ConfigError, "has 2 entries for 12 clients"),
        ({"latency": TraceLatency({"other": [1.0]})}, DataError, "has no latency above 0"),
        ({"latency": 0.0}, ConfigError, "Deadline.latency is 0.0"),
        ({"sampler": PoissonSampling(cohort=13)}, ConfigError, "only 12 clients"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_run(settings, error, message):
    with pytest.raises(error, match=message):
        made(schedule=replace(LATE, **settings))


def test_a_clip_norm_that_follows_the_rows_is_refused():
    """Its count would take those who are late for long rows."""
    adaptive = ClientPrivacy(clip_norm=QuantileClip(0.5), epsilon=4.0)
    with pytest.raises(ConfigError, match="Deadline leaves late clients out"):
        made(privacy=adaptive)


def test_sums_without_a_trusted_server_are_refused():
    """Nodes that are late miss the roster, whose size the noise of a share follows."""
    shared = replace(NOISE, aggregation=SecureAggregation(colluding=1, missing=1))
    schedule = replace(LATE, sampler=FullParticipation())
    with pytest.raises(ConfigError, match="give the sampler of Deadline as the schedule"):
        made(privacy=shared, schedule=schedule)


def test_a_server_with_real_clients_refuses_simulated_latencies():
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fedmtl.flower import server_app

    with pytest.raises(ConfigError, match="its sampler as the schedule, and its limit as"):
        server_app(made())
