"""The example in the docstring of everything that the package exports runs, and prints what it says."""

import doctest
import inspect
from typing import Any

import pytest

import fedmtl
from fedmtl.algorithms import Algorithm
from fedmtl.algorithms.base import METHODS

EXPORTED = [one for name in fedmtl.__all__ if not inspect.ismodule(one := getattr(fedmtl, name))]


@pytest.mark.parametrize("one", [*EXPORTED, Algorithm], ids=lambda one: one.__name__)
def test_the_example_of_a_docstring_prints_what_it_says(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "average", None)  # and none again: the class of the example registers itself
    (example,) = doctest.DocTestFinder(recurse=False).find(one, one.__name__, globs={})
    printed: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert outcome.attempted > 0, "it has no example"
    assert outcome.failed == 0, "".join(printed)
