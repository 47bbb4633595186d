"""Writes the programs of docs/examples as notebooks, which Jupyter opens.

python scripts/notebooks.py FOLDER
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def notebook(program: str) -> dict[str, Any]:
    """Returns the notebook of a program: its docstring, and a cell for each of its paragraphs.

    Args:
        program: with a docstring; statements at the top level that no empty line divides stand in
            one cell, with the comments above them. Arguments of the command line have their
            defaults.

    Returns:
        The notebook as plain values, in the format 4.5 of Jupyter.
    """
    first, *statements = ast.parse(program).body
    assert isinstance(first, ast.Expr)
    assert first.end_lineno is not None
    lines = program.replace(".parse_args()", ".parse_args([])").splitlines()
    # A cell ends where an empty line follows a statement of the top level.
    cells = []
    start = first.end_lineno
    for statement in statements:
        end = statement.end_lineno
        assert end is not None
        if end == len(lines) or not lines[end].strip():
            cells.append("\n".join(lines[start:end]).strip("\n"))
            start = end
    text = ast.get_docstring(ast.parse(program)) or ""
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"language_info": {"name": "python"}},
        "cells": [
            {"cell_type": "markdown", "id": "text", "metadata": {}, "source": text},
            *(_code(number, source) for number, source in enumerate(cells)),
        ],
    }


def _code(number: int, source: str) -> dict[str, Any]:
    """Returns a cell of code that has not run."""
    return {
        "cell_type": "code",
        "id": f"code-{number}",
        "metadata": {},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(EXAMPLES.glob("*.py")):
        values = notebook(path.read_text(encoding="utf-8"))
        target = folder / f"{path.stem}.ipynb"
        target.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        print(target)
