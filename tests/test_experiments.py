"""The papers' experiments by name: they compose, run, are listed, and ask for data that are not there."""

from pathlib import Path

import pytest

from fedmtl import cli
from fedmtl.cli.build import settings
from fedmtl.cli.config import compose, resolve
from tests.data.rows import write_csv
from tests.data.test_hospital import stays

EXPERIMENTS = sorted(
    path.stem for path in (Path(__file__).parents[1] / "configs/experiment").glob("*.yaml")
)
SMALL = {
    "mp_mtl_synthetic": ["data.tasks=6", "data.features=5", "data.train_examples=8", "rounds=2"],
    "p2p_synthetic": ["data.agents=6", "data.features=4", "rounds=12"],
    "pp_dmtl_synthetic": ["data.tasks=4", "data.features=5", "rounds=8"],
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes(experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    root = ["data.root=x"] if "root" in config.data.keys() else []  # noqa: SIM118, which leaves out what is ???
    settings(resolve(compose([f"experiment={experiment}", *root])))


def test_the_machine_of_the_census_has_the_bound_of_its_rows() -> None:
    """What clients' rows keep, which the learner takes Xi from, is what noise is made for: with a 1 for the bias."""
    config = resolve(compose(["experiment=cost_of_privacy_svm", "data.root=x"]))
    made = settings(config)
    algorithm, data = made.algorithm, config["data"]
    assert (algorithm.feature_norm, algorithm.loss) == ("auto", "hinge")
    assert made.privacy.clip_norm == data["l1"] + 1 == 13.0
    assert data["labels"] == "class"


def test_an_experiment_on_a_file_runs_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_csv(tmp_path / "azpro.csv", stays())
    words = [
        "experiment=cost_of_privacy_hospital",
        "algorithm.kappa=1",
        "rounds=4",
        "baselines=null",
    ]
    assert cli.main([*words, f"data.root={file}", f"hydra.run.dir={tmp_path}/run"]) == 0
    assert "chosen by their place in the file, are taken as public" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("experiment", SMALL)
def test_an_experiment_on_synthetic_data_runs_by_name(experiment: str, tmp_path: Path) -> None:
    words = [f"experiment={experiment}", *SMALL[experiment], "progress=false", "baselines=[]"]
    assert cli.main([*words, f"hydra.run.dir={tmp_path}/run"]) == 0


@pytest.mark.parametrize("name", ["lending", "hospital", "svm"])
def test_data_that_are_not_there_are_asked_for_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"experiment=cost_of_privacy_{name}", f"hydra.run.dir={tmp_path}/run"]
    assert cli.main(words) == 2
    assert (
        capsys.readouterr().err.strip()
        == "fedmtl: error: data.root is required; add data.root=VALUE."
    )
    assert cli.main([*words, f"data.root={tmp_path}/nowhere"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{tmp_path}/nowhere" in line
    assert "does not exist" in line


def test_the_help_lists_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS)


def test_the_films_are_scored_as_in_the_paper() -> None:
    """Table 1 of Bellet et al. has root mean squared errors by user."""
    assert all(
        compose([f"experiment={name}"]).metrics == ["rmse"]
        for name in ("p2p_movielens", "p2p_movielens_paper")
    )
