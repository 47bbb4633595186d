"""Plain values as YAML; imported when a file of settings is read or written, since only the command
and reports need its package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._extras import extras
from ._text import shown
from .errors import DataError

with extras():
    import yaml
    from yaml import YAMLError as YAMLError


def yaml_text(values: Mapping[str, Any]) -> str:
    """Returns plain values as YAML, from which :func:`read_yaml` reads the same texts: ``yes``,
    ``1e3`` and ``${x}``."""
    return yaml.dump(dict(values), Dumper=_Plain, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> Any:
    """Returns the plain values in a YAML file; a text that looks like a reference, ``${x}``, stays
    one.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error


def check_yaml(text: str) -> None:
    """Checks that a text is no more than settings of some size once its references to anchors are
    written out: a few lines may stand for billions of values.

    Raises:
        ValueError: a text of more than 1,000,000 values or 100 levels.
        yaml.YAMLError: no YAML.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if root is not None and _values(root, {}, 0) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")


def _values(node: yaml.Node, known: dict[yaml.Node, int], level: int) -> int:
    """Returns the number of values in a node, counted anew at each reference to it.

    Args:
        node: of a composed text.
        known: numbers of nodes that were met before; of one that is not counted yet, too many.
        level: of the node.
    """
    if level > _MOST_LEVELS:
        raise ValueError(_TOO_DEEP)
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = _MOST_VALUES + 1  # a node that refers to itself has no end
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[node] = 1 + sum(_values(part, known, level + 1) for part in parts)
    return known[node]


_MOST_VALUES = 1_000_000
_MOST_LEVELS = 100
_TOO_DEEP = f"it has more than {_MOST_LEVELS} levels"


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice, and quotes texts that readers of another YAML take
    for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if shown(text) != text:  # else a reader folds characters that it takes for the end of a line
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Plain.add_representer(str, _quoted)
