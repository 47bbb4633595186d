"""FedRep and FedPer against plain loops, at the ends of what is shared, and what their release holds."""

import pytest
import torch
from torch import nn

from fedmtl import FedPer, FedRep, LocalOptimizer, LocalSGD, models
from fedmtl.algorithms import ClientBatch
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, FixedCohort
from tests.algorithms.harness import everyone, problem_of, run
from tests.helpers import ragged_classification

SOLVER = LocalSGD(lr=0.1, steps=3, batch_size=None)
HEAD = LocalSGD(lr=0.2, steps=2, batch_size=None)


def problem(clients: int = 5, rounds: int = 3):
    return problem_of(
        ragged_classification(clients), rounds=rounds, model=models.mlp(hidden=4), loss="auto"
    )


def network(given, row: torch.Tensor) -> nn.Module:
    module = models.mlp(hidden=4)(given.data.spec).double()
    return given.layout.load(module, row)


def descend(module: nn.Module, part: nn.Module, x, y, lr: float, steps: int) -> None:
    for _ in range(steps):
        loss = nn.functional.cross_entropy(module(x), y)
        gradients = torch.autograd.grad(loss, list(part.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                parameter -= lr * gradient


@pytest.mark.parametrize("joint", [False, True])
def test_rounds_by_hand(joint: bool) -> None:
    """A loop over clients with PyTorch: the head with the received body, then the body (FedPer: both at once)."""
    given = problem()
    algorithm = FedPer(local=SOLVER) if joint else FedRep(local=SOLVER, head_local=HEAD)
    state = run(algorithm, given)
    body, heads = (
        network(given, given.initial),
        [network(given, given.initial)[-1] for _ in range(5)],
    )
    for _ in range(3):
        mean = [torch.zeros_like(p) for p in body[:-1].parameters()]
        for k in range(5):
            rows = slice(*given.data.train.offsets[k : k + 2].tolist())
            x, y = given.data.train.x[rows], given.data.train.y[rows]
            module = network(given, given.layout.flatten(body))
            module[-1].load_state_dict(heads[k].state_dict())
            if joint:
                descend(module, module, x, y, 0.1, 3)
            else:
                descend(module, module[-1], x, y, 0.2, 2)
                descend(module, module[:-1], x, y, 0.1, 3)
            heads[k] = module[-1]
            with torch.no_grad():
                for total, new, old in zip(
                    mean, module[:-1].parameters(), body[:-1].parameters(), strict=True
                ):
                    total += (new - old) / 5
        with torch.no_grad():
            for parameter, step in zip(body[:-1].parameters(), mean, strict=True):
                parameter += step
    expected = []
    for head in heads:
        body[-1].load_state_dict(head.state_dict())
        expected.append(given.layout.flatten(body))
    torch.testing.assert_close(
        everyone(given, algorithm, state), torch.stack(expected), rtol=1e-9, atol=1e-11
    )


def test_the_release_has_the_shared_coordinates_alone() -> None:
    given = problem()
    algorithm = FedRep(local=SOLVER)
    shared = algorithm.shared_places(given)
    (plan,) = algorithm.plan(given, FixedCohort(3).bind(5))
    assert plan.dimension == 5 * 4 + 4 == int(shared.sum())  # the first layer of the perceptron
    record: list = []
    privacy = ClientPrivacy(clip_norm=0.3, noise_multiplier=2.0, delta=1e-5)
    state = run(algorithm, given, privacy=privacy, record=record)
    assert all(len(value) == plan.dimension for _, _, value in record)
    assert torch.equal(state.public["global"][~shared], given.initial[~shared])
    assert not torch.equal(state.public["global"][shared], given.initial[shared])
    total = sum(value for _, _, value in record)
    torch.testing.assert_close(state.public["global"][shared] - given.initial[shared], total)


def test_heads_are_named_by_patterns() -> None:
    given = problem()
    names = given.layout.names
    assert names == ("1.weight", "1.bias", "3.weight", "3.bias")
    for head, private in (
        (("3",), {2, 3}),
        (("*.bias",), {1, 3}),
        (["3.weight"], {2}),
        ("auto", {2, 3}),
    ):
        shared = FedRep(head=head).shared_places(given)
        found = {k for k in range(4) if not shared[given.layout.offsets[k]]}
        assert found == private
    with pytest.raises(
        ConfigError, match=r"FedRep\.head has 'fc', which no .*; the model's parameters are 1\.w"
    ):
        FedRep(head=("fc",)).plan(given, FixedCohort(3).bind(5))
    with pytest.raises(ConfigError, match="nothing is shared"):
        FedRep(head=("*",)).plan(given, FixedCohort(3).bind(5))


SOLVERS = (
    LocalSGD(lr=0.1, steps=3, momentum=0.9, weight_decay=0.1),
    LocalOptimizer(lr=0.1, steps=3),
)


@pytest.mark.parametrize("solver", SOLVERS)
def test_frozen_coordinates_keep_every_bit(solver) -> None:
    given, moving = problem(), torch.zeros(39, dtype=torch.bool)
    moving[[0, 5, 38]] = True
    assert given.dimension == 39
    start = given.initial + 0.1 * torch.arange(5, dtype=torch.float64)[:, None]
    c = ClientBatch(given, torch.arange(5), round=0)
    trained = c.train(solver, start, moving=moving, lam=0.5, anchor=given.initial)
    assert torch.equal(trained[:, ~moving], start[:, ~moving])
    assert bool((trained[:, moving] != start[:, moving]).all())


def test_a_new_client_fits_a_head_to_the_released_body() -> None:
    given = problem(6, 2)
    algorithm = FedRep(local=SOLVER, head_local=HEAD)
    state = run(algorithm, given, sampler=FixedCohort(2))
    seen, shared = state.private.whole("seen"), algorithm.shared_places(given)
    assert not bool(seen.all())
    found = everyone(given, algorithm, state)
    assert bool((found[:, shared] == state.public["global"][shared]).all())
    k = int((~seen).nonzero()[0])
    module = network(given, state.public["global"])
    rows = slice(*given.data.train.offsets[k : k + 2].tolist())
    descend(module, module[-1], given.data.train.x[rows], given.data.train.y[rows], 0.2, 2)
    torch.testing.assert_close(found[k], given.layout.flatten(module), rtol=1e-9, atol=1e-11)
