"""The reference table: its command on small data, its intervals and noise, its CSV and its page."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from benchmarks.reference import __main__ as command
from benchmarks.reference import beside_pfl, page, records, studies, training
from benchmarks.reference.problems import DIGITS, load, missing
from benchmarks.reference.rows import BY_NAME, ROWS
from benchmarks.reference.settings import EPSILONS, NO_NOISE, NOTHING_SENT, SEEDS, Row
from fedmtl import ClientPrivacy, load_data

WRITERS = 120
DATA = Path(os.environ.get("FEDMTL_DATA", command.DATA))


def small(name: str) -> Row:
    """A row with two rounds and two cheap settings."""
    row = BY_NAME[name].quick()
    settings = tuple(replace(one, finetune=None) for one in row.settings)
    return replace(row, settings=settings, epsilons=row.epsilons[:1])


@pytest.fixture
def few_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a part of the digits in the place of the data."""
    monkeypatch.setattr(
        training,
        "load",
        lambda problem, folder, seed: load_data("digits", clients=WRITERS, seed=seed),
    )


@pytest.mark.usefixtures("few_writers")
def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    out = tmp_path / "table.csv"
    rows = [small(name) for name in ("digits-fedavg", "digits-pmtl", "digits-secure-everybody")]
    measured: list[str] = []
    whole = training.measure

    def crashing(row, *rest, **more):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(row.name)
        return whole(row, *rest, **more)

    monkeypatch.setattr(training, "measure", crashing)
    with pytest.raises(KeyboardInterrupt):
        command.run(rows, (0, 1), tmp_path, out, again=False, canaries=False)
    (first,) = records.read(out)
    monkeypatch.setattr(training, "measure", whole)
    command.run(rows, (0, 1), tmp_path, out, again=False, canaries=False)
    lines = records.read(out)
    assert [one["row"] for one in lines] == [row.name for row in rows]
    assert {**lines[0], "gain_fedavg": ""} == {**first, "gain_fedavg": ""}
    assert [one["relation"] for one in lines] == ["add-remove", "add-remove", "zero-out"]
    assert lines[0]["amplification"].startswith("secret cohorts")
    assert lines[2]["amplification"] == "none"
    # other settings are measured again, and only they
    changed = replace(rows[1], rounds=1)
    assert not records.finished(changed, 1.0, (0, 1), lines)
    assert records.finished(rows[1], 1.0, (0, 1), lines)
    assert not records.finished(rows[1], 1.0, (0,), lines)


@pytest.mark.usefixtures("few_writers")
def test_the_measured_epsilon_is_a_lower_bound(tmp_path):
    row = small("digits-trusted-everybody")
    (_, *_, last) = BY_NAME[row.name].epsilons
    cell = training.measure(row, last, (0,), tmp_path)
    assert cell.lower_bound is not None
    assert 1.0 < cell.lower_bound < last == cell.results[0].privacy.budget


