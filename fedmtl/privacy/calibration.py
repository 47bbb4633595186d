"""The calibration of a run's privacy: noise, costs, and the header of the ledger.

:func:`.channel_setup.open_channel` calibrates by the privacy unit:
:func:`.client_calibration.calibrate_clients` or :func:`.record_calibration.calibrate_records`.
Either one states the cost of a use and the budget of every account, and
:func:`.account_costs.calibrate_accounts` finds the noise multipliers that these need. Noise that
the clients of a secure sum share is calibrated by :mod:`.secure_calibration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from .._files import Json
from .account_costs import AccountCosts
from .gradients import GradientPlan
from .release import Release
from .row_noise import BoundRowNoise
from .samplers import BoundSampler
from .settings import Privacy


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The calibrated privacy of a run, with which a channel is opened.

    Attributes:
        settings: the privacy of all replicates, or of each.
        caps: int64 (n,), the most uses of each client, if clients have accounts of their own;
            else None.
        costs: of the uses; None if nothing is noised.
        facts: the values of the ledger's header beside the settings and the costs.
        sampler: the law of the cohorts; None for clients that act one at a time.
        releases: of rows of clients, by name.
        row_noise: the noise that clients add to their own rows, by release.
        gradients: the release of gradients of single records; None without one.
    """

    settings: tuple[Privacy, ...]
    caps: np.ndarray | None
    costs: AccountCosts | None = None
    facts: Mapping[str, Json] = field(default_factory=dict)
    sampler: BoundSampler | None = None
    releases: dict[str, Release] = field(default_factory=dict)
    row_noise: dict[str, BoundRowNoise] = field(default_factory=dict)
    gradients: GradientPlan | None = None

    @property
    def width(self) -> float | None:
        """Returns the width of the grid on which a secure sum adds up gradients of single records;
        None without such a sum."""
        for release in self.releases.values():
            if release.unit == "record":
                return release.width
        return None

    @property
    def header(self) -> dict[str, Json] | None:
        """Returns the header of the ledger; None if nothing is charged."""
        if self.costs is None:
            return None
        about: dict[str, Json] = {
            "privacy": asdict(self.settings[0]),
            "delta": self.costs.delta,
            "refuted": self.costs.refuted,
        }
        return {**about, **self.facts, **self.costs.header(self.caps)}


def caps_of(sampler: BoundSampler) -> np.ndarray | None:
    """Returns int64 (n,), the sampler's cap on the uses of each client; None without one."""
    if sampler.cap is None:
        return None
    return np.full(sampler.n, sampler.cap, dtype=np.int64)


def schedule_facts(sampler: BoundSampler, **assumed: Json) -> dict[str, Json]:
    """Returns the facts that accounting takes from the sampler or assumes in its place, for
    readers of the ledger."""
    schedule = {"class": type(sampler).__name__, **sampler.recorded, **sampler.facts, **assumed}
    return {"sampler": sampler.describe(), "schedule": schedule}
