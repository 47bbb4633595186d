"""fedmtl: private, personalized federated learning in PyTorch.

The public names stand in one list, the stub ``__init__.pyi`` that type checkers read. Each is
imported on first use, so that the command line starts without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ._imports import uncollected

__version__ = "0.1.0"


def _exports() -> dict[str, str]:
    """Returns the module of every public name; every line of the stub reads ``from MODULE import
    NAME as NAME``."""
    lines = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    return {
        name: module
        for _, module, _, name, *_ in (line.split() for line in lines if line.startswith("from ."))
    }


_EXPORTS = _exports()
__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _EXPORTS[name]
    with uncollected():
        if module == ".":
            return import_module(f".{name}", __name__)
        return getattr(import_module(module, __name__), name)
