"""Run fedmtl's own rounds on a given work: cohort, ledger entry on disk, gathering, local training, store, release."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from work import Clock, Work, arguments, cifar, cnn3, report

import fedmtl
from fedmtl import (
    PMTL,
    ClientPrivacy,
    Execution,
    FedProx,
    LocalSGD,
    PoissonSampling,
    load_data,
    models,
)
from fedmtl.algorithms.base import Algorithm, Problem
from fedmtl.algorithms.problem import Tally
from fedmtl.data import FederatedDataset
from fedmtl.data.transforms import Affine
from fedmtl.local import plan_batches
from fedmtl.privacy import Channel, open_channel
from fedmtl.ranks import SINGLE, Ranks
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.problem import ProblemSettings, build_problem

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
    batch: int

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
        problem = build_problem(
            data,
            MODELS[settings["model"]],
            ProblemSettings(
                loss="cross_entropy",
                execution=execution,
                rounds=rounds,
                seed=settings["seed"],
                device=device,
            ),
            ranks,
        )
        solver = LocalSGD(lr=settings["lr"], epochs=1, batch_size=settings["batch"])
        lam = settings["lam"]
        algorithm = (
            PMTL(lam=lam, local=solver)
            if settings["method"] == "pmtl"
            else FedProx(mu=lam, local=solver)
        )
        privacy = ClientPrivacy(clip_norm=settings["clip"], epsilon=settings["epsilon"], delta=1e-5)
        sampler = PoissonSampling(cohort=settings["cohort"]).bind(len(data))
        plans = algorithm.plan(problem, sampler)
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
        return cls(problem, algorithm, channel, settings["batch"])

    def work(self, settings: dict[str, Any], rounds: int) -> Work:
        """Return the work that this run will do, for all contenders."""
        data, channel = self.problem.data, self.channel
        x, y = data.gather("train", torch.arange(len(data.train)))
        cohorts = [channel.draw(step) for step in range(rounds)]
        orders = []
        for step, cohort in enumerate(cohorts):
            for client in cohort:
                plan = plan_batches(
                    data, self.algorithm.local, client[None], seed=settings["seed"], round=step
                )
                orders.append(
                    torch.cat([batch.index[0][batch.weight[0] > 0] for batch in plan.batches()])
                )
        ends = torch.tensor([len(cohort) for cohort in cohorts]).cumsum(0).tolist()
        by_round = [torch.cat(orders[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
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
            by_round,
            given,
        )


def processor(ranks: Ranks) -> float:
    """Return the processor seconds of all ranks; none of them goes on before all have come."""
    return sum(ranks.gather(time.process_time()))


def main() -> None:
    """Time every round as the trainer makes it, in as many processes as the others have threads."""
    given = arguments(__doc__)
    work = Work.read(given.work)
    settings = work.settings | (
        {"execution": json.loads(given.execution)} if given.execution else {}
    )
    count = given.threads if given.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder, Ranks().forked(count) as ranks:
        torch.set_num_threads(1 if count > 1 else given.threads)
        clock = Clock.new(given.device, partial(processor, ranks))
        run = Run.of(
            settings, work.rounds, given.root, Path(folder) / "ledger.jsonl", given.device, ranks
        )
        problem, algorithm, channel = run.problem, run.algorithm, run.channel
        state = algorithm.init(problem)
        events = round_events(channel.draw, start=0, stop=work.rounds)
        for step in range(work.rounds):
            clock.start()
            event = next(events)
            channel.begin(event.first, event.cohort)
            state = algorithm.step(problem, state, event, channel)
            clock.stop()
            assert torch.equal(
                torch.sort(event.cohort).values, torch.sort(work.cohorts[step]).values
            )
        taking_part = torch.unique(torch.cat(work.cohorts))
        rows = torch.zeros(len(problem.data), problem.dimension)
        mine = taking_part[problem.own(taking_part)]
        rows[mine] = algorithm.personalize(problem, state, mine).cpu()
        rows = sum(ranks.gather(rows))
        module = work.module().to(given.device)

        def model(client: int) -> nn.Module:
            nn.utils.vector_to_parameters(rows[client].to(given.device), module.parameters())
            return module

        peak = sum(ranks.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)) / (1 << 10)
        if ranks.first:
            loss = work.loss(model, given.device)
            report(
                work, clock, "fedmtl", fedmtl.__version__, given.threads, loss, peak_mib=round(peak)
            )
        channel.close()


if __name__ == "__main__":
    main()
