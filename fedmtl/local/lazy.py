"""Lazy parameters: a batch gives them their shapes before a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import ModelError, first_line


def with_shapes(module: nn.Module, sample: Tensor, seed: int) -> nn.Module:
    """Returns the module, or if some of its parameters are lazy a copy with all of their shapes.

    Args:
        module: whose lazy parameters are made, with random starts by the ``seed``, as a batch
            passes through it.
        sample: a batch (B, ...) of the shape of the data.
        seed: of the random starts.

    Raises:
        ModelError: a module that fails on the batch, or that leaves a parameter without a shape.

    Example:
        >>> import torch
        >>> from fedmtl.local import with_shapes
        >>> with_shapes(torch.nn.LazyLinear(2), torch.zeros(1, 5), seed=0).weight.shape
        torch.Size([2, 5])
    """
    lazy = list(_lazy_names(module))
    if not lazy:
        return module
    module = copy.deepcopy(module)
    mode = module.training
    # The start is a function of the run's seed, and the program's own generator stays as it is.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            # In evaluation: dropout would draw, and layers with statistics would change them.
            module.eval()(torch.zeros_like(sample))
        except Exception as error:
            raise ModelError(
                f"The model has lazy parameters ({', '.join(lazy)}), and fails on a batch of shape "
                f"{tuple(sample.shape)}, which would give them their shapes: {first_line(error)}."
            ) from error
    left = next(_lazy_names(module), None)
    if left is not None:
        raise ModelError(
            f"{left!r} is lazy, and the forward pass does not give it a shape; use the layer in "
            "forward, or a layer with a shape."
        )
    return module.train(mode)


def _lazy_names(module: nn.Module) -> Iterator[str]:
    """Yields the names of the parameters without a shape."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            yield name
