"""DP-SGD of single records as a plain PyTorch loop: one client after another, one local step after another.

What a careful user would write without a framework: the gradients of all records of a batch at once by ``vmap``, each
clipped, their sum noised. It imports nothing of fedmtl; the caller hands it the cohort and the batches.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

Batches = Mapping[int, tuple[Tensor, Tensor, Sequence[Tensor], float]]
"""{client: its examples x and y, the rows of each of its local steps, and the expected number of rows of a step}."""


class PlainRecordLoop:
    """Local training by DP-SGD (Abadi et al. 2016, Algorithm 1) with a pull to the shared model, which then moves by
    the sum of the clients' updates.

    Args:
        module: the starting point of the shared model.
        lr: step size of the clients.
        lam: strength of the pull towards the shared model.
        clip_norm: bound on the L2 norm of one record's gradient.
        noise_std: standard deviation of the noise on the sum of a local step's gradients.
        denominator: what the sum of the updates is divided by.
        generator: draws the noise, on the device of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        lam: float,
        clip_norm: float,
        noise_std: float,
        denominator: float,
        generator: torch.Generator,
    ) -> None:
        self.shared = copy.deepcopy(module).train()
        self.lr, self.lam, self.clip_norm = lr, lam, clip_norm
        self.noise_std, self.denominator, self.generator = noise_std, denominator, generator

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss of one record."""
        outputs = functional_call(self.shared, parameters, (x[None],))
        return F.cross_entropy(outputs, y[None])

    def _released(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The noised sum of the clipped gradients of a batch, by parameter."""
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        if len(x):  # a Poisson sample may be empty; the noise is added all the same
            gradients = vmap(grad(self._loss), (None, 0, 0))(parameters, x, y)
            squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
            norms = torch.stack(squares).sum(0).sqrt()
            factors = (self.clip_norm / norms.clamp(min=1e-30)).clamp(max=1.0)
            sums = {
                name: torch.tensordot(factors, gradient, 1) for name, gradient in gradients.items()
            }
        for total in sums.values():
            total += self.noise_std * torch.randn(
                total.shape, generator=self.generator, device=total.device, dtype=total.dtype
            )
        return sums

    def round(self, batches: Batches) -> None:
        """Local training of the cohort, and one move of the shared model."""
        anchor = {name: p.detach().clone() for name, p in self.shared.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in anchor.items()}
        for x, y, steps, expected in batches.values():
            model = {name: p.clone() for name, p in anchor.items()}
            for rows in steps:
                released = self._released(model, x[rows], y[rows])
                for name, p in model.items():
                    pull = self.lam * (p - anchor[name])
                    p -= self.lr * (released[name] / expected + pull)
            for name, p in model.items():
                total[name] += p - anchor[name]
        with torch.no_grad():
            for name, p in self.shared.named_parameters():
                p += total[name] / self.denominator
