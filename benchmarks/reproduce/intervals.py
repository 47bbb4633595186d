"""The one interval that all studies print after a mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean, stdev

from scipy.stats import t as student


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95% interval (Student's t); NaN for a single value."""
    values = list(values)
    if len(values) < 2:
        return values[0], math.nan
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values), half
