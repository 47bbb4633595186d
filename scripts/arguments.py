"""Write fedmtl/cli/arguments.json from the signatures of what the files under configs/ name.

python scripts/arguments.py

It is run after an argument or a default of one of these classes and functions has changed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from fedmtl.cli.arguments import FILE, TRAINER, signed
from fedmtl.cli.build import named
from fedmtl.cli.names import config_folder

TARGET = re.compile(r"^ *_target_: (fedmtl\.\S+)", re.MULTILINE)


def text() -> str:
    """Return the content of the file."""
    targets = {TRAINER}
    for path in config_folder().rglob("*.yaml"):
        # loggers may be named in their own group alone, which is checked by their class
        if path.parent.name != "logger":
            targets.update(TARGET.findall(path.read_text(encoding="utf-8")))
    lines = []
    for target in sorted(targets):
        place = "" if target == TRAINER else target
        lines.append(f"{json.dumps(target)}: {json.dumps(asdict(signed(named(target, place))))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
