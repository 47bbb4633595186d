"""Broken versions of the release of a covariance, in configurations of MP-MTL, each of which the audit must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedmtl import Trainer, models
from fedmtl.algorithms import MPMTL, MPMTLayers
from fedmtl.algorithms.linear.stack import TaskStack
from fedmtl.data.synthetic.tasks import make_synthetic_tasks
from fedmtl.local import LocalSGD
from fedmtl.privacy import (
    Channel,
    ClientPrivacy,
    FullParticipation,
    L2LaplaceNoise,
    LaplaceNoise,
    Release,
    SeededSource,
    forms,
    opening,
    row_noise,
)
from fedmtl.privacy.account import Account
from fedmtl.privacy.noise import symmetric
from fedmtl.privacy.release import ReleasePlan

from .mutants import (
    CANARY,
    CHARGES,
    CHECKS,
    FRESH,
    GRID,
    INDEPENDENCE,
    NOISE,
    SENSITIVITY,
    TRANSCRIPT,
    Mutant,
    _accountant_halved,
    _in_two_rows,
    _plain_float_sum,
    audit,
)

_PRIVACY = ClientPrivacy(clip_norm=0.5, epsilon=8.0, delta=1e-4)
MATRIX_CONFIGURATIONS = {
    "symmetric": (MPMTL(row_norm=1.0, lam=0.1), _PRIVACY),
    "allocated": (MPMTL(row_norm=1.0, lam=0.1, alpha=1.0, momentum="nesterov"), _PRIVACY),
    "k-norm": (MPMTL(row_norm=1.0, lam=0.1, own_penalty="l1", alpha=1.0), replace(_PRIVACY, mechanism="l2_laplace")),
    "diagonal": (MPMTL(row_norm=1.0, lam=0.1, penalty="l21"), replace(_PRIVACY, mechanism="laplace")),
    "curator": (MPMTL(row_norm=1.0, lam=0.1, curator_epsilon=10.0), _PRIVACY),
    "curator, secure": (MPMTL(row_norm=1.0, lam=0.1, curator_epsilon=10.0), replace(_PRIVACY, source="secure")),
    "logistic": (MPMTL(row_norm=1.0, lam=0.1, loss="logistic"), _PRIVACY),
    "layers": (MPMTLayers(layers=("1.weight",), local=LocalSGD(lr=0.1)), _PRIVACY),
}
ALGORITHMS = ("mp_mtl",)
Apply = Callable[[pytest.MonkeyPatch, Trainer], None]


def matrix_trainer(configuration: str) -> Trainer:
    """12 tasks of 10 records in 8 dimensions, with a bias of their own; 10 rounds."""
    algorithm, privacy = MATRIX_CONFIGURATIONS[configuration]
    logistic = configuration == "logistic"
    problem: Any = "classification" if logistic else "regression"
    return Trainer(
        algorithm=algorithm,
        data=make_synthetic_tasks(12, train_examples=10, test_examples=3, features=8, problem=problem).data,
        model=models.linear_regression(),
        loss="binary_cross_entropy" if logistic else "half_mse",
        schedule=FullParticipation(),
        privacy=privacy,
        rounds=10,
        device="cpu",
        progress=False,
    )


def caught(algorithm: str, mutant: Mutant, checks: tuple[str, ...] = CHECKS) -> list[str]:
    """The checks that refute the mutant in its configuration of MP-MTL."""
    trainer = matrix_trainer(mutant.configuration)
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch, trainer)
        return [finding.check for finding in audit(trainer, checks=checks) if finding.refuted]


_normal, _smat, _clip, _weight = SeededSource.normal, symmetric.smat, forms.clip_rows, ReleasePlan.weight
_l2_laplace, _laplace = L2LaplaceNoise.draw, LaplaceNoise.draw


def _scaled(factor: float) -> Apply:
    def scaled(self: SeededSource, *address: Any) -> Any:
        return factor * _normal(self, *address)

    return lambda patch, trainer: patch.setattr(SeededSource, "normal", scaled)


def _law_scaled(kind: type, draw: Any, factor: float) -> Apply:
    return lambda patch, trainer: patch.setattr(kind, "draw", lambda self, *a: factor * draw(self, *a))


def _off_diagonal(factor: float) -> Apply:
    """Off-diagonal entries of what is released are multiplied, sum and noise alike."""

    def of(vector: torch.Tensor) -> torch.Tensor:
        matrix = _smat(vector) * factor
        matrix.diagonal(dim1=-2, dim2=-1).div_(factor)
        return matrix

    return lambda patch, trainer: patch.setattr(forms, "smat", of)


def _without_root(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Noise of the upper triangle without sqrt(2): each off-diagonal entry gets what a diagonal one does."""
    patch.setattr(symmetric, "_weights", lambda rows, columns, dtype: torch.ones(rows.shape, dtype=dtype))


