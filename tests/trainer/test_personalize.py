"""Personal models after a run: what clients of the run choose, and new clients by Python and command."""

import copy
import csv
import json
import logging
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from safetensors.torch import load_file

from fedmtl import (
    PMTL,
    Average,
    FedAvg,
    Finetune,
    FullParticipation,
    Local,
    LocalSGD,
    PoissonClocks,
    RecordPrivacy,
    Result,
    Trainer,
    cli,
    load_data,
    models,
    personalize,
)
from fedmtl.algorithms import PPDMTL, Personalization
from fedmtl.algorithms import finetune as finetuning
from fedmtl.audit.independence import independence
from fedmtl.audit.rerun import watched
from fedmtl.cli.adapt import _flow
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, DataError, ModelError
from fedmtl.report import canvas
from fedmtl.trainer.comparison import shares
from fedmtl.trainer.metrics import REGISTRY
from fedmtl.trainer.personalize import held_out
from fedmtl.trainer.stages import stages_of, verdict_of
from fedmtl.trainer.summary import numbers_of_result
from tests.helpers import ragged_classification

from .settings import DATA, DELTA, SOLVER, trainer

FINETUNE = Finetune(kind="mean", lam=0.3, local=LocalSGD(lr=0.2, steps=5, batch_size=4))
KINDS = (torch.float32, torch.float64)
RECORDS = RecordPrivacy(clip_norm=0.5, noise_multiplier=1.2, delta=DELTA)


@pytest.mark.parametrize(
    ("algorithm", "changed", "costs"),
    [
        (FedAvg(local=SOLVER), {"privacy": RECORDS}, "without noise"),
        (PMTL(local=SOLVER), {}, "cost no epsilon"),
        (Local(local=SOLVER), {}, "cost no epsilon"),
    ],
)
def test_only_the_personal_models_change(algorithm, changed, costs) -> None:
    plain, tuned = (
        trainer(algorithm=algorithm, finetune=f, **changed).fit() for f in (None, FINETUNE)
    )
    assert (tuned.shared is None) == (plain.shared is None)
    assert tuned.shared is None or torch.equal(tuned.shared, plain.shared)
    drop = [{k: v for k, v in row.items() if k != "time"} for row in tuned.history]
    assert drop == [{k: v for k, v in row.items() if k != "time"} for row in plain.history]
    start = plain.personal if plain.shared is None else plain.shared.expand_as(plain.personal)
    assert float((tuned.personal - start).norm(dim=1).min()) > 0
    assert tuned.finetuned.start == ("personal" if plain.shared is None else "shared")
    assert tuned.scores["personal"]["accuracy"] == plain.personal_accuracy
    assert tuned.scores["finetuned"] == tuned.by_client
    assert tuned.final["accuracy"] == pytest.approx(
        sum(tuned.personal_accuracy.values()) / len(DATA)
    )
    assert tuned.history[-1]["accuracy"] == plain.final["accuracy"]
    (reason,) = set(tuned.privacy.outside) - set(plain.privacy.outside)
    assert (
        replace(tuned.privacy, outside=plain.privacy.outside, run=plain.privacy.run)
        == plain.privacy
    )
    assert reason.startswith("the finetuned models")
    assert costs in reason
    assert reason in " ".join(tuned.summary().split())


def test_it_starts_from_personal_models_where_asked() -> None:
    still = Finetune(
        kind="mean", lam=1e9, start="personal", local=LocalSGD(lr=0.1, steps=2, proximal=True)
    )
    algorithm = PMTL(lam=0.5, local=SOLVER)
    plain, tuned = (trainer(algorithm=algorithm, finetune=f).fit() for f in (None, still))
    torch.testing.assert_close(tuned.personal, plain.personal, rtol=0, atol=1e-8)
    assert not torch.allclose(plain.personal, plain.shared.expand_as(plain.personal))
    assert tuned.finetuned.equal == 1.0


