"""Federated methods: a file each, or a folder for a paper with several; :mod:`.base` says what a method is."""

from .._check import Count, NonNegative, Positive, Share
from .apfl import APFL
from .async_learner.algorithm import AsyncLearner
from .async_learner.cost_of_privacy import CostOfPrivacy, cost_of_privacy
from .average import Average, LocalAverage
from .base import Algorithm, Problem, Released, State
from .clusters import IFCA, ClusteredPMTL
from .cohort import Cohort, Own, personal_fields
from .ditto import Ditto
from .fedavg import FedAvg, FedProx
from .fedrep import FedPer, FedRep
from .finetune import Finetune, Personalization
from .local import Local
from .local_fit import LocalFit
from .mp_mtl.algorithm import MPMTL
from .mp_mtl.layers import MPMTLayers
from .one_answer import Moments, PublicStart
from .p2p.algorithm import PeerToPeer
from .peer_averaging import PeerAveraging
from .pfedme import PFedMe
from .pmtl import PMTL
from .pp_dmtl.algorithm import PPDMTL
from .pp_dmtl.step_size import largest_delay
from .ppsgd import PPSGD
from .prior_layers import PriorLayers
from .private_prior import PrivatePrior
from .proximal_point import ProximalPoint
from .scaffold import Scaffold
from .server import ServerOptimizer, apply_update
from .shared_directions import SharedDirections
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
    "Average",
    "ClientStore",
    "ClusteredPMTL",
    "Cohort",
    "CostOfPrivacy",
    "Count",
    "Ditto",
    "FedAvg",
    "FedPer",
    "FedProx",
    "FedRep",
    "Finetune",
    "Local",
    "LocalAverage",
    "LocalFit",
    "MPMTLayers",
    "Moments",
    "NonNegative",
    "Own",
    "PFedMe",
    "PeerAveraging",
    "PeerToPeer",
    "Personalization",
    "Positive",
    "PriorLayers",
    "PrivatePrior",
    "Problem",
    "ProximalPoint",
    "PublicStart",
    "Released",
    "Scaffold",
    "ServerOptimizer",
    "Share",
    "SharedDirections",
    "SharedModel",
    "State",
    "apply_update",
    "cost_of_privacy",
    "largest_delay",
    "personal_fields",
]
