"""How methods are called in print."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .._text import shown

CHOICE_NOT_COVERED = "not private: choosing among runs by these metrics is covered by no epsilon (fedmtl search is)"

UNITS = {"client": "all data of one client", "record": "one record"}


class Method(NamedTuple):
    """How a method is shown.

    Attributes:
        title: its name in print.
        colour: in figures, ``#rrggbb``; empty for any.
    """

    title: str
    colour: str = ""


METHODS: dict[str, Method] = {}
"""The methods by name: those whose class has been defined in this process, and those of runs that were read."""


def register_stored(stored: Any) -> None:
    """Register the methods of a run, {name: [title, colour]} as its folder has them; what is none is skipped."""
    for name, pair in stored.items() if isinstance(stored, dict) else ():
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair):
            title, colour = pair
            METHODS.setdefault(name, Method(shown(title), colour if re.fullmatch("#[0-9a-fA-F]{6}", colour) else ""))


def title_of(name: str) -> str:
    """Return the title of a method by its name; an unknown name is left as it is, and so is what follows `` + ``."""
    method, plus, rest = name.partition(" + ")
    return METHODS[method.lower()].title + plus + rest if method.lower() in METHODS else name
