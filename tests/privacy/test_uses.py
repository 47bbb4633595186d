"""The number of a client's uses: the noise of each, and the cap at which a client falls silent."""

import math

import numpy as np
import pytest
import torch

from fedmtl.privacy import RecordPrivacy

from .activations import PURE, door


def released(channel, activations: int) -> np.ndarray:
    """(S, D): what so many activations release of clients that contribute nothing."""
    counts = channel.records.counts
    values = [
        channel.release(lambda k, runs: torch.zeros(len(runs), int(counts[k])).double())[0]
        for _ in range(activations)
    ]
    return torch.stack(values).numpy()


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 10.0)])
def test_the_noise_of_every_use_is_that_of_its_part_of_the_budget(weights: tuple) -> None:
    """Laplace noise on a sum that a record moves by 2 C: of scale 2 C / e for a use with the part e of epsilon = 2.
    Clients act in turn, in two blocks, each of which begins in the middle of their uses."""
    parts = 2.0 * np.array(weights) / sum(weights)
    counts = (1, 2)
    channel = door(
        PURE, caps=(4, 4), counts=counts, dimension=4000, allocation=[np.array(weights)] * 2
    )
    clients = [0, 1, 1, 0, 1, 0, 1, 0]
    uses = [0, 0, 1, 1, 2, 2, 3, 3]
    stds = []
    found = []
    for block in (slice(0, 3), slice(3, 8)):
        channel.begin(block.start, torch.tensor([clients[block]]))
        for _ in clients[block]:
            found.append(np.abs(released(channel, 1)).mean())
            stds.append(float(channel.noise_std("gradient")))
    scales = 2 * 0.5 / parts[uses] / np.array(counts)[clients]
    np.testing.assert_allclose(found, scales, rtol=0.08)  # five deviations of the mean of |v|
    np.testing.assert_allclose(stds, math.sqrt(2.0) * scales, rtol=1e-4)


def test_a_client_past_its_cap_is_silent_and_free() -> None:
    """Within a block, after it, and beside others; all of the budget, and no more, is in the uses up to the cap."""
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism="laplace", delta=0.0)
    channel = door(privacy, caps=(2, 3, 0), at_cap="silent")
    blocks = [[0, 0, 0, 1, 2], [1, 0, 1, 1, 0]]
    speaks = [[1, 1, 0, 1, 0], [1, 0, 1, 0, 0]]
    for first, (clients, loud) in enumerate(zip(blocks, speaks, strict=True)):
        channel.begin(5 * first, torch.tensor([clients]))
        assert released(channel, 5).any(1).tolist() == [bool(one) for one in loud]
    assert channel.account.uses.tolist() == [[2, 3, 0]]
    assert channel.account.epsilons()[0] == pytest.approx([2.0, 2.0, 0.0], rel=1e-4)
