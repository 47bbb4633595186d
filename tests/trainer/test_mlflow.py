"""The MLflow callback: what is logged, and that nothing is written beside the run's private folder."""

import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from fedmtl.cli.build import build
from fedmtl.cli.config import compose, resolve
from fedmtl.errors import ConfigError
from fedmtl.trainer.callbacks import MLflow

from .settings import trainer


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A module that keeps what its functions were given."""
    module = MagicMock()
    module.get_experiment_by_name.return_value = None
    module.start_run.return_value.info.run_id = "r1"
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_settings_and_history_are_logged_into_the_folder(
    mlflow: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {f"key{i}": i for i in range(120)} | {"long": "x" * 900}
    result = trainer(callbacks=[MLflow("run/private/mlflow", parameters=settings)]).fit()
    place = f"{tmp_path}/run/private/mlflow"
    mlflow.set_tracking_uri.assert_called_once_with(f"sqlite:///{place}/mlflow.db")
    mlflow.create_experiment.assert_called_once_with(
        "fedmtl", artifact_location=f"file://{place}/artifacts"
    )
    mlflow.start_run.assert_called_once_with(run_name="pmtl")
    batches = [one.args[0] for one in mlflow.log_params.call_args_list]
    assert [len(one) for one in batches] == [100, 21]  # MLflow takes 100 at once
    assert batches[0] | batches[1] == {f"key{i}": str(i) for i in range(120)} | {"long": "x" * 500}
    rows = [
        ({name: value for name, value in row.items() if name != "round"}, row["round"])
        for row in result.history
    ]
    assert mlflow.log_metrics.call_args_list == [call(numbers, step=step) for numbers, step in rows]
    mlflow.end_run.assert_called_once_with("FINISHED")
    assert all(path.is_relative_to(place) for path in tmp_path.rglob("*") if path.is_file())


def test_a_resumed_run_goes_on_and_an_interrupted_one_is_marked(
    mlflow: MagicMock, tmp_path: Path
) -> None:
    callback = MLflow(tmp_path, parameters={"a": 1})
    callback.on_start("pmtl", 6, 0)
    callback.on_end(None)
    mlflow.end_run.assert_called_once_with("KILLED")
    MLflow(tmp_path, parameters={"a": 1}).on_start("pmtl", 6, 2)
    assert mlflow.start_run.call_args_list[1:] == [call(run_id="r1")]
    mlflow.log_params.assert_called_once()


def test_the_command_logs_the_resolved_configuration_privately(
    mlflow: MagicMock, tmp_path: Path
) -> None:
    words = (
        "logger=mlflow",
        "data.clients=30",
        "schedule.cohort=9",
        "algorithm=pmtl",
        "privacy.epsilon=2",
    )
    words += ("+logger.parameters.who=me",)
    (callback,) = build(resolve(compose(words)), tmp_path / "run").callbacks
    callback.on_start("pmtl", 6, 0)
    mlflow.set_tracking_uri.assert_called_once_with(
        f"sqlite:///{tmp_path}/run/private/mlflow/mlflow.db"
    )
    found: dict[str, str] = {}
    for one in mlflow.log_params.call_args_list:
        found |= one.args[0]
    expected = {
        "data.clients": "30",
        "algorithm": "PMTL",
        "privacy.epsilon": "2",
        "who": "me",
        "rounds": "100",
    }
    assert expected.items() <= found.items()


def test_a_database_of_ones_own(mlflow: MagicMock) -> None:
    MLflow(tracking_uri="sqlite:///mine.db").on_start("pmtl", 6, 0)
    mlflow.set_tracking_uri.assert_called_once_with("sqlite:///mine.db")


def test_mlflow_has_a_place_for_its_database() -> None:
    with pytest.raises(ConfigError, match="MLflow needs folder"):
        MLflow()
