"""Linear models: the owners' rows, the losses of a linear predictor, and what the domain bounds.

A model is linear here when it has one output and its flat parameters are theta = [weights..., bias], so that its
prediction on a record is theta . x_j with x_j the record's features, with a last 1 where the model has a bias. The
gradient of a loss l(theta . x, y) is then a multiple s of the row, s = dl/d(theta . x): all that the release of an
owner's gradients needs besides the rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..._check import one_of, positive
from ...data.rows import take
from ...data.transforms import RowBound
from ...errors import ConfigError, DataError, ModelError
from ...stacked import Layout

if TYPE_CHECKING:
    from ...data import Examples, FederatedDataset
    from ..base import Problem

LossName = Literal["squared", "hinge", "logistic"]
LOSS_NAMES: tuple[LossName, ...] = ("squared", "hinge", "logistic")
TWO_CLASS_LOSSES: tuple[LossName, ...] = ("hinge", "logistic")
Built = TypeVar("Built")


@dataclass(frozen=True)
class LinearLoss:
    """A loss l(m, y) of the prediction m = theta . x; float64, and y in {-1, +1} except for ``"squared"``.

    Args:
        name: ``"squared"``: (m - y)^2, without 1/2; ``"hinge"``: max(0, 1 - y m), whose subgradient at the kink is 0;
            ``"logistic"``: log(1 + exp(-y m)).

    Raises:
        ConfigError: another name.
    """

    name: LossName

    def __post_init__(self) -> None:
        one_of(self, LOSS_NAMES, name=self.name)

    def scale(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Factors s with gradient s_j x_j of record j: theta (k, p), x (n, p), y (n,) -> (k, n); on the CPU."""
        margins = theta.numpy().dot(x.numpy().T)  # of small matrices numpy's products are faster than torch's
        if self.name == "squared":
            margins -= y.numpy()
            margins *= 2.0
            return torch.from_numpy(margins)
        if self.name == "hinge":
            return torch.from_numpy(np.where(margins * y.numpy() < 1, -y.numpy(), 0.0))
        margins *= -y.numpy()
        return torch.sigmoid_(torch.from_numpy(margins)).mul_(-y)

    def value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Loss of every record: theta (k, p), x (n, p), y (n,) -> (k, n)."""
        margins = theta @ x.T
        if self.name == "squared":
            return (margins - y).square()
        if self.name == "hinge":
            return torch.clamp(1 - margins * y, min=0)
        return F.softplus(-margins * y)

    def slope_bound(self, margin: float, y: float = 1.0) -> float:
        """The largest abs(dl/dm) where abs(m) <= ``margin`` and abs(target) <= ``y``.

        Squared: 2 (margin + y); logistic: 1 / (1 + exp(-margin)); hinge: 1.
        """
        if self.name == "squared":
            return 2 * (margin + y)
        return 1.0 if self.name == "hinge" else 1 / (1 + math.exp(-margin))

    def smoothness(self, x_l2: float) -> float:
        """Lipschitz constant of the gradient in the L2 norm for rows ||x||_2 <= ``x_l2``; infinite for the hinge."""
        curvature = {"squared": 2.0, "logistic": 0.25, "hinge": math.inf}[self.name]
        return curvature * x_l2**2

    def check_targets(self, y: tuple[Tensor, ...], name: str) -> None:
        """Raise DataError unless the targets suit the loss: -1 and +1 for hinge and logistic."""
        if self.name != "squared" and not bool((torch.cat(y).abs() == 1).all()):
            for client, own in enumerate(y):
                if not bool((own.abs() == 1).all()):
                    wrong = float(own[own.abs() != 1][0])
                    raise DataError(
                        f"{name}: a target of client {client} is {wrong:g}; loss {self.name!r} takes two classes: "
                        f"labels 0 and 1, or targets -1 and +1."
                    )


@dataclass(frozen=True)
class DomainBound:
    """What is known of every record of the domain, and enforced: rows are scaled down, targets cut off.

    Args:
        x_l1: bound on ||x||_1 of a whole row, with its 1 for the bias, above 0 (above 1 with a bias).
        y: bound on abs(y), above 0; 1 for two classes.
    """

    x_l1: float
    y: float = 1.0

    def __post_init__(self) -> None:
        positive(self, x_l1=self.x_l1, y=self.y)

    def rows(self, bias: bool) -> RowBound:
        """The bound on a record's features, without the 1 of a bias.

        Raises:
            ConfigError: no room for features beside the 1 of the bias.
        """
        room = self.x_l1 - 1.0 if bias else self.x_l1
        if room <= 0:
            raise ConfigError(f"DomainBound.x_l1 is {self.x_l1:g}; with a bias it must be above 1, the bias's own row.")
        return RowBound(room, "l1")

    def xi(self, loss: LinearLoss, theta_max: float) -> float:
        """Xi >= sup ||grad l||_1 over the domain and ||theta||_inf <= theta_max (Farokhi et al., Assumption 2).

        abs(theta . x) <= theta_max ||x||_1, so with X = ``x_l1`` and Y = ``y``: squared 2 (theta_max X + Y) X, hinge
        X, logistic X / (1 + exp(-theta_max X)). It bounds the L2 norm as well.
        """
        positive("DomainBound.xi", theta_max=theta_max)
        return loss.slope_bound(theta_max * self.x_l1, self.y) * self.x_l1


@dataclass(frozen=True, eq=False)
class LinearData:
    """The training records of all owners as rows of a linear model, in the owners' order of the data.

    Attributes:
        x: (n_i, p) float64 of each owner, on the CPU, the last column ones where the model has a bias.
        y: (n_i,) float64 of each owner; -1 and +1 where the data have two classes.
        bias: whether the last column is the bias.
        name: of the data, for messages.
    """

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    bias: bool
    name: str = "data"

    @property
    def counts(self) -> Tensor:
        """int64 (n,), records of each owner."""
        return torch.tensor([len(y) for y in self.y])

    @property
    def dimension(self) -> int:
        """p."""
        return self.x[0].shape[1]

    @classmethod
    def of(cls, problem: Problem) -> LinearData:
        """The training side of ``problem``; made once for each pair of data and model.

        Raises:
            ModelError: the model is not theta . x with theta = [weights..., bias] and one output (a probe on random
                inputs and parameters; no data are read).
            DataError: more than two classes, or several targets a record.
        """
        return prepared(problem, "rows", lambda: cls._read(problem))

    @classmethod
    def _read(cls, problem: Problem) -> LinearData:
        return cls.of_data(problem.data, bias=probe_linear(problem.module, problem.data.spec.shape))

    @classmethod
    def of_data(cls, data: FederatedDataset, *, bias: bool = False) -> LinearData:
        """The training side of ``data`` for a linear model with or without a bias, without a trainer; as :meth:`of`."""
        index = torch.arange(len(data.train))
        rows, targets = data.gather("train", index, dtype=torch.float64, device="cpu")
        return cls._of_rows(data, bias, rows, targets, data.train.counts.tolist())

    @classmethod
    def of_examples(cls, problem: Problem, examples: Examples) -> LinearData:
        """Other examples in the same coding as the data of ``problem``, such as public ones; as :meth:`of`."""
        index = torch.arange(len(examples))
        rows = problem.data.transform(take(examples.x, index), torch.float64).cpu()
        bias = probe_linear(problem.module, problem.data.spec.shape)
        return cls._of_rows(problem.data, bias, rows, take(examples.y, index).cpu(), examples.counts.tolist())

    @classmethod
    def _of_rows(
        cls, data: FederatedDataset, bias: bool, rows: Tensor, targets: Tensor, counts: list[int]
    ) -> LinearData:
        if data.classes not in (None, 2):
            raise DataError(f"{data.name}: {data.classes} classes; linear losses take 2, or real targets.")
        if targets.numel() != len(targets):
            raise DataError(
                f"{data.name}: targets have shape {tuple(targets.shape[1:])}; one number a record is needed."
            )
        rows, targets = rows.reshape(len(targets), -1), targets.reshape(-1).double()
        if data.classes == 2:
            targets = 2 * targets - 1
        if bias:
            rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        return cls(tuple(rows.split(counts)), tuple(targets.split(counts)), bias, data.name)

    def bounded(self, domain: DomainBound) -> LinearData:
        """The records forced into ``domain``: features scaled down so that ||x||_1 <= x_l1 with the 1 of the bias
        untouched, targets cut off at abs(y) <= y; a record that is not finite becomes zero features and target.

        Raises:
            ConfigError: no room for features beside the 1 of the bias.
        """
        bound, width = domain.rows(self.bias), self.dimension - int(self.bias)
        xs, ys = [], []
        for x, y in zip(self.x, self.y, strict=True):
            features = x[:, :width]
            valid = torch.isfinite(bound.norms(features)) & torch.isfinite(y)
            features = torch.where(valid[:, None], bound(features), 0.0)
            xs.append(torch.cat([features, x[:, width:]], dim=1))
            ys.append(torch.where(valid, y, 0.0).clamp(-domain.y, domain.y))
        return LinearData(tuple(xs), tuple(ys), self.bias, self.name)

    def pooled(self) -> tuple[Tensor, Tensor]:
        """All records, x (sum n_i, p) and y (sum n_i,)."""
        return torch.cat(self.x), torch.cat(self.y)


def solve_regularized(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix^-1 right for positive definite systems; zero for one that rounding has made singular, so that no records
    make it fail.

    Args:
        matrix: (..., p, p).
        right: (..., p) or (..., p, k), as in ``torch.linalg.solve``.
    """
    found, info = torch.linalg.solve_ex(matrix, right)
    dims = tuple(range(info.dim(), found.dim()))
    solved = (info == 0) & torch.isfinite(found).all(dims) if dims else info == 0
    return torch.where(solved.reshape(*info.shape, *[1] * len(dims)), found, 0.0)


