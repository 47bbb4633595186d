"""Check of the last released values: they lie on their public grid, and have no less noise than the
claimed noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from scipy.stats import chi2, gamma
from torch import Tensor

from ..privacy.noise.grid import GridValue
from .claim import Claim
from .finished_run import Answer, FinishedRun, NotCovered
from .ledger_claims import claimed

_BY_CHANCE = 1e-6  # probability that the noise of a release is taken for too small


def check_grid(run: FinishedRun) -> Answer:
    if run.report.get("source") != "secure":
        raise NotCovered("noise is not rounded to a grid in seeded mode")
    path = run.folder.public / "releases.safetensors"
    if not path.exists():
        raise NotCovered("no released values are kept")
    tensors, grids = run.files.tensors(path)
    values = {
        name: GridValue(value=value, **json.loads(grids[name])) for name, value in tensors.items()
    }
    wrong = []
    for name, last in values.items():
        if math.frexp(last.width)[0] != 0.5:
            wrong.append(
                f"the grid of {name} has a width of {last.width!r}, which is no power of two"
            )
        elif last.off_grid:
            wrong.append(
                f"{last.off_grid} of {last.value.numel()} coordinates of {name} are not on its grid"
            )
        if run.private and last.step >= run.result["rounds"]:
            wrong.append(f"{name} is of step {last.step}, and {run.result['rounds']} were made")
    if run.header is not None and "releases" in run.header:
        _, claims = claimed(run.header)
        for name in claims.names:
            claim = claims.of(name, use=len(run.ledger.steps) - 1)
            bound = run.norms.get(name, claim.bound)
            if name in values and claim.law in _LENGTHS and (name in run.norms or not run.adaptive):
                wrong += _too_quiet(name, replace(claim, bound=bound), values[name])
    steps = ", ".join(
        f"{name} of step {last.step} ({last.value.numel()} coordinates)"
        for name, last in values.items()
    )
    return (
        wrong,
        f"whole multiples of a public power of two: {steps}; earlier releases are not kept",
    )


def _too_quiet(name: str, claim: Claim, last: GridValue) -> list[str]:
    """Returns the complaint about a release with less noise than the ledger states.

    Such a sum is stochastically at least as long as the noise in it, whatever the clients sent and
    whatever other noise it is correlated with (Anderson, "The integral of a symmetric unimodal
    function over a symmetric convex set", 1955), so a length below the quantile of the noise occurs
    by chance once in a million releases. Noise of half the scale is found with certainty from about
    100 coordinates on.
    """
    wrong = []
    if last.width != claim.width or last.divisor != claim.denominator:
        wrong.append(f"the grid of {name} is not that of the noise and the divisor in the ledger")
    first = 1.0
    if claim.bands:
        first = claim.bands[0]
    length, least = _LENGTHS[claim.law](last.value.double() / claim.scale * first)
    if length < least:
        wrong.append(f"{name} has less noise than the multiplier in the ledger gives")
    return wrong


def _gaussian_length(noise: Tensor) -> tuple[float, float]:
    """Returns the squared L2 norm of ``noise``, and the quantile of it at ``_BY_CHANCE`` if
    ``noise`` is Gaussian of scale 1."""
    return float(noise.square().sum()), float(chi2.ppf(_BY_CHANCE, noise.numel()))


def _laplace_length(noise: Tensor) -> tuple[float, float]:
    """Returns the L1 norm of ``noise``, and its quantile if the coordinates are independent Laplace
    numbers of scale 1."""
    return float(noise.abs().sum()), float(gamma.ppf(_BY_CHANCE, noise.numel()))


def _l2_laplace_length(noise: Tensor) -> tuple[float, float]:
    """Returns the L2 norm of ``noise``, and its quantile if the density is proportional to
    exp(-norm)."""
    return float(noise.norm()), float(gamma.ppf(_BY_CHANCE, noise.numel()))


_LENGTHS = {
    "gaussian": _gaussian_length,
    "laplace": _laplace_length,
    "l2_laplace": _l2_laplace_length,
}
