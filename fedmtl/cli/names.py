"""Names of settings: the files of their groups, and the nearest to one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from pathlib import Path

from ..errors import ConfigError

GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")
_MANY = 12  # names in a message
GUESSED = {  # the names of settings in other programs
    "lr": "algorithm.local.lr",
    "eps": "privacy.epsilon",
    "label": "data.target",
    "fraction": "schedule.cohort",
    "optimizer": "algorithm.local",
}
SHORT = GUESSED | {"epsilon": "privacy.epsilon", "delta": "privacy.delta"}
"""The same for an option with dashes."""
TRUST: ContextVar[tuple[str, ...]] = ContextVar("TRUST", default=())
"""Modules that this command line trusts, beside this package."""
EXTRA: ContextVar[Path | None] = ContextVar("EXTRA", default=None)
"""The user's folder of configuration files, searched first."""


def config_folder() -> Path:
    """Returns the folder of the Hydra groups: inside the package in a wheel, beside it in a source
    tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"the configuration files are missing: neither {package} nor its parent has configs/."
    )


def config_folders() -> list[Path]:
    """Returns the folders that are searched for groups: the user's, if there is one, then the
    package's."""
    return [*filter(None, [EXTRA.get()]), config_folder()]


def choices() -> dict[str, dict[str, str]]:
    """Returns the groups of the package, and of the user's folder. An option comes with the comment
    that opens its file, and with the name of the user's folder."""
    options: dict[str, dict[str, str]] = {}
    for folder in reversed(config_folders()):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            comment = re.search(r"^# (?!@)(.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            words = (
                f"{comment[1] if comment else ''}{f' ({folder})' if folder == EXTRA.get() else ''}"
            )
            options.setdefault(group, {})[file.stem] = words.strip()
    return options


def no_setting(key: str, accepted: Sequence[str], near: Sequence[str], of: str = "") -> ConfigError:
    """Returns the error of a setting that does not exist, ``of`` a class."""
    names = [name for name in accepted if name != "_target_"]
    return unknown(names, near, f"{key} is no setting{of}", "fedmtl --cfg job")


def unknown(accepted: Collection[str], near: Sequence[str], text: str, printed: str) -> ConfigError:
    """Returns the error of a name that does not exist, with the nearest names, and the accepted
    ones or the command that prints them.

    Args:
        accepted: the names in its place.
        near: those that may be meant.
        text: the fault.
        printed: the command that prints all, if they are many.
    """
    hint = ""
    if near:
        hint = f"did you mean {' or '.join(near)}? "
    every = ", ".join(accepted) or "nothing"
    if near and len(accepted) > _MANY:
        rest = f"{printed} prints all"
    else:
        rest = f"accepted: {every}"
    return ConfigError(f"{text}; {hint}{rest}.")


def nearest(key: str, accepted: Sequence[str]) -> list[str]:
    """Returns up to three accepted keys that ``key`` may have meant: the same last word anywhere,
    then a similar one in its place; of a key without a place else one anywhere."""
    place, _, name = key.rpartition(".")
    last_words = {
        other: other.rpartition(".")[2] for other in accepted if not key.startswith(f"{other}.")
    }
    if name in GUESSED:
        meant = GUESSED[name]
        choose = {"algorithm": "algorithm=fedavg ", "schedule": "schedule=poisson "}.get(
            meant.split(".")[0], ""
        )
        # automatic settings lack both
        if meant in accepted:
            return [meant]
        return [f"{choose}{meant}"] * bool(choose)
    beside = [word for other, word in last_words.items() if other == f"{place}.{word}".lstrip(".")]
    near = [other for other, word in last_words.items() if word == name]
    near += [f"{place}.{word}".lstrip(".") for word in difflib.get_close_matches(name, beside)]
    if not near and not place:
        close = difflib.get_close_matches(name, last_words.values(), n=1)
        near = [other for other, word in last_words.items() if word in close]
    return list(dict.fromkeys(near))[:3]
