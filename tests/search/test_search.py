"""Private search against dp_accounting, the laws of its coins, and searches that nobody disturbed."""

import itertools
import json
import math
import re
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from safetensors.torch import load_file
from scipy import stats

from fedmtl import (
    PMTL,
    ClientPrivacy,
    EarlyStopping,
    FedAvg,
    FixedCohort,
    FullParticipation,
    MPMTLayers,
    PoissonSampling,
    PrivateSearch,
    QuantileClip,
    RecordPrivacy,
    models,
)
from fedmtl.audit.verification import verify
from fedmtl.errors import ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import SeededSource, draw_repetitions, selection_epsilon
from fedmtl.privacy.noise.sources import SystemCoins
from fedmtl.search.choice import client_scores
from fedmtl.search.run import SearchRun
from fedmtl.trainer.engine import Engine
from fedmtl.trainer.fit import single_run
from fedmtl.trainer.run_channel import open_run
from fedmtl.trainer.summary import numbers_of_result
from tests.helpers import ragged_classification, regression

from ..audit.test_verification import both, failed, lists
from ..small import Ended
from ..trainer.ledgers import charges
from ..trainer.settings import CLIENTS, COHORT, DATA, DELTA, SOLVER, trainer

ROUNDS, NOISE, EPSILON, REPETITIONS = 6, 0.2, 4.0, 3
PRIVACY = ClientPrivacy(clip_norm=0.7, epsilon=EPSILON, delta=DELTA)
SECURE = replace(PRIVACY, source="secure")


def candidates(*lams: float, **settings):
    """Candidates by lambda, of six rounds."""
    settings = {"privacy": PRIVACY, "checkpoint_every": 1} | settings
    return {
        f"lam={lam:g}": trainer(**{"algorithm": PMTL(lam=lam, local=SOLVER)} | settings)
        for lam in lams or (0.1, 1.0)
    }


def searching(**settings) -> PrivateSearch:
    defaults = {"candidates": candidates(), "score_noise": NOISE, "progress": False}
    return PrivateSearch(**defaults | settings)


def seed_with(count: int, mean: float = 4.0, shape: float = 1.0) -> int:
    """A seed whose search makes this many repetitions."""
    draws = (
        (s, draw_repetitions(SeededSource(s).coins("search/repetitions", 0), mean, shape))
        for s in range(10_000)
    )
    return next(seed for seed, drawn in draws if drawn == count)


# What it costs


def accounted(run, score_multiplier: float, relation, *, mean: float, shape: float) -> float:
    """Epsilon of the whole, straight from dp_accounting."""
    one = dp_event.ComposedDpEvent([run, dp_event.GaussianDpEvent(score_multiplier)])
    whole = dp_event.RepeatAndSelectDpEvent(one, mean, shape)
    return RdpAccountant(neighboring_relation=relation).compose(whole).get_epsilon(DELTA)


ADD, REPLACE = (
    dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp_accounting.NeighboringRelation.REPLACE_ONE,
)
CASES = {  # the schedule, the event of a run by its noise multiplier, and the relation
    "poisson": (
        PoissonSampling(cohort=COHORT),
        lambda z: dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(COHORT / CLIENTS, dp_event.GaussianDpEvent(z)), ROUNDS
        ),
        ADD,
    ),
    "full": (
        FullParticipation(),
        lambda z: dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), ROUNDS),
        ADD,
    ),
    "fixed": (
        FixedCohort(cohort=COHORT),
        lambda z: dp_event.SelfComposedDpEvent(
            dp_event.GaussianDpEvent(z), math.ceil(ROUNDS * COHORT / CLIENTS) + 1
        ),
        REPLACE,
    ),
}


