"""Adaptive clip norms of a run: the state that :class:`QuantileClip` leaves from round to round.

A second release in every round counts the clients below the clip norm (Andrew, Thakkar, McMahan,
Ramaswamy, NeurIPS 2021, Algorithm 1). It shares the cohort of the first, and the calibration has
made room for it, see :func:`~fedmtl.privacy.quantile.split_multiplier`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from .clip import row_norms
from .noise.grid import noised, release_noise
from .noise.laws import GaussianNoise
from .noise.sources import NoiseSource
from .quantile import COUNT_BOUND, QuantileClip, count_rows, count_sensitivity
from .release import Release


class AdaptiveClip:
    """The clip norms of a run, each of which follows a quantile from round to round.

    Args:
        settings: how they follow it.
        names: of the releases.
    """

    def __init__(self, settings: QuantileClip, names: Iterable[str]) -> None:
        self.settings = settings
        self._norms = dict.fromkeys(names, settings.initial)
        # The norms of the round that has begun stay until the next one begins: a release is
        # described by the norm at which it was clipped.
        self._next = dict(self._norms)

    def advance(self) -> Mapping[str, float]:
        """Begins a round; returns the clip norm of each of its releases."""
        self._norms = dict(self._next)
        return self._norms

    def count(self, rows: Tensor, release: Release) -> Tensor:
        """Returns the sum of :func:`count_rows` over rows (k, D), (1,) float64; it is private."""
        counted = count_rows(row_norms(rows, release.clip), release.bound)
        return counted.double().sum(0).cpu()

    def fraction(self, total: Tensor, release: Release, source: NoiseSource, step: int) -> Tensor:
        """Releases the fraction of clients that were not clipped, minus 1/2.

        Args:
            total: (1,) of :meth:`count`, over the cohort.
            release: whose rows were counted.
            source: of the noise.
            step: number of the round.

        Returns:
            (1,) float64.
        """
        std = self.settings.count_std(release.denominator)
        bound = count_sensitivity(release.relation)
        noise = release_noise(
            GaussianNoise(std / bound),
            source,
            f"noise/{release.name}/count",
            step,
            1,
            sensitivity=bound,
            bound=bound,
        )
        return noised(total, *noise) / release.denominator

    def follow(self, release: Release, fraction: Tensor) -> None:
        """Takes a released :meth:`fraction`, from which the next clip norm follows."""
        self._next[release.name] = self.settings.updated_norm(
            release.bound, float(fraction) + COUNT_BOUND
        )

    def state(self) -> dict[str, Tensor]:
        """Returns the clip norms of the last round and of the next one, float64 (2,) for each
        release."""
        return {
            name: torch.tensor((norm, self._next[name]), dtype=torch.float64)
            for name, norm in self._norms.items()
        }

    def restore(self, norms: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Takes the clip norms of :meth:`state`, and nothing else; returns those of the last round.

        Raises:
            ConfigError: names of other releases, or values that are no norms.
        """
        others = set(norms) - set(self._norms)
        if others:
            raise ConfigError(
                f"clip norms of {', '.join(sorted(others))}; accepted: {', '.join(self._norms)}."
            )
        for name, pair in norms.items():
            if pair.shape != (2,) or not bool((torch.isfinite(pair) & (pair > 0)).all()):
                raise ConfigError(
                    f"the clip norms of {name} are {pair.tolist()}; accepted: two numbers above 0."
                )
            self._norms[name], self._next[name] = pair.tolist()
        return self._norms
