"""Names of settings: where their files are, and the nearest to one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from pathlib import Path

from ..errors import ConfigError

TRUST: ContextVar[tuple[str, ...]] = ContextVar("TRUST", default=())
"""Modules that this command line trusts, beside this package."""
EXTRA: ContextVar[Path | None] = ContextVar("EXTRA", default=None)
"""The user's folder of configuration files, searched first."""
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


def no_setting(key: str, accepted: Collection[str], near: Sequence[str] = (), of: str = "") -> ConfigError:
    """Return the error of a setting that does not exist, with the nearest names.

    Args:
        key: the setting.
        accepted: the names of those in its place.
        near: keys that may be meant.
        of: the class that has no such setting.
    """
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    names = ", ".join(name for name in accepted if name != "_target_") or "nothing"
    return ConfigError(f"{key} is no setting{f' of {of}' if of else ''}; {hint}accepted: {names}.")


def no_option(group: str, option: str, accepted: Sequence[str]) -> ConfigError:
    """Return the error of an option that a group does not have."""
    close = difflib.get_close_matches(option, accepted, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return ConfigError(f"{group} has no option {option!r}; {hint}accepted: {', '.join(accepted)}.")


def nearest(key: str, accepted: Sequence[str]) -> list[str]:
    """Return up to three accepted keys that ``key`` may have meant: the same last word, then similar spellings."""
    last = key.rsplit(".", 1)[-1]
    if last in GUESSED:
        meant = GUESSED[last]
        choose = {"algorithm": "algorithm=fedavg ", "schedule": "schedule=poisson "}.get(meant.split(".")[0], "")
        return [meant] if meant in accepted else [f"{choose}{meant}"] * bool(choose)  # automatic settings lack both
    same = [name for name in accepted if name.rsplit(".", 1)[-1] == last]
    alike = difflib.get_close_matches(key, accepted, n=3, cutoff=0.75)
    alike = [name for name in alike if name.split(".")[0] not in alike or name == alike[0]]  # only of a group itself
    by_last = {name.rsplit(".", 1)[-1]: name for name in accepted}
    near = [] if same else [by_last[word] for word in difflib.get_close_matches(last, by_last, n=2, cutoff=0.6)]
    return list(dict.fromkeys([*same, *alike, *near]))[:3]
