"""From command-line overrides to a trainer: find, check and compose the configuration, build its objects.

Hydra composes and sweeps; the objects are those a program would make, named by ``_target_``. What this module
adds is that every override is checked before any work, that errors name the key and what is accepted, and that a
file makes nothing but what :func:`fedmtl.trainer.targets.resolved_target` lets it name.
PyTorch is imported only by :func:`settings` and :func:`build`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._check import one_of, positive_int
from .._imports import uncollected
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import flat

if TYPE_CHECKING:
    from ..trainer import Trainer

Config = dict[str, Any]
TRUST: ContextVar[tuple[str, ...]] = ContextVar("TRUST", default=())
"""Modules that this command line trusts, beside this package."""
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune")
_INTERNAL = ("hydra", "scales", "tuned")  # how configuration files talk to each other, not settings
_INNER_NAMES = {  # settings that an algorithm hands on to a class or function of its own
    "LinearLoss.name": "algorithm.loss",
    "wakeup_weights.policy": "algorithm.allocation",
    "knn_cosine.k": "algorithm.graph.k",
}
_REMOVED = {  # settings of earlier versions, and what there is instead
    "privacy.observer": "epsilon holds against all other clients",
    "privacy.accountant": "epsilon is computed from privacy loss distributions",
    "schedule.max_cohort": "use schedule=poisson, which has no cap, or schedule=fixed",
    **dict.fromkeys(("schedule.latency.low", "schedule.latency.high"), "use law and parameters of scipy.stats there"),
    "algorithm.release": "a single one is algorithm=private_prior or prior_layers, several mp_mtl or mp_mtl_layers",
    "algorithm.absences": "agents that are away are the schedule's, schedule.dropouts",
    "algorithm.arrivals": "every record is there from the start",
    "algorithm.departed": "the models of agents that are away count as they were broadcast last",
    "algorithm.warm_start": "a run starts from algorithm.start, a public constant",
    "algorithm.warm_lam": "a run starts from algorithm.start, a public constant",
    "guarantee": "what a paper prescribes is algorithm=NAME_published",
    "privacy.guarantee": "what a paper prescribes is algorithm=NAME_published",
    "algorithm.guarantee": "what a paper prescribes is algorithm=NAME_published",
    **dict.fromkeys(
        ("algorithm.gauss_seidel", "algorithm.exact_q", "algorithm.query_epsilon"),
        "algorithm=pp_dmtl_published takes the steps and the noise that Algorithm 1 prints",
    ),
    "algorithm.method": "use algorithm=async_learner, public_start or moments",
    "execution.graphs": "local steps run as they are, on every device",
    "execution.data": "data are on the run's device",
    "execution.tf32": "set torch.backends.cuda.matmul.allow_tf32",
    "execution.convolutions": "convolutions are PyTorch's, on a GPU as well",
    "client_store": "the tensors that clients keep are read from the files of the run",
    "algorithm.bound": "give algorithm.row_norm and a clip norm that no gradient exceeds",
    "algorithm.domain": "use algorithm.row_norm, of the features without a bias, and algorithm.target",
    "algorithm.idle_confidence": "an agent without records has the confidence 0.001",
    "algorithm.groups": "every owner answers with its own noise",
    "algorithm.frequencies": "weights of owners by how often they answer are in benchmarks/reproduce/cost_of_privacy",
    "algorithm.psi": "the cost of privacy of a run is forecast by fedmtl.algorithms.cost_of_privacy",
}
for _data, _experiment in (("adult", "svm"), ("hospital", "hospital"), ("lending", "lending")):
    _REMOVED[f"data={_data}"] = _REMOVED[f"experiment=cost_of_privacy_{_experiment}"] = (
        "its reader is in benchmarks/reproduce/cost_of_privacy, and its README says how to read it by command"
    )


def config_folder() -> Path:
    """Return the folder of the Hydra groups: inside the package in a wheel, beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the configuration files are missing: neither {package} nor its parent has configs/.")