def probe_linear(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a linear model has a bias.

    Args:
        module: maps (N, *shape) to (N,) or (N, 1).
        shape: of one example.

    Raises:
        ModelError: not linear in its parameters with the layout [weights..., bias], or not one output.
    """
    features, layout = math.prod(shape), Layout.of(module)
    bias = layout.dimension == features + 1
    what = (
        f"a linear model of {features} features with one output and parameters [weights..., bias], "
        f"such as models.linear_regression"
    )
    if layout.dimension not in (features, features + 1):
        raise ModelError(f"The model has {layout.dimension} parameters; needed: {what}.")
    wide = copy.deepcopy(module).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        theta = torch.randn(layout.dimension, generator=generator, dtype=torch.float64)
        x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            outputs = functional_call(wide, layout.views(theta), (x,))
        expected = x.reshape(4, -1) @ theta[:features] + (theta[features] if bias else 0.0)
        if outputs.numel() != 4 or not torch.allclose(outputs.reshape(4), expected, rtol=1e-9, atol=1e-9):
            raise ModelError(f"The model is not theta . x in the order of its parameters; needed: {what}.")
    return bias


_PREPARED: WeakKeyDictionary[FederatedDataset, WeakKeyDictionary[nn.Module, dict[Hashable, Any]]] = WeakKeyDictionary()


def prepared(problem: Problem, key: Hashable, build: Callable[[], Built]) -> Built:
    """``build()``, made once for a pair of data and model and kept as long as both live; build must be a function of
    these two and ``key`` alone."""
    entries = _PREPARED.setdefault(problem.data, WeakKeyDictionary()).setdefault(problem.module, {})
    if key not in entries:
        entries[key] = build()
    built: Built = entries[key]
    return built
