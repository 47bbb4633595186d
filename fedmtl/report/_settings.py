"""The settings of runs as text, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._text import shown

_NO_MATTER = {  # settings that do not say what was computed, or that have a column of their own
    *("baselines", "logger", "progress", "device", "execution", "checkpoint_every", "eval_every"),
    "evaluate_clients",
    *("metrics", "replicates", "epsilons", "data.cache"),
    *("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier"),
}
_OF_BASELINES = ("data", "model", "trainable", "loss", "dtype", "schedule", "rounds", "finetune", "algorithm.local")

Settings = Mapping[str, str]


def command_of(run: Path) -> str | None:
    """Return the command that made a run, as its configuration has it; None for a run of a program."""
    file = run / "private" / "config.yaml"
    first = shown(file.read_text(encoding="utf-8").partition("\n")[0]) if file.is_file() else ""
    return first.removeprefix("#").strip() if first.startswith("#") else None


def value_text(value: Any) -> str:
    """Return a setting in words: lists and the parts of an object one after the other."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(part)}" for name, part in value.items() if name != "class")
    return f"{value:g}" if isinstance(value, float) else str(value)


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Return settings as text by their dotted keys, an object as its class under its own; without what is null."""
    if not isinstance(node, Mapping):
        return {} if node is None or node in ({}, []) else {key: f"{node:g}" if isinstance(node, float) else str(node)}
    settings: dict[str, str] = {}
    for name, value in node.items():
        if name in ("_target_", "class"):
            settings |= {key: str(value).rpartition(".")[2]} if value is not None else {}
        else:
            settings |= flat(value, f"{key}.{name}" if key else str(name))
    return settings


def of_baseline(settings: Settings, *, releases: bool) -> dict[str, str]:
    """Return those of a run's settings that its baselines share; those of privacy where they release something."""
    shared = (*_OF_BASELINES, *["privacy"] * releases)
    return {key: value for key, value in settings.items() if within(key, shared)}


def seeds_of(settings: Settings, seed: str) -> str:
    """Return the seed of a run, with all of its seeds that are another, such as ``"0, data.seed 3"``."""
    main = seed.partition(".")[0]  # of replicates it is followed by their place
    others = [f"{key} {value}" for key, value in settings.items() if _is_seed(key) and value != main]
    return ", ".join([seed, *others])


def telling(settings: Settings) -> dict[str, str]:
    """Return the settings that distinguish experiments: all but seeds and what changes no number."""
    return {key: value for key, value in settings.items() if not _is_seed(key) and not within(key, _NO_MATTER)}


def within(key: str, places: Iterable[str]) -> bool:
    """Return whether a dotted key is one of ``places`` or below one."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
