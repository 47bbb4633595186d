"""Shared argument checks for the settings dataclasses.

A NumPy scalar that passes becomes the field's own Python number, which JSON and a fingerprint can hold.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .errors import ConfigError


def positive(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a finite number above 0."""
    _bounded(settings, values, lambda v: v > 0 and math.isfinite(v), "a finite number above 0")


def positive_or(settings: object, *words: str, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is one of ``words`` or a finite number above 0."""
    others = {name: value for name, value in values.items() if not (isinstance(value, str) and value in words)}
    also = "".join(f", or {word!r}" for word in words)
    _bounded(settings, others, lambda v: v > 0 and math.isfinite(v), f"a finite number above 0{also}")


def finite(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a finite number."""
    _bounded(settings, values, math.isfinite, "a finite number")


def share(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a number from 0 to 1."""
    _bounded(settings, values, lambda v: 0 <= v <= 1, "a number from 0 to 1")


def non_negative(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a finite number of at least 0."""
    _bounded(settings, values, lambda v: v >= 0 and math.isfinite(v), "a finite number of at least 0")


def positive_int(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ConfigError(f"{_where(settings)}.{name} is {value!r}; it must be a whole number of at least 1.")
        _become_plain(settings, name, value)


def whole(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is a whole number of at least 0."""
    _bounded(settings, values, lambda v: v >= 0 and isinstance(v, numbers.Integral), "a whole number of at least 0")


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, for the checks of settings that may be left out."""
    return {name: value for name, value in values.items() if value is not None}


def one_of(settings: object, accepted: tuple[Any, ...], **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is one of ``accepted``."""
    for name, value in values.items():
        if value not in accepted:
            names = ", ".join(map(repr, accepted))
            raise ConfigError(f"{_where(settings)}.{name} is {value!r}; accepted: {names}.")


def boolean(settings: object, **values: Any) -> None:
    """Raise :class:`ConfigError` unless every value is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{_where(settings)}.{name} is {value!r}; it must be true or false.")


def _bounded(settings: object, values: dict[str, Any], holds: Any, accepted: str) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not holds(value):
            raise ConfigError(f"{_where(settings)}.{name} is {value!r}; it must be {accepted}.")
        _become_plain(settings, name, value)


def _become_plain(settings: object, name: str, value: Any) -> None:
    """Replace a field that is a NumPy scalar by the Python number of the same value, also in a frozen dataclass."""
    held = getattr(settings, name, None)
    if isinstance(held, np.generic) and held is value:
        object.__setattr__(settings, name, held.item())


def _where(settings: object) -> str:
    return settings if isinstance(settings, str) else type(settings).__name__


def id_of(client: Any) -> Any:
    """Return the id that a whole number stands for, its digits as a text; anything else as it is."""
    whole = isinstance(client, numbers.Integral) and not isinstance(client, bool)
    return str(int(client)) if whole else client