def choices(folder: Path) -> dict[str, dict[str, str]]:
    """Return every group with its options; an option comes with the comment that opens its file."""
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir is {folder}, which is no folder; give one with groups, such as mine/algorithm/."
        )
    options: dict[str, dict[str, str]] = {}
    for file in sorted(folder.glob("*/**/*.yaml")):
        group = file.parent.relative_to(folder).as_posix()
        comments = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        words = [line[2:] for line in comments if not line.startswith("# @")]
        options.setdefault(group, {})[file.stem] = words[0] if words else ""
    return options


def check(overrides: Sequence[str], *, multirun: bool = False, extra: Path | None = None) -> list[Config]:
    """Return the resolved configuration of each run, after refusing overrides that no run can use: unknown keys and
    options, missing and impossible values.

    Args:
        overrides: as typed.
        multirun: every combination of listed values is checked.
        extra: a folder with further configuration files, searched first.

    Raises:
        ConfigError: the first problem, naming the key.
    """
    configs = []
    for combination in combinations(overrides, multirun=multirun):
        check_names(combination, extra)
        configs.append(resolve(compose(tuple(combination), extra)))
        settings(configs[-1])
    return configs


def combinations(overrides: Sequence[str], *, multirun: bool) -> Iterator[list[str]]:
    """Return one list of overrides for each run of a sweep, in Hydra's order; the only one when nothing is swept.

    Of a key that is given twice the last value counts, in the place of the first.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    axes: dict[str, list[str]] = {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"cannot read {text!r}: {first_line(error)}.") from error
        if override.is_sweep_override():
            if not multirun:
                listed = f", or write {text.replace('=', '=[')}] for a list" if text.startswith("epsilons=") else ""
                raise ConfigError(f"{text} lists several values; add -m to run each of them{listed}.")
            if not override.is_discrete_sweep():
                raise ConfigError(f"{text} is no list of values; write KEY=A,B,C or KEY=range(1,4).")
            key = override.get_key_element()
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            axes[override.get_key_element()] = [text]
    return (list(combination) for combination in itertools.product(*axes.values()))


def hydra_base() -> dict[str, str]:
    """Return the argument by which Hydra 1.3 behaves as later versions do, which warn of it."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@lru_cache(maxsize=64)
def compose(overrides: tuple[str, ...], extra: Path | None = None) -> Any:
    """Return the composed configuration, its interpolations unresolved.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    search = [f"hydra.searchpath=[file://{extra.resolve()}]"] if extra is not None else []
    try:
        with initialize_config_dir(str(config_folder()), **hydra_base()):
            return hydra_compose("config", overrides=[*overrides, *search])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{first_line(error)}.") from error


def resolve(config: Any) -> Config:
    """Return plain values: nothing missing, every reference resolved, without what only helped to get there.

    Raises:
        ConfigError: a required value is missing, or a reference leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, OmegaConfBaseException

    scale = str(OmegaConf.to_container(config, resolve=False)["scale"])  # type: ignore[index,call-overload]
    if scale not in config.scales:
        hint = "" if len(config.scales) > 1 else " (other sizes come with an experiment=...)"
        raise ConfigError(f"scale is {scale!r}; accepted: {', '.join(config.scales)}{hint}.")
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is required; add {missing[0]}=VALUE.")
        plain = OmegaConf.to_container(config, resolve=True)
    except InterpolationToMissingValueError as error:
        key = first_line(error).rpartition(" ")[2]
        raise ConfigError(f"{key} is required; add {key}=VALUE.") from error
    except InterpolationKeyError as error:
        reference = re.search(r"'(.+)'", first_line(error))
        key = reference.group(1) if reference else "?"
        group = f"the chosen {key.split('.')[0]} has not" if "." in key else "is no setting"
        raise ConfigError(f"{error.full_key} is read from {key}, which {group}; choose another, or set it.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{first_line(error)}.") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in (*_INTERNAL, "scale")}


