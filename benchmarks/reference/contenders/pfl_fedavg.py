"""Runs FedAvg of Apple's pfl on given data, cohorts and batches, with its own clip and Gaussian noise.

    python pfl_fedavg.py FOLDER

It needs pfl[pytorch] and nothing of fedmtl, so that it runs in an environment of its own. For every
NAME.npz of the folder it writes NAME.model.npz: the shared model (D,) after the last round, and the
epsilon that pfl's accountant has for the noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import HyperParam, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.privacy import (
    CentrallyAppliedPrivacyMechanism,
    GaussianMechanism,
    PLDPrivacyAccountant,
)
from pfl.privacy.privacy_mechanism import NormClippingOnly
from torch import Tensor, nn


class CohortSize(HyperParam, TrainingProcessCallback):
    """The number of clients of each round, as pfl asks for it."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.round = sizes, 0

    def value(self) -> int:
        """Returns the size of the cohort of this round."""
        # pfl asks once more after the last round
        return self.sizes[min(self.round, len(self.sizes) - 1)]

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:
        """Goes on to the next round."""
        self.round += 1
        return super().after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )


class ExpectedCohort(Postprocessor):
    """Divides the noised sum by the expected cohort, a public number.

    pfl divides by the number of clients that took part. Its cohorts have a fixed size; that of a
    Poisson cohort is not public.
    """

    def __init__(self, size: float) -> None:
        self.size = size

    def postprocess_server(
        self, *, stats: Any, central_context: Any, aggregate_metrics: Any
    ) -> tuple[Any, Metrics]:
        """Sets the weight by which pfl divides the sum."""
        stats.weight = self.size
        return stats, Metrics()


def mechanism(settings: dict[str, Any], rounds: int) -> tuple[Any, float]:
    """Returns pfl's clip with its noise, and the epsilon that pfl's accountant has for that noise."""
    if settings["multiplier"] == 0.0:
        return NormClippingOnly(2.0, settings["clip"]), np.inf
    account = PLDPrivacyAccountant(
        num_compositions=rounds,
        sampling_probability=settings["rate"],
        mechanism="gaussian",
        delta=settings["delta"],
        noise_parameter=settings["multiplier"] / settings["noise_scale"],
        noise_scale=settings["noise_scale"],
    )
    return GaussianMechanism.from_privacy_accountant(account, settings["clip"]), account.epsilon


def trained(work: Any, settings: dict[str, Any], private: Any) -> Tensor:
    """Returns the shared model (D,) after all rounds.

    Args:
        work: x (N, F), y (N,), initial (D,), members of all cohorts one after another, sizes of the
            cohorts, and for each member the rows of its examples in the order of its batches.
        settings: of the clients.
        private: pfl's mechanism.
    """
    x, y = torch.from_numpy(work["x"]), torch.from_numpy(work["y"])
    module = nn.Linear(x.shape[1], settings["classes"])
    nn.utils.vector_to_parameters(torch.from_numpy(work["initial"]), module.parameters())
    module.loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # type: ignore[assignment]
    module.metrics = lambda x, y: {}  # type: ignore[assignment]
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=settings["central_lr"]),
    )

    def turns() -> Iterator[tuple[int, Tensor]]:
        for member, rows in zip(work["members"].tolist(), work["rows"], strict=True):
            yield member, torch.from_numpy(rows)

    def client(turn: tuple[int, Tensor]) -> Dataset:
        member, rows = turn
        return Dataset(raw_data=[x[rows], y[rows]], user_id=str(member))

    left = turns()
    data = FederatedDataset(client, lambda: next(left))
    sizes = work["sizes"].tolist()
    cohort = CohortSize(sizes)
    # pfl goes through this list for a client, and through it backwards for the server.
    steps = [
        ExpectedCohort(settings["expected"]),
        WeightByUser(),
        CentrallyAppliedPrivacyMechanism(private),
    ]
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(sizes),
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=steps),
        model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=settings["lr"],
            local_num_epochs=1,
            local_batch_size=settings["batch"],
        ),
        model_eval_params=None,
        callbacks=[cohort],
    )
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def main() -> None:
    """Reads every work of the folder, and writes its model."""
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    for source in sorted(Path(folder).glob("*.npz")):
        with np.load(source) as stored:
            work = dict(stored)
        settings = json.loads(str(work["settings"]))
        # pfl draws the seeds of its noise from NumPy's global generator
        np.random.seed(settings["seed"])  # noqa: NPY002
        torch.manual_seed(settings["seed"])
        private, epsilon = mechanism(settings, len(work["sizes"]))
        model = trained(work, settings, private)
        target = source.with_suffix(".model.npz")
        np.savez(target, model=model.numpy(), version=version("pfl"), epsilon=epsilon)


if __name__ == "__main__":
    main()
