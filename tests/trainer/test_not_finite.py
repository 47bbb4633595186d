"""Training that is not finite, and records as large as numbers go: both stay with the client and end no private run."""

import csv
import json
import logging
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    Ditto,
    FedAvg,
    FedRep,
    Finetune,
    Local,
    LocalSGD,
    Moments,
    MPMTLayers,
    PeerAveraging,
    PeerToPeer,
    PoissonClocks,
    PriorLayers,
    PrivatePrior,
    ProximalPoint,
    RecordPrivacy,
    Result,
    SharedDirections,
    models,
)
from fedmtl.algorithms.problem import Tally
from fedmtl.audit.verification import verify
from fedmtl.data import FederatedDataset
from fedmtl.errors import TrainingError
from fedmtl.graphs import Ring
from fedmtl.privacy.clip import not_finite
from fedmtl.trainer.run import stop_reason
from tests import small

SOLVER = LocalSGD(lr=0.05, epochs=2, batch_size=4)
HOT = LocalSGD(lr=1e30, epochs=3, batch_size=4)


def data(extreme: float = 1.0, clients: int = 6, still: int = 0) -> FederatedDataset:
    """Regressions; the features of the client ``c0`` are ``extreme`` times those of the others, and records of the last
    ``still`` clients are 0, which moves no model."""
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for place in range(clients):
        scale = 0.0 if place >= clients - still else 1.0
        x = torch.randn(8, 3, generator=generator) * (extreme if place == 0 else scale)
        rows[f"c{place}"] = (x, torch.randn(8, generator=generator) * scale)
    return FederatedDataset.from_tensors(rows, test_fraction=0.25, classes=None)


trainer = partial(
    small.trainer,
    algorithm=FedAvg(local=SOLVER),
    data=data(),
    model=models.linear_regression(),
    rounds=6,
    eval_every=2,
    dtype="float32",
)


def _diverged(result: Result) -> list[str]:
    """The clients whose own models have a loss that is not finite."""
    return [name for name, loss in result.by_client["loss"].items() if not math.isfinite(loss)]


def test_rows_that_are_not_finite_are_counted() -> None:
    rows = torch.ones(2, 3, 4)
    assert not_finite(rows) == 0
    assert not_finite(torch.full((2, 3), 3e38)) == 0  # their sum is infinite, they are not
    rows[0, 1, 2], rows[1, 2, 0], rows[1, 2, 1] = math.inf, math.nan, -math.inf
    assert not_finite(rows) == 2


def test_one_diverged_client_is_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ways = Finetune(kind="vanilla", local=SOLVER)
    with caplog.at_level(logging.WARNING, "fedmtl"):
        found = trainer(data=data(1e25), finetune=ways, folder=tmp_path).fit()
    first, *later = [record.message for record in caplog.records]
    assert first.startswith(
        "fedavg, round 1: so far 1 of 6 local trainings diverged: their models are not finite"
    )
    assert any(
        text.startswith("fedavg, round 4: so far 4 of 24 local trainings diverged")
        for text in later
    )
    assert [row["diverged_trainings"] for row in found.history] == [2, 2, 2]
    assert "diverged_trainings" in (tmp_path / "private/metrics.csv").read_text()
    assert len(_diverged(found)) == 1
    assert (
        "diverged, and in no comparison: models of clients, 1 of fedavg + finetuning, 1 of fedavg"
        in found.summary()
    )
    assert "diverged, and not kept: local trainings, 6 of fedavg" in found.summary()
    assert json.loads((tmp_path / "private/result.json").read_text())["diverged_trainings"] == 2


def test_what_diverges_at_one_client_changes_no_other() -> None:
    """A client that diverges counts as zero, however it diverges: everybody else's numbers are the same to the bit."""
    runs = [
        trainer(data=data(extreme), baselines=("local", "pmtl")).fit() for extreme in (1e25, -1e30)
    ]
    for one, other in [
        runs,
        *([run.baselines[name] for run in runs] for name in ("local", "pmtl")),
    ]:
        assert torch.equal(one.personal[1:], other.personal[1:])
        assert torch.isfinite(one.personal[1:]).all()
        frames = [result.to_frame().drop("c0") for result in (one, other)]
        assert frames[0].equals(frames[1])
    assert torch.equal(runs[0].shared, runs[1].shared)


