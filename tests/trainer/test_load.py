"""What is loaded from a run folder is what the run returned: to the bit, with its baselines."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmtl import (
    MPMTL,
    PPDMTL,
    Callback,
    ClientPrivacy,
    FedAvg,
    Finetune,
    LocalOptimizer,
    PoissonClocks,
    PrivatePrior,
    RecordPrivacy,
    Result,
    load_data,
    models,
)
from fedmtl.errors import ConfigError, DataError, ModelError
from fedmtl.trainer import verify
from tests import small

from .settings import DATA, SOLVER, trainer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, nn.Module):
        return repr(a) == repr(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Result):
        return not differences(a, b)
    if hasattr(a, "__dataclass_fields__") and any(isinstance(value, Tensor) for value in vars(a).values()):
        return type(a) is type(b) and all(same(value, getattr(b, name)) for name, value in vars(a).items())
    return bool(a == b)


def differences(a: Result, b: Result) -> list[str]:
    return [one.name for one in fields(Result) if not same(getattr(a, one.name), getattr(b, one.name))]


def margin(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


@pytest.mark.parametrize(
    "given",
    [
        {"baselines": ("local", "fedavg", "ditto"), "metrics": ["f1", "balanced_accuracy"]},
        {"algorithm": FedAvg(local=SOLVER), "finetune": Finetune(kind="kl", local=LocalOptimizer(lr=0.01, steps=2))},
        {"finetune": Finetune(validation=0.4), "baselines": ("local", "fedavg"), "dtype": "float32"},
        {"privacy": None, "model": models.lora(models.mlp(hidden=4), rank=2), "seed": 3},
        {"privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=1.0, source="secure")},
        {"model": models.mlp(hidden=3), "trainable": ("3.*",), "rounds": 2},
        {"evaluate_clients": 6, "baselines": ("local", "fedavg")},
    ],
    ids=["metrics", "finetuned", "chosen", "lora", "secure", "trainable", "drawn"],
)
def test_a_loaded_result_is_the_result(tmp_path: Path, given: dict[str, Any]) -> None:
    result = trainer(folder=tmp_path / "run", **given).fit()
    found = Result.load(tmp_path / "run")
    assert differences(result, found) == []
    assert found.summary() == result.summary()
    assert repr(found) == repr(result)
    assert found.numbers() == result.numbers()
    x = DATA.test.x[:5].double()
    for client in result.owners[:3]:
        expected = result.model_for(client).to(torch.float64)(x)
        assert torch.equal(found.model_for(client).to(torch.float64)(x), expected)
    assert torch.equal(found.shared_model().double()(x), result.shared_model().double()(x))
    new = DATA.subset(DATA.ids[:4])
    expected, joined = result.adapt(new, device="cpu"), found.adapt(new)
    assert torch.equal(joined.personal, expected.personal)
    assert joined.by_client == expected.by_client
    assert joined.summary() == expected.summary()


TASKS = load_data("synthetic_tasks", tasks=6, features=5, train_examples=20, seed=1)
LINEAR: dict[str, dict[str, Any]] = {
    "pp_dmtl": {
        "algorithm": PPDMTL(loss="squared", row_norm=5.0, target=5.0, smoothness=2.0),
        "schedule": PoissonClocks(per_client=4),
        "rounds": 24,
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=3.0),
    },
    "mp_mtl": {"algorithm": MPMTL(lam=0.5, own_penalty="frobenius"), "rounds": 3},
    "private_prior": {"algorithm": PrivatePrior(), "loss": "half_mse"},
    "replicates": {
        "algorithm": MPMTL(lam=0.5),
        "replicates": 3,
        "epsilons": (1.0, 4.0),
        "privacy": ClientPrivacy(clip_norm=1.0, epsilon=1.0),
        "rounds": 2,
    },
}


def linear(**given: Any) -> Result:
    return small.trainer(**{"data": TASKS, "model": models.linear_regression(bias=False)} | given).fit()


@pytest.mark.parametrize("case", LINEAR)
def test_linear_models_and_their_parts_are_loaded(case: str, tmp_path: Path) -> None:
    result, found = linear(folder=tmp_path, **LINEAR[case]), Result.load(tmp_path)
    assert differences(result, found) == []
    assert found.summary() == result.summary()
    assert verify.verify(tmp_path).fits
    parts = found.parts
    if "P" in parts:
        assert torch.allclose(parts["P"] + parts["Q"], result.personal, atol=1e-12)
        assert float(parts["P"].norm()) > 0
    if "directions" in parts:
        assert torch.allclose(parts["directions"] @ parts["directions"].T, torch.eye(5).double(), atol=1e-8)


def test_the_covariance_is_what_was_released() -> None:
    """Without noise and clip it is W^T W of the models before the last step, here of their starts."""
    once = linear(algorithm=MPMTL(lam=0.5, ridge=0.1, rho=0.0))
    starts = linear(algorithm=MPMTL(lam=0.0, ridge=0.1, rho=0.0)).personal  # M is then the identity
    assert torch.allclose(once.parts["covariance"], starts.T @ starts, rtol=1e-8)
    assert torch.allclose(once.personal, starts @ once.parts["map"], rtol=1e-8)


def test_a_model_of_the_callers_own_is_given(tmp_path: Path) -> None:
    """Scores and tables need none; modules do, and another network is refused."""
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(*(DATA.spec.shape[0], 4)), nn.Tanh(), nn.Linear(4, DATA.spec.outputs)
    )
    result = trainer(model=network, metrics=[margin], folder=tmp_path).fit()
    found = Result.load(tmp_path)
    assert differences(result, found) == ["asked", "module", "terms"]
    assert found.summary() == result.summary().replace(" or a smaller algorithm.local.lr", "")  # a term of the run
    assert torch.equal(found.shared, result.shared)
    with pytest.raises(ConfigError, match=r"does not say how its model is built.*Result.load\(folder, model=\.\.\.\)"):
        found.model_for(result.ids[0])
    again = Result.load(tmp_path, model=network)
    assert same(again.model_for("client-1").state_dict(), result.model_for("client-1").state_dict())
    with pytest.raises(ConfigError, match="does not know the settings of its run"):
        again.adapt(DATA)
    with pytest.raises(ModelError, match="model has the parameters"):
        Result.load(tmp_path, model=models.mlp(hidden=9))


def test_a_client_that_is_not_there_is_said_with_those_that_are() -> None:
    result = trainer(rounds=1).fit()
    said = r"no client 'clien-1'; did you mean 'client-1'\? the 12 clients are 'client-0'"
    with pytest.raises(ConfigError, match=said):
        result.model_for("clien-1")
    with pytest.raises(ConfigError, match=r"no client 7; "):
        result.model_for(7)


def test_folders_that_hold_no_finished_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere holds no finished run .*result.json is missing; .*fedmtl resume"):
        Result.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"folder is None; give the path of a finished run"):
        Result.load(None)  # type: ignore[arg-type]
    trainer(folder=tmp_path, rounds=2).fit()
    outcome = tmp_path / "private" / "outcome.json"
    outcome.write_text(json.dumps({"ids": []}))
    with pytest.raises(DataError, match=r"outcome.json is no outcome of a run: KeyError\('network'\)"):
        Result.load(tmp_path)
    outcome.unlink()
    with pytest.raises(ConfigError, match=r"outcome.json is missing; fedmtl resume .* one of an earlier version"):
        Result.load(tmp_path)
    ended = Looking(tmp_path / "private" / "result.json")
    trainer(folder=tmp_path, rounds=2, callbacks=[ended]).fit(resume=True)
    assert ended.marks == [True, False], "a run whose files are written again is not finished before they all are"
    assert Result.load(tmp_path).stopped == "rounds"


class Looking(Callback):
    """Notes whether there is a file when a run starts and when it ends."""

    def __init__(self, path: Path) -> None:
        self.path, self.marks = path, list[bool]()

    def on_start(self, name: str, rounds: int, step: int) -> None:
        self.marks.append(self.path.exists())

    def on_end(self, result: Result | None) -> None:
        self.marks.append(self.path.exists())