def settings(config: Config) -> Config:
    """Return the objects of a resolved configuration that need no data; everything that can be checked is checked.

    Returns:
        Arguments for :class:`fedmtl.Trainer`, without ``data`` and ``folder``.

    Raises:
        ConfigError: an impossible value, named by its key.
    """
    with ByKey(config):
        _check_plain(config)  # before the imports, which take seconds
    with uncollected(frozen="torch" not in sys.modules):  # else the process is another's, or began before
        from .. import models
        from ..local import Execution
        from ..trainer import EarlyStopping
        from ..trainer.baselines import named_baselines, usual_baselines
        from ..trainer.metrics import check_metrics
        from ..trainer.problem import resolve_device
        from ..trainer.replicates import Replicates

    model, adapters, fixed = _plain_model(config)
    objects = {group: instantiate_group(config | {"model": model}, group) for group in GROUPS if group != "data"}
    objects["evaluate_clients"] = config.get("evaluate_clients")
    logger = config.get("logger")
    if logger and "_target_" not in logger:
        raise ConfigError(f"logger is {logger!r}; accepted: logger=none, or a _target_ with its settings.")
    with ByKey(config):
        if fixed:
            objects["model"] = models.fix(objects["model"])
        if adapters is not None:
            objects["model"] = models.lora(objects["model"], **adapters)
        execution = config["execution"]
        by_name = execution if isinstance(execution, Mapping) else {"strategy": execution}
        objects["execution"] = Execution(**_fields("execution", by_name, Execution))
        if config["early_stopping"] is not None:
            objects["early_stopping"] = EarlyStopping(
                **_fields("early_stopping", config["early_stopping"], EarlyStopping)
            )
        asked = config.get("metrics") or ()
        check_metrics(asked)
        objects["metrics"] = tuple(asked)
        objects["baselines"] = config["baselines"] or ()
        repeated = Replicates(config["replicates"], config["epsilons"])
        if objects["baselines"] == "auto":
            objects["baselines"] = usual_baselines(objects["algorithm"]) if repeated.count == 1 else ()
        named_baselines(objects["baselines"], objects["algorithm"])
        stopping, sample = objects.get("early_stopping"), objects["evaluate_clients"]
        repeated.check(objects["algorithm"], objects["privacy"], stopping, objects["baselines"], sample)
        resolve_device(config["device"])
    objects["baselines"] = tuple(objects["baselines"])
    names = ("rounds", "seed", "loss", "device", "dtype", "eval_every", "checkpoint_every", "progress")
    objects |= {"replicates": config["replicates"], "epsilons": config["epsilons"]}
    objects["trainable"] = config.get("trainable")  # folders of earlier versions have none
    return objects | {name: config[name] for name in names}


def _check_plain(config: Config) -> None:
    """Check the settings that are numbers and words of their own."""
    positive_int("Trainer", rounds=config["rounds"], replicates=config["replicates"])
    for name in ("eval_every", "checkpoint_every", "evaluate_clients"):  # folders of earlier versions lack the last
        if config.get(name) is not None:
            positive_int("Trainer", **{name: config[name]})
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int):
        raise ConfigError(f"seed is {config['seed']!r}; it must be a whole number.")
    one_of("Trainer", ("float32", "float64"), dtype=config["dtype"])


def _plain_model(config: Config) -> tuple[Any, Any, bool]:
    """Return the description of the model alone, that of its low-rank adapters, and whether its layers are replaced: of
    every model, not its own."""
    model = config.get("model")
    if not isinstance(model, Mapping):
        return model, None, False
    adapters, fixed = model.get("lora"), model.get("fix", False)
    if adapters is not None:
        adapters = _named("model.lora", adapters, ("rank", "alpha", "targets"))
    if not isinstance(fixed, bool):
        raise ConfigError(f"model.fix is {fixed!r}; accepted: true or false.")
    return {name: value for name, value in model.items() if name not in ("lora", "fix")}, adapters, fixed


