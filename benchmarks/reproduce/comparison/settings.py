"""The problems of the comparison, the settings of every method on each, and how one of them is chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from fedmtl import (
    APFL,
    IFCA,
    MPMTL,
    PMTL,
    PPSGD,
    ClientPrivacy,
    Ditto,
    FedAvg,
    FederatedDataset,
    FedProx,
    FedRep,
    Finetune,
    FullParticipation,
    Local,
    LocalSGD,
    PFedMe,
    PoissonSampling,
    RecordPrivacy,
    Result,
    Trainer,
    load_data,
    models,
)
from fedmtl.algorithms import Algorithm
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.data.examples import Examples, cut
from fedmtl.errors import DataError

VALIDATION = 0.2  # share of every client's training rows on which settings are compared
DELTA = 1e-5
StudyName = Literal["digits", "femnist", "femnist all images", "school", "school records"]
WRITERS = 206
IMAGES = 60  # of a writer on average, at least, for the study with all of them; the full file has over 200


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        algorithm: with its solver; None for automatic settings, which leave nothing to choose.
        clip: L2 norm of what a client sends, None where nothing is released.
        finetune: after the run, or None.
        hidden: units of a hidden layer; 0 is the linear model.
    """

    algorithm: Algorithm | None
    clip: float | None
    finetune: Finetune | None = None
    hidden: int = 0

    def text(self) -> str:
        """What differs between the settings of a method, in words."""
        own, parts = self.algorithm, []
        if own is None:
            return "automatic settings"
        for field in ("lam", "mu", "alpha", "ratio", "clusters", "rho"):
            if field in getattr(own, "__dataclass_fields__", {}) and (
                field == "rho" or not isinstance(own, MPMTL)
            ):
                parts.append(f"{field} {getattr(own, field)}")
        if isinstance(own, (FedAvg, Local)) and self.finetune is None:
            parts.append(f"{own.local.epochs} epochs")
        if isinstance(own, Local):
            parts.append(f"lr {own.local.lr:g}")
        if isinstance(own, LocalFit):
            parts.append(f"ridge {own.ridge:g}")
        if isinstance(own, FedRep) and own.head_local is not None:
            parts.append(f"{own.head_local.epochs} epochs of the head")
        if self.clip is not None:
            parts.append(f"clip {self.clip:g}")
        if self.finetune is not None:
            pull = "" if self.finetune.kind == "vanilla" else f" lam {self.finetune.lam:g}"
            parts.append(f"then {self.finetune.kind}{pull}, {self.finetune.local.epochs} epochs")
        return ", ".join(parts)