@pytest.mark.parametrize(
    ("case", "mean", "shape"),
    [
        ("poisson", 4.0, 1.0),
        ("poisson", 8.0, 0.0),
        ("poisson", 3.0, math.inf),
        ("full", 4.0, 1.0),
        ("fixed", 6.0, 0.5),
    ],
)
def test_the_whole_search_costs_the_budget_by_dp_accounting(case: str, mean: float, shape: float):
    schedule, run, relation = CASES[case]
    same = {
        name: trainer(schedule=schedule, algorithm=PMTL(local=SOLVER), privacy=PRIVACY)
        for name in "ab"
    }
    plan = searching(candidates=same, mean=mean, shape=shape, score_noise=0.3).plan()
    sensitivity = 1.0 if relation == REPLACE else 0.5
    spent = accounted(
        run(plan.noise_multiplier), 0.3 * CLIENTS / sensitivity, relation, mean=mean, shape=shape
    )
    assert 0.99 * EPSILON <= spent <= EPSILON * (1 + 1e-9)
    assert plan.epsilon == pytest.approx(spent, rel=1e-6)
    for inner in plan.trainers.values():  # every run is bounded by what its T steps cost alone
        assert inner.privacy.noise_multiplier == plan.noise_multiplier
        assert inner.privacy.epsilon == plan.budget < EPSILON


def test_a_budget_that_is_allocated_over_the_rounds_costs_its_total():
    """Gaussian uses of multipliers z / w_t are one of z / sqrt(sum w_t^2), which is all that the search composes."""

    def candidate(alpha: float, **settings):
        algorithm = MPMTLayers(layers=("3",), alpha=alpha, local=SOLVER)
        return trainer(
            algorithm=algorithm, schedule=FullParticipation(), privacy=PRIVACY, **settings
        )

    even, rising = (
        searching(candidates={n: candidate(alpha) for n in "ab"}).plan() for alpha in (0.0, 1.0)
    )
    weights = np.arange(1, ROUNDS + 1) / np.arange(1, ROUNDS + 1).mean()
    joint = rising.noise_multiplier / math.sqrt((weights**2).sum())
    assert joint == pytest.approx(even.noise_multiplier / math.sqrt(ROUNDS), rel=1e-4)
    with pytest.raises(ConfigError, match="candidate 'b': the allocation of the budget"):
        searching(candidates={"a": candidate(0.0), "b": candidate(1.0)}).plan()


# The coins


def run_of(values):
    """All of a run that a search looks at."""
    own = {f"client-{k}": float(v) for k, v in enumerate(values)}
    return SimpleNamespace(ids=tuple(own), personal_accuracy=own, epsilon=0.0)


def test_candidates_are_drawn_uniformly_and_repeated_as_the_law_says():
    names = (0.1, 1.0, 5.0)
    plan, drawn = searching(candidates=candidates(*names)).plan(), []
    for seed in range(200):
        chosen, scores = SearchRun(
            searching(candidates=candidates(*names, seed=seed)), plan, None
        )._begin()
        assert scores == []
        drawn.append(chosen)
    counts = np.bincount(np.concatenate(drawn), minlength=3)
    assert stats.chisquare(counts).pvalue > 1e-4
    pairs = [pair for one in drawn for pair in itertools.pairwise(one)]
    table = [[pairs.count((a, b)) for b in range(3)] for a in range(3)]
    assert stats.chi2_contingency(table).pvalue > 1e-4
    lengths = np.array([len(one) for one in drawn])
    law = stats.geom(1 / 4)  # shape 1 is geometric, of mean 4
    observed = [int((lengths == k).sum()) for k in range(1, 8)] + [int((lengths >= 8).sum())]
    expected = [200 * law.pmf(k) for k in range(1, 8)] + [200 * law.sf(7)]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_secure_mode_draws_its_coins_from_the_system(monkeypatch):
    asked: list[int] = []

    def uniform(self, count: int) -> np.ndarray:
        asked.append(count)
        return np.full(
            count, 0.75
        )  # K = 5 of a geometric law of mean 4; the second of two candidates

    plan = searching(candidates=candidates(privacy=SECURE)).plan()
    search = SearchRun(searching(candidates=candidates(privacy=SECURE)), plan, None)
    monkeypatch.setattr(SystemCoins, "uniform", uniform)
    assert search._begin() == ([1] * int(stats.geom(1 / 4).ppf(0.75 + 1e-12)), [])
    assert len(asked) == 2


# The score


def test_scores_lie_between_0_and_1_whatever_a_client_reports():
    values = torch.tensor([0.0, 0.3, 1.0, 7.0, -2.0, math.inf, -math.inf, math.nan])
    assert client_scores(values, None).tolist() == pytest.approx([0, 0.3, 1, 1, 0, 1, 0, 0])
    assert client_scores(values, 2.0).tolist() == pytest.approx([1, 0.85, 0.5, 0, 1, 0, 1, 0])
    assert client_scores(values.float(), None).dtype == torch.float64


