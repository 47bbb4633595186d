"""The settings of runs as text, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._text import shown

# Settings that change no computed number, or that have a column of their own.
_IRRELEVANT = {
    *("baselines", "logger", "progress", "device", "execution", "checkpoint_every", "eval_every"),
    "evaluate_clients",
    *("metrics", "replicates", "epsilons", "data.cache"),
    *("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier"),
}
# Settings that a run shares with its baselines.
_SHARED_WITH_BASELINES = (
    *("data", "model", "trainable", "loss", "dtype", "schedule", "rounds", "finetune"),
    "algorithm.local",
)

Settings = Mapping[str, str]


def command_of(run: Path) -> str | None:
    """Returns the command that made a run, from the first line of its configuration.

    Args:
        run: the run's folder.

    Returns:
        The command; None if a program made the run.
    """
    file = run / "private" / "config.yaml"
    if not file.is_file():
        return None
    first, _, _ = file.read_text(encoding="utf-8").partition("\n")
    first = shown(first)
    if not first.startswith("#"):
        return None
    return first.removeprefix("#").strip()


def value_text(value: Any) -> str:
    """Returns a setting in words: lists and the parts of an object one after the other."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, Mapping):
        parts = [f"{name} {value_text(part)}" for name, part in value.items() if name != "class"]
        return ", ".join(parts)
    return _scalar_text(value)


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Returns settings as text by their dotted keys.

    Args:
        node: a setting, or a mapping of settings at any depth. An object is its class under its own
            key.
        key: the key of ``node``; empty for the whole configuration.

    Returns:
        Key to text. Null values and empty lists and mappings are left out.
    """
    if not isinstance(node, Mapping):
        if node is None or node in ({}, []):
            return {}
        return {key: _scalar_text(node)}
    settings: dict[str, str] = {}
    for name, value in node.items():
        if name in ("_target_", "class"):
            if value is not None:
                settings[key] = str(value).rpartition(".")[2]
            continue
        below = str(name)
        if key:
            below = f"{key}.{name}"
        settings.update(flat(value, below))
    return settings


def of_baseline(settings: Settings, *, releases: bool) -> dict[str, str]:
    """Returns the settings that a run shares with its baselines.

    Args:
        settings: all settings of the run.
        releases: True if the baseline releases something; it then shares the privacy settings, too.
    """
    shared: tuple[str, ...] = _SHARED_WITH_BASELINES
    if releases:
        shared = (*shared, "privacy")
    return {key: value for key, value in settings.items() if within(key, shared)}


def seeds_of(settings: Settings, seed: str) -> str:
    """Returns the seed of a run, with all its seeds that differ from it: ``"0, data.seed 3"``."""
    # the seed of a replicate is followed by a dot and the replicate's place
    main = seed.partition(".")[0]
    seeds = [seed]
    for key, value in settings.items():
        if _is_seed(key) and value != main:
            seeds.append(f"{key} {value}")
    return ", ".join(seeds)


def telling(settings: Settings) -> dict[str, str]:
    """Returns the settings that tell experiments apart: no seeds, and none without effect."""
    found = {}
    for key, value in settings.items():
        if not _is_seed(key) and not within(key, _IRRELEVANT):
            found[key] = value
    return found


def within(key: str, places: Iterable[str]) -> bool:
    """Checks a dotted key for being one of ``places`` or below one."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _scalar_text(value: Any) -> str:
    # 0.1 + 0.2 and 0.3 are one setting in a table
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
