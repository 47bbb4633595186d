"""The example in the docstring of everything that the package exports runs, and prints what it says."""

import doctest
import inspect

import pytest

import fedmtl

NAMES = [name for name in fedmtl.__all__ if not inspect.ismodule(getattr(fedmtl, name))]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_docstring_prints_what_it_says(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(fedmtl, name), name, globs={})
    printed: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert outcome.attempted > 0, "it has no example"
    assert outcome.failed == 0, "".join(printed)
