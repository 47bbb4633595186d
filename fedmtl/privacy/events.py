"""The events of ``dp_accounting``, the description of a release for accountants.

That package imports all its accountants and, for these, ``scipy.stats`` and ``scipy.signal``, half
a second of which a run whose noise is accounted by :mod:`.accounting.pld` uses nothing. Its module
of events is therefore loaded by itself, under its own name, so that an ``import dp_accounting``
before or after has the same classes.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import dp_event
    from dp_accounting.dp_event import DpEvent

__all__ = ["DpEvent", "dp_event"]

_NAME = "dp_accounting.dp_event"


def _events() -> ModuleType:
    """Returns the module of events, without running the package around it."""
    if _NAME not in sys.modules:
        package = find_spec("dp_accounting")
        spec = None
        if package is not None:
            spec = PathFinder.find_spec(_NAME, package.submodule_search_locations)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {_NAME!r}", name=_NAME)
        sys.modules[_NAME] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[_NAME]


if not TYPE_CHECKING:
    dp_event = _events()
    DpEvent = dp_event.DpEvent
