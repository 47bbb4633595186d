"""Adaptive clip norms of a run: the state that :class:`QuantileClip` leaves from round to round.

A second release in every round counts the clients below the clip norm (Andrew, Thakkar, McMahan,
Ramaswamy, NeurIPS 2021, Algorithm 1). It shares the cohort of the first, and the calibration has
made room for it, see :func:`~fedmtl.privacy.quantile.split_multiplier`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from .clip import row_norms
from .mechanism import Message, check_rows
from .noise.grid import IndependentNoise, noised
from .noise.laws import GaussianNoise
from .noise.sources import NoiseSource
from .quantile import COUNT_BOUND, QuantileClip, count_rows, count_sensitivity
from .receipt import Receipt
from .release import Release


class AdaptiveClip:
    """The clip norms of a run, each of which follows a quantile from round to round.

    Args:
        settings: the rule by which they follow it.
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

    def follow(self, release: Release, fraction: Tensor) -> None:
        """Takes the released value of a :class:`CountBelowNorm`, from which the next clip norm
        follows."""
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


class CountBelowNorm:
    """Counts the rows within the clip norm, adds Gaussian noise and divides: the Gaussian mechanism
    on a count.

    It releases the fraction of clients that were not clipped, less 1/2. One client moves the count
    by :func:`~fedmtl.privacy.quantile.count_sensitivity`.

    Args:
        release: whose rows are counted, with the clip norm of this round.
        settings: of the noise on the count.
        source: of its random bits.

    Attributes:
        release: see above.
        name: of the count.
        on_grid: None: the report shows the values of sums alone.

    Example:
        >>> import torch
        >>> from fedmtl import FullParticipation, QuantileClip
        >>> from fedmtl.privacy import Clip, CountBelowNorm, Receipt, Release, SeededSource
        >>> everybody = FullParticipation().bind(4)
        >>> release = Release(name="update", dimension=1, sampling=everybody, clip=Clip(1.0))
        >>> count = CountBelowNorm(release, QuantileClip(1.0, count_noise=0.01), SeededSource(0))
        >>> clients = torch.arange(4)
        >>> rows = torch.tensor([[0.5], [0.9], [0.1], [3.0]])  # three of four are within the norm
        >>> share = 0.5 + float(count(rows, clients, Receipt(0, 0, clients)))
        >>> abs(share - 0.75) < 0.05
        True
    """

    def __init__(self, release: Release, settings: QuantileClip, source: NoiseSource) -> None:
        self.release = release
        self.name = f"{release.name}/count"
        self.on_grid = None
        self._settings = settings
        self._source = source

    def check(self, rows: Message, clients: Tensor) -> None:
        """Refuses rows that are not those of the release, and a sum, which has no norms to count.

        Args:
            rows: (k, D) of the clients.
            clients: int64 (k,).

        Raises:
            PrivacyError: as for :meth:`~fedmtl.privacy.mechanism.Mechanism.check`, or a sum.
        """
        if not isinstance(rows, Tensor):
            raise PrivacyError(
                f"Release {self.name!r} counts rows, and got a sum; hand the rows over."
            )
        check_rows(self.release, rows, clients)

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        """Releases the fraction less 1/2, see :class:`~fedmtl.privacy.mechanism.Mechanism`.

        Returns:
            float64 (1,).
        """
        self.check(rows, clients)
        receipt.spend(self.name, clients)
        return self.fraction(self.total(rows), receipt)

    def total(self, rows: Message) -> Tensor:
        """Returns the sum of :func:`count_rows`, which is private.

        Args:
            rows: (k, D) of the clients.

        Returns:
            float64 (1,).
        """
        assert isinstance(rows, Tensor)  # refused by check
        counted = count_rows(row_norms(rows, self.release.clip), self.release.bound)
        return counted.double().sum(0).cpu()

    def fraction(self, total: Tensor, receipt: Receipt) -> Tensor:
        """Adds the noise of a round to a sum of counts and divides by the public constant m.

        Args:
            total: float64 (1,), of :meth:`total`.
            receipt: of the round, spent on this count.

        Returns:
            float64 (1,), released.

        Raises:
            PrivacyError: the receipt has not been spent on this count.
        """
        step = receipt.charged_step(self.name)
        denominator = self.release.denominator
        sensitivity = count_sensitivity(self.release.relation)
        noise = IndependentNoise(
            GaussianNoise(self._settings.count_std(denominator) / sensitivity),
            self._source,
            f"noise/{self.name}",
            1,
            sensitivity=sensitivity,
            bound=sensitivity,
        )
        return noised(total, *noise.at(step)) / denominator
