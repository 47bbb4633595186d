"""Linear models: the clients' rows, the losses of a linear predictor, and records within bounds.

A model is linear here if it has one output and the flat parameters theta = [weights..., bias]. Its
prediction on a record is theta . x_j, with x_j the record's features and a last 1 for a bias. The
gradient of a loss l(theta . x, y) is then a multiple s of the row, s = dl/d(theta . x): the release
of a client's gradients needs these factors and the rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..._check import Checked
from ...data.rows import take
from ...data.transforms import RowBound
from ...errors import DataError, ModelError
from ...local import Layout
from ...local.losses import LOSSES, cross_entropy, half_mse, is_of_numbers, mse, name_of
from ..base import Problem

if TYPE_CHECKING:
    from ...data import Examples, FederatedDataset

LossName = Literal["squared", "hinge", "logistic"]
SQUARES = {"squared": 2.0, "half_squared": 1.0}
"""The second derivatives of the squared losses by name."""
_CURVATURES = {**SQUARES, "logistic": 0.25, "hinge": math.inf}
TWO_CLASS_LOSSES: tuple[LossName, ...] = ("hinge", "logistic")
Array = np.ndarray[Any, Any]
Built = TypeVar("Built")


@dataclass(frozen=True)
class LinearLoss(Checked):
    """A loss l(m, y) of the prediction m = theta . x, in float64.

    The targets y are -1 and +1 except for the squared losses.

    Args:
        name: ``"squared"``: (m - y)^2; ``"half_squared"``: half of it; ``"hinge"``: max(0, 1 - y
            m), whose subgradient at the kink is 0; ``"logistic"``: log(1 + exp(-y m)).

    Raises:
        ConfigError: another name.
    """

    name: LossName | Literal["half_squared"]

    def factors_of(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Returns the factors s of the gradients s_j x_j of the records j, on the CPU.

        Args:
            theta: (k, p), models.
            x: (n, p).
            y: (n,).

        Returns:
            (k, n).
        """
        return torch.from_numpy(self.factors(theta.numpy(), x.numpy(), y.numpy()))

    def factors(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Computes :meth:`factors_of` of arrays, with y (n,) or (1, n)."""
        # products of small matrices are faster in NumPy than in torch
        margins = theta.dot(x.T)
        if self.name in SQUARES:
            margins -= y
            if self.name == "squared":
                return margins + margins
            return margins
        if self.name == "hinge":
            return np.where(margins * y < 1, -y, 0.0)
        opposite = -y
        margins *= opposite
        # in place, as the tensor has the memory of the array
        torch.from_numpy(margins).sigmoid_()
        margins *= opposite
        return margins

    def value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of every record: theta (k, p), x (n, p), y (n,) -> (k, n)."""
        margins = theta @ x.T  # the predictions m
        if self.name in SQUARES:
            return SQUARES[self.name] / 2 * (margins - y).square()
        if self.name == "hinge":
            return torch.clamp(1 - margins * y, min=0)
        return F.softplus(-margins * y)

    def smoothness(self, x_l2: float) -> float:
        """Returns the Lipschitz constant of the gradient in the L2 norm; infinite for the hinge.

        Args:
            x_l2: bound on ||x||_2 of the rows.
        """
        return _CURVATURES[self.name] * x_l2**2

    def check_targets(self, y: tuple[Tensor, ...], name: str) -> None:
        """Raises DataError unless the targets suit the loss: -1 and +1 for hinge and logistic."""
        if self.name in SQUARES:
            return
        for client, targets in enumerate(y):
            wrong = targets[targets.abs() != 1]
            if len(wrong):
                raise DataError(
                    f"{name}: a target of client {client} is {float(wrong[0]):g}; loss "
                    f"{self.name!r} takes two classes: labels 0 and 1, or targets -1 and +1."
                )


@cache
def loss_of(name: LossName | Literal["half_squared"]) -> LinearLoss:
    """Returns the loss of a name, made once: its check takes as long as the factors of a client."""
    return LinearLoss(name)


def check_classes(data: FederatedDataset, name: str = "the method") -> None:
    """Refuses data of more than two classes, which linear losses do not take.

    Args:
        data: the clients' data.
        name: of the algorithm, for the message.

    Raises:
        DataError: there are more than two classes.
    """
    if data.classes not in (None, 2):
        raise DataError(
            f"{data.name} has {data.classes} classes, and {name} learns linear models of two "
            "classes or of real targets, such as those of synthetic_tasks. With more, prior_layers "
            "and pmtl can be used."
        )


@dataclass(frozen=True, eq=False)
class LinearData:
    """The training records of all clients as rows of a linear model.

    Attributes:
        x: (n_i, p) float64 of each client, in the order of the data, on the CPU; the last column is
            ones if the model has a bias.
        y: (n_i,) float64 of each client; -1 and +1 for data of two classes.
        bias: True if the last column is the bias.
        name: of the data, for messages.
    """

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    bias: bool
    name: str = "data"

    @property
    def counts(self) -> Tensor:
        """Returns the number of records of each client, int64 (n,)."""
        return torch.tensor([len(y) for y in self.y])

    @cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns x (n_i, p) and y (1, n_i) of each client, for :meth:`LinearLoss.factors`."""
        pairs = zip(self.x, self.y, strict=True)
        return [(x.numpy(), y.numpy()[None]) for x, y in pairs]

    @property
    def dimension(self) -> int:
        """Returns p."""
        return self.x[0].shape[1]

    @classmethod
    def of(cls, problem: Problem, examples: Examples | None = None) -> LinearData:
        """Returns the training records of ``problem``, or other examples in the same coding.

        Raises:
            ModelError: the model is not theta . x with theta = [weights..., bias] and one output (a
                probe on random inputs and parameters; no data are read).
            DataError: more than two classes, or several targets a record.
        """
        bias = probe_linear(problem.module, problem.data.spec.shape)
        return cls.of_data(problem.data, examples, bias=bias)

    @classmethod
    def of_data(
        cls, data: FederatedDataset, examples: Examples | None = None, *, bias: bool = False
    ) -> LinearData:
        """Returns the same for a linear model with or without a bias, without a trainer."""
        check_classes(data)
        if examples is None:
            examples = data.train
        index = torch.arange(len(examples))
        counts = examples.counts.tolist()
        rows = data.transform(take(examples.x, index), torch.float64).cpu()
        targets = take(examples.y, index).cpu()
        if targets.numel() != len(targets):
            shape = tuple(targets.shape[1:])
            needed = "one number a record is needed"
            raise DataError(f"{data.name}: targets have shape {shape}; {needed}.")
        rows = rows.reshape(len(targets), -1)
        targets = targets.reshape(-1).double()
        # labels 0 and 1 become the targets -1 and +1 of the losses of two classes
        if data.classes == 2:
            targets = 2 * targets - 1
        if bias:
            rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        return cls(tuple(rows.split(counts)), tuple(targets.split(counts)), bias, data.name)

    def bounded(self, rows: RowBound | None, target: float) -> LinearData:
        """Returns the records within public bounds, enforced record by record and never fitted.

        A record becomes zero features and target if it, or its norm, is not finite.

        Args:
            rows: the bound to which the features are scaled down; the 1 of a bias stays. None keeps
                finite features.
            target: the bound at which abs(y) is cut off; infinite for none.
        """
        x, y = self.pooled()
        width = self.dimension - int(self.bias)
        features = x[:, :width]
        if rows is None:
            norms = torch.linalg.vector_norm(features, dim=1)
            scaled = features
        else:
            norms = rows.norms(features)
            scaled = rows(features)
        # features that are finite can have a norm that is not
        valid = torch.isfinite(norms) & torch.isfinite(y)
        scaled = torch.where(valid[:, None], scaled, 0.0)
        targets = torch.where(valid, y.clamp(-target, target), 0.0)
        x = torch.cat([scaled, x[:, width:]], dim=1)
        counts = self.counts.tolist()
        return replace(self, x=x.split(counts), y=targets.split(counts))

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Returns all records, x (sum n_i, p) and y (sum n_i,)."""
        return torch.cat(self.x), torch.cat(self.y)


def probe_linear(module: nn.Module, shape: tuple[int, ...], outputs: int = 1) -> bool:
    """Checks that a model is linear; returns True if it has a bias.

    The probe compares it with theta . x at random inputs and parameters; no data are read.

    Args:
        module: maps (N, *shape) to (N, outputs), or (N,) for one.
        shape: of one example.
        outputs: C; the parameters are the weights (C, features), then the biases (C,).

    Raises:
        ModelError: not linear in its parameters with the layout [weights..., bias], or other
            outputs.
    """
    features = math.prod(shape)
    weights = outputs * features
    layout = Layout.of(module)
    bias = layout.dimension == weights + outputs
    kind = "one output"
    example = "models.linear_regression"
    if outputs > 1:
        kind = f"{outputs} outputs"
        example = "models.softmax_regression"
    parameters = f"parameters [weights..., bias], such as {example}"
    needed = f"a linear model of {features:,} features with {kind} and {parameters}"
    if not bias and layout.dimension != weights:
        raise ModelError(f"The model has {layout.dimension:,} parameters; needed: {needed}.")
    # a copy in float64, so that rounding does not hide a difference
    wide = copy.deepcopy(module).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        theta = torch.randn(layout.dimension, generator=generator, dtype=torch.float64)
        x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            computed = functional_call(wide, layout.views(theta), (x,))
        expected = x.reshape(4, -1) @ theta[:weights].reshape(outputs, features).T
        if bias:
            expected = expected + theta[weights:]
        same = computed.numel() == expected.numel()
        if same:
            same = torch.allclose(computed.reshape(4, -1), expected, rtol=1e-9, atol=1e-9)
        if not same:
            order = "The model is not theta . x in the order of its parameters"
            raise ModelError(f"{order}; needed: {needed}.")
    return bias


def is_linear(module: nn.Module, data: FederatedDataset) -> bool:
    """Returns True if a module is a linear model that the proximal point method takes.

    Args:
        module: of the caller.
        data: for the shape of an example and the number of outputs; two classes may have one.
    """
    accepted = {1}
    if data.classes is not None:
        accepted = {data.spec.outputs}
    if data.classes == 2:
        accepted.add(1)
    for count in accepted:
        try:
            probe_linear(module, data.spec.shape, count)
        except (ModelError, RuntimeError, TypeError):  # also of inputs that only a network takes
            continue
        return True
    return False


def check_linear(problem: Problem) -> bool:
    """Checks for a linear model of a real target or of classes; returns True if it has a bias.

    The losses of a real target are squared errors and those of Huber, of a quantile and of counts.

    Args:
        problem: its model, loss and shape of an example are read.

    Raises:
        ModelError: another model or loss.
    """
    spec = problem.data.spec
    loss = problem.loss
    of_number = loss in (mse, half_mse) or is_of_numbers(loss)
    known = (of_number or loss in LOSSES.values()) and not spec.targets
    if not known or of_number != (spec.classes is None):
        accepted = "the losses of one real target and of a linear model of classes"
        raise ModelError(f"the loss is {name_of(loss)!r}, and none of {accepted}.")
    outputs = 1
    if loss is cross_entropy:
        outputs = spec.outputs
    return probe_linear(problem.module, spec.shape, outputs)


def records_of(problem: Problem, client: int) -> tuple[Array, Array]:
    """Returns the training records of one client, float64 x (n, d) and y (n,).

    They are computed from these records only.

    Args:
        problem: of the run.
        client: its position in the data.
    """
    # the records of all clients stand one after another, those of client i from offsets[i] on
    offsets = problem.data.train.offsets
    index = torch.arange(int(offsets[client]), int(offsets[client + 1]))
    x, y = problem.data.gather("train", index, dtype=torch.float64, device="cpu")
    return x.reshape(len(index), -1).numpy(), y.double().numpy()


def prepared(problem: Problem, key: Hashable, build: Callable[[], Built]) -> Built:
    """Returns ``build()``, made once for a pair of data and model.

    :attr:`Problem.prepared` holds it. ``build`` must be a function of these two and ``key`` alone.
    """
    key = (problem.data, problem.module, key)
    if key not in problem.prepared:
        problem.prepared[key] = build()
    built: Built = problem.prepared[key]
    return built
