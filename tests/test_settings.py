"""Every field of every settings class refuses what is out of its range or of another type, and names itself."""

import dataclasses
import importlib
import math
import pkgutil
from typing import Any

import numpy as np
import pytest

from fedmtl._check import Positive
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring

PACKAGES = (
    "algorithms",
    "contrib",
    "local",
    "privacy",
    "schedules",
    "graphs",
    "trainer.stopping",
    "audit.lower_bound",
)
PACKAGES += ("data.transforms", "data.partition")
REQUIRED: dict[str, dict[str, Any]] = {  # fields without a default, and those that others need
    "ClientPrivacy": {"clip_norm": 1.0, "epsilon": 1.0},
    "Buffered": {"latency": 1.0},
    "ByClasses": {"clients": 2, "classes_per_client": 1},
    "ClusteredPMTL": {"clusters": {"a": 1}},
    "CyclicCohorts": {"cohort": 2},
    "Deadline": {"latency": 1.0, "limit": 1.0},
    "Dirichlet": {"clients": 2, "alpha": 1.0},
    "Dropouts": {"rate": 1.0, "duration": 1.0},
    "FixedCohort": {"cohort": 2},
    "KNNCosine": {"k": 2},
    "Latencies": {"latency": 1.0, "activations": 3},
    "LinearLoss": {"name": "squared"},
    "LocalOptimizer": {"lr": 0.1},
    "LocalSGD": {"lr": 0.1},
    "MPMTLayers": {"layers": ("3",)},
    "PeerAveraging": {"graph": Ring()},
    "PeerToPeer": {"graph": Ring()},
    "PoissonClocks": {"activations": 3},
    "PoissonSampling": {"cohort": 2},
    "PublishedPeerToPeer": {"graph": Ring()},
    "QuantileClip": {"initial": 1.0},
    "RecordPrivacy": {"clip_norm": 1.0, "epsilon": 1.0},
    "RowBound": {"bound": 1.0},
    "RowNoise": {"epsilon": 1.0},
    "SecureAggregation": {"colluding": 1},
    "Shards": {"clients": 2},
    "Synchronous": {"latency": 1.0, "activations": 3},
    **{f"L{order}Clip": {"bound": 1.0} for order in (1, 2)},
    **{
        f"{law}Noise": {"multiplier": 1.0}
        for law in ("DiscreteGaussian", "Gaussian", "L2Laplace", "Laplace", "Wishart")
    },
}
NO_SETTINGS = {  # base classes, and those that hold what a run has made, not what a user has set
    "CentralLearner", "SharedModels", "ChannelAccount", "Effort", "Graph", "EdgesFile", "GradientPlan", "NoiseLaw",
    "Packed", "PrivacyCost", "RandomLatency", "OneAnswer", "Release", "LocalSolver", "Clip", "Examples", "FederatedDataset",
    "BoundSchedule", "ReleasePlan", "Server", "DistributedGaussian",
}  # fmt: skip
COUNT = (0, -1, 2.5, math.nan, True, "other", None)
POSITIVE = (0, -1.0, math.nan, math.inf, True, "other", None)
AT_LEAST_0 = (-1.0, math.nan, math.inf, True, "other", None)
SHARE = (-0.5, 1.5, math.nan, True, "other", None)
NUMBER = (math.nan, math.inf, True, "other", None)
WORD = ("other", 3, True, None)
FLAG = (3, "other", None)
OTHER_TYPE = (3, 0.5, True, "other", None)
RANGES = (  # of fields by name, or by class and name; the rest of the floats are above 0
    (
        AT_LEAST_0,
        "lam rho threshold a1 weight_decay spread ratio min_delta between confidence_power tau rate",
    ),
    ((-1.0, math.nan, True, "other"), "Average.noise"),
    (AT_LEAST_0, "FedProx.mu MPMTL.ridge PublishedMPMTL.ridge"),
    (POSITIVE, "PFedMe.lam PeerAveraging.lam PeerToPeer.lam PublishedPeerToPeer.lam Dropouts.rate"),
    (SHARE, "share APFL.alpha"),
    ((*SHARE, 1.0), "validation LocalSGD.momentum BackoffSGD.momentum"),
    ((0, *SHARE, 1.0), "ClientPrivacy.delta RecordPrivacy.delta"),
    ((*POSITIVE, 1.5), "batch_rate decay PMTL.server_lr ClusteredPMTL.server_lr"),
    ((*POSITIVE, 1e-160, 1e162), "ClientPrivacy.noise_multiplier RecordPrivacy.noise_multiplier"),
    ((0, -1.0, math.nan, True), "ClientPrivacy.epsilon RecordPrivacy.epsilon LocalFit.theta_max"),
    (NUMBER, "MPMTL.alpha PublishedMPMTL.alpha MPMTLayers.alpha"),
    ((math.nan, math.inf, "other", None), "Affine.scale Affine.shift"),
    (WORD, "optimizer_name"),
    (AT_LEAST_0, "Buffered.latency"),
    ((-1, 1.5, True, "other"), "intercept_rounds vote_rounds Buffered.max_staleness"),
    ((-1.0, "other"), "allocation"),
)
WRONG: dict[str, tuple[Any, ...]] = {
    name: values for values, names in RANGES for name in names.split()
}
WORDS = (
    "Literal",
    "LossName",
    "TaskLoss",
    "SharedPenalty",
    "OwnPenalty",
    "Momentum",
    "Kind",
    "Start",
    "Side",
    "Form",
    "Staleness",
)
WORDS += ("Mechanism", "SourceName")
# what takes more than one value to say, or what a Trainer refuses: tests of the class have it
ELSEWHERE = {
    "ClusteredPMTL.clusters", "Dropouts.intervals", "Latencies.dropouts", "Buffered.dropouts", "Synchronous.dropouts",
    "LocalOptimizer.options", "ServerOptimizer.options", "MPMTL.curator_epsilon",
    "PublishedMPMTL.curator_epsilon", "MPMTL.curator_delta", "PublishedMPMTL.curator_delta", "server_optimizer",
}  # fmt: skip


