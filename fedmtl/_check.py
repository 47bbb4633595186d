"""Shared checks of the fields of settings dataclasses and of the arguments of readers.

A field whose annotation states the accepted values, such as ``lam: NonNegative = 1.0`` or
``kind: Literal["a", "b"]``, is checked by :class:`Checked`, such an argument by
:func:`check_arguments`; the functions check values by name.

A NumPy scalar that passes becomes the field's own Python number, which JSON and a fingerprint can
hold.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from .errors import ConfigError

P = ParamSpec("P")
Result = TypeVar("Result")


class Range(NamedTuple):
    """The numbers that a setting accepts, as a condition and in words."""

    holds: Callable[[Any], bool]
    text: str


_POSITIVE = Range(lambda v: v > 0 and math.isfinite(v), "a finite number above 0")
_NON_NEGATIVE = Range(lambda v: v >= 0 and math.isfinite(v), "a finite number of at least 0")
_SHARE = Range(lambda v: 0 <= v <= 1, "a number from 0 to 1")
_RATE = Range(lambda v: 0 < v <= 1, "a number above 0 and at most 1")
_FRACTION = Range(lambda v: 0 < v < 1, "a number above 0 and below 1")
_FINITE = Range(math.isfinite, "a finite number")
_WHOLE = Range(lambda v: v >= 0 and isinstance(v, numbers.Integral), "a whole number of at least 0")
_COUNT = Range(lambda v: v >= 1 and isinstance(v, numbers.Integral), "a whole number of at least 1")

Positive = Annotated[float, _POSITIVE]
"""Annotation of a setting that is a finite number above 0."""
NonNegative = Annotated[float, _NON_NEGATIVE]
"""Annotation of a setting that is a finite number of at least 0."""
Share = Annotated[float, _SHARE]
"""Annotation of a setting that is a number from 0 to 1."""
Rate = Annotated[float, _RATE]
Finite = Annotated[float, _FINITE]
Fraction = Annotated[float, _FRACTION]
Below1 = Annotated[float, Range(lambda v: 0 <= v < 1, "a number of at least 0 and below 1")]
Whole = Annotated[int, _WHOLE]
Count = Annotated[int, _COUNT]
"""Annotation of a setting that is a whole number of at least 1."""
AutoCount = Annotated[int, _COUNT, "auto"]
"""Annotation of a setting that is a whole number of at least 1, or ``"auto"``."""

_PLAIN: dict[Any, tuple[Any, ...]] = {
    NoneType: (None,),
    bool: (True, False),
    int: (Range(lambda v: isinstance(v, numbers.Integral), "a whole number"),),
    float: (Range(lambda v: not math.isnan(v), "a number"),),
}


def check_fields(settings: Any) -> None:
    """Raises :class:`ConfigError` unless every field of a settings dataclass has a value that its
    annotation accepts: a word of a ``Literal``, a number, of a :class:`Range` or any, True or
    False, or None. Fields of other types are not checked."""
    settings_class: Any = type(settings)
    accepted = _accepted(settings_class)
    _check(settings, accepted, {name: getattr(settings, name) for name in accepted})


class Checked:
    """Settings that are checked when they are made: base of a dataclass whose annotations state the
    accepted values, see :func:`check_fields`.

    The fields are checked before the ``__post_init__`` of a derived class, which so may compare
    numbers with numbers."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")
        if own is not None:
            cls.__post_init__ = _after_fields(own)  # type: ignore[method-assign,assignment]

    def __post_init__(self) -> None:
        if type(self).__post_init__ is Checked.__post_init__:
            check_fields(self)


def _after_fields(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns the ``__post_init__`` of a class behind the check of its fields."""

    @wraps(own)
    def checked(self: Any) -> None:
        # else the class that is made has checked them
        if type(self).__post_init__ is checked:
            check_fields(self)
        own(self)

    return checked


def check_values(settings_class: type, values: Mapping[str, Any]) -> None:
    """Checks values as those fields of a settings dataclass, before there is an object of it."""
    _check(
        settings_class.__name__,
        {name: accepted for name, accepted in _accepted(settings_class).items() if name in values},
        values,
    )


def check_arguments(function: Callable[P, Result]) -> Callable[P, Result]:
    """Returns the function with a check of its arguments by their annotations, as of fields by
    :func:`check_fields`."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> Result:
        bound = signature.bind(*args, **options)
        # so that every checked name has a value
        bound.apply_defaults()
        _check(function.__name__, _accepted(function), bound.arguments)
        return function(*args, **options)

    return checked


def _check(
    settings: object, fields: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any]
) -> None:
    for name, accepted in fields.items():
        value = values[name]
        words = tuple(word for word in accepted if not isinstance(word, Range))
        # the type as well, since 1 == True and 1.0 == 1
        if any(type(value) is type(word) and value == word for word in words):
            continue
        ranges = [word for word in accepted if isinstance(word, Range)]
        if ranges:
            text = ", or ".join(
                [ranges[0].text, *(repr(word) for word in words if word is not None)]
            )
            bounded(settings, {name: value}, Range(ranges[0].holds, text))
        else:
            raise _refused(settings, name, value, words)