def _fields(key: str, values: Any, kind: type) -> Config:
    """Return ``values`` as arguments of a dataclass; refuse one by key where it has none of that name."""
    return _named(key, values, [field.name for field in dataclasses.fields(kind)])


def _named(key: str, values: Any, accepted: Sequence[str]) -> Config:
    """Return ``values`` as arguments of these names; refuse one by key that has another."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key} is {values!r}; accepted: null, or a mapping of {', '.join(accepted)}.")
    for name in values:
        if f"{key}.{name}" in _REMOVED:
            raise ConfigError(f"{key}.{name} is gone: {_REMOVED[f'{key}.{name}']}.")
        if name not in accepted:
            raise ConfigError(f"unknown key {key}.{name}; accepted: {', '.join(accepted)}.")
    return {str(name): value for name, value in values.items()}


def build(config: Config, folder: Path) -> Trainer:
    """Return the trainer of a resolved configuration, for which the data are read.

    Raises:
        FedmtlError: an impossible value or malformed data, named by its key, file, client or field.
    """
    from ..trainer import Trainer

    objects = settings(config)
    logger = dict(config.get("logger") or {})
    if "folder" in logger:
        logger["folder"] = str(folder / logger["folder"])
    if "parameters" in logger:
        logger["parameters"] = flat(config) | logger["parameters"]
    callbacks = (instantiate_group({"logger": logger}, "logger"),) if logger else ()
    data = instantiate_group(config, "data")
    with ByKey(config):
        return Trainer(data=data, folder=folder, callbacks=callbacks, **objects)


def with_logger(config: Config, folder: Path, overrides: Sequence[str]) -> Config:
    """Return the stored settings of a run with its logger, which writes into the folder of the run or where these
    overrides say: a file does not say where else numbers of private data go.

    Args:
        config: as ``private/config.yaml`` has it.
        folder: of the run.
        overrides: settings of the logger that the user gives anew.

    Raises:
        ConfigError: another setting, or a stored place outside of the run that is not given anew.
    """
    for text in overrides:
        if text.split("=")[0].split(".")[0] != "logger":
            raise ConfigError(f"{text} is not taken here; accepted: logger=..., logger.KEY=....")
    if any(text.startswith("logger=") for text in overrides):
        check_names(overrides, None)
        return config | {"logger": resolve(compose(tuple(overrides)))["logger"]}
    logger, given = updated(config, "logger", overrides), {text.split("=")[0] for text in overrides}
    root = folder.resolve()
    for key, value in (logger or {}).items():
        inside = value is None or (isinstance(value, str) and (root / value).resolve().is_relative_to(root))
        if f"logger.{key}" in given or key not in ("folder", "tracking_uri") or (inside and key == "folder"):
            continue
        if value is not None:
            raise ConfigError(
                f"logger.{key} of {folder / 'private' / 'config.yaml'} is {value!r}, which is not in the folder of the "
                "run, and a file does not say where else a run writes. If you chose it, give it again: fedmtl resume "
                f"{folder} logger.{key}=VALUE; logger=none goes on without."
            )
    return config | {"logger": logger}


def updated(config: Config, group: str, overrides: Sequence[str]) -> Any:
    """Return the stored settings of a group with some of them replaced.

    Raises:
        ConfigError: a setting that it does not have.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.create({group: config.get(group)})
    for text in overrides:
        key = text.split("=")[0]
        if "=" not in text or OmegaConf.select(node, key, default=_MISSING) is _MISSING:
            accepted = ", ".join(f"{group}.{name}" for name in config.get(group) or () if name != "_target_")
            raise ConfigError(
                f"{text} is no setting of the run; accepted: {accepted or 'nothing'}, or {group}=OPTION and its parts."
            )
        node.merge_with_dotlist([text])
    return OmegaConf.to_container(node)[group]  # type: ignore[index, call-overload]


_MISSING = object()