@pytest.mark.parametrize("privacy", [PRIVACY, SECURE], ids=["seeded", "secure"])
def test_the_noise_of_a_score_has_the_stated_law(privacy):
    settings = searching(candidates=candidates(privacy=privacy))
    search = SearchRun(settings, settings.plan(), None)
    values = np.linspace(0.1, 0.9, CLIENTS)
    run = run_of(values)
    drawn = np.array([search._score(k, 0, run) for k in range(400)]) - values.mean()
    assert stats.kstest(drawn / NOISE, "norm").pvalue > 1e-4
    assert abs(stats.spearmanr(drawn[1:], drawn[:-1]).statistic) < 5 / math.sqrt(400)
    again = [search._score(k, 0, run) for k in range(3)]
    assert (again == (drawn[:3] + values.mean()).tolist()) == (privacy is PRIVACY)


def test_one_client_moves_the_released_score_by_its_sensitivity_at_most():
    """The same seeded noise, one client's metric as extreme as can be."""
    settings = searching()
    search = SearchRun(settings, settings.plan(), None)

    def released(value: float) -> float:
        return search._score(0, 0, run_of([0.4] * (CLIENTS - 1) + [value]))

    middle = released(0.5)  # contributes 0, as if the client were not there
    extremes = (1e9, -1e9, math.inf, -math.inf, math.nan, 1.0, 0.0)
    moves = [abs(released(v) - middle) * CLIENTS for v in extremes]
    assert max(moves) == pytest.approx(0.5, rel=1e-5)


