"""Follow docs/pages/deploy.md word for word, in a new environment: from pip install to a
certificate.

python scripts/deploy.py > docs/examples/deploy.txt

The blocks of the page run in order, in one session of bash in an empty folder; blocks with a title
become files. The commands, and what the page's own commands print, go to standard output.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SECONDS = 3000
HIDDEN = re.compile(r"\x1b\[[0-9;]*m")


def session(page: Path, folder: Path) -> str:
    """Return the script of bash that follows a page in ``folder``, where its files are written."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null' EXIT"]
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif language in ("bash", "sh"):
            for command in re.split(r"(?<!\\)\n", text.strip()):
                lines += [
                    f"printf '%s\\n' {quoted(f'$ {command}')}" if command else "echo",
                    command,
                ]
    return "\n".join(lines)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--here", action="store_true", help="in this environment, without pip install"
    )
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, environment = Path(place) / "page", dict(os.environ)
        folder.mkdir()
        script = session(ROOT / "docs/pages/deploy.md", folder)
        if words.here:
            script = re.sub(r"^pip install .*$", "", script, flags=re.MULTILINE)
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        else:
            subprocess.run([sys.executable, "-m", "venv", f"{place}/env"], check=True)
            script = re.sub(
                r"^pip install -e \"\.",
                f'pip install --quiet -e "{ROOT}',
                script,
                flags=re.MULTILINE,
            )
            environment["PATH"] = f"{place}/env/bin:{environment['PATH']}"
            environment.pop("PYTHONPATH", None)
        found = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    for line in HIDDEN.sub("", found.stdout).replace(str(folder), ".").splitlines():
        print(line.rstrip())
    sys.exit(found.returncode)


if __name__ == "__main__":
    main()
