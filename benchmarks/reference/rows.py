"""The rows that are measured here, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.reproduce.comparison.settings import STUDIES
from fedmtl import (
    APFL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    Buffered,
    Ditto,
    FedAvg,
    FedRep,
    Finetune,
    FullParticipation,
    Latencies,
    Local,
    LocalSGD,
    PeerAveraging,
    PFedMe,
    PoissonClocks,
    PoissonSampling,
    PrivatePrior,
)
from fedmtl.algorithms import Algorithm
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.graphs import Complete
from fedmtl.schedules import RandomLatency

from .problems import DIGITS, FARES, FEMNIST, SCHOOL
from .settings import EPSILONS, NO_NOISE, NOTHING_SENT, Model, Problem, Row, Setting

ALL = (*EPSILONS, NO_NOISE)
Way = tuple[str, Any, Finetune | None]
"""A value of a method's own setting: in words, the algorithm, and what follows the run."""

EVERYBODY = FullParticipation()
IN_TURN = "everybody in each round"
# A law of latencies with a long tail: the slowest of a cohort of 100 takes about ten medians.
UNEQUAL = RandomLatency("lognorm", {"s": 1.0})


def grid(clips: Sequence[float], ways: Iterable[Way]) -> tuple[Setting, ...]:
    """Returns every way with every clip norm."""
    return tuple(
        Setting(f"{words}; clip {clip:g}", algorithm, clip, finetune)
        for words, algorithm, finetune in ways
        for clip in clips
    )


def alone(values: Iterable[tuple[str, Algorithm]]) -> tuple[Setting, ...]:
    """Returns settings of training alone, which clips nothing."""
    return tuple(Setting(words, algorithm) for words, algorithm in values)


def by_solver(solver: LocalSGD, rates: Sequence[float], epochs: Sequence[int]) -> Any:
    """Returns training alone by steps of each size and number of epochs."""
    return alone(
        (f"lr {lr:g}, {count} epochs", Local(local=replace(solver, lr=lr, epochs=count)))
        for lr in rates
        for count in epochs
    )


def by_ridge(ridges: Sequence[float]) -> Any:
    """Returns exact fits alone, with each penalty."""
    return alone(
        (
            f"ridge {ridge:g}",
            LocalFit(loss="squared", feature_norm="auto", target="auto", ridge=ridge),
        )
        for ridge in ridges
    )


def epochs_of(solver: LocalSGD, counts: Sequence[int]) -> list[Way]:
    """Returns FedAvg with each number of local epochs."""
    return [(f"{n} epochs", FedAvg(local=replace(solver, epochs=n)), None) for n in counts]


def finetuned(solver: LocalSGD, ways: Iterable[tuple[Any, float, int, float]]) -> list[Way]:
    """Returns FedAvg with each way of finetuning: (kind, pull, epochs, step size)."""
    found: list[Way] = []
    for kind, lam, epochs, lr in ways:
        words = f"{kind} {lam:g}, {epochs} epochs, lr {lr:g}"
        local = replace(solver, epochs=epochs, lr=lr)
        after = Finetune(kind=kind, lam=lam, local=local, start="shared")
        found.append((words, FedAvg(local=solver), after))
    return found


def pulls(kind: Any, solver: LocalSGD, values: Sequence[float]) -> list[Way]:
    """Returns PMTL or Ditto with each strength of its pull."""
    return [(f"lambda {lam:g}", kind(lam=lam, local=solver), None) for lam in values]


def _client_rows(
    problem: Problem,
    solver: LocalSGD,
    local: tuple[Setting, ...],
    methods: dict[str, tuple[Setting, ...]],
    secret: tuple[Any, int, str],
    open_rounds: int,
) -> list[Row]:
    """Returns the rows of a problem whose unit is a client.

    Args:
        problem: the data.
        solver: of the clients.
        local: settings of training alone.
        methods: settings of each method that has the usual rows.
        secret: the schedule under a trusted server, with its rounds and its words.
        open_rounds: number of rounds where everybody takes part, so that nothing need be secret.
    """
    name = problem.name
    schedule, rounds, words = secret
    rows = [
        Row(f"{name}-local", problem, "Local", "none", "none", "nobody sends anything",
            EVERYBODY, 1, local, (NOTHING_SENT,))
    ]  # fmt: skip
    for method, settings in methods.items():
        word = method.lower().replace(" + finetuning", "-finetuned").replace("fedavg-f", "f")
        rows.append(
            Row(f"{name}-{word}", problem, method, "client", "trusted", words, schedule, rounds,
                settings, ALL)
        )  # fmt: skip
    tuned = "FedAvg + finetuning"
    for trust in ("trusted", "secure", "local"):
        if trust == "trusted" and schedule == EVERYBODY:
            # It is the usual row already.
            continue
        rows.append(
            Row(f"{name}-{trust}-everybody", problem, tuned, "client", trust,
                f"{IN_TURN}, {open_rounds} rounds",
                EVERYBODY, open_rounds, methods[tuned], EPSILONS)
        )  # fmt: skip
    return rows


