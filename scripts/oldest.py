"""Prints the oldest declared version of every dependency, as constraints for pip.

python scripts/oldest.py > oldest.txt
PIP_CONSTRAINT=oldest.txt pip install -e ".[test]"
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
LEAST = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9][^,; ]*)")


def oldest(text: str) -> list[str]:
    """Returns the constraints ``name==version`` of a project file, without packages that declare no
    least version.

    Example:
        >>> oldest('[project]\\ndependencies = ["torch>=2.4", "jinja2"]')
        ['torch==2.4']
    """
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {})
    declared = list(project["dependencies"])
    for name in extras:
        declared += extras[name]
    found = {}
    for requirement in declared:
        match = LEAST.match(requirement)
        if match is not None:
            found[match[1]] = match[2]
    return [f"{name}=={version}" for name, version in found.items()]


if __name__ == "__main__":
    print("\n".join(oldest(PROJECT.read_text(encoding="utf-8"))))
