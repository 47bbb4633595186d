"""Canaries: clients, or records of clients, that an audit adds to a run, each in or out by a fair
coin, and an attack.

A canary is drawn by the sampler like every client, charged like every client, and where it takes
part its row is clipped, added up and noised with all others. The run does not know the coins, which
have a stream of their own. The attacker has every release, and knows what the worst-case adversary
of differential privacy knows: the rows of all other clients, whose sum it subtracts. Where nothing
is amplified it knows who takes part, too. What is left is noise and canaries, and the score of a
canary is the logarithm of the likelihood ratio of in against out, the best test by Neyman and
Pearson where canaries do not overlap (and a little less where a sampled round has several releases,
each of which is scored by itself).

Under replace-one the coin chooses between a row and its negative. An epsilon against this attack is
a lower bound on that of the run as it was made, so of its clip, sum, noise, sampling and charges
together.

Where the unit is one record, canaries are records of clients that have the same price. Their
gradients are in every local step of DP-SGD, and in every activation of a client that acts one at a
time, what the rows of canary clients are in a round.

The channels of runs with canaries are subclasses of those of all other runs, which know nothing of
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from ..privacy.activations import Activations, Window
from ..privacy.adaptive import AdaptiveClip
from ..privacy.channel import Channel
from ..privacy.clip import RowTotal
from ..privacy.gradients import GradientPlan
from ..privacy.local_steps import LocalSteps
from ..privacy.noise.laws import NoiseLaw
from ..privacy.noise.symmetric import smat
from ..privacy.release import Release
from ..privacy.rounds import Message, Rounds
from ..privacy.samplers import BoundSampler
from ..random import derive_key

_CANARIES = "canaries."
_LOUD = 8.0
"""A canary's row over the clip norm, so that a clip that fails shows."""


class _Coins:
    """What canaries of both units have.

    Args:
        count: m, how many.
        first: number of clients, and the position of the first canary that is a client.
        seed: of the coins and the directions.

    Attributes:
        coins: bool (m,), whether a canary is in; under replace-one, whether its row is the positive
            one.
        scores: float64 (m,), log likelihood ratios of in against out, from all releases so far.
        paired: whether the coin chooses between a row, or a gradient, and its negative.
        uses: float64 (m,), releases in which each took part; of sampled ones the expected number.
    """

    def __init__(self, count: int, first: int, seed: int) -> None:
        self.first = first
        self._seed = seed
        generator = torch.Generator().manual_seed(derive_key(seed, "canaries/coins") >> 1)
        self.coins = torch.rand(count, generator=generator) < 0.5
        self.scores = torch.zeros(count, dtype=torch.float64)
        self.uses = torch.zeros(count, dtype=torch.float64)

    paired: bool

    def __len__(self) -> int:
        return len(self.coins)

    def _ratios(
        self, law: NoiseLaw, rest: Tensor, places: Tensor, values: Tensor, std: float, rate: Tensor
    ) -> Tensor:
        """Return (m,), the log likelihood ratios of the two values of each coin, of contributions
        ``values`` (m, w) at ``places``; of canaries that take part with probability ``rate``, which
        the attacker does not see."""
        ratios = _mixture(_evidence(law, rest, places, values, std), rate)
        if self.paired:
            return ratios - _mixture(_evidence(law, rest, places, -values, std), rate)
        return ratios

    def state(self) -> dict[str, Tensor]:
        """Returns the state that a checkpoint must keep."""
        return {"scores": self.scores, "uses": self.uses}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        self.scores = state["scores"].clone()
        self.uses = state["uses"].clone()


