"""One file a method: PMTL, FedAvg and FedProx, Local."""

from .base import Algorithm, Problem, State
from .fedavg import FedAvg, FedProx
from .local import Local
from .pmtl import PMTL
from .pp_dmtl import PPDMTL
from .server import ServerOptimizer
from .store import ClientStore, MappedClientStore

__all__ = [
    "PMTL",
    "PPDMTL",
    "Algorithm",
    "ClientStore",
    "FedAvg",
    "FedProx",
    "Local",
    "MappedClientStore",
    "Problem",
    "ServerOptimizer",
    "State",
]
