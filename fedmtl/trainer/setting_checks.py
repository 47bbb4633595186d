"""Checks of a trainer's settings: a setting of another kind, or that does not fit, is refused by
its name."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._rounding import rounded_up
from ..algorithms import Algorithm, FedAvg, ServerOptimizer
from ..algorithms.finetune import Personalization
from ..data import FederatedDataset
from ..data.checks import refuse
from ..errors import ConfigError
from ..local import Execution, LocalSolver, resolve_loss
from ..local.losses import Loss, Poisson, is_of_numbers, name_of
from ..privacy import ClientPrivacy, Privacy, QuantileClip
from ..schedules import AsynchronousSchedule, Buffered, Deadline
from .baselines import named_baselines
from .callbacks import Callback
from .hooks import RunAudit
from .metrics import check_metrics
from .stopping import EarlyStopping
from .trainer_arguments import AUTO, is_auto

if TYPE_CHECKING:
    from .run_settings import Settings
    from .trainer import Trainer

_CLASSES = (
    " (K classes 0 to K - 1, or data.labels=[A, B] of other values of a table; null or None for a "
    "regression)"
)


def check_settings(settings: Settings) -> None:
    """Refuses settings of another kind, and settings that do not fit each other whatever the data.

    Args:
        settings: of a run; its data are not read.

    Raises:
        ConfigError: named.
    """
    _check_kinds(settings)
    # An automatic algorithm is chosen by the data, and its baselines after it.
    if not (is_auto(settings.algorithm) or is_auto(settings.baselines)):
        named_baselines(settings.baselines, settings.algorithm)
    check_metrics(settings.metrics)
    if not is_auto(settings.loss):
        resolve_loss(settings.loss)
    _check_replicates(settings)


def check_loss(loss: str | Loss, data: FederatedDataset, algorithm: Algorithm | str) -> None:
    """Refuses a loss of real targets beside other targets, or beside an algorithm that does not
    take it.

    Args:
        loss: of a run.
        data: of its clients.
        algorithm: of the run, or ``"auto"``.

    Raises:
        ConfigError: the setting to leave out, or to choose.
        DataError: a negative target, of a loss of counts.
    """
    if not is_of_numbers(loss):
        return
    found = resolve_loss(loss)
    name = name_of(found)
    another = "choose an algorithm that takes it, as algorithm=fedavg"
    if isinstance(algorithm, Algorithm) and algorithm.loss is not None:
        own = f"{algorithm.name} has a loss of its own, {algorithm.loss!r}"
        raise ConfigError(f"loss is {name!r}, but {own}; leave loss out, or {another}.")
    if data.classes is not None:
        raise ConfigError(
            f"loss is {name!r}, which is for real targets, but {data.name} has {data.classes} "
            "classes; leave loss out, or declare a real target, as data.classes=null."
        )
    if isinstance(found, Poisson):
        _check_counts(data)


def _check_counts(data: FederatedDataset) -> None:
    """Refuses targets that are no counts, or on a scale on which the loss of counts has no
    meaning."""
    # Outputs would be logarithms of logarithms.
    if data.target_scale == "log":
        raise ConfigError(
            "loss is 'poisson', whose outputs are logarithms already; leave "
            "data.target_scale=log out."
        )
    # A public range from 0 on says it without a look at the records.
    if data.target_range is None:
        part = data.train
        accepted = "with the loss 'poisson' targets are counts from 0 on."
        refuse(part.y < 0, part.y, part.offsets, data.ids, data.name, "y", accepted)
    elif data.target_range[0] != 0:
        raise ConfigError(
            "loss is 'poisson', which needs a range of the target from 0 on, as [0, 30], but it "
            f"is {list(data.target_range)}; change data.bounds of the target."
        )


def _check_kinds(settings: Settings) -> None:
    """Refuses a setting that is an object of another kind."""
    algorithm = settings.algorithm
    finetune = settings.finetune
    local, optimizer = (getattr(algorithm, name, None) for name in ("local", "server_optimizer"))
    server = (
        "None or a ServerOptimizer, such as ServerOptimizer(lr=0.3, options={'momentum': 0.9}), on "
        "the command line 'algorithm.server_optimizer={_target_: fedmtl.ServerOptimizer, lr: 0.3, "
        "options: {momentum: 0.9}}'"
    )
    privacy = "ClientPrivacy(...), such as ClientPrivacy(epsilon=3.0), RecordPrivacy(...) or None"
    for name, value, kinds, accepted in (
        ("algorithm", algorithm, Algorithm, "an algorithm object such as PMTL(lam=1.0)"),
        ("privacy", settings.privacy, Privacy | None, privacy),
        (
            "folder",
            settings.folder,
            str | os.PathLike | None,
            "a path, as text or Path, or None to keep nothing",
        ),
        ("execution", settings.execution, Execution, "Execution(chunk=..., processes=...)"),
        ("audit", settings.audit, RunAudit | None, "Interval(canaries=200) or None"),
        (
            "early_stopping",
            settings.early_stopping,
            EarlyStopping | None,
            "EarlyStopping(patience=3) or None",
        ),
        (
            "finetune",
            finetune,
            Personalization | None,
            "Finetune(...), Average(...), the name of a method such as 'average', or None",
        ),
        (
            "the algorithm's local",
            local,
            LocalSolver | None,
            "a local solver, such as LocalSGD(lr=0.1)",
        ),
        ("the algorithm's server_optimizer", optimizer, ServerOptimizer | None, server),
    ):
        if not isinstance(value, kinds) and not (name in AUTO and is_auto(value)):
            raise ConfigError(f"{name} is {value!r}; give {accepted}.")
    if not is_auto(algorithm) and not isinstance(getattr(algorithm, "name", None), str):
        raise ConfigError(
            f"{type(algorithm).__name__} has no name, which results and reports need; give its "
            "class one, such as name = 'mine'."
        )
    if is_auto(algorithm) and isinstance(settings.schedule, Buffered):
        raise ConfigError(
            "algorithm=auto chooses among methods that need one public state for all clients of a "
            "round; beside Buffered(...) choose one, such as algorithm=fedavg, or leave the "
            "schedule out."
        )
    if not is_auto(settings.schedule):
        # Every automatic algorithm goes in rounds, as this one does.
        check_schedule(
            FedAvg() if is_auto(algorithm) else algorithm,
            settings.schedule,
            settings.privacy,
        )
    if (
        isinstance(algorithm, Algorithm)
        and algorithm.loss is not None
        and isinstance(finetune, Personalization)
    ):
        raise ConfigError(
            f"finetune keeps the loss of the run, but {algorithm.name} has a loss of its own; use "
            "finetune=none."
        )
    # A class in place of an object would fail at its first call, after the first charge.
    listed = isinstance(settings.callbacks, Iterable)
    if not listed or not all(isinstance(callback, Callback) for callback in settings.callbacks):
        raise ConfigError(
            f"callbacks is {settings.callbacks!r}; give a list of objects of classes derived from "
            "fedmtl.Callback."
        )


def check_schedule(algorithm: Algorithm, schedule: Any, privacy: Privacy | None) -> None:
    """Refuses a schedule or a protected unit that the algorithm cannot have.

    Args:
        algorithm: with its settings.
        schedule: of rounds or of activations.
        privacy: of the run; None without noise.

    Raises:
        ConfigError: named.
    """
    if isinstance(schedule, type) or not hasattr(schedule, "bind"):
        raise ConfigError(
            f"schedule is {schedule!r}; give a sampler such as PoissonSampling(cohort=100)."
        )
    clocked = isinstance(schedule, AsynchronousSchedule)
    if algorithm.one_at_a_time:
        if not clocked:
            raise ConfigError(
                f"{algorithm.name} has clients that act one at a time; its schedule is "
                f"PoissonClocks(...) or Latencies(...), not {type(schedule).__name__} "
                "(schedule=clocks or latency by name)."
            )
        if isinstance(privacy, ClientPrivacy):
            raise ConfigError(
                f"{algorithm.name} protects single records: its privacy is RecordPrivacy(...) or "
                "None (privacy=record or none by name)."
            )
    if isinstance(schedule, Buffered):
        algorithm.check_starts()
        if privacy is not None and isinstance(privacy.clip_norm, QuantileClip):
            raise ConfigError(
                "Buffered weighs clipped rows by their staleness, so a QuantileClip counts all of "
                "them as short; clip_norm is a number."
            )
    adaptive = isinstance(privacy, ClientPrivacy) and isinstance(privacy.clip_norm, QuantileClip)
    # its count would take the late for long rows, and the norm would grow with their share
    if isinstance(schedule, Deadline) and adaptive:
        raise ConfigError(
            "Deadline leaves late clients out, so a QuantileClip counts all of them as long; "
            "clip_norm is a number."
        )
    shared = privacy is not None and privacy.aggregation is not None
    # nodes that are late miss the roster, and the noise of a smaller one is larger
    if isinstance(schedule, Deadline) and shared:
        raise ConfigError(
            "Deadline is of sums by a trusted server, and privacy.aggregation has its own: "
            "give the sampler of Deadline as the schedule. Over nodes the limit is the patience of "
            "server_app."
        )
    if clocked and not algorithm.one_at_a_time:
        raise ConfigError(
            f"{algorithm.name} goes in rounds; its schedule is a sampler such as "
            f"PoissonSampling(cohort=100), not {type(schedule).__name__}."
        )


def _check_replicates(settings: Settings) -> None:
    """Refuses replicates with impossible budgets, of an algorithm that cannot compute them as one
    program, with noise that is not simulated, without one budget to set, or with a setting of a
    single run."""
    algorithm = settings.algorithm
    privacy = settings.privacy
    epsilons = settings.epsilons
    if epsilons is not None:
        listed = (
            isinstance(epsilons, Sequence) and not isinstance(epsilons, str) and len(epsilons) > 0
        )
        # A bool is a number in Python, and True would be a budget of 1.
        real = listed and all(
            isinstance(v, numbers.Real) and not isinstance(v, bool) and float(v) > 0
            for v in epsilons
        )
        if not real or len(set(epsilons)) < len(epsilons):
            raise ConfigError(
                f"{type(settings).__name__}.epsilons is {epsilons!r}; it must be a list of "
                "different budgets above 0, such as [1, 3, 10], or None."
            )
        if (
            privacy is None
            or privacy.noise_multiplier is not None
            or isinstance(privacy.epsilon, Mapping)
        ):
            texts = ", ".join(rounded_up(value, 6) for value in epsilons)
            raise ConfigError(
                f"epsilons is [{texts}], which are set in place of one budget, privacy.epsilon; "
                "without privacy, "
                "beside privacy.noise_multiplier or beside budgets by client leave it out."
            )
    count = settings.replicates * len(epsilons or (0,))
    if count == 1:
        return
    if algorithm == "auto":
        raise ConfigError(
            "algorithm=auto chooses settings for one run; leave replicates and epsilons out."
        )
    if type(algorithm).models is Algorithm.models:
        methods = (kind for kind in _kinds_of(Algorithm) if kind.models is not Algorithm.models)
        able = ", ".join(sorted({kind.name for kind in methods if hasattr(kind, "name")}))
        raise ConfigError(
            f"replicates: {algorithm.name} cannot compute {count} runs as one program; accepted: "
            f"{able}. Others are swept: fedmtl -m seed=1,2,3."
        )
    # Each replicate releases the same records once more, and none is charged for.
    if privacy is not None and privacy.source != "seeded":
        raise ConfigError(
            f"replicates: {count} runs on the same records are a simulation, and cost {count} "
            "times the epsilon of one; they need privacy.source='seeded'."
        )
    # These look at one model of one run.
    for name in ("baselines", "early_stopping", "evaluate_clients", "finetune"):  # of a single run
        value = getattr(settings, name)
        if not (value is None or is_auto(value) or value in ((), [])):
            raise ConfigError(
                f"replicates: {name} is {value!r}; {count} runs as one program have none."
            )


def _kinds_of(kind: type[Algorithm]) -> Iterator[type[Algorithm]]:
    """Yields the classes that are derived from one."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds_of(derived)


