"""Rows with figures from outside: what a study of ``benchmarks/reproduce`` has measured.

The numbers are read from the CSV that the study committed. The outside figures are typed here, each
with the place in which it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from .study import PFL, PFLLIB, Outside, Place, Study

_SILO = "server, other schools and public, who see each noised update; no server is trusted"
_CLIENTS = (
    "all other clients together and the public, who see every released mean; the server is trusted"
)
_NO_EPSILON = "no epsilon: nothing is noised"
_PEERS = "all other agents and whoever listens; there is no server"
_AUTHORS = "Liu, Hu, Wu, Smith 2022 (NeurIPS), README of the authors' code, School at epsilon 6"
_TABLE_3 = "Hu, Wu, Smith 2023 (TMLR), Table 3, FEMNIST"
_TABLE_1 = "Bellet, Guerraoui, Taziki, Tommasi 2018 (AISTATS), Table 1"
_FIGURES = "Liang et al. 2020 (IEEE TPAMI), Figure 9, drawn without numbers"
_SECTION_5 = (
    "closed form of Gaussian noise; the setting of Kairouz, Liu, Steinke 2021 (ICML), Section 5"
)
_FAROKHI = "Farokhi, Wu, Smith, Kaafar 2021 (IEEE TIFS), Figure"
_FILMS = "MovieLens, each user's mean removed, as published"
_WRITERS = "FEMNIST: 206 writers, 24 images each, 62 classes"


def _schools() -> list[Study]:
    found = []
    methods = {"FedAvg": 0.02564, "Local": 0.02628, "Mean-regularized λ 1": 0.02394}
    for method, value in methods.items():
        word = method.split()[0].lower().replace("mean-regularized", "mr-mtl")
        where = (("splits", "authors' first"), ("method", method), ("epsilon", "6"))
        found.append(
            Study(
                name=f"outside-school-{word}", data="School, the authors' split", method=method,
                unit="record", relation="zero-out", trust="local", adversary=_SILO,
                amplification="secret batches of 32 records", epsilon="6", delta="0.001",
                metric="mean squared error of pupils", larger=False,
                place=Place("reproduce/school", "table.csv", where, "weighted_mse", "weighted_mse_half"),
                outside=Outside(value, _AUTHORS),
                command="python benchmarks/reproduce/school/run.py --root school.mat", figure="",
                tuned="nothing: the authors' settings",
                note="Poisson batches, as the account assumes; the authors shuffle",
            )
        )  # fmt: skip
    return found


def _writers() -> list[Study]:
    """The paper's two extremes: its three epsilons are read as the smallest and the largest here."""
    found = []
    for method, epsilon, value, words in (
        ("Local", "0", 0.618, "training alone"),
        ("PMTL", "1", 0.371, "the smallest of its three epsilons"),
        ("PMTL", "10", 0.621, "the largest of its three epsilons"),
    ):
        private = {
            "unit": "client", "relation": "add-remove", "trust": "trusted", "adversary": _CLIENTS,
            "amplification": "secret cohorts of 100", "delta": "1e-05", "accountant": "pld",
        }  # fmt: skip
        if method == "Local":
            private = {**dict.fromkeys(private, ""), "unit": "none", "trust": "none"}
            private["adversary"] = "nobody: nothing is sent"
        where = (("setting", _WRITERS), ("method", method), ("epsilon", epsilon))
        found.append(
            Study(
                name=f"outside-femnist-{method.lower()}-{epsilon}", data="FEMNIST, 206 of 3,500 writers",
                method=method, epsilon=epsilon, metric="accuracy", larger=True,
                place=Place("reproduce/comparison", "scores.csv", where),
                outside=Outside(value, f"{_TABLE_3}, {words}"),
                command="python benchmarks/reproduce/comparison/run.py --studies femnist --femnist leaf_femnist_206.json.zip",
                figure="benchmarks/reproduce/pmtl/figures.png",
                tuned="nine settings on a fifth of the training rows, not private",
                note="a sample of 206 writers at 14 x 14 pixels and a linear model: the paper's 3,500 writers and its network are not here, so the figures are not expected to agree",
                **private,
            )
        )  # fmt: skip
    return found


