"""Local differential privacy on the data: every record is perturbed once, and anything may be learned from the result.

The baseline of Bellet et al. 2018, section 5.1 (after Duchi, Jordan, Wainwright, "Privacy aware learning", NIPS 2012,
and Kairouz, Oh, Viswanath, "Extremal mechanisms for local differential privacy", JMLR 2016), which the paper reports to
give very inaccurate models. A record is released as one vector v:

    logistic loss    v = y x, as log(1 + exp(-y theta . x)) depends on nothing else; its label is then +1
    squared loss     v = (x, s y), with s = bound on ||x|| / bound on |y|, a public scale

Replacing a record moves v by at most 2 B, B = the bound on ||x|| (times 2 in the L1 norm, or sqrt(2) in the L2 norm,
with a target), and the noise is calibrated to that. A record is in one release and in no other, so the guarantee of one
release is the guarantee of every record, however many records and agents there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl._check import positive
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.data import RowBound
from fedmtl.errors import ConfigError
from fedmtl.privacy import PrivacyCost, RecordPrivacy
from fedmtl.privacy.accounting.composition import epsilon as epsilon_of
from fedmtl.privacy.noise.laws import LAWS, NoiseLaw
from fedmtl.privacy.noise.sources import SeededSource

_SHRINK = 1 - 2.0**-40
"""Norms are brought to this share of their bound, so that rounding cannot cross it."""


@dataclass(frozen=True, eq=False)
class PerturbedRecords:
    """Records that may be published.

    Attributes:
        data: as many records of each agent as before; of the logistic loss all labels are +1.
        law: of the noise, in units of the sensitivity.
        sensitivity: of one record's vector under replacement, in the norm of the law.
        epsilon, delta: of every record.
    """

    data: LinearData
    law: NoiseLaw
    sensitivity: float
    epsilon: float
    delta: float


def record_vectors(
    data: LinearData, loss: LinearLoss, privacy: RecordPrivacy, target: float
) -> tuple[Tensor, float]:
    """The vectors v of all records and the bound on their norm.

    Args:
        data: the records; rows beyond ``privacy.initial_norm`` in the norm of its law are scaled down, targets beyond
            ``target`` cut off, and a record that is not finite becomes 0.
        loss: ``"logistic"`` or ``"squared"``.
        privacy: its ``clip_norm`` bounds ||x||.
        target: public bound on abs(y) for the squared loss.

    Returns:
        (N, p) or (N, p + 1) float64, and the bound, which two vectors are at most twice apart.
    """
    pure, bound = privacy.mechanism == "laplace", privacy.initial_norm
    limit = 1.0 if loss.name == "logistic" else target
    rows, labels = data.bounded(RowBound(bound, "l1" if pure else "l2"), limit).pooled()
    if loss.name == "logistic":
        return rows * labels[:, None], bound
    return torch.cat([rows, labels[:, None] * (_SHRINK * bound / target)], dim=1), bound * (
        2.0 if pure else math.sqrt(2.0)
    )


def perturb_records(
    data: LinearData,
    loss: LinearLoss,
    privacy: RecordPrivacy,
    *,
    target: float = 1.0,
    seed: int = 0,
    replicate: int = 0,
) -> PerturbedRecords:
    """Release every record once, with noise of the law and the budget of ``privacy``.

    Args:
        data: the agents' records; their numbers are public.
        loss: what will be learned: ``"squared"`` or ``"logistic"``.
        privacy: ``clip_norm`` is a public bound on ||x||, in the L1 norm for ``"laplace"``, else in the L2 norm;
            ``epsilon`` a single finite budget, spent on one release; ``source="seeded"``: this is a baseline for
            studies, which keeps no ledger.
        target: public bound on abs(y), for the squared loss.
        seed: of seeded noise.
        replicate: index of an independent repetition.

    Raises:
        ConfigError: the hinge loss, a bias (its constant feature would be noised; append no bias), or a budget that is
            not one finite number.
    """
    if loss.name == "hinge":
        raise ConfigError("perturb_records.loss is 'hinge'; accepted: 'squared', 'logistic'.")
    if data.bias:
        raise ConfigError(
            "perturb_records: the model has a bias, whose constant would be noised; use bias=False."
        )
    if not isinstance(privacy.epsilon, (int, float)) or not math.isfinite(privacy.epsilon):
        raise ConfigError(
            f"perturb_records: epsilon is {privacy.epsilon!r}; one finite budget is needed."
        )
    if privacy.source != "seeded":
        raise ConfigError("perturb_records is a simulation without a ledger; use source='seeded'.")
    if privacy.noise_multiplier is not None:
        raise ConfigError(
            "perturb_records: noise_multiplier is not read; the noise is calibrated to epsilon."
        )
    positive("perturb_records", target=target)
    loss.check_targets(data.y, data.name)
    vectors, bound = record_vectors(data, loss, privacy, target)
    count, width = vectors.shape
    delta = privacy.resolved_delta(count)

    cost = PrivacyCost(law=privacy.mechanism, sizes=(width,), delta=delta)
    law = LAWS[privacy.mechanism](cost.multiplier(float(privacy.epsilon), 1))
    source = SeededSource(seed, replicate)
    noise = law.draw_rows(source, "local-dp/record", 0, torch.arange(count), width)
    released = torch.from_numpy(vectors.numpy() + 2 * bound * noise)
    p, counts = data.dimension, data.counts.tolist()
    if loss.name == "logistic":
        y = torch.ones(count, dtype=torch.float64)
    else:
        y = released[:, p] * (target / privacy.initial_norm / _SHRINK)
    at = law.event(width)
    spent = epsilon_of(at, 1, delta)
    perturbed = LinearData(
        released[:, :p].contiguous().split(counts),
        y.split(counts),
        False,
        f"{data.name}, perturbed",
    )
    return PerturbedRecords(perturbed, law, 2 * bound, spent, delta)
