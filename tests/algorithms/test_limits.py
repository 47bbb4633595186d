"""At the ends of their settings methods are federated averaging, or local training."""

import pytest
import torch

from fedmtl import (
    IFCA,
    PMTL,
    PPSGD,
    Ditto,
    FedAvg,
    FedPer,
    FedRep,
    Local,
    LocalSGD,
    MPMTLayers,
    models,
)
from fedmtl.privacy import ClientPrivacy, FixedCohort
from tests.algorithms.harness import everyone, problem_of, run
from tests.helpers import ragged_classification

SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4, momentum=0.5)
NOISE = ClientPrivacy(clip_norm=0.3, noise_multiplier=0.5, delta=1e-5)
SHARED = {
    "fedrep": FedRep(head=(), local=SOLVER),
    "fedper": FedPer(head=(), local=SOLVER),
    "ppsgd": PPSGD(ratio=0.0, local=SOLVER),
    "ditto": Ditto(local=SOLVER),  # whose personal models are beside it
    "ifca": IFCA(clusters=1, spread=0.0, local=SOLVER),
}
ALONE = {
    "pmtl": PMTL(lam=0.0, local=SOLVER),
    "pmtl, running mean": PMTL(lam=0.0, local=SOLVER, reference="local"),
    "ditto": Ditto(lam=0.0, local=SOLVER),
    "mp_mtl_layers": MPMTLayers(layers=("3",), threshold=0.0, local=SOLVER),
}


def classified():
    return problem_of(ragged_classification(7), rounds=4, model=models.mlp(hidden=4), loss="auto")


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_is_the_model_of_federated_averaging(name: str) -> None:
    problem, algorithm, fedavg = classified(), SHARED[name], FedAvg(local=SOLVER)
    one, other = (
        run(method, problem, sampler=FixedCohort(3), privacy=NOISE)
        for method in (algorithm, fedavg)
    )
    tolerance = {"rtol": 1e-13, "atol": 1e-15} if name == "ifca" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(one.public["global"].flatten(), other.public["global"], **tolerance)
    if name != "ditto":
        torch.testing.assert_close(
            everyone(problem, algorithm, one), everyone(problem, fedavg, other), **tolerance
        )


@pytest.mark.parametrize("name", ALONE)
def test_without_a_pull_personal_models_are_those_of_local_training(name: str) -> None:
    """Whatever noise is released beside them."""
    problem, algorithm, local = classified(), ALONE[name], Local(local=SOLVER)
    one, other = run(algorithm, problem, privacy=NOISE), run(local, problem)
    tolerance = 1e-12 if name == "mp_mtl_layers" else 0
    found, alone = everyone(problem, algorithm, one), everyone(problem, local, other)
    torch.testing.assert_close(found, alone, rtol=0, atol=tolerance)