@pytest.mark.usefixtures("real_figures")
def test_the_picture_has_what_finetuning_reached(tmp_path, monkeypatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: saved.append(figure))
    run = trainer(
        algorithm=FedAvg(local=SOLVER),
        finetune=FINETUNE,
        folder=tmp_path,
        baselines=["local", "pmtl"],
    )
    result = run.fit()
    (figure,) = (figure for figure in saved if figure.axes[0].get_ylabel() == "mean accuracy")
    written, upper = {text.get_text() for text in figure.legends[0].get_texts()}, figure.axes[0]
    points = [
        (line.get_xdata().tolist(), line.get_ydata().tolist())
        for line in upper.lines
        if len(line.get_xdata()) == 1
    ]
    for title, one in (("FedAvg", result), ("PMTL", result.baselines["pmtl"])):
        assert f"{title} + finetuning {one.final['accuracy']:.3f}" in written
        assert f"{title} {one.history[-1]['accuracy']:.3f}" in written
        assert ([6.0], [one.final["accuracy"]]) in points
    assert len(points) == 2  # local training is not finetuned


def test_baselines_are_finetuned() -> None:
    result = trainer(
        algorithm=FedAvg(local=SOLVER), finetune=FINETUNE, baselines=["pmtl", "local"]
    ).fit()
    text = result.summary()
    assert "pmtl + finetuning" in text
    assert "local + finetuning" not in text
    stages = [
        stage.label for name, run in result.baselines.items() for stage in stages_of(run, name)
    ]
    assert len({stage.label for stage in stages_of(result, "fedavg")} | {*stages}) == 5
    local = result.baselines["local"].personal_accuracy
    shares = compared(result.personal_accuracy, local, DATA.ids)
    assert result.beside_local == pytest.approx(shares)
    assert numbers_of_result(result)["worse_than_local"] == pytest.approx(shares[2])
    line = next(line for line in text.splitlines() if line.startswith("  fedavg + finetuning"))
    assert f" {'/'.join(f'{share:.0%}'[:-1] for share in shares)} " in line


def compared(own, other, clients) -> list[float]:
    """Shares of clients that score better, equal and worse."""
    signs = np.sign([own[name] - other[name] for name in clients])
    return [float((signs == sign).mean()) for sign in (1, 0, -1)]


def test_every_client_chooses_the_model_of_least_loss_on_its_own_validation_records() -> None:
    finetune = replace(FINETUNE, validation=0.3)
    run = trainer(algorithm=PMTL(lam=0.5, local=SOLVER), finetune=finetune)
    result = run.fit()
    fit, validation = held_out(DATA, finetune)
    without = trainer(algorithm=PMTL(lam=0.5, local=SOLVER), data=fit, finetune=FINETUNE).fit()
    models = {"shared": without.shared.expand_as(without.personal), "finetuned": without.personal}
    models["personal"] = trainer(algorithm=PMTL(lam=0.5, local=SOLVER), data=fit).fit().personal
    module = result.module.double()
    for k, client in enumerate(DATA.ids):
        own, losses = validation.subset([client]).test, {}
        for name, of in models.items():
            torch.nn.utils.vector_to_parameters(of[k], module.parameters())
            losses[name] = float(torch.nn.functional.cross_entropy(module(own.x), own.y).detach())
        chosen = result.finetuned.chosen[client]
        if chosen == "local":
            continue
        assert losses[chosen] == min(losses.values())
        torch.testing.assert_close(result.personal[k], models[chosen][k], rtol=0, atol=0)
    assert len(set(result.finetuned.chosen.values())) > 1


