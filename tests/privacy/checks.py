"""Checks of the production release path; each lists what it found, and empty means nothing was refuted."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from fedmtl.privacy import ClientPrivacy, PoissonSampling, ReleasePlan, open_channel

ALPHA = 1e-6
CLIENTS, COHORT, DIMENSION, STEPS, CLIP, Z = 200, 20, 3000, 12, 0.7, 1.3
TENSORS = (1000, 1900, 100)


def channel(seed: int = 0, *, dimension: int = DIMENSION, steps: int = STEPS, source: str = "seeded"):
    privacy = ClientPrivacy(clip_norm=CLIP, noise_multiplier=Z, source=source)
    plan = ReleasePlan(name="update", dimension=dimension, uses=steps, stateful=True)
    return open_channel(privacy, (plan,), PoissonSampling(COHORT).bind(CLIENTS), seed=seed, steps=steps)


def released_noise(seed: int = 0, source: str = "seeded") -> np.ndarray:
    """(T, D) releases of clients that contribute zero, in units of the standard deviation z C / m."""
    door = channel(seed, source=source)
    rows = []
    for step in range(STEPS):
        ranks = door.draw(step)
        door.begin(step, ranks)
        rows.append(door.release("update", torch.zeros(len(ranks), DIMENSION), ranks))
    return torch.stack(rows).numpy() / (Z * CLIP / COHORT)


def noise_law(noise: np.ndarray) -> list[str]:
    """Two-sided chi-square on the total and on every tensor, and Kolmogorov-Smirnov."""
    findings = []
    parts = {"total": noise}
    start = 0
    for index, size in enumerate(TENSORS):
        parts[f"tensor {index}"] = noise[:, start : start + size]
        start += size
    for name, part in parts.items():
        law = stats.chi2(part.size)
        energy = float((part**2).sum())
        if not law.ppf(ALPHA / 2) < energy < law.isf(ALPHA / 2):
            findings.append(f"chi-square {name}")
    if stats.kstest(noise.ravel(), "norm").pvalue < ALPHA:
        findings.append("KS")
    return findings


def freshness(noise: np.ndarray) -> list[str]:
    """Correlation of the noise of different steps, and of the two halves of one step."""
    unit = noise / np.linalg.norm(noise, axis=1, keepdims=True)
    between = np.abs(unit @ unit.T - np.eye(len(unit))).max()
    half = noise.shape[1] // 2
    left, right = noise[:, :half], noise[:, half : 2 * half]
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    within = np.abs((left * right).sum(1) / np.maximum(lengths, 1e-300)).max()
    findings = ["correlated steps"] if between > 6 / math.sqrt(noise.shape[1]) else []
    return findings + (["correlated coordinates"] if within > 6 / math.sqrt(half) else [])


def adversaries(dimension: int) -> list[torch.Tensor]:
    """Rows of one client at its worst, in float32."""
    whole = [torch.full((dimension,), value) for value in (1e4, math.nan, math.inf, 0.0, 3e38, -3e38)]
    mixed = torch.zeros(dimension)
    mixed[:6] = torch.tensor([1e4, math.nan, math.inf, -math.inf, 3e38, 0.0])
    large = torch.zeros(dimension)
    large[0], large[-1] = 3e38, -3e38
    return [*whole, mixed, large]


def sensitivity(seed: int = 0, dimension: int = 64) -> list[str]:
    """Neighbours under the same noise: the released means differ by at most C / m, and are finite."""
    findings = []
    generator = torch.Generator().manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.ones(dimension), dim=0)
    for index, adversary in enumerate([*adversaries(dimension), -100 * direction]):
        for others in (
            torch.randn(CLIENTS, dimension, generator=generator),
            100 * direction.repeat(CLIENTS, 1),
        ):
            with_it, without = channel(seed, dimension=dimension), channel(seed, dimension=dimension)
            ranks = with_it.draw(0)
            with_it.begin(0, without.draw(0))
            without.begin(0, ranks)
            rows = others[ranks].clone()
            rows[-1] = adversary
            a = with_it.release("update", rows, ranks)
            b = without.release("update", rows[:-1], ranks[:-1])
            if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
                findings.append(f"adversary {index}: not finite")
            elif float((a - b).norm()) > CLIP / COHORT:
                findings.append(f"adversary {index}: moved {float((a - b).norm()) * COHORT / CLIP:.3g} C")
    return findings


def empty_cohort(seed: int = 0) -> list[str]:
    """A step nobody takes part in still releases noise over the same denominator."""
    door = channel(seed)
    ranks = door.draw(0)
    door.begin(0, ranks)
    value = door.release("update", torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.int64)).numpy()
    energy = float(((value / (Z * CLIP / COHORT)) ** 2).sum())
    law = stats.chi2(DIMENSION)
    return [] if law.ppf(ALPHA / 2) < energy < law.isf(ALPHA / 2) else ["empty cohort"]


def sampler_law(seed: int = 0, draws: int = 600) -> list[str]:
    """Cohort sizes are binomial; inclusions are fair, and independent across clients and steps."""
    door = channel(seed, steps=draws)
    included = np.zeros((draws, CLIENTS))
    for step in range(draws):
        included[step, door.draw(step).numpy()] = 1
    q, findings = COHORT / CLIENTS, []
    sizes = included.sum(1)
    dispersion = ((sizes - COHORT) ** 2).sum() / (COHORT * (1 - q))
    if not stats.chi2.ppf(ALPHA / 2, draws) < dispersion < stats.chi2.isf(ALPHA / 2, draws):
        findings.append("cohort sizes")
    fair = ((included.sum(0) - draws * q) ** 2).sum() / (draws * q * (1 - q))
    if not stats.chi2.ppf(ALPHA / 2, CLIENTS) < fair < stats.chi2.isf(ALPHA / 2, CLIENTS):
        findings.append("fairness")
    centred = (included - q) / math.sqrt(q * (1 - q))
    lagged = (centred[1:] * centred[:-1]).sum() / math.sqrt((draws - 1) * CLIENTS)
    together = included.T @ included
    np.fill_diagonal(together, 0)
    pairs = CLIENTS * (CLIENTS - 1) / 2
    if pairs * stats.binom.sf(together.max() - 1, draws, q * q) < ALPHA or abs(lagged) > 5.5:
        findings.append("dependence")
    return findings


def audit(seed: int = 0) -> list[str]:
    """All checks; what they found."""
    noise = released_noise(seed)
    return [*noise_law(noise), *freshness(noise), *sensitivity(seed), *empty_cohort(seed), *sampler_law(seed)]
