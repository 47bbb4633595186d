"""Run FedProx of Apple's pfl (pip install pfl[pytorch]) on a given work, with its own clip and Gaussian noise."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import HyperParam, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
from work import Clock, Work, arguments, report


class Rounds(HyperParam, TrainingProcessCallback):
    """The cohorts one after another: their size, their members, and the clock between them."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.work, self.clock, self.step = work, clock, 0

    def value(self) -> int:
        return len(self.work.cohorts[min(self.step, self.work.rounds - 1)])

    def members(self) -> Iterator[tuple[int, torch.Tensor]]:
        for step in range(self.work.rounds):
            yield from self.work.examples(step).items()

    def on_train_begin(self, *, model: Any) -> Any:
        self.clock.start()
        return super().on_train_begin(model=model)

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:
        self.clock.stop()
        self.step += 1
        self.clock.start()
        return super().after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )


def main() -> None:
    """Time every round between two calls of the callback."""
    given = arguments(__doc__)
    work, clock = Work.read(given.work, given.rounds), Clock.new(given.device)
    x, y = work.x.to(given.device), work.y.to(given.device)
    settings = work.settings
    np.random.seed(int(settings["seed"]))  # noqa: NPY002 - what pfl draws from
    torch.manual_seed(int(settings["seed"]))
    module = work.module().to(given.device)
    module.loss = lambda x, y: torch.nn.functional.cross_entropy(module(x), y)  # type: ignore[assignment]
    module.metrics = lambda x, y: {}  # type: ignore[assignment]
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    rounds = Rounds(work, clock)
    members = rounds.members()

    def next_user(user: tuple[int, torch.Tensor]) -> Dataset:
        client, order = user
        return Dataset(raw_data=[x[order], y[order]], user_id=str(client))

    data = FederatedDataset(next_user, lambda: next(members))
    noise = GaussianMechanism(settings["clip"], settings["noise"] / settings["clip"])
    backend = SimulatedBackend(data, data, postprocessors=[CentrallyAppliedPrivacyMechanism(noise)])
    FedProx().run(
        FedProxParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds,  # once, in the first round of the warm-up
            train_cohort_size=rounds,
            val_cohort_size=None,
            mu=settings["lam"],
        ),
        backend,
        model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=settings["lr"],
            local_num_epochs=1,
            local_batch_size=settings["batch"],
        ),
        model_eval_params=None,
        callbacks=[rounds],
    )
    loss = work.loss(lambda client: module, given.device)
    report(work, clock, "pfl", version("pfl"), given.threads, loss)


if __name__ == "__main__":
    main()