def test_validation_records_are_each_clients_own_affair() -> None:
    finetune = replace(FINETUNE, validation=0.3)
    fit, validation = held_out(DATA, finetune)
    assert torch.equal(fit.train.counts + validation.test.counts, DATA.train.counts)
    assert int(fit.train.counts.min()) >= 1
    assert int(validation.test.counts.min()) >= 1
    one = DATA.subset(["client-4"])
    alone, own = held_out(one, finetune)
    among, beside = fit.subset(["client-4"]), validation.subset(["client-4"])
    assert torch.equal(alone.train.x, among.train.x)
    assert torch.equal(own.test.x, beside.test.x)
    both = torch.cat([alone.train.x, own.test.x])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, one.train.x.tolist()))


def test_a_client_of_a_single_record_trains_on_it_and_has_no_choice() -> None:
    single = FederatedDataset.from_tensors(
        {
            "a": (torch.ones(1, 2), torch.tensor([0])),
            "b": (torch.ones(3, 2), torch.tensor([0, 1, 0])),
        },
        test={name: (torch.ones(1, 2), torch.tensor([1])) for name in "ab"},
        classes=2,
    )
    finetune = replace(FINETUNE, validation=0.3)
    fit, validation = held_out(single, finetune)
    assert fit.train.counts.tolist() == [1, 2]
    assert validation.test.counts.tolist() == [0, 1]
    result = trainer(data=single, finetune=finetune, schedule=FullParticipation()).fit()
    assert result.finetuned.chosen["a"] == "finetuned"


def test_the_audit_sees_the_finetuned_models() -> None:
    """It refutes nothing of finetuning as it is, and a start that mixes the clients' models."""

    class Mixed(Finetune):
        def personalize(self, problem, start, clients):
            return super().personalize(
                problem, start.mean(0) if start.dim() == 2 else start, clients
            )

    options = {
        "algorithm": PMTL(lam=0.5, local=SOLVER),
        "data": ragged_classification(9),
        "device": "cpu",
    }
    settings = {"kind": "ewc", "local": FINETUNE.local, "start": "personal"}
    for finetune, caught in ((Finetune(**settings), False), (Mixed(**settings), True)):
        run = trainer(finetune=finetune, **options)
        findings = independence(run, watched(run, 3), rounds=3)
        assert any(finding.refuted for finding in findings) == caught
        assert caught == any("the finetuned model" in finding.detail for finding in findings)


def test_scores_are_equal_within_the_rounding_of_their_metric() -> None:
    """A squared error follows outputs in the dtype of the models; an accuracy is a ratio of whole numbers."""
    mse, accuracy = REGISTRY["mse"], REGISTRY["accuracy"]
    one, other = (
        torch.tensor([0.5, 1e-10], dtype=torch.float64),
        torch.tensor([0.5 + 3e-8, 9e-10], dtype=torch.float64),
    )
    errors = {
        kind: shares(one, other, higher_is_better=False, resolution=mse.resolution(kind))
        for kind in KINDS
    }
    assert errors == {torch.float32: (0.5, 0.5, 0.0), torch.float64: (1.0, 0.0, 0.0)}
    rows = 100_000
    close = (
        torch.tensor([1 / rows, 0.1 + 0.2], dtype=torch.float64),
        torch.tensor([2 / rows, 0.3], dtype=torch.float64),
    )
    for kind in KINDS:
        assert shares(*close, higher_is_better=True, resolution=accuracy.resolution(kind)) == (
            0.0,
            0.5,
            0.5,
        )


def test_one_model_evaluated_in_two_ways_has_equal_scores() -> None:
    """Models that are finetuned by nothing are the shared one, whose outputs are computed in other blocks."""
    generator, rows = torch.Generator().manual_seed(0), {}
    for place in range(40):
        x = torch.randn(5 + 7 * place, 200, generator=generator)
        rows[f"c{place}"] = x, x.sum(1) + torch.randn(len(x), generator=generator)
    data = FederatedDataset.from_tensors(rows, test_fraction=0.5, classes=None)
    settings = {"data": data, "model": models.mlp(hidden=32), "dtype": "float32"}
    still = Finetune(kind="vanilla", local=LocalSGD(lr=1e-30, steps=1))
    algorithm = FedAvg(local=LocalSGD(lr=1e-3, steps=1))
    result = trainer(algorithm=algorithm, privacy=None, finetune=still, **settings).fit()
    found = result.finetuned
    assert found is not None
    assert result.scores["finetuned"] != result.scores["shared"]
    assert (found.better, found.equal, found.worse) == (0.0, 1.0, 0.0)


