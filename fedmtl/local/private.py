"""Local training by DP-SGD: only noised, clipped sums of gradients of single records touch a client's model.

Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016 (Algorithm 1); inside the silos of a federation, Liu,
Hu, Wu, Smith: "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022. What a client sends
after such a run is post-processing of what the run released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..stacked.losses import Loss
from ..stacked.per_example import example_gradients, gradients_in_pieces
from .mixture import Mixture, MixtureSteps
from .optimizers import Strength, rows_of
from .solver import LocalSolver, address_of, frozen_part

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..privacy import LocalSteps
    from ..stacked import StackedModule

GradientChunks = Iterator[tuple[Tensor, Tensor]]
"""Gradients of examples (N, D) and the numbers of their copies, int64 (N,), a chunk at a time."""


def train_privately(
    stack: StackedModule,
    data: FederatedDataset,
    loss: Loss,
    solver: LocalSolver,
    start: Tensor,
    *,
    clients: Tensor,
    round: int,
    records: LocalSteps,
    width: int | None = 16,
    lam: Strength = 0.0,
    anchor: Tensor | None = None,
    moving: Tensor | None = None,
    mixture: Mixture | None = None,
) -> Tensor:
    """Train one stack of clients on their own data by DP-SGD.

    The solver gives the optimizer and its step size; how many steps a client makes, and on which records, is for
    ``records`` to say. A client without a reserved step keeps its start, and its data are not read. The regularizer
    needs no data and is added by the optimizer, after the release.

    Args:
        stack: computes all clients together; its buffers are overwritten.
        data: the clients' data.
        loss: one value per example.
        solver: names the optimizer and its step size in this round.
        start: (D,) or (k, D), where the clients start.
        clients: int64 (k,), in any order; the stack computes those with most steps first.
        round: addresses the step size and dropout masks.
        records: draws records, clips, adds noise.
        width: examples of a client that are computed together, with those of clients beside it, which do not show; None
            where there is never another one.
        lam, anchor: the pull (lam / 2) ||w - anchor||^2, anchor (D,) or (k, D); lam may be a tensor (D,) or (k, D) with
            one strength for each coordinate, or a precision matrix.
        moving: bool (D,), the coordinates that are trained; all others keep their start, and a record's gradient is
            clipped without them. None trains all.
        mixture: of the k clients, see :mod:`.mixture`; its models follow the gradients of the records drawn as they
            are, and nothing of them is released. None without.

    Returns:
        (k, D), in the order of ``clients``; may be a view of the stack's buffer: copy it before the stack is used.
    """
    steps = records.steps(clients)
    order = torch.argsort(steps, descending=True, stable=True)
    sorted_already = bool((order == torch.arange(len(order))).all())
    if not sorted_already:
        place = order.to(start.device)
        clients, steps = clients[order], steps[order]
        start, anchor, lam = (rows_of(value, place) for value in (start, anchor, lam))
    rows = stack.load(start, len(clients))
    rows.grad = stack.grads[: len(clients)]
    optimizer = solver.optimizer(rows, round=round, lam=lam, anchor=anchor)
    frozen, still = frozen_part(rows, moving)
    first, keys = data.train.offsets[clients], data.keys[clients]
    place = torch.arange(len(order)) if sorted_already else order
    beside = None if mixture is None else MixtureSteps(mixture, solver, round, rows, steps, place)
    begin, most = records.begin_training(clients), int(steps[0]) if len(steps) else 0
    for step in range(begin, begin + most):
        active = int((steps > step - begin).sum())
        index, mask = records.batch(clients[:active], step)
        filler = 0 if width is None else -mask.shape[1] % width
        mask, index = pad(mask, (0, filler)), pad(index, (0, filler))
        index = torch.where(mask, index, 0)  # padding is read, but never used
        x, y = data.gather("train", first[:active, None] + index, dtype=rows.dtype, device=rows.device)
        address = address_of(keys[:active], round, step) if stack.has_dropout else None
        of = example_gradients if width is None else partial(gradients_in_pieces, width=width)
        gradients = partial(of, stack, x, y, loss, mask=mask, address=address, position=index)
        if beside is not None:
            beside(active, partial(_means, gradients, mask.sum(1), stack.grads[:active]))
        chunks = gradients()
        if frozen is not None:
            chunks = ((part.index_fill(1, frozen, 0.0), owner) for part, owner in chunks)
        stack.grads[:active].copy_(records.release(clients[:active], step, chunks))
        optimizer.step(active=slice(0, active))
        if frozen is not None and still is not None:
            rows[:active, frozen] = still[:active]
    return rows if sorted_already else rows[torch.argsort(order).to(rows.device)]


def _means(gradients: Callable[[], GradientChunks], counts: Tensor, out: Tensor) -> Tensor:
    """Return in ``out`` (A, D) the mean gradients of copies with ``counts``, int64 (A,), examples; 0 without any."""
    out.zero_()
    for part, owner in gradients():
        out.index_add_(0, owner, part)
    return out.div_(counts.clamp(min=1).to(out.device)[:, None])