def _networks(
    problem: Problem,
    solver: LocalSGD,
    clips: Sequence[float],
    tuned: tuple[Setting, ...],
    buffered: tuple[Buffered, int],
    cohorts: tuple[PoissonSampling, int, str],
    representation: tuple[float, ...],
) -> list[Row]:
    """Returns the rows of classes alone: a server that does not wait, and methods without noise.

    Args:
        problem: the data.
        solver: of the clients.
        clips: norms that are tried.
        tuned: settings of FedAvg with finetuning.
        buffered: the schedule of a server that does not wait, and its steps.
        cohorts: the schedule of the other methods, with its rounds and its words.
        representation: epsilons of FedRep, whose release of the representation alone is CENTAUR.
    """
    name = problem.name
    schedule, steps = buffered
    poisson, rounds, words = cohorts
    rows = [
        Row(f"{name}-buffered", problem, "FedAvg + finetuning, not waiting", "client", "trusted",
            f"{steps} steps of the first {schedule.buffer} answers", schedule, steps, tuned, ALL,
            bands=True)
    ]  # fmt: skip
    others: dict[str, list[Way]] = {
        "APFL": [
            (f"alpha {alpha:g}", APFL(alpha=alpha, local=solver), None)
            for alpha in (0.25, 0.5, 0.75)
        ],
        "pFedMe": [
            (f"lambda {lam:g}", PFedMe(lam=lam, eta=1 / lam, local=solver), None)
            for lam in (0.1, 0.3, 1.0)
        ],
        "FedRep": [
            (f"{epochs} epochs of the head",
             FedRep(local=solver, head_local=replace(solver, epochs=epochs)), None)
            for epochs in (3, 10, 30)
        ],
    }  # fmt: skip
    for method, ways in others.items():
        model: Model = "linear"
        epsilons: tuple[float, ...] = (NO_NOISE,)
        if method == "FedRep":
            model = "hidden"
            epsilons = representation
        rows.append(
            Row(f"{name}-{method.lower()}", problem, method, "client", "trusted", words, poisson,
                rounds, grid(clips, ways), epsilons, model=model)
        )  # fmt: skip
    return rows


def _digits() -> list[Row]:
    solver = STUDIES["digits"].solver
    clips = (1.0, 3.0)
    ways = (("kl", 0.1, 20, 0.5), ("kl", 0.1, 60, 0.5), ("mean", 0.1, 20, 0.5))
    methods = {
        "FedAvg": grid(clips, epochs_of(solver, (2, 5, 10))),
        "FedAvg + finetuning": grid(clips, finetuned(solver, ways)),
        "PMTL": grid(clips, pulls(PMTL, solver, (0.03, 0.1, 0.3))),
        "Ditto": grid(clips, pulls(Ditto, solver, (0.1, 0.3, 1.0))),
    }
    cohorts = PoissonSampling(cohort=100), 50, "50 secret cohorts of 100"
    local = by_solver(solver, (0.5, 1.0), (50, 150, 450))
    rows = _client_rows(DIGITS, solver, local, methods, cohorts, 10)
    buffered = Buffered(latency=UNEQUAL, concurrency=100, buffer=50, rest=15), 80
    tuned = methods["FedAvg + finetuning"]
    return [*rows, *_networks(DIGITS, solver, clips, tuned, buffered, cohorts, ALL)]


def _femnist() -> list[Row]:
    solver = STUDIES["femnist"].solver
    clips = (0.3, 1.0)
    ways = (("kl", 3.0, 10, 0.1), ("kl", 10.0, 30, 0.03), ("vanilla", 0.0, 1, 0.03))
    methods = {
        "FedAvg": grid(clips, epochs_of(solver, (1, 3, 5))),
        "FedAvg + finetuning": grid(clips, finetuned(solver, ways)),
        "PMTL": grid(clips, pulls(PMTL, solver, (0.01, 0.1, 1.0))),
        "Ditto": grid(clips, pulls(Ditto, solver, (0.01, 0.1, 1.0))),
    }
    cohorts = PoissonSampling(cohort=100), 30, "30 secret cohorts of 100"
    local = by_solver(solver, (0.3, 1.0), (30, 100, 300))
    rows = _client_rows(FEMNIST, solver, local, methods, cohorts, 10)
    buffered = Buffered(latency=UNEQUAL, concurrency=100, buffer=50, rest=2), 60
    tuned = methods["FedAvg + finetuning"]
    return [*rows, *_networks(FEMNIST, solver, clips, tuned, buffered, cohorts, (NO_NOISE,))]


# One release fills the clip norm whatever it is, so it is no setting of the private prior.
_PRIORS = tuple(
    Setting(f"share {share:g}, {form}", PrivatePrior(share=share, form=form, ridge=0.05), clip=1.0)
    for share in (0.0, 0.5, 1.0)
    for form in ("symmetric", "diagonal")
)


