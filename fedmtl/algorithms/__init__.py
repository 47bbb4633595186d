"""Federated methods: one file each, or a folder for a paper; :mod:`.base` defines a method."""

from .._check import Count, NonNegative, Positive, Share
from .apfl import APFL
from .async_learner.algorithm import AsyncLearner
from .base import Algorithm, Problem, State
from .client_batch import ClientBatch, ClientStates, personal_fields
from .clusters import IFCA, ClusteredPMTL
from .ditto import Ditto
from .fedavg import FedAvg, FedProx
from .fedrep import FedPer, FedRep
from .fedsgd import FedSGD
from .finetune import Finetune, Personalization
from .local_fit import LocalFit
from .local_only import Local
from .mp_mtl.algorithm import MPMTL
from .p2p.algorithm import PeerToPeer
from .pfedme import PFedMe
from .pmtl import PMTL
from .pp_dmtl.algorithm import PPDMTL
from .pp_dmtl.step_size import largest_delay
from .ppsgd import PPSGD
from .rounds import Released, RoundAlgorithm
from .scaffold import Scaffold
from .server_step import ServerOptimizer, apply_update
from .shared_model import SharedModel
from .store import ClientStore

__all__ = [
    "APFL",
    "IFCA",
    "MPMTL",
    "PMTL",
    "PPDMTL",
    "PPSGD",
    "Algorithm",
    "AsyncLearner",
    "ClientBatch",
    "ClientStates",
    "ClientStore",
    "ClusteredPMTL",
    "Count",
    "Ditto",
    "FedAvg",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSGD",
    "Finetune",
    "Local",
    "LocalFit",
    "NonNegative",
    "PFedMe",
    "PeerToPeer",
    "Personalization",
    "Positive",
    "Problem",
    "Released",
    "RoundAlgorithm",
    "Scaffold",
    "ServerOptimizer",
    "Share",
    "SharedModel",
    "State",
    "apply_update",
    "largest_delay",
    "personal_fields",
]
