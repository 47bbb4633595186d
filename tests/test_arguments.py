"""A command knows its settings without PyTorch, and they are those of the classes."""

import inspect
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedmtl
from fedmtl.cli.arguments import FILE, REQUIRED, arguments_of

ROOT = Path(__file__).parents[1]


@pytest.mark.quick
def test_the_file_has_the_arguments_of_the_classes() -> None:
    """If this fails, an argument or a default has changed: python scripts/arguments.py."""
    script = runpy.run_path(str(ROOT / "scripts" / "arguments.py"))
    assert FILE.read_text(encoding="utf-8") == script["text"]()


def test_defaults_are_those_of_the_signatures() -> None:
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    assert len(listed) > 80
    for target, arguments in listed.items():
        made = fedmtl
        for name in target.split(".")[1:]:
            made = getattr(made, name)
        parameters = inspect.signature(made).parameters
        assert {*arguments["defaults"], *arguments["others"]} == set(parameters), target
        for name, default in arguments["defaults"].items():
            expected = parameters[name].default
            if default == REQUIRED:
                assert expected is inspect.Parameter.empty
            elif isinstance(default, list):
                assert tuple(default) == expected
            elif default != {}:
                assert default == expected
                assert type(default) is type(expected)


def test_what_is_listed_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(target: str, place: str) -> None:
        raise AssertionError(target)

    monkeypatch.setattr("fedmtl.cli.arguments.named", named)
    assert arguments_of("fedmtl.PoissonSampling", "schedule").defaults == {"cohort": None}
    with pytest.raises(AssertionError, match=r"fedmtl\.schedules\.PoissonSampling"):
        arguments_of("fedmtl.schedules.PoissonSampling", "schedule")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["privcy.epsilon=3"], "did you mean privacy.epsilon?"),
        (["privacy.epsilonn=3"], "did you mean privacy.epsilon?"),
        (["algorithm=pmttl"], "did you mean pmtl?"),
        (["algorithm=pmtl", "algorithm.lamb=3"], "did you mean algorithm.lam?"),
        (["-m", "privacy.epsilonn=3,4"], "did you mean privacy.epsilon?"),
        (["check", "privacy.epsilonn=3"], "did you mean privacy.epsilon?"),
        (["audit", "privacy.epsilonn=3"], "did you mean privacy.epsilon?"),
    ],
)
def test_a_wrong_word_is_refused_without_torch(words: list[str], near: str, tmp_path: Path) -> None:
    script = """
import sys
from fedmtl import cli
print(cli.main(sys.argv[1:]), {"torch", "scipy", "matplotlib", "pandas"} & set(sys.modules))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    called = [sys.executable, "-c", script, *words]
    done = subprocess.run(called, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    assert near in done.stderr
