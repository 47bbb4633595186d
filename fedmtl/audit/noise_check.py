"""Check 1, the noise law, on noise as numbers that are i.i.d. N(0, 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from .findings import Finding, low_p, skipped
from .samples import Sample
from .setup import Setup
from .statistics import energy_p, kolmogorov_p, normal_p

# the test sorts the numbers
_KS_SAMPLES = 1 << 20


def noise_laws(setup: Setup, noise: Mapping[str, Sample]) -> list[Finding]:
    """Makes the tests of :func:`noise_law` on every release, and of the total of every client if
    each has noise."""
    findings = []
    for name, sample in noise.items():
        findings += noise_law(name, sample.units, setup.parts(sample.units.shape[1]))
        # -1 is the noise on a sum of all clients
        if sample.clients.max(initial=-1) >= 0:
            findings.append(_by_client(setup, name, sample))
    return findings


def _by_client(setup: Setup, name: str, noise: Sample) -> Finding:
    # clients that never act have no noise to test
    acting, place = np.unique(noise.clients, return_inverse=True)
    with np.errstate(over="ignore", invalid="ignore"):
        energies = np.bincount(place, (noise.units**2).sum(1))
    sizes = np.bincount(place) * noise.units.shape[1]
    p_values = energy_p(energies, sizes)
    worst = int(p_values.argmin())
    detail = (
        f"client {setup.name(int(acting[worst]))} has "
        f"{math.sqrt(max(energies[worst] / sizes[worst], 0)):.4g} of "
        f"the claimed deviation, {sizes[worst]} numbers"
    )
    return low_p(
        # Bonferroni: the worst of as many tests as clients
        f"noise law: clients of {name}",
        min(1.0, float(p_values[worst]) * len(acting)),
        detail,
    )


def noise_law(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """Makes two-sided chi-square tests on the total, on every tensor and on every tensor of every
    step, and on the spread of the lengths; Kolmogorov-Smirnov.

    ``noise`` (T, D) is standardized; ``parts`` are (start, stop) of every tensor.
    """
    if not noise.size:
        return [skipped(f"noise law: {name}", "no step fits the budget")]
    with np.errstate(over="ignore", invalid="ignore"):
        energies = np.stack([(noise[:, a:b] ** 2).sum(1) for a, b in parts], 1)
    sizes = np.array([b - a for a, b in parts], float)
    steps = len(noise)
    tensors = energy_p(energies.sum(0), steps * sizes)
    cells = energy_p(energies, sizes)
    worst = int(tensors.argmin())
    cell = int(cells.argmin())
    total = float(energies.sum())
    count = noise.size
    # the squared length is chi-square, of which gammainc is the distribution function
    lengths = special.ndtri(special.gammainc(noise.shape[1] / 2, energies.sum(1) / 2))
    spread, of_tensor = (
        math.sqrt(max(x, 0))
        for x in (total / count, energies[:, worst].sum() / steps / sizes[worst])
    )
    tests = {
        "total": (
            energy_p(total, count),
            f"standard deviation {spread:.4g} of the claimed one, {count} numbers",
        ),
        "tensors": (
            # Bonferroni, here and over the steps
            tensors[worst] * len(parts),
            f"tensor {worst} has {of_tensor:.4g} of the claimed deviation",
        ),
        "steps": (
            cells.min() * cells.size,
            f"tensor {cell % len(parts)} in step {cell // len(parts)}",
        ),
        "lengths": (normal_p(lengths), f"chi-square quantiles of the {steps} lengths"),
        "shape": (
            kolmogorov_p(noise.ravel()[:_KS_SAMPLES]),
            f"Kolmogorov-Smirnov, {min(count, _KS_SAMPLES)} numbers",
        ),
    }
    return [
        low_p(f"noise law: {test} of {name}", min(1.0, float(p)), detail)
        for test, (p, detail) in tests.items()
    ]
