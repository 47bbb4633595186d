"""The baselines of a run: their names, their settings and those that a method has by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithms import Algorithm
from ..algorithms.base import BASELINES
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local.losses import Loss, is_of_numbers
from .metrics import kind_of
from .trainer_arguments import is_auto

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


def has_tuned_local(data: FederatedDataset, loss: str | Loss) -> bool:
    """Returns True if the baseline ``"local"`` of a linear model is tuned by the clients on their
    own records, whatever the algorithm.

    It is for one real target, and for classes of a table. Classes of other data, such as images,
    have many parameters, of which such models take minutes, and are no better than local training.

    Args:
        data: of the clients.
        loss: of the run, or ``"auto"``.
    """
    kind = kind_of(data.spec)
    if kind == "number":
        return is_of_numbers(loss) or loss in ("auto", "mse", "half_mse")
    of_classes = ("auto", "cross_entropy", "binary_cross_entropy")
    return kind == "classes" and data.schema is not None and loss in of_classes


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