def test_noise_of_each_client_protects_its_row_alone():
    row = BY_NAME["digits-local-everybody"]
    data = load_data("digits", clients=WRITERS)
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=3.0, delta=1e-5)
    found = training.alone(row, data, privacy)
    assert found.epsilon is None
    each = found.noise_multiplier / math.sqrt(WRITERS)
    # ten Gaussian releases of one row are one of a tenth of the variance
    mu = math.sqrt(row.rounds) / each
    delta = stats.norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * stats.norm.cdf(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


def lines_of(scores, name="digits-fedavg", epsilon="1"):
    row = BY_NAME[name]
    return dict.fromkeys(records.COLUMNS, "") | {
        "row": name,
        "data": row.problem.title,
        "method": row.method,
        "unit": row.unit,
        "epsilon": epsilon,
        "metric": row.problem.metric,
        "larger": str(int(row.problem.larger)),
        "seeds": " ".join(map(str, range(len(scores)))),
        "scores": " ".join(map(str, scores)),
        "settings": "some",
    }


@pytest.mark.parametrize("data", ["digits", "school"])
def test_differences_are_paired_and_a_gain_is_better(data):
    generator = np.random.default_rng(0)
    base = generator.normal(0.5, 0.1, 5)
    better = base + generator.normal(0.02, 0.005, 5)
    names = (f"{data}-local", f"{data}-fedavg", f"{data}-pmtl")
    lines = [
        lines_of(base, names[0], "0"),
        lines_of(base, names[1], "1"),
        lines_of(better, names[2], "1"),
    ]
    *_, found = records.compared(lines, ROWS)
    oracle = stats.ttest_rel(better, base)
    low, high = oracle.confidence_interval(0.95)
    sign = 1 if data == "digits" else -1
    for name in ("local", "fedavg"):
        assert float(found[f"gain_{name}"]) == pytest.approx(sign * (low + high) / 2, rel=1e-3)
        assert float(found[f"gain_{name}_half"]) == pytest.approx((high - low) / 2, rel=1e-3)
        assert page.mark(found, name) == ("▲" if data == "digits" else "▼")
    mean, (low, high) = better.mean(), stats.t.interval(0.95, 4, better.mean(), stats.sem(better))
    assert float(found["mean"]) == pytest.approx(mean, rel=1e-5)
    assert float(found["half"]) == pytest.approx((high - low) / 2, rel=1e-2)


def test_methods_have_the_same_number_of_settings():
    for row in ROWS:
        if row.model == "automatic":
            continue
        assert len(row.settings) == 6, row.name
        assert len({one.words for one in row.settings}) == 6, row.name
        if row.settings[0].clip is not None and "prior" not in row.name:
            assert len(row.choices(NO_NOISE)) == 3, row.name
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {epsilon for row in ROWS for epsilon in row.epsilons} == {
        *EPSILONS,
        NO_NOISE,
        NOTHING_SENT,
    }


@pytest.mark.parametrize("study", studies.ROWS, ids=lambda study: study.name)
def test_outside_figures_are_those_that_the_studies_know(study):
    line = study.line()
    assert not line["settings"]
    assert line["outside_source"]
    if study.place.folder == "reproduce/school":
        known = replace(study.place, value="published")
    elif study.place.folder == "reproduce/p2p":
        where = tuple(
            (name, "the paper's table" if name == "method" else text)
            for name, text in study.place.where
        )
        known = replace(study.place, where=where)
    else:
        return
    assert known.found()[0] == study.outside.value


@pytest.mark.parametrize("method", ["FedAvg", "Ditto", "FedRep", "pFedMe"])
def test_models_are_those_of_another_program(method):
    (line,) = studies.Place("reference", "pfllib.csv", (("method", method),)).lines()
    assert line["fedmtl"] == line["pfllib"]
    assert float(line["difference"]) < 1e-9


def test_the_work_of_the_other_program_is_that_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(beside_pfl, "ROUNDS", 2)
    run = beside_pfl.ours("none", 0)
    beside_pfl.write(tmp_path / "work.npz", run, "none", 0)
    work = dict(np.load(tmp_path / "work.npz"))
    x, y = torch.from_numpy(work["x"]), torch.from_numpy(work["y"])
    shared = torch.from_numpy(work["initial"])
    turns = iter(work["rows"])
    clipped = 0
    for size in work["sizes"]:
        total = torch.zeros_like(shared)
        for _ in range(size):
            rows = torch.from_numpy(next(turns))
            module = torch.nn.Linear(64, 10)
            torch.nn.utils.vector_to_parameters(shared.clone(), module.parameters())
            steps = torch.optim.SGD(module.parameters(), lr=0.1)
            for batch in rows.split(10):
                steps.zero_grad()
                torch.nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
                steps.step()
            update = torch.nn.utils.parameters_to_vector(module.parameters()).detach() - shared
            clipped += int(update.norm() > 0.4)
            total += update * min(1.0, 0.4 / float(update.norm()))
        shared = shared + total / 50
    assert next(turns, None) is None
    assert clipped == len(work["rows"]) == work["sizes"].sum()
    assert torch.allclose(shared, run.model, rtol=0, atol=1e-6)
    assert not torch.allclose(run.initial, run.model, rtol=0, atol=1e-2)


@pytest.mark.parametrize(("noise", "rate", "scale"), [("clients", 0.05, 1), ("population", 0.001, 0.05)])  # fmt: skip
def test_the_noise_of_the_other_program_costs_its_epsilon(noise, rate, scale):
    cost = privacy_loss_distribution.from_gaussian_mechanism(
        beside_pfl.ACCOUNTS[noise].multiplier() / scale, sampling_prob=rate
    )
    found = cost.self_compose(beside_pfl.ROUNDS).get_epsilon_for_delta(1e-6)
    assert found == pytest.approx(2.0, rel=2e-3)


def test_an_interpreter_without_pfl_is_refused_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["beside_pfl", "--pfl-python", "nowhere"])
    with pytest.raises(SystemExit) as stopped:
        beside_pfl.main()
    assert stopped.value.code == 2
    assert "nowhere is no interpreter with pfl" in capsys.readouterr().err


