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
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice, and quotes what readers of another YAML take for a
    number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if shown(text) != text:  # else a reader folds what it takes for the end of a line
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Plain.add_representer(str, _quoted)
