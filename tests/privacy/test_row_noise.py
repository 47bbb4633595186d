"""Noise that clients add to their own rows: its law and what it costs, whose it is, and the clip under it."""

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedmtl.audit.recording import RecordedRounds
from fedmtl.errors import PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    FullParticipation,
    ReleasePlan,
    RoundChannel,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.receipt import Receipt
from fedmtl.privacy.row_noise import RowNoise
from tests.helpers import library_accountant

CLIP, CLIENTS, STEPS = 0.7, 4000, 3
EVERYBODY = torch.arange(CLIENTS)
PLAN = ReleasePlan(name="c", dimension=1, rows=RowNoise(1.5))
PRIVACY = ClientPrivacy(clip_norm=CLIP, noise_multiplier=2.0, delta=1e-5)


def channel(**options) -> RoundChannel:
    everybody = FullParticipation().bind(CLIENTS)
    return open_channel(PRIVACY, (PLAN,), everybody, seed=3, steps=STEPS, **options)


def paid(noise, step: int = 0, clients: torch.Tensor = EVERYBODY) -> Receipt:
    """A receipt that has been spent on noise on rows."""
    receipt = Receipt(step, step, clients)
    receipt.spend(noise.name, clients)
    return receipt


def test_noise_needs_a_receipt_that_was_spent_on_it() -> None:
    noise = channel().row_noise["c"]
    rows, source, receipt = torch.zeros(CLIENTS, 1), SeededSource(3), Receipt(0, 0, EVERYBODY)
    receipt.spend("c", EVERYBODY)  # another release of the same round
    with pytest.raises(PrivacyError, match="'c/rows' of step 0 is not paid for"):
        noise.added(rows, EVERYBODY, receipt, source)
    assert noise.added(rows, EVERYBODY, paid(noise), source).shape == rows.shape


def test_noise_on_rows_is_laplace_noise_for_a_distance_of_two_clips() -> None:
    """Of one number, where L2-Laplace noise is Laplace noise, which dp-accounting composes."""
    noise = channel().row_noise["c"]
    added = noise.added(torch.zeros(CLIENTS, 1), EVERYBODY, paid(noise), SeededSource(3)).numpy()
    assert np.abs(added).mean() == pytest.approx(2 * CLIP * noise.multiplier, rel=0.08)
    library = library_accountant().compose(dp_event.LaplaceDpEvent(noise.multiplier), STEPS)
    assert library.get_epsilon(1e-5) == pytest.approx(1.5, rel=2e-3)


def test_noise_on_rows_belongs_to_the_client_and_the_round() -> None:
    noise = channel().row_noise["c"]
    rounds = [
        noise.added(torch.zeros(CLIENTS, 1), EVERYBODY, paid(noise, step), SeededSource(3))
        for step in range(3)
    ]
    assert torch.cat(rounds).unique().numel() == 3 * CLIENTS
    some = torch.tensor([7, 2])
    again = noise.added(torch.zeros(2, 1), some, paid(noise, 1, some), SeededSource(3))
    assert torch.equal(again, rounds[1][some])


def test_rows_are_clipped_before_their_noise_and_released_with_it() -> None:
    opened = channel(channel_class=RecordedRounds)
    opened.record = []
    cohort = opened.draw(0)
    opened.begin(0, cohort)
    far = torch.full((CLIENTS, 1), 1e9)
    opened.release("c", far, cohort)
    (_, name, hidden), *_ = opened.record
    law = opened.row_noise["c"]
    noise = law.added(torch.zeros(CLIENTS, 1), EVERYBODY, paid(law), SeededSource(3))
    assert name == "c/rows"
    np.testing.assert_allclose((hidden - noise).numpy(), CLIP, rtol=1e-5)
