"""``fedmtl search``: one budget for every combination, and an end that says what the epsilon covers."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from fedmtl.cli.main import main
from fedmtl.cli.search import candidate_configs
from fedmtl.privacy import SeededSource, draw_repetitions
from fedmtl.search.run import SearchRun

TINY = ["data.clients=30", "schedule.cohort=6", "rounds=2", "eval_every=2", "progress=false"]
QUICK = ["--mean", "2", "--score-noise", "0.1"]
SEED = next(
    s for s in range(100) if draw_repetitions(SeededSource(s).coins("search/repetitions", 0), 2.0, 1.0) == 2
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_search_end_to_end(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    combined = [
        "algorithm=pmtl",
        "algorithm.lam=0.1,1",
        "privacy.clip_norm=0.5,1",
        "privacy.epsilon=3",
    ]
    assert main(["search", *TINY, f"seed={SEED}", *combined, *QUICK]) == 0
    told = capsys.readouterr()
    (folder,) = here.glob("outputs/2*/*")
    assert f"Saved in {folder.relative_to(here)}" in told.out
    assert "private search over 4 candidates" in told.out
    assert "number of repetitions: secret" in " ".join(told.out.split())
    assert told.err == ""  # progress=false
    report = json.loads((folder / "public" / "privacy.json").read_text())
    names = [
        f"algorithm.lam={lam} privacy.clip_norm={clip}"
        for lam in ("0.1", "1")
        for clip in ("0.5", "1")
    ]
    assert report["search"]["candidates"] == names
    assert report["observer"] == "public"
    assert 0.99 * 3 < report["epsilon"] <= 3
    assert json.loads((folder / "public" / "search.json").read_text())["chosen"] in names
    kept = json.loads((folder / "private" / "search.json").read_text())
    assert len(kept["scores"]) == len(kept["candidates"]) == 2
    assert all(
        "seed" not in file.read_text()
        for file in (folder / "public").glob("*.json")
        if "search" in file.name
    )

    assert (
        main(["report", str(folder), "--out", "table", "--html"]) == 0
    )  # a search is one run of the table
    assert (
        "number of repetitions: secret, and which of them won"
        in (here / "table" / "report.html").read_text()
    )
    table = (here / "table" / "table.csv").read_text().splitlines()
    assert len(table) == 2
    assert f",{report['epsilon']}," in table[1]
    assert "not private: choosing" not in capsys.readouterr().out

    assert (
        main(
            [
                "search",
                *TINY,
                "algorithm=pmtl",
                "algorithm.lam=0.1,1",
                *QUICK,
                "--folder",
                str(folder),
            ]
        )
        == 2
    )
    assert "already holds a run; continue it with fedmtl resume" in capsys.readouterr().err


def test_an_interrupted_search_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["search", *TINY, f"seed={SEED}", "algorithm=pmtl,fedavg", *QUICK, "--folder"]
    assert main([*words, "whole"]) == 0
    train = SearchRun._train

    def interrupted(self: SearchRun, index: int, candidate: int) -> object:
        if index == 1:
            raise KeyboardInterrupt
        return train(self, index, candidate)

    with monkeypatch.context() as patch:
        patch.setattr(SearchRun, "_train", interrupted)
        with pytest.raises(SystemExit):
            main([*words, "part"])
    stored = yaml.safe_load((here / "part/private/config.yaml").read_text())["search"]
    assert list(stored["candidates"]) == ["algorithm=pmtl", "algorithm=fedavg"]
    assert main(["resume", "part"]) == 0
    for name in ("search.json", "privacy.json"):
        assert (here / "part/public" / name).read_bytes() == (
            here / "whole/public" / name
        ).read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to search: list the values of a setting"),
        (["algorithm=pmtl", "algorithm.lam=1,1"], "algorithm.lam=1 is listed twice"),
        (["algorithm=pmtl", "algorithm.lamb=1,2"], "algorithm.lamb is no setting"),
        (["data.clients=20,30"], "has other data than 'data.clients=20'"),
        (
            ["algorithm=pmtl", "algorithm.lam=1,2", "hydra.run.dir=x"],
            "choose its folder with --folder",
        ),
        (["algorithm=pmtl,local"], "'algorithm=local': its algorithm releases nothing"),
    ],
)
def test_bad_requests_are_refused_before_any_work(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert main(["search", "data.clients=30", "schedule.cohort=6", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fedmtl: error: ")
    assert said in told
    assert list(here.iterdir()) == []


def test_names_are_the_values_that_differ() -> None:
    found = candidate_configs(["rounds=3", "algorithm=pmtl,fedavg", "model=softmax_regression"])
    assert list(found) == ["algorithm=pmtl", "algorithm=fedavg"]
    assert {config["rounds"] for config in found.values()} == {3}


def test_the_model_of_a_search_on_a_table_predicts_new_rows(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    rows = [f"ward-{place % 12},{20 + place % 60},{place % 30}" for place in range(120)]
    (here / "visits.csv").write_text("\n".join(["ward,age,days", *rows]))
    words = [
        "visits.csv",
        "client=ward",
        "target=days",
        "data.bounds={age:[20,80],days:[0,30]}",
        "schedule=full",
    ]
    words += [
        "algorithm=fedavg",
        "model=linear_regression",
        "algorithm.local.lr=0.1,0.2",
        "privacy.epsilon=8",
    ]
    small = [
        "rounds=2",
        "progress=false",
        f"seed={SEED}",
        *QUICK,
        "--score-bound",
        "1",
        "--folder",
        "run",
    ]
    assert main(["search", *words, *small]) == 0
    capsys.readouterr()
    (here / "new.csv").write_text("age\n30\n70\n")
    assert main(["predict", "run/public", "new.csv", "--output", "-"]) == 0
    state = load_file("run/public/model.safetensors")
    weight, constant = (
        value.item() for value in sorted(state.values(), key=lambda value: -value.ndim)
    )
    found = [float(line.split(",")[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    expected = [15 * (1 + min(max(weight * (age - 50) / 30 + constant, -1), 1)) for age in (30, 70)]
    assert found == pytest.approx(expected, rel=1e-5)
