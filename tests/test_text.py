"""Names as people see them: nothing that a terminal or a spreadsheet obeys, and names that match wherever they must."""

import csv
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedmtl import (
    FedAvg,
    FederatedDataset,
    FullParticipation,
    LocalSGD,
    Result,
    Trainer,
    cli,
    models,
)
from fedmtl._text import cell, shown, shown_lines
from fedmtl.algorithms.store import ClientStore
from fedmtl.errors import DataError, ResumeError
from fedmtl.ranks import Ranks
from fedmtl.report import report

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
NAMES = [
    "=1+1",
    "+a",
    "-b",
    "@c",
    "\t=d",
    "\r=e",
    ESCAPE,
    "a\nb",
    "\u202ekcab",
    "$x^{$",
    "..",
    "a/b",
    "plain",
    "-5",
    "１",
]


@pytest.mark.parametrize(
    ("text", "line", "one"),
    [
        ("plain é ✓", "plain é ✓", "plain é ✓"),
        ("1\u00a0000", "1\u00a0000", "1\u00a0000"),
        ("\x1b[31m", r"\x1b[31m", r"\x1b[31m"),
        ("\x9b31m\x7f", r"\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\nb\tc\rd", r"a\nb\tc\rd", "a\nb\tc\\rd"),
        ("\u202ea\u2028\u200b", r"\u202ea\u2028\u200b", r"\u202ea\u2028\u200b"),
        ("\udc9b", r"\udc9b", r"\udc9b"),
    ],
)
def test_what_steers_a_terminal_is_written_out(text: str, line: str, one: str) -> None:
    assert (shown(text), shown_lines(text)) == (line, one)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(f"{sign}a", f"'{sign}a") for sign in "=+-@"],
        *[(f"{space}=a", f"'{shown(space)}=a") for space in " "],
        ("\t=a", r"\t=a"),
        ("-5", "-5"),
        ("+1e3", "+1e3"),
        ("-1+2", "'-1+2"),
        ("-", "'-"),
        ("a=b", "a=b"),
        (-5.0, -5.0),
        (None, None),
    ],
)
def test_what_a_spreadsheet_computes_stands_behind_an_apostrophe(
    value: object, text: object
) -> None:
    assert cell(value) == text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run whose clients and data have such names."""
    folder = tmp_path_factory.mktemp("text") / "run"
    coins = torch.Generator().manual_seed(0)
    rows = {name: (torch.randn(8, 2, generator=coins), torch.arange(8) % 2) for name in NAMES}
    trainer = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        data=FederatedDataset.from_tensors(rows, classes=2, name=f"=data{ESCAPE}\n$x^{{$"),
        model=models.softmax_regression(),
        schedule=FullParticipation(),
        privacy=None,
        rounds=1,
        baselines=("local",),
        folder=folder,
        progress=False,
    )
    return trainer.fit(ranks=Ranks()), folder


def steers(text: str) -> bool:
    return any(not character.isprintable() for character in text.replace("\n", ""))


def test_a_table_of_clients_is_no_program_and_a_result_has_their_names(
    run: tuple[Result, Path],
) -> None:
    result, folder = run
    assert list(result.ids) == NAMES
    loaded = Result.load(folder)
    assert loaded.ids == result.ids
    assert loaded.personal_accuracy == result.personal_accuracy
    text = (folder / "private/clients.csv").read_text()
    assert not steers(text)
    rows = list(csv.reader(text.splitlines()))
    assert [row[0] for row in rows] == ["client", *map(cell, NAMES)]
    assert not any(value.startswith(("=", "@", "+")) for row in rows for value in row)


def test_a_report_of_a_hostile_folder_is_text(
    run: tuple[Result, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "sweep"
    for name in ("a", f"=b{ESCAPE}\nfedmtl: 0 FAILED"):
        shutil.copytree(run[1], place / name)
    file = place / "a/private/result.json"
    evil = f"=evil{ESCAPE}\n| x"
    stored = json.loads(file.read_text())
    stored |= {
        "algorithm": evil,
        "methods": {evil.lower(): [evil, "#112233"]},
        "metrics": ["accuracy", evil],
        evil: 0.5,
    }
    file.write_text(json.dumps(stored))
    (place / "a/private/config.yaml").write_text(
        "# fedmtl \u202e\n" + json.dumps({"algorithm": {evil: evil}})
    )
    (place / "c/private").mkdir(parents=True)
    (place / "c/private/error.txt").write_text(f"{ESCAPE}\nfedmtl: all is well")
    assert cli.main(["report", str(place), "--html"]) == 0
    said = capsys.readouterr()
    files = [path.read_text() for path in (place / "report").iterdir() if path.suffix != ".png"]
    assert len(files) == 4
    assert [text for text in (said.out, said.err, *files) if steers(text)] == []
    assert "\nfedmtl: all is well" not in said.err
    assert "\nfedmtl: 0 FAILED" not in said.err + said.out
    table = pd.read_csv(place / "report/table.csv", dtype=str, keep_default_na=False)
    texts = [*map(str, table.columns), *table.to_numpy().ravel()]
    assert not any(text.startswith(("=", "@")) for text in texts)
    report([place / "a"], html=True, show=False)
    assert not steers((place / "a/private/report/report.html").read_text())
    assert cli.main(["verify", str(place / "a")]) == 1
    assert not steers(capsys.readouterr().out)


def test_names_in_files_lead_nowhere_else(run: tuple[Result, Path], tmp_path: Path) -> None:
    shutil.copytree(run[1], tmp_path / "run")
    file = tmp_path / "run/private/result.json"
    stored = json.loads(file.read_text())
    for name in ("../../../other", "..", "", "a\\b"):
        file.write_text(json.dumps(stored | {"baselines": {name: {}}}))
        with pytest.raises(DataError, match="is no name of a baseline"):
            Result.load(tmp_path / "run")
    for name in ("../victim-0-of-1", "victim-0-of-1", "/etc/1-0-of-1"):
        with pytest.raises(ResumeError, match="as a file of clients"):
            ClientStore(2, {"a": ((), torch.bool)}).load(tmp_path, {name: 0})
