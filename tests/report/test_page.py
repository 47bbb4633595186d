"""The page of a run or a sweep has the numbers of the text report, needs no other file, and escapes all texts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedmtl import ClientPrivacy, cli, load_data
from fedmtl.errors import DataError
from fedmtl.privacy import PrivacyReport
from fedmtl.report import frame, report, tables
from tests import small

from .test_report import add_result, configured, write_run

pytestmark = pytest.mark.figures

_EMPTY = {"meta", "img"}
_NASTY = """<script>alert("1")</script> & <b class='x'>"""


class Page(HTMLParser):
    """What a page holds: attributes by tag, text by tag, cells of the table by line; raises where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.given: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.given.append((name, dict(attributes)))
        if name not in _EMPTY:
            self.open.append(name)
        self.texts.setdefault(name, []).append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        for name in set(self.open):
            self.texts[name][-1] += text

    @property
    def lines(self) -> list[list[str]]:
        cells, wide = self.texts["td"], len(self.texts["th"])
        return [cells[i : i + wide] for i in range(0, len(cells), wide)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html") / "run <1>"
    small.trainer(
        data=load_data("digits", clients=6),
        privacy=ClientPrivacy(clip_norm=1.0, epsilon=2.0),
        rounds=2,
        baselines=["local"],
        metrics=["f1"],
        folder=folder,
    ).fit()
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for seed in (0, 1):
        for lam in (0.1, 1.0):
            folder = configured(
                tmp_path / f"{lam}-{seed}", f"-m algorithm.lam={lam}", seed, algorithm__lam=lam
            )
            add_result(folder, better_than_local=0.617, as_local=0.25, worse_than_local=0.133)
            (folder / "public" / "privacy.json").unlink()  # which here is no whole report
    for name, file in (("bad", "error.txt"), ("half", "config.yaml")):
        (tmp_path / name / "private").mkdir(parents=True)
        (tmp_path / name / "private" / file).write_text(_NASTY)
    return tmp_path


def page_of(folder: Path, html: bool | Path = True) -> tuple[Path, Page]:
    path = report([folder], show=False, html=html).page
    assert path is not None
    return path, Page(path.read_text(encoding="utf-8"))


def test_all_numbers_of_a_run_are_those_of_the_text_report(run: Path) -> None:
    path, page = page_of(run)
    assert path == run / "private" / "report" / "report.html"
    assert "Result, with baselines" in page.texts["h2"]
    table = (path.parent / "table.md").read_text(encoding="utf-8").splitlines()
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table if "|" in line
    ]
    assert {"method", "epsilon", "accuracy", "f1", "worst tenth"} <= set(header)
    assert {"% vs local +/=/-", "f1 % vs local +/=/-"} <= set(header)
    assert not any("better" in name for name in header)
    assert page.texts["th"] == header
    assert page.lines == rows
    facts = {"data": "digits, 6 clients", "seed": "0", "rounds": "2"}
    facts |= dict(
        PrivacyReport.from_dict(json.loads((run / "public" / "privacy.json").read_text())).rows()
    )
    assert facts["epsilon"] == "2 at delta = 1e-05"
    assert facts.items() <= dict(zip(page.texts["dt"], page.texts["dd"], strict=True)).items()
    assert '"lr": 0.1' in page.texts["details"][0]


def test_all_numbers_of_a_sweep_are_those_of_the_text_report(sweep: Path) -> None:
    path, page = page_of(sweep)
    assert path == sweep / "report" / "report.html"
    table, _ = tables.table_of(tables.grouped(frame([sweep])))
    assert [line[0] for line in page.lines] == list(table["method"])
    assert [line[page.texts["th"].index("accuracy")] for line in page.lines] == list(
        table["accuracy"]
    )
    assert "±" in page.lines[0][2]
    shares = [line[page.texts["th"].index("% vs local +/=/-")] for line in page.lines]
    assert [text for text in shares if text != "-"] == ["62/25/13"] * 2
    assert dict(zip(page.texts["dt"], page.texts["dd"], strict=True)) == {
        "method": "PMTL",
        "data": "digits, 30 clients",
        "epsilon": "4",
        "algorithm.lam": "0.1, 1",
        "seed": "0, 1",
    }


