"""Made-up examples and targets, on which models and losses are tried before a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..data import DataSpec, FederatedDataset
from ..errors import ConfigError
from ..local import check_loss
from ..local.losses import Loss


def trial_batches(spec: DataSpec, dtype: torch.dtype) -> list[Tensor]:
    """Returns batches of two made-up examples (2, *shape): whole numbers 0 and 1, or real ones of
    both signs, of one sign, and zeros, in this order."""
    # Not the data: a module that is tried on them could tell something about them by failing.
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand((2, *spec.shape), generator=generator, dtype=torch.float64)
    zeros = spec.sample(2, dtype)
    if spec.integer:
        return [uniform.round().to(zeros), zeros]
    batches = [uniform.to(dtype), zeros]
    if not spec.inputs:  # of several inputs some may be whole numbers
        batches.insert(0, (4 * uniform - 2).to(dtype))
    return batches


def trial_targets(data: FederatedDataset, dtype: torch.dtype) -> Tensor:
    """Returns made-up targets of two examples: classes or labels 0 and 1, or real numbers between
    them."""
    shape = (2, *data.spec.targets)
    places = torch.arange(math.prod(shape)).reshape(shape)
    if data.classes is not None:
        return places % 2
    return (places + 1).to(dtype) / (math.prod(shape) + 1)


def check_own_loss(
    loss: Loss, module: nn.Module, sample: Tensor, targets: Tensor, dtype: torch.dtype
) -> None:
    """Refuses a loss of the caller's own that is no function of one example, see
    :func:`fedmtl.local.check_loss`.

    One that fails on made-up real targets may take those of the data, and is not refused here.
    """
    with torch.no_grad():
        shape = tuple(module(sample).shape[1:])
    try:
        check_loss(loss, shape, targets, dtype)
    except ConfigError as error:
        if error.__cause__ is None or not targets.is_floating_point():
            raise
