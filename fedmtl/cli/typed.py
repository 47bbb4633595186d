"""Settings as they are typed: the overrides that Hydra reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from ..errors import ConfigError
from .refusals import refusals


@dataclass(frozen=True)
class Typed:
    """Settings as they are typed, which :func:`read` reads once.

    Attributes:
        words: ``KEY=VALUE`` each.
        overrides: the same as Hydra reads them.
    """

    words: tuple[str, ...]
    overrides: tuple[Override, ...]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the values by dotted key or group; the last one counts."""
        return {override.key_or_group: override.value() for override in self.overrides}

    @cached_property
    def single(self) -> Typed:
        """Returns the settings with one value, without those that a sweep goes through."""
        single = tuple(one for one in self.overrides if not one.is_sweep_override())
        return Typed(tuple(str(one.input_line) for one in single), single)


def read(words: Sequence[str]) -> Typed:
    """Returns settings as Hydra reads them.

    Raises:
        ConfigError: one that it cannot read, or another folder of files than that of
            ``--config-dir``.
    """
    with refusals():
        overrides = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        if override.get_key_element().lstrip("+~") == "hydra.searchpath":
            raise ConfigError(
                f"{override.input_line} is not taken; --config-dir DIR is the folder "
                "with own groups."
            )
    return Typed(tuple(words), tuple(overrides))


def of_place(words: Sequence[str], place: str) -> list[str]:
    """Returns the settings of a group or of a setting."""
    return [text for text in words if text.split("=")[0].split(".")[0].lstrip("+") == place]


def differing(run: Sequence[str], typed: Typed) -> str:
    """Returns those settings of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {one.get_key_element(): one.is_sweep_override() for one in typed.overrides}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))
