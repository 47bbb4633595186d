"""Mechanisms by themselves: a value for a receipt, and none without."""

import numpy as np
import pytest
import torch

from fedmtl import ClientPrivacy, FullParticipation
from fedmtl.errors import PrivacyError
from fedmtl.privacy import (
    BlockReceipt,
    ClippedSum,
    OuterProductSum,
    Receipt,
    Release,
    ReleasePlan,
    SecureSource,
    SeededSource,
)
from fedmtl.privacy.mechanism import SumNoise, mechanism_of
from fedmtl.privacy.release import Form, bind_releases

CLIENTS = 6
EVERYONE = torch.arange(CLIENTS)


def release(form: Form = "vector", multiplier: float = 0.0) -> Release:
    plan = ReleasePlan(name="update", dimension=3, form=form)
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)
    return bind_releases((plan,), FullParticipation().bind(CLIENTS), privacy, multiplier)["update"]


def rows() -> torch.Tensor:
    return torch.randn(CLIENTS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def clipped() -> np.ndarray:
    own = rows().numpy()
    return own * np.minimum(1.0, 0.5 / np.linalg.norm(own, axis=1))[:, None]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("vector", lambda own: own.mean(0)),
        ("symmetric", lambda own: own.T @ own / len(own)),
        ("diagonal", lambda own: (own * own).mean(0)),
    ],
)
def test_without_noise_it_is_the_mean_of_clipped_rows(form, expected) -> None:
    mechanism = mechanism_of(release(form), SumNoise(), SeededSource(0))
    assert isinstance(mechanism, ClippedSum if form == "vector" else OuterProductSum)
    value = mechanism(rows(), EVERYONE, Receipt(0, 0, EVERYONE))
    # a clip leaves a margin of 2**-20
    np.testing.assert_allclose(value.numpy(), expected(clipped()), rtol=3e-6)


def test_a_receipt_pays_once() -> None:
    mechanism = mechanism_of(release(), SumNoise(), SeededSource(0))
    receipt = Receipt(3, 3, EVERYONE[:4])
    with pytest.raises(PrivacyError, match="client 4, who was not drawn for step 3"):
        mechanism(rows(), EVERYONE, receipt)
    with pytest.raises(PrivacyError, match="one row from each client"):
        mechanism(rows()[:2], EVERYONE[:1], receipt)
    with pytest.raises(PrivacyError, match="each client once"):
        mechanism(rows()[:2], EVERYONE[:1].repeat(2), receipt)
    # what was refused has spent nothing
    mechanism(rows()[:4], EVERYONE[:4], receipt)
    with pytest.raises(PrivacyError, match="happened already in step 3"):
        mechanism(rows()[:4], EVERYONE[:4], receipt)


@pytest.mark.parametrize("source", [SeededSource(0), SecureSource()], ids=["seeded", "secure"])
def test_the_noise_has_the_size_of_the_sensitivity(source) -> None:
    """Full participation: a client replaces its row, so the noise is z 2 C on the sum."""
    made = release(multiplier=1.5)
    mechanism = mechanism_of(made, SumNoise(), source)
    nothing = torch.zeros(CLIENTS, 3)
    values = torch.stack(
        [mechanism(nothing, EVERYONE, Receipt(step, step, EVERYONE)) for step in range(1_000)]
    )
    scale = 2.0 if made.relation == "replace" else 1.0
    # 3,000 numbers: the relative deviation of their root mean square is 1.3%
    measured = float(values.square().mean().sqrt())
    assert measured == pytest.approx(1.5 * 0.5 * scale / CLIENTS, rel=0.07)


def test_a_block_pays_for_its_activations_in_order() -> None:
    receipt = BlockReceipt(10, np.zeros((2, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64))
    for place in range(2):
        assert (receipt.next(), receipt.left) == (place, 2 - place)
        receipt.spend(place)
    assert receipt.left == 0
    with pytest.raises(PrivacyError, match="No activation has begun that was not released"):
        receipt.next()