def test_clients_that_diverge_in_finetuning_are_in_no_comparison(tmp_path, caplog) -> None:
    data = ragged_classification(12)
    x = data.train.x.clone()
    x[: int(data.train.offsets[3])] *= 1e160  # of three clients
    data = replace(data, train=replace(data.train, x=x))
    settings = {
        "algorithm": FedAvg(local=replace(SOLVER, lr=1e-300)),
        "data": data,
        "privacy": None,
    }
    ways = Finetune(kind="vanilla", local=LocalSGD(lr=0.2, steps=3, batch_size=4))
    with caplog.at_level(logging.WARNING, "fedmtl"):
        result = trainer(
            finetune=ways, folder=tmp_path / "run", baselines=["local"], **settings
        ).fit()
    found = result.finetuned
    assert found is not None
    assert found.diverged == data.ids[:3]
    assert result.personal[:3].equal(result.shared.expand(3, -1))
    assert (
        "fedavg: finetuning diverged for 3 of 12 clients, who keep the shared model" in caplog.text
    )
    assert (
        "diverged, and in no comparison: models of clients, 3 of fedavg + finetuning"
        in result.summary()
    )
    rest = data.ids[3:]
    expected = compared(
        result.scores["finetuned"]["accuracy"], result.scores["shared"]["accuracy"], rest
    )
    assert [found.better, found.equal, found.worse] == pytest.approx(expected)
    local = result.baselines["local"].personal_accuracy
    assert result.beside_local == pytest.approx(compared(result.personal_accuracy, local, rest))
    kept = json.loads((tmp_path / "run/private/result.json").read_text())
    assert kept["finetuning_diverged"] == 3
    assert Result.load(tmp_path / "run").finetuned == found
    joined = result.adapt(data)
    assert joined.finetuned.diverged == data.ids[:3]
    assert numbers_of_result(joined)["finetuning_diverged"] == 3
    assert "models of clients, 3 of released + finetuning" in joined.summary()


def test_what_cannot_be_finetuned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"or an object such as Finetune"):
        trainer(finetune="mean")
    with pytest.raises(ConfigError, match="no shared model"):
        trainer(algorithm=Local(local=SOLVER), finetune=replace(FINETUNE, start="shared")).fit()
    with pytest.raises(ConfigError, match="loss of its own"):
        trainer(
            algorithm=PPDMTL(feature_norm=1.0),
            schedule=PoissonClocks(per_client=2),
            privacy=None,
            finetune=FINETUNE,
        )


OLD, NEW = DATA.subset(DATA.ids[:8]), DATA.subset(DATA.ids[8:])
RUN = [
    *(
        "data.clients=12",
        "data.train_images=5",
        "schedule.cohort=6",
        "rounds=2",
        "progress=false",
        "dtype=float64",
    ),
    *("device=cpu", "baselines=[]", "metrics=[auc]"),
]


def test_a_name_stands_for_a_registered_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the user's own has a name like those of the package, and is given by it or as an object."""
    known = dict(finetuning.PERSONALIZATIONS)
    monkeypatch.setattr(finetuning, "PERSONALIZATIONS", known)

    @dataclass(frozen=True, kw_only=True)
    class Shifted(Personalization):
        by: float = 1.0
        name = kind = "shifted"

        def text(self) -> str:
            return f"shifted by {self.by:g}"

        def personalize(self, problem, start, clients):
            return start.expand(len(clients), -1) + self.by

    def personal(value: object) -> torch.Tensor:
        result = trainer(algorithm=FedAvg(local=SOLVER), finetune=value).fit()
        assert result.finetuned is not None
        return result.personal - result.shared

    assert personal("shifted") == pytest.approx(1.0)
    assert personal(Shifted(by=-2.0)) == pytest.approx(-2.0)
    assert trainer(algorithm=FedAvg(local=SOLVER), finetune="average").finetune == Average()


