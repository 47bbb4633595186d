"""Names of settings: the places of their files, and the nearest to one that does not exist."""

from __future__ import annotations

import re
from contextvars import ContextVar
from pathlib import Path

from ..errors import ConfigError

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
