"""The example in the docstring of everything that the package exports runs and prints what it says; the program in
that of every paper runs."""

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest

import fedmtl
from fedmtl.algorithms import RoundAlgorithm
from fedmtl.algorithms.base import BASELINES, METHODS
from fedmtl.data import LOADERS, load_synthetic_tasks
from fedmtl.graphs import Ring

EXPORTED = [one for name in fedmtl.__all__ if not inspect.ismodule(one := getattr(fedmtl, name))]


@pytest.fixture(autouse=True)
def no_new_names() -> Iterator[None]:
    """What an example registers is forgotten after it."""
    registries: tuple[dict[str, Any], ...] = (METHODS, BASELINES, LOADERS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.mark.parametrize("one", [*EXPORTED, RoundAlgorithm], ids=lambda one: one.__name__)
def test_the_example_of_a_docstring_prints_what_it_says(one: Any) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(one, one.__name__, globs={})
    printed: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert outcome.attempted > 0, "it has no example"
    assert outcome.failed == 0, "".join(printed)


PACKAGES = (
    "algorithms",
    "audit",
    "contrib",
    "data",
    "graphs",
    "local",
    "models",
    "privacy",
    "report",
    "schedules",
    "search",
    "trainer",
)


def examples() -> list[Any]:
    """Returns the examples of what the packages export, and the root does not."""
    found = {}
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    for package in PACKAGES:
        module = importlib.import_module(f"fedmtl.{package}")
        for name in module.__all__:
            one = getattr(module, name)
            if (
                one in EXPORTED
                or one is RoundAlgorithm
                or not (inspect.isclass(one) or callable(one))
            ):
                continue
            for example in finder.find(one, name, module=False, globs={}):
                if example.examples:
                    found[example.name] = example
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_example_of_a_package_prints_what_it_says(example: doctest.DocTest) -> None:
    printed: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert outcome.failed == 0, "".join(printed)


PROGRAM = re.compile(r"^ {4}Trainer\((?:.*\n)+?.*fit\(\)$", re.MULTILINE)


@pytest.mark.parametrize("paper", ["async_learner", "mp_mtl", "p2p", "pp_dmtl"])
def test_the_program_of_a_paper_runs(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"fedmtl.algorithms.{paper}.algorithm")
    (program,) = PROGRAM.findall(module.__doc__ or "")
    names = {name: getattr(fedmtl, name) for name in fedmtl.__all__} | {"Ring": Ring}
    names["data"] = load_synthetic_tasks(
        tasks=4, train_examples=8, test_examples=4, features=3, problem="regression"
    )
    results, fit = [], fedmtl.Trainer.fit
    monkeypatch.setattr(fedmtl.Trainer, "fit", lambda trainer: results.append(fit(trainer)))
    exec(dedent(program), names)
    (result,) = results
    assert result.privacy.epsilon > 0
    assert len(result.personal) == 4
