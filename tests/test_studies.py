"""What the studies of ``benchmarks/reproduce`` print, against what their code gives today: a few cheap cells of each.

Data that do not come with the package are looked for in the folder that ``FEDMTL_DATA`` names, by default in
``shared/data`` beside the checkout.
"""

import csv
import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize
from scipy.stats import norm

from fedmtl.privacy.noise.sources import SeededSource

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "benchmarks" / "reproduce"
DATA = Path(os.environ.get("FEDMTL_DATA", ROOT.parent / "shared" / "data"))

Module = Callable[[str, str], Any]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Imports a module of a study; the modules of other studies have the same names, and are forgotten after a test."""
    before = set(sys.modules)

    def imported(study: str, name: str) -> Any:
        for folder in (ROOT, STUDIES, STUDIES / "comparison", STUDIES / study):
            monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(name)

    yield imported
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(STUDIES)):
            del sys.modules[name]


def given(*names: str) -> list[Path]:
    """Files or folders of the data, or a skip that says what is missing."""
    missing = [name for name in names if not (DATA / name).exists()]
    if missing:
        pytest.skip(f"{DATA} has no {', '.join(missing)}; FEDMTL_DATA names the folder of the data")
    return [DATA / name for name in names]


def numbers(text: str) -> list[float]:
    """The numbers in the words of what was chosen."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def recorded(module: Module, study: str, **wanted: Any) -> Any:
    """The one score of ``scores.csv`` that has these attributes."""
    every = module(study, "scores").read_scores(STUDIES / study / "scores.csv")
    (found,) = [
        one for one in every if all(getattr(one, key) == value for key, value in wanted.items())
    ]
    assert math.isnan(found.half), "the mean of seeds that are not stored"
    return found