def _school() -> list[Row]:
    solver = STUDIES["school"].solver
    clips = (0.1, 0.3)
    ways = [("mean", lam, 10, 0.3) for lam in (0.1, 0.3, 1.0)]
    methods = {
        "FedAvg": grid(clips, epochs_of(solver, (5, 10, 20))),
        "FedAvg + finetuning": grid(clips, finetuned(solver, ways)),
        "PMTL": grid(clips, pulls(PMTL, solver, (0.1, 0.3, 1.0))),
        "Ditto": grid(clips, pulls(Ditto, solver, (0.3, 1.0, 3.0))),
    }
    local = by_ridge((0.02, 0.04, 0.06, 0.08, 0.12, 0.24))
    rows = _client_rows(
        SCHOOL, solver, local, methods, (EVERYBODY, 10, f"{IN_TURN}, 10 rounds"), 10
    )
    return [*rows, _prior(SCHOOL)]


def _prior(problem: Problem) -> Row:
    """Returns the row of the private prior, which has one round."""
    return Row(f"{problem.name}-prior", problem, "private prior", "client", "trusted",
               "everybody once", EVERYBODY, 1, _PRIORS, ALL)  # fmt: skip


def _school_records() -> list[Row]:
    solver = STUDIES["school records"].solver
    clips = (0.03, 0.1)
    ways = [("mean", lam, 60, 0.3) for lam in (0.1, 0.3, 1.0)]
    rounds = {
        "FedAvg": grid(clips, epochs_of(solver, (1, 2, 4))),
        "FedAvg + finetuning": grid(clips, finetuned(solver, ways)),
        "PMTL": grid(clips, pulls(PMTL, solver, (0.1, 0.3, 1.0))),
        "Ditto": grid(clips, pulls(Ditto, solver, (0.3, 1.0, 1.5))),
    }
    rows = [
        Row(f"school-records-{method.split(' + ')[-1].lower().replace('finetuning', 'finetuned')}",
            SCHOOL, method, "record", "local", f"{IN_TURN}, 60 rounds", EVERYBODY, 60,
            settings, ALL)
        for method, settings in rounds.items()
    ]  # fmt: skip
    peers = [
        (f"mu {mu:g}, last step {refine:g}",
         PeerAveraging(graph=Complete(), loss="squared", smoothness=0.07, mu=mu, refine=refine),
         None)
        for mu, refine in ((5.0, 4.0), (50.0, 4.0), (50.0, 10.0))
    ]  # fmt: skip
    learner = [(f"kappa {kappa:g}", AsyncLearner(kappa=kappa), None) for kappa in (3.0, 10.0, 30.0)]
    tasks = [
        (f"last step {tau:g}", PPDMTL(loss="squared", lam=0.1, refine_tau=tau), None)
        for tau in (0.03, 0.1, 0.3)
    ]
    clocks = PoissonClocks(per_client=10)
    latencies = Latencies(latency=RandomLatency("expon", {}), per_client=4)
    # Every school acts as often as its clock or its latency lets it, up to the cap.
    apart: tuple[tuple[str, str, Any, Any, int, str], ...] = (
        ("peers", "peer averaging", peers, clocks, 1390, "one at a time, 10 wake-ups each"),
        ("learner", "asynchronous learner", learner, clocks, 1390, "one at a time, 10 answers each"),
        ("pp-dmtl", "PP-DMTL", tasks, latencies, 556, "one at a time, 4 answers each"),
    )  # fmt: skip
    for word, method, own, schedule, most, turns in apart:
        rows.append(
            Row(f"school-records-{word}", SCHOOL, method, "record", "local", turns, schedule, most,
                grid((0.1, 0.3), own), ALL)
        )  # fmt: skip
    return rows


def _fares() -> list[Row]:
    solver = LocalSGD(lr=0.3, epochs=2, batch_size=4)
    clips = (0.3, 1.0)
    ways = [("mean", lam, 50, 0.3) for lam in (0.03, 0.1, 0.3)]
    turns = f"{IN_TURN}, 20 rounds"
    local = by_ridge((0.01, 0.02, 0.03, 0.05, 0.1, 0.2))
    methods = {
        "FedAvg": grid(clips, epochs_of(solver, (2, 5, 10))),
        "FedAvg + finetuning": grid(clips, finetuned(solver, ways)),
    }
    rows = [
        Row("fares-local", FARES, "Local", "none", "none", "nobody sends anything", EVERYBODY, 1,
            local, (NOTHING_SENT,))
    ]  # fmt: skip
    for (method, settings), word in zip(methods.items(), ("fedavg", "finetuned"), strict=True):
        rows.append(
            Row(f"fares-{word}", FARES, method, "client", "trusted", turns, EVERYBODY, 20,
                settings, ALL)
        )  # fmt: skip
    automatic = (Setting("nothing is tuned", "auto"),)
    rows.append(_prior(FARES))
    rows.append(
        Row("fares-automatic", FARES, "automatic settings", "client", "trusted", "automatic",
            "auto", "auto", automatic, EPSILONS, model="automatic")
    )  # fmt: skip
    rows.append(
        Row("fares-records-automatic", FARES, "automatic settings", "record", "local", "automatic",
            "auto", "auto", automatic, EPSILONS, model="automatic")
    )  # fmt: skip
    return rows


ROWS = (*_digits(), *_femnist(), *_school(), *_school_records(), *_fares())
BY_NAME = {row.name: row for row in ROWS}
