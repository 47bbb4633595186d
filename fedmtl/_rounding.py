"""Rounding of printed numbers: an epsilon or a delta in print is never below the one that was
spent, nor a lower bound above the one that was measured, and a score has the same digits
everywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns ``value`` with at most ``digits`` significant digits, rounded up.

    The number is read as Python prints it (``1e-5`` is written ``1e-05``, not ``1.0001e-05``), and
    the text read back as a float is at least ``value``.

    Args:
        value: an epsilon or a delta; infinity and NaN are written as ``"inf"`` and ``"nan"``.
        digits: significant digits, at least 1.
    """
    value = float(value)
    if not math.isfinite(value):
        return f"{value:g}"
    up = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(value)))
    return f"{float(up):.{digits}g}"


def rounded_down(value: float, digits: int = 3) -> str:
    """Returns a lower bound with at most ``digits`` significant digits, rounded down; see
    :func:`rounded_up`."""
    return f"{0.0 - float(rounded_up(-value, digits)):.{digits}g}"


def grouped(text: str) -> str:
    """Returns a text with the whole numbers of at least 1,000 in it written so, in groups of three
    digits."""
    return re.sub(r"(?<![\w.+-])\d{4,}(?!\w|\.\d)", lambda found: f"{int(found[0]):,}", text)


def percent(values: Iterable[float]) -> str:
    """Returns shares as whole percents: ``71/12/17``."""
    return "/".join(f"{value:.0%}"[:-1] for value in values)


def number_text(value: float, mean: float | None = None) -> str:
    """Returns a metric in print: with three decimals, or with four significant digits if it is too
    small or too large for them.

    The twelfth decimal is rounded first, so that sums in another order are written alike.

    Args:
        value: the metric.
        mean: that ``value`` is printed beside, such as that of a deviation: it then has three
            decimals if that has, and a power of ten if that has a large one.
    """
    value = round(float(value), 12)
    size = abs(value if mean is None else round(float(mean), 12))
    if not math.isfinite(value) or value == 0 or 0.1 <= size < 100:
        return f"{value:.3f}"
    if 1e3 <= abs(value) <= max(size, abs(value)) < 1e9:
        return f"{value:.0f}"
    return f"{value:.4g}"
