"""The last step of agents on their own records: what it solves, its limits, and that nothing of it is public."""

import numpy as np
import pytest
import torch

from fedmtl import PeerToPeer

from .p2p_harness import COUNTS, agents, arrays, random_graph


def resolved(loss, refine, replicates=2):
    """A problem, an algorithm, and a state with some models in it."""
    problem = agents(loss)
    algorithm = PeerToPeer(row_norm=1.0, graph=random_graph(len(COUNTS)), loss=loss, refine=refine)
    state = algorithm.init(problem, replicates)
    state.public["theta"].normal_(generator=torch.Generator().manual_seed(1))
    return problem, algorithm, state


def test_squared_loss_is_a_ridge_regression_toward_the_learned_model():
    problem, algorithm, state = resolved("squared", 3.0)
    found = algorithm.models(problem, state).numpy()
    for r in range(2):
        for i, (x, y) in enumerate(arrays(problem)):
            theta = state.public["theta"][r, i].numpy()
            exact = np.linalg.solve(x.T @ x + 3.0 * np.eye(x.shape[1]), x.T @ y + 3.0 * theta)
            np.testing.assert_allclose(found[r, i], exact, rtol=1e-9)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_strong_pull_leaves_the_learned_model(loss):
    problem, algorithm, state = resolved(loss, 1e9)
    torch.testing.assert_close(algorithm.models(problem, state), state.public["theta"], rtol=0, atol=1e-6)


def test_the_personal_models_are_those_of_the_first_replicate_and_the_public_state_stays():
    problem, algorithm, state = resolved("squared", 3.0)
    before = {name: value.clone() for name, value in state.public.items()}
    some = torch.tensor([4, 1])
    personal = algorithm.personalize(problem, state, some)
    torch.testing.assert_close(personal, algorithm.models(problem, state)[0, some].to(personal))
    assert not torch.allclose(personal.double(), state.public["theta"][0, some])
    assert all(torch.equal(value, state.public[name]) for name, value in before.items())
