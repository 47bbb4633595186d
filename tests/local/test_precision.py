"""The pull of a prior's precision matrix against dense matrices and slow loops."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl.errors import ConfigError
from fedmtl.local import LocalSGD
from fedmtl.local.optimizers import rows_of
from fedmtl.local.precision import Part, Precision, PrecisionBlock
from tests.local.test_optimizers import along

K, D, FIRST, SHAPE = 3, 20, 2, (3, 4)


def precision(columns: bool, strength: float = 0.7, directions: int = 2) -> Precision:
    """Of three clients: a matrix 3 by 4 from place 2 on among 20 numbers."""
    generator = torch.Generator().manual_seed(4)
    p = SHAPE[1] if columns else SHAPE[0]
    basis = torch.linalg.qr(torch.randn(p, p, generator=generator, dtype=torch.float64)).Q[
        :, :directions
    ]
    along = torch.rand(K, directions, generator=generator, dtype=torch.float64)
    across = 2 + torch.rand(K, generator=generator, dtype=torch.float64)
    return Precision(
        strength, (PrecisionBlock(Part("w", FIRST, SHAPE, columns), basis, along, across),)
    )


def dense(found: Precision, client: int) -> np.ndarray:
    """P of a client, entry by entry."""
    matrix = found.strength * np.eye(D)
    (block,) = found.blocks
    v, along, across = (
        block.directions.numpy(),
        block.along[client].numpy(),
        float(block.across[client]),
    )
    side = across * np.eye(len(v))
    for direction, strength in zip(v.T, along, strict=True):
        side += (strength - across) * np.outer(direction, direction)
    both = (
        np.kron(np.eye(SHAPE[0]), side) if block.part.columns else np.kron(side, np.eye(SHAPE[1]))
    )
    size = SHAPE[0] * SHAPE[1]
    matrix[FIRST : FIRST + size, FIRST : FIRST + size] = both
    return matrix


def rows(seed: int = 0) -> Tensor:
    return torch.randn(K, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("directions", [0, 2])
def test_products_and_resolvents_are_those_of_the_dense_matrix(
    columns: bool, directions: int
) -> None:
    found, x = precision(columns, directions=directions), rows()
    for k in range(K):
        p = dense(found, k)
        np.testing.assert_allclose(found.times(x)[k], p @ x[k].numpy(), atol=1e-13)
        np.testing.assert_allclose(
            found.resolvent(x, 0.3)[k], np.linalg.solve(np.eye(D) + 0.3 * p, x[k]), atol=1e-13
        )
    some = torch.tensor([2, 0])
    torch.testing.assert_close(
        rows_of(found, some).times(x[some]), found.times(x)[some], rtol=0, atol=0
    )


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_steps_are_those_of_a_slow_loop(proximal: bool, momentum: float) -> None:
    found, start, anchor, lr = precision(True), rows(1), rows(2), 0.2
    solver = LocalSGD(lr=lr, proximal=proximal, momentum=momentum)
    w = start.clone()
    optimizer = solver.optimizer(w, round=0, lam=found, anchor=anchor)
    slow, velocity = [one.numpy().copy() for one in start], np.zeros((K, D))
    for step in range(4):
        gradient = rows(10 + step)
        active = 2 if step == 3 else 3
        optimizer.step(active, along(gradient))
        for k in range(active):
            p, g, away = dense(found, k), gradient[k].numpy(), anchor[k].numpy()
            velocity[k] = momentum * velocity[k] + (g if proximal else g + p @ (slow[k] - away))
            slow[k] = slow[k] - lr * velocity[k]
            if proximal:
                slow[k] = away + np.linalg.solve(np.eye(D) + lr * p, slow[k] - away)
    np.testing.assert_allclose(w.numpy(), np.stack(slow), atol=1e-12)


@pytest.mark.parametrize("lam", [0.3, precision(True)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_pull_needs_an_anchor(momentum: float, lam: Any) -> None:
    """A pull to nothing would be one to zero."""
    with pytest.raises(ConfigError, match="needs an anchor"):
        LocalSGD(lr=0.2, momentum=momentum).optimizer(rows(), round=0, lam=lam, anchor=None)
