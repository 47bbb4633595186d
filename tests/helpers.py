"""Small problems shared by the tests."""

import numpy as np
import torch
from dp_accounting.pld import PLDAccountant
from scipy import optimize, special

from fedmtl.data import FederatedDataset
from fedmtl.privacy import BoundSampler, PrivacyCost
from fedmtl.privacy.accounting.composition import renyi_curve
from fedmtl.privacy.accounting.pld import LossLaw


def ragged_classification(
    clients: int = 7, features: int = 5, classes: int = 3, *, seed: int = 0, largest: int = 23
) -> FederatedDataset:
    """Clients of 3 to ``largest`` training examples with their own label noise; test parts of 2 to 6 examples."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(features, classes, generator=generator, dtype=torch.float64)
    parts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
    for client in range(clients):
        own = common + 0.5 * torch.randn(
            features, classes, generator=generator, dtype=torch.float64
        )
        for side, low, high in ((0, 3, largest), (1, 2, 6)):
            n = int(torch.randint(low, high + 1, (1,), generator=generator))
            x = torch.randn(n, features, generator=generator, dtype=torch.float64)
            parts[side][f"client-{client}"] = (x, (x @ own).argmax(1))
    return FederatedDataset.from_tensors(parts[0], test=parts[1], classes=classes, name="ragged")


def regression(
    clients: int = 6, features: int = 4, examples: int = 30, *, seed: int = 0, spread: float = 0.5
) -> FederatedDataset:
    """Well-conditioned linear regression with one weight vector a client around a common one."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(features, generator=generator, dtype=torch.float64)
    parts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
    for client in range(clients):
        own = common + spread * torch.randn(features, generator=generator, dtype=torch.float64)
        for side in (0, 1):
            x = torch.randn(examples, features, generator=generator, dtype=torch.float64)
            y = x @ own + 0.1 * torch.randn(examples, generator=generator, dtype=torch.float64)
            parts[side][f"client-{client}"] = (x, y)
    return FederatedDataset.from_tensors(parts[0], test=parts[1], classes=None, name="regression")


def price_of(
    sampler: BoundSampler, delta: float, *, releases: int = 1, mechanism: str = "gaussian"
) -> PrivacyCost:
    """The cost of steps with releases of one number each, under the sampler's own law."""
    sampled = sampler.probability if sampler.amplified else 1.0
    return PrivacyCost(law=mechanism, sizes=(1,) * releases, delta=delta, sampled=sampled)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a mu-Gaussian mechanism: Balle and Wang, "Improving the Gaussian mechanism", 2018, Theorem 8."""

    def excess(eps: float) -> float:
        return float(
            special.ndtr(mu / 2 - eps / mu) - np.exp(eps) * special.ndtr(-mu / 2 - eps / mu) - delta
        )

    return float(optimize.brentq(excess, 0.0, 200.0))


def library_accountant() -> PLDAccountant:
    """dp_accounting's accountant on losses in steps of 1e-3: epsilon is within 2.2e-4 of that in steps of 1e-4
    (``test_laws.py``), which takes ten times as long."""
    return PLDAccountant(value_discretization_interval=1e-3)


def renyi_epsilon(event, uses: int, delta: float) -> float:
    """Epsilon of ``uses`` of an event by its Renyi divergences and the library's conversion."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders = tuple(float(order) for order in rdp.DEFAULT_RDP_ORDERS)
    return float(rdp.compute_epsilon(orders, uses * renyi_curve(event, orders), delta)[0])


def l2_laplace_losses(
    beta: float, dimension: int, count: int, *, seed: int, shift: float = 1.0
) -> np.ndarray:
    """Losses of simulated noise vectors, of density proportional to exp(-beta |v|), for a move along the first axis."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, dimension))
    noise *= rng.gamma(dimension, 1 / beta, (count, 1)) / np.linalg.norm(
        noise, axis=1, keepdims=True
    )
    radius = np.linalg.norm(noise, axis=1)
    noise[:, 0] -= shift
    return beta * (np.linalg.norm(noise, axis=1) - radius)


def delta_at(law: LossLaw, epsilon: float) -> float:
    """The hockey-stick divergence of a law of losses at ``epsilon``, by its definition."""
    above = law.losses > epsilon
    return law.infinity + float(law.masses[above] @ -np.expm1(epsilon - law.losses[above]))
