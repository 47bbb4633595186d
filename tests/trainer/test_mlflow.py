"""The MLflow callback: what is logged, and that nothing is written beside the run's private folder."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedmtl.cli.config import build, compose, resolve
from fedmtl.errors import ConfigError
from fedmtl.trainer.callbacks import MLflow

from .settings import trainer


class StandIn(ModuleType):
    """A module with the functions of MLflow, which keep what they were given."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return None if name == "get_experiment_by_name" else SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for one, args, options in self.calls if one == name]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_settings_and_history_are_logged_into_the_folder(
    mlflow: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {f"key{i}": i for i in range(120)} | {"long": "x" * 900}
    result = trainer(callbacks=[MLflow("run/private/mlflow", parameters=settings)]).fit()
    assert mlflow.of("set_tracking_uri") == [((f"sqlite:///{tmp_path}/run/private/mlflow/mlflow.db",), {})]
    place = {"artifact_location": f"file://{tmp_path}/run/private/mlflow/artifacts"}
    assert mlflow.of("create_experiment") == [(("fedmtl",), place)]
    assert mlflow.of("start_run") == [((), {"run_name": "pmtl"})]
    batches = [args[0] for args, _ in mlflow.of("log_params")]
    assert [len(one) for one in batches] == [100, 21]  # MLflow takes 100 at once
    assert batches[0] | batches[1] == {f"key{i}": str(i) for i in range(120)} | {"long": "x" * 500}
    logged = {options["step"]: args[0] for args, options in mlflow.of("log_metrics")}
    assert logged == {row["round"]: {k: v for k, v in row.items() if k != "round"} for row in result.history}
    assert mlflow.of("end_run") == [(("FINISHED",), {})]
    assert {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()} == {
        ("run", "private", "mlflow")
    }


def test_a_resumed_run_goes_on_and_an_interrupted_one_is_marked(mlflow: StandIn, tmp_path: Path) -> None:
    callback = MLflow(tmp_path, parameters={"a": 1})
    callback.on_start("pmtl", 6, 0)
    callback.on_end(None)
    assert mlflow.of("end_run") == [(("KILLED",), {})]
    MLflow(tmp_path, parameters={"a": 1}).on_start("pmtl", 6, 2)
    assert mlflow.of("start_run")[1:] == [((), {"run_id": "r1"})]
    assert len(mlflow.of("log_params")) == 1


def test_the_command_logs_the_resolved_configuration_privately(mlflow: StandIn, tmp_path: Path) -> None:
    words = ("logger=mlflow", "data.clients=30", "schedule.cohort=9", "algorithm=pmtl", "privacy.epsilon=2")
    words += ("+logger.parameters.who=me",)
    made = build(resolve(compose(words)), tmp_path / "run")
    (callback,) = made.callbacks
    callback.on_start("pmtl", 6, 0)
    assert mlflow.of("set_tracking_uri") == [((f"sqlite:///{tmp_path}/run/private/mlflow/mlflow.db",), {})]
    found: dict[str, str] = {}
    for (part,), _ in mlflow.of("log_params"):
        found |= part
    expected = {"data.clients": "30", "algorithm": "PMTL", "privacy.epsilon": "2", "who": "me", "rounds": "100"}
    assert expected.items() <= found.items()


def test_a_database_of_ones_own(mlflow: StandIn) -> None:
    MLflow(tracking_uri="sqlite:///mine.db").on_start("pmtl", 6, 0)
    assert mlflow.of("set_tracking_uri") == [(("sqlite:///mine.db",), {})]


def test_without_mlflow_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r'pip install "fedmtl\[mlflow\]"'):
        MLflow(tmp_path)
    with pytest.raises(ConfigError, match="MLflow needs folder"):
        MLflow()
