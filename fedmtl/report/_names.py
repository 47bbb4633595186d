"""How methods are called in print."""

from __future__ import annotations

CHOICE_NOT_COVERED = "not private: choosing among runs by these metrics is covered by no epsilon (fedmtl search is)"

UNITS = {"client": "all data of one client", "record": "one record"}

_TITLES = {
    "pmtl": "PMTL",
    "local": "Local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "ditto": "Ditto",
    "pp_dmtl": "PP-DMTL",
    "async_learner": "Asynchronous learner",
    "public_start": "Public start",
    "moments": "AdaSSP",
    "mp_mtl": "MP-MTL",
    "mp_mtl_layers": "MP-MTL of layers",
    "private_prior": "Private prior",
    "prior_layers": "Private prior of layers",
    "p2p": "Peer-to-peer",
    "pfedme": "pFedMe",
    "apfl": "APFL",
    "ppsgd": "PP-SGD",
    "fedrep": "FedRep",
    "fedper": "FedPer",
    "clustered_pmtl": "Clustered PMTL",
    "ifca": "IFCA",
    "scaffold": "SCAFFOLD",
}


def title_of(name: str) -> str:
    """Return the printed form of an algorithm's name: ``"pmtl"`` is PMTL, ``"p2p_published"`` Peer-to-peer, published;
    an unknown name is left as it is, and so is what follows `` + ``."""
    first, plus, rest = name.partition(" + ")
    method = first.lower().removesuffix("_published")
    if method not in _TITLES:
        return name
    return _TITLES[method] + (", published" if method != first.lower() else "") + plus + rest
