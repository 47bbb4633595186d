"""Every method whose clients act in rounds, with settings of its own: of networks, and of linear models."""

from fedmtl import (
    APFL,
    IFCA,
    MPMTL,
    PMTL,
    PPSGD,
    ClusteredPMTL,
    Ditto,
    FedAvg,
    FedPer,
    FedProx,
    FedRep,
    Local,
    LocalSGD,
    MPMTLayers,
    PFedMe,
    PriorLayers,
    PrivatePrior,
    Scaffold,
)
from fedmtl.contrib.published.mp_mtl import PublishedMPMTL

SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4, momentum=0.5)
NETWORKS = {
    "pmtl": PMTL(lam=0.5, local=SOLVER),
    "pmtl, running mean": PMTL(lam=0.5, local=SOLVER, reference="local"),
    "fedavg": FedAvg(local=SOLVER),
    "fedprox": FedProx(mu=0.3, local=SOLVER),
    "ditto": Ditto(lam=0.3, local=SOLVER),
    "local": Local(local=SOLVER),
    "fedrep": FedRep(local=SOLVER, head_local=LocalSGD(lr=0.1, steps=3)),
    "fedper": FedPer(local=SOLVER),
    "pfedme": PFedMe(lam=0.5, local=SOLVER),
    "apfl": APFL(alpha=0.4, local=SOLVER),
    "ppsgd": PPSGD(ratio=0.7, local=SOLVER),
    "scaffold": Scaffold(local=LocalSGD(lr=0.2, epochs=2, batch_size=4)),
    "clustered_pmtl": ClusteredPMTL(
        clusters={f"client-{k}": k % 2 for k in range(12)}, lam=0.5, local=SOLVER
    ),
    "ifca": IFCA(clusters=3, spread=0.5, local=SOLVER),
    "mp_mtl_layers": MPMTLayers(layers=("3",), threshold=0.05, local=SOLVER),
    "prior_layers": PriorLayers(scale=0.5, local=SOLVER),
    "prior_layers, output side": PriorLayers(layers=("3",), side="output", scale=0.5, local=SOLVER),
}
LINEAR = {
    "mp_mtl": MPMTL(feature_norm=1.0, lam=0.05),
    "mp_mtl, squared loss, P + Q, curator": MPMTL(
        feature_norm=1.0,
        loss="squared",
        penalty="l21",
        own_penalty="l2",
        momentum="nesterov",
        start_ridge=0.1,
        curator_epsilon=30.0,
    ),
    "mp_mtl, published": PublishedMPMTL(feature_norm=1.0, lam=0.05),
    "private_prior": PrivatePrior(feature_norm=1.0, loss="logistic", share=0.5, scale=0.5),
    "private_prior, squared loss": PrivatePrior(
        feature_norm=1.0, form="diagonal", own_ridge=False, scale=0.5
    ),
}