@cache
def _accepted(annotated: Any) -> dict[str, tuple[Any, ...]]:
    """Returns the words and the :class:`Range` that each checked field of a class or argument of a
    function accepts."""
    hints = get_type_hints(annotated, include_extras=True)
    accepted = {}
    # the returned value of a function is no argument
    hints.pop("return", None)
    for name in (
        [field.name for field in fields(annotated) if field.init]
        if is_dataclass(annotated)
        else hints
    ):
        if get_origin(hints[name]) in (Union, UnionType):
            arms = get_args(hints[name])
        else:
            arms = (hints[name],)
        each = [_options(arm) for arm in arms]
        if all(each):
            accepted[name] = tuple(option for options in each for option in options)
    return accepted


def _options(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return getattr(annotation, "__metadata__", None) or _PLAIN.get(annotation, ())


def positive(settings: object, **values: Any) -> None:
    """Raises :class:`ConfigError` unless every value is a finite number above 0."""
    bounded(settings, values, _POSITIVE)


def non_negative(settings: object, **values: Any) -> None:
    """Raises :class:`ConfigError` unless every value is a finite number of at least 0."""
    bounded(settings, values, _NON_NEGATIVE)


def fraction(settings: object, **values: Any) -> None:
    """Raises :class:`ConfigError` unless every value is a number above 0 and below 1."""
    bounded(settings, values, _FRACTION)


def positive_int(settings: object, **values: Any) -> None:
    """Raises :class:`ConfigError` unless every value is a whole number of at least 1."""
    bounded(settings, values, _COUNT)


def given(**values: Any) -> dict[str, Any]:
    """Returns the values that are not None, for the checks of settings that may be left out."""
    return {name: value for name, value in values.items() if value is not None}


def one_of(settings: object, accepted: tuple[Any, ...], **values: Any) -> None:
    """Raises :class:`ConfigError` unless every value is one of ``accepted``."""
    for name, value in values.items():
        if value not in accepted:
            raise _refused(settings, name, value, accepted)


def bounded(settings: object, values: dict[str, Any], accepted: Range) -> None:
    """Raises :class:`ConfigError` unless every value, by its name, is ``accepted``."""
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Real)
            or not accepted.holds(value)
        ):
            raise ConfigError(
                f"{_where(settings)}.{name} is {value!r}; it must be {accepted.text}."
            )
        # settings are written as JSON and yaml, which take no scalars of NumPy
        if isinstance(value, np.generic) and getattr(settings, name, None) is value:
            object.__setattr__(settings, name, value.item())  # also in a frozen dataclass


def _refused(settings: object, name: str, value: Any, accepted: tuple[Any, ...]) -> ConfigError:
    return ConfigError(
        f"{_where(settings)}.{name} is {value!r}; accepted: {', '.join(map(repr, accepted))}."
    )


def _where(settings: object) -> str:
    if isinstance(settings, str):
        return settings
    return type(settings).__name__


def id_of(client: Any) -> Any:
    """Returns the id that a whole number stands for, its digits as a text, the same of 1 and of
    1.0; anything else as it is."""
    if isinstance(client, bool):
        return client
    if isinstance(client, numbers.Integral):
        return str(int(client))
    # a column of whole numbers with a gap holds 1.0
    if isinstance(client, numbers.Real):
        number = float(client)
        if number.is_integer():
            return str(int(number))
    return client


def without_zeros(text: str, decimal: str = ".") -> str:
    """Returns a whole number without decimals of zero, 1 of 1.0; other texts as they are.

    Args:
        text: of a value.
        decimal: the mark before its decimals.
    """
    whole, mark, decimals = text.partition(decimal)
    if mark and not decimals.strip("0") and re.fullmatch("[+-]?[0-9]+", whole):
        return whole
    return text
