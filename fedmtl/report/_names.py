"""How methods are called in print."""

from __future__ import annotations

CHOICE_NOT_COVERED = "not private: choosing among runs by these metrics is covered by no epsilon (fedmtl search is)"

_TITLES = {
    "pmtl": "PMTL",
    "local": "Local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "pp_dmtl": "PP-DMTL",
    "async_learner": "Asynchronous learner",
    "mp_mtl": "MP-MTL",
    "p2p": "Peer-to-peer",
}


def title_of(name: str) -> str:
    """The printed form of an algorithm's name: ``"pmtl"`` is PMTL; an unknown name is left as it is."""
    return _TITLES.get(name.lower(), name)
