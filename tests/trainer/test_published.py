"""Algorithms whose published accounting is refuted: a run prints its figure beside an infinite epsilon."""

from __future__ import annotations

import math

import pytest
from torch import nn

from fedmtl import RecordPrivacy, Trainer
from fedmtl.algorithms.pp_dmtl import PPDMTL, PublishedPPDMTL
from fedmtl.schedules import PoissonClocks

from ..helpers import regression


@pytest.mark.parametrize("kind", [PPDMTL, PublishedPPDMTL])
def test_a_refuted_accounting_is_never_printed_as_epsilon(kind) -> None:
    result = Trainer(
        algorithm=kind(row_norm=1.0, loss="squared", a1=0.01),
        data=regression(3, examples=8),
        model=nn.Linear(4, 1, bias=False),
        loss="mse",
        schedule=PoissonClocks(per_client=2),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=4.0, mechanism="l2_laplace", delta=0.0),
        rounds=6,
        progress=False,
    ).fit()
    if kind is PPDMTL:
        assert result.epsilon == result.privacy.epsilon == pytest.approx(4.0)
        assert result.privacy.refuted is None
        return
    assert result.epsilon == result.privacy.epsilon == math.inf
    assert all(row["epsilon"] == math.inf for row in result.history)
    assert result.privacy.claimed == pytest.approx(4.0)  # of one activation: 2 by the release, 2 by its query
    assert result.privacy.refuted is not None
