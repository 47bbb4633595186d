"""Training under record-level privacy: DP-SGD in every client, one account each, the same trainer."""

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedmtl import (
    PMTL,
    Ditto,
    Execution,
    FedAvg,
    FixedCohort,
    FullParticipation,
    Local,
    LocalSGD,
    PrivatePrior,
    RecordPrivacy,
    models,
)
from fedmtl.errors import ConfigError, PrivacyError, ResumeError
from fedmtl.privacy.chain import read_chain
from fedmtl.privacy.ledger import Ledger
from tests.helpers import regression

from .settings import CLIENTS, DATA, DELTA, trainer

SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4)
PRIVACY = RecordPrivacy(clip_norm=0.4, noise_multiplier=1.1, delta=DELTA)


def run_of(**settings):
    defaults = {"rounds": 3, "eval_every": 3, "privacy": PRIVACY, "schedule": FullParticipation()}
    return trainer(**defaults | settings).fit()


def test_without_noise_it_is_sgd_on_the_clipped_gradients_of_all_records():
    """A plain loop over clients and records, with the anchor's pull added after the clip."""
    data, lam, lr, rounds, clip = regression(4, examples=6), 0.7, 0.1, 3, 0.8
    solver = LocalSGD(lr=lr, steps=2, batch_size=None)
    privacy = RecordPrivacy(clip_norm=clip, epsilon=math.inf)
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    result = run_of(
        algorithm=PMTL(lam=lam, local=solver),
        data=data,
        model=copy.deepcopy(model),
        loss="mse",
        privacy=privacy,
    )
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean, own = start.clone(), [start.clone() for _ in range(4)]
    for _ in range(rounds):
        for k in range(4):
            w, records = own[k], data.subset([data.ids[k]]).train
            for _ in range(2):
                total = torch.zeros(5, dtype=torch.float64)
                for x, y in zip(records.x, records.y.reshape(-1), strict=True):
                    residual = w[:4] @ x + w[4] - y
                    gradient = 2 * residual * torch.cat([x, torch.ones(1, dtype=torch.float64)])
                    total += gradient * min(1.0, clip / float(gradient.norm()))
                w = w - lr * (total / 6 + lam * (w - mean))
            own[k] = w
        mean = mean + torch.stack([w - mean for w in own]).mean(0)
    assert torch.allclose(
        result.personal, torch.stack(own), rtol=1e-5, atol=1e-7
    )  # the clip's margin is 2**-20
    assert torch.allclose(result.shared, mean, rtol=1e-5, atol=1e-7)
    assert result.epsilon == math.inf


def test_local_training_sends_nothing_and_is_on_raw_records():
    """Its models are those of a run without privacy, also as a baseline beside models that are finetuned so."""
    alone, plain = (
        run_of(algorithm=Local(local=SOLVER), privacy=privacy) for privacy in (PRIVACY, None)
    )
    assert torch.equal(alone.personal, plain.personal)
    assert alone.epsilon == alone.history[-1]["epsilon"] == 0.0
    assert alone.privacy.headline == "nothing is released: epsilon = 0"
    assert alone.privacy.publication == "nothing is released"
    result = run_of(algorithm=FedAvg(local=SOLVER), baselines=["local"])
    assert torch.equal(result.baselines["local"].personal, plain.personal)
    assert result.baselines["local"].epsilon == 0.0 < result.epsilon < math.inf


def test_models_that_are_trained_alone_with_noise_are_those_of_a_pull_of_zero():
    """PMTL with lam = 0 charges every local step, and no other client has a part in its personal models."""
    algorithm = PMTL(lam=0.0, local=SOLVER)
    result = run_of(algorithm=algorithm)
    assert 0 < result.epsilon < math.inf
    assert result.privacy.unit == "record"
    assert result.privacy.releases == 3 * int(SOLVER.step_counts(DATA.train.counts).sum())
    assert result.history[-1]["epsilon"] == result.epsilon
    assert "which are public" in " ".join(result.privacy.text().split())
    x = DATA.train.x.clone()
    x[: int(DATA.train.offsets[1])].neg_()  # of the first client
    other = run_of(algorithm=algorithm, data=replace(DATA, train=replace(DATA.train, x=x)))
    assert not torch.equal(result.personal[0], other.personal[0])
    assert torch.equal(result.personal[1:], other.personal[1:])