# What is chosen and what is released


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search of three repetitions that nobody disturbed."""
    folder = tmp_path_factory.mktemp("search") / "whole"
    return folder, searching(
        candidates=candidates(seed=seed_with(REPETITIONS)), folder=folder
    ).fit()


def test_the_best_noised_score_wins(finished):
    folder, found = finished
    scores = [one.score for one in found.repetitions]
    best = int(np.argmax(scores))
    assert len(scores) == REPETITIONS
    assert len(set(scores)) == REPETITIONS
    assert best > 0  # else the first would win by chance
    assert (found.score, found.chosen) == (scores[best], found.repetitions[best].candidate)
    own = folder / "private" / "candidates" / str(best)
    assert torch.equal(load_file(own / "private/models.safetensors")["models"], found.best.personal)
    for k in range(REPETITIONS):
        assert same_model(folder, folder / f"private/candidates/{k}") == (k == best)


def test_the_best_run_is_that_candidate_trained_with_the_calibrated_noise(finished):
    _, found = finished
    settings = searching(candidates=candidates(seed=seed_with(REPETITIONS)))
    index = [one.score for one in found.repetitions].index(found.score)
    run = settings.candidates[found.chosen]
    search = SearchRun(settings, settings.plan(), None)
    own = ClientPrivacy(clip_norm=0.7, noise_multiplier=search.plan.noise_multiplier, delta=DELTA)
    assert run.seed == search.seed
    alone = single_run(
        replace(run, privacy=own), False, Engine(coins=SeededSource(search.seed, index + 1))
    )
    assert torch.equal(alone.personal, found.best.personal)
    assert found.best.personal_accuracy == alone.personal_accuracy


def test_nothing_else_is_public(finished):
    folder, found = finished
    assert sorted(file.name for file in (folder / "public").iterdir()) == [
        "manifest.json", "model.safetensors", "privacy.json", "search.json",
    ]  # fmt: skip
    assert json.loads((folder / "public/search.json").read_text()) == {
        "chosen": found.chosen,
        "score": found.score,
    }
    public = (folder / "public/privacy.json").read_text() + (
        folder / "public/search.json"
    ).read_text()
    for one in found.repetitions:
        assert (str(one.score) in public) == (one.score == found.score)
    told = json.loads((folder / "public/privacy.json").read_text())
    assert told["search"]["candidates"] == ["lam=0.1", "lam=1"]
    kept = json.loads((folder / "private/search.json").read_text())
    assert kept["scores"] == [one.score for one in found.repetitions]


def test_what_a_report_says_of_a_search_is_what_its_ledger_says(finished, tmp_path):
    folder, _ = finished
    assert verify(folder).fits
    shutil.copytree(folder, tmp_path / "run")
    stated = json.loads((folder / "public/privacy.json").read_text())
    other = {
        "candidates": ["lam=0.1"],
        "mean": 3.0,
        "shape": "inf",
        "score": "loss",
        "score_noise": 9.0,
    }
    assert other.keys() == stated["search"].keys()
    for key, value in [*other.items(), ("more", 1)]:
        both(tmp_path / "run", search=stated["search"] | {key: value})
        lists(tmp_path / "run")
        assert f"{key} " in failed(tmp_path / "run")["search"]
    both(tmp_path / "run", search=stated["search"], observer="server")
    lists(tmp_path / "run")
    assert "of every search" in failed(tmp_path / "run")["search"]
    (open_fields,) = [check.detail for check in verify(folder).checks if check.name == "fields"]
    assert "epsilon" in open_fields.split(": ")[0].split(", ")


def test_published_files_bear_the_time_at_which_the_search_began(tmp_path):
    """That of their writing would tell how long it took, and so about how many repetitions there were."""
    settings = searching(candidates=candidates(seed=seed_with(2)), folder=tmp_path / "run")
    earliest = time.time()
    crash(settings, SearchRun, "_train", 2)
    interrupted = time.time()
    settings.fit(resume=True)
    public = tmp_path / "run/public"
    dates = {path.stat().st_mtime for path in (public, *public.iterdir())}
    assert len(dates) == 1
    assert earliest - 1 <= dates.pop() < interrupted


def test_loud_noise_is_announced_once_for_each_candidate(caplog):
    """A line for each repetition would tell how many there are."""
    told = []
    for count in (1, 3):
        caplog.clear()
        searching(
            candidates=candidates(**with_privacy(epsilon=1.0), seed=seed_with(count)),
            score_noise=0.6,
        ).fit()
        told.append(list(caplog.messages))
    assert told[0] == told[1]
    assert [text.split(": ")[0] for text in told[0]] == ["candidate 'lam=0.1'", "candidate 'lam=1'"]
    assert all("little will be learned" in text for text in told[0])


def test_every_epsilon_that_is_told_is_that_of_the_whole_search(finished):
    folder, found = finished
    total, alone = found.epsilon, searching().plan().budget
    assert 0.99 * EPSILON < total <= EPSILON
    assert alone < 0.9 * total
    assert found.best.epsilon == found.best.privacy.epsilon == found.privacy.epsilon == total
    assert {row["epsilon"] for row in found.best.history} == {total}
    assert numbers_of_result(found.best)["epsilon"] == total
    report = json.loads((folder / "public/privacy.json").read_text())
    assert (report["epsilon"], report["budget"], report["accountant"]) == (total, EPSILON, "rdp")
    assert (report["search"]["mean"], report["search"]["shape"], report["names"]) == (
        4.0,
        1.0,
        ["update", "score"],
    )
    assert report["releases"] == ROUNDS + 1
    assert json.loads((folder / "private/result.json").read_text())["epsilon"] == total
    for text in (found.summary(), found.best.summary()):
        assert f"epsilon      {total:.4g} at delta" in text
        assert f"{alone:.4g}" not in text
        assert "number of repetitions: secret" in " ".join(text.split())
        assert "lam=0.1; lam=1" in text
        assert text.count("a simulation:") == 1


def test_a_search_may_release_nothing(tmp_path):
    poisson = seed_with(0, 1.5, math.inf)
    settings = searching(
        candidates=candidates(seed=poisson),
        mean=1.5,
        shape=math.inf,
        score_noise=0.3,
        folder=tmp_path / "none",
    )
    found = settings.fit()
    assert (found.chosen, found.score, found.best, found.repetitions) == (None, None, None, ())
    assert 0.99 * EPSILON < found.epsilon <= EPSILON
    assert "nothing is released" in found.summary()
    assert not (tmp_path / "none/public/model.safetensors").exists()
    assert (
        json.loads((tmp_path / "none/public/privacy.json").read_text())["search"]["shape"] == "inf"
    )


def test_a_regression_is_scored_by_its_bounded_error():
    data = regression(clients=CLIENTS)
    same = candidates(data=data, model=models.mlp(hidden=2), loss="mse", seed=seed_with(1))
    with pytest.raises(ConfigError, match="score_bound is missing"):
        searching(candidates=same)
    found = searching(candidates=same, score_bound=3.0, score_noise=0.3).fit()
    errors = np.array(list(found.best.personal_accuracy.values()))
    exact = float(np.mean(1 - np.minimum(errors, 3.0) / 3.0))
    assert abs(found.score - exact) < 5 * 0.3
    assert found.score != exact
    assert "1 - min(error, 3) / bound" in found.summary()


def test_progress_is_one_line_a_repetition_and_does_not_tell_how_many(capsys):
    found = searching(candidates=candidates(seed=seed_with(3)), progress=True).fit()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(found.repetitions) == 3
    for k, line in enumerate(lines, start=1):
        assert line.startswith(f"private: repetition {k}, lam=")
        assert " of 3" not in line
        assert "/3" not in line


# Interruptions


def crash(
    settings: PrivateSearch, where: type, name: str, call: int, *, resume: bool = False
) -> None:
    """Run a search that ends as its process does, at the ``call``-th call of a method."""
    whole, seen = getattr(where, name), itertools.count(1)

    def counted(self, *args, **options):
        if next(seen) == call:
            raise Ended
        return whole(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, counted)
        with pytest.raises(Ended):
            settings.fit(resume=resume)


def same_model(folder: Path, other: Path) -> bool:
    """Whether two runs have published the same bits."""
    one, two = (load_file(place / "public/model.safetensors") for place in (folder, other))
    return all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        (SearchRun, "_write", 2),  # a score drawn and not recorded
        (SearchRun, "_train", 2),  # between two repetitions
        (PMTL, "step", 9),  # inside the second
        (SearchRun, "_score", 3),  # trained and not scored
        (SearchRun, "_publish", 1),
    ],
)
def test_a_seeded_search_resumes_to_the_same_bits(tmp_path, finished, where, name: str, call: int):
    whole, undisturbed = finished
    settings = searching(
        candidates=candidates(seed=seed_with(REPETITIONS)), folder=tmp_path / "run"
    )
    crash(settings, where, name, call)
    with pytest.raises(ResumeError, match="already holds a run"):
        settings.fit()
    found = settings.fit(resume=True)
    assert found.repetitions == undisturbed.repetitions
    assert (found.chosen, found.score, found.epsilon) == (
        undisturbed.chosen,
        undisturbed.score,
        undisturbed.epsilon,
    )
    assert torch.equal(found.best.personal, undisturbed.best.personal)
    mine, theirs = tmp_path / "run/public", whole / "public"
    assert {file.name for file in mine.iterdir()} == {file.name for file in theirs.iterdir()}
    for file in ("privacy.json", "search.json"):
        assert (mine / file).read_bytes() == (theirs / file).read_bytes()
    assert same_model(tmp_path / "run", whole)
    assert settings.fit(resume=True).score == found.score  # a finished one stays as it is


def charged(folder) -> list[tuple[int, int]]:
    """Steps and scores charged in every repetition so far, as the ledgers' files say."""
    places = sorted((folder / "private/candidates").iterdir(), key=lambda place: int(place.name))
    names = ("ledger.jsonl", "score.jsonl")
    return [
        tuple(sum(charges(place / "private" / name).values()) for name in names) for place in places
    ]