def test_a_run_without_privacy_in_which_nearly_all_are_lost_stops_at_once(tmp_path: Path) -> None:
    lost = "every local training ended in a model that is not finite, so it stopped after 1 round; a smaller learning"
    for folder, resume in ((tmp_path / "run", False), (tmp_path / "run", True)):
        with pytest.raises(TrainingError, match=f"fedavg: training diverged: {lost} rate"):
            trainer(algorithm=FedAvg(local=HOT), folder=folder).fit(resume=resume)
        with open(folder / "private/metrics.csv") as file:
            assert [row["round"] for row in csv.DictReader(file)] == ["1"]
        assert not (folder / "private/result.json").exists()
    with pytest.raises(TrainingError, match=f"local: training diverged: {lost}"):
        trainer(
            algorithm=Local(local=HOT), privacy=ClientPrivacy(clip_norm=0.5, epsilon=math.inf)
        ).fit()
    with pytest.raises(TrainingError, match=f"training diverged: nearly {lost}"):
        trainer(data=data(clients=12, still=1), algorithm=FedAvg(local=HOT)).fit()  # 11 of 12
    finetune = Finetune(kind="vanilla", local=LocalSGD(lr=1e18, epochs=1, batch_size=4))
    with pytest.raises(TrainingError, match="the loss of every client's own model is not finite"):
        trainer(finetune=finetune).fit()


def test_what_diverges_late_or_at_some_clients_stops_no_run() -> None:
    found = trainer(data=data(clients=12, still=2), algorithm=FedAvg(local=HOT)).fit()  # 10 of 12
    assert (found.stopped, found.final["round"]) == ("rounds", 6)
    assert sum(row["diverged_trainings"] for row in found.history) == 60
    assert "local trainings, 60 of" in found.summary()
    settings = trainer()

    def begun(count: int) -> Any:
        """A run of which this many local trainings have diverged, and no other was made."""
        problem = replace(settings.problem(), tally=Tally(count, count))
        plan = SimpleNamespace(settings=settings, stop=6, problem=problem)
        return SimpleNamespace(plan=plan, evaluator=SimpleNamespace(history=[]))

    assert not stop_reason(begun(4), 1)  # too few to judge by
    assert [stop_reason(begun(5), step) for step in range(7)] == ["", *["diverged"] * 3, "", "", ""]


def test_how_a_private_run_ends_does_not_say_that_all_are_lost(tmp_path: Path) -> None:
    """One client that does not diverge decides on what the private part says, and on nothing outside of it."""
    for source in ("seeded", "secure"):
        private = ClientPrivacy(clip_norm=0.5, epsilon=4.0, source=source)  # type: ignore[arg-type]
        files = []
        for name, solver in (("good", LocalSGD(lr=0.05, batch_size=4)), ("lost", HOT)):
            folder = tmp_path / source / name
            found = trainer(algorithm=FedAvg(local=solver), privacy=private, folder=folder).fit()
            assert (found.stopped, found.final["round"]) == ("rounds", 6)
            assert bool(found.lost) == (name == "lost")
            assert ("training diverged: every local training" in found.summary()) == (
                name == "lost"
            )
            assert "diverged" not in found.privacy.text()
            kept = json.loads((folder / "private/result.json").read_text())
            assert kept.get("lost", "") == found.lost
            assert verify(folder).fits
            files.append(sorted(path.name for path in (folder / "public").rglob("*")))
        assert files[0] == files[1]


def test_a_diverged_baseline_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedmtl"):
        found = trainer(
            baselines=("local", FedAvg(local=HOT)), algorithm=Local(local=LocalSGD(lr=0.05))
        ).fit()
    assert "fedavg" not in found.baselines
    assert any(
        "the baseline is left out: fedavg: training diverged" in one.message
        for one in caplog.records
    )


PULLED = Finetune(kind="vanilla", start="personal", local=LocalSGD(lr=1e-3, batch_size=4))