@pytest.mark.parametrize("name", ["averag", "kl", ""])
def test_an_unknown_name_of_finetuning_is_refused_with_those_there_are(name: str) -> None:
    accepted = r"accepted: 'auto', 'average', None, or an object such as Finetune\(kind='kl'\)\.$"
    with pytest.raises(ConfigError, match=f"^finetune is '{name}'; {accepted}"):
        trainer(algorithm=FedAvg(local=SOLVER), finetune=name)
    model = models.mlp(hidden=5)(DATA.spec)
    with pytest.raises(ConfigError, match=accepted):
        personalize(model, DATA, finetune=name)


def test_a_result_adapts_by_the_settings_of_its_run() -> None:
    finetune = replace(FINETUNE, kind="kl", validation=0.25)
    result = trainer(
        algorithm=FedAvg(local=SOLVER), data=OLD, finetune=finetune, metrics=["auc"], seed=3
    ).fit()
    found = result.adapt(NEW)
    own = replace(finetune, validation=0.0)
    by_hand = personalize(
        result.shared_model(),
        NEW,
        finetune=own,
        loss="auto",
        metrics=["auc"],
        seed=3,
        device="cpu",
        dtype="float64",
    )
    assert torch.equal(found.personal, by_hand.personal)
    assert found.by_client == by_hand.by_client
    assert set(found.by_client) == {"loss", "accuracy", "auc"}
    assert found.metrics["accuracy"] == pytest.approx(
        sum(found.personal_accuracy.values()) / len(NEW)
    )
    for client in NEW.ids:
        test = NEW.subset([client]).test
        right = (found.model_for(client)(test.x).argmax(1) == test.y).double().mean()
        before = (result.shared_model()(test.x).argmax(1) == test.y).double().mean()
        assert found.personal_accuracy[client] == pytest.approx(float(right))
        assert found.shared_accuracy[client] == pytest.approx(float(before))
    said = found.summary()
    assert "nothing is released: epsilon = 0\n  outside      nothing was sent" in said
    assert [line for line in said.split("\n\n")[1].splitlines() if len(line) > 80] == []
    assert len(repr(found)) < 200


@pytest.fixture(scope="module")
def result() -> Result:
    return trainer(algorithm=FedAvg(local=SOLVER), data=OLD).fit()


