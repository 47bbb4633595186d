"""Every setting of every method has an effect, or is refused by name where it would have none."""

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest

import fedmtl
from fedmtl import (
    ClientPrivacy,
    FullParticipation,
    LocalSGD,
    PoissonClocks,
    RecordPrivacy,
    Trainer,
    algorithms,
    contrib,
    models,
)
from fedmtl.algorithms import Algorithm, LocalFit, RoundAlgorithm, ServerOptimizer, SharedModel
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.graphs import Complete, Ring

DATA = load_synthetic_tasks(
    tasks=4, train_examples=8, test_examples=6, features=4, rank=1, public_examples=6, seed=3
)
NUMBERS = load_synthetic_tasks(
    tasks=4, train_examples=8, test_examples=6, features=4, problem="regression", seed=3
)
IDS = [str(name) for name in DATA.ids]
SOLVER = LocalSGD(lr=0.3, epochs=1, batch_size=4)
METHODS = {
    name: kind
    for name, kind in {**vars(algorithms), **vars(contrib)}.items()
    if inspect.isclass(kind)
    and issubclass(kind, Algorithm)
    and kind not in (Algorithm, LocalFit, RoundAlgorithm, SharedModel)
}
NEEDED: dict[
    str, dict[str, Any]
] = {  # fields without a default, and settings under which others have an effect
    "ClusteredPMTL": {"clusters": dict(zip(IDS, "aabb", strict=True))},
    "MPMTLayers": {"layers": ("3",)},
    "PeerAveraging": {"graph": Ring()},
    "PeerToPeer": {"graph": Ring()},
    "RangedSGD": {"range_rounds": 1},
    "SharedDirections": {"a2": None},
}
SERVER = {
    "server_lr": 0.5,
    "server_optimizer": ServerOptimizer(lr=0.3, options={"momentum": 0.9}),
    "local": SOLVER,
}
SHARED = SERVER | {"weights": "examples", "cap": 9}
BOUNDS = {"feature_norm": 0.5, "target": 0.1}
PEERS = BOUNDS | {
    "graph": Complete(), "mu": 0.3, "loss": "squared", "lam": 0.2, "smoothness": 1.0, "allocation": "optimal",
    "warm_start": 0.2,
}  # fmt: skip
PP_DMTL = BOUNDS | {
    "loss": "squared", "lam": 0.3, "tau": 0.1, "a1": 0.1, "a2": "auto", "delay": 3, "smoothness": 0.7, "penalty": "l21",
    "refine_tau": 0.1, "batch_rate": 0.5,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {  # another value of every field
    "APFL": SHARED | {"alpha": 0.2, "adaptive": True},
    "AsyncLearner": BOUNDS | {
        "loss": "logistic", "reg": 0.1, "theta_max": 1e-3, "step_size": 0.3, "kappa": 3.0, "horizon": 5,
    },
    "ClusteredPMTL": SHARED | {"clusters": dict(zip(IDS, "abab", strict=True)), "lam": 0.2},
    "Ditto": SHARED | {"lam": 0.2},
    "FedAvg": SHARED | {"averaged": True},
    "FedPer": SHARED | {"head": ["1"], "head_local": SOLVER},
    "FedProx": SHARED | {"mu": 0.7, "averaged": True},
    "FedRep": SHARED | {"head": ["1"], "head_local": SOLVER},
    "FedSGD": SHARED | {"averaged": True, "rate": 0.5, "records": 99},
    "IFCA": SHARED | {"clusters": 2, "spread": 0.5},
    "Local": {"local": SOLVER},
    "MPMTL": BOUNDS | {
        "loss": "logistic", "lam": 0.5, "penalty": "l21", "own_penalty": "l1", "own_lam": 0.0, "momentum": "nesterov",
        "ridge": 0.1, "rho": 2.0, "alpha": 1.0, "q": 0.5, "start_ridge": 0.3,
        "curator_epsilon": 3.0, "curator_delta": 1e-4,
    },
    "MPMTLayers": {"layers": ("1",), "threshold": 0.5, "penalty": "l21", "rho": 2.0, "alpha": 1.0, "local": SOLVER},
    "Moments": BOUNDS | {"reg": 0.1, "theta_max": 1e-3},
    "PFedMe": SHARED | {"lam": 0.2, "eta": 0.2, "local_rounds": 3},
    "PMTL": SHARED | {"lam": 0.2, "reference": "local"},
    "PPDMTL": PP_DMTL | {"own_penalty": "l1", "refine": False},
    "PPSGD": SHARED | {"ratio": 0.5},
    "PeerAveraging": PEERS | {"releases": 2, "confidence_power": 1.0, "refine": 0.5, "refine_from": "own", "pairwise": True},
    "PeerToPeer": PEERS,
    "ProximalPoint": {
        "mu": 0.5, "steps": 3, "averaged": True, "server_lr": 0.5, "weights": "examples", "cap": 9,
        "server_optimizer": SERVER["server_optimizer"], "intercept_rounds": 1,
        "vote_rounds": 1,
    },
    "PriorLayers": {"layers": ("3",), "ridge": 0.3, "side": "output", "scale": 0.5, "local": SOLVER},
    "PrivatePrior": BOUNDS | {
        "loss": "logistic", "ridge": 0.1, "own_ridge": False, "share": 0.5, "form": "diagonal", "scale": 0.5,
    },
    "RangedSGD": SHARED | {"averaged": True, "records": 99, "range_rounds": 2},
    "Scaffold": SHARED,
    "SharedDirections": PP_DMTL | {"refine_across": 0.1},
    "PublicStart": BOUNDS | {"loss": "logistic", "reg": 0.1, "theta_max": 1e-3},
}  # fmt: skip
WITHOUT_EFFECT = {  # in this run, and why
    ("FedSGD", "local"): "is of finetuning, and no client trains in a round",
    ("RangedSGD", "local"): "is of finetuning, and no client trains in a round",
    ("FedPer", "head_local"): "is of clients that never took part, and here all do",
    (
        "PeerAveraging",
        "confidence_power",
    ): "is of agents with different numbers of records, and here all have eight",
} | {
    (
        "PriorLayers",
        field,
    ): "shapes the release, and of four clients' changes of a network nothing stands out"
    for field in ("layers", "side", "scale")
}


def _model(name: str, linear: bool) -> models.ModelFactory:
    """The model of a tiny run."""
    if name == "RangedSGD":  # whose ranges need a level
        return models.linear_regression()
    if linear:
        return models.linear_regression(bias=False)
    return models.mlp(hidden=3)


def outcome(name: str, **changes: Any) -> list[Any]:
    """Models, scores and report of a tiny run."""
    fields = {field.name for field in dataclasses.fields(METHODS[name])}
    usual = {"local": LocalSGD(lr=0.1, epochs=2, batch_size=4)} if "local" in fields else {}
    made = METHODS[name](**(usual | NEEDED.get(name, {}) | changes))
    clocked = made.one_at_a_time
    linear = clocked or name in ("LocalAverage", "MPMTL", "PrivatePrior", "ProximalPoint")
    law = "l2_laplace" if name in ("PPDMTL", "SharedDirections") else "laplace"
    record = RecordPrivacy(clip_norm=10.0, epsilon=50.0, delta=1e-5, mechanism=law)
    whole = ClientPrivacy(clip_norm=5.0, noise_multiplier=1e-3, delta=1e-5)
    if name in ("FedSGD", "RangedSGD"):  # of vectors of single records
        whole = None
    result = Trainer(
        algorithm=made,
        data=NUMBERS if name == "RangedSGD" else DATA,
        model=_model(name, linear),
        schedule=PoissonClocks(per_client=3) if clocked else FullParticipation(),
        privacy=record if clocked else whole,
        # votes take a tenth of the rounds at most
        rounds=12
        if clocked or name == "ProximalPoint"
        else 1
        if name in ("PrivatePrior", "PriorLayers")
        else 3,
        eval_every=12,
        seed=1,
        dtype="float64",
        execution=fedmtl.Execution(processes=1),
        progress=False,
    ).fit()
    row = {key: value for key, value in result.final.items() if key not in ("time", "seconds")}
    shared = None if result.shared is None else result.shared.tolist()
    return [result.personal.tolist(), shared, row, repr(result.privacy)]


def test_every_setting_of_every_method_is_tried() -> None:
    tried = {name: set(OTHERS.get(name, ())) for name in METHODS}
    assert tried == {
        name: {field.name for field in dataclasses.fields(METHODS[name])} for name in tried
    }


@pytest.mark.parametrize("name", OTHERS)
def test_every_setting_has_an_effect_or_is_refused(name: str) -> None:
    usual, silent = outcome(name), {}
    for field, value in OTHERS[name].items():
        try:
            if outcome(name, **{field: value}) == usual:
                silent[name, field] = "has no effect"
        except FedmtlError as error:
            if not re.search(rf"\b{field}\b", str(error)):
                silent[name, field] = f"is refused, but not by name: {error}"
    assert set(silent) == {place for place in WITHOUT_EFFECT if place[0] == name}, silent


@pytest.mark.parametrize(
    ("name", "field", "context"),
    [
        ("FedRep", "head_local", {}),
        ("MPMTL", "own_lam", {"own_penalty": "l1"}),
        ("MPMTL", "curator_delta", {"curator_epsilon": 3.0}),
        ("PPDMTL", "target", {"loss": "squared"}),
        ("PeerToPeer", "target", {"loss": "squared"}),
        ("PeerAveraging", "target", {"loss": "squared"}),
        ("PeerAveraging", "allocation", {"releases": 3}),
        ("SharedDirections", "target", {"loss": "squared"}),
    ],
)
def test_a_setting_has_an_effect_beside_the_one_it_needs(
    name: str, field: str, context: dict[str, Any]
) -> None:
    assert outcome(name, **context) != outcome(name, **context, **{field: OTHERS[name][field]})


@pytest.mark.parametrize(
    "name", ["AsyncLearner", "MPMTL", "PrivatePrior", "PPDMTL", "PeerToPeer", "LocalFit"]
)
def test_a_bound_on_targets_is_refused_beside_a_loss_of_two_classes(name: str) -> None:
    kind = METHODS.get(name, LocalFit)
    with pytest.raises(
        ConfigError, match=rf"{name}\.target is 0\.1, .* and loss is 'logistic'; leave it out\."
    ):
        kind(**NEEDED.get(name, {}), loss="logistic", target=0.1)


WEIGHTED = {"weights": "examples", "cap": 6}
STEEP = r"lr \* lam = 0\.1 \* 30"
REFUSED: list[tuple[str, dict[str, Any], str]] = [  # settings that do not go together
    ("FedProx", {"mu": 30.0}, STEEP),
    ("Ditto", {"lam": 30.0}, STEEP),
    ("PMTL", {"lam": 30.0}, STEEP),
    ("Finetune", {"lam": 30.0, "kind": "mean"}, STEEP),
    ("PriorLayers", {"ridge": 30.0}, "proximal"),
    ("PMTL", {"reference": "local", "server_optimizer": ServerOptimizer()}, "reference='global'"),
    ("PFedMe", {"eta": 3.0, "lam": 1.0}, r"PFedMe\.eta \* lam"),
    ("PPSGD", {"local": LocalSGD(lr=0.1, weight_decay=0.1)}, r"PPSGD\.local"),
    (
        "Scaffold",
        {"local": fedmtl.LocalOptimizer(lr=0.1)},
        r"Scaffold\.local is .*LocalSGD without momentum",
    ),
    (
        "Scaffold",
        {"local": LocalSGD(lr=0.1, momentum=0.9)},
        r"Scaffold\.local is .*LocalSGD without momentum",
    ),
    (
        "Scaffold",
        WEIGHTED,
        r"Scaffold\.weights is 'examples', but its clients send what its own equations say",
    ),
    ("FedAvg", {"cap": 5}, r"FedAvg\.cap is 5, which has no effect on uniform weights"),
    ("FedPer", {"head": "fc"}, r"FedPer\.head is 'fc'"),
    (
        "ServerOptimizer",
        {"options": {"momentun": 0.9}},
        "options is .* which torch.optim.SGD does not take",
    ),
    (
        "ServerOptimizer",
        {"options": {"momentum": -1.0}},
        "options is .* which torch.optim.SGD does not take",
    ),
    (
        "ServerOptimizer",
        {"options": {"lr": 0.1}},
        "options is .* which torch.optim.SGD does not take",
    ),
    ("MPMTL", {"momentum": "strongly_convex", "ridge": 0.0}, "ridge"),
    ("MPMTL", {"curator_delta": 0.1}, "curator_epsilon"),
    ("MPMTL", {"curator_epsilon": math.inf}, "inf"),
    ("MPMTL", {"alpha": 1.0, "q": 0.9}, "not both"),
    ("PPDMTL", {"tau": 0.0}, "tau is 0"),
    (
        "AsyncLearner",
        {"step_size": 0.1, "kappa": 9},
        "kappa is 9, which chooses the automatic step",
    ),
    (
        "AsyncLearner",
        {"step_size": 0.1, "horizon": 9},
        "horizon is 9, which chooses the automatic step",
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    kind = getattr(algorithms, name, None) or getattr(fedmtl, name)
    with pytest.raises(ConfigError, match=message):
        kind(**NEEDED.get(name, {}) | settings)
