"""The number of uses: the noise of each, the cap at which a client falls silent, the budget and the delta of all."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism

from fedmtl.errors import BudgetExhausted, ResumeError
from fedmtl.privacy import (
    ClientPrivacy,
    FullParticipation,
    GradientPlan,
    PoissonSampling,
    RecordPrivacy,
    ReleasePlan,
    Rounds,
    open_channel,
)

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


def test_repetitions_with_budgets_of_their_own_have_noise_of_their_own() -> None:
    settings = [replace(PURE, epsilon=epsilon) for epsilon in (1.0, 4.0)]
    channel = door(settings, caps=(3,), counts=(2,), dimension=4000, replicates=2)
    channel.begin(0, torch.tensor([[0], [0]]))
    value = channel.release(lambda k, runs: torch.zeros(len(runs), 2).double()).numpy()
    scales = 2 * 0.5 / np.array([1.0 / 3, 4.0 / 3]) / 2  # 2 C / e over two records
    np.testing.assert_allclose(np.abs(value).mean(1), scales, rtol=0.08)


# Rounds


def opened(privacy: ClientPrivacy, clients: int = 4, steps: int = 6, **options) -> Rounds:
    plan = ReleasePlan(name="update", dimension=2)
    bound = FullParticipation().bind(clients)
    return open_channel(privacy, (plan,), bound, seed=0, steps=steps, **options)


@pytest.mark.parametrize(("share", "steps"), [(1 - 1e-6, 5), (1 + 1e-6, 6)])
def test_a_step_that_is_a_hair_beyond_the_budget_is_refused(share: float, steps: int) -> None:
    """Of six planned ones, whose noise multiplier is given: against the closed form."""
    budget = float(gaussian_mechanism.get_epsilon_gaussian(5.0 / math.sqrt(6), 1e-5)) * share
    channel = opened(ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, epsilon=budget, delta=1e-5))
    for step in range(steps):
        channel.begin(step, channel.draw(step))
    with pytest.raises(BudgetExhausted, match=f"{steps} steps are charged"):
        channel.begin(steps, channel.draw(steps))
    assert channel.epsilon <= budget


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_run_that_is_one_step_ahead_of_its_ledger_is_refused(source: str, tmp_path: Path) -> None:
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, delta=1e-5, source=source)
    first = opened(privacy, ledger_path=tmp_path / "ledger.jsonl")
    for step in range(3):
        first.begin(step, first.draw(step))
    first.close()
    again = opened(privacy, ledger_path=tmp_path / "ledger.jsonl", resume=True)
    with pytest.raises(ResumeError, match=r"continues at step 4.*step 3 is not charged"):
        again.start(4)
    again.start(3)
    again.close()


def test_delta_is_that_of_all_protected_units() -> None:
    """n^-1.1 where there are many: of clients, or of the records of all of them."""
    plan = ReleasePlan(name="update", dimension=2)
    many = PoissonSampling(10).bind(10**6)
    channel = open_channel(
        ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0), (plan,), many, seed=0
    )
    assert channel.delta == pytest.approx(10**-6.6)
    records = GradientPlan(
        ids=("a", "b"), counts=np.array([10**6, 3]), dimension=2, caps=np.array([1, 1])
    )
    private = RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0)
    assert open_channel(private, (records,), "in turn", seed=0).delta == pytest.approx(
        (10**6 + 3) ** -1.1
    )
