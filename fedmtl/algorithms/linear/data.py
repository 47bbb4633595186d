"""Linear models: the clients' rows, the losses of a linear predictor, and the public bounds on records.

A model is linear here when it has one output and its flat parameters are theta = [weights..., bias], so that its
prediction on a record is theta . x_j with x_j the record's features, with a last 1 where the model has a bias. The
gradient of a loss l(theta . x, y) is then a multiple s of the row, s = dl/d(theta . x): all that the release of a
client's gradients needs besides the rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..._check import Checked, Positive
from ...data.rows import take
from ...data.transforms import RowBound
from ...errors import ConfigError, DataError, ModelError
from ...local import Layout
from ...local.losses import LOSSES, cross_entropy, half_mse, mse
from ..base import Algorithm, Problem

if TYPE_CHECKING:
    from ...data import Domain, Examples, FederatedDataset

LossName = Literal["squared", "hinge", "logistic"]
SQUARES = {"squared": 2.0, "half_squared": 1.0}
"""The second derivatives of the squared losses by name."""
TWO_CLASS_LOSSES: tuple[LossName, ...] = ("hinge", "logistic")
Array = np.ndarray[Any, Any]
Built = TypeVar("Built")


@dataclass(frozen=True)
class LinearLoss(Checked):
    """A loss l(m, y) of the prediction m = theta . x; float64, and y in {-1, +1} except for ``"squared"``.

    Args:
        name: ``"squared"``: (m - y)^2; ``"half_squared"``: half of it; ``"hinge"``: max(0, 1 - y m), whose subgradient
            at the kink is 0; ``"logistic"``: log(1 + exp(-y m)).

    Raises:
        ConfigError: another name.
    """

    name: LossName | Literal["half_squared"]

    def scale(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return factors s with gradient s_j x_j of record j: theta (k, p), x (n, p), y (n,) -> (k, n); on the CPU."""
        return torch.from_numpy(self.factors(theta.numpy(), x.numpy(), y.numpy()))

    def factors(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Compute as :meth:`scale`, of arrays, y (n,) or (1, n); of small matrices numpy's products are faster than
        torch's."""
        margins = theta.dot(x.T)
        if self.name in SQUARES:
            margins -= y
            return margins + margins if self.name == "squared" else margins
        if self.name == "hinge":
            return np.where(margins * y < 1, -y, 0.0)
        return -y * torch.sigmoid(torch.from_numpy(margins * -y)).numpy()

    def value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every record: theta (k, p), x (n, p), y (n,) -> (k, n)."""
        margins = theta @ x.T
        if self.name in SQUARES:
            return SQUARES[self.name] / 2 * (margins - y).square()
        if self.name == "hinge":
            return torch.clamp(1 - margins * y, min=0)
        return F.softplus(-margins * y)

    def smoothness(self, x_l2: float) -> float:
        """Return the Lipschitz constant of the gradient in the L2 norm for rows ||x||_2 <= ``x_l2``; infinite for the
        hinge."""
        return {**SQUARES, "logistic": 0.25, "hinge": math.inf}[self.name] * x_l2**2

    def check_targets(self, y: tuple[Tensor, ...], name: str) -> None:
        """Raise DataError unless the targets suit the loss: -1 and +1 for hinge and logistic."""
        for client, targets in enumerate(() if self.name in SQUARES else y):
            wrong = targets[targets.abs() != 1]
            if len(wrong):
                raise DataError(
                    f"{name}: a target of client {client} is {float(wrong[0]):g}; loss {self.name!r} takes two "
                    f"classes: labels 0 and 1, or targets -1 and +1."
                )


def check_classes(data: FederatedDataset, name: str = "the method") -> None:
    """Raise DataError for more than two classes, which linear losses do not take; ``name`` is the algorithm's."""
    if data.classes not in (None, 2):
        raise DataError(
            f"{data.name} has {data.classes} classes, and {name} learns linear models of two classes or of "
            f"real targets, such as those of synthetic_tasks. With more, prior_layers and pmtl can be used."
        )


@dataclass(frozen=True, eq=False)
class LinearData:
    """The training records of all clients as rows of a linear model, in the clients' order of the data.

    Attributes:
        x: (n_i, p) float64 of each client, on the CPU, the last column ones where the model has a bias.
        y: (n_i,) float64 of each client; -1 and +1 where the data have two classes.
        bias: whether the last column is the bias.
        name: of the data, for messages.
    """

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    bias: bool
    name: str = "data"

    @property
    def counts(self) -> Tensor:
        """Return the number of records of each client, int64 (n,)."""
        return torch.tensor([len(y) for y in self.y])

    @cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return x (n_i, p) and y (1, n_i) of each client, as :meth:`LinearLoss.factors` computes fastest."""
        return [(x.numpy(), y.numpy()[None]) for x, y in zip(self.x, self.y, strict=True)]

    @property
    def dimension(self) -> int:
        """Return p."""
        return self.x[0].shape[1]

    @classmethod
    def of(cls, problem: Problem, examples: Examples | None = None) -> LinearData:
        """Return the training side of ``problem``, or other examples in the same coding, such as public ones.

        Raises:
            ModelError: the model is not theta . x with theta = [weights..., bias] and one output (a probe on random
                inputs and parameters; no data are read).
            DataError: more than two classes, or several targets a record.
        """
        return cls.of_data(problem.data, examples, bias=probe_linear(problem.module, problem.data.spec.shape))

    @classmethod
    def of_data(cls, data: FederatedDataset, examples: Examples | None = None, *, bias: bool = False) -> LinearData:
        """Return the same for a linear model with or without a bias, without a trainer."""
        check_classes(data)
        examples = data.train if examples is None else examples
        index, counts = torch.arange(len(examples)), examples.counts.tolist()
        rows, targets = data.transform(take(examples.x, index), torch.float64).cpu(), take(examples.y, index).cpu()
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

    def bounded(self, rows: RowBound | None, target: float) -> LinearData:
        """Return the records within public bounds, enforced record by record and never fitted.

        A record that is not finite, or whose norm is not, becomes zero features and target.

        Args:
            rows: to which the features are scaled down; the 1 of a bias stays. None leaves finite ones as they are.
            target: at which abs(y) is cut off; infinite for no bound.
        """
        x, y = self.pooled()
        width = self.dimension - int(self.bias)
        features = x[:, :width]
        norms = torch.linalg.vector_norm(features, dim=1) if rows is None else rows.norms(features)
        valid = torch.isfinite(norms) & torch.isfinite(y)
        features = torch.where(valid[:, None], features if rows is None else rows(features), 0.0)
        y, counts = torch.where(valid, y.clamp(-target, target), 0.0), self.counts.tolist()
        return replace(self, x=torch.cat([features, x[:, width:]], dim=1).split(counts), y=y.split(counts))

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Return all records, x (sum n_i, p) and y (sum n_i,)."""
        return torch.cat(self.x), torch.cat(self.y)


def probe_linear(module: nn.Module, shape: tuple[int, ...], outputs: int = 1) -> bool:
    """Return whether a linear model has a bias.

    Args:
        module: maps (N, *shape) to (N, outputs), or (N,) for one.
        shape: of one example.
        outputs: C; the parameters are the weights (C, features), then the biases (C,).

    Raises:
        ModelError: not linear in its parameters with the layout [weights..., bias], or other outputs.
    """
    features, layout = math.prod(shape), Layout.of(module)
    bias = layout.dimension == outputs * (features + 1)
    what = (
        f"a linear model of {features:,} features with {'one output' if outputs == 1 else f'{outputs} outputs'} and "
        f"parameters [weights..., bias], such as models.{'linear' if outputs == 1 else 'softmax'}_regression"
    )
    if layout.dimension not in (outputs * features, outputs * (features + 1)):
        raise ModelError(f"The model has {layout.dimension:,} parameters; needed: {what}.")
    wide = copy.deepcopy(module).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        theta = torch.randn(layout.dimension, generator=generator, dtype=torch.float64)
        x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            computed = functional_call(wide, layout.views(theta), (x,))
        expected = x.reshape(4, -1) @ theta[: outputs * features].reshape(outputs, features).T
        expected = expected + (theta[outputs * features :] if bias else 0.0)
        if computed.numel() != expected.numel() or not torch.allclose(
            computed.reshape(4, -1), expected, rtol=1e-9, atol=1e-9
        ):
            raise ModelError(f"The model is not theta . x in the order of its parameters; needed: {what}.")
    return bias


def check_linear(problem: Problem) -> bool:
    """Return whether the model, a linear one of a real target or of classes, has a bias.

    Raises:
        ModelError: another model or loss.
    """
    spec, loss = problem.data.spec, problem.loss
    if spec.targets or loss not in LOSSES.values() or (loss in (mse, half_mse)) != (spec.classes is None):
        raise ModelError("the loss is none of squared error of one number and of a linear model of classes.")
    return probe_linear(problem.module, spec.shape, spec.outputs if loss is cross_entropy else 1)


def records_of(problem: Problem, client: int) -> tuple[Array, Array]:
    """Return the training records of one client, float64 x (n, d) and y (n,), computed from these records only."""
    offsets = problem.data.train.offsets
    index = torch.arange(int(offsets[client]), int(offsets[client + 1]))
    x, y = problem.data.gather("train", index, dtype=torch.float64, device="cpu")
    return x.reshape(len(index), -1).numpy(), y.double().numpy()


def prepared(problem: Problem, key: Hashable, build: Callable[[], Built]) -> Built:
    """Return ``build()``, made once for a pair of data and model and held by :attr:`Problem.prepared`; build must be a
    function of these two and ``key`` only."""
    key = (problem.data, problem.module, key)
    if key not in problem.prepared:
        problem.prepared[key] = build()
    built: Built = problem.prepared[key]
    return built


LARGEST_TARGET = 2.0**40
"""Bound on the targets of the squared loss where no smaller one is stated: within it nothing overflows."""


@dataclass(frozen=True, kw_only=True)
class LinearAlgorithm(Algorithm):
    """A method for linear models whose records are within public bounds.

    Args:
        row_norm: bound on the norm of a record's features; ``"auto"``: the one that the data state; None: no bound.
        target: bound on abs(y) of the squared loss; ``"auto"`` and None likewise.

    Attributes:
        norm: of the features, ``"l2"`` or ``"l1"``.
        needs_row_bound: whether privacy needs a bound on rows, because the step sizes rest on one.
    """

    row_norm: Positive | Literal["auto"] | None = "auto"
    target: Positive | Literal["auto"] | None = "auto"

    on_host = True
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    needs_row_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in (None, "auto") and self.loss in TWO_CLASS_LOSSES:
            raise ConfigError(
                f"{type(self).__name__}.target is {self.target}, which bounds targets of the squared loss, and loss "
                f"is {self.loss!r}; leave it out."
            )

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse more than two classes."""
        check_classes(data, self.name)

    @property
    def linear_loss(self) -> LinearLoss:
        """Return the loss of a record."""
        return LinearLoss(self.loss)  # type: ignore[arg-type]

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Return these settings with the ``"auto"`` bounds filled in by those that the data state: numbers or None.

        Without privacy and without a stated bound, rows stay as they are.

        Raises:
            ConfigError: no bound on rows, with privacy.
        """
        rows, target = self.bounds(problem.data.domain)
        if rows is None and self.needs_row_bound and any(settings is not None for settings in privacy):
            stated = ", and the data state no public bounds on their records" if self.row_norm == "auto" else ""
            raise ConfigError(
                f"{type(self).__name__}.row_norm is {self.row_norm!r}{stated}; with privacy the step sizes rest on a "
                f"public bound on rows. Give a number, as algorithm.row_norm=1.0 (features of larger norm are scaled "
                f"down to it), or 'auto' and bounds that the data state: "
                f"dataclasses.replace(data, domain=Domain(l1=..., l2=..., target=...))."
            )
        return replace(
            self, row_norm=None if rows is None else rows.bound, target=target if target < math.inf else None
        )

    def bounds(self, domain: Domain | None) -> tuple[RowBound | None, float]:
        """Return the bound on features, None for none, and that on abs(y) of the squared loss, infinite for none.

        Args:
            domain: the bounds that the data state.
        """
        stated = (math.inf, math.inf) if domain is None else (getattr(domain, self.norm), domain.target)
        settings = (self.row_norm, None if self.loss in TWO_CLASS_LOSSES else self.target)
        rows, target = (
            bound if value == "auto" else math.inf if value is None else float(value)
            for value, bound in zip(settings, stated, strict=True)
        )
        return None if rows == math.inf else RowBound(rows, self.norm), target

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return the bound on features, which holds where the models are used too; None for none."""
        return self.bounds(problem.data.domain)[0]

    def data(self, problem: Problem) -> LinearData:
        """Return the training records within the bounds; made once for each pair of data and model.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """
        domain = problem.data.domain
        key = "records", self.linear_loss, self.bounds(domain)
        return prepared(problem, key, lambda: self.bounded(LinearData.of(problem), domain))

    def bounded(self, records: LinearData, domain: Domain | None = None) -> LinearData:
        """Return records within the bounds, of which ``"auto"`` are those of ``domain``.

        Raises:
            DataError: targets that do not suit the loss.
        """
        self.linear_loss.check_targets(records.y, records.name)
        rows, target = self.bounds(domain)
        return records.bounded(rows, min(target, LARGEST_TARGET))

    def largest_row(self, problem: Problem) -> float:
        """Return B, the bound on the L2 norm of a whole row, with the 1 of a bias. Without ``row_norm`` it is the
        largest norm of the training records, which is for runs without privacy."""
        bound, shape = self.row_bound(problem), problem.data.spec.shape
        bias = prepared(problem, "bias", lambda: int(probe_linear(problem.module, shape)))
        if bound is None:
            data = self.data(problem)
            features = data.pooled()[0][:, : data.dimension - bias]
            largest = max(float(features.norm(dim=1).max()), 1e-12)
        else:
            largest = bound.bound
        return math.sqrt(largest**2 + bias)
