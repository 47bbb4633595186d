"""The density of the package's code is counted, and may only fall.

A figure of ``LIMITS`` that a change lowers is lowered here, too; none is ever raised. Figures by line are per 1,000
lines of code: lines with a token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import fedmtl

PACKAGE = Path(fedmtl.__file__).parent
COLUMNS = 100
PARAMETERS = 8
LINES = 400

LIMITS = {
    "conditional expressions": 5.3,
    "nested conditional expressions": 0,
    "paired assignments": 0.03,
    "|= of a dict or a conditional": 0,
    "long lines": 0,
    "functions of many parameters": 3,
    "long files": 0,
    "openings": 0.0,
    "clauses with where": 15,
    "clauses with what": 0,
    "sentences that begin with Of": 0,
    "sentences that begin with a clause": 0,
}
"""Largest figures: conditional expressions, paired assignments and long lines by 1,000 or 100 lines of code, openings
by 100 docstrings, the others in all."""
COMMENTS = 45.1
"""Least number of comments by 1,000 lines of code."""

_BLANK = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_QUESTIONS = ("what", "who", "how", "where", "whether", "which")
# "where" before a colon is the name of an argument
_PROSE = {
    "clauses with where": re.compile(r"\b[Ww]here\b(?!:|`)"),
    "clauses with what": re.compile(r"\b[Ww]hat\b"),
    "sentences that begin with Of": re.compile(r"(?:^|[.:;] )Of [a-z]"),
    "sentences that begin with a clause": re.compile(
        r"(?:^|[.] )(?:What|Who|How|Where|Whether|Which) "
    ),
}
_OPENINGS = tuple(f"{verb}{word} " for verb in ("", "return ", "returns ") for word in _QUESTIONS)


def counted(text: str) -> Counter[str]:
    """Returns the figures of a module in all."""
    tree = ast.parse(text)
    found = _lines(text, _docstring_lines(tree))
    for node in ast.walk(tree):
        found.update(_constructs(node))
    found["long files"] += len(text.splitlines()) > LINES
    return found


def _docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def _lines(text: str, docstrings: set[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            # A directive to a tool explains nothing.
            found["comments"] += not token.string.startswith(("#!", "# type:", "# noqa"))
        elif token.type not in _BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    rows = text.splitlines()
    found["code"] = len(code)
    found["long lines"] = sum(len(rows[line - 1]) > COLUMNS for line in code)
    return found


def _constructs(node: ast.AST) -> Counter[str]:
    found: Counter[str] = Counter()
    if isinstance(node, ast.IfExp):
        found["conditional expressions"] = 1
        parts = (node.test, node.body, node.orelse)
        found["nested conditional expressions"] = any(
            isinstance(inner, ast.IfExp) for part in parts for inner in ast.walk(part)
        )
    if isinstance(node, ast.Assign):
        # Unpacking what a function returns is one statement; writing two values on one line is two.
        found["paired assignments"] = isinstance(node.targets[0], ast.Tuple) and isinstance(
            node.value, ast.Tuple
        )
    if isinstance(node, ast.AugAssign):
        united = isinstance(node.op, ast.BitOr) and isinstance(node.value, ast.IfExp | ast.Dict)
        found["|= of a dict or a conditional"] = united
    if isinstance(node, _FUNCTIONS):
        names = [
            one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        found["functions of many parameters"] = (
            len([name for name in names if name not in ("self", "cls")]) > PARAMETERS
        )
    if isinstance(node, _DOCUMENTED):
        text = ast.get_docstring(node)
        if text is not None:
            found["docstrings"] = 1
            found["openings"] = text.lower().startswith(_OPENINGS)
            for name, pattern in _PROSE.items():
                found[name] = len(pattern.findall(" ".join(text.split())))
    return found


@pytest.fixture(scope="session")
def figures() -> dict[str, float]:
    """The figures of the package: by 1,000 lines of code, or by 100, or in all."""
    total: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(counted(path.read_text(encoding="utf-8")))
    found: dict[str, float] = dict(total)
    for name in ("conditional expressions", "paired assignments", "comments"):
        found[name] = 1000 * total[name] / total["code"]
    found["long lines"] = 100 * total["long lines"] / total["code"]
    found["openings"] = 100 * total["openings"] / total["docstrings"]
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_does_not_grow(name: str, figures: dict[str, float]) -> None:
    assert figures[name] <= LIMITS[name]


def test_there_are_no_fewer_comments(figures: dict[str, float]) -> None:
    assert figures["comments"] >= COMMENTS


DENSE = '''\
"""Return what is counted, where it is. Of all, where: once. What else is left. Who asks is not."""
a, b = 1, 2
c, d = divmod(7, 2)
e = (1 if a else 2) if b else 3  # why
f = {}
f |= {"x": 1} if a else {}
f |= {"y": 1}  # noqa: E501
def g(self, a, b, c, d, e, f, g, h, i): ...
def k(self, a, b, c, d, e, f, g, h): ...
'''


def test_what_is_counted() -> None:
    found = counted(DENSE + f"x = {'1' * 100}\n")
    assert found == {
        "code": 9,
        "comments": 1,
        "long lines": 1,
        "conditional expressions": 3,
        "nested conditional expressions": 1,
        "paired assignments": 1,
        "|= of a dict or a conditional": 2,
        "functions of many parameters": 1,
        "long files": 0,
        "docstrings": 1,
        "openings": 1,
        "clauses with where": 1,
        "clauses with what": 2,
        "sentences that begin with Of": 1,
        "sentences that begin with a clause": 2,
    }
