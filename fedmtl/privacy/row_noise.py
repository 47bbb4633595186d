"""Noise that every client adds to its own row before it leaves: protection from the server that
adds the rows up.

A clipped row has norm C at most, so any two of them are within 2 C. L2-Laplace noise of that
sensitivity on each row hides which data the client has, all of them and so every single record,
from the receiver of the rows (Liang et al. 2020, Algorithm 5). It is an account of its own, beside
that of the released sums: another protected unit (a record, or all records, of one client:
replace-one), and another observer (the server).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .._check import Checked, Fraction, Positive
from .._files import Json
from .._rounding import rounded_up
from ..errors import PrivacyError
from .account_costs import StoredNoise
from .clip import clip_rows
from .cost import PrivacyCost
from .noise.grid import client_noise, noised
from .noise.laws import L2LaplaceNoise
from .noise.sources import NoiseSource
from .receipt import Receipt
from .release import Release, ReleasePlan


@dataclass(frozen=True)
class RowNoise(Checked):
    """Settings of the noise that clients add to their own rows.

    Args:
        epsilon: budget of each client over all the uses, against the server.
        delta: in (0, 1); None takes that of the released sums.

    Raises:
        ConfigError: a value out of range.
    """

    epsilon: Positive
    delta: Fraction | None = None


@dataclass(frozen=True)
class BoundRowNoise:
    """The noise on the rows of one release.

    Attributes:
        release: whose clip bounds a row.
        multiplier: scale of the noise over the sensitivity 2 C.
        cost: of its uses.
    """

    release: Release
    multiplier: float
    cost: PrivacyCost

    @property
    def name(self) -> str:
        """Returns the name by which a receipt pays for the rows with their noise."""
        return f"{self.release.name}/rows"

    @property
    def sensitivity(self) -> float:
        """Returns the sensitivity, 2 C."""
        return 2.0 * self.release.bound

    def epsilon_at(self, uses: int) -> float:
        """Returns the epsilon of each client against the server after ``uses``."""
        return self.cost.epsilon(uses, self.multiplier)

    def added(self, rows: Tensor, clients: Tensor, receipt: Receipt, source: NoiseSource) -> Tensor:
        """Returns the clipped rows with noise: (k, D) -> (k, D) float64 on the CPU.

        Args:
            rows: (k, D) float; one that is not finite counts as zero.
            clients: (k,) int64, whose they are: in seeded mode they address the noise.
            receipt: of the round, spent on this noise.
            source: of the noise.

        Raises:
            PrivacyError: the receipt has not been spent on this noise.
        """
        step = receipt.charged_step(self.name)
        # strides change last bits
        clipped = clip_rows(rows.detach().cpu().double().contiguous(), self.release.clip)
        # The client's key and the step address the noise, so no other client moves it.
        noise, width = client_noise(
            L2LaplaceNoise(self.multiplier),
            [source],
            f"noise/{self.name}",
            torch.full((len(rows), 1), step),
            clients.cpu()[:, None],
            rows.shape[1],
            sensitivity=torch.full((len(rows), 1), self.sensitivity, dtype=torch.float64),
            bound=self.release.bound,
        )
        return noised(clipped, noise[:, 0], width)

    def text(self, uses: int) -> str:
        """Returns one line for the report."""
        return rows_text(self.cost, self.multiplier, uses)


def rows_text(cost: PrivacyCost, multiplier: float, uses: int) -> str:
    """Returns one line for the report on noise of this cost and ``multiplier`` after ``uses``."""
    return (
        f"epsilon {rounded_up(cost.epsilon(uses, multiplier))} at delta = "
        f"{rounded_up(cost.delta, 3)} for the data of one client against the server (relation "
        f"replace): l2_laplace on its row, multiplier {multiplier:.5g}"
    )


def bind_rows(
    plans: tuple[ReleasePlan, ...],
    releases: dict[str, Release],
    steps: int,
    delta: float,
    prior: StoredNoise,
) -> dict[str, BoundRowNoise]:
    """Returns the noise on the rows of every release that asks for it, calibrated to its steps.

    Args:
        plans: of the run.
        releases: by name; empty without a clip.
        steps: in which each is released.
        delta: of the released sums.
        prior: the noise of the run that is resumed.

    Raises:
        PrivacyError: there is no clip, or another norm is clipped.
        ConfigError: a budget that cannot be met.
    """
    bound = {}
    for plan in plans:
        asked = plan.rows
        if asked is None:
            continue
        release = releases[plan.name]
        if release.clip is None or release.clip.norm != "l2":
            raise PrivacyError(
                f"Release {plan.name!r}: noise on rows needs rows that are clipped in the L2 norm."
            )
        own_delta = delta
        if asked.delta is not None:
            own_delta = asked.delta
        cost = PrivacyCost(law="l2_laplace", sizes=(plan.dimension,), delta=own_delta)
        z = prior.multiplier(row_key(plan.name)) or cost.multiplier(asked.epsilon, steps)
        bound[plan.name] = BoundRowNoise(release, z, cost)
    return bound


def row_facts(plans: tuple[ReleasePlan, ...], rows: Mapping[str, BoundRowNoise]) -> dict[str, Json]:
    """Returns the facts about noise on rows for the header of a ledger: each multiplier and its
    target."""
    facts: dict[str, Json] = {row_key(name): noise.multiplier for name, noise in rows.items()}
    return facts | {
        f"rows of {plan.name}": asdict(plan.rows) for plan in plans if plan.rows is not None
    }


def row_key(name: str) -> str:
    """Returns the key under which a ledger's header keeps the multiplier."""
    return f"row noise of {name}"


def refuse_rows(plans: tuple[ReleasePlan, ...]) -> None:
    """Raises PrivacyError if noise on rows is asked for in a run without noise on its sums."""
    for plan in plans:
        if plan.rows is not None:
            raise PrivacyError(
                f"Release {plan.name!r} asks for noise on the rows of clients in a run without "
                "noise: set a finite epsilon, or leave it out."
            )