def test_each_run_of_a_sweep_has_a_line_with_a_link(sweep: Path) -> None:
    report([sweep / "0.1-0"], show=False, html=True)
    path, page = page_of(sweep)
    links = [str(given["href"]) for name, given in page.given if name == "a"]
    assert links.count("../0.1-0/private/report/report.html") == 1
    assert {(path.parent / link).resolve() for link in links if link.endswith("/")} == {
        sweep / name for name in ("0.1-0", "0.1-1", "1.0-0", "1.0-1", "bad", "half")
    }
    lines = page.texts["li"]
    assert any(f"failed: {_NASTY}" in line for line in lines)
    assert any("unfinished: continue it with fedmtl resume " in line for line in lines)
    assert any("PMTL lam 0.1, epsilon 4, seed 1, accuracy 0.58" in line for line in lines)
    assert sum(line.count("13% of the clients worse off than alone") for line in lines) == 4


@pytest.mark.parametrize("what", ["run", "sweep"])
def test_a_page_needs_nothing_else(what: str, request: pytest.FixtureRequest) -> None:
    path, page = page_of(request.getfixturevalue(what))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert not re.search(
        r"https?:|//|url\(|@import|<script|<link|<iframe|javascript:",
        re.sub(r"base64,[^\"]*", "", text),
    )
    assert {name for name, given in page.given for key in given if key in ("src", "href")} <= {
        "img",
        "a",
    }
    pictures = [str(given["src"]) for name, given in page.given if name == "img"]
    assert pictures
    assert all(one.startswith("data:image/png;base64,iVBOR") for one in pictures)
    links = [str(given["href"]) for name, given in page.given if name == "a"]
    assert all(one.startswith("../") for one in links)
    assert page.texts["p"][0].startswith(
        "This page holds private numbers"
    )  # before everything else
    assert {"viewport"} <= {given.get("name") for name, given in page.given if name == "meta"}
    for each in ("prefers-color-scheme: dark", "max-width: 34rem"):
        assert each in page.texts["style"][0]


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    folder = configured(tmp_path / "a", f"data.name={_NASTY}", data__gamma=_NASTY)
    add_result(folder, data=_NASTY, unit=_NASTY, chosen={_NASTY: [_NASTY]})
    (folder / "public" / "privacy.json").unlink()
    page = page_of(folder)[1]
    assert not {"script", "b"} & {name for name, _ in page.given}
    assert page.texts["title"] == page.texts["h1"] == [f"PMTL on {_NASTY}"]
    assert _NASTY in page.texts["pre"][0]
    assert _NASTY in page.texts["details"][0]
    assert (page.texts["dt"][-1], page.texts["dd"][-1]) == (_NASTY, _NASTY)
    whole = page_of(tmp_path)[1]
    assert not {"script", "b"} & {name for name, _ in whole.given}


def test_a_run_without_a_privacy_report_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epsilon="inf", accuracy=None, mse=0.2)
    (folder / "public" / "privacy.json").unlink()
    page = page_of(folder)[1]
    assert "nothing is protected" in page.texts["main"][0]
    assert page.lines[0][page.texts["th"].index("epsilon")] == "inf"
    assert "Result" in page.texts["h2"]
    assert "aseline" not in page.texts["main"][0]  # of which it has none


def test_the_command_names_the_page(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--html", str(sweep / "0.1-0")]) == 0
    assert (
        capsys.readouterr().out.rstrip().endswith(str(sweep / "0.1-0/private/report/report.html"))
    )
    assert cli.main(["report", str(sweep), "--html", "--out", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "report.html").is_file()
    assert not (sweep / "report" / "report.html").exists()
    assert cli.main(["report", "--html"]) == 2
    assert "arguments are required: folders; usage: fedmtl report" in capsys.readouterr().err


def test_the_command_draws_the_figures_of_a_run_for_a_paper(run: Path, tmp_path: Path) -> None:
    assert (
        cli.main(["report", str(run), "--out", str(tmp_path), "--format", "pdf", "--width", "3.3"])
        == 0
    )
    assert {path.stem for path in tmp_path.glob("*.pdf")} == {
        "privacy_utility",
        "accuracy",
        "clients",
    }
    assert r"\toprule" in (tmp_path / "table.tex").read_text()


def test_half_a_privacy_report_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"privacy\.json is no privacy report: .*'epsilon'"):
        page_of(write_run(tmp_path / "run"))
