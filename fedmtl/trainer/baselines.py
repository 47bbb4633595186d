"""Comparison methods by name."""

from __future__ import annotations

from collections.abc import Sequence

from ..algorithms import PMTL, FedAvg, FedProx, Local
from ..algorithms.base import Algorithm, AnyAlgorithm, AsyncAlgorithm
from ..errors import ConfigError
from ..optim import LocalSolver

_NAMES = {"local": Local, "fedavg": FedAvg, "fedprox": FedProx, "pmtl": PMTL}


def named_baselines(baselines: Sequence[str | Algorithm], algorithm: AnyAlgorithm) -> dict[str, Algorithm]:
    """The comparison algorithms by name, without the algorithm itself.

    Args:
        baselines: names, built with the algorithm's own local solver, or algorithms.
        algorithm: what they are compared with.

    Raises:
        ConfigError: an unknown name, or a name twice.
    """
    if isinstance(baselines, str):
        raise ConfigError(f"baselines is {baselines!r}; give a list, such as ['local', 'fedavg'].")
    if baselines and isinstance(algorithm, AsyncAlgorithm):
        raise ConfigError(f"baselines is {list(baselines)!r}; {algorithm.name} has another schedule; run them apart.")
    solver: LocalSolver | None = getattr(algorithm, "local", None)
    built: dict[str, Algorithm] = {}
    for item in baselines:
        if isinstance(item, str):
            if item not in _NAMES:
                raise ConfigError(f"baselines has {item!r}; accepted: {', '.join(_NAMES)}, or algorithm objects.")
            if item == algorithm.name:
                continue
            item = _NAMES[item]() if solver is None else _NAMES[item](local=solver)
        if item.name in built:
            raise ConfigError(f"baselines has {item.name!r} twice.")
        built[item.name] = item
    return built
