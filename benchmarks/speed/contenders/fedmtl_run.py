"""A run of fedmtl on the settings of a work, which its contenders share and from which the work is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from work import Work, cifar, cnn3

from fedmtl import (
    PMTL,
    ClientPrivacy,
    Execution,
    FedProx,
    FixedCohort,
    LocalSGD,
    PoissonSampling,
    RecordPrivacy,
    load_data,
    models,
)
from fedmtl.algorithms.base import Algorithm, Problem, State
from fedmtl.algorithms.problem import Tally
from fedmtl.data import FederatedDataset
from fedmtl.data.transforms import Affine
from fedmtl.local import plan_batches
from fedmtl.privacy import BoundSampler, Channel, open_channel
from fedmtl.ranks import SINGLE, Ranks
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import releases_of

MODELS: dict[str, Any] = {
    "cnn": models.femnist_cnn(),
    "logistic": models.softmax_regression(),
    "mlp": models.mlp(hidden=200),
    "cnn3": lambda spec: cnn3(spec.classes),
    "cifar": lambda spec: cifar(spec.classes),
}


def made_up(
    clients: int, least: int, most: int, shape: list[int], classes: int
) -> FederatedDataset:
    """Clients of ``least`` to ``most`` random images, the first in ten of them for test, of a class each."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(least, most + 1, (clients,), generator=generator)
    total = int(counts.sum())
    x = torch.randint(0, 256, (total, *shape), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, classes, (total,), generator=generator)
    pieces = zip(x.split(counts.tolist()), y.split(counts.tolist()), strict=True)
    rows = {f"client-{i}": pair for i, pair in enumerate(pieces)}
    return FederatedDataset.from_tensors(
        rows, test_fraction=0.1, classes=classes, transform=Affine(scale=1 / 255), name="made up"
    )


@dataclass
class Run:
    """A run of fedmtl, ready for its first round."""

    problem: Problem
    algorithm: Algorithm
    channel: Channel

    @classmethod
    def of(
        cls,
        settings: dict[str, Any],
        rounds: int,
        root: str,
        ledger: Path | None,
        device: str = "cpu",
        ranks: Ranks = SINGLE,
    ) -> Run:
        """Build it by the settings of a work."""
        data = (
            made_up(**settings["data"]) if "data" in settings else load_data("femnist", root=root)
        )
        execution = Execution(**settings.get("execution", {}))
        records = settings.get("unit") == "record"
        problem = build_problem(
            data,
            MODELS[settings["model"]],
            ProblemSettings(
                loss="cross_entropy",
                execution=execution,
                rounds=rounds,
                seed=settings["seed"],
                device=device,
                dtype=settings.get("dtype", "float32"),
                protects_records=records,
            ),
            ranks,
        )
        solver = LocalSGD(lr=settings["lr"], epochs=1, batch_size=settings["batch"])
        lam = settings["lam"]
        algorithm: Algorithm = FedProx(mu=lam, local=solver)
        if settings["method"] == "pmtl":
            algorithm = PMTL(lam=lam, local=solver)
        # of records all clients have the same noise, so that the other contenders need one number
        amount = {"noise_multiplier": settings.get("noise_multiplier")}
        if "noise_multiplier" not in settings:
            amount = {"epsilon": settings["epsilon"]}
        unit = RecordPrivacy if records else ClientPrivacy
        privacy = unit(clip_norm=settings["clip"], delta=1e-5, **amount)
        cohort = settings["cohort"]
        sampler: BoundSampler = PoissonSampling(cohort=cohort).bind(len(data))
        if records:  # of whose clients each has a cap on its rounds, here all of them
            sampler = FixedCohort(cohort=cohort, max_uses=rounds).bind(len(data))
        plans = releases_of(algorithm, problem, sampler)
        order = torch.argsort(data.keys, stable=True)
        channel = open_channel(
            privacy,
            plans,
            sampler,
            seed=settings["seed"],
            ledger_path=ledger,
            steps=rounds,
            order=order,
            ranks=ranks,
        )
        problem = replace(
            problem, tally=Tally()
        )  # models that diverge are counted, as the trainer does it
        return cls(problem, algorithm, channel)

    def steps(self, rounds: int) -> Iterator[tuple[Tensor, State]]:
        """Make rounds as the trainer does; yield the cohort of each and the state after it."""
        state = self.algorithm.init(self.problem)
        for event in round_events(self.channel.draw, start=0, stop=rounds):
            self.channel.begin(event.first, event.cohort)
            state = self.algorithm.step(self.problem, state, event, self.channel)
            yield event.cohort, state

    def work(self, settings: dict[str, Any], rounds: int) -> Work:
        """Return the work that this run will do, for all contenders; of single records, their rounds are then over."""
        data, channel = self.problem.data, self.channel
        x, y = data.gather("train", torch.arange(len(data.train)))
        cohorts = [channel.draw(step) for step in range(rounds)]
        drawn: list[tuple[Tensor, Tensor | None]] = []
        for step, cohort in enumerate(cohorts):
            if self.problem.protects_records:
                drawn.append(self._drawn_records(step, cohort))
            else:
                drawn.append((self._permuted_examples(step, cohort, settings["seed"]), None))
        orders, lengths = zip(*drawn, strict=True)
        if self.problem.protects_records:
            noise = settings["noise_multiplier"] * settings["clip"]
        else:
            release = channel.releases["update"]
            noise = (channel.noise_multiplier or 0.0) * release.sensitivity
        given = settings | {
            "noise": noise,
            "denominator": channel.denominator,
            "classes": data.classes,
        }
        return Work(
            x.cpu(),
            y.cpu(),
            data.train.offsets,
            self.problem.initial.cpu(),
            cohorts,
            list(orders),
            given,
            list(lengths) if self.problem.protects_records else None,
        )

    def _permuted_examples(self, step: int, cohort: Tensor, seed: int) -> Tensor:
        """Return the examples of the clients of a round in the order of their batches."""
        orders = [torch.zeros(0, dtype=torch.int64)]
        for client in cohort:
            plan = plan_batches(
                self.problem.data, self.algorithm.local, client[None], seed=seed, round=step
            )
            orders += [batch.index[0][batch.weight[0] > 0] for batch in plan.batches()]
        return torch.cat(orders)

    def _drawn_records(self, step: int, cohort: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records that the clients of a round draw for their local steps, one client after another, and
        their numbers (k, S), -1 after a client's last step."""
        self.channel.begin(step, cohort)
        local = self.channel.local
        offsets = self.problem.data.train.offsets
        steps = local.steps(cohort)
        orders = [torch.zeros(0, dtype=torch.int64)]
        lengths = torch.full((len(cohort), int(steps.max()) if len(steps) else 0), -1)
        for place, client in enumerate(cohort):
            for number in range(int(steps[place])):
                index, mask = local.batch(client[None])
                orders.append(offsets[client] + index[mask])
                lengths[place, number] = int(mask.sum())
                local.receipt.spend(client[None], local.numbers(client[None]))
        return torch.cat(orders), lengths
