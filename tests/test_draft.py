"""Texts of data in a draft and in stored settings are those texts: never a reference, a number or a missing value."""

import random
from pathlib import Path

import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf

from fedmtl import cli
from fedmtl._yaml import read_yaml, yaml_text
from fedmtl.cli.check import _literal
from fedmtl.cli.config import compose, resolve
from fedmtl.cli.names import EXTRA
from fedmtl.cli.stored import changed, stored_config, write_config

SPECIAL = [
    *("${oc.env:SECRET}", "${seed}", "${", "$", "a${}", r"\${x}", r"\\${x}", r"\\\${x", "${${a}:b}", "x: ${y}"),
    *("yes", "on", "null", "~", "1e3", "1_000", "0x10", ".5", "1:30", "2001-01-01", ".inf", "nan", "+1", "0o7"),
    *("=", "<<"),
    *(": ", "a: b", "x\ny", "\n", "- a", "*a", "&a", "!a", "%a", "@a", "`a", "#a", " a ", "\ta", "[a", "{a", "'", '"'),
    *("é\u2028", "\x85", "\x1b[31m", "\\", r"\n", ""),
]  # fmt: skip


def read_by_hydra(values: dict) -> dict:
    """What a run has of values that a draft holds."""
    return OmegaConf.to_container(OmegaConf.create(yaml_text(_literal(values))), resolve=True)


@pytest.mark.parametrize("text", SPECIAL)
def test_a_special_text_comes_back(text: str, tmp_path: Path) -> None:
    values = {"algorithm": text, "list": [text, {"part": text}], "keys": {text: 1}}
    assert read_by_hydra(values) == values
    write_config(tmp_path, ["a"], values)
    assert stored_config(tmp_path) == values
    assert changed(stored_config(tmp_path), ["seed=3"], ("seed",)) == values | {"seed": 3}


def test_any_text_comes_back() -> None:
    coins = random.Random(0)
    texts = [
        "".join(coins.choices("$${{}}\\\\'\"a:. \n#", k=coins.randint(1, 12))) for _ in range(150)
    ]
    assert read_by_hydra({"texts": texts}) == {"texts": texts}


def test_other_values_come_back(tmp_path: Path) -> None:
    same = [1, 2]
    values = {
        "a": None,
        "b": [True, 1e-05, 1e300, float("inf"), -3],
        "c": {"d": {}, "e": []},
        "f": same,
        "g": same,
    }
    (tmp_path / "file").write_text(yaml_text(values))
    assert read_yaml(tmp_path / "file") == values
    assert "&" not in yaml_text(values)


def test_a_draft_gives_back_what_the_table_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "of the environment")
    kinds, names = (
        ["${oc.env:SECRET}", "yes", "1e3", "null"],
        ["${seed}", "a: b", "\x1b[31mred", "no", "x\ny"],
    )
    rows = [
        (f"${{client {n % 4}}}", *(n * (k + 2) % 7 for k in range(5)), kinds[n // 4 % 4])
        for n in range(64)
    ]
    table = pd.DataFrame(rows, columns=["${who}", *names, "${what}"])
    table.to_csv("${visits}.csv", index=False)
    words = [
        "data=table",
        r"data.path='\${visits}.csv'",
        r"data.client='\${who}'",
        r"data.target='\${what}'",
    ]
    assert cli.main(["check", *words, "privacy.epsilon=5"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"  \x1b[31mred: " in shown
    assert r"  x\ny: " in shown
    token = EXTRA.set(tmp_path)
    try:
        data = resolve(compose([f"experiment={next(Path('experiment').iterdir()).stem}"]))["data"]
    finally:
        EXTRA.reset(token)
    assert data["path"] == str(tmp_path / "${visits}.csv")
    assert (data["client"], data["target"]) == ("${who}", "${what}")
    assert data["features"] == names
    assert list(data["bounds"]) == names
    assert data["labels"] == sorted(kinds)


def test_what_no_file_can_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(n % 4, n % 7, ["???", "b"][n // 4 % 2]) for n in range(64)]
    pd.DataFrame(rows, columns=["who", "x", "y"]).to_csv("table.csv", index=False)
    words = ["data=table", "data.path=table.csv", "data.client=who", "data.target=y"]
    assert cli.main(["check", *words, "privacy.epsilon=5"]) == 2
    assert (
        "is called '???', which a configuration file reads as a value that is missing"
        in capsys.readouterr().err
    )


def test_the_comment_of_a_stored_command_is_one_line(tmp_path: Path) -> None:
    write_config(tmp_path, ["data.path=a\nseed: 7"], {"algorithm": "a", "seed": 1})
    text = (tmp_path / "private/config.yaml").read_text()
    assert yaml.safe_load(text) == {"algorithm": "a", "seed": 1}


def test_a_check_warns_once_of_values_beyond_their_bounds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {
        "who": [f"c{row % 5}" for row in range(60)],
        "age": [*range(60)],
        "cost": [row * 0.5 for row in range(60)],
    }
    pd.DataFrame(rows).to_csv("x.csv", index=False)
    assert (
        cli.main(["check", "x.csv", "client=who", "target=cost", "data.bounds={age: [10, 500]}"])
        == 0
    )
    assert caplog.text.count("cut off at data.bounds") == 1
    said = capsys.readouterr().out
    assert "by how many times (private: covered by no epsilon): age 10." in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 120
