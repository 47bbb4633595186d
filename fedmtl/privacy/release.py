"""Releases, typed: the unit, the relation, the clip, the noise and the sampling.

Sensitivity is computed from these and never typed in, and the accounting event comes from the
sampler that draws the cohort, so the noise, the sampling and the accountant cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from .._check import one_of, positive_int
from ..errors import ConfigError, PrivacyError
from .clip import Clip, sum_width
from .noise.banded import Bands
from .noise.laws import NoiseLaw
from .noise.shares import DistributedGaussian
from .noise.symmetric import outer_sensitivity
from .samplers import SHIFTS, BoundSampler, Relation

if TYPE_CHECKING:
    from .row_noise import RowNoise

Form = Literal["vector", "symmetric", "diagonal"]


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """The plan of one release of an algorithm, before anything runs. It happens in every step.

    Args:
        name: key of the release, unique within an algorithm, such as ``"update"``.
        dimension: length d of the row that each client contributes.
        form: the released sum over the rows w_k: ``"vector"``, sum_k w_k, (d,); ``"symmetric"``,
            sum_k w_k w_k^T, (d, d); ``"diagonal"``, the diagonal of the latter, (d,).
        from_training: True if the rows depend on private data only through ``ClientBatch.train``
            or ``ClientBatch.gradient_sums``; under
            :class:`RecordPrivacy` they are then post-processing of noised gradients.
        trainings: calls of ``ClientBatch.train`` by one client in one step; under
            :class:`RecordPrivacy` each of them is charged, and no more are made.
        allocation: positive public weights of the steps, with mean 1: step t has the noise
            multiplier z / w_t, so a larger weight is a larger part of the budget and less noise.
            None: all equal.
        rows: noise that every client adds to its own row, against the server (see
            :mod:`.row_noise`), or None.
        without_data: True if clients without training examples send a row too, as those of an
            algorithm that ``accepts_empty_clients`` do. A client whose data are replaced by nothing
            then replaces its row by another.
        from_gradients: True if a client's row is a sum of gradients of its records, as
            ``ClientBatch.gradient_sums`` returns them, and nothing else; a secure sum of
            :class:`RecordPrivacy` takes such rows.
        model: number of the coordinates that move a model, if others do not, such as votes.
            The reported noise on a model counts only these; the noise is on all. None: all of
            them.

    Raises:
        ConfigError: an empty name or one that ends in ``/count`` or ``/rows``, a dimension or
            number of trainings below 1, or weights that are not positive and 1 on average.

    Example:
        >>> from fedmtl.privacy import ReleasePlan
        >>> ReleasePlan(name="covariance", dimension=4, form="symmetric").size
        10
    """

    name: str
    dimension: int
    form: Form = "vector"
    from_training: bool = False
    trainings: int = 1
    allocation: tuple[float, ...] | None = None
    rows: RowNoise | None = None
    without_data: bool = False
    from_gradients: bool = False
    model: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("ReleasePlan.name is empty; it must name the release.")
        # They name the count of adaptive clipping, and rows with noise of their own.
        if self.name.endswith(("/count", "/rows")):
            raise ConfigError(
                f"ReleasePlan.name is {self.name!r}; it must not end in '/count' or '/rows'."
            )
        positive_int(self, dimension=self.dimension, trainings=self.trainings)
        one_of(self, ("vector", "symmetric", "diagonal"), form=self.form)
        if self.allocation is not None:
            check_allocation(f"ReleasePlan {self.name!r}", self.allocation)

    def relation_of_rows(self, relation: Relation) -> Relation:
        """Returns the neighbouring relation of rows.

        Args:
            relation: of the clients. Under zero-out it is a replacement if clients without data
                send rows.
        """
        # The row of no data is still a row: a client then replaces one by another.
        if self.without_data and relation == "zero_out":
            return "replace"
        return relation

    def weight(self, use: int) -> float:
        """Returns w_t, the weight of a use in the budget; 1 without an allocation.

        Args:
            use: its number, from 0.
        """
        if self.allocation is None:
            return 1.0
        return self.allocation[use]

    @property
    def model_size(self) -> int:
        """Returns the number of noised coordinates that move a model."""
        if self.model is None:
            return self.size
        return self.model

    @property
    def size(self) -> int:
        """Returns the number of noised coordinates: d, or d (d + 1) / 2 of a symmetric matrix."""
        if self.form == "symmetric":
            return self.dimension * (self.dimension + 1) // 2
        return self.dimension


def check_allocation(owner: str, weights: Sequence[float]) -> None:
    """Raises ConfigError unless the weights are positive and have mean 1."""
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"{owner}: an allocation has positive finite weights; one is {min(weights):g}."
        )
    # A mean of 1 keeps z comparable with that of equal weights.
    mean = math.fsum(weights) / max(1, len(weights))
    if abs(mean - 1.0) > 1e-9:
        raise ConfigError(
            f"{owner}: the weights of an allocation have mean 1; these have "
            f"{mean:.9g}. Divide by it."
        )


@dataclass(frozen=True, kw_only=True)
class Release(ReleasePlan):
    """One release of a noised, clipped sum over a cohort of clients, divided by a public constant.

    Attributes:
        sampling: the law of the cohorts.
        unit: the protected unit. The row of a ``"client"`` is clipped here. If it is a
            ``"record"``, the row of a client is a sum of vectors of its records, each of which the
            client has clipped.
        clip: bound C on the vector of one unit; None without privacy, and for rows that are
            post-processing.
        noise: law of the noise, or None for clipping only.
        bands: the correlation of the noise over rounds, or None if it is independent.
        shares: the noise as shares that clients add in a secure sum; None if the server adds it.

    Example:
        >>> from fedmtl import FullParticipation
        >>> from fedmtl.privacy import Clip, GaussianNoise, Release
        >>> everybody = FullParticipation().bind(10)
        >>> update = {"name": "update", "dimension": 3, "sampling": everybody}
        >>> release = Release(**update, clip=Clip(2.0), noise=GaussianNoise(1.5))
        >>> release.sensitivity, round(release.noise_std, 6)  # 1.5 * 2 / 10
        (2.0, 0.3)
    """

    sampling: BoundSampler
    unit: Literal["client", "record"] = "client"
    clip: Clip | None = None
    noise: NoiseLaw | None = None
    bands: Bands | None = None
    shares: DistributedGaussian | None = None

    def __post_init__(self) -> None:
        # Without noise any norm may be clipped: nothing is claimed of the sum.
        if self.noise is None or self.clip is None:
            return
        if self.form == "vector" and self.noise.norm != self.clip.norm:
            raise PrivacyError(
                f"Release {self.name!r}: {type(self.noise).__name__} needs a bound on the "
                f"{self.noise.norm} norm, but the clip bounds the {self.clip.norm} norm."
            )
        if self.form != "vector" and self.clip.norm != "l2":
            raise PrivacyError(
                f"Release {self.name!r}: a {self.form} release needs an L2 clip of the rows."
            )
        if self.form == "symmetric" and self.noise.norm != "l2":
            raise PrivacyError(
                f"Release {self.name!r}: {type(self.noise).__name__} on a symmetric matrix is not "
                "supported; use GaussianNoise or L2LaplaceNoise, or release the diagonal."
            )

    @cached_property
    def row_clip(self) -> Clip | None:
        """Returns the bound on one client's row; None if it has none."""
        if self.unit == "record":
            return None
        return self.clip

    @cached_property
    def bound(self) -> float:
        """Returns C; infinite without a clip."""
        if self.clip is None:
            return math.inf
        return self.clip.bound

    @property
    def width(self) -> float | None:
        """Returns the width of the grid on which sums of clipped rows are exact; None without a
        clip."""
        if self.shares is not None:
            return self.shares.width
        if self.clip is None:
            return None
        return sum_width(self.clip.bound, self.sampling.n)

    @property
    def relation(self) -> Relation:
        """Returns the neighbouring relation of the rows, see
        :meth:`ReleasePlan.relation_of_rows`."""
        return self.relation_of_rows(self.sampling.relation)

    @property
    def sensitivity(self) -> float:
        """Returns S, the most the sum moves between neighbours, in the norm that the noise needs.

        A vector moves by C, and by 2 C for replace-one; a matrix w w^T, or its diagonal, by
        :func:`~fedmtl.privacy.noise.symmetric.outer_sensitivity`.
        """
        if self.form == "vector":
            return self.contribution_bound * SHIFTS[self.relation]
        # A Gaussian or an L2-Laplace law needs a bound on the Frobenius norm of a matrix's change.
        norm: Literal["l1", "l2"] = "l2"
        if self.form == "diagonal" and self.noise is not None:
            norm = self.noise.norm
        return outer_sensitivity(self.bound, self.relation, diagonal_norm=norm)

    @property
    def contribution_bound(self) -> float:
        """Returns the most that one unit contributes to the sum: C, or C^2 of an outer product."""
        if self.form == "vector":
            return self.bound
        return self.bound**2

    @property
    def drawn_sensitivity(self) -> float:
        """Returns the sensitivity at which the noise of a step is drawn: S, and S / c_0 if
        :mod:`.noise.banded` then correlates it over the rounds."""
        if self.bands is None:
            return self.sensitivity
        return self.sensitivity / self.bands.coefficients[0]

    @property
    def drawn_bound(self) -> float:
        """Returns the bound on one contribution that sets the grid of the noise of a step:
        :attr:`contribution_bound`, and 2 b times less if :mod:`.noise.banded` correlates it."""
        if self.bands is None:
            return self.contribution_bound
        return self.contribution_bound / (2 * len(self.bands))

    @property
    def denominator(self) -> float:
        """Returns m, the public constant that divides the sum."""
        return self.sampling.denominator

    @cached_property
    def noise_std(self) -> float:
        """Returns the root mean square of one noised coordinate of the released mean; 0 without
        noise. If the noise is correlated, its limit in the course of the rounds; if clients share
        it, that of a cohort in which nobody is missing."""
        if self.noise is None:
            return 0.0
        if self.shares is not None:
            return self.shares.std(self.shares.max_roster) / self.denominator
        std = self.noise.std(self.sensitivity, self.size) / self.denominator
        if self.bands is None:
            return std
        return self.bands.gain * std

    def weighted(self, use: int) -> Release:
        """Returns this release in one of its uses: the noise multiplier is divided by the weight.

        Args:
            use: its number, from 0.
        """
        if self.noise is None:
            return self
        return self.with_multiplier(self.noise.multiplier / self.weight(use))

    def with_multiplier(self, multiplier: float) -> Release:
        """Returns this release with another noise multiplier.

        Args:
            multiplier: z, at least 0; 0 for no noise.
        """
        if self.noise is None or self.noise.multiplier == multiplier:
            return self
        if multiplier == 0:
            return replace(self, noise=None)
        return replace(self, noise=replace(self.noise, multiplier=multiplier))

    def clipped_at(self, bound: float) -> Release:
        """Returns this release with another clip norm; without a clip it stays as it is.

        Args:
            bound: C, above 0.
        """
        if self.clip is None:
            return self
        return replace(self, clip=replace(self.clip, bound=bound))
