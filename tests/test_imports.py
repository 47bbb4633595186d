"""Imports stand at the top of a module, unless they would make a command start later."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedmtl

ROOT = Path(__file__).parents[1]

# each takes from a tenth of a second to more than one; `fedmtl --help` and an error in a setting need none of them
SLOW = ("dp_accounting", "scipy", "torch", "hydra", "omegaconf", "yaml", "rich", "pandas")
OPTIONAL = ("fcntl",)  # not on every system


@cache
def parsed() -> dict[Path, ast.Module]:
    """The modules of the package."""
    return {file: ast.parse(file.read_text()) for file in (ROOT / "fedmtl").rglob("*.py")}


def test_imports_inside_functions_are_only_of_the_package_and_of_what_is_slow_or_not_on_every_system():
    found = []
    for file, module in parsed().items():
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        names = {name for function in functions for name in everywhere(function) if name}
        found += [
            f"{file}: {name}" for name in names if not name.startswith(("fedmtl", *SLOW, *OPTIONAL))
        ]
    assert found == []


def test_every_dependency_is_imported_by_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = set(project["dependencies"])
    for extra, packages in project["optional-dependencies"].items():
        if extra not in ("all", "test", "docs"):
            asked |= set(packages)
    names = {re.match(r"[\w-]+", one).group() for one in asked}
    modules = {
        "hydra-core": "hydra",
        "pillow": "PIL",
        "scikit-learn": "sklearn",
        "dp-accounting": "dp_accounting",
        "pyyaml": "yaml",
        "tensorboard": "torch.utils.tensorboard",
    }
    found = {name for module in parsed().values() for name in everywhere(module)}
    missing = {
        name
        for name in names
        if not any(f"{one}.".startswith(f"{modules.get(name, name)}.") for one in found)
    }
    assert missing == set()


def everywhere(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute names of all imports, those in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_a_small_run_imports_no_compiler_and_no_reader_of_tables():
    """Each of these takes a third of a second to two, and an ordinary run needs none of them; the events of its
    accounting are those of dp_accounting where that is imported later."""
    program = """
import sys
from fedmtl import *
Trainer(
    algorithm=PMTL(local=LocalSGD(lr=0.1)), data=load_data("digits", clients=4), model=models.softmax_regression(),
    schedule=PoissonSampling(cohort=2), privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-2), rounds=1,
    baselines=("local",), progress=False,
).fit()
print(*{name for name in sys.modules} & set(sys.argv[1:]))
from fedmtl.privacy.events import dp_event
import dp_accounting.pld
from dp_accounting.dp_event import GaussianDpEvent
assert dp_accounting.GaussianDpEvent is GaussianDpEvent is dp_event.GaussianDpEvent
assert dp_accounting.dp_event is dp_event
accountant = dp_accounting.pld.PLDAccountant()
print(round(accountant.compose(dp_event.GaussianDpEvent(1.0)).get_epsilon(1e-5), 2))
"""
    plain = """
import sys
import torch
from torch.func import functional_call, grad, vmap
layer = torch.nn.Linear(3, 2)
loss = lambda parameters, x: functional_call(layer, parameters, (x,)).sum()
vmap(grad(loss), (None, 0))(dict(layer.named_parameters()), torch.ones(4, 3))
print(*{name for name in sys.modules} & set(sys.argv[1:]))
"""
    unused = [
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "triton",
        "opacus",
        "sklearn",
        "pandas",
        "pyarrow",
    ]
    unused += ["scipy.stats", "scipy.signal", "dp_accounting", "absl", "hydra"]
    unused.append("matplotlib")

    def imported(text: str) -> tuple[set[str], str]:
        done = subprocess.run(
            [sys.executable, "-c", text, *unused],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        modules, _, rest = done.stdout.partition("\n")
        return set(modules.split()), rest

    modules, rest = imported(program)
    assert rest == "4.38\n"
    if modules:  # older releases of PyTorch import their compiler for gradients of examples
        modules -= imported(plain)[0]
    assert not modules


def test_the_stub_names_all_that_the_package_offers() -> None:
    """Type checkers read the stub, and the package reads its names from it."""
    tree = ast.parse((ROOT / "fedmtl" / "__init__.pyi").read_text())
    names = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(names) == fedmtl.__all__
    assert {*names, "__version__"} <= set(dir(fedmtl))
    assert fedmtl.PMTL is fedmtl.algorithms.PMTL
    assert fedmtl.models.__name__ == "fedmtl.models"
    with pytest.raises(AttributeError, match="module 'fedmtl' has no attribute 'Pmtl'"):
        getattr(fedmtl, "Pmtl")  # noqa: B009 - type checkers would refuse the attribute