@dataclass(frozen=True)
class Study:
    """A problem, and the values that its methods choose among.

    Attributes:
        metric: a key of a run's final row; ``larger`` is whether a larger one is better.
        schedule: of all methods that release something.
        solver: of all methods, where they do not vary it.
        local: settings of training alone: (step size, epochs) each, or the penalties of an exact ridge fit.
        clips: of what a client sends.
        epochs: of FedAvg's clients.
        lams: strengths of the pull of PMTL and Ditto; the last one also before PMTL is finetuned.
        finetunes: after FedAvg and PMTL, (kind, lam, epochs, step size) each.
        hidden: units of FedRep's network; 0: the method is left out.
        unit: what epsilon protects, a client or a record.
    """

    name: StudyName
    title: str
    metric: str
    larger: bool
    schedule: PoissonSampling | FullParticipation
    rounds: int
    solver: LocalSGD
    local: tuple[tuple[float, int], ...] | tuple[float, ...]
    clips: tuple[float, float, float]
    epochs: tuple[int, int, int]
    lams: tuple[float, float, float]
    finetunes: tuple[tuple[Any, float, int, float], ...]
    hidden: int = 0
    unit: Literal["client", "record"] = "client"

    def methods(self) -> dict[str, list[Setting]]:
        """Nine settings a method: three clips, each with three values of what is the method's own.

        Those of training alone are three step sizes, each with three numbers of epochs, or nine ridge penalties.
        """

        def sgd(epochs: int) -> LocalSGD:
            return replace(self.solver, epochs=epochs)

        ways = [
            Finetune(kind=kind, lam=lam, local=replace(sgd(epochs), lr=lr))
            for kind, lam, epochs, lr in self.finetunes
        ]
        own: dict[str, list[tuple[Algorithm, Finetune | None]]] = {
            "FedAvg": [(FedAvg(local=sgd(epochs)), None) for epochs in self.epochs],
            "FedProx": [(FedProx(mu=mu, local=self.solver), None) for mu in (0.01, 0.1, 1.0)],
            "IFCA": [(IFCA(clusters=clusters, local=self.solver), None) for clusters in (2, 3, 4)],
            "FedAvg, finetuned": [(FedAvg(local=self.solver), way) for way in ways],
            "PMTL": [(PMTL(lam=lam, local=self.solver), None) for lam in self.lams],
            "PMTL, finetuned": [(PMTL(lam=self.lams[-1], local=self.solver), way) for way in ways],
            "Ditto": [(Ditto(lam=lam, local=self.solver), None) for lam in self.lams],
            "APFL": [(APFL(alpha=alpha, local=self.solver), None) for alpha in (0.25, 0.5, 0.75)],
            "pFedMe": [
                (PFedMe(lam=lam, eta=1.0 / lam, local=self.solver), None) for lam in (0.1, 0.3, 1.0)
            ],
            "PP-SGD": [(PPSGD(ratio=ratio, local=self.solver), None) for ratio in (0.1, 0.3, 1.0)],
        }
        rows: dict[str, Any] = {"loss": "squared", "feature_norm": "auto", "target": "auto"}
        if self.name == "school":
            rows["ridge"] = 0.055
            own["MP-MTL"] = [(MPMTL(rho=rho, **rows), None) for rho in (1.5, 0.5, 0.2)]
        if self.hidden:
            own["FedRep"] = [
                (FedRep(local=self.solver, head_local=sgd(epochs)), None) for epochs in (1, 3, 10)
            ]
        if self.unit == "record":  # the vote of a client is no gradient of its records
            del own["IFCA"]
        found = {"Local": [Setting(self.alone(value, rows), None) for value in self.local]}
        found["Automatic"] = [Setting(None, None)]
        for name, values in own.items():
            hidden = self.hidden if name == "FedRep" else 0
            found[name] = [
                Setting(of_clip(algorithm, clip), clip, way, hidden)
                for clip, (algorithm, way) in itertools.product(self.clips, values)
            ]
        return found

    def alone(self, value: Any, rows: dict[str, Any]) -> Algorithm:
        """Training alone: an exact ridge fit, or a step size with a number of epochs."""
        if isinstance(value, float):
            return LocalFit(**rows | {"ridge": value})
        lr, epochs = value
        return Local(local=replace(self.solver, lr=lr, epochs=epochs))

    def choose(
        self, data: FederatedDataset, settings: list[Setting], epsilon: float, seed: int
    ) -> tuple[int, Result, dict[int, float]]:
        """Search a method's grid one coordinate after the other, with five trainings, the same for every method.

        First the three clips with the middle one of the other values, then the two other values with the best clip.
        Without privacy clips do not differ, so the three other values are all there is.

        Args:
            data: whose test rows are the validation rows.
            settings: nine.

        Returns:
            The place of the best setting, its run, and the scores of all that were trained, by place.
        """
        runs: dict[int, Result] = {}

        def best(places: Sequence[int]) -> int:
            for place in places:
                runs.setdefault(place, self.train(data, settings[place], epsilon, seed))
            sign = 1.0 if self.larger else -1.0
            scores = {place: sign * runs[place].final[self.metric] for place in places}
            return max(
                places,
                key=lambda place: scores[place] if math.isfinite(scores[place]) else -math.inf,
            )

        first = 1 if math.isinf(epsilon) else best((1, 4, 7))
        row = first - first % 3
        chosen = best((row, row + 1, row + 2))
        return chosen, runs[chosen], {place: run.final[self.metric] for place, run in runs.items()}

    def train(
        self,
        data: FederatedDataset,
        setting: Setting,
        epsilon: float,
        seed: int,
        eval_every: int | None = None,
    ) -> Result:
        """One run, by default evaluated at its end; where nothing is released, one local run of every client."""
        protect = RecordPrivacy if self.unit == "record" else ClientPrivacy
        if setting.algorithm is None:
            privacy = protect(epsilon=epsilon, delta=DELTA)
            return Trainer(
                data=data, privacy=privacy, seed=seed, eval_every=eval_every, progress=False
            ).fit()
        clip = setting.clip
        rounds = 1 if clip is None else self.rounds
        private = clip is not None and epsilon < math.inf
        linear = (
            models.linear_regression(bias=False)
            if data.classes is None
            else models.softmax_regression()
        )
        return Trainer(
            algorithm=setting.algorithm,
            data=data,
            model=models.mlp(hidden=setting.hidden) if setting.hidden else linear,
            loss="half_mse" if data.classes is None else "auto",
            schedule=FullParticipation() if clip is None else self.schedule,
            privacy=protect(clip_norm=clip, epsilon=epsilon, delta=DELTA) if private else None,
            rounds=rounds,
            finetune=setting.finetune,
            seed=seed,
            eval_every=eval_every or rounds,
            progress=False,
        ).fit()


def of_clip(algorithm: Algorithm, clip: float) -> Algorithm:
    """MP-MTL's threshold goes with the clip: a tenth of it."""
    return replace(algorithm, lam=0.1 * clip) if isinstance(algorithm, MPMTL) else algorithm


