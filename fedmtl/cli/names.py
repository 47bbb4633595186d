"""Names of settings: where their files are, those that are gone, and the nearest to one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from pathlib import Path

from ..errors import ConfigError

TRUST: ContextVar[tuple[str, ...]] = ContextVar("TRUST", default=())
"""Modules that this command line trusts, beside this package."""
EXTRA: ContextVar[Path | None] = ContextVar("EXTRA", default=None)
"""The user's folder of configuration files, searched first."""
REMOVED = {  # settings of earlier versions, and what there is instead
    "scale": "an experiment at its paper's size is experiment=NAME_paper",
    "privacy.observer": "epsilon holds against all other clients",
    "privacy.accountant": "epsilon is computed from privacy loss distributions",
    "schedule.max_cohort": "use schedule=poisson, which has no cap, or schedule=fixed",
    **dict.fromkeys(("schedule.latency.low", "schedule.latency.high"), "use law and parameters of scipy.stats there"),
    "algorithm.release": "a single one is algorithm=private_prior or prior_layers, several mp_mtl or mp_mtl_layers",
    "algorithm.absences": "agents that are away are the schedule's, schedule.dropouts",
    "algorithm.arrivals": "every record is there from the start",
    "algorithm.departed": "the models of agents that are away count as they were broadcast last",
    **dict.fromkeys(("algorithm.warm_start", "algorithm.warm_lam"), "a run starts at 0"),
    "algorithm.start": "pp_dmtl_published starts from the fits of single tasks, and all others at 0",
    **dict.fromkeys(
        ("guarantee", "privacy.guarantee", "algorithm.guarantee"),
        "what a paper prescribes is algorithm=NAME_published",
    ),
    **dict.fromkeys(
        ("algorithm.gauss_seidel", "algorithm.exact_q", "algorithm.query_epsilon"),
        "algorithm=pp_dmtl_published takes the steps and the noise that Algorithm 1 prints",
    ),
    "algorithm.method": "use algorithm=async_learner, public_start or moments",
    "execution.strategy": "execution.chunk says how many clients one batched program computes",
    "execution.threads": "execution.processes says how many processes compute a run's clients",
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
    "data.progress": "a bar is there where standard error is a terminal",
    "data.categories": "use data.bounds={COLUMN: [A, B, ...]}",
    "algorithm.cap": "an owner answers schedule.per_client times at most",
    "algorithm.edge": "a value counts that is 5% beyond the spectrum of the noise",
    "algorithm.floor": "the least variance of a direction is 1/20 of that of local learning",
    "algorithm.threshold": "that of pp_dmtl is algorithm.a2 times algorithm.lam",
    "algorithm.share": "one release of a mean direction is algorithm=private_prior, of linear models",
    "algorithm.refine_across": "the last step along shared directions is algorithm=shared_directions",
    "algorithm.psi": "the cost of privacy of a run is forecast by fedmtl.algorithms.cost_of_privacy",
}
for _data, _experiment in (("adult", "svm"), ("hospital", "hospital"), ("lending", "lending")):
    REMOVED[f"data={_data}"] = REMOVED[f"experiment=cost_of_privacy_{_experiment}"] = (
        "its reader is in benchmarks/reproduce/cost_of_privacy, and its README says how to read it by command"
    )
_MANY = 12  # names in a message
GUESSED = {  # what other programs call a setting
    "lr": "algorithm.local.lr",
    "eps": "privacy.epsilon",
    "label": "data.target",
    "fraction": "schedule.cohort",
    "optimizer": "algorithm.local",
}


def config_folder() -> Path:
    """Return the folder of the Hydra groups: inside the package in a wheel, beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the configuration files are missing: neither {package} nor its parent has configs/.")


def config_folders() -> list[Path]:
    """Return the folders that are searched for groups: the user's, where there is one, then the package's."""
    return [*filter(None, [EXTRA.get()]), config_folder()]


def choices() -> dict[str, dict[str, str]]:
    """Return the groups of the package, and of the user's folder. An option comes with the comment that opens its file,
    and with the name of the user's folder."""
    options: dict[str, dict[str, str]] = {}
    for folder in reversed(config_folders()):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            comment = re.search(r"^# (?!@)(.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            words = f"{comment[1] if comment else ''}{f' ({folder})' if folder == EXTRA.get() else ''}"
            options.setdefault(group, {})[file.stem] = words.strip()
    return options


def unknown(name: str, accepted: Collection[str], near: Sequence[str], text: str, printed: str) -> ConfigError:
    """Return the error of a name that does not exist: what replaces one of an earlier version, or what may be meant and
    all that is accepted.

    Args:
        name: the setting, or the option as GROUP=OPTION.
        accepted: the names in its place.
        near: those that may be meant.
        text: what is wrong.
        printed: the command that prints all, where they are many.
    """
    if name in REMOVED:
        return ConfigError(f"{name} is gone: {REMOVED[name]}.")
    hint, every = f"did you mean {' or '.join(near)}? " if near else "", ", ".join(accepted) or "nothing"
    rest = f"{printed} prints all" if near and len(accepted) > _MANY else f"accepted: {every}"
    return ConfigError(f"{text}; {hint}{rest}.")


def nearest(key: str, accepted: Sequence[str]) -> list[str]:
    """Return up to three accepted keys that ``key`` may have meant: the same last word anywhere, then a similar one in
    its place; of a key without a place else one anywhere."""
    place, _, name = key.rpartition(".")
    last_words = {other: other.rpartition(".")[2] for other in accepted if not key.startswith(f"{other}.")}
    if name in GUESSED:
        meant = GUESSED[name]
        choose = {"algorithm": "algorithm=fedavg ", "schedule": "schedule=poisson "}.get(meant.split(".")[0], "")
        return [meant] if meant in accepted else [f"{choose}{meant}"] * bool(choose)  # automatic settings lack both
    beside = [word for other, word in last_words.items() if other == f"{place}.{word}".lstrip(".")]
    near = [other for other, word in last_words.items() if word == name]
    near += [f"{place}.{word}".lstrip(".") for word in difflib.get_close_matches(name, beside)]
    if not near and not place:
        close = difflib.get_close_matches(name, last_words.values(), n=1)
        near = [other for other, word in last_words.items() if word in close]
    return list(dict.fromkeys(near))[:3]
