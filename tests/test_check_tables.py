"""``fedmtl check`` on tables as strangers have them: what a column seems to hold, and what is wrong."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import yaml

from fedmtl import cli
from fedmtl.cli.main import _COMMANDS
from fedmtl.data.readers.draft import draft
from fedmtl.errors import ConfigError, DataError


def visits(rows=48, **columns):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "ward": np.repeat([f"w{i}" for i in range(4)], rows // 4),
            "age": rng.integers(18, 100, rows),
            "days": rng.normal(3, 1, rows).round(2),
        }
    )
    return frame.assign(**columns)


@pytest.fixture
def drafted(tmp_path, monkeypatch):
    """Writes a table, and returns the settings and the lines of its draft."""
    monkeypatch.chdir(tmp_path)

    def settings(frame, **options):
        frame.to_csv("t.csv", index=False)
        given = {"path": "t.csv", "client": "ward", "target": "days", "classes": "infer"}
        return draft(given | options)

    return settings


DAYS = pd.date_range("2020-01-28", periods=48)


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y", "%m/%d/%Y", "%d-%m-%y", "%Y/%m/%d", "%d %b %Y", "%B %d, %Y"]
)
def test_dates_of_another_form_are_told_and_no_categories(drafted, form):
    for dates in (DAYS, DAYS[:12].repeat(4)):  # of 12 distinct ones categories could be made
        node, text = drafted(visits(seen=dates.strftime(form)))
        assert "seen: " in text
        assert "it has dates of another form, such as" in text
        assert "left out of data.features (write them as 1980-01-31 to have it)" in text
        assert "seen" not in node["bounds"]
    node, _ = drafted(visits(seen=DAYS.strftime("%Y-%m-%d")))
    assert node["bounds"]["seen"] == ["2020-01-01", "2020-12-31"]


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        (1003.21, 1021.14, [1003.0, 1022.0]),  # pressures
        (-122.4512, -122.3561, [-122.452, -122.356]),  # degrees of longitude
        (999999992.25, 1000000008.5, [999999992.2, 1000000009.0]),
        (18.273, 93.991, [18.2, 94.0]),  # three digits are enough
        (-0.5004, 1234.5, [-0.501, 1240.0]),
    ],
)
def test_a_drafted_range_is_little_wider_than_the_values(drafted, low, high, bounds):
    """A tenth of its width at most is added at an end, whatever the level of the values."""
    values = np.linspace(low, high, 48).round(4)
    node, _ = drafted(visits(level=values))
    assert node["bounds"]["level"] == bounds
    assert low - (high - low) / 10 <= bounds[0] <= low
    assert high <= bounds[1] <= high + (high - low) / 10


def test_numbers_with_marks_are_no_ids(drafted):
    for form in ("{:.2f} d", "$1,{:06.2f}", "{:.2f}%"):
        costs = [form.format(3 * value) for value in range(48)]
        node, text = drafted(visits(cost=costs))
        assert "it has numbers with other marks, such as" in text
        assert "cost" not in node["features"]
        with pytest.raises(
            ConfigError, match=r"'days', which has numbers with other marks, .* or write"
        ):
            drafted(visits(days=costs))
    node, text = drafted(visits(group=[f"{value % 5}0s" for value in range(48)]))
    assert node["bounds"]["group"] == ["00s", "10s", "20s", "30s", "40s"]
    _, text = drafted(visits(record=[f"r{value}" for value in range(48)]))
    assert "it looks like an id of rows" in text


def test_rows_that_repeat_and_columns_that_are_the_target_are_told(drafted):
    frame = visits()
    _, text = drafted(pd.concat([frame, frame.iloc[:7]]))
    assert "7 of 55 rows repeat another one in every column" in text
    _, text = drafted(frame.assign(copy=frame.days))
    assert "; equal to days in every row: is it known before?" in text
    assert "repeat" not in text
    _, text = drafted(frame.assign(nothing=math.nan))
    assert "nothing: no value in any row; it is empty: left out" in text


def test_a_column_that_names_the_client_again_is_no_feature(drafted):
    """With it, what the run learns is of no use for new clients, and a feature a client is noise."""
    frame = visits()
    code = frame.ward.str.upper()
    node, text = drafted(frame.assign(code=code))
    assert "code: 4 categories; it names the client" in text
    assert node["features"] == ["age"]
    node, _ = drafted(frame.assign(code=code), bounds={"code": ["W0", "W1", "W2", "W3"]})
    assert node["features"] == ["age", "code"]
    for shared in (code.replace("W3", "W2"), np.where(frame.age > 50, "old", code)):
        node, text = drafted(frame.assign(code=shared))
        assert "names the client" not in text
        assert "code" in node["features"]


def test_amounts_with_units_and_commas_of_thousands_are_pointed_out(drafted):
    rows = range(48)
    _, text = drafted(visits(days=[f"{i % 9} days" for i in rows]))
    assert "days: 9 categories; if these are amounts, write the numbers alone" in text
    _, text = drafted(visits(weight=[f"{50 + i % 40},{100 + i}" for i in rows]))
    assert "weight: 48 categories; it has numbers with commas, of decimals or of thousands" in text
    _, text = drafted(visits(weight=[f"{50 + i % 40},{i}" for i in rows]))
    assert "it has numbers with a decimal comma" in text


def test_an_infinite_value_is_refused_by_its_line(drafted):
    for column in ("age", "days"):
        frame = visits().astype({column: float})
        frame.loc[4, column] = -math.inf
        with pytest.raises(
            DataError, match=f"line 6, column '{column}' holds -inf; accepted: a finite"
        ):
            drafted(frame)


def test_what_cannot_be_read_leaves_no_draft(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits(days=np.linspace(-1, 1, 48)).to_csv("t.csv", index=False)
    words = ["check", "t.csv", "client=ward", "target=days"]
    assert cli.main([*words, "data.target_scale=log"]) == 2
    assert "a range of the target above 0" in capsys.readouterr().err
    assert cli.main([*words, "loss=quantile:0.9", "privacy=record"]) == 2
    assert "no automatic settings with privacy=record" in capsys.readouterr().err
    assert cli.main([*words, "loss=quantile:9"]) == 2
    assert "LEVEL between 0 and 1" in capsys.readouterr().err
    assert cli.main([*words, "--epsilon", "2"]) == 2
    assert "privacy.epsilon=VALUE" in capsys.readouterr().err
    assert cli.main([*words, "data.classes=3"]) == 2
    printed = capsys.readouterr()
    assert "a label must be in 0..2" in printed.err or "whole numbers from 0 on" in printed.err
    assert not printed.out
    assert not (tmp_path / "experiment").exists()


@pytest.mark.parametrize("loss", ["poisson", "huber:0.1", "quantile:0.9"])
def test_a_draft_keeps_the_loss_and_its_run_is_complete(loss, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # four values from 1 on, which look like grades without the loss
    visits(days=np.arange(48) % 4 + 1).to_csv("t.csv", index=False)
    words = ["check", "t.csv", "client=ward", "target=days", "privacy.epsilon=3"]
    assert cli.main([*words, f"loss={loss}"]) == 0
    printed = capsys.readouterr().out
    assert "a real target" in printed
    assert "Proximal point" in printed
    written = yaml.safe_load((tmp_path / "experiment/t.yaml").read_text())
    assert written["loss"] == loss
    assert written["data"]["bounds"]["days"] == [0 if loss == "poisson" else 1, 4]
    assert written["data"]["classes"] is None
    assert cli.main(["--config-dir", ".", "experiment=t", "progress=false", "rounds=2"]) == 0
    assert cli.main(["check", "t.csv", "client=ward", "target=days"]) == 0
    assert "loss" not in yaml.safe_load((tmp_path / "experiment/t_2.yaml").read_text())


def test_grades_from_1_on_become_labels(drafted):
    for low, labels, classes in ((1, [1, 2, 3, 4], 4), (0, None, 4)):
        node, _ = drafted(visits(days=np.arange(48) % 4 + low))
        assert (node.get("labels"), node["classes"]) == (labels, classes)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.client=ward,age", "one column, as data.client=ward; two have to be joined"),
        ("data.features=age,days", "a list, as 'data.features=[age,days]', or -m"),
        ("privacy.epsilon=1,2", "one value, as privacy.epsilon=1, or -m"),
        ("data.client=[ward,age]", "data.client is ['ward', 'age']; accepted: the name of one"),
        ("data.target=[days]", "data.target is ['days']; accepted: the name of one column"),
    ],
)
def test_several_values_are_refused_by_what_is_accepted(word, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits().to_csv("t.csv", index=False)
    words = ["check", "t.csv", "data.client=ward", "data.target=days"]
    name = word.partition("=")[0]
    assert cli.main([*(each for each in words if not each.startswith(name)), word]) == 2
    assert said in capsys.readouterr().err


def test_clients_with_one_row_each_are_told_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits(ward=[f"w{i}" for i in range(48)]).to_csv("t.csv", index=False)
    assert cli.main(["check", "t.csv", "client=ward", "target=days"]) == 2
    printed = capsys.readouterr()
    assert "every client has a single one, and nothing is left to test on" in printed.err
    assert not printed.out


def test_one_client_has_nobody_to_share_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits(ward="w").to_csv("t.csv", index=False)
    assert cli.main(["check", "t.csv", "client=ward", "target=days"]) == 0
    out = capsys.readouterr().out
    assert "t.csv: 1 client, 1 feature, " in out
    assert "one client: there is nobody to share with" in out
    assert "nu is" not in out


@pytest.mark.parametrize("name", ["predict", "export", "check", "adapt", "audit", "search"])
def test_each_example_of_a_help_is_a_line(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    lines = text[text.index("\nexamples") :].split("\n\n")[0].splitlines()[2:]
    assert lines
    for line in lines:
        command = line.startswith("  fedmtl ")
        assert line.count("fedmtl ") == command
        assert command or line.startswith("    ")


def test_each_command_of_the_help_is_a_line(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    usage = text[text.index("usage: ") :].split("\n\n")[0].splitlines()
    for command in {*_COMMANDS, "resume"}:
        assert any(line.startswith(f"       fedmtl {command} ") for line in usage)
    for option in ("-m", "--cfg", "--config-dir", "--trust", "--debug", "--version"):
        assert re.search(f"^  {option}\\b", text, re.MULTILINE)