def load(name: StudyName, root: Path | None, seed: int) -> FederatedDataset:
    """The data of a seed, which divides every client's rows into training and test rows."""
    if name == "digits":
        return load_data("digits", seed=seed)
    if name == "femnist":
        return half_size(load_data("femnist", root=root, seed=seed))
    if name == "femnist all images":
        data = load_data("femnist", root=root, seed=seed)
        each = (int(data.train.counts.sum()) + int(data.test.counts.sum())) / len(data)
        if len(data) < WRITERS or each < IMAGES:
            raise DataError(
                f"{root} has {len(data):,} writers, {each:.0f} images each on average; the study needs {WRITERS} "
                f"writers and {IMAGES} images each: give the full file of FEMNIST."
            )
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:WRITERS]
        return half_size(data.take_clients(chosen.sort().values))
    return load_data(
        "school", root=root, seed=seed, test_fraction=0.7, standardize="client", targets="centred", unit_rows=True,
        min_examples=4,
    )  # fmt: skip


def half_size(data: FederatedDataset) -> FederatedDataset:
    """Images (1, 28, 28) as 196 numbers: means of 2 by 2 pixels, doubled, which keeps inner products about the same."""

    def smaller(side: Examples) -> Examples:
        pixels = data.transform(side.x, torch.float64).float()
        return Examples(2.0 * F.avg_pool2d(pixels, 2).flatten(1), side.y, side.offsets)

    return FederatedDataset(
        smaller(data.train), smaller(data.test), data.ids, classes=data.classes, name=data.name
    )


def held_out(data: FederatedDataset, seed: int) -> FederatedDataset:
    """The training rows alone, divided again: settings are compared on what is held out here, never on test rows."""
    fit, held = cut(
        data.train, data.ids, test_fraction=VALIDATION, seed=1000 + seed, where=data.name
    )
    return replace(data, train=fit, test=held, notes=(), inferred=(), public=None)


RIDGES = (0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)
STUDIES: dict[str, Study] = {
    "digits": Study(
        name="digits",
        title="digits: 1,000 writers, 10 images each",
        metric="accuracy",
        larger=True,
        schedule=PoissonSampling(cohort=100),
        rounds=50,
        solver=LocalSGD(lr=0.5, epochs=5, batch_size=10),
        local=tuple(itertools.product((0.3, 0.5, 1.0), (20, 50, 150))),
        clips=(0.3, 1.0, 3.0),
        epochs=(2, 5, 10),
        lams=(0.1, 0.3, 1.0),
        finetunes=(("mean", 0.1, 5, 0.5), ("mean", 0.1, 20, 0.5), ("kl", 0.1, 20, 0.5)),
        hidden=32,
    ),
    "femnist": Study(
        name="femnist",
        title="FEMNIST: 206 writers, 24 images each, 62 classes",
        metric="accuracy",
        larger=True,
        schedule=PoissonSampling(cohort=100),
        rounds=30,
        solver=LocalSGD(lr=0.3, epochs=1, batch_size=10),
        local=tuple(itertools.product((0.1, 0.3, 1.0), (10, 30, 100))),
        clips=(0.1, 0.3, 1.0),
        epochs=(1, 2, 3),
        lams=(0.01, 0.1, 1.0),
        finetunes=(("vanilla", 0.0, 1, 0.03), ("kl", 3.0, 10, 0.1), ("kl", 10.0, 30, 0.03)),
        hidden=32,
    ),
    "school": Study(
        name="school",
        title="School: 139 schools, 33 pupils each",
        metric="mse",
        larger=False,
        schedule=FullParticipation(),
        rounds=10,
        solver=LocalSGD(lr=0.3, epochs=5, batch_size=10),
        local=RIDGES,
        clips=(0.03, 0.1, 0.3),
        epochs=(2, 5, 10),
        lams=(0.1, 0.3, 1.0),
        finetunes=(("mean", 0.1, 10, 0.3), ("mean", 0.3, 10, 0.3), ("mean", 1.0, 10, 0.3)),
    ),
    "school records": Study(
        name="school records",
        title="School: 139 schools, epsilon of a pupil",
        metric="mse",
        larger=False,
        schedule=FullParticipation(),
        rounds=60,
        solver=LocalSGD(lr=1.0, epochs=1, batch_size=1000),
        local=RIDGES,
        clips=(0.03, 0.1, 0.3),
        epochs=(1, 2, 4),
        lams=(0.1, 0.3, 1.0),
        finetunes=(("mean", 0.1, 60, 0.3), ("mean", 0.3, 60, 0.3), ("mean", 1.0, 60, 0.3)),
        unit="record",
    ),
}
STUDIES["femnist all images"] = replace(
    STUDIES["femnist"],
    name="femnist all images",
    title=f"FEMNIST: {WRITERS} writers, all images, 62 classes",
)