def _doubled_root(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Off-diagonal coordinates times 2: a Frobenius sensitivity that is no longer K^2, and too little noise."""

    def weights(rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(rows == columns, 1.0, 2.0).to(dtype)

    patch.setattr(symmetric, "_weights", weights)


def _clip_with(make: Callable[..., torch.Tensor]) -> Apply:
    return lambda patch, trainer: patch.setattr(forms, "clip_rows", make)


def _clip_after_product(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Rows are clipped to C^2 in place of C: with C below 1 that is less than promised, with C above it is more."""
    patch.setattr(forms, "clip_rows", lambda rows, clip: _clip(rows, replace(clip, bound=clip.bound**0.5)))


def _allocation_ignored_in_noise(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(Release, "weighted", lambda self, weight: self)


def _allocation_ignored_in_charge(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def equal(plans: Any, step: Any, multiplier: float, uses: int | None = None) -> Any:
        return tuple(step(multiplier * plans[0].weight(0), 0) for _ in range(plans[0].uses))

    patch.setattr(opening, "uses_of", equal)


def _past_the_allocation(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Steps beyond the allocation are let through, with the noise of its last use."""
    patch.setattr(Account, "_room", lambda self, charged, wanted: wanted)
    patch.setattr(ReleasePlan, "weight", lambda self, use: _weight(self, min(use, self.uses - 1)))


def _shift_from_data(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The shift follows the private models and not the noise."""
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self: Any, problem: Any, state: Any, event: Any, channel: Any) -> Any:
        size = float(state.private.whole("model").abs().sum())
        state = step(self, problem, state, event, channel)
        state.public["covariance"] = state.public["covariance"] + 1e-3 * size
        return state

    patch.setattr(kind, "step", leaky)


def _step_size_from_data(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The threshold on eigenvalues is eta lam with eta from the private rows."""

    def of(self: MPMTL, problem: Any) -> float:
        return 1.0 / float(problem.data.train.x.double().square().sum(1).mean())

    patch.setattr(MPMTL, "_step_size", of)


# Noise on the rows that the curator gets

_row_draw = L2LaplaceNoise.draw_rows


def _rows_drawn(make: Callable[..., Any]) -> Apply:
    return lambda patch, trainer: patch.setattr(L2LaplaceNoise, "draw_rows", make)


def _rows_scaled(self: L2LaplaceNoise, *address: Any) -> Any:
    return 0.01 * _row_draw(self, *address)


def _one_row_noise(self: L2LaplaceNoise, source: Any, purpose: str, step: int, keys: torch.Tensor, size: int) -> Any:
    return _row_draw(self, source, purpose, step, keys[:1], size).repeat(len(keys), axis=0)


def _row_noise_reused(self: L2LaplaceNoise, source: Any, purpose: str, step: int, *rest: Any) -> Any:
    return _row_draw(self, source, purpose, 0, *rest)


def _rows_not_hidden(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(Channel, "_hidden", lambda self, name, rows, *of: rows)


def _rows_not_clipped(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(row_noise, "clip_rows", lambda rows, clip: rows)


def _rows_charged_once(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Noise on rows is calibrated to one use, and its epsilon is that of one."""
    calibrate, epsilon_at = row_noise.calibrate_multiplier, row_noise.BoundRowNoise.epsilon_at
    patch.setattr(row_noise, "calibrate_multiplier", lambda *a, uses, **options: calibrate(*a, uses=1, **options))
    patch.setattr(row_noise.BoundRowNoise, "epsilon_at", lambda self, uses: epsilon_at(self, min(uses, 1)))


def _tasks_mixed(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """After every iteration a task's model has a thousandth of that of the task before it."""
    kind = type(trainer.algorithm)
    step = kind.step

    def mixed(self: Any, *of: Any) -> Any:
        state = step(self, *of)
        models = state.private.whole("model")
        state.private.assign("model", torch.lerp(models, models.roll(1, 0), 1e-3))
        return state

    patch.setattr(kind, "step", mixed)


def _start_by_all_fits(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The ridge of every local fit follows the mean length of the fits of all tasks."""
    fit = TaskStack.fit

    def together(self: TaskStack, ridge: float) -> torch.Tensor:
        return fit(self, ridge * float(fit(self, ridge).norm(dim=1).mean()))

    patch.setattr(TaskStack, "fit", together)


NO_OP = [Mutant(f"no-op: {name}", lambda patch, trainer: None, (), name) for name in MATRIX_CONFIGURATIONS]
MUTANTS = [
    Mutant("noise halved", _scaled(0.5), (*NOISE, *CANARY), "symmetric"),
    Mutant("noise x 0.9", _scaled(0.9), NOISE, "allocated"),
    Mutant("off-diagonals without sqrt 2", _without_root, (*NOISE, *SENSITIVITY), "symmetric"),
    Mutant("off-diagonals with 2 for sqrt 2", _doubled_root, (*NOISE, *SENSITIVITY), "symmetric"),
    Mutant("off-diagonals of the release halved", _off_diagonal(0.5), NOISE, "symmetric"),
    Mutant("noise of the upper triangle alone", _off_diagonal(2**-0.5), NOISE, "k-norm"),
    Mutant("clip skipped", _clip_with(lambda rows, clip: _clip(rows, None)), SENSITIVITY, "symmetric"),
    Mutant("clip skipped, diagonal", _clip_with(lambda rows, clip: _clip(rows, None)), SENSITIVITY, "diagonal"),
    Mutant("clip of the square root", _clip_after_product, SENSITIVITY, "symmetric"),
    Mutant("K-norm noise x 0.9", _law_scaled(L2LaplaceNoise, _l2_laplace, 0.9), NOISE, "k-norm"),
    Mutant("diagonal Laplace noise halved", _law_scaled(LaplaceNoise, _laplace, 0.5), NOISE, "diagonal"),
    Mutant("allocation ignored in the noise", _allocation_ignored_in_noise, (*NOISE, *CHARGES), "allocated"),
    Mutant("allocation ignored in the noise, K-norm", _allocation_ignored_in_noise, (*NOISE, *CHARGES), "k-norm"),
    Mutant("allocation ignored in the charge", _allocation_ignored_in_charge, (*NOISE, *CHARGES), "allocated"),
    Mutant("one use past the allocation", _past_the_allocation, CHARGES, "allocated"),
    Mutant("shift from the models", _shift_from_data, TRANSCRIPT, "symmetric"),
    Mutant("step size from the rows", _step_size_from_data, TRANSCRIPT, "symmetric"),
    Mutant("clip skipped, layers", _clip_with(lambda rows, clip: _clip(rows, None)), SENSITIVITY, "layers"),
    Mutant("shift from the models, layers", _shift_from_data, TRANSCRIPT, "layers"),
    Mutant("shift from the models, curator", _shift_from_data, TRANSCRIPT, "curator"),
    Mutant("row noise x 0.01", _rows_drawn(_rows_scaled), NOISE, "curator"),
    Mutant("no noise on rows", _rows_not_hidden, NOISE, "curator"),
    Mutant("one row noise for all clients", _rows_drawn(_one_row_noise), FRESH, "curator"),
    Mutant("row noise reused", _rows_drawn(_row_noise_reused), FRESH, "curator"),
    Mutant("rows not clipped before their noise", _rows_not_clipped, SENSITIVITY, "curator"),
    Mutant("rows charged for one use", _rows_charged_once, CHARGES, "curator"),
    Mutant("accountant halved, K-norm", _accountant_halved, CHARGES, "k-norm"),
    Mutant("accountant halved, allocated", _accountant_halved, CHARGES, "allocated"),
    Mutant("plain float sum in secure mode", _plain_float_sum, GRID, "curator, secure"),
    Mutant("personal models of two clients mixed", _tasks_mixed, INDEPENDENCE, "symmetric"),
    Mutant("personal models of two clients mixed, layers", _tasks_mixed, INDEPENDENCE, "layers"),
    Mutant("a client's update in two rows", _in_two_rows, INDEPENDENCE, "k-norm"),
    Mutant("start by the fits of all tasks", _start_by_all_fits, INDEPENDENCE, "logistic"),
]
