"""What tells the runs of a report apart: their resolved settings, and short names for those that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import DataError
from ._names import title_of

DATA = ("data", "clients")
METHOD = (*DATA, "lam", "mu", "update", "server_lr", "finetune", "sampler", "planned_rounds")
PRIVACY = ("clip_norm", "relation", "guarantee", "source")  # of what is released

_NO_MATTER = {  # settings that do not say what was computed, or that have a column of their own
    *("baselines", "logger", "progress", "device", "execution", "client_store", "checkpoint_every", "eval_every"),
    "evaluate_clients",
    *("metrics", "replicates", "epsilons", "guarantee", "data.cache"),
    *("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier"),
}
_OF_BASELINES = ("data", "model", "trainable", "loss", "dtype", "schedule", "rounds", "finetune", "algorithm.local")
_PLAIN_WORDS = {"algorithm", "local", "model", "data", "privacy", "schedule"}  # that a short name goes without
_WORDY = ("model.layers",)  # shown only where nothing shorter tells two groups apart
_LONGEST = 24

Settings = Mapping[str, str]


def configuration(run: Path, result: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """Return every setting of a run as text by its dotted key, and the keys that its command line named.

    They come from ``private/config.yaml`` or, of a run that no command made, from its result. Lists are one value; what
    is null is left out, as if it was not there; an object is its class under its own key.

    Returns:
        The settings, empty for a run that says none, and the named keys, or None where there was no command.

    Raises:
        DataError: a configuration that is not YAML.
    """
    file = run / "private" / "config.yaml"
    if not file.is_file():
        return flat(result.get("configuration") or {}), None
    from omegaconf import OmegaConf

    try:
        text = file.read_text(encoding="utf-8")
        stored = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:
        raise DataError(f"{file} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(stored, dict) or "search" in stored:
        return {}, None
    named = re.findall(r"(?<=\s)'?[+]{0,2}([\w./@]+)=", command_of(run) or "")
    return flat(stored), tuple(name.rpartition("@")[2].replace("/", ".") for name in named)


def command_of(run: Path) -> str | None:
    """Return the command that made a run, as its configuration has it; None for a run of a program."""
    file = run / "private" / "config.yaml"
    first = file.read_text(encoding="utf-8").partition("\n")[0] if file.is_file() else ""
    return first.removeprefix("#").strip() if first.startswith("#") else None


def value_text(value: Any) -> str:
    """Return a setting in words: lists and the parts of an object one after the other."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(one)}" for name, one in value.items() if name != "class")
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_baseline(settings: Settings, *, releases: bool) -> dict[str, str]:
    """Return those of a run's settings that its baselines share; those of privacy where they release something."""
    shared = (*_OF_BASELINES, *["privacy"] * releases)
    return {key: value for key, value in settings.items() if _within(key, shared)}


def seeds_of(settings: Settings, seed: str) -> str:
    """Return the seed of a run, with all of its seeds that are another, such as ``"0, data.seed 3"``."""
    own = seed.partition(".")[0]  # of replicates it is followed by their place
    others = [f"{key} {value}" for key, value in settings.items() if _is_seed(key) and value != own]
    return ", ".join([seed, *others])


def telling(settings: Settings) -> dict[str, str]:
    """Return the settings that tell experiments apart: all but seeds and what changes no number."""
    return {key: value for key, value in settings.items() if not _is_seed(key) and not _within(key, _NO_MATTER)}


def labels_of(
    groups: Sequence[tuple[str, Settings, tuple[str, ...] | None]], cells: Sequence[Any], classes: Sequence[Any]
) -> list[str]:
    """Return a short label of each group: its method, and what differs between the groups of one class.

    That is what the command lines named, and as much of the rest as keeps groups of one cell apart.

    Args:
        groups: of each its method, settings and named keys.
        cells: groups of one cell must not have one label, as those at one epsilon.
        classes: groups whose settings are compared, as those of one method and data.
    """
    labels = [""] * len(groups)
    for one in dict.fromkeys(classes):
        members = [place for place, other in enumerate(classes) if other == one]
        shown = _shown([groups[place] for place in members], [cells[place] for place in members])
        names = _short_names(shown)
        for place in members:
            method, settings, _ = groups[place]
            words = [f"{names[key]} {_short_value(settings[key])}" for key in shown if key in settings]
            labels[place] = ", ".join([title_of(method), *words])
            if words:
                labels[place] = labels[place].replace(", ", " ", 1)
    taken: set[tuple[Any, str]] = set()
    for place, (cell, label) in enumerate(zip(cells, labels, strict=True)):
        free = (name for number in count(1) if (name := label + (f" ({number})" if number > 1 else "")))
        labels[place] = next(name for name in free if (cell, name) not in taken)
        taken.add((cell, labels[place]))
    return labels


def _shown(groups: Sequence[tuple[str, Settings, tuple[str, ...] | None]], cells: Sequence[Any]) -> list[str]:
    """Return the keys of a label, for groups of one method."""
    keys = dict.fromkeys(key for _, settings, _ in groups for key in settings)
    values = {key: [settings.get(key) for _, settings, _ in groups] for key in keys if key not in DATA}
    varying = [key for key, found in values.items() if len(_known(key, found)) > 1]
    commands = [named for _, _, named in groups if named is not None]
    named = {key for one in commands for key in one}
    groups_of = {key for key in named if key in keys}  # a group by name stands for itself, not for its parts
    short = [key for key in varying if key not in _WORDY]
    shown = [key for key in short if len(commands) < len(groups) or key in named or _within(key, named - groups_of)]

    def kinds(some: Sequence[str]) -> int:
        return len({(cell, *(values[key][place] for key in some)) for place, cell in enumerate(cells)})

    for key in [*short, *values]:
        if key not in shown and kinds([*shown, key]) > kinds(shown):
            shown.append(key)
    return [key for key in values if key in shown]


def _known(key: str, values: Iterable[str | None]) -> set[str | None]:
    """Return the different values; of privacy and of what only results name, without those that have none."""
    found = set(values)
    return found - {None} if key.startswith("privacy") or key in METHOD + PRIVACY else found


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Return settings as text by their dotted keys, an object as its class under its own; without what is null."""
    if not isinstance(node, Mapping):
        return {} if node is None or node in ({}, []) else {key: f"{node:g}" if isinstance(node, float) else str(node)}
    found: dict[str, str] = {}
    for name, value in node.items():
        if name in ("_target_", "class"):
            found[key] = str(value).rpartition(".")[2]
        else:
            found |= flat(value, f"{key}.{name}" if key else str(name))
    return found


def _within(key: str, places: Iterable[str]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return ``lr`` for ``algorithm.local.lr``, ``lora.rank`` for ``model.lora.rank``; whole keys if two are alike."""
    names = {}
    for key in keys:
        words = [word for word in key.removeprefix("planned_").split(".") if word not in _PLAIN_WORDS]
        names[key] = ".".join(words[: -1 if len(words) > 1 and words[-1] == "kind" else None]) or key
    several = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {key: key if name in several else name for key, name in names.items()}


def _short_value(value: str) -> str:
    value = re.sub(r", (?:expected )?cohort (\S+) of .*", r" \1", value)  # "Poisson, expected cohort 10 of 50 clients"
    if "/" in value and " " not in value:
        value = Path(value).name
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
