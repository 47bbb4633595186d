"""Mean-regularized personalization as a plain PyTorch loop: a module and an optimizer for every client.

What a careful user would write without a framework: nothing is stacked, no thread pool, one client after
another. It imports nothing of fedmtl; the caller hands it the cohort, the batches and the noise, so that both
sides do the same work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Batches = Mapping[int, tuple[Tensor, Tensor, Sequence[Tensor]]]
"""{client: its examples x and y, and the rows of each of its batches of this round}."""


class PlainLoop:
    """PMTL (Hu et al. 2023, Algorithm 1) for the clients that show up.

    Args:
        module: the starting point, copied for every client at its first participation.
        lr: step size of the clients.
        lam: strength of the pull towards the shared model.
        clip_norm: bound on the L2 norm of one client's update.
        noise_std: standard deviation of the noise on the sum of updates.
        denominator: what the noised sum is divided by.
        normal: round -> standard normal noise, float64 (D,).
        personal: whether a client goes on from its own model; else from the shared one, which is FedProx.
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
        normal: Callable[[int], Tensor],
        personal: bool = True,
    ) -> None:
        self.shared = copy.deepcopy(module).train()
        self.models: dict[int, nn.Module] = {}
        self.lr, self.lam, self.clip_norm = lr, lam, clip_norm
        self.noise_std, self.denominator, self.normal = noise_std, denominator, normal
        self.personal = personal

    def round(self, batches: Batches, step: int) -> None:
        """Local training of the cohort, clip, noise, and one move of the shared model."""
        anchor = [p.detach().clone() for p in self.shared.parameters()]
        mean = parameters_to_vector(self.shared.parameters()).detach()
        total = torch.zeros_like(mean, dtype=torch.float64)
        for client, (x, y, steps) in batches.items():
            model = self.models.get(client) or copy.deepcopy(self.shared)
            if self.personal:
                self.models[client] = model
            optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
            for rows in steps:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                with torch.no_grad():
                    for p, a in zip(model.parameters(), anchor, strict=True):
                        assert p.grad is not None
                        p.grad.add_(p - a, alpha=self.lam)
                optimizer.step()
            update = (parameters_to_vector(model.parameters()).detach() - mean).to(torch.float64)
            total += update * min(1.0, self.clip_norm / float(update.norm()))
        total += self.noise_std * self.normal(step).to(total)
        moved = mean.to(torch.float64) + total / self.denominator
        vector_to_parameters(moved.to(mean.dtype), self.shared.parameters())

    def rows(self, clients: Sequence[int]) -> Tensor:
        """The personal models as (k, D)."""
        return torch.stack(
            [parameters_to_vector(self.models[c].parameters()).detach() for c in clients]
        )
