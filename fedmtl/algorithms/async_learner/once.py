"""One central model from answers that do not wait for one another: a public start, and noised moments.

Neither is in the paper. An owner's answers are all to the same public question, so that one of them, made when the
owner wakes, can spend the whole budget, and the learner solves for the model instead of stepping towards it. It knows
the noise, and weighs every owner by what its answers say: those with few records or a small budget count less.

*Public start.* theta_0 minimizes f on the public rows. Owner i releases the mean of its records' clipped gradients at
theta_0, that is the residual statistics -2 sum_j x_j (y_j - x_j theta_0) / n_i for the squared loss: the release of
equation (4) at another point, whose sensitivity is 2 C / n_i for the same reason (one record is replaced, and the
gradient of either is within C). With c_0 the mean of the public rows' clipped gradients at theta_0, A the derivative of
that mean (rows that are clipped add nothing to it), S and S_c the covariances of a gradient before and after the clip
and H the second derivative of f, all of them of the public rows, and v_i the variance of the noise, the model is

    theta ~ N(theta_0, H^-1 S H^-1 / n_0),    Qbar_i ~ N(c_0 - A (theta - theta_0), S_c / n_i + v_i I),

and the learner takes the mean of theta given the answers. Without information from the owners it is theta_0; without
clip and noise, and with owners whose second moments are those of the public rows, it is the fit of all rows.

*Moments* (AdaSSP; Wang, "Revisiting differentially private linear regression", UAI 2018), without public rows: owner i
releases the mean of the clipped vectors (svec(x_j x_j'), x_j y_j), whose sensitivity is 2 C / n_i as well, in one
release. With G and b their weighted means, theta = (G + (reg + ridge) I)^-1 b, where the ridge is the edge of the
spectrum of the noise in G, less the smallest eigenvalue of G. Wang releases that eigenvalue apart; here it is that of
the noised G.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ...privacy import BoundedMeans, GradientMessage, RecordGradients, ScaledRows
from ...privacy.clip import Clip, clip_rows
from ...privacy.noise.symmetric import smat, svec
from ..linear.data import LinearData, LinearLoss
from .fitness import Fitness

if TYPE_CHECKING:
    from .algorithm import AsyncLearner

logger = logging.getLogger("fedmtl")
Array = np.ndarray
_LEAST = 1e-12  # of the largest eigenvalue: variances below it are rounding


def start(replicates: int, owners: int, theta: Tensor, size: int) -> dict[str, Tensor]:
    """Return the public state before any answer: theta_l (R, p), which is ``theta`` (p,); theta_0 (p,), likewise; and
    of each owner the sum of its answers (R, n, size), the sum of the variances of their noise and their number
    (R, n)."""
    shapes = {"sums": (replicates, owners, size), "variances": (replicates, owners), "answers": (replicates, owners)}
    empty = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {"theta_l": theta.repeat(replicates, 1), "theta_0": theta.clone(), **empty}


def hear(state: dict[str, Tensor], who: Array, answer: Array, std: Tensor) -> None:
    """Add the answers (R, size) of owners ``who`` (R,), -1 for nobody, whose noise has the deviations ``std`` (R,)."""
    some = torch.from_numpy(np.flatnonzero(who >= 0))
    at = some, torch.from_numpy(who)[some]
    state["sums"][at] += torch.from_numpy(answer)[some]
    state["variances"][at] += std[some] ** 2
    state["answers"][at] += 1


def means_of(state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return each owner's mean answer (R, n, size), the variance of its noise (R, n), and whether there is one."""
    number = state["answers"].clamp(min=1)
    return state["sums"] / number[:, :, None], state["variances"] / number**2, state["answers"] > 0


def message_at(theta: Tensor, data: LinearData, loss: LinearLoss, *, clipped: bool) -> GradientMessage:
    """Return the gradients of an owner's records at ``theta`` (p,), which the release clips, or their mean, where the
    domain bounds them."""
    point = theta.numpy()[None]

    def factors(client: int, which: Array, where: Array) -> Array:
        return np.repeat(loss.factors(point, *data.arrays[client]), len(where), 0)

    def means(client: int, which: Array, where: Array) -> Array:
        x, _ = data.arrays[client]
        mean: Array = factors(client, which, where) @ x / len(x)
        return mean

    return ScaledRows(factors) if clipped else BoundedMeans(means)


def public_fit(settings: AsyncLearner, public: LinearData) -> Tensor:
    """Return theta_0 (p,), the exact minimizer of f on the public rows."""
    return Fitness(*public.pooled(), LinearLoss(settings.loss), settings.reg, settings.theta_max).optimum.theta


