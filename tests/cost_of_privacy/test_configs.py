"""The study's experiments by command, with its own configuration files and readers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmtl import cli
from fedmtl.cli.config import compose, resolve, settings
from fedmtl.cli.names import EXTRA, TRUST
from tests.data.rows import write_csv

from .test_hospital import stays

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks/reproduce/cost_of_privacy/configs"
READERS = "benchmarks.reproduce.cost_of_privacy.readers"


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    """Search the study's configuration files, which name its readers."""
    trusted, searched = TRUST.set((READERS,)), EXTRA.set(CONFIGS)
    yield
    TRUST.reset(trusted)
    EXTRA.reset(searched)


@pytest.mark.parametrize("experiment", ["lending", "hospital", "svm"])
@pytest.mark.parametrize("size", ["", "_paper"])
def test_the_experiments_compose(experiment: str, size: str) -> None:
    settings(resolve(compose([f"experiment=cost_of_privacy_{experiment}{size}", "data.root=x"])))


def test_the_machine_of_the_census_has_the_bound_of_its_rows() -> None:
    """What clients' rows keep, which the learner takes Xi from, is what noise is made for: with a 1 for the bias."""
    config = resolve(compose(["experiment=cost_of_privacy_svm", "data.root=x"]))
    made = settings(config)
    algorithm, data = made["algorithm"], config["data"]
    assert (algorithm.row_norm, algorithm.loss) == ("auto", "hinge")
    assert made["privacy"].clip_norm == data["l1"] + 1 == 13.0
    assert data["labels"] == "class"


def test_an_experiment_runs_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_csv(tmp_path / "azpro.csv", stays())
    words = ["--config-dir", str(CONFIGS), "--trust", READERS, "experiment=cost_of_privacy_hospital"]
    kappa = ["algorithm.kappa=1", "rounds=4", "baselines=null"]
    assert cli.main([*words, *kappa, f"data.root={file}", f"hydra.run.dir={tmp_path}/run"]) == 0
    assert "chosen by their place in the file, are taken as public" in " ".join(capsys.readouterr().out.split())
