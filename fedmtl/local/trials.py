"""The executor of a model's local training, after a trial of the model and of its loss on made-up
examples and targets."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn

from ..data import DataSpec, FederatedDataset
from ..data.transforms import MappedImages
from ..errors import ConfigError, ModelError, first_line
from .batched import check_examples, check_stackable
from .behaviour import check_behaviour, check_loss
from .executor import Execution, Executor
from .layout import Layout
from .losses import LOSSES, Loss
from .products import Perceptron

logger = logging.getLogger("fedmtl")


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


def placed(data: FederatedDataset, device: torch.device) -> FederatedDataset:
    """Returns the data on a device. Mapped images stay on the disk, and are read and moved batch by
    batch."""
    if device.type == "cpu" or isinstance(data.transform, MappedImages):
        return data
    return data.to(device)


def build_executor(
    module: nn.Module,
    data: FederatedDataset,
    loss: str | Loss,
    execution: Execution,
    *,
    device: torch.device,
    dtype: torch.dtype,
    private: bool = False,
    cores: int | None = None,
) -> Executor:
    """Returns the executor of local training, after a trial of the module and of the loss.

    A module that cannot be stacked is computed for one client after another, unless the settings
    ask for stacks.

    Args:
        module: a prepared one, see :func:`~fedmtl.local.prepare_module`.
        data: whose public shape the made-up examples have.
        loss: of training, by its name or as a function.
        execution: settings.
        device: of the computation.
        dtype: of the parameters.
        private: True if clients are trained by DP-SGD, which needs gradients of single examples.
        cores: that stacks may use; None for those of this process.

    Raises:
        ConfigError: a loss of the caller's own that is no function of one example.
        ModelError: the module cannot be stacked, and a chunk of several clients was asked for.
    """
    # Perceptrons are computed by batched products, which need no trial.
    perceptron = Perceptron.of(module, Layout.of(module)) is not None
    if not perceptron:
        check_behaviour(module, trial_batches(data.spec, dtype))
    sample = data.spec.sample(2, dtype)
    targets = trial_targets(data, dtype)
    own_loss = None
    if callable(loss) and loss not in LOSSES.values():
        own_loss = loss
        check_own_loss(own_loss, module, sample, targets, dtype)
    resolved = execution.resolve(module, device, cores)
    batched = True
    try:
        if not perceptron:
            check_stackable(module, sample)
        if private and (own_loss is not None or not perceptron):
            check_examples(module, sample, own_loss, targets)
    except ModelError as error:
        if execution.chunk not in (None, 1):
            raise
        batched = False
        if execution.chunk is None:
            name = type(module).__name__
            reason = first_line(error.__cause__ or error)
            logger.warning("%s: clients are computed one after another, since %s", name, reason)
        resolved = Execution(chunk=1, processes=execution.processes or cores)
    return Executor(resolved, module, device=device, dtype=dtype, batched=batched)