def test_a_client_that_never_took_part_keeps_the_shared_model():
    """Training it at the end would read its data without a charge."""
    result = run_of(schedule=FixedCohort(2), rounds=2, algorithm=PMTL(lam=0.5, local=SOLVER))
    same = [torch.equal(row, result.shared) for row in result.personal]
    assert CLIENTS - 4 <= sum(same) < CLIENTS


def test_an_algorithm_without_local_training_is_refused():
    with pytest.raises(ConfigError, match="private_prior has no local solver"):
        run_of(
            algorithm=PrivatePrior(),
            data=regression(3),
            model=models.linear_regression(bias=False),
            rounds=1,
        )


class Undeclared(Ditto):
    """Trains twice in a participation, and declares one training."""

    trainings = 1


def test_a_training_that_is_not_declared_is_refused_where_it_happens(tmp_path):
    """Nothing of it leaves: the first round is charged, and its only release is that of the declared training."""
    with pytest.raises(PrivacyError, match=r"not charged.*all local trainings.*trainings=1"):
        run_of(algorithm=Undeclared(local=SOLVER), folder=tmp_path / "run")
    assert not (tmp_path / "run/public").exists()


@dataclass(frozen=True, kw_only=True)
class _TwoAtOnce(FedAvg):
    """Trains two models of every client in one call."""

    def client_update(self, c):
        both = replace(c, clients=torch.cat([c.clients, c.clients])).train(self.local, c.shared)
        return {"update": both[: len(c.clients)] - both[len(c.clients) :]}, c.states


@pytest.mark.parametrize("chunk", [2, CLIENTS, 2 * CLIENTS])
def test_two_models_of_a_client_do_not_share_one_charge(chunk):
    with pytest.raises(PrivacyError, match=r"named twice|not charged"):
        run_of(algorithm=_TwoAtOnce(local=SOLVER), execution=Execution(chunk))


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_resume_with_more_local_steps_is_another_price_and_refused(source: str, tmp_path) -> None:
    """In secure mode nothing but the kinds of accounts in the ledger's header has the number of local steps."""
    privacy = replace(PRIVACY, source=source)
    settings = {
        "privacy": privacy,
        "rounds": 2,
        "folder": tmp_path / "run",
        "schedule": FullParticipation(),
    }
    trainer(algorithm=FedAvg(local=SOLVER), **settings).fit()
    longer = trainer(algorithm=FedAvg(local=replace(SOLVER, epochs=3)), **settings)
    with pytest.raises(
        ResumeError, match="kinds = " if source == "secure" else "was written for other"
    ):
        longer.fit(resume=True)
    read = read_chain(tmp_path / "run/private/ledger.jsonl").lines
    known = {"kind", "version", "fingerprint", "replays_free", "run", "previous"}
    header = {key: value for key, value in read[0].items() if key not in known}
    header["kinds"] = [one | {"multiplier": one["multiplier"] / 2} for one in header["kinds"]]
    with pytest.raises(ResumeError, match="was written with kinds = "):
        Ledger(
            tmp_path / "run/private/ledger.jsonl",
            header,
            fingerprint=read[0]["fingerprint"],
            replays_free=source == "seeded",
            clients=CLIENTS,
            resume=True,
        )


def test_every_training_has_all_its_steps_and_every_step_is_charged() -> None:
    """Two trainings of Ditto in one round, each of two epochs of batches of four of every client."""
    steps = sum(2 * math.ceil(n / 4) for n in DATA.train.counts.tolist())
    report = run_of(algorithm=Ditto(local=SOLVER), rounds=1, eval_every=1).privacy
    assert report.releases == 2 * steps
