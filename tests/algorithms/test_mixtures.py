"""pFedMe, APFL and PP-SGD against rounds written out by hand, and at the ends of their settings."""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from torch.func import functional_call

from fedmtl import (
    APFL,
    PPSGD,
    Ditto,
    FedAvg,
    FedPer,
    FedRep,
    FullParticipation,
    LocalOptimizer,
    LocalSGD,
    PFedMe,
    RecordPrivacy,
    Scaffold,
    models,
)
from fedmtl.algorithms.client_batch import AFTER, ClientBatch
from fedmtl.local import Execution, Mixture, plan_batches
from fedmtl.privacy import FixedCohort
from tests.algorithms.harness import everyone, problem_of, run
from tests.algorithms.test_pmtl import blocks
from tests.helpers import library_accountant, ragged_classification, regression
from tests.trainer.settings import DELTA, FEW, NOISE_OF_RECORDS, record_epsilon, trainer

STEPS = LocalSGD(lr=0.05, steps=3, batch_size=None)
BATCHES = LocalSGD(lr=0.2, epochs=2, batch_size=4, momentum=0.5)


def gradient(x, y, w):
    return 2 / len(x) * x.T @ (x @ w - y)


def test_pfedme_rounds_by_hand() -> None:
    problem = problem_of(regression(clients=5), rounds=4)
    algorithm = PFedMe(lam=1.5, eta=0.4, local_rounds=2, local=STEPS)
    state = run(algorithm, problem)
    w, own = np.zeros(4), [np.zeros(4) for _ in range(5)]
    for _ in range(4):
        updates = []
        for k, (x, y) in enumerate(blocks(problem.data)):
            copy, theta = w.copy(), w.copy()
            for _ in range(2):
                for _ in range(3):
                    theta = theta - 0.05 * (gradient(x, y, theta) + 1.5 * (theta - copy))
                copy = copy - 0.4 * 1.5 * (copy - theta)
            own[k] = theta
            updates.append(copy - w)
        w = w + np.mean(updates, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(
        everyone(problem, algorithm, state).numpy(), np.stack(own), rtol=1e-10
    )


@pytest.mark.parametrize(
    ("solver", "adaptive"), [("momentum", True), ("momentum", False), ("adam", True)]
)
def test_apfl_by_a_loop_over_clients_and_batches(solver: str, adaptive: bool) -> None:
    """Deng et al. 2020, Algorithm 1: w and v step at the same time, and the mixture has the client's own w; by torch's
    own optimizers and automatic derivatives."""
    local = (
        BATCHES
        if solver == "momentum"
        else LocalOptimizer(optimizer_name="Adam", lr=0.03, epochs=2, batch_size=4)
    )
    make = (
        partial(torch.optim.SGD, lr=0.2, momentum=0.5)
        if solver == "momentum"
        else partial(torch.optim.Adam, lr=0.03)
    )
    data, model, cohorts = ragged_classification(), models.mlp(hidden=3), []
    problem = problem_of(data, rounds=4, model=model, loss="auto", execution=Execution(chunk=2))
    algorithm = APFL(alpha=0.4, adaptive=adaptive, local=local)

    def loss(row, x, y):
        outputs = functional_call(problem.module, problem.layout.views(row), (x,))
        return torch.nn.functional.cross_entropy(outputs, y)

    def train(client, w, v, alpha, round):
        """One participation: the client's own copy of w, its v and its alpha."""
        w, v = w.clone().requires_grad_(), v.clone().requires_grad_()
        moves = [make([w]), make([v])]
        plan = plan_batches(data, local, torch.tensor([client]), seed=problem.seed, round=round)
        for number, batch in enumerate(plan.batches()):
            x, y = data.gather(
                "train",
                batch.index[0][batch.weight[0] > 0],
                dtype=torch.float64,
                device=torch.device("cpu"),
            )
            (w.grad,) = torch.autograd.grad(loss(w, x, y), w)
            (v.grad,) = torch.autograd.grad(loss(alpha * v + (1 - alpha) * w.detach(), x, y), v)
            slope = (
                (v - w).detach() @ v.grad / alpha
            )  # v's gradient is alpha times that of the mixture
            for one in moves:
                one.step()
            if adaptive and number == 0:
                alpha = (alpha - local.lr * slope).clamp(0.0, 1.0)
        return w.detach(), v.detach(), alpha

    start = torch.tensor(0.4, dtype=torch.float64)
    shared, own = problem.initial, {}
    states = []
    run(
        algorithm,
        problem,
        sampler=FixedCohort(3),
        watch=lambda step, state: states.append(copy.deepcopy(state)),
    )
    for round, (before, after) in enumerate(pairwise(states)):
        torch.testing.assert_close(before.public["global"], shared, rtol=1e-10, atol=1e-11)
        moved = (
            (before.private.whole("model") != after.private.whole("model"))
            .any(1)
            .nonzero()[:, 0]
            .tolist()
        )
        cohorts.append(moved)
        updates = []
        for client in moved:
            w, *own[client] = train(
                client, shared, *own.get(client, (problem.initial, start)), round
            )
            updates.append(w - shared)
        shared = shared + torch.stack(updates).mean(0)
    assert [len(one) for one in cohorts] == [3] * 4
    assert (len({float(alpha) for _, alpha in own.values()}) > 1) == adaptive
    torch.testing.assert_close(states[-1].public["global"], shared, rtol=1e-10, atol=1e-11)
    found = everyone(problem, algorithm, states[-1])
    for client in range(len(data)):
        if client in own:
            v, alpha = own[client]
        else:  # it trains once from the model of today, and sends nothing
            _, v, alpha = train(client, shared, problem.initial, start, AFTER)
        torch.testing.assert_close(
            found[client], alpha * v + (1 - alpha) * shared, rtol=1e-9, atol=1e-10
        )


def test_a_mixture_that_is_trained_stays_as_it_is() -> None:
    problem = problem_of(regression(clients=3), rounds=1)
    start = torch.ones(3, 4, dtype=problem.initial.dtype)
    mixture = Mixture(start.clone(), torch.full_like(start[:, 0], 0.5), adaptive=True)
    c = ClientBatch(problem, torch.arange(3), round=0)
    _, trained = c.train_mixture(STEPS, problem.initial, mixture)
    assert torch.equal(mixture.models, start)
    assert torch.equal(mixture.weights, torch.full_like(start[:, 0], 0.5))
    assert not torch.equal(trained.models, start)
    assert not torch.equal(trained.weights, mixture.weights)


def test_apfl_with_single_records_protected_charges_the_shared_model_alone() -> None:
    """The personal part is trained on the records as they are, and nothing of it is sent: w is FedAvg's to the bit."""
    solver = LocalSGD(lr=0.2, epochs=2, batch_size=4)
    privacy = RecordPrivacy(clip_norm=0.4, noise_multiplier=1.3, delta=DELTA)

    def fit(algorithm):
        return trainer(
            algorithm=algorithm,
            privacy=privacy,
            schedule=FullParticipation(),
            rounds=2,
            eval_every=2,
        ).fit()

    apfl, fedavg = fit(APFL(local=solver)), fit(FedAvg(local=solver))
    assert apfl.epsilon == fedavg.epsilon
    assert torch.equal(apfl.shared, fedavg.shared)
    assert not torch.equal(apfl.personal[0] - apfl.shared, apfl.personal[1] - apfl.shared)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_ppsgd_rounds_by_hand(ratio: float) -> None:
    """Bietti et al. 2022: both parts follow the gradient at their sum, of the client's own copy of w."""
    problem = problem_of(regression(clients=5), rounds=4)
    algorithm = PPSGD(ratio=ratio, local=STEPS)
    state = run(algorithm, problem)

    def steps(x, y, copy, theta):
        for _ in range(3):
            g = gradient(x, y, copy + theta)
            copy, theta = copy - 0.05 * g, theta - ratio * 0.05 * g
        return copy, theta

    w, theta = np.zeros(4), [np.zeros(4)] * 5
    new = [
        steps(x, y, w, theta[0])[1] for x, y in blocks(problem.data)
    ]  # they train once, and send nothing
    found = everyone(problem, algorithm, algorithm.init(problem))
    np.testing.assert_allclose(found.numpy(), np.stack(new), rtol=1e-10)
    for _ in range(4):
        copies, theta = zip(
            *(steps(*own, w, v) for own, v in zip(blocks(problem.data), theta, strict=True)),
            strict=True,
        )
        w = np.mean(copies, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(everyone(problem, algorithm, state).numpy(), w + theta, rtol=1e-10)


def test_every_training_of_a_record_is_charged() -> None:
    """In steps on all records of a client, whose epsilon needs no sampling, and once in batches."""
    solver = LocalSGD(lr=0.2, epochs=1, batch_size=max(FEW.train.counts.tolist()))
    privacy = RecordPrivacy(clip_norm=0.4, noise_multiplier=NOISE_OF_RECORDS, delta=DELTA)
    for algorithm, trainings in (
        (Ditto(local=solver), 2),
        (PFedMe(local=solver, local_rounds=3), 3),
        (APFL(local=solver), 1),
        (PPSGD(local=solver), 1),
        (FedPer(local=solver), 1),
        (FedRep(local=solver), 2),
        (Scaffold(local=solver), 1),  # of which both rows follow
        (
            FedAvg(local=solver, weights="examples"),
            1,
        ),  # numbers of examples are public here, and need no cap
    ):
        found = trainer(
            algorithm=algorithm, data=FEW, privacy=privacy, schedule=FullParticipation(), rounds=1
        ).fit()
        event = dp_event.GaussianDpEvent(NOISE_OF_RECORDS)
        expected = library_accountant().compose(event, trainings).get_epsilon(DELTA)
        assert found.epsilon == pytest.approx(expected, rel=1e-3)
    algorithm = Ditto(local=replace(solver, batch_size=4))
    found = trainer(
        algorithm=algorithm, data=FEW, privacy=privacy, schedule=FullParticipation(), rounds=1
    ).fit()
    assert found.epsilon == pytest.approx(record_epsilon(2), rel=1e-3)
