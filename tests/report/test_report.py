"""A folder of small hand-written runs, whose averages are known, becomes one table and one plot."""

import csv
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedmtl.errors import DataError
from fedmtl.report import _settings, figures, frame, report, tables
from tests import small


def write_run(folder: Path, *, privacy: dict[str, Any] | None = None, **result: Any) -> Path:
    result = {
        "algorithm": "pmtl",
        "epsilon": 4.0,
        "delta": 1e-5,
        "accuracy": 0.8,
        "seed": 0,
        "unit": "client",
    } | result
    (folder / "private").mkdir(parents=True)
    (folder / "public").mkdir()
    (folder / "private" / "result.json").write_text(json.dumps(result))
    (folder / "public" / "privacy.json").write_text(
        json.dumps({"unit": result["unit"], **(privacy or {})})
    )
    return folder


def add_result(folder: Path, **values: Any) -> None:
    """Give the result of a run more values, or others."""
    file = folder / "private" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two methods at three epsilons and two seeds; a local baseline in each; one run without privacy."""
    root = tmp_path / "sweep"
    for i, epsilon in enumerate((1.0, 2.0, 8.0)):
        for seed in (0, 1):
            for method, best in (("pmtl", 0.8), ("fedavg", 0.7)):
                write_run(
                    root / f"{method}-{epsilon}-{seed}",
                    algorithm=method,
                    epsilon=epsilon,
                    accuracy=best + 0.05 * i + 0.01 * seed,
                    seed=seed,
                    baselines={"local": {"epsilon": 0.0, "accuracy": 0.75 + 0.02 * seed}},
                )
    write_run(root / "open", epsilon=math.inf, delta=None, accuracy=0.93, unit="client")
    return root


def test_seeds_are_averaged_and_repeated_baselines_counted_once(sweep: Path) -> None:
    rows = frame([sweep])
    assert len(rows) == 12 + 1 + 2  # local: one row for each seed, though twelve runs trained it
    groups = tables.grouped(rows).set_index(["algorithm", "epsilon"])
    assert len(groups) == 6 + 1 + 1
    pmtl = groups.loc["pmtl", 2.0]
    assert pmtl.seeds == 2
    assert pmtl["accuracy"] == pytest.approx(0.855)
    assert pmtl["accuracy ±"] == pytest.approx(statistics.stdev([0.85, 0.86]))
    assert groups.loc[("local", 0.0), "accuracy"] == pytest.approx(0.76)
    assert groups.loc[("pmtl", math.inf), "accuracy"] == 0.93


LOCAL = {"epsilon": 0.0, "accuracy": 0.7}
FOLDED = {  # runs, and the label, unit, number of runs and mean accuracy of every row of the table
    "what releases nothing protects no unit of its own": (
        [{"unit": unit, "baselines": {"local": LOCAL}} for unit in ("client", "record")],
        [("Local", "", 1, 0.7), ("PMTL", "client", 1, 0.8), ("PMTL", "record", 1, 0.8)],
    ),
    "a score that is missing is not averaged away": (
        [{"seed": 0}, {"seed": 1, "accuracy": "nan"}],
        [("PMTL", "client", 2, math.nan)],
    ),
    "runs of one seed that nothing tells apart are numbered": (
        [{"accuracy": 0.8}, {"accuracy": 0.9}],
        [("PMTL", "client", 1, 0.8), ("PMTL (2)", "client", 1, 0.9)],
    ),
    "baselines of two methods may differ in settings that no result names": (
        [
            {"baselines": {"local": LOCAL}},
            {"algorithm": "ditto", "baselines": {"local": LOCAL | {"accuracy": 0.6}}},
        ],
        [
            ("Local", "", 1, 0.7),
            ("Local (2)", "", 1, 0.6),
            ("Ditto", "client", 1, 0.8),
            ("PMTL", "client", 1, 0.8),
        ],
    ),
    "repeats of a baseline under other budgets count once": (
        [
            {"epsilon": e, "baselines": {"local": LOCAL | {"noise_multiplier": e, "clip_norm": e}}}
            for e in (1.0, 2.0)
        ],
        [("Local", "", 1, 0.7), ("PMTL", "client", 1, 0.8), ("PMTL", "client", 1, 0.8)],
    ),
    "repeats of a baseline under settings that change no number of it count once": (
        [
            {"configuration": {"schedule": {"class": one}}, "baselines": {"local": LOCAL}}
            for one in "AB"
        ],
        [
            ("Local", "", 1, 0.7),
            ("PMTL schedule A", "client", 1, 0.8),
            ("PMTL schedule B", "client", 1, 0.8),
        ],
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_averaged_and_what_counts_once(name: str, tmp_path: Path) -> None:
    runs, expected = FOLDED[name]
    for place, run in enumerate(runs):
        write_run(tmp_path / str(place), **run)
    groups = tables.grouped(frame([tmp_path]))
    rows = zip(groups.label, groups.unit, groups.seeds, groups.accuracy, strict=True)
    assert list(rows) == [(*row[:3], pytest.approx(row[3], nan_ok=True)) for row in expected]


def configured(folder: Path, command: str, seed: int = 0, **settings: Any) -> Path:
    """A run of the command, with its resolved configuration."""
    import yaml

    local = {
        "_target_": "fedmtl.LocalSGD",
        "lr": settings.pop("lr", 0.5),
        "epochs": settings.pop("epochs", 5),
    }
    config = {
        "data": {"_target_": "fedmtl.data.load_digits_clients", "clients": 30, "seed": seed, "gamma": 2.0},
        "model": {"_target_": "fedmtl.models.softmax_regression", "lora": None},
        "algorithm": {"_target_": "fedmtl.PMTL", "lam": 1.0, "local": local},
        "privacy": {"_target_": "fedmtl.ClientPrivacy", "clip_norm": 1.5, "epsilon": 4.0},
        "trainable": None, "seed": seed, "rounds": 20, "device": "auto", "baselines": ["local"],
    }  # fmt: skip
    for key, value in settings.items():
        *groups, last = key.split("__")
        node: Any = config
        for one in groups:
            node = node[one]
        node[last] = value
    local = {"local": {"epsilon": 0.0, "accuracy": 0.7 + 0.001 * seed + local["lr"] / 100}}
    result = {
        "accuracy": 0.5 + 0.01 * seed + local["local"]["accuracy"] / 10,
        "baselines": local,
        "seed": seed,
    }
    write_run(folder, data="digits", clients=30, **result)
    (folder / "private" / "config.yaml").write_text(
        f"# fedmtl {command} seed={seed}\n{yaml.safe_dump(config)}"
    )
    return folder


@pytest.mark.parametrize(
    ("command", "changed", "label"),
    [
        ("algorithm.local.lr=0.1", {"lr": 0.1}, "PMTL lr 0.1"),
        (
            "model=mlp",
            {"model": {"_target_": "fedmtl.models.mlp", "hidden": 64, "lora": None}},
            "PMTL model mlp",
        ),
        ("model.lora={rank: 4}", {"model__lora": {"rank": 4}}, "PMTL lora.rank 4"),
        (
            "algorithm/graph=ring",
            {"algorithm__graph": {"_target_": "fedmtl.graphs.Ring"}},
            "PMTL graph Ring",
        ),
        (
            "experiment=other",
            {"algorithm__lam": 0.1},
            "PMTL lam 0.1",
        ),  # not named, but all that differs
    ],
)
def test_other_settings_are_other_experiments(
    tmp_path: Path, command: str, changed: dict[str, Any], label: str
) -> None:
    """Seeds of one experiment are averaged, in whatever order they come; those of two are not, whatever the seeds."""
    for seed in (0, 1):
        configured(tmp_path / f"a{seed}", "privacy.epsilon=4", seed)
    configured(tmp_path / "b2", command, 2, **changed)
    configured(tmp_path / "b0", command, 0, device="cpu", **changed)  # where it ran does not matter
    groups = tables.grouped(frame([tmp_path]))
    found = groups[groups.algorithm == "pmtl"].set_index("label").seeds.to_dict()
    assert found.pop(label) == 2
    assert list(found.values()) == [2]
    _, caption = tables.table_of(groups[groups.algorithm == "pmtl"])
    assert caption[0].endswith("; every row is the mean of 2 runs")


def test_runs_of_programs_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    from fedmtl import FedAvg, LocalSGD, load_data, models

    for seed, hidden, lr in ((0, 4, 0.1), (1, 4, 0.1), (2, 4, 0.3), (3, 8, 0.1)):
        given = {
            "data": load_data("digits", clients=4, seed=seed),
            "model": models.mlp(hidden=hidden),
            "seed": seed,
        }
        algorithm = FedAvg(local=LocalSGD(lr=lr, steps=1, batch_size=4))
        small.trainer(algorithm=algorithm, folder=tmp_path / str(seed), **given).fit()
    groups = tables.grouped(frame([tmp_path]))
    parameters = {hidden: 64 * hidden + hidden + 10 * hidden + 10 for hidden in (4, 8)}
    labels = groups["label"].str.partition(", layers")[0]
    assert dict(zip(labels, groups["seeds"], strict=True)) == {
        f"FedAvg lr 0.1, parameters {parameters[4]}": 2,
        f"FedAvg lr 0.3, parameters {parameters[4]}": 1,
        f"FedAvg lr 0.1, parameters {parameters[8]}": 1,
    }


def test_the_method_is_on_every_line_of_eighty_columns(tmp_path: Path) -> None:
    for seed in (0, 1):
        for lr in (0.1, 0.5):
            configured(tmp_path / f"{lr}-{seed}", f"algorithm.local.lr={lr}", seed, lr=lr)
    numbers = dict.fromkeys(("median", "worst_tenth", "spread", "auc", "f1"), 0.512)
    for folder in tmp_path.iterdir():
        add_result(folder, **numbers, metrics=["accuracy", "auc", "f1"])
    lines = tables.terminal_text(tables.grouped(frame([tmp_path])), 80).splitlines()
    assert max(map(len, lines[:-3])) <= 80
    assert "…" not in "".join(lines)
    for number in ("±0.000", "0.512"):
        assert all(
            line.strip().startswith(("PMTL lr", "Local lr")) for line in lines if number in line
        )
    for word in ("accuracy", "median", "tenth", "spread", "auc", "f1", "epsilon"):
        assert any(word in line for line in lines)


def test_each_data_set_has_a_table_of_its_own(tmp_path: Path) -> None:
    for data, clients in (("digits", 20), ("digits", 30), ("letters", 20)):
        run = configured(tmp_path / f"{data}-{clients}", "algorithm.local.lr=0.1", 0)
        add_result(run, data=data, clients=clients)
    lines = tables.terminal_text(tables.grouped(frame([tmp_path])), 80).splitlines()
    heads = [place for place, line in enumerate(lines) if line.endswith(" clients")]
    assert [lines[place] for place in heads] == [
        "digits, 20 clients",
        "digits, 30 clients",
        "letters, 20 clients",
    ]
    for first, last in itertools.pairwise([*heads, len(lines)]):
        assert sum(line.startswith("Local ") for line in lines[first:last]) == 1


def test_finetuned_runs_are_methods_of_their_own(tmp_path: Path) -> None:
    for kind in ("kl", "mean"):
        accuracy = 0.85 + 0.01 * (kind == "kl")
        pmtl = {
            "pmtl": {"algorithm": "pmtl", "epsilon": 1.0, "accuracy": accuracy, "finetune": kind}
        }
        settings = {
            "finetune": {"class": "Finetune", "kind": kind, "epochs": len(kind)}
        }  # epochs come with the kind
        write_run(
            tmp_path / kind,
            algorithm="fedavg",
            finetune=kind,
            baselines=pmtl,
            configuration=settings,
        )
    average = {"class": "Average", "noise": 0.3}
    write_run(
        tmp_path / "average",
        algorithm="fedavg",
        finetune="average",
        configuration={"finetune": average},
        accuracy=0.7,
    )
    write_run(tmp_path / "none", algorithm="fedavg", accuracy=0.79)
    assert list(tables.grouped(frame([tmp_path])).label) == [
        "FedAvg",
        "FedAvg + finetuning (average)",
        "FedAvg + finetuning (kl)",
        "FedAvg + finetuning (mean)",
        "PMTL + finetuning (kl)",
        "PMTL + finetuning (mean)",
    ]


def test_the_three_files(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report([sweep])
    assert made.tables[0].parent == sweep / "report"
    lines = list(csv.DictReader(made.tables[0].open()))
    assert len(lines) == 15
    exact = [
        float(line["accuracy"])
        for line in lines
        if line["algorithm"] == "pmtl" and line["seed"] == "1"
    ]
    assert sorted(exact) == [0.8 + 0.01, 0.8 + 0.05 + 0.01, 0.8 + 0.05 * 2 + 0.01]
    markdown = [line for line in made.tables[1].read_text().splitlines() if line.startswith("|")]
    assert len(markdown) == 2 + 8
    assert len({line.count("|") for line in markdown}) == 1
    assert any("PMTL" in line and "0.855 ±0.007" in line for line in markdown), markdown
    assert any("| inf |" in line for line in markdown)
    assert made.figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "0.855 ±0.007" in printed
    assert "not covered by epsilon" in printed
    assert "not private: choosing among runs" in " ".join(printed.split())
    assert len(frame([sweep])) == 15  # the report is no run


def test_the_text_of_one_run_says_who_lost(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_result(sweep / "open", verdict="worse than alone: of 9 clients 8 are worse (most: b, a)")
    report([sweep / "open"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("Worse than alone: of 9 clients 8 are worse (most: b, a).")
    report([sweep])  # many runs have a table, and no sentence of one of them
    assert "orse than alone" not in capsys.readouterr().out


def test_one_run_keeps_its_report_private(sweep: Path) -> None:
    made = report([sweep / "open"], show=False)
    assert made.figure == sweep / "open" / "private" / "report" / "privacy_utility.png"
    assert (
        report([sweep], sweep / "elsewhere", show=False).tables[0]
        == sweep / "elsewhere" / "table.csv"
    )


def horizontal(axes: Any) -> set[float]:
    return {float(line.get_ydata()[0]) for line in axes.lines if list(line.get_xdata()) == [0, 1]}


def test_curves_and_bounds_with_the_deviations_of_the_table(
    sweep: Path, tmp_path: Path, drawn: list[Figure]
) -> None:
    figures.plot_frontier(tables.grouped(frame([sweep])), tmp_path / "f.png")
    (axes,) = drawn[0].axes
    curves = [
        (list(bar.lines[0].get_xdata()), list(bar.lines[0].get_ydata())) for bar in axes.containers
    ]
    assert ([1.0, 2.0, 8.0], pytest.approx([0.805, 0.855, 0.905])) in curves
    assert ([1.0, 2.0, 8.0], pytest.approx([0.705, 0.755, 0.805])) in curves
    assert sorted(horizontal(axes)) == pytest.approx([0.76, 0.93])
    labels = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert {"Local, epsilon 0", "PMTL, no privacy", "PMTL"} <= labels
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "8"]
    bars = [segment for one in axes.containers for segment in one.lines[2][0].get_segments()]
    assert [(high - low) / 2 for (_, low), (_, high) in bars] == pytest.approx(
        6 * [statistics.stdev([0.0, 0.01])]
    )


def test_neither_protection_units_nor_data_share_an_axis(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    digits, femnist = (
        {"data": data, "clients": clients} for data, clients in (("digits", 1000), ("femnist", 206))
    )
    write_run(tmp_path / "a", **digits, accuracy=0.8)
    write_run(tmp_path / "b", **digits, accuracy=0.6, unit="record")
    write_run(tmp_path / "c", **femnist, accuracy=0.4)
    write_run(tmp_path / "d", **femnist, accuracy=0.5, epsilon=math.inf)
    made = report([tmp_path], show=False)
    panels = drawn[0].axes
    assert [[list(bar.lines[0].get_ydata()) for bar in axes.containers] for axes in panels] == [
        [[0.8]],
        [[0.6]],
        [[0.4]],
    ]
    assert [horizontal(axes) for axes in panels] == [
        set(),
        set(),
        {0.5},
    ]  # what protects nothing bounds its data
    assert "all data of one client" in panels[0].get_xlabel()
    assert "one record" in panels[1].get_xlabel()
    assert "| femnist, 206 clients |" in made.tables[1].read_text()


def test_runs_of_a_regression_are_reported_by_their_error(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    write_run(tmp_path / "a", accuracy=None, mse=0.25, epsilon=2.0)
    made = report([tmp_path], show=False)
    assert "| mse |" in made.tables[1].read_text()
    assert "accuracy" not in made.tables[1].read_text()
    assert drawn[0].axes[0].get_ylabel() == "mean mse"


def test_long_settings_leave_room_for_the_curves(tmp_path: Path, drawn: list[Figure]) -> None:
    for seed in (0, 1):
        folder = "/".join(["a long way"] * 5)
        table = {
            "class": "Table",
            "features": [f"{folder}{seed}", "x" * 60],
            "path": f"{seed}-" + "y" * 60,
        }
        write_run(tmp_path / f"{seed}", configuration={"data": table}, accuracy=0.7 + seed / 10)
    made = report([tmp_path], show=False)
    (axes,) = drawn[0].axes
    assert axes.get_position().width > 0.4
    labels = sorted(text.get_text() for text in drawn[0].legends[0].get_texts())
    assert labels[0].startswith("PMTL features ['a long way/")
    assert max(map(len, labels)) <= 40
    assert ", path 1-yyyyyyyyyyyyyyyyyyyyy… |" in made.tables[1].read_text()


def test_baselines_are_not_found_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", baselines={"local": {"epsilon": 0.0, "accuracy": 0.7}})
    write_run(run / "baselines" / "local", algorithm="local", epsilon=0.0, accuracy=0.6)
    assert list(frame([tmp_path]).algorithm) == ["pmtl", "local"]


def test_unfinished_runs_are_named_and_failed_ones_are_others(sweep: Path) -> None:
    half = sweep / "half" / "private"
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("seed: 0\n")
    assert list(report([sweep], show=False).left_out) == [sweep / "half"]
    with pytest.raises(DataError, match=r"no finished run.*fedmtl resume .*half"):
        report([sweep / "half"])
    (half / "error.txt").write_text("schedule.cohort is 31.\n")
    made = report([sweep], show=False)
    assert made.left_out == {sweep / "half": "failed: schedule.cohort is 31."}
    with pytest.raises(DataError, match=r"half failed: schedule.cohort is 31\.$"):
        report([sweep / "half"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "result.json cannot be read"), ("[]", "one JSON object"), ("{}", "'algorithm' is None"),
     ('{"algorithm": "pmtl", "accuracy": "high"}', "'accuracy' is 'high'"),
     ('{"algorithm": "pmtl", "baselines": [1]}', "baselines must be")],
)  # fmt: skip
def test_broken_results_are_named(tmp_path: Path, text: str, said: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "private" / "result.json").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        report([tmp_path])
    assert str(run) in str(caught.value)


def test_folders_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no finished run"):
        report([tmp_path])


def test_quoted_settings_are_named(tmp_path: Path) -> None:
    folder = configured(
        tmp_path / "a",
        "'algorithm.server_optimizer={lr: 0.3, by: {m: 0.9}}' '+data.a=[1, 2]' +rounds=3",
    )
    assert (
        _settings.command_of(folder)
        == (folder / "private/config.yaml").read_text().splitlines()[0][2:]
    )


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.5, 0.01234], ["0.50000", "0.01234"]),
        ([0.5, 0.25], ["0.500", "0.250"]),
        ([math.nan, 2.0], ["-", "2.000"]),
        ([1.0131e9, 883776909.0], ["1.013e+09", "8.838e+08"]),
    ],
)
def test_the_numbers_of_a_column_have_one_format(values: list[float], texts: list[str]) -> None:
    columns = {name: [math.nan] * 2 for name in tables.PRINTED} | {
        "mse": values,
        "mse ±": [0.0, 0.0],
    }
    assert tables._texts(pd.DataFrame(columns | {"seeds": [1, 1]}), "mse") == texts