def test_without_finetuning_the_run_lends_its_solver(result: Result) -> None:
    assert result.adapt(NEW).finetuned.settings == Finetune(local=SOLVER)
    other = Finetune(kind="vanilla", local=LocalSGD(lr=0.1))
    assert result.adapt(NEW, finetune=other).finetuned.settings == other


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda result: result.adapt(NEW, finetune=Finetune(start="personal")),
            ConfigError,
            r"Finetune\.start",
        ),
        (
            lambda result: result.adapt(ragged_classification(4, features=7)),
            ModelError,
            "fails on a batch",
        ),
        (
            lambda result: trainer(algorithm=Local(local=SOLVER)).fit().adapt(NEW),
            ConfigError,
            "no shared model",
        ),
        (
            lambda result: replace(result, adaptation=None).adapt(NEW),
            ConfigError,
            "does not know the settings",
        ),
        (lambda result: result.adapt(None), ConfigError, "data is None; give a FederatedDataset"),
        (
            lambda result: result.adapt(NEW, finetune="kl"),
            ConfigError,
            r"finetune is 'kl'; accepted: 'auto', 'average', None, or an object",
        ),
        (
            lambda result: personalize("mlp", NEW),
            ConfigError,
            "model is a str; give the released module",
        ),
        (
            lambda result: personalize(result.shared_model(), 3),
            ConfigError,
            "data is an int; give a FederatedDataset",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(call, error, said, result: Result) -> None:
    with pytest.raises(error, match=said):
        call(result)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt")
    assert cli.main([*RUN, f"hydra.run.dir={folder}/run"]) == 0
    return folder / "run"


def test_the_command_does_what_python_does_and_publishes_no_more_than_the_released_model(
    finished, tmp_path, capsys
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    words = ["data.clients=7", "data.seed=5", "finetune=vanilla", "finetune.local.epochs=2"]
    assert cli.main(["adapt", str(finished), *words, "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "released on digits: 7 clients" in said
    assert "these models cost no epsilon" in said
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    public, private = tmp_path / "new/public", tmp_path / "new/private"
    assert {path.name for path in public.iterdir()} == {
        "manifest.json",
        "model.safetensors",
        "privacy.json",
    }
    released, again = (
        load_file(folder / "model.safetensors") for folder in (finished / "public", public)
    )
    assert all(torch.equal(released[name], again[name]) for name in released)
    [outside] = json.loads((public / "privacy.json").read_text())["outside"]
    assert "bounded by the epsilon of the released model" in outside, (
        "the model beside it was not free"
    )
    told = json.loads((private / "result.json").read_text())
    assert told["epsilon"] == 0.0
    # The released model is that of the run, so others join there.
    for command in ("adapt", "resume"):
        assert cli.main([command, str(tmp_path / "new"), *words[: 2 * (command == "adapt")]]) == 2
        assert "models of new clients, made from" in capsys.readouterr().err
    data = load_data("digits", clients=7, seed=5, train_images=5)
    module = models.softmax_regression()(data.spec).double()
    module.load_state_dict(released)
    finetune = Finetune(kind="vanilla", local=LocalSGD(lr=0.5, epochs=2, batch_size=10))
    found = personalize(
        module, data, finetune=finetune, metrics=["auc"], dtype="float64", device="cpu"
    )
    assert torch.equal(load_file(private / "models.safetensors")["models"], found.personal)
    with open(private / "clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for metric, scores in found.by_client.items():
        assert [float(row[metric]) for row in rows if row[metric]] == list(scores.values())
        assert told[metric] == pytest.approx(found.metrics[metric])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["rounds=3"],
            "rounds=3 is not taken here: settings stay as they are stored, except data=...",
        ),
        (["data.foo=3"], "data.foo is no setting of load_digits_clients; accepted: "),
        (["data=table"], "is required; add data."),
        (
            ["data=synthetic_tasks"],
            "The model fails on a batch of shape (2, 28), the shape of this data",
        ),
        (["finetune=none"], "finetune is none"),
        (["finetune=klx"], "finetune has no option 'klx'; did you mean kl?"),
        (["data.seed=5", "finetune.start=personal"], "new clients start from the given model"),
        (["data.seed=5", "metrics=[rmse]"], "metrics has 'rmse', which is not for digits"),
        (["metrics=[foo]"], "metrics has 'foo'; accepted: loss, accuracy"),
        (["--out", "RUN"], "which has files already"),
        (["--out", "RUN/private/result.json"], "which is a file; choose another folder"),
        (["finetune=mean"], "these would be the clients of the run"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    words, said, finished, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["adapt", str(finished), *(word.replace("RUN", str(finished)) for word in words)])
        == 2
    )
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_model_to_start_from_are_refused(
    finished, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    missing = {
        "public/model.safetensors": "has no shared model",
        "private/result.json": "has not finished",
    }
    for name, said in missing.items():
        (copy / name).unlink()
        assert cli.main(["adapt", "copy"]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["adapt", "nowhere"]) == 2
    assert "nowhere holds no run of this command" in capsys.readouterr().err


def test_classes_coded_as_numbers_are_coded_for_the_loss_of_the_run() -> None:
    def side(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x, (x[:, 0] > 0).double() * 2 - 1

    old, new = (
        {f"{name}-{i}": side(10 * len(name) + i) for i in range(4)} for name in ("old", "newer")
    )
    old, new = (FederatedDataset.from_tensors(rows, classes=None) for rows in (old, new))
    result = trainer(
        algorithm=FedAvg(local=SOLVER), data=old, model=models.logistic_regression(), privacy=None,
        loss="binary_cross_entropy",
    ).fit()  # fmt: skip
    found = result.adapt(new)
    assert found.metric == "accuracy"
    assert found.metrics["accuracy"] > 0.5


def test_new_clients_are_given_as_the_data_of_a_trainer_are(result: Result) -> None:
    rows = {f"new-{i}": (torch.randn(12, *DATA.spec.shape), torch.arange(12) % 3) for i in range(2)}
    shared = result.shared_model()
    for join in (result.adapt, lambda data: personalize(shared, data)):
        assert torch.equal(join(rows).personal, join(FederatedDataset.from_tensors(rows)).personal)


def table_of(name: str, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    size, kind = random.uniform(0, 2, 60), random.choice(["new", "old"], 60)
    cost = size + (kind == "new") + random.normal(0, 0.1, 60)
    return pd.DataFrame(
        {"who": [f"{name}{row % 4}" for row in range(60)], "size": size, "kind": kind, "cost": cost}
    )


COLUMNS = {
    "client": "who",
    "target": "cost",
    "bounds": {"size": [0, 2], "kind": ["new", "old"], "cost": [-1, 4]},
}


def test_local_of_new_clients_does_not_know_the_released_model() -> None:
    old, new = (
        load_data("table", path=table_of(name, seed), **COLUMNS) for seed, name in enumerate("ab")
    )
    runs = [
        Trainer(data=old, privacy=None, rounds=rounds, progress=False).fit() for rounds in (1, 5)
    ]
    adapted = [run.adapt(new) for run in runs]
    assert not torch.equal(adapted[0].shared, adapted[1].shared)
    alone = [run.baselines["local"].personal for run in adapted]
    assert torch.equal(alone[0], alone[1])
    expected = (
        Trainer(data=new, privacy=None, rounds=1, baselines=["local"], progress=False)
        .fit()
        .baselines["local"]
    )
    assert torch.equal(alone[0], expected.personal)
    assert "  local " in adapted[0].summary()
    assert "of 4 clients" in verdict_of(adapted[0])


def test_local_of_new_clients_of_classes_starts_from_zero() -> None:
    ways = Finetune(kind="vanilla", local=LocalSGD(lr=0.1, steps=3, batch_size=None))
    linear = models.softmax_regression()
    shared = (
        trainer(algorithm=FedAvg(local=SOLVER), data=OLD, model=linear, rounds=1)
        .fit()
        .shared_model()
    )
    zero = copy.deepcopy(shared)
    for parameter in zero.parameters():
        torch.nn.init.zeros_(parameter)
    found = personalize(shared, NEW, finetune=replace(ways, kind="mean")).baselines["local"]
    assert torch.equal(found.personal, personalize(zero, NEW, finetune=ways).personal)
    assert not torch.equal(found.personal, personalize(shared, NEW, finetune=ways).personal)


def test_new_clients_have_no_local_beside_a_network_or_frozen_parameters(result: Result) -> None:
    assert not result.adapt(NEW).baselines
    linear = models.softmax_regression()(NEW.spec)
    assert personalize(linear, NEW).baselines
    assert not personalize(linear, NEW, trainable=("*bias",)).baselines
    own_loss = partial(torch.nn.functional.cross_entropy, reduction="none")
    assert not personalize(linear, NEW, loss=own_loss).baselines


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"bounds": {**COLUMNS["bounds"], "size": [0, 3]}},
            "'size' has range (0.0, 3.0), in the run (0.0, 2.0)",
        ),
        (
            {"bounds": {**COLUMNS["bounds"], "kind": ["old", "new"]}},
            "the column 'kind' has categories",
        ),
        (
            {"bounds": {**COLUMNS["bounds"], "cost": [0, 4]}},
            "the target 'cost' has target range (0.0, 4.0), in",
        ),
        (
            {"features": ["kind", "size"]},
            "the features are 'kind', 'size', and those of the run 'size', 'kind'",
        ),
    ],
)
def test_a_table_of_new_clients_that_is_coded_in_another_way_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    old = load_data("table", path=table_of("a", 0), **COLUMNS)
    new = load_data("table", path=table_of("b", 1), **{**COLUMNS, **changes})
    run = Trainer(data=old, privacy=None, rounds=1, progress=False).fit()
    with pytest.raises(DataError, match=re.escape(said)):
        run.adapt(new)
    other_ids = table_of("b", 1).rename(columns={"who": "shop"})
    run.adapt(load_data("table", path=other_ids, **{**COLUMNS, "client": "shop"}))


def test_kept_settings_can_be_typed_again() -> None:
    parser = OverridesParser.create()
    categories = [
        "gr\u00fcn",
        "a;b",
        "x y",
        "null",
        "1",
        "1e3",
        "<=50K",
        "it's",
        "",
        "a,b",
        "c-d",
        "1980-01-01",
    ]
    bounds = {"kind": categories, "size": [0, 1.5, -3, None, 1e-9]}
    for value in (bounds, categories, "Gr\u00f6\u00dfe", None, True, 3):
        typed = parser.parse_override(f"data.x={_flow(value)}").value()
        assert plain(typed) == value


def plain(value: object) -> object:
    """Returns what Hydra has read, with its quoted texts as texts."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    return value


def test_the_command_keeps_the_columns_of_the_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    table_of("a", 0).to_csv("old.csv", index=False)
    table_of("b", 1).rename(columns={"who": "shop"}).to_csv("new.csv", index=False)
    bounds = "data.bounds={size: [0, 2], kind: [new, old], cost: [-1, 4]}"
    assert (
        cli.main(
            [
                "old.csv",
                "client=who",
                "target=cost",
                bounds,
                "data.classes=null",
                "privacy=none",
                "hydra.run.dir=run",
            ]
        )
        == 0
    )
    assert cli.main(["adapt", "run", "new.csv", "client=shop", "--out", "new"]) == 0
    said = capsys.readouterr()
    assert f"as in the run: data.target=cost '{bounds}' data.classes=null\n" in said.err
    assert "released on new.csv: 4 clients" in said.out
    by_hand = Result.load("run").adapt(
        load_data("table", path="new.csv", **{**COLUMNS, "client": "shop"})
    )
    assert Result.load("new").by_client == by_hand.by_client


def test_the_command_takes_no_test_rows_of_the_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, table in (
        ("old", table_of("a", 0)),
        ("test", table_of("a", 2)),
        ("new", table_of("b", 1)),
    ):
        table.to_csv(f"{name}.csv", index=False)
    bounds = "data.bounds={size: [0, 2], kind: [new, old], cost: [-1, 4]}"
    words = [
        "old.csv",
        "client=who",
        "target=cost",
        bounds,
        "data.test_path=test.csv",
        "privacy=none",
    ]
    assert cli.main([*words, "rounds=1", "baselines=[]", "hydra.run.dir=run"]) == 0
    assert cli.main(["adapt", "run", "new.csv", "--out", "new"]) == 0
    by_hand = Result.load("run").adapt(load_data("table", path="new.csv", **COLUMNS))
    assert Result.load("new").by_client == by_hand.by_client
    table_of("b", 3).to_csv("later.csv", index=False)
    assert cli.main(["adapt", "run", "new.csv", "data.test_path=later.csv", "--out", "more"]) == 0
    assert Result.load("more").by_client != by_hand.by_client
    assert "test_path" not in capsys.readouterr().err
