"""The coins of canaries, and the likelihood ratios that an attacker computes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..privacy.noise.laws import NoiseLaw
from ..random import derive_key

LOUD = 8.0
"""A canary's row over the clip norm, so that a clip that fails shows."""


class Coins:
    """The coins and the directions of the canaries of both units.

    Args:
        count: m, their number.
        first: number of clients, and the position of the first canary that is a client.
        seed: of the coins and the directions.

    Attributes:
        coins: bool (m,), whether a canary is in; under replace-one, whether its row is the positive
            one.
        scores: float64 (m,), log likelihood ratios of in against out, from all releases so far.
        paired: True if the coin chooses between a row, or a gradient, and its negative.
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
        """Returns (m,), the log likelihood ratios of the two values of each coin, of contributions
        ``values`` (m, w) at ``places``; of canaries that take part with probability ``rate``, which
        the attacker does not see."""
        ratios = mixture_ratios(likelihood_ratios(law, rest, places, values, std), rate)
        if self.paired:
            return ratios - mixture_ratios(likelihood_ratios(law, rest, places, -values, std), rate)
        return ratios

    def state(self) -> dict[str, Tensor]:
        """Returns the state that a checkpoint must keep."""
        return {"scores": self.scores, "uses": self.uses}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continues from :meth:`state`."""
        self.scores = state["scores"].clone()
        self.uses = state["uses"].clone()


@lru_cache(16)  # releases of a step
def canary_directions(count: int, size: int, single: bool, key: int) -> tuple[Tensor, Tensor]:
    """Returns ``count`` directions as :meth:`.canaries.Canaries.directions` does; ``single``: of
    one coordinate each."""
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


def score_dependence(law: NoiseLaw | None, count: int, size: int) -> str | None:
    """Returns the reason why the scores of ``count`` canaries in ``size`` coordinates are not
    independent; None if they are."""
    if law is None or law.name == "l2_laplace":
        return "the noise of coordinates is dependent"
    if count > size:
        return f"{count:,} canaries share {size:,} coordinates"
    return None


def mixture_ratios(evidence: Tensor, rate: Tensor) -> Tensor:
    """Returns log likelihood ratios of canaries that take part with probability ``rate``, which the
    attacker does not see."""
    return torch.logaddexp(torch.log1p(-rate), torch.log(rate) + evidence)


def gaussian_ratios(part: Tensor, squared: Tensor | float, std: float) -> Tensor:
    return (part - squared / 2) / std**2


def likelihood_ratios(
    law: NoiseLaw, rest: Tensor, places: Tensor, values: Tensor, std: float
) -> Tensor:
    """Returns (m,), the log likelihood ratios of noise plus a canary's contribution against noise
    only, for sparse contributions (m, w)."""
    parts = rest[places]
    if law.name == "laplace":
        return (parts.abs() - (parts - values).abs()).sum(1) * (math.sqrt(2.0) / std)
    part = (parts * values).sum(1)
    squared = values.square().sum(1)
    if law.name == "gaussian":
        return gaussian_ratios(part, squared, std)
    length = rest.square().sum()  # the density of L2-Laplace noise is a function of it
    return (length.sqrt() - (length - 2 * part + squared).clamp(min=0).sqrt()) * (
        math.sqrt(rest.numel() + 1.0) / std
    )