@pytest.mark.parametrize("finetune", [None, PULLED])
def test_a_client_whose_every_training_diverged_is_in_no_comparison(
    tmp_path: Path, finetune: Finetune | None
) -> None:
    """Its model is the one that it started from, with a finite loss: what a method makes of it is not known."""
    given = data(1e25)
    given.test.x[: given.test.counts[0]] = 1.0  # so that its loss is finite
    for algorithm in (
        PMTL(local=SOLVER),
        Ditto(local=SOLVER),
        FedRep(local=SOLVER, head=["1.bias"]),
    ):
        folder = tmp_path / algorithm.name
        own = Local(local=SOLVER)  # by name it would be an exact fit, which does not diverge
        found = trainer(
            data=given, algorithm=algorithm, baselines=(own,), folder=folder, finetune=finetune
        ).fit()
        assert found.untrained == found.baselines["local"].untrained == ("c0",)
        assert not _diverged(found)
        assert math.isfinite(found.by_client["mse"]["c0"])
        compared = [found.beside_local]
        if finetune is not None:
            compared.append((found.finetuned.better, found.finetuned.equal, found.finetuned.worse))
        for shares in compared:
            assert [5 * share for share in shares] == pytest.approx(
                [round(5 * share) for share in shares]
            )  # of five
        assert f"in no comparison: models of clients, 1 of {algorithm.name}" in found.summary()
        assert "1 of local" in found.summary().split("in no comparison")[1]
        assert "diverge" not in found.privacy.text()
        loaded = Result.load(folder)
        assert loaded.untrained == ("c0",)
        assert loaded.summary() == found.summary()
    fedavg = trainer(data=given).fit()
    assert fedavg.untrained == ()  # its model is the one that the others trained


CLIP = ClientPrivacy(clip_norm=1.0, epsilon=5.0, delta=1e-5)
RECORD = RecordPrivacy(clip_norm=1.0, epsilon=5.0, delta=1e-5)
LOUD = ClientPrivacy(clip_norm=1.0, epsilon=1e4, delta=1e-5)
LOCAL = LocalSGD(lr=0.1, batch_size=4)

LINEAR = {
    "mp_mtl": (lambda loss: MPMTL(loss=loss, feature_norm=1.0), CLIP),
    "mp_mtl, P + Q, curator": (
        lambda loss: MPMTL(
            loss=loss, feature_norm=1.0, own_penalty="l2", penalty="l21", curator_epsilon=5.0
        ),
        CLIP,
    ),
    "private_prior": (lambda loss: PrivatePrior(loss=loss, share=0.3, feature_norm=None), CLIP),
    "private_prior, diagonal": (
        lambda loss: PrivatePrior(loss=loss, form="diagonal", own_ridge=False),
        CLIP,
    ),
    "pp_dmtl": (lambda loss: PPDMTL(loss=loss, feature_norm=1.0, a1=0.1), RECORD),
    "pp_dmtl, l1": (lambda loss: PPDMTL(loss=loss, feature_norm=1.0, own_penalty="l1"), RECORD),
    "shared_directions": (lambda loss: SharedDirections(loss=loss, feature_norm=1.0), RECORD),
    "p2p": (lambda loss: PeerToPeer(graph=Ring(), loss=loss, feature_norm=1.0), RECORD),
    "peer_averaging": (
        lambda loss: PeerAveraging(graph=Ring(), loss=loss, feature_norm=1.0, refine=0.1),
        RECORD,
    ),
    "proximal_point": (lambda loss: ProximalPoint(), CLIP),
    "async, clip": (lambda loss: AsyncLearner(loss=loss), RECORD),
    "async, moments": (lambda loss: Moments(), RECORD),
    "async, bounded rows": (
        lambda loss: AsyncLearner(loss=loss, feature_norm=1.0, theta_max=1.0),
        RecordPrivacy(clip_norm=4.0, epsilon=5.0, delta=1e-5),
    ),
}
NETWORKS = {
    "fedavg": (lambda loss: FedAvg(local=LOCAL), CLIP),
    "pmtl": (lambda loss: PMTL(local=LOCAL, lam=1.0), CLIP),
    "fedavg, records": (lambda loss: FedAvg(local=LOCAL), RECORD),
    "mp_mtl_layers": (lambda loss: MPMTLayers(layers=("2",), local=LOCAL), CLIP),
    "prior_layers": (lambda loss: PriorLayers(local=replace(LOCAL, proximal=True)), LOUD),
}
METHODS = LINEAR | NETWORKS
KINDS = [
    *[
        (size, what)
        for size in (1e15, 1e30, 3e38)
        for what in ("target", "row", "constant columns")
    ],
    (1e30, "one column"),
    (0.0, "zeros"),
    (0.0, "duplicates"),
]
DRAWN = random.Random(0)