def _films() -> list[Study]:
    found = []
    for epsilon, value in (("1", 0.9527), ("0.5", 0.9545), ("0.1", 0.9855)):
        method = "Gaussian, delta exp(-5)"
        where = (("setting", _FILMS), ("method", method), ("epsilon", epsilon))
        found.append(
            Study(
                name=f"outside-movielens-{epsilon}", data="MovieLens-100K, 943 users",
                method="peer-to-peer", unit="record", relation="replace", trust="local",
                adversary=_PEERS, amplification="none", epsilon=epsilon, delta="0.00674",
                metric="RMSE", larger=False, place=Place("reproduce/p2p", "scores.csv", where),
                outside=Outside(value, _TABLE_1),
                command="python benchmarks/reproduce/p2p/run.py --root ml-100k",
                figure="benchmarks/reproduce/p2p/films.png",
                tuned="step and clip on a split apart, not private",
                note="Gaussian noise with a valid L2 norm; delta exp(-5) is the paper's, and far too large",
            )
        )  # fmt: skip
    return found


def _tasks() -> list[Study]:
    found = []
    for epsilon in ("1", "10"):
        where = (("setting", "School, 139 schools"), ("method", "MP-MTL, ten releases"),
                 ("epsilon", epsilon), ("metric", "nMSE"))  # fmt: skip
        found.append(
            Study(
                name=f"outside-school-mp-mtl-{epsilon}", data="School, 30% for training",
                method="MP-MTL", unit="client", relation="add-remove", trust="trusted",
                adversary=_CLIENTS, amplification="none", epsilon=epsilon, delta="1e-05",
                metric="normalized error", larger=False,
                place=Place("reproduce/mp_mtl", "scores.csv", where), outside=Outside(None, _FIGURES),
                command="python benchmarks/reproduce/mp_mtl/once.py --school school.mat",
                figure="benchmarks/reproduce/mp_mtl/tradeoff.png",
                tuned="16 settings on two splits apart, not private",
                note="symmetric Gaussian noise: the epsilon of the paper's Wishart noise does not hold; the paper's delta depends on the number of tasks",
            )
        )  # fmt: skip
    return found


def _means() -> list[Study]:
    found = []
    for trust, noise, relation, who in (
        ("trusted", "trusted server", "add-remove", _CLIENTS),
        ("secure", "secure, 32 bits", "zero-out", "the server with one client in ten"),
        ("local", "noise of each client alone", "zero-out", "everybody but the client"),
    ):
        where = (("clients", "1000"), ("epsilon", "4"), ("noise", noise))
        found.append(
            Study(
                name=f"outside-mean-{trust}", data="mean of 1,000 unit vectors, 250 dimensions",
                method=noise, unit="client", relation=relation,
                trust=trust, adversary=who, amplification="none", epsilon="4", delta="1e-05",
                metric="squared error of the mean", larger=False,
                place=Place("reproduce/mean_estimation", "table.csv", where, "error"),
                outside=Outside(None, _SECTION_5, "closed form"),
                command="python benchmarks/reproduce/mean_estimation/run.py",
                figure="benchmarks/reproduce/mean_estimation/error.png", tuned="nothing",
                note="the mean of four repetitions of the noise, without an interval in the study's table",
                repeated="4 repetitions",
            )
        )  # fmt: skip
    return found


