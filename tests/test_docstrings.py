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


WITHOUT_EXAMPLE = {
    # interfaces, which an exported class or function with an example has
    *("Algorithm", "Mechanism", "Personalization", "RunAudit"),
    # settings of readers, whose fields are the arguments of these
    *("AdultSettings", "CelebASettings", "ImagesSettings", "LendingSettings", "MovieLensSettings"),
    *("StackOverflowSettings", "TableSettings"),
    # readers of files that are too large, or have too many columns, to be written in an example
    *("read_adult", "read_celeba", "read_cifar", "read_lending", "read_stackoverflow"),
    # what the example of another name returns
    *("RoundChannel", "SearchResult"),
    # they read folders of runs, and draw
    *("frame", "report"),
}


def exported() -> dict[str, Any]:
    """Returns the classes and functions that the packages export, by name."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"fedmtl.{package}")
        for name in module.__all__:
            one = getattr(module, name)
            if inspect.isclass(one) or inspect.isfunction(one):
                found[name] = one
    return found


def explained(text: str) -> set[str]:
    """Returns the arguments that a docstring lists."""
    names: set[str] = set()
    for section in re.findall(
        r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", f"{text}\n", re.MULTILINE
    ):
        for heading in re.findall(r"^ {4}(\S[^:]*):", section, re.MULTILINE):
            names.update(name.strip(" *") for name in heading.split(","))
    return names


def lacking(function: Any, overridden: list[Any]) -> list[str]:
    """Returns what a docstring lacks, which that of an overridden function may have instead."""
    texts = [inspect.cleandoc(each.__doc__ or "") for each in (function, *overridden)]
    if not texts[0]:
        return ["a docstring"]
    if re.search(rf":meth:`[^`]*\.{function.__name__}`", texts[0]):
        return []  # that of another class has it
    signature = inspect.signature(function)
    known = set().union(*map(explained, texts))
    found = [name for name in signature.parameters if name not in {"self", "cls", *known}]
    returns = signature.return_annotation not in ("None", None)
    if returns and not any(re.search(r"^(Returns|Yields|Checks)\b", text, re.M) for text in texts):
        found.append("what it returns")
    return found


def methods(kind: type) -> list[tuple[Any, list[Any]]]:
    """Returns the public methods that a class defines, each with those that it overrides."""
    found = []
    for name, value in vars(kind).items():
        own = getattr(value, "__func__", value)
        if name.startswith("_") or not inspect.isfunction(own):
            continue
        others = [getattr(base, name) for base in kind.__mro__[1:] if name in vars(base)]
        found.append((inspect.unwrap(own), others))
    return found


def test_the_arguments_of_all_that_is_exported_are_explained() -> None:
    found = {}
    for name, one in exported().items():
        if inspect.isclass(one):
            for function, overridden in methods(one):
                found[f"{name}.{function.__name__}"] = lacking(function, overridden)
        else:
            found[name] = lacking(inspect.unwrap(one), [])
    assert len(found) > 450
    assert {name: gaps for name, gaps in found.items() if gaps} == {}


def test_a_docstring_that_lacks_something_is_found() -> None:
    class Base:
        def train(self, models: int, *, rate: float) -> int:
            """Returns the models.

            Args:
                models: before.
                rate: of a step.
            """
            return models

    class Method(Base):
        def train(self, models: int, *, rate: float, clip: float = 1.0) -> int:
            """Trains with a clip."""
            return models

        def plan(self) -> int:
            """The plan."""
            return 1

        def begin(self, step: int) -> None: ...

    found = {function.__name__: lacking(function, base) for function, base in methods(Method)}
    assert found == {"train": ["clip"], "plan": ["what it returns"], "begin": ["a docstring"]}


def test_all_that_is_exported_has_an_example_but_what_is_listed() -> None:
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    without = set()
    for name, one in exported().items():
        found = finder.find(one, name, module=False, globs={})
        if not any(example.examples for example in found):
            without.add(name)
    assert without == WITHOUT_EXAMPLE


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