@dataclass(frozen=True, eq=False)
class PublicPrior:
    """What public rows say of the model and of the owners' answers; every vector is in the eigenbasis of S_c.

    Attributes:
        theta: theta_0, (p,).
        basis: eigenvectors of S_c, (p, p).
        spread: its eigenvalues, (p,).
        centre: c_0, (p,).
        slope: A, (p, p), from a model to an answer.
        covariance: of the model, (p, p).
        theta_max: bound on ||theta||_inf.
    """

    theta: Tensor
    basis: Tensor
    spread: Tensor
    centre: Tensor
    slope: Tensor
    covariance: Tensor
    theta_max: float

    @classmethod
    def of(cls, settings: AsyncLearner, public: LinearData, clip: Clip | None) -> PublicPrior:
        """Compute them from the public rows and the public clip."""
        theta, loss = public_fit(settings, public), LinearLoss(settings.loss)
        x, y = public.pooled()
        n, p = x.shape
        factors = loss.scale(theta[None], x, y)[0]
        curvature = torch.full_like(factors, 2.0) if loss.name == "squared" else factors.abs() * (1 - factors.abs())
        gradients = factors[:, None] * x
        counted = gradients if clip is None else clip_rows(gradients, clip)
        whole = (counted * gradients).sum(1) >= (1 - 1e-5) * gradients.square().sum(1)
        logger.info(
            "%.0f%% of %d public rows are clipped at the public start", 100 * float((~whole).double().mean()), n
        )
        freedom = n / max(n - p, 1)
        curved = curvature[:, None] * x
        inverse = torch.linalg.inv(curved.T @ x / n + 2 * settings.reg * torch.eye(p, dtype=torch.float64))
        spread, basis = torch.linalg.eigh(freedom * torch.cov(counted.T, correction=0).reshape(p, p))
        wide = freedom * torch.cov(gradients.T, correction=0).reshape(p, p)
        slope = (curved * whole[:, None]).T @ x / n
        floor = max(_LEAST * float(spread[-1]), 1e-300)
        return cls(
            theta, basis, spread.clamp(min=floor), counted.mean(0) @ basis, basis.T @ slope,
            inverse @ wide @ inverse / n, settings.theta_max,
        )  # fmt: skip

    def solve(self, state: dict[str, Tensor], counts: Tensor) -> Tensor:
        """Return the posterior mean (R, p), of owners with ``counts`` (n,) records."""
        means, noise, heard = means_of(state)
        information = heard[:, :, None] / (self.spread / counts.clamp(min=1)[:, None] + noise[:, :, None])
        push = (information * (self.centre - means @ self.basis)).sum(1)
        toward = self.covariance @ self.slope.T
        system = torch.eye(len(self.theta), dtype=torch.float64) + (toward * information.sum(1)[:, None]) @ self.slope
        moved = torch.linalg.solve(system, push @ toward.T)
        return (self.theta + moved).clamp(-self.theta_max, self.theta_max)


def moments_size(dimension: int) -> int:
    """Return the length of (svec(x x'), x y) for rows of ``dimension`` numbers."""
    return dimension * (dimension + 1) // 2 + dimension


def moments_message(data: LinearData) -> GradientMessage:
    """Return the vectors (svec(x_j x_j'), x_j y_j) of an owner's records, which the release clips."""

    def moments(client: int, which: Array, where: Array) -> Tensor:
        x, y = data.x[client], data.y[client]
        rows = torch.cat([svec(x[:, :, None] * x[:, None, :]), x * y[:, None]], dim=1)
        return rows.expand(len(where), -1, -1)

    return RecordGradients(moments)


def moments_model(
    settings: AsyncLearner, state: dict[str, Tensor], counts: Tensor, dimension: int, clip: Clip | None
) -> Tensor:
    """Return (R, p): ridge regression on the owners' weighted moments, with a ridge that the noise asks for.

    An owner's weight is the inverse of the variance of its answer: of the noise, and at most C^2 / (size n_i) in a
    coordinate for its records being a sample.
    """
    means, noise, heard = means_of(state)
    size = means.shape[-1]
    sampling = (1.0 if clip is None else clip.bound) ** 2 / (size * counts.clamp(min=1))
    weights = heard / (sampling + noise)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    mean = (weights[:, :, None] * means).sum(1)
    matrix, vector = smat(mean[:, : size - dimension]), mean[:, size - dimension :]
    edge = ((weights**2 * noise).sum(1) * 2 * dimension).sqrt()  # diagonal entries have the noise of a coordinate
    ridge = (edge - torch.linalg.eigvalsh(matrix)[:, 0]).clamp(min=0) * (edge > 0)
    ridge = torch.where(heard.any(1), ridge + settings.reg, 1.0)
    system = matrix + ridge[:, None, None] * torch.eye(dimension, dtype=torch.float64)
    return torch.linalg.solve(system, vector).clamp(-settings.theta_max, settings.theta_max)


def check(settings: AsyncLearner) -> None:
    """Raise ConfigError for settings that have no meaning for a method whose owners are all asked the same."""
    where = f"AsyncLearner.method={settings.method!r}"
    unused: dict[str, Any] = {"groups": settings.groups, "frequencies": settings.frequencies}
    for name, value in unused.items():
        if value:
            raise ConfigError(f"{where} weighs owners by what they say; leave {name} out.")
    if settings.step_size != "auto":
        raise ConfigError(f"{where} solves for the model and takes no steps; leave step_size out.")
    if settings.batch_rate != 1:
        raise ConfigError(
            f"AsyncLearner.batch_rate must be 1, not {settings.batch_rate:g}: {where} asks every owner once, for an "
            f"answer from all of its records. AsyncLearner.method='steps' asks often, and takes random subsets of them."
        )
    if settings.method == "public_start" and settings.loss == "hinge":
        raise ConfigError(f"{where} needs a loss with a second derivative: 'squared' or 'logistic', not 'hinge'.")
    if settings.method == "moments" and settings.loss != "squared":
        raise ConfigError(f"{where} solves the squared loss, not {settings.loss!r}.")
    if settings.method == "moments" and settings.bound == "domain":
        raise ConfigError(f"{where} releases other vectors than gradients, which the release clips; use bound='clip'.")