def rows(folder: str, name: str, **wanted: str) -> list[dict[str, str]]:
    """The rows of a table of a study with these texts."""
    with open(STUDIES / folder / name, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def same(found: float, printed: float | str, digits: int) -> None:
    """Compare a number with what is recorded of it, to a unit of the last of the digits that are printed."""
    assert found == pytest.approx(float(printed), rel=0, abs=0.51 * 10.0**-digits)


def p2p(module: Module) -> None:
    once, agents = module("p2p", "once"), module("p2p", "agents")
    score = recorded(
        module,
        "p2p",
        setting="synthetic agents, p = 20",
        method="one release, as sent",
        epsilon=1.0,
        seed=0,
    )
    sent = once.once(20, 0, tuple(numbers(score.chosen)))[once.EFFORT[20].epsilons.index(1.0)]
    same(once.reached(20, 0, sent[None]), score.score, 7)
    score = recorded(
        module,
        "p2p",
        setting="p = 20, as published",
        method="Gaussian, valid norm",
        epsilon=1.0,
        seed=0,
    )
    mu, wakeups, clip = numbers(score.chosen)
    (found,) = agents.private(20, 0, mu, int(wakeups), clip, (1.0,), False)
    same(found, score.score, 7)


def p2p_warm_start(module: Module) -> None:
    warm = module("p2p", "warm")
    (row,) = rows(
        "p2p", "warm.csv", p="20", method="the paper's noise, epsilon as stated", start="zero", epsilon="0.5"
    )  # fmt: skip
    setting = (float(row["mu"]), int(row["wake-ups"]), None)
    ends = [
        warm.accuracy_of(warm.paper_run(20, seed, 0.5, setting)[1], warm.agents(20, seed))
        for seed in warm.SEEDS
    ]
    same(sum(ends) / len(ends), row["accuracy"].split()[0], 3)


def p2p_films(module: Module) -> None:
    (root,) = given("ml-100k")
    once = module("p2p", "once")
    films = once.read_films(root, 0)
    setting = {"setting": once.FILM_SETTING, "method": "one release, last step", "epsilon": 10.0}
    score = recorded(module, "p2p", **setting, seed=0)
    product, clip, _, reach, pull = numbers(score.chosen)
    model = reach * (once.propagation(films.counts, product) @ once.told(films, clip, 10.0, 0))
    same(float(once.film_errors(films, model, pull).mean()), score.score, 6)


def cost_of_privacy(module: Module) -> None:
    (folder,) = given("hospital")
    start, hospitals = (
        module("cost_of_privacy", "public_start"),
        module("cost_of_privacy", "hospitals"),
    )
    data, public = hospitals.stays(folder)
    psi = start.Collaboration(start.AsyncLearner(), data).psi
    learner, _, public_start = start.METHODS
    for method, epsilon in ((learner, 1.0), (public_start, 3.0)):
        setting = {"setting": start.HOSPITALS, "method": method.name, "epsilon": epsilon, "seed": 0}
        score = recorded(module, "cost_of_privacy", **setting)
        clip, kappa = [*numbers(score.chosen), 1.0][:2]
        theta = method.run(data, public, epsilon, (clip, kappa), start.RUNS, 10_000)
        same(float(psi(theta).mean()), score.score, 6)
    (row,) = rows("cost_of_privacy", "table.csv", part="hospital", epsilon="1")
    clients = hospitals.clocks(len(data.x), hospitals.RUNS, 3, int(row["cap"]))
    tried = hospitals.AsyncLearner(kappa=float(row["kappa"]))
    theta = hospitals.simulate(
        tried, data, hospitals.budget(1.0, float(row["clip"])), clients, seed=5
    )
    same(float(psi(theta).mean()), row["psi"], 5)


def cost_of_privacy_loans(module: Module) -> None:
    (root,) = given("lending")
    start = module("cost_of_privacy", "public_start")
    whole, public = start.lending(root, 30, 300, 0)
    data = start.first_owners(whole, 10)
    psi = start.Collaboration(start.AsyncLearner(), data).psi
    for method in start.METHODS:
        setting = {"setting": "lending, 10 owners x 300", "metric": "psi", "method": method.name}
        score = recorded(module, "cost_of_privacy", **setting, epsilon=3.0, seed=0)
        clip, kappa = [*numbers(score.chosen), 1.0][:2]
        theta = method.run(data, public, 3.0, (clip, kappa), start.RUNS, 10_000)
        same(float(psi(theta).mean()), score.score, 6)
    run, setting = module("cost_of_privacy", "run"), module("cost_of_privacy", "setting")
    row, *_ = rows("cost_of_privacy", "table.csv", part="bands", epsilon="0.3", tick="5")
    data, _ = run.lending(root, 3, 3000, 0)
    clients = setting.clocks(3, run.BAND_RUNS, 1)
    caps = run.torch.bincount(clients[0], minlength=3).numpy()
    learner = run.AsyncLearner(horizon=clients.shape[1], kappa=float(row["kappa"]))
    theta = run.simulate(learner, data, run.budget(0.3), clients[:, :5], caps=caps, seed=3)
    same(float(run.Collaboration(learner, data).psi(theta).mean()), row["psi"], 5)


def pp_dmtl(module: Module) -> None:
    directions = module("pp_dmtl", "directions")
    for records, epsilon in ((60, 3.0), (200, 10.0)):
        setting = f"synthetic tasks of {records} records"
        method = "PP-DMTL, shared directions"
        score = recorded(
            module, "pp_dmtl", setting=setting, method=method, epsilon=epsilon, seed=20
        )
        mechanism, _, rest = score.chosen.partition(", ")
        answers, lam, tau, across = numbers(rest)
        training = (mechanism, int(answers), lam)
        tasks = directions.tasks("classification", 20, records)
        ends = directions.trained(tasks, epsilon, training, directions.RUNS, 1020)
        same(float(directions.errors(tasks, *ends, (tau, across)).mean()), score.score, 7)
    run = module("pp_dmtl", "run")
    setting = {
        "setting": "60 records a task, as published",
        "method": "PP-DMTL, sound",
        "epsilon": 100.0,
        "seed": 0,
    }
    score = recorded(module, "pp_dmtl", **setting)
    answers, a2, lam, ridge = numbers(score.chosen.replace("a2 ", ""))
    tasks = run.tasks("classification", 0, 60)
    shared = run.sound_run(
        tasks, 100.0, {"answers": int(answers), "a2": a2, "lam": lam}, run.SOUND_RUNS, 1000
    )
    same(float(tasks.errors(run.personalized(tasks, shared, ridge)).mean()), score.score, 7)


def pp_dmtl_as_published(module: Module) -> None:
    run = module("pp_dmtl", "run")
    epsilon, answers = 0.3, 1
    (row,) = rows(
        "pp_dmtl", "table.csv", part="classification", rule="published", what="objective",
        epsilon=str(epsilon), answers=str(answers),
    )  # fmt: skip
    run.PUBLISHED_EPSILONS = (epsilon,)
    every = run.published("classification", answers, int(row["runs"]))
    (found,) = [
        one for one in every
        if (one["rule"], one["what"], one["epsilon"]) == ("published", "objective", epsilon)
    ]  # fmt: skip
    same(found["median"], row["median"], 4)


def pp_dmtl_waiting(module: Module) -> None:
    waiting = module("pp_dmtl", "waiting")
    (row,) = rows(
        "pp_dmtl", "waiting.csv", setting="0 stragglers of 20", method="waits, worst delays", seed="10"
    )  # fmt: skip
    same(waiting.seconds(0, "waits", "worst delays", 10).score, row["score"], 6)


def mp_mtl(module: Module) -> None:
    once, run = module("mp_mtl", "once"), module("mp_mtl", "run")
    setup = once.setups(None)["low_rank"]
    data = setup.deal(0)
    for name in ("MP-MTL, one release", "private mean + ridge"):
        score = recorded(
            module, "mp_mtl", setting="synthetic tasks, low rank", method=name, epsilon=3.0, seed=0
        )
        (method,) = [one for one in once.METHODS if one.name == name]
        words = [", ".join(f"{key} {value}" for key, value in one.items()) for one in method.grid]
        models = method.fit(
            setup, data, (3.0,), once.REPETITIONS, 0, method.grid[words.index(score.chosen)]
        )
        same(float(once.errors_of(models, data).mean.mean()), score.score, 6)
    setting = {
        "setting": "low rank, as published",
        "metric": "nMSE",
        "method": "MP-MTL-LR",
        "epsilon": 10.0,
    }
    score = recorded(module, "mp_mtl", **setting, seed=0)
    epsilons = (*run.EPSILONS, math.inf)
    models = once.run(
        run.method(setup, "nuclear", rho=run.RHO), data, epsilons, 5, clip=setup.clip, seed=0
    ).models
    means = once.errors_of(models, data).mean.view(len(epsilons), -1).mean(1)
    same(float(means[epsilons.index(10.0)]), score.score, 6)


def mp_mtl_variants(module: Module) -> None:
    once, variants = module("mp_mtl", "once"), module("mp_mtl", "variants")
    setup = once.setups(None)["low_rank"]
    data = setup.deal(0)
    (_, _, printed), (_, five) = variants.NOISES, variants.ALGORITHMS
    for method, name, epsilon in (
        (printed, f"{printed.name}, claimed epsilon 10", math.inf),
        (five, five.name, 10.0),
    ):
        setting = {"setting": "synthetic tasks, low rank", "method": name, "epsilon": epsilon}
        score = recorded(module, "mp_mtl", **setting, seed=0)
        words = [", ".join(f"{key} {value}" for key, value in one.items()) for one in method.grid]
        chosen = method.grid[words.index(score.chosen)]
        models = method.fit(setup, data, (10.0,), once.REPETITIONS, 0, chosen)
        same(float(once.errors_of(models, data).mean.mean()), score.score, 6)


def school(module: Module) -> None:
    (file,) = given("school/school.mat")
    run = module("school", "run")
    data = run.authors_data(file, 100)
    for method in ("Local", "Mean-regularized λ 1"):
        (row,) = rows("school", "table.csv", splits=run.SHORT, method=method)
        same(run.trained(method, data, 0, run.FEW)["weighted_mse"], row["weighted_mse"], 5)


def digits(module: Module) -> None:
    finetune = module("digits", "finetune")
    data = finetune.load_data("digits", train_images=5, seed=0)
    run = finetune.released("FedAvg", data, 1.0, 0)
    steps = finetune.finetuned(run, data, 0)[5]["accuracy"]
    (row,) = rows("digits", "table.csv", train_images="5", method="FedAvg", epsilon="1")
    (tuned,) = rows(
        "digits", "finetuning.csv", train_images="5", method="FedAvg", epsilon="1", steps="5"
    )
    for found, three in ((run.final["accuracy"], row), (steps, tuned)):
        low, high, middle = float(three["low"]), float(three["high"]), float(three["accuracy"])
        seeds = (low, high, 3 * middle - low - high)
        same(found, min(seeds, key=lambda value: abs(value - found)), 4)


def comparison(module: Module) -> None:
    settings = module("comparison", "settings")
    for name, method, epsilon, digits in (
        ("digits", "FedAvg", 1.0, 4),
        ("school records", "FedAvg", 0.3, 6),
    ):
        study, root = settings.STUDIES[name], None
        if name != "digits":
            (root,) = given("school/school.mat")
        score = recorded(
            module, "comparison", setting=study.title, method=method, epsilon=epsilon, seed=0
        )
        (chosen,) = [one for one in study.methods()[method] if one.text() == score.chosen]
        found = study.train(settings.load(name, root, 0), chosen, epsilon, 0)
        same(found.final[study.metric], score.score, digits)


def comparison_school(module: Module) -> None:
    (root,) = given("school/school.mat")
    settings = module("comparison", "settings")
    study = settings.STUDIES["school"]
    data = settings.load("school", root, 0)
    for method, epsilon in (("Automatic", 1.0), ("FedAvg, finetuned", 1.0)):
        setting = {"setting": study.title, "method": method, "epsilon": epsilon, "seed": 0}
        score = recorded(module, "comparison", **setting)
        (chosen,) = [one for one in study.methods()[method] if one.text() == score.chosen]
        same(study.train(data, chosen, epsilon, 0).final[study.metric], score.score, 6)


def starts(module: Module) -> None:
    run = module("starts", "run")
    trainer = run.Trainer
    run.Trainer = lambda **options: trainer(
        **{**options, "finetune": None}
    )  # which takes most of the time
    name = "FedAvg, secret cohorts"
    for epsilon in (0.3, 1.0):
        setting = {
            "setting": run.SETTING,
            "method": f"{name}, not finetuned",
            "epsilon": epsilon,
            "seed": 0,
        }
        score, start = recorded(module, "starts", **setting), run.STARTS[name]
        (place,) = [
            place for place in range(len(start.settings)) if start.text(place) == score.chosen
        ]
        same(run.train(start, place, epsilon, 0).final["accuracy"], score.score, 4)


def asynchronous(module: Module) -> None:
    run = module("asynchronous", "run")
    digits = run.PROBLEMS[0]
    data = run.load("digits", None, 0)
    own = {"study": "digits", "method": "FedAvg, finetuned", "seed": "0"}
    (found,) = rows(
        "asynchronous", "scores.csv", server="not waiting", epsilon="4", steps="160", **own
    )
    schedule = digits.turns.buffered(run.LAW, len(data))
    bound = schedule.bind(len(data), names=data.ids, keys=data.keys, seed=0)
    same(bound.capped(160).answers(159).time, found["time"], 1)
    for server, epsilon in (("deadline", "inf"), ("not waiting", "4")):
        (found,) = rows(
            "asynchronous", "scores.csv", server=server, epsilon=epsilon, steps="20", **own
        )
        setting = run.Setting(float(found["clip"]), 0.0, 20, float(found["share"]))
        score = run.train(digits, data, "FedAvg", server, float(epsilon), setting, 0, run.LAW)
        same(score["finetuned"], found["accuracy"], 4)
        same(score["times"][run.LAW.name], found["time"], 2)


def adapters(module: Module) -> None:
    (file,) = given("femnist/leaf_femnist_206.json.zip")
    run = module("adapters", "run")
    run.pretrained = lambda *rows: None  # softmax regressions start from zero
    found = run.writers(run.half_size(run.load_data("femnist", root=file, seed=0)), 0)
    for epsilon in (3.0, 10.0):
        score = recorded(
            module, "adapters", method="FedAvg, from zero, softmax", epsilon=epsilon, seed=0
        )
        clip, lr = numbers(score.chosen)
        _, own = run.fedavg(
            found.private, run.models.softmax_regression(), None, clip, lr, epsilon, 0
        )
        same(run.average(own), score.score, 4)


def pmtl(module: Module) -> None:
    run = module("pmtl", "run")
    for name in ("digits", "femnist"):
        study, root = run.STUDIES[name], None
        if name == "femnist":
            (root,) = given("femnist/leaf_femnist_206.json.zip")
        *_, last = rows("pmtl", "curve.csv", study=name, seed="0")
        data = run.load(name, root, 0)
        end = study.train(
            run.replace(data, test=data.train), study.methods()["PMTL"][5], 3.0, 0
        ).final
        assert end["round"] == int(last["round"])
        same(end["loss"], last["loss"], 4)
        same(end["epsilon"], last["epsilon"], 4)


def epsilon_interval(module: Module) -> None:
    run = module("epsilon_interval", "run")
    kind = "one Gaussian sum"
    run.BROKEN, run.CANARIES, run.EPSILONS = (
        {"noise halved": run.BROKEN["noise halved"]},
        (1_000,),
        (1.0,),
    )
    (row,) = rows("epsilon_interval", "broken.csv", run="noise halved")
    assert run.broken() == [{"run": "noise halved", "1000 at 1": row["1000 at 1"]}]
    run.COSTS = {kind: run.COSTS[kind]}
    for found, row in zip(
        run.coverage(), rows("epsilon_interval", "cover.csv", run=kind), strict=True
    ):
        assert {key: str(value) for key, value in found.items()} == row


def epsilon_interval_published(module: Module) -> None:
    methods = module("epsilon_interval", "methods")
    name, claim = "MP-MTL, Wishart noise, one release", 1.0
    (row,) = rows(
        "epsilon_interval", "published.csv", published=name, **{"epsilon of one use": str(claim)}
    )
    methods.CLAIMS, methods.PUBLISHED = (claim,), {name: methods.PUBLISHED[name]}
    (found,) = methods.published()
    same(found["independent"], row["independent"], 2)
    same(found["any"], row["any"], 2)


def mean_estimation(module: Module) -> None:
    run = module("mean_estimation", "run")
    for kind in (run.TRUSTED, run.SECURE):
        (row,) = rows("mean_estimation", "table.csv", clients="100", epsilon="4", noise=kind)
        assert f"{run.error(kind, 100, 4.0, run.REPETITIONS[100]):.3g}" == row["error"]
        # 5,000 squares of the noise
        assert float(row["error"]) == pytest.approx(float(row["closed form"]), rel=0.1)
    everything = rows("mean_estimation", "table.csv")
    assert run.markdown(everything) in (run.HERE / "README.md").read_text(encoding="utf-8")


def inverse_bands(module: Module) -> None:
    run = module("inverse_bands", "run")
    for count, kind in (("2", run.OPTIMIZED), ("4", run.ROOT), ("8", run.BANDS)):
        (row,) = rows("inverse_bands", "table.csv", apart="20", coefficients=count)
        assert f"{run.error(kind, int(count), run.ROUNDS, 20):.4g}" == row[kind]
    everything = rows("inverse_bands", "table.csv")
    assert run.markdown(everything) in (run.HERE / "README.md").read_text(encoding="utf-8")


def gains(module: Module) -> None:
    report = module("gains", "report")
    files = {source.folder: STUDIES / source.folder / "scores.csv" for source in report.SOURCES}
    scores = {
        folder: report.named_by_metric(report.read_scores(file)) for folder, file in files.items()
    }
    text = (STUDIES / "gains" / "README.md").read_text(encoding="utf-8")
    assert f"<!-- tables -->\n{report.sections(scores)}<!-- /tables -->" in text
    everything = [score for found in scores.values() for score in found]
    assert f"<!-- summary -->\n{report.summary(everything)}<!-- /summary -->" in text


def own_data(module: Module) -> None:
    tables, alone = module("own_data", "tables"), module("own_data", "alone")
    found = alone.alone(tables.diabetes(Path(), 0))
    assert set(found) == {"alone", "alone, averaged"}
    for method, error in found.items():
        (row,) = rows("own_data", "scores.csv", data="diabetes", split="0", method=method)
        same(error, row["error"], 7)
    ceiling, released = module("own_data", "ceiling"), module("own_data", "released")
    clients = released.Clients.of(tables.diabetes(Path(), 0))
    _, _, exact = ceiling.errors_of(clients, [])
    for method, error in exact.items():
        (row,) = rows("own_data", "ceiling.csv", data="diabetes", split="0", method=method)
        same(error, row["error"], 6)
    same(exact[alone.OPEN], alone.open_by_hand(tables.diabetes(Path(), 0))[alone.OPEN], 6)
    scores = [
        pd.read_csv(STUDIES / "own_data" / name, keep_default_na=False)
        for name in ("ceiling.csv", "counted.csv")
    ]
    text = (STUDIES / "own_data" / "README.md").read_text(encoding="utf-8")
    assert ceiling.table(*scores) in text


def trust(module: Module) -> None:
    run = module("trust", "run")
    digits = run.PROBLEMS[0]
    data = run.load("digits", None, 0)
    for name in (run.SECURE, run.ALONE):
        (found,) = rows("trust", "scores.csv", study="digits", trust=name, epsilon="8", seed="0")
        setting = run.Setting(float(found["clip"]), float(found["cohort"]), int(found["rounds"]))
        score = run.train(digits, data, name, 8.0, setting, 0)
        same(score["accuracy"], found["accuracy"], 4)
        same(score["noise"], found["noise"], 5)


CELLS = {
    one.__name__: one
    for one in (
        adapters, asynchronous, comparison, comparison_school, cost_of_privacy, cost_of_privacy_loans, digits, epsilon_interval,
        epsilon_interval_published, gains, inverse_bands, mean_estimation, mp_mtl, mp_mtl_variants, own_data, p2p, p2p_films, p2p_warm_start, pmtl, pp_dmtl,
        pp_dmtl_as_published, pp_dmtl_waiting, school, starts, trust,
    )
}  # fmt: skip


@pytest.mark.parametrize("study", CELLS)
def test_cells_that_are_recorded_are_what_the_code_gives_today(study: str, module: Module) -> None:
    CELLS[study](module)


@pytest.mark.parametrize(
    ("rounds", "apart", "most", "count", "inverse", "bands"),
    [  # squared sensitivities, and mean squared errors of prefix sums, by jax_privacy 2.0.0
        (60, 10, 6, 4, (10.725570886605999, 4.072200520833333), (8.9296875, 7.127754693003936)),
        (60, 7, 3, 2, (4.041829427083333, 8.375), (3.75, 14.00082304526749)),
        (200, 20, 10, 8, (21.173823767604006, 5.7731177723407745), (17.18379259109497, 11.19199630666386)),
        (1000, 100, 10, 4, (16.224023581515922, 49.97437109375), (14.8828125, 105.34757835187501)),
    ],
)  # fmt: skip
def test_banded_inverses_agree_with_jax_privacy(
    module: Module, rounds: int, apart: int, most: int, count: int, inverse: Any, bands: Any
) -> None:
    run = module("inverse_bands", "run")
    d = run.inverse_root(count)
    c = run.inverted(d, rounds)
    assert run.sensitivity(c, apart, most) ** 2 == pytest.approx(inverse[0], rel=1e-12)
    assert run.spread(run.padded(d, rounds)) ** 2 == pytest.approx(inverse[1], rel=1e-12)
    banded = np.array(run.Bands.square_root(count).coefficients)
    banded = banded / banded[0]
    wide = run.padded(banded, rounds)
    assert run.sensitivity(wide, apart, most) ** 2 == pytest.approx(bands[0], rel=1e-12)
    assert run.spread(run.inverted(banded, rounds)) ** 2 == pytest.approx(bands[1], rel=1e-12)


@pytest.mark.parametrize(
    ("rounds", "count", "expected"),
    [  # mean squared errors at a norm of 1, by optimize_banded_toeplitz of jax_privacy 2.0.0, 2,000 steps
        (12, 4, 3.1438483001269257),
        (60, 8, 6.791906456849071),
        (200, 10, 14.533544907736548),
        (1000, 10, 57.618075873474005),
        (1000, 20, 33.32474970286169),
        (1000, 100, 13.39267134714851),
    ],
)
def test_optimized_bands_agree_with_jax_privacy(
    module: Module, rounds: int, count: int, expected: float
) -> None:
    run = module("inverse_bands", "run")
    c = run.optimized_bands(count, rounds)
    assert (np.diff(c) < 0).all()
    assert run.spread(run.inverted(c, rounds)) ** 2 * (c @ c) == pytest.approx(expected, rel=1e-5)
    ratios = np.linspace(0.5, 0.9, 5)
    loss = partial(run.log_error_of_bands, rounds=rounds)
    slope = optimize.approx_fprime(ratios, lambda at: loss(at)[0], 1e-7)
    assert loss(ratios)[1] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_no_rounds_and_no_vectors_of_a_client_move_a_banded_inverse_further(module: Module) -> None:
    """Every choice of up to 3 rounds of 13 that are 4 apart at least; and vectors in any directions."""
    run = module("inverse_bands", "run")
    rng = np.random.default_rng(0)
    n, apart, most = 13, 4, 3
    for d in (run.inverse_root(3), run.inverse_root(9), run.optimized(2, n, apart)):
        c = run.inverted(d, n)
        matrix = np.array([[c[t - s] if t >= s else 0.0 for s in range(n)] for t in range(n)])
        inverse = [[d[t - s] if 0 <= t - s < len(d) else 0.0 for s in range(n)] for t in range(n)]
        assert np.allclose(matrix @ np.array(inverse), np.eye(n))
        claimed = run.sensitivity(c, apart, most)
        found = []
        for size in range(1, most + 1):
            for chosen in itertools.combinations(range(n), size):
                if (np.diff(chosen) >= apart).all():
                    found.append(np.linalg.norm(matrix[:, list(chosen)].sum(1)))
                    rows = rng.normal(size=(size, 3))
                    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
                    assert np.linalg.norm(matrix[:, list(chosen)] @ rows) <= claimed * (1 + 1e-12)
        assert max(found) == pytest.approx(claimed, rel=1e-12)
    for wrong in (np.array([1.0, -0.5, 0.2]), np.array([1.0, 1.5]), np.array([0.1, 0.5])):
        with pytest.raises(ValueError, match="must be nonnegative and must not rise"):
            run.sensitivity(wrong, apart, most)


def test_a_deadline_drops_who_is_late_and_nobody_else(module: Module) -> None:
    servers = module("asynchronous", "servers")
    law = servers.Law(1.0, 10.0)
    keys = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    bound = servers.Deadline(100, 0.8, law, 0, keys).bind(1000)
    # a tenth of the latencies is ten times as long
    fast, slow = (norm.cdf(math.log(bound.limit / factor)) for factor in (1.0, 10.0))
    assert 0.9 * fast + 0.1 * slow == pytest.approx(0.8)
    assert (bound.probability, bound.denominator) == pytest.approx((0.1, 80.0))
    steps = 2000
    taken = np.zeros(1000)
    source = SeededSource(0)
    for step in range(steps):
        taken[bound.order[bound.draw(step, source.coins("cohort", step))]] += 1
    late = np.arange(1000) % 10 == 9
    for rate, found in ((0.1 * fast, taken[~late]), (0.1 * slow, taken[late])):
        error = math.sqrt(rate / steps / len(found))
        assert found.mean() / steps == pytest.approx(rate, abs=4 * error)


def test_the_tables_of_pp_dmtl_are_those_of_its_scores(module: Module, tmp_path: Path) -> None:
    directions = module("pp_dmtl", "directions")
    page = directions.HERE / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    directions.HERE = tmp_path
    directions.write_tables(directions.scores.read_scores(directions.FILE))
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_every_study_has_cells() -> None:
    assert {path.parent.name for path in STUDIES.glob("*/README.md")} <= set(CELLS)


@pytest.mark.parametrize("study", sorted(path.parent.name for path in STUDIES.glob("*/README.md")))
def test_every_script_of_a_study_finds_what_it_imports(study: str, module: Module) -> None:
    for path in sorted((STUDIES / study).glob("*.py")):
        module(study, path.stem)


def test_runs_without_privacy_have_means_and_intervals(module: Module, tmp_path: Path) -> None:
    sweep = module("school", "sweep")
    run = sweep.Run("free", (), (7,))
    for seed, error in ((0, 0.25), (1, 0.75)):
        private = run.folder(tmp_path, seed) / "private"
        private.mkdir(parents=True)
        (private / "result.json").write_text("{}")
        (private / "metrics.csv").write_text(f"round,epsilon,mse\n7,inf,{error}\n")
    (row,) = sweep.outcomes(run, (0, 1), tmp_path)
    half = 12.706204736 * 0.25  # Student's t of one degree of freedom, times the standard error
    assert row["epsilon"] == math.inf
    assert (row["mse"], row["mse_half"]) == pytest.approx((0.5, half))
    assert "epsilon_half" not in row
