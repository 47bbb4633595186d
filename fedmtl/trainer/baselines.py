"""Comparison methods by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..algorithms.base import BASELINES, Algorithm
from ..errors import ConfigError


def named_baselines(baselines: Sequence[str | Algorithm], algorithm: Algorithm) -> dict[str, Algorithm]:
    """The comparison algorithms by name, without the algorithm itself.

    ``"local"`` of a linear method is the exact fit of each client's own records.

    Args:
        baselines: names, built with the algorithm's own local solver, or algorithms.
        algorithm: what they are compared with.

    Raises:
        ConfigError: an unknown name, or a name twice.
    """
    if isinstance(baselines, str) or not isinstance(baselines, Iterable):
        raise ConfigError(f"baselines is {baselines!r}; give a list, such as ['local', 'fedavg'].")
    exact = algorithm.local_baseline()
    accepted = ["local"] if exact is not None else []
    if algorithm.one_at_a_time and list(baselines) not in ([], accepted):
        raise ConfigError(
            f"baselines is {list(baselines)!r}; {algorithm.name} does not go in rounds; accepted: {accepted}, "
            "others run apart."
        )
    solver = algorithm.local
    built: dict[str, Algorithm] = {}
    names = f"{', '.join(sorted(BASELINES))}, or algorithm objects"
    for item in baselines:
        if isinstance(item, str):
            if item not in BASELINES:
                raise ConfigError(f"baselines has {item!r}; accepted: {names}.")
            if item == algorithm.name:
                continue
            if item == "local" and exact is not None:
                built[item] = exact
                continue
            item = BASELINES[item](**({} if solver is None else {"local": solver}))
        if not isinstance(item, Algorithm):
            raise ConfigError(f"baselines has {item!r}; accepted: {names}.")
        if item.name in built:
            raise ConfigError(f"baselines has {item.name!r} twice.")
        built[item.name] = item
    return built


def usual_baselines(algorithm: Algorithm) -> tuple[str, ...]:
    """What ``baselines=auto`` is: the exact local fit where there is one, else local training and FedAvg, and
    beside FedAvg PMTL."""
    if algorithm.local_baseline() is not None:
        return ("local",)
    if algorithm.one_at_a_time:
        return ()
    return ("local", "pmtl" if algorithm.name == "fedavg" else "fedavg")
