"""Production code with one line broken, while a test runs."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import pytest

from fedmtl.privacy import cost


def edit(function: Callable[..., Any], line: str, broken: str) -> Callable[..., None]:
    """Return what breaks a function of the package under a MonkeyPatch, wherever it has been imported: ``broken``
    stands in place of ``line``, a part of its source that occurs once."""
    found = inspect.getsource(function).count(line)
    assert found == 1, (
        f"{line!r} stands {found} times in {function.__qualname__}; break the line that replaced it"
    )

    def apply(patch: pytest.MonkeyPatch, *_: Any) -> None:
        patch.setattr(function, "__code__", _compiled(function, line, broken))

    return apply


def forget_multipliers(patch: pytest.MonkeyPatch) -> None:
    """Calibrate anew while the patch lasts: noise multipliers that sound code made are not those of broken code, nor
    the other way round."""
    patch.setattr(cost, "_multiplier", cache(cost._multiplier.__wrapped__))


@cache
def _compiled(function: Callable[..., Any], line: str, broken: str) -> CodeType:
    source, module = inspect.getsource(function), sys.modules[function.__module__]
    whole = inspect.getsource(module).replace(source, source.replace(line, broken))
    codes = [compile(whole, str(module.__file__), "exec", dont_inherit=True)]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return next(code for code in codes if code.co_qualname == function.__qualname__)
