"""The program in the docstring of every paper runs."""

import importlib
import re
from textwrap import dedent

import pytest

import fedmtl
from fedmtl.data import load_synthetic_tasks
from fedmtl.graphs import Ring

PROGRAM = re.compile(r"^ {4}Trainer\((?:.*\n)+?.*fit\(\)$", re.MULTILINE)


@pytest.mark.parametrize("paper", ["async_learner", "mp_mtl", "p2p", "pp_dmtl"])
def test_the_program_of_a_paper_runs(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"fedmtl.algorithms.{paper}.algorithm")
    (program,) = PROGRAM.findall(module.__doc__ or "")
    names = {name: getattr(fedmtl, name) for name in fedmtl.__all__} | {"Ring": Ring}
    names["data"] = load_synthetic_tasks(tasks=4, train_examples=8, test_examples=4, features=3, problem="regression")
    results, fit = [], fedmtl.Trainer.fit
    monkeypatch.setattr(fedmtl.Trainer, "fit", lambda trainer: results.append(fit(trainer)))
    exec(dedent(program), names)
    (result,) = results
    assert result.privacy.epsilon > 0
    assert len(result.personal) == 4