def _owners() -> list[Study]:
    """Costs of privacy; noise is Laplace, so that delta is 0."""
    found = []
    folder = "benchmarks/reproduce/cost_of_privacy"
    for name, data, setting, figure, drawn, note in (
        ("lending", "LendingClub, 100 owners of 90 loans", "lending, 100 owners x 90", "6", "value",
         "a sample of 10,000 loans, where each of the paper's owners has as many"),
        ("hospitals", "length of stay, 17 hospitals in Arizona", "17 hospitals", "9",
         "hospital_bands",
         "3,230 stays, where each of the paper's 86 hospitals has 10,000 and more; the interval is of the noise alone"),
    ):  # fmt: skip
        for method in ("published learner", "public start"):
            where = (("setting", setting), ("metric", "psi"), ("method", method), ("epsilon", "3"))
            differs = note
            picture = f"{folder}/{drawn}.png"
            if method == "public start":
                differs = f"{note}; a public start is no part of the paper"
                picture = ""
            found.append(
                Study(
                    name=f"outside-{name}-{method.split()[0]}", data=data, method=method,
                    unit="record", relation="replace", trust="local",
                    adversary="learner, other owners and public, who see each noised answer",
                    amplification="none", epsilon="3", delta="0", metric="cost of privacy psi",
                    larger=False, place=Place("reproduce/cost_of_privacy", "scores.csv", where),
                    outside=Outside(None, f"{_FAROKHI} {figure}, drawn without numbers"),
                    command="python benchmarks/reproduce/cost_of_privacy/public_start.py --root lending --hospital hospital",
                    figure=picture,
                    tuned="clip norm, and kappa of the published learner, on public rows: nothing private enters",
                    note=differs,
                )
            )  # fmt: skip
    return found


def _library() -> list[Study]:
    notes = {
        "FedAvg": "the shared models are compared",
        "Ditto": "",
        "FedRep": "",
        "APFL": (
            "another method: in PFLlib the personal part follows its own loss and not that of the "
            "mixture, the mixing weight adapts, and the mixture replaces the personal part"
        ),
        "pFedMe": (
            "the shared models are compared: PFLlib overwrites its personal ones by them; its "
            "weight decay of .001 is set to 0"
        ),
    }
    return [
        Study(
            name=f"outside-pfllib-{method.lower()}", data="digits, 100 writers, 20 rounds",
            method=method, unit="none", relation="", trust="trusted",
            adversary=_NO_EPSILON, amplification="", epsilon="inf", delta="",
            metric="accuracy", larger=True,
            place=Place("reference", "pfllib.csv", (("method", method),), "fedmtl"),
            outside=Outside(None, PFLLIB, "pfllib"),
            command="python -m benchmarks.reference.pfllib --pfllib PFLlib", figure="",
            tuned="nothing", note=note, accountant="", repeated="1, nothing is random",
        )
        for method, note in notes.items()
    ]  # fmt: skip


def _beside_pfl() -> list[Study]:
    notes = {
        "clients": "the same noise multiplier, of which each side draws its own noise",
        "population": (
            "the noise of pfl's benchmark, whose account has epsilon 2 for cohorts of 1,000 of a "
            "million clients that are not there; each side draws its own noise"
        ),
        "none": "clipped, without noise",
    }
    epsilons = {"clients": "2", "population": "", "none": "inf"}
    private = {
        "unit": "client", "relation": "add-remove", "adversary": _CLIENTS,
        "amplification": "secret cohorts of 50", "delta": "1e-06", "accountant": "pld",
    }  # fmt: skip
    plain = {**dict.fromkeys(private, ""), "unit": "none", "adversary": _NO_EPSILON}
    found = []
    for noise, note in notes.items():
        claim = private
        if noise == "none":
            claim = plain
        found.append(
            Study(
                name=f"outside-pfl-{noise}", data="digits, 1,000 writers of 50 images, 100 rounds",
                method="FedAvg", trust="trusted", epsilon=epsilons[noise], metric="accuracy",
                larger=True, place=Place("reference", "pfl.csv", (("noise", noise),), "fedmtl"),
                outside=Outside(None, PFL, "pfl"),
                command="python -m benchmarks.reference.beside_pfl --pfl-python python", figure="",
                tuned="nothing: the settings of pfl's benchmark on CIFAR10", note=note, **claim,
            )
        )  # fmt: skip
    return found


ROWS: Sequence[Study] = (
    *_schools(), *_writers(), *_films(), *_tasks(), *_means(), *_owners(), *_library(),
    *_beside_pfl(),
)  # fmt: skip