def identical(report) -> str:
    """A report without the identity of its run and the place where its ledger ended."""
    told = json.loads(report.read_text())
    return json.dumps(
        {
            key: value
            for key, value in told.items()
            if key not in ("run", "ledger_lines", "ledger_head")
        }
    )


def test_an_interrupted_repetition_of_a_secure_search_begins_anew(monkeypatch, tmp_path):
    """Crashes in the middle of runs, and one after a score was drawn and before it was written: no repetition of the
    finished search can be told from another."""
    monkeypatch.setattr("fedmtl.search.run.draw_repetitions", lambda *_: 3)
    settings = searching(candidates=candidates(privacy=SECURE), folder=tmp_path / "run")
    for resume, end in enumerate(
        [(PMTL, "step", 3), (PMTL, "step", 9), (SearchRun, "_write", 1), (PMTL, "step", 2)]
    ):
        crash(settings, *end, resume=resume > 0)
        assert all(steps <= ROUNDS and scores <= 1 for steps, scores in charged(tmp_path / "run"))
    before = json.loads((tmp_path / "run/private/search.json").read_text())
    found = settings.fit(resume=True)
    after = json.loads((tmp_path / "run/private/search.json").read_text())
    assert len(before["scores"]) == 1
    assert after["candidates"] == before["candidates"]
    assert after["scores"][:1] == before["scores"]
    assert charged(tmp_path / "run") == [(ROUNDS, 1)] * 3
    assert found.score == max(one.score for one in found.repetitions)
    places = [tmp_path / f"run/private/candidates/{k}" for k in range(3)]
    assert len({identical(place / "public/privacy.json") for place in places}) == 1
    assert found.privacy.releases == ROUNDS + 1
    public = shutil.copytree(tmp_path / "run/public", tmp_path / "before/public")
    again = settings.fit(resume=True)
    assert (again.score, charged(tmp_path / "run")) == (found.score, [(ROUNDS, 1)] * 3)
    assert same_model(tmp_path / "run", public.parent)


