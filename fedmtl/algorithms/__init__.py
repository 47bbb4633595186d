"""One file a method: PMTL, PP-DMTL, MP-MTL, the asynchronous learner, FedAvg and FedProx, Local, peer-to-peer."""

from .async_learner import AsyncLearner
from .base import Algorithm, AsyncAlgorithm, Problem, State
from .collaboration import Collaboration, Forecast, choose_kappa, fit_forecast
from .fedavg import FedAvg, FedProx
from .linear import DomainBound
from .local import Local
from .mp_mtl import MPMTL
from .mp_mtl_layers import MPMTLayers
from .p2p import PeerToPeer
from .pmtl import PMTL
from .pp_dmtl import PPDMTL
from .server import ServerOptimizer
from .store import ClientStore, MappedClientStore

__all__ = [
    "MPMTL",
    "PMTL",
    "PPDMTL",
    "Algorithm",
    "AsyncAlgorithm",
    "AsyncLearner",
    "ClientStore",
    "Collaboration",
    "DomainBound",
    "FedAvg",
    "FedProx",
    "Forecast",
    "Local",
    "MPMTLayers",
    "MappedClientStore",
    "PeerToPeer",
    "Problem",
    "ServerOptimizer",
    "State",
    "choose_kappa",
    "fit_forecast",
]