class _Printed(logging.StreamHandler[Any]):
    """Writes to what standard error is at the time, as a progress bar takes its place."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Print what the package logs from ``level`` on as plain lines, and nothing twice, while the block runs."""
    log, handler = logging.getLogger("fedmtl"), _Printed()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    before = log.level, log.propagate
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def nearest(key: str, accepted: Sequence[str]) -> list[str]:
    """Return up to three accepted keys that ``key`` may have meant: the same last word, then similar spellings."""
    last = key.rsplit(".", 1)[-1]
    same = [name for name in accepted if name.rsplit(".", 1)[-1] == last]
    alike = difflib.get_close_matches(key, accepted, n=3, cutoff=0.75)
    by_last = {name.rsplit(".", 1)[-1]: name for name in accepted}
    near = [] if same else [by_last[word] for word in difflib.get_close_matches(last, by_last, n=2, cutoff=0.6)]
    return list(dict.fromkeys([*same, *alike, *near]))[:3]


def check_names(overrides: Sequence[str], extra: Path | None) -> None:
    """Check that every key and option exists, given the options that were chosen."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import DictConfig, OmegaConf

    options = choices(config_folder())
    for group, extra_options in (choices(extra) if extra is not None else {}).items():
        options.setdefault(group, {}).update(extra_options)
    parsed = [(text, OverridesParser.create().parse_override(text)) for text in overrides]
    chosen = []
    for text, override in parsed:
        group = override.key_or_group
        if group not in options:
            continue
        chosen.append(text)
        value = override.value()
        if isinstance(value, (dict, list)):
            raise ConfigError(f"{group} is {value!r}; accepted: {', '.join(options[group])}, and its parts by name.")
        if text in _REMOVED and value not in options[group]:
            raise ConfigError(f"{text} is gone: {_REMOVED[text]}.")
        if value not in options[group]:
            close = difflib.get_close_matches(str(value), options[group], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"{group} has no option {value!r}; {hint}accepted: {', '.join(options[group])}.")
    base = compose(tuple(chosen), extra)
    for text, override in parsed:
        key = override.key_or_group
        top = key.split(".")[0]
        if text in chosen or top == "hydra" or key.startswith("hydra/"):
            continue
        if override.is_add() and "." in key and top not in _INTERNAL and _has(base, top):
            continue  # what is added to a group is an argument of its object, which refuses what it has no name for
        known = OmegaConf.select(base, key, throw_on_missing=False)
        if isinstance(known, DictConfig) and "_target_" in known and not override.is_sweep_override():
            value = override.value()
            if value is not None and not isinstance(value, dict):
                parts = ", ".join(f"{key}.{name!s}" for name in known if name != "_target_")
                raise ConfigError(f"{key} is {value!r}, but it has parts; accepted: {parts}.")
        if known is not None or _has(base, key):
            continue
        if key in _REMOVED:
            raise ConfigError(f"{key} is gone: {_REMOVED[key]}.")
        parent = key.rpartition(".")[0]
        node = OmegaConf.select(base, parent) if parent else None
        if isinstance(node, DictConfig):
            under = [str(name) for name in node if name != "_target_"]
            if not under:
                raise ConfigError(f"{key} means nothing here: the chosen {parent} has no settings.")
            near = [f"{parent}.{name}" for name in difflib.get_close_matches(key.rpartition(".")[2], under, n=3)]
            hint = f"did you mean {' or '.join(near)}? " if near else _elsewhere(key, options, extra)
            raise ConfigError(f"{key} is no setting; {hint}accepted in {parent}: {', '.join(under)}.")
        if parent and _has(base, parent):
            name = key[len(parent) + 1 :]
            whole = f"write '{parent}={{{name}: {override.get_value_element_as_str()}}}'"
            raise ConfigError(f"{key} cannot be set alone, since {parent} is {node}; {whole}.")
        accepted = list(_keys(base))
        near = nearest(key, accepted)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"accepted: {', '.join(name for name in accepted if '.' not in name)}."
        )
        raise ConfigError(f"{key} is no setting; {hint}")


def _elsewhere(key: str, options: Mapping[str, Mapping[str, str]], extra: Path | None) -> str:
    """Return which other options of its group have a setting, in words; empty where none has."""
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    group = parent.replace(".", "/")
    files = [(option, folder / group / f"{option}.yaml") for option in options.get(group, ()) for folder in
             (config_folder(), extra) if folder is not None]  # fmt: skip
    found = [option for option, file in files if file.exists() and _has(OmegaConf.load(file), name)]
    return f"only with {group}={', '.join(found)}; " if found else ""


def _has(config: Any, key: str) -> bool:
    """Return whether the key is there, also with the value null or still missing."""
    from omegaconf import DictConfig, OmegaConf

    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and name in OmegaConf.to_container(node, resolve=False)  # type: ignore[operator]


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield all settings of a configuration, as dotted keys."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=False) if not isinstance(config, dict) else config
    assert isinstance(plain, dict)
    for name, value in ((str(name), value) for name, value in plain.items()):
        if name == "_target_" or (not prefix and name in _INTERNAL):
            continue
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def instantiate_group(config: Config, group: str) -> Any:
    """Return the object that ``config[group]`` describes; None for an empty description.

    Raises:
        ConfigError: a ``_target_`` that is neither of this package nor of a module in :data:`TRUST`, or one that does
            not take its settings.
    """
    if not config.get(group):
        return None
    with ByKey(config, group):
        return _made(config[group], group)


def _made(node: Any, place: str) -> Any:
    """Return the object of a mapping with ``_target_``, its parts made before it; other values as they are."""
    from ..trainer.targets import resolved_target

    if isinstance(node, list):
        return [_made(value, place) for value in node]
    if not isinstance(node, Mapping):
        return node
    parts = {name: _made(value, f"{place}.{name}") for name, value in node.items() if name != "_target_"}
    if "_target_" not in node:
        return parts
    try:
        target = resolved_target(str(node["_target_"]), TRUST.get(), logger=place == "logger")
    except ConfigError as error:
        raise ConfigError(f"{place}._target_ is {error}") from error
    try:
        return target(**parts)
    except FedmtlError:
        raise
    except Exception as error:
        reason = first_line(error)
        unknown = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", reason)
        if unknown is not None and unknown.group(1) == target.__name__:
            key = f"{place}.{unknown.group(2)}"
            accepted = ", ".join(name for name in parts if name != unknown.group(2))
            refusal = f"{key} is no setting of {target.__name__}; accepted: {accepted}"
            reason = f"{key} is gone: {_REMOVED[key]}" if key in _REMOVED else refusal
        raise ConfigError(f"{reason}.") from error


class ByKey:
    """Translate errors inside the block: they name the configuration key, not the class and attribute.

    Args:
        config: resolved.
        group: whose keys are meant where several groups name the same class.
    """

    def __init__(self, config: Config, group: str = "algorithm") -> None:
        self.config = config
        self.group = group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FedmtlError):
            cause = cause.__cause__
        if cause is not None:
            text = str(cause)
            for name, key in _INNER_NAMES.items():
                text = text.replace(name, key)
            for class_name, place in self.keys().items():
                text = re.sub(rf"\b{class_name}\.(?=\w)", f"{place}." if place else "", text)
            if text == str(error):
                return
            raise type(cause)(text) from error

    def keys(self) -> dict[str, str]:
        """Map names of classes and functions to the key of the node that names them."""
        keys = {"Trainer": "", "Execution": "execution", "EarlyStopping": "early_stopping", "lora": "model.lora"}

        def visit(node: Any, place: str) -> None:
            if isinstance(node, Mapping):
                if "_target_" in node:
                    keys[str(node["_target_"]).rpartition(".")[2]] = place
                for name, value in node.items():
                    visit(value, f"{place}.{name}" if place else str(name))

        visit(self.config, "")
        visit(self.config.get(self.group), self.group)
        return keys