def test_scores_beside_pfl_are_those_of_one_mechanism():
    lines = {
        noise: studies.Place("reference", "pfl.csv", (("noise", noise),)).lines()
        for noise in beside_pfl.ACCOUNTS
    }
    for noise, own in lines.items():
        assert [one["seed"] for one in own] == list(map(str, SEEDS))
        for one in own:
            assert float(one["account_pfl"]) == pytest.approx(
                float(one["account_fedmtl"]), rel=1e-3
            )
        if noise == "none":
            assert all(float(one["difference"]) < 1e-5 for one in own)
            # an image whose two largest outputs are equal but for rounding may change its label
            gaps = [abs(float(one["fedmtl"]) - float(one["pfl"])) for one in own]
            assert max(gaps) <= 1e-3
        else:
            gaps = [float(one["fedmtl"]) - float(one["pfl"]) for one in own]
            assert stats.ttest_1samp(gaps, 0.0).pvalue > 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run digits-fedavgg", "no row digits-fedavgg; `list` names the rows"),
        (
            "run femnist-pmtl --data nowhere",
            "femnist-pmtl: nowhere has no femnist/leaf_femnist_206",
        ),
    ],
)
def test_the_command_refuses_before_any_work(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.arguments(words.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_names_every_row():
    text = command.listed()
    assert all(f"{row.name} " in text for row in (*ROWS, *studies.ROWS))
    assert DIGITS.title in text


def test_the_page_is_made_of_the_csv():
    lines = records.read(page.CSV)
    assert page.text(lines) == page.PAGE.read_text(encoding="utf-8")


def test_the_csv_has_every_cell_with_its_means_and_differences():
    lines = records.read(page.CSV)
    own = [(one["row"], one["epsilon"], one["seeds"]) for one in page.measured(lines)]
    seeds = " ".join(map(str, SEEDS))
    wanted = [(row.name, records.number(one), seeds) for row in ROWS for one in row.epsilons]
    assert own == wanted
    assert records.compared(lines, ROWS) == lines
    there = [{**study.line(), "commit": ""} for study in studies.ROWS]
    assert [{**one, "commit": ""} for one in page.outside(lines)] == there
    for one in page.measured(lines):
        assert one["lower_bound"] == "" or float(one["lower_bound"]) <= float(one["epsilon"])
        assert not one["commit"].endswith("+")


@pytest.mark.parametrize("name", ["digits-pmtl", "school-prior", "school-records-learner"])
def test_a_recorded_score_is_what_the_code_gives_today(name):
    row = BY_NAME[name]
    lacks = missing(row.problem, DATA)
    if lacks:
        pytest.skip(lacks)
    (line,) = [
        one for one in records.read(page.CSV) if one["row"] == name and one["epsilon"] == "3"
    ]
    (setting,) = [one for one in row.settings if one.words == line["chosen"]]
    result = training.train(row, load(row.problem, DATA, 0), setting, 3.0, 0)
    assert result.final[row.problem.metric] == pytest.approx(
        records.scores_of(line)["0"], rel=0, abs=1e-4
    )
