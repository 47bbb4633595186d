"""Figures of privacy are rounded up wherever they are shown."""

import ast
import json
import math
import re
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.text import Text

import fedmtl
from fedmtl import ClientPrivacy
from fedmtl._rounding import grouped, rounded_down, rounded_up
from fedmtl.audit import table
from fedmtl.audit.findings import too_large
from fedmtl.errors import BudgetExhausted
from fedmtl.privacy.report import PrivacyReport
from fedmtl.report import canvas, figures, report
from fedmtl.trainer.callbacks import ProgressBar
from fedmtl.trainer.plots import plot_result
from fedmtl.trainer.run_channel import open_run

from .helpers import price_of
from .trainer import settings

DELTA = 1.0004e-5
TARGET = 31.0049  # 31.00, 31.0 and 31 to the nearest; no other number of the run is near it


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1.00049, 3, "1.01"),
        (1.0, 4, "1"),
        (1e-5, 3, "1e-05"),
        (9.9996, 4, "10"),
        (123456.7, 4, "1.235e+05"),
        (0.0, 4, "0"),
        (math.inf, 4, "inf"),
        (math.nan, 4, "nan"),
    ],
)
def test_examples(value: float, digits: int, text: str) -> None:
    assert rounded_up(value, digits) == text


def test_whole_numbers_of_a_text_are_grouped() -> None:
    assert grouped("100 of 100000 clients (q = 0.0012345), 1e-5 of x1234, 1000.") == (
        "100 of 100,000 clients (q = 0.0012345), 1e-5 of x1234, 1,000."
    )


def test_never_below_and_never_far_above() -> None:
    generator = np.random.default_rng(0)
    for value in 10.0 ** generator.uniform(-12, 6, 3000):
        for digits in (2, 3, 4, 6):
            shown = rounded_up(value, digits)
            assert float(shown) >= value
            unit = Decimal(1).scaleb(Decimal(repr(float(value))).adjusted() - digits + 1)
            assert Decimal(shown) == Decimal(repr(float(value))).quantize(unit, ROUND_CEILING)


def below(text: str, value: float) -> list[str]:
    """Numbers in ``text`` that are nearly ``value`` and below it."""
    found = re.findall(
        r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)", text
    )  # the start of a hash is no number
    return [number for number in found if 0.99 * value < float(number) < value]


def test_the_search_for_figures_finds_one_that_is_too_small() -> None:
    assert below("epsilon 31.00 at delta = 1e-05", TARGET) == ["31.00"]
    assert below("epsilon 31.00 at delta = 1e-05", DELTA) == ["1e-05"]
    assert below("epsilon 31.1 at delta = 1.01e-05; 31.0049", TARGET) == []


@pytest.fixture(scope="module")
def noise() -> float:
    run = settings.trainer()
    sampler = run.schedule.bind(settings.CLIENTS)
    return price_of(sampler, DELTA).multiplier(TARGET, 6)


def test_no_output_of_a_run_shows_less_than_was_spent(
    tmp_path: Path, noise: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    drawn: list[str] = []
    save = canvas.save

    def keep(figure, path):
        figure.canvas.draw()
        drawn.extend(text.get_text() for text in figure.findobj(Text))
        save(figure, path)

    monkeypatch.setattr(canvas, "save", keep)
    bar = ProgressBar()
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=noise, delta=DELTA)
    run = settings.trainer(
        folder=tmp_path / "run", privacy=privacy, baselines=("fedavg",), callbacks=(bar,)
    )
    found = run.fit()
    assert 31.004 < found.epsilon <= TARGET
    made = report([tmp_path / "run"], tmp_path / "report")
    texts = [found.summary(), capsys.readouterr().err, *drawn]
    texts += [path.read_text() for path in made.tables]
    texts += [path.read_text() for path in sorted((tmp_path / "run").rglob("*.json"))]
    shown = [text for text in texts if "31." in text]
    assert len(shown) >= 7
    for text in texts:
        assert below(text, found.epsilon) == []
        assert below(text, DELTA) == []
    assert (
        json.loads((tmp_path / "run/public/privacy.json").read_text())["epsilon"] == found.epsilon
    )


def test_secure_headline_and_every_line_of_the_report(noise: float) -> None:
    fields = {
        "unit": "client", "relation": "add_remove", "observer": "clients", "epsilon": 1.00049,
        "delta": DELTA, "claimed": 1.00049, "by_client": (1.00041, 1.00045, 1.00049), "budget": 1.00049,
        "clip_norm": 2.0, "noise_multiplier": 2.0, "noise_std": 2.0, "sampler": "all", "names": ("update",),
        "releases": 6, "accountant": "pld", "source": "secure", "numerics": "float64",
        "ledger": "none", "outside": (),
    }  # fmt: skip
    found = PrivacyReport(**fields)
    assert found.headline == "private: epsilon = 1.001 at delta = 1.01e-05"
    assert below(found.text(), 1.00049) == []
    assert "smallest 1.001, median 1.001, largest 1.001" in found.text()


def test_messages_bands_ticks_and_audits(
    noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=noise, epsilon=TARGET, delta=DELTA)
    channel = open_run(settings.trainer(privacy=privacy, rounds=50), *_problem(privacy))
    with pytest.raises(BudgetExhausted) as spent:
        _begin_all(channel, 50)
    assert "31." in str(spent.value)
    assert below(str(spent.value), channel.epsilon) == []
    drawn: list[str] = []
    monkeypatch.setattr(figures, "plot_rounds", lambda lines, path, **options: drawn.extend(lines))
    repeated = SimpleNamespace(
        metric="mse", algorithm="pmtl", step="round", replicates=[], history=[{"budget": 1.0000004}]
    )
    plot_result(cast(Any, repeated), tmp_path)
    assert drawn == ["PMTL, epsilon 1.00001"]
    assert "1.001" in table([too_large("charges: budget", 1.00049, 2.0, "")])


def _begin_all(channel, steps: int) -> None:
    for step in range(steps):
        channel.begin(step, channel.draw(step))


def _problem(privacy: ClientPrivacy):
    from fedmtl.trainer.make_problem import ProblemSettings, build_problem

    run = settings.trainer(privacy=privacy, rounds=50)
    problem = build_problem(
        run.data, run.model, ProblemSettings(loss=run.loss, rounds=50, dtype="float64")
    )
    return problem, "mark"


def test_no_text_of_the_package_rounds_a_figure_of_privacy_in_another_way() -> None:
    """Every formatted value whose expression names an epsilon, a delta or a budget goes through ``rounded_up``."""
    package = Path(fedmtl.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
                continue
            names = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
            names |= {
                str(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant)
            }
            spec = "".join(
                str(part.value)
                for part in ast.walk(node.format_spec)
                if isinstance(part, ast.Constant)
            )
            shown = spec[-1:] in ("g", "f", "e") and "rounded_up" not in names
            if shown and any(PRIVACY.search(name) for name in names):
                found.append(
                    f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node.value)}"
                )
    assert found == []


PRIVACY = re.compile(r"epsilon|(?<![a-z])delta|budget")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.2999, "2.29"),
        (0.0, "0"),
        (3.0, "3"),
        (1e-7, "1e-07"),
        (12.349, "12.3"),
        (0.1 + 0.2, "0.3"),
    ],
)
def test_a_lower_bound_is_rounded_down(value: float, text: str) -> None:
    assert rounded_down(value) == text
    assert float(rounded_down(value)) <= value