class Canaries(_Coins):
    """The canaries of one run in rounds whose unit is a client.

    Args:
        count: m, how many.
        first: number of clients, and the position of the first canary behind them.
        sampler: who takes part, of clients and canaries together.
        seed: of the coins and the directions.
    """

    def __init__(self, count: int, first: int, sampler: BoundSampler, seed: int) -> None:
        super().__init__(count, first, seed)
        self.sampler = sampler
        self.paired = sampler.relation == "replace"

    def check(self, releases: Mapping[str, Release]) -> None:
        """Refuse releases that the attack does not cover.

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
        """Return why the score of a canary depends on the coins of others; None if it does not.

        Args:
            releases: of the run.
            adaptive: whether the clip norm follows the rows.
        """
        if adaptive:
            return "the clip norm follows the rows of canaries"
        each = (
            _dependence(release.noise, len(self), release.dimension)
            for release in releases.values()
        )
        return next(filter(None, each), None)

    def directions(self, release: Release, step: int) -> tuple[Tensor, Tensor]:
        """Return the direction of every canary, of length 1 in the norm of the clip: the
        coordinates int64 (m, w) that are not zero, and their values float64 (m, w).

        They are blocks of coordinates with random signs, the same in all steps, of one coordinate
        where the L1 norm is bounded or the squares of a row are released. Of more canaries than
        coordinates they are random signs on all coordinates, or a random coordinate, anew in every
        step.
        """
        assert release.clip is not None
        count = len(self)
        size = release.dimension
        key = derive_key(self._seed, f"canaries/{release.name}/{0 if count <= size else step}")
        return _directions(
            count, size, release.clip.norm == "l1" or release.form == "diagonal", key
        )

    def sending(self, members: Tensor) -> Tensor:
        """Return the canaries, int64 (k,), among the positions ``members`` of all who take part
        that add a row to a release: those that are in; under replace-one all."""
        drawn = members[members >= self.first] - self.first
        if self.paired:
            return drawn
        return drawn[self.coins[drawn]]

    def row(self, release: Release, step: int, canary: int) -> Tensor:
        """Return the row (1, D) float64 that a canary sends, longer than the clip norm."""
        places, values = self.directions(release, step)
        sign = 1.0
        if self.paired and not self.coins[canary]:
            sign = -1.0
        row = torch.zeros(1, release.dimension, dtype=torch.float64)
        row[0, places[canary]] = _LOUD * release.bound * sign * values[canary]
        return row

    def observe(self, release: Release, step: int, members: Tensor, rest: Tensor) -> None:
        """Take in the evidence of a release.

        Args:
            release: with the clip norm and the noise of this step.
            step: its number.
            members: int64, the positions of all who take part.
            rest: the released sum without the rows of all clients: noise and canaries.
        """
        part = torch.ones(len(self), dtype=torch.float64)
        rate = torch.tensor(1.0, dtype=torch.float64)
        if self.sampler.amplified:  # who is drawn is not seen
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
            ratios = _mixture(_gaussian((rows @ rest * rows).sum(1), size**4, std), rate)
        else:
            if release.form == "vector":
                values = size * values
            else:
                values = torch.full_like(values, size**2)
            ratios = self._ratios(law, rest, places, values, std, rate)
        self.scores += part * ratios
        self.uses += part * rate

    def final_scores(self, release: Release, change: Tensor) -> Tensor:
        """Return scores (m,) of an attacker who has nothing but the change of the shared model,
        (D,): its part in the direction of a canary."""
        places, values = self.directions(release, 0)
        return (change.double().cpu()[places] * values).sum(1)


class RecordCanaries(_Coins):
    """The canaries of one run of DP-SGD in rounds, or of clients that act one at a time, each a
    record of a client.

    Args:
        plan: of the gradients, with the canaries among the numbers of records, behind each client's
            own.
        own: int64 (n,), the clients' numbers of records without canaries.
        law: of the noise, at a multiplier of 1.
        bound: C, on the gradient of a record.
        seed: of the coins and the directions.

    Attributes:
        clients: int64 (g,), those that have canaries.
        own_records: how many records each of them has beside; None where they differ.
        each: how many canaries each of them has; canary i is one of client ``clients[i // each]``.
    """

    def __init__(
        self, plan: GradientPlan, own: Tensor, law: NoiseLaw, bound: float, seed: int
    ) -> None:
        added = torch.from_numpy(plan.counts) - own
        self.clients = added.nonzero()[:, 0]
        self.each = int(added.max())
        super().__init__(len(self.clients) * self.each, len(own), seed)
        numbers = own[self.clients].unique().tolist()
        self.own_records = None
        if len(numbers) == 1:
            self.own_records = numbers[0]
        self._own = own
        self._law = law
        self._bound = bound
        self._rates = torch.from_numpy(plan.rates)
        self._unit = law.std(1.0, plan.dimension)
        self.paired = plan.relation == "replace"
        key = derive_key(seed, "canaries/gradient")
        self._places, self._values = _directions(self.each, plan.dimension, law.norm == "l1", key)
        self._dimension = plan.dimension
        self._group = torch.full_like(own, -1)
        self._group[self.clients] = torch.arange(len(self.clients))
        self._drawn: dict[int, Tensor] = {}

    def dependence(self) -> str | None:
        """Return why the score of a canary depends on the coins of others of its client; None if it
        does not."""
        return _dependence(self._law, self.each, self._dimension)

    def without(self, clients: Tensor, positions: Tensor, drawn: Tensor) -> Tensor:
        """Return which drawn positions (A, B) of ``clients`` are records of their own, and note the
        canaries."""
        planted = drawn & (positions >= self._own[clients][:, None])
        for row in planted.any(1).nonzero()[:, 0].tolist():
            client = int(clients[row])
            self._drawn[client] = positions[row, planted[row]] - self._own[client]
        return drawn & ~planted

    def draw(self, client: int, drawn: np.ndarray | None) -> None:
        """Note which canaries of a client take part: those ``drawn``, bool (n_i,), behind its own
        records; None for all."""
        if int(self._group[client]) >= 0:
            if drawn is None:
                part = np.ones(self.each)
            else:
                part = drawn[int(self._own[client]) :]
            self._drawn[client] = torch.from_numpy(np.flatnonzero(part))

    def gradients(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients (N, D) of the canaries that were drawn, longer than the clip norm,
        and the places of their clients in ``clients``, int64 (N,). A canary that is out has the
        negative one under replace-one, else a gradient of zero."""
        rows = [torch.zeros(0, self._dimension, dtype=torch.float64)]
        owners = []
        for place, client in enumerate(clients.tolist()):
            drawn = self._drawn.pop(client, self.clients[:0])
            coins = self.coins[self._group[client] * self.each + drawn]
            signs = torch.where(coins, 1.0, -1.0 if self.paired else 0.0)[:, None]
            row = torch.zeros(len(drawn), self._dimension, dtype=torch.float64)
            rows.append(
                row.scatter_(
                    1, self._places[drawn], _LOUD * self._bound * signs * self._values[drawn]
                )
            )
            owners += [place] * len(drawn)
        return torch.cat(rows), torch.tensor(owners, dtype=torch.int64)

    def observe(self, clients: Tensor, rest: Tensor, scale: Tensor) -> None:
        """Take in the evidence of one local step, or activation.

        Args:
            clients: int64 (A,).
            rest: (A, D), the released sums without the gradients of the clients' own records: noise
                and canaries.
            scale: float64 (A,), of the noise.
        """
        for client, noise, std in zip(
            clients.tolist(), rest.cpu(), (self._unit * scale).tolist(), strict=True
        ):
            group = int(self._group[client])
            if group < 0:
                continue
            part = slice(group * self.each, (group + 1) * self.each)
            values = self._bound * self._values
            self.scores[part] += self._ratios(
                self._law, noise, self._places, values, std, self._rates[client]
            )
            self.uses[part] += 1


class _Planted(Channel):
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


class CanaryRounds(_Planted, Rounds):
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

    def _value(self, release: Release, rows: Message, clients: Tensor, step: int) -> Tensor:
        cohort = self._begun(release.name).clients
        rest = self._sum(release, rows, clients)
        positions = self.canaries.sending(cohort) + self.canaries.first
        if isinstance(rows, RowTotal):
            for position, row in zip(positions[:, None], self._added(release, step), strict=True):
                rows.add(position, row)
        else:
            rows = torch.cat([rows, *(row.to(rows) for row in self._added(release, step))])
        value = super()._value(release, rows, torch.cat([clients.cpu(), positions]), step)
        if release.form == "symmetric":
            rest = smat(rest)
        self.canaries.observe(release, step, cohort, value * self.denominator - rest)
        return value

    def _adapt(self, adaptive: AdaptiveClip, release: Release, rows: Tensor, step: int) -> None:
        rows = torch.cat([rows, *(row.to(rows) for row in self._added(release, step))])
        super()._adapt(adaptive, release, rows, step)

    def _added(self, release: Release, step: int) -> Iterator[Tensor]:
        """Yield the rows (1, D) of the canaries that add one in this round."""
        cohort = self._begun(release.name).clients
        for canary in self.canaries.sending(cohort).tolist():
            yield self.canaries.row(release, step, canary)


class RecordCanaryRounds(_Planted, Rounds):
    """Rounds of DP-SGD in which :class:`RecordCanaries` are in the local steps of their clients."""

    canaries: RecordCanaries

    def _local_steps(self, step: int, clients: Tensor) -> LocalSteps:
        return _CanarySteps(self, step, clients)


class _CanarySteps(LocalSteps):
    _channel: RecordCanaryRounds

    def batch(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        positions, drawn = super().batch(clients)
        return positions, self._channel.canaries.without(clients, positions, drawn)

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        canaries = self._channel.canaries
        rows, owners = (part.to(total.device) for part in canaries.gradients(clients))
        value = super()._noised(
            total + self._records.of_chunks([(rows, owners)], clients), clients, steps
        )
        expected = torch.from_numpy(self.plan.expected)[clients].to(total.device)
        canaries.observe(clients, value * expected[:, None] - total, self._scale(clients))
        return value


class CanaryActivations(_Planted, Activations):
    """Activations in which :class:`RecordCanaries` are among the records of their clients, in the
    only replicate."""

    canaries: RecordCanaries

    def _noised(self, total: np.ndarray, start: int, window: Window) -> np.ndarray:
        clients = torch.from_numpy(window.clients[start])
        client = int(window.clients[start, 0])
        if client < 0:
            return super()._noised(total, start, window)
        drawn = self.records.drawn(client, window.uses[start], np.arange(1))
        self.canaries.draw(client, None if drawn is None else drawn[0])
        added = self.records.of_chunks([self.canaries.gradients(clients)], clients)
        value = super()._noised(total + added.numpy(), start, window)
        rest = value * window.divisors[start] - total
        self.canaries.observe(
            clients, torch.from_numpy(rest), torch.from_numpy(window.scales[start])
        )
        return value


@lru_cache(16)  # releases of a step
def _directions(count: int, size: int, single: bool, key: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` directions as :meth:`Canaries.directions` does; ``single``: of one
    coordinate each."""
    generator = torch.Generator().manual_seed(key >> 1)
    if single or count <= size:
        width = 1
        if not single:
            width = size // count
        order = torch.cat(
            [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
        )
        places = order[: count * width].view(count, width)
    else:
        places = torch.arange(size).expand(count, size)
    signs = torch.randint(0, 2, places.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return places, signs / math.sqrt(places.shape[1])


def _dependence(law: NoiseLaw | None, count: int, size: int) -> str | None:
    """Return why the scores of ``count`` canaries in ``size`` coordinates are not independent; None
    if they are."""
    if law is None or law.name == "l2_laplace":
        return "the noise of coordinates is dependent"
    if count > size:
        return f"{count:,} canaries share {size:,} coordinates"
    return None


def _mixture(evidence: Tensor, rate: Tensor) -> Tensor:
    """Return log likelihood ratios of canaries that take part with probability ``rate``, which the
    attacker does not see."""
    return torch.logaddexp(torch.log1p(-rate), torch.log(rate) + evidence)


def _gaussian(part: Tensor, squared: Tensor | float, std: float) -> Tensor:
    return (part - squared / 2) / std**2


def _evidence(law: NoiseLaw, rest: Tensor, places: Tensor, values: Tensor, std: float) -> Tensor:
    """Return (m,), the log likelihood ratios of noise plus a canary's contribution against noise
    only, for sparse contributions (m, w)."""
    parts = rest[places]
    if law.name == "laplace":
        return (parts.abs() - (parts - values).abs()).sum(1) * (math.sqrt(2.0) / std)
    part = (parts * values).sum(1)
    squared = values.square().sum(1)
    if law.name == "gaussian":
        return _gaussian(part, squared, std)
    length = rest.square().sum()  # the density of L2-Laplace noise is a function of it
    return (length.sqrt() - (length - 2 * part + squared).clamp(min=0).sqrt()) * (
        math.sqrt(rest.numel() + 1.0) / std
    )
