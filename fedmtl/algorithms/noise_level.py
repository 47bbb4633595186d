"""The noise of a run relative to the clients' contributions, nu."""

from __future__ import annotations

import math
from dataclasses import replace

from ..data import FederatedDataset
from ..privacy import (
    BoundSampler,
    ClientPrivacy,
    FullParticipation,
    Privacy,
    RecordPrivacy,
    ReleasePlan,
    Sampler,
)
from ..privacy.accounting.gaussian import gaussian_multiplier
from ..privacy.client_calibration import calibrated_release
from ..secure.roster import honest_rows

RECORDS_SHARE = 0.07
"""Noise at the record level up to which sharing was useful, by the mean of records."""


def noise_of(
    privacy: Privacy | None,
    data: FederatedDataset,
    dimension: int,
    rounds: int,
    schedule: Sampler | BoundSampler | None = None,
) -> float:
    """Returns nu, the length of the noise of a run relative to a client's contribution.

    For clients nu = sigma sqrt(T p) / K, with the noise multiplier sigma of one release that has
    the whole budget: the length of the noise on the mean of K updates of norm 1 if T rounds share
    the budget. For N records it is sigma sqrt(T p K) / (.07 N), and without the root of K if one
    noise is added to the sum of all clients, see :mod:`fedmtl.contrib.automatic`.

    Args:
        privacy: of the run.
        data: only the number of clients is read, and at the record level the number of records,
            which is public there.
        dimension: p.
        rounds: T.
        schedule: the law of the cohorts, at the client level; None for all clients in every round.

    Returns:
        nu, without a unit; 0 without noise.
    """
    if privacy is None or privacy.noiseless:
        return 0.0
    clients = len(data)
    records = isinstance(privacy, RecordPrivacy)
    usual = isinstance(schedule, FullParticipation | None)
    shared = isinstance(privacy, ClientPrivacy) and privacy.aggregation is not None
    if isinstance(privacy, ClientPrivacy) and (shared or not usual):
        plan = ReleasePlan(name="update", dimension=dimension)
        bound = schedule or FullParticipation()
        if not isinstance(bound, BoundSampler):
            bound = bound.bind(clients)
        release = calibrated_release(replace(privacy, clip_norm=1.0), plan, bound, rounds)
        return release.noise_std * math.sqrt(dimension)
    if records:
        units = int(data.train.counts.sum())
    else:
        units = clients
    if privacy.epsilon is None:
        assert privacy.noise_multiplier is not None
        multiplier = privacy.noise_multiplier / math.sqrt(rounds)
    else:
        if isinstance(privacy.epsilon, (int, float)):
            epsilon = privacy.epsilon
        else:
            epsilon = min(privacy.epsilon.values())
        multiplier = gaussian_multiplier(float(epsilon), privacy.resolved_delta(units) or 1e-5)
    noise = multiplier * math.sqrt(rounds * dimension)
    if isinstance(privacy, RecordPrivacy):
        return noise * math.sqrt(_noises(privacy, clients)) / (RECORDS_SHARE * units)
    return noise / clients


def _noises(privacy: RecordPrivacy, clients: int) -> float:
    """Returns the variance of the noise of a sum of gradients over that of one noise for all
    records: K if every client adds noise of its own, and in a secure sum K over the number of
    shares that the noise counts on."""
    if privacy.aggregation is None:
        return clients
    colluding = privacy.aggregation.colluding_of(clients)
    # too few honest clients are refused by the calibration
    return clients / max(1, honest_rows(clients, colluding, privacy.aggregation.missing))