def settings_classes() -> dict[str, type]:
    classes = {}
    for package in PACKAGES:
        module = importlib.import_module(f"fedmtl.{package}")
        inside = pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}.")
        for one in (
            module,
            *(importlib.import_module(name) for _, name, _ in inside if ".audit" not in name),
        ):
            for name, kind in vars(one).items():
                checked = (
                    isinstance(kind, type)
                    and dataclasses.is_dataclass(kind)
                    and hasattr(kind, "__post_init__")
                )
                if checked and kind.__module__.startswith("fedmtl.") and not name.startswith("_"):
                    classes[name] = kind
    return {name: kind for name, kind in sorted(classes.items()) if name not in NO_SETTINGS}


CLASSES = settings_classes()


def wrong_values(name: str, field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Values that a field must refuse, by the table or by its annotation."""
    annotation = str(field.type)
    wrong = WRONG.get(f"{name}.{field.name}", WRONG.get(field.name))
    if wrong is None:
        kinds = {
            "int": COUNT,
            "float": POSITIVE,
            "bool": FLAG,
            "Count": COUNT,
            "Whole": (-1, *COUNT[2:]),
            "Positive": POSITIVE,
        }
        kinds |= dict.fromkeys(WORDS, WORD) | {"Fraction": (0, *SHARE, 1.0)}
        wrong = next(
            (values for start, values in kinds.items() if annotation.startswith(start)), OTHER_TYPE
        )
    return tuple(value for value in wrong if value is not None or "None" not in annotation)


@pytest.mark.parametrize("name", CLASSES)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(name: str) -> None:
    required, silent = REQUIRED.get(name, {}), {}
    owners = tuple(
        kind.__name__ for kind in CLASSES[name].__mro__
    )  # a check of a base class may give its name
    for field in dataclasses.fields(CLASSES[name]):
        if {field.name, f"{name}.{field.name}"} & ELSEWHERE:
            continue
        for value in wrong_values(name, field):
            try:
                CLASSES[name](**required | {field.name: value})
                silent[field.name, value] = "is taken"
            except ConfigError as error:
                named = str(error).startswith(
                    tuple(f"{owner}.{field.name} is {value!r}" for owner in owners)
                )
                if not named or "\n" in str(error):
                    silent[field.name, value] = f"is refused, but not by name: {error}"
    assert silent == {}


def test_fields_are_checked_before_the_checks_of_a_class() -> None:
    seen: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Own(Ring):
        least: Positive = 1.0

        def __post_init__(self) -> None:
            seen.append(f"{self.least > 9}")
            super().__post_init__()

    assert Own(least=np.float64(10.0)).least == 10.0
    assert seen == ["True"]
    # what is compared with a number is one
    with pytest.raises(
        ConfigError, match=r"^Own\.least is 'x'; it must be a finite number above 0"
    ):
        Own(least="x")
    assert seen == ["True"]
    with pytest.raises(ConfigError, match=r"^Own\.reach is 0; "):
        Own(reach=0)
    # a number of NumPy becomes one of Python, which JSON can hold
    assert type(Own(least=np.float64(2.0)).least) is float