def spoiled(kinds, loss):
    """Training records of one client of each kind are replaced, beside those of three ordinary clients."""
    rng, sides = np.random.default_rng(0), ({}, {})
    for i in range(3 + len(kinds)):
        for side in sides:
            x = rng.normal(size=(12, 3)).astype(np.float32)
            y = (x @ [1.0, -1.0, 0.5]).astype(np.float32)
            side[f"c{i}"] = [x, y if loss == "squared" else (y > 0).astype(np.int64)]
    for i, (size, what) in enumerate(kinds, start=1):
        x, y = sides[0][f"c{i}"]
        if what == "target" and loss == "squared":
            y[0], y[1] = size, -size
        elif what == "row":
            x[0], x[1] = size, [size, 0.0, -size]
        elif what == "duplicates":
            x[:] = x[0]
        elif what == "constant columns":
            x[:, :2] = size
        elif what in ("zeros", "one column"):
            x *= [size, 0.0, 0.0]
    data = [{name: tuple(pair) for name, pair in side.items()} for side in sides]
    return FederatedDataset.from_tensors(
        data[0], test=data[1], classes=None if loss == "squared" else 2
    )


SLOW = (
    "pp_dmtl, l1",
    "squared",
)  # its own problems take 20 s where all kinds, or the largest targets, are in a run


def cases():
    """Each method with clients of all kinds in one run, and with a single one of a kind that is drawn."""
    for name in METHODS:
        for loss in ("squared", "logistic"):
            slow = (name, loss) == SLOW
            for kinds in (
                ([(1e15, "row")], [(0.0, "duplicates")]) if slow else (KINDS, [DRAWN.choice(KINDS)])
            ):
                said = "all kinds" if kinds is KINDS else str(*kinds)
                yield pytest.param(name, kinds, loss, id=f"{name}-{said}-{loss}")


def run(name, data, loss="squared", **options):
    make, privacy = METHODS[name]
    algorithm, model, rounds = make(loss), models.linear_regression(bias=False), 3
    if name in NETWORKS:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1 if loss == "squared" else 2)
        )
    if algorithm.one_at_a_time:
        options |= {"schedule": PoissonClocks(per_client=4), "eval_every": 30}
        rounds = 1000
    elif isinstance(algorithm, PrivatePrior | PriorLayers):
        rounds = 1
    settings = {"model": model, "privacy": privacy, "rounds": rounds, "dtype": "float32"} | options
    return small.trainer(algorithm=algorithm, data=data, **settings).fit()


def check(result, data, kinds):
    """Models are finite; so is what they say of ordinary examples, of a spoiled client's own where it is the only one
    (its numbers are the largest that there are)."""
    assert bool(torch.isfinite(result.personal).all())
    assert result.shared is None or bool(torch.isfinite(result.shared).all())
    assert math.isfinite(result.epsilon)
    for client in data.ids if len(kinds) == 1 else (data.ids[0], *data.ids[len(kinds) + 1 :]):
        with torch.no_grad():
            assert bool(torch.isfinite(result.model_for(client)(data.test.x[:5])).all())


@pytest.mark.parametrize(("name", "kinds", "loss"), list(cases()))
def test_methods_end_with_finite_models_whatever_one_client_holds(name, kinds, loss):
    data = spoiled(kinds, loss)
    check(run(name, data, loss), data, kinds)


def test_equal_records_as_large_as_float64_can_tell_send_nothing():
    """Their normal equations are singular by rounding, whatever the ridge."""
    data = spoiled([(0.0, "zeros")], "squared")
    data.train.x[data.train.offsets[1] : data.train.offsets[2]] = 1e12
    check(run("proximal_point", data), data, ["zeros"])


@pytest.mark.parametrize(
    "name", [name for name in LINEAR if name not in ("async, clip", "async, moments")]
)
def test_a_run_in_double_precision_takes_the_largest_numbers_there(name):
    """Where records have a bound: what the other methods state is the clip of gradients, or of moments."""
    data = spoiled([(0.0, "zeros")], "squared")
    train, test = (
        replace(side, x=side.x.double(), y=side.y.double()) for side in (data.train, data.test)
    )
    train.x[0], train.y[1] = 1.7e308, -1.7e308
    large = FederatedDataset(train, test, data.ids)
    check(run(name, large, dtype="float64"), large, ["zeros"])
