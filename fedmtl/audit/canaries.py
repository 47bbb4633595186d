"""Canaries: clients, or records of clients, that an audit adds to a run, each in or out by a fair
coin, and an attack.

A canary is drawn and charged like every client. If it takes part, its row is clipped, added up and
noised with all others. The run does not know the coins, which have a stream of their own. The
attacker has every release, and has the knowledge of the worst-case adversary of differential
privacy: the rows of all other clients, whose sum it subtracts. Without amplification by sampling it
knows the participants, too. The rest is noise and canaries, and the score of a canary is the
logarithm of the likelihood ratio of in against out, the best test by Neyman and Pearson if canaries
do not overlap (and a little less if a sampled round has several releases, each of which is scored
by itself).

Under replace-one the coin chooses between a row and its negative. An epsilon against this attack is
a lower bound on that of the run as it was made, so of its clip, sum, noise, sampling and charges
together.

If the unit is one record, canaries are records of clients that have the same cost. Their gradients
take the place of the rows of canary clients, in every local step of DP-SGD and in every activation
of a client that acts one at a time.

The channels of runs with canaries are subclasses of those of all other runs, which know nothing of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import PrivacyError
from ..privacy.adaptive import AdaptiveClip
from ..privacy.channel import Channel
from ..privacy.clip import RowTotal
from ..privacy.mechanism import ClippedSum, Inner, Mechanism, MechanismAround, Message
from ..privacy.mechanism_choice import mechanism_of
from ..privacy.noise.symmetric import smat
from ..privacy.receipt import Receipt
from ..privacy.release import Release
from ..privacy.round_channel import RoundChannel
from ..privacy.samplers import BoundSampler
from ..random import derive_key
from .likelihood_ratios import (
    LOUD,
    Coins,
    canary_directions,
    gaussian_ratios,
    mixture_ratios,
    score_dependence,
)

_CANARIES = "canaries."


class Canaries(Coins):
    """The canaries of one run in rounds whose unit is a client.

    Args:
        count: m, their number.
        first: number of clients, and the position of the first canary behind them.
        sampler: draws the participants from the clients and the canaries together.
        seed: of the coins and the directions.
    """

    def __init__(self, count: int, first: int, sampler: BoundSampler, seed: int) -> None:
        super().__init__(count, first, seed)
        self.sampler = sampler
        self.paired = sampler.relation == "replace"

    def check(self, releases: Mapping[str, Release]) -> None:
        """Refuses releases that the attack does not cover.

        Raises:
            PrivacyError: a matrix whose rows have no negative.
        """
        for release in releases.values():
            if release.form != "vector" and self.paired:
                raise PrivacyError(
                    f"Canaries of a {release.form} release need add-or-remove neighbours, and "
                    f"those of {self.sampler.describe()} replace a client; use PoissonSampling, "
                    "CyclicCohorts or FullParticipation."
                )

    def dependence(self, releases: Mapping[str, Release], *, adaptive: bool) -> str | None:
        """Returns the reason why the score of a canary depends on the coins of others; None if it
        does not.

        Args:
            releases: of the run.
            adaptive: True if the clip norm follows the rows.
        """
        if adaptive:
            return "the clip norm follows the rows of canaries"
        each = (
            score_dependence(release.noise, len(self), release.dimension)
            for release in releases.values()
        )
        return next(filter(None, each), None)

    def directions(self, release: Release, step: int) -> tuple[Tensor, Tensor]:
        """Returns the direction of every canary, of length 1 in the norm of the clip: the
        coordinates int64 (m, w) that are not zero, and their values float64 (m, w).

        They are blocks of coordinates with random signs, the same in all steps, of one coordinate
        if the L1 norm is bounded or the squares of a row are released. More canaries than
        coordinates are random signs on all coordinates, or a random coordinate, anew in every step.
        """
        assert release.clip is not None
        count = len(self)
        size = release.dimension
        key = derive_key(self._seed, f"canaries/{release.name}/{0 if count <= size else step}")
        return canary_directions(
            count, size, release.clip.norm == "l1" or release.form == "diagonal", key
        )

    def sending(self, release: Release, members: Tensor) -> Tensor:
        """Returns the canaries, int64 (k,), among the positions ``members`` of all participants
        that add a row to a release: those that are in; under replace-one, and in a secure sum,
        all."""
        drawn = members[members >= self.first] - self.first
        if self.paired or release.shares is not None:
            return drawn
        return drawn[self.coins[drawn]]

    def row(self, release: Release, step: int, canary: int) -> Tensor:
        """Returns the row (1, D) float64 that a canary sends, longer than the clip norm. One that
        is out sends the negative row under replace-one, else zeros, which its share of the noise of
        a secure sum hides."""
        places, values = self.directions(release, step)
        sign = 1.0
        if not self.coins[canary]:
            sign = -1.0 if self.paired else 0.0
        row = torch.zeros(1, release.dimension, dtype=torch.float64)
        row[0, places[canary]] = LOUD * release.bound * sign * values[canary]
        return row

    def observe(self, release: Release, step: int, members: Tensor, rest: Tensor) -> None:
        """Takes in the evidence of a release.

        Args:
            release: with the clip norm and the noise of this step.
            step: its number.
            members: int64, the positions of all participants.
            rest: the released sum without the rows of all clients: noise and canaries.
        """
        part = torch.ones(len(self), dtype=torch.float64)
        rate = torch.tensor(1.0, dtype=torch.float64)
        if self.sampler.amplified:  # the attacker does not see the cohort
            rate = torch.tensor(self.sampler.probability, dtype=torch.float64)
        else:
            part = torch.zeros_like(part).index_fill(
                0, members[members >= self.first] - self.first, 1.0
            )
        places, values = self.directions(release, step)
        size = release.bound
        law = release.noise
        std = release.noise_std * release.denominator
        assert law is not None
        if release.form == "symmetric":
            rows = torch.zeros(len(self), release.dimension, dtype=torch.float64).scatter_(
                1, places, size * values
            )
            ratios = mixture_ratios(
                gaussian_ratios((rows @ rest * rows).sum(1), size**4, std), rate
            )
        else:
            if release.form == "vector":
                values = size * values
            else:
                values = torch.full_like(values, size**2)
            ratios = self._ratios(law, rest, places, values, std, rate)
        self.scores += part * ratios
        self.uses += part * rate

    def final_scores(self, release: Release, change: Tensor) -> Tensor:
        """Returns scores (m,) of an attacker that has nothing but the change of the shared model,
        (D,): its part in the direction of a canary."""
        places, values = self.directions(release, 0)
        return (change.double().cpu()[places] * values).sum(1)


class Planted(Channel):
    """A channel of a run in which canaries take part.

    Attributes:
        canaries: of the run; to be set before its first release.
    """

    canaries: Any

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            f"{_CANARIES}{name}": value for name, value in self.canaries.state().items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        own = {name: value for name, value in state.items() if name.startswith(_CANARIES)}
        self.canaries.restore({name.removeprefix(_CANARIES): value for name, value in own.items()})
        super().restore({name: value for name, value in state.items() if name not in own})


class CanaryRounds(Planted, RoundChannel):
    """Rounds that :class:`Canaries` take part in, behind the clients: they are drawn and charged
    with these, their rows are in the sums, and the attack gets every release."""

    canaries: Canaries

    def draw(self, step: int) -> Tensor:
        drawn = super().draw(step)
        return drawn[drawn < self.canaries.first]

    def begin(self, step: int, members: Tensor) -> None:
        everybody = super().draw(step)
        super().begin(
            step,
            torch.cat([members.cpu().reshape(-1), everybody[everybody >= self.canaries.first]]),
        )

    def _mechanism(self, release: Release) -> Mechanism:
        return _CanarySum(mechanism_of(release, self.source), self.canaries)

    def _count(self, adaptive: AdaptiveClip, release: Release) -> Mechanism:
        return _WithCanaries(super()._count(adaptive, release), self.canaries)


class _WithCanaries(MechanismAround[Inner]):
    """A mechanism that canaries add rows to.

    Args:
        mechanism: the mechanism under test.
        canaries: of the run.
    """

    def __init__(self, mechanism: Inner, canaries: Canaries) -> None:
        super().__init__(mechanism)
        self._canaries = canaries

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        sending = self._canaries.sending(self.release, receipt.clients)
        positions = sending + self._canaries.first
        added = list(self._added(receipt))
        if isinstance(rows, RowTotal):
            for position, row in zip(positions[:, None], added, strict=True):
                rows.add(position, row)
        else:
            assert isinstance(rows, Tensor)  # of a simulation
            rows = torch.cat([rows, *(row.to(rows) for row in added)])
        return self._mechanism(rows, torch.cat([clients.cpu(), positions]), receipt)

    def _added(self, receipt: Receipt) -> Iterator[Tensor]:
        """Yields the rows (1, D) of the canaries that add one in this round."""
        for canary in self._canaries.sending(self.release, receipt.clients).tolist():
            yield self._canaries.row(self.release, receipt.step, canary)


class _CanarySum(_WithCanaries[ClippedSum]):
    """The noised sum of the rows of clients and canaries, of which the attack gets the value."""

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        release = self.release
        # The attacker knows the rows of all clients. Before canaries are added to a sum of theirs,
        # it is theirs alone.
        rest = self._mechanism.total(rows, clients)
        value = super().__call__(rows, clients, receipt)
        if release.form == "symmetric":
            rest = smat(rest)
        noise = value * release.denominator - rest
        self._canaries.observe(release, receipt.step, receipt.clients, noise)
        return value