def check_declared(settings: Trainer) -> None:
    """Refuses, in a run with noise, classes or categories that were read off the records, and
    columns of a table without public ranges.

    The number of classes and of categories is the shape of the model, which is published without
    noise.
    """
    data = settings.data
    if not data.inferred or settings.noiseless:
        return
    classes = "classes" in data.inferred
    coded, numbers = (
        [name.removeprefix(kind) for name in data.inferred if name.startswith(kind)]
        for kind in ("categories.", "range.")
    )
    shape = ["the number of classes"] * classes + [
        f"the categories of {', '.join(map(repr, coded))}"
    ] * bool(coded)
    published = (
        "came from the records, and would be published without noise as the shape of the model"
    )
    # The sentence has a part for each kind of missing fact, and the same in both languages.
    problems = [f"{' and '.join(shape)} {published}"] * bool(shape)
    problems += [f"no public range is declared for {', '.join(map(repr, numbers))}"] * bool(numbers)
    words = ["data.classes=K"] * classes
    python = ["classes=K"] * classes
    bounds = dict.fromkeys(coded, "[A, B, ...]") | dict.fromkeys(numbers, "[LOW, HIGH]")
    if bounds:
        words.append(
            f"'data.bounds={{{', '.join(f'{name}: {value}' for name, value in bounds.items())}}}'"
        )
        python.append(
            f"bounds={{{', '.join(f'{name!r}: {value}' for name, value in bounds.items())}}}"
        )
    place = "FederatedDataset.from_tensors(clients"
    if bounds:
        place = "load_data('table', ..."
    raise ConfigError(
        f"{data.name}: {'; '.join(problems)}. Give them: {' '.join(words)} on the command line, "
        f"{place}, {', '.join(python)}) in Python"
        + (_CLASSES if classes else "")
        + ("; fedmtl check of the same data writes a draft of them." if bounds else ".")
    )
