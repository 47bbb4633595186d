"""The baselines of a run: their names, their settings and those that a method has by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithms import Algorithm
from ..algorithms.base import BASELINES
from ..errors import ConfigError
from .inputs import is_auto

if TYPE_CHECKING:
    from .trainer import Trainer


def named_baselines(
    baselines: Sequence[str | Algorithm], algorithm: Algorithm, alone: Algorithm | None = None
) -> dict[str, Algorithm]:
    """Returns the baselines of an algorithm by name, without the algorithm itself.

    Args:
        baselines: names, built with the algorithm's own local solver, or algorithms.
        algorithm: the one that they are compared with.
        alone: the baseline ``"local"`` of a method without an exact local fit; None for local
            training.

    Raises:
        ConfigError: an unknown name, a name twice, or a method in rounds beside one whose clients
            act one at a time.
    """
    if isinstance(baselines, str) or not isinstance(baselines, Iterable):
        raise ConfigError(f"baselines is {baselines!r}; give a list, such as ['local', 'fedavg'].")
    exact = algorithm.local_baseline() or alone
    accepted = [] if exact is None else ["local"]
    # A schedule of clocks has no rounds, and its budget is another one.
    if algorithm.one_at_a_time and list(baselines) not in ([], accepted):
        raise ConfigError(
            f"baselines is {list(baselines)!r}; {algorithm.name} does not go in rounds; accepted: "
            f"{accepted}, others run apart."
        )
    built: dict[str, Algorithm] = {}
    for item in baselines:
        if item == algorithm.name and item in BASELINES:
            continue
        made = _made(item, algorithm, exact)
        if made.name in built:
            raise ConfigError(f"baselines has {made.name!r} twice.")
        built[made.name] = made
    return built


def _made(item: str | Algorithm, algorithm: Algorithm, exact: Algorithm | None) -> Algorithm:
    """Returns the baseline of a name with the local solver of ``algorithm``, or the given one."""
    if isinstance(item, str) and item in BASELINES:
        if item == "local" and exact is not None:
            return exact
        kind: Any = BASELINES[item]
        if algorithm.local is None:
            return kind()  # type: ignore[no-any-return]
        return kind(local=algorithm.local)  # type: ignore[no-any-return]
    if not isinstance(item, Algorithm):
        names = f"{', '.join(sorted(BASELINES))}, or algorithm objects"
        raise ConfigError(f"baselines has {item!r}; accepted: {names}.")
    return item


def usual_baselines(settings: Trainer) -> tuple[str, ...]:
    """Returns the baselines of ``baselines="auto"``.

    Replicates have none. A single run has the exact local fit if there is one, otherwise local
    training and FedAvg; FedAvg itself is compared with PMTL.
    """
    algorithm = settings.algorithm
    if settings.runs > 1:
        return ()
    if is_auto(algorithm) or algorithm.local_baseline() is not None:
        return ("local",)
    if algorithm.one_at_a_time:
        return ()
    return ("local", "pmtl" if algorithm.name == "fedavg" else "fedavg")
