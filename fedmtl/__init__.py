"""fedmtl: private, personalized federated learning in PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._imports import uncollected

__version__ = "0.1.0"

_EXPORTS = {
    "APFL": "algorithms",
    "IFCA": "algorithms",
    "PPSGD": "algorithms",
    "ClusteredPMTL": "algorithms",
    "FedPer": "algorithms",
    "FedRep": "algorithms",
    "PFedMe": "algorithms",
    "MPMTL": "algorithms",
    "MPMTLayers": "algorithms",
    "PMTL": "algorithms",
    "PPDMTL": "algorithms",
    "AsyncLearner": "algorithms",
    "Ditto": "algorithms",
    "DomainBound": "algorithms",
    "FedAvg": "algorithms",
    "FedProx": "algorithms",
    "Finetune": "algorithms",
    "Local": "algorithms",
    "PeerToPeer": "algorithms",
    "PriorLayers": "algorithms",
    "PublicStart": "algorithms",
    "Moments": "algorithms",
    "PrivatePrior": "algorithms",
    "ServerOptimizer": "algorithms",
    "FederatedDataset": "data",
    "load_data": "data",
    "Execution": "local",
    "LocalOptimizer": "local",
    "LocalSGD": "local",
    "ClientPrivacy": "privacy",
    "CyclicCohorts": "privacy",
    "FixedCohort": "privacy",
    "FullParticipation": "privacy",
    "PoissonSampling": "privacy",
    "QuantileClip": "privacy",
    "RecordPrivacy": "privacy",
    "Latencies": "schedules",
    "PoissonClocks": "schedules",
    "Synchronous": "schedules",
    "Callback": "trainer",
    "EarlyStopping": "trainer",
    "PrivateSearch": "search",
    "Result": "trainer",
    "Trainer": "trainer",
    "personalize": "trainer",
}
__all__ = [
    "APFL",
    "IFCA",
    "MPMTL",
    "PMTL",
    "PPDMTL",
    "PPSGD",
    "AsyncLearner",
    "Callback",
    "ClientPrivacy",
    "ClusteredPMTL",
    "CyclicCohorts",
    "Ditto",
    "DomainBound",
    "EarlyStopping",
    "Execution",
    "FedAvg",
    "FedPer",
    "FedProx",
    "FedRep",
    "FederatedDataset",
    "Finetune",
    "FixedCohort",
    "FullParticipation",
    "Latencies",
    "Local",
    "LocalOptimizer",
    "LocalSGD",
    "MPMTLayers",
    "Moments",
    "PFedMe",
    "PeerToPeer",
    "PoissonClocks",
    "PoissonSampling",
    "PriorLayers",
    "PrivatePrior",
    "PrivateSearch",
    "PublicStart",
    "QuantileClip",
    "RecordPrivacy",
    "Result",
    "ServerOptimizer",
    "Synchronous",
    "Trainer",
    "load_data",
    "models",
    "personalize",
]

if TYPE_CHECKING:
    from . import models
    from .algorithms import (
        APFL,
        IFCA,
        MPMTL,
        PMTL,
        PPDMTL,
        PPSGD,
        AsyncLearner,
        ClusteredPMTL,
        Ditto,
        DomainBound,
        FedAvg,
        FedPer,
        FedProx,
        FedRep,
        Finetune,
        Local,
        Moments,
        MPMTLayers,
        PeerToPeer,
        PFedMe,
        PriorLayers,
        PrivatePrior,
        PublicStart,
        ServerOptimizer,
    )
    from .data import FederatedDataset, load_data
    from .local import Execution, LocalOptimizer, LocalSGD
    from .privacy import (
        ClientPrivacy,
        CyclicCohorts,
        FixedCohort,
        FullParticipation,
        PoissonSampling,
        QuantileClip,
        RecordPrivacy,
    )
    from .schedules import Latencies, PoissonClocks, Synchronous
    from .search import PrivateSearch
    from .trainer import Callback, EarlyStopping, Result, Trainer, personalize


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts without PyTorch."""
    if name == "models":
        with uncollected():
            return import_module(".models", __name__)
    if name in _EXPORTS:
        with uncollected():
            return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
