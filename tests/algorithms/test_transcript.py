"""No path from private to public but the channel: replaying the releases over other data leaves the public state.

A run's releases are recorded; the run is repeated with every client's data replaced (same public shapes) and the
releases forced to the recording. The public state must then be bit-identical after every event.
"""

import pytest
import torch

from fedmtl import models
from fedmtl.algorithms import PMTL, FedAvg, FedProx, Local, ServerOptimizer
from fedmtl.data import FederatedDataset
from fedmtl.optim import LocalSGD
from fedmtl.privacy import ClientPrivacy, FixedCohort, FullParticipation, PoissonSampling
from tests.algorithms.harness import problem_of, run
from tests.helpers import ragged_classification

SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4)
ALGORITHMS = {
    "pmtl": PMTL(lam=0.5, local=SOLVER),
    "pmtl-local": PMTL(lam=0.5, local=SOLVER, delta="local"),
    "pmtl-momentum": PMTL(local=SOLVER, server_optimizer=ServerOptimizer(options={"momentum": 0.9})),
    "fedavg": FedAvg(local=SOLVER),
    "fedprox": FedProx(local=SOLVER),
    "fedavg-adam": FedAvg(local=SOLVER, server_optimizer=ServerOptimizer(optimizer_name="Adam", lr=0.1)),
    "local": Local(local=SOLVER),
}
SAMPLERS = {"poisson": PoissonSampling(cohort=4), "full": FullParticipation(), "fixed": FixedCohort(cohort=4)}
PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)


def replaced(data: FederatedDataset) -> FederatedDataset:
    """The same clients with the same numbers of examples, and everything else drawn anew."""
    other, parts = torch.Generator().manual_seed(99), []
    for side in (data.train, data.test):
        offsets = side.offsets.tolist()
        parts.append(
            {
                client: (torch.randn(b - a, 5, generator=other), torch.randint(3, (b - a,), generator=other))
                for client, a, b in zip(data.ids, offsets, offsets[1:], strict=False)
            }
        )
    return FederatedDataset.from_tensors(parts[0], test=parts[1], classes=3)


def public_states(algorithm, data, sampler, **options):
    states = []
    problem = problem_of(data, rounds=5, model=models.mlp(hidden=4), loss="cross_entropy")
    keep = lambda step, state: states.append({k: v.clone() for k, v in state.public.items()})  # noqa: E731
    run(algorithm, problem, sampler=sampler, privacy=PRIVACY, watch=keep, **options)
    return states


def differs(a: list[dict], b: list[dict]) -> bool:
    return any(set(x) != set(y) or any(not torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_public_state_is_a_function_of_the_releases(name, sampler):
    algorithm, chosen, data = ALGORITHMS[name], SAMPLERS[sampler], ragged_classification(8)
    releases: list = []
    first = public_states(algorithm, data, chosen, record=releases)
    again = public_states(algorithm, replaced(data), chosen, replay=releases)
    assert not differs(first, again)
    if name != "local":  # and without the forced releases the data do show
        assert differs(first, public_states(algorithm, replaced(data), chosen))


class Leaky(FedAvg):
    """Sets the server's step size by the private updates."""

    def step(self, problem, state, event, channel):
        before = state.public["global"].clone()
        state = super().step(problem, state, event, channel)
        size = float(problem.data.train.x.abs().mean())
        state.public["global"] = before + size * (state.public["global"] - before)
        return state


def test_the_test_catches_a_leak():
    data, releases = ragged_classification(8), []
    first = public_states(Leaky(local=SOLVER), data, SAMPLERS["full"], record=releases)
    assert differs(first, public_states(Leaky(local=SOLVER), replaced(data), SAMPLERS["full"], replay=releases))