def test_the_number_of_repetitions_is_never_drawn_again(tmp_path):
    settings = searching(candidates=candidates(seed=seed_with(1)), folder=tmp_path / "run")
    settings.fit()
    (tmp_path / "run/private/search.json").unlink()
    with pytest.raises(ResumeError, match=r"search.json is missing, but repetitions have been run"):
        settings.fit(resume=True)


def test_a_secure_search_needs_locks_and_its_head_file(monkeypatch, tmp_path):
    """A copy of it would release a second choice; a seeded search would release the same one."""
    monkeypatch.setattr("fedmtl.search.run.draw_repetitions", lambda *_: 0)
    for source, privacy in (("seeded", PRIVACY), ("secure", SECURE)):
        settings = searching(candidates=candidates(privacy=privacy), folder=tmp_path / source)
        settings.fit()
        (tmp_path / source / "private/ledger.head").unlink()
        if source == "seeded":
            settings.fit(resume=True)
            continue
        with pytest.raises(ResumeError, match=r"ledger\.head is missing"):
            settings.fit(resume=True)


def test_a_resume_with_other_settings_is_refused(tmp_path):
    settings = searching(folder=tmp_path / "run")
    crash(settings, SearchRun, "_train", 1)
    with pytest.raises(ResumeError, match="mean"):
        replace(settings, mean=5.0).fit(resume=True)
    with pytest.raises(ResumeError, match="candidates"):
        replace(settings, candidates=candidates(0.1, 2.0)).fit(resume=True)
    with pytest.raises(ResumeError, match="already holds a run"):
        trainer(folder=tmp_path / "run").fit()
    with pytest.raises(ResumeError, match="nothing to resume"):
        searching().fit(resume=True)


# What is refused


def with_privacy(**changes):
    return {"privacy": replace(PRIVACY, **changes)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": None}, "privacy is None;"),
        ({"privacy": RecordPrivacy(clip_norm=1.0, epsilon=2.0)}, "privacy is RecordPrivacy"),
        (with_privacy(epsilon=math.inf), "privacy.epsilon is inf"),
        (with_privacy(noise_multiplier=1.0), "privacy.noise_multiplier is 1"),
        (
            with_privacy(mechanism="wishart"),
            "privacy.mechanism is 'wishart', which protects nothing",
        ),
        (with_privacy(epsilon=2.0), "privacy.epsilon is 2.0"),
        (with_privacy(delta=1e-6), "privacy.delta is 1e-06"),
        (with_privacy(source="secure"), "privacy.source is 'secure'"),
        (with_privacy(mechanism="l2_laplace"), "privacy.mechanism is 'l2_laplace'"),
        ({"rounds": 7}, "rounds is 7, but candidate 'lam=0.1' has 6"),
        ({"seed": 3}, "seed is 3"),
        ({"schedule": PoissonSampling(cohort=5)}, "schedule is "),
        ({"data": ragged_classification(CLIENTS, seed=1)}, "data is "),
        ({"early_stopping": EarlyStopping()}, "early_stopping"),
        ({"evaluate_clients": 5}, "evaluate_clients"),
    ],
)
def test_what_the_accounting_does_not_cover_is_refused_by_name(changes, said: str):
    same = candidates()
    with pytest.raises(ConfigError, match="candidate 'odd': ") as error:
        searching(candidates=same | {"odd": replace(same["lam=1"], **changes)})
    assert said in str(error.value)


