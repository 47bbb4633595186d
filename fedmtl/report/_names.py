"""Titles and colours of methods in tables and figures."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .._text import shown

# Printed below every table of several runs.
CHOICE_NOT_COVERED = (
    "not private: choosing among runs by these metrics "  # the choice reads the test data
    "is covered by no epsilon (fedmtl search is)"
)

UNITS = {"client": "all data of one client", "record": "one record"}


class Method(NamedTuple):
    """Title and colour of a method.

    Attributes:
        title: its name in print.
        colour: its colour in figures, ``#rrggbb``; empty for any.
    """

    title: str
    colour: str = ""


METHODS: dict[str, Method] = {}
"""The methods by name: those that this process has defined, and those of runs that it has read."""


def register_stored(stored: Any) -> None:
    """Registers the methods that a run folder names.

    Args:
        stored: ``{name: [title, colour]}`` as the folder has it. Entries of another form are
            skipped, since a folder may come from anyone.
    """
    if not isinstance(stored, dict):
        return
    for name, pair in stored.items():
        if not _is_pair_of_texts(pair):
            continue
        title, colour = pair
        if re.fullmatch("#[0-9a-fA-F]{6}", colour) is None:
            colour = ""
        # a class that this process has defined knows its title better than a folder does
        METHODS.setdefault(name, Method(shown(title), colour))


def title_of(name: str) -> str:
    """Returns the title of a method in print.

    Args:
        name: the method's name, perhaps with `` + `` and an addition, which is kept. An unknown
            name is returned as it is.
    """
    method, plus, rest = name.partition(" + ")
    known = METHODS.get(method.lower())
    if known is None:
        return name
    return known.title + plus + rest


def _is_pair_of_texts(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(isinstance(text, str) for text in pair)