def test_the_size_of_a_release_matters_under_k_norm_noise_only():
    def with_a_larger_one(mechanism: str) -> PrivateSearch:
        same = candidates(**with_privacy(mechanism=mechanism))
        return searching(
            candidates=same | {"odd": replace(same["lam=1"], model=models.mlp(hidden=5))}
        )

    plan = with_a_larger_one("gaussian").plan()
    assert plan.noise_multiplier == pytest.approx(searching().plan().noise_multiplier, rel=1e-12)
    for one in plan.trainers.values():  # the runs of all sizes fit the budget, to the last step
        with closing(open_run(one, one.problem())) as channel:
            assert channel.epsilon_at(one.rounds) <= plan.budget
    with pytest.raises(ConfigError, match="candidate 'odd': the size of a release is"):
        with_a_larger_one("l2_laplace").plan()


def test_what_costs_nothing_may_differ():
    """Stateful and stateless under Poisson sampling, other clip norms, an adaptive one, another copy of the data."""
    adaptive = replace(PRIVACY, clip_norm=QuantileClip(initial=1.0, count_noise=2.0))
    mixed = candidates() | {
        "fedavg": trainer(algorithm=FedAvg(local=SOLVER), privacy=replace(PRIVACY, clip_norm=2.0)),
        "quantile": trainer(privacy=adaptive, data=ragged_classification(CLIENTS)),
    }
    assert ragged_classification(CLIENTS) is not DATA
    assert (
        searching(candidates=mixed).plan().noise_multiplier == searching().plan().noise_multiplier
    )
    quiet = replace(PRIVACY, clip_norm=QuantileClip(initial=1.0, count_noise=0.1))
    with pytest.raises(PrivacyError, match="candidate 'loud': Adaptive clipping"):
        searching(candidates=mixed | {"loud": trainer(privacy=quiet)}).plan()


def test_a_run_that_spends_more_than_was_planned_stops_the_search(monkeypatch, tmp_path):
    def run(*place, **engine):
        result = single_run(*place, **engine)
        return replace(result, privacy=replace(result.privacy, epsilon=math.inf))

    monkeypatch.setattr("fedmtl.search.run.single_run", run)
    with pytest.raises(
        PrivacyError, match=r"a run spent epsilon = inf, more than the .* nothing of it is released"
    ):
        searching(folder=tmp_path / "run").fit()
    assert not (tmp_path / "run/public").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"candidates": {}}, "candidates is empty"),
        ({"candidates": {"a": 3}}, r"candidates\['a'\] is 3; it must be a Trainer"),
        ({"candidates": {"": trainer(privacy=PRIVACY)}}, "names are non-empty"),
        ({"mean": 0.5}, "mean"),
        ({"shape": -1.0}, "shape"),
        ({"score_noise": 0.0}, "score_noise"),
        ({"score_bound": 1.0}, "score_bound is for regression"),
        (
            {"candidates": candidates(privacy=replace(PRIVACY, epsilon=1e-7)), "score_noise": 1e9},
            r"A smaller --mean \(PrivateSearch\.mean in Python\) costs less\.$",
        ),
    ],
)
def test_impossible_settings_are_refused(settings, said: str):
    with pytest.raises(ConfigError, match=said):
        searching(**settings).plan()


def test_a_refusal_of_loud_scores_names_a_noise_that_works() -> None:
    with pytest.raises(ConfigError, match=r"--score-noise is 0\.0001, and with ") as refused:
        searching(score_noise=1e-4).plan()
    named = float(re.search(r"and with (\S+) they", str(refused.value))[1])
    plan = searching(score_noise=named).plan()
    assert plan.noise_multiplier < 100
    assert plan.epsilon <= PRIVACY.epsilon
    clients = len(next(iter(candidates().values())).data)

    def of_scores(noise: float) -> float:
        event = dp_event.GaussianDpEvent(noise * clients / 0.5)
        return selection_epsilon(event, plan.delta, mean=4.0, shape=1.0)

    assert of_scores(named) <= PRIVACY.epsilon / 2 < of_scores(0.9 * named)
