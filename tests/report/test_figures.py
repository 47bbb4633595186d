"""The figures are read back: the curves that were drawn are compared with the data they stand for."""

import struct
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedmtl import algorithms, contrib
from fedmtl.contrib.published.p2p import PublishedPeerToPeer
from fedmtl.errors import ConfigError
from fedmtl.report import _names, canvas, figures

pytestmark = pytest.mark.figures


PERCENTILES = (5, 25, 50, 75, 95)
EPSILONS = [
    {"round": r, "epsilon": spent, "accuracy": 0.5} for r, spent in ((1, 0.5), (5, 1.5), (10, 2.25))
]


def history(rounds: int = 20, best: float = 0.8, epsilon: float = 4.0) -> list[dict[str, float]]:
    return [
        {
            "round": r,
            "epsilon": epsilon * (r / rounds) ** 0.5,
            "accuracy": best * (1 - 0.5 ** (r / 5)),
        }
        for r in range(1, rounds + 1)
    ]


def legend(figure: Figure) -> set[str]:
    (found,) = figure.legends
    return {text.get_text() for text in found.get_texts()}


def png_size(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    assert raw[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", raw[16:24])
    return width, height


def test_history_draws_every_method_the_objective_and_the_epsilon(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    rows = [row | {"objective": 5 - row["accuracy"]} for row in history()]
    local = history(best=0.6, epsilon=0.0)
    path = figures.plot_rounds(
        {"pmtl": rows, "local": local, "fedavg": local[-1:]}, tmp_path / "private" / "a.png"
    )
    assert min(png_size(path)) > 600
    assert path.stat().st_size < 300_000
    assert [axes.get_ylabel() for axes in drawn[0].axes] == [
        "mean accuracy",
        "objective",
        "epsilon",
    ]
    upper, middle, lower = drawn[0].axes
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in upper.lines]
    assert any(np.array_equal(curve, [r["accuracy"] for r in rows]) for curve in curves)
    assert any(np.array_equal(curve, [r["accuracy"] for r in local]) for curve in curves)
    assert any(len(curve) == 2 and set(curve) == {local[-1]["accuracy"]} for curve in curves)
    (objective,) = middle.lines
    assert objective.get_ydata().tolist() == [row["objective"] for row in rows]
    assert np.array_equal(lower.lines[0].get_ydata(), [0.0, *(r["epsilon"] for r in rows)])
    last = {"PMTL": rows, "Local": local, "FedAvg": local}
    assert legend(drawn[0]) == {f"{title} {own[-1]['accuracy']:.3f}" for title, own in last.items()}
    assert drawn[0].get_supxlabel() == figures.NOT_PRIVATE


def test_history_without_privacy_has_no_epsilon_curve(tmp_path: Path, drawn: list[Figure]) -> None:
    """Nor has it a point of a row that was not measured."""
    rows = [{**row, "epsilon": float("inf")} for row in history()]
    rows[3]["accuracy"] = float("nan")
    del rows[5]["accuracy"]
    figures.plot_rounds({"pmtl": rows}, tmp_path / "a.png")
    upper, lower = drawn[0].axes
    assert len(upper.lines[0].get_ydata()) == len(rows) - 2
    assert not lower.lines
    assert "not private" in lower.texts[0].get_text()


def test_clients_are_sorted_and_their_shares_are_bars_with_numbers(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    table = {"pmtl": [0.9, 0.2, 0.5, 0.7], "local": [0.5, 0.2, 0.6, 0.1]}
    path = figures.plot_clients(
        table, tmp_path / "clients.png", shares={"local": (0.5, 0.433, 0.067)}
    )
    assert path.stat().st_size < 300_000
    left, right = drawn[0].axes
    steps = [line.get_ydata().tolist() for line in left.lines]
    assert steps == [
        [0.2, 0.5, 0.7, 0.9, 0.9],
        [0.1, 0.2, 0.5, 0.6, 0.6],
    ]  # the last one as long as the others
    assert all(line.get_xdata().tolist() == [0.0, 0.25, 0.5, 0.75, 1.0] for line in left.lines)
    assert {line.get_drawstyle() for line in left.lines} == {"steps-post"}
    assert [bar.get_width() for bar in right.patches] == pytest.approx(
        [0.5, 0.433, 0.067]
    )  # better, equal, worse
    assert {text.get_text() for text in right.texts} == {
        "vs Local",
        "50/43/7",
    }  # however short a bar is
    assert legend(drawn[0]) == {"PMTL 0.575", "Local 0.350"}
    assert drawn[0].get_supxlabel() == figures.NOT_PRIVATE


def test_many_clients_are_drawn_by_quantiles(tmp_path: Path, drawn: list[Figure]) -> None:
    values = np.random.default_rng(0).permutation(100_000) / 1e5  # quantile q is q
    figures.plot_clients({"pmtl": values, "local": [0.25] * len(values)}, tmp_path / "c.png")
    (axes,) = drawn[0].axes
    for line, expected in zip(
        axes.lines, ((np.arange(1000) + 0.5) / 1000, np.full(1000, 0.25)), strict=True
    ):
        np.testing.assert_allclose(line.get_ydata()[:-1], expected, atol=1e-5)
    assert "PMTL 0.500" in legend(drawn[0])


def test_clients_of_errors_are_sorted_from_the_largest(tmp_path: Path, drawn: list[Figure]) -> None:
    figures.plot_clients(
        {"pmtl": [1.0, 3.0, 1.0]}, tmp_path / "c.png", metric="mse", higher_is_better=False
    )
    assert drawn[0].axes[0].lines[0].get_ydata().tolist() == [3.0, 1.0, 1.0, 1.0]


def test_epsilon_by_round_above_what_canaries_measured(tmp_path: Path, drawn: list[Figure]) -> None:
    figures.plot_rounds({"pmtl": EPSILONS}, tmp_path / "e.png", measured=0.1299)
    assert plt.get_fignums() == []  # pyplot is left alone
    axes = drawn[0].axes[1]
    assert list(axes.lines[0].get_xdata()) == [0, 1, 5, 10]
    assert list(axes.lines[0].get_ydata()) == [0.0, 0.5, 1.5, 2.25]
    assert (
        axes.lines[0].get_drawstyle() == "steps-pre"
    )  # never less than was spent, also between evaluations
    assert [text.get_text() for text in axes.texts] == ["2.25", "at least\n0.129"]
    ((bar,),) = [
        lines.get_segments() for lines in axes.collections if hasattr(lines, "get_segments")
    ]
    assert bar[:, 1].tolist() == pytest.approx([0.1299, 2.25])


@pytest.mark.parametrize(
    ("format", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF-"), ("svg", b"<?xml")]
)
def test_the_same_data_gives_the_same_bytes(format: str, start: bytes, tmp_path: Path) -> None:
    first = figures.plot_rounds({"pmtl": history()}, tmp_path / f"a.{format}").read_bytes()
    assert first.startswith(start)
    assert figures.plot_rounds({"pmtl": history()}, tmp_path / f"b.{format}").read_bytes() == first


def test_impossible_figures_are_refused(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.png", {"pmtl": EPSILONS}
    for draw, message in (
        (lambda: figures.plot_rounds(rows, path, metric="rmse"), "'rmse'"),
        (lambda: figures.plot_rounds(rows, tmp_path / "e.jpg"), "png, pdf, svg"),
        (lambda: figures.plot_rounds(rows, path, paper=0.0), "1 to 50 inches"),
        (lambda: figures.plot_clients({}, path), "one value for each client"),
        (
            lambda: figures.plot_clients({"pmtl": [0.1, 0.2], "local": [0.3]}, path),
            "one value for each client",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            draw()
    assert not list(tmp_path.iterdir())


OWN = sorted(
    {
        cls.name
        for cls in {**vars(algorithms), **vars(contrib)}.values()
        if getattr(cls, "colour", "")
    }
)
"""The methods of the package that have a colour."""


def linear_luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_class_registers_its_title_and_colour_and_a_run_that_was_read_those_of_its_methods() -> (
    None
):
    assert PublishedPeerToPeer.title == "Peer-to-peer, published"
    assert {
        name: _names.title_of(name)
        for name in ("pmtl", "p2p_published", "FedAvg + finetuning", "unknown")
    } == {
        "pmtl": "PMTL",
        "p2p_published": PublishedPeerToPeer.title,
        "FedAvg + finetuning": "FedAvg + finetuning",
        "unknown": "unknown",
    }
    assert len(OWN) > 20
    stored = {
        "far": ["Far away", "#123456"],
        "near": ["Near", "red; drop"],
        "odd": 3,
        "pmtl": ["Not PMTL", "#000000"],
    }
    _names.register_stored(stored)
    assert [_names.title_of(name) for name in stored] == ["Far away", "Near", "odd", "PMTL"]
    assert _names.METHODS["far"].colour == "#123456"
    assert _names.METHODS["near"].colour == ""


def test_lines_stand_out_from_white_and_have_colours_of_their_own() -> None:
    known = [*OWN, *(f"{name} + finetuning" for name in OWN)]
    names = [*known, "mine", "yours", *(f"lam {place}" for place in range(30))]
    styles = canvas.styles_of(names)
    assert len({colour for colour, _ in styles.values()}) == len(names)
    assert len({marker for _, marker in canvas.styles_of(names[:6]).values()}) == 6
    for name in [*known, *names[-25:]]:  # WCAG: 3:1 for graphics
        assert 1.05 / (linear_luminance(styles[name][0]) + 0.05) >= 3.0, name
    for name in known:  # a method has its colour in every figure, whoever else is in it
        assert canvas.styles_of(["mine", name, "ditto", "yours"])[name][0] == styles[name][0]


@pytest.mark.parametrize("paper", [None, 3.3])
def test_texts_are_inside_of_the_figure_and_do_not_overlap(
    tmp_path: Path, drawn: list[Figure], paper: float | None
) -> None:
    name = "clustered_pmtl + finetuning"
    others = {
        other: [0.1, 0.4]
        for other in ("local", "fedavg + finetuning", "clustered_pmtl + finetuning of mine")
    }
    shares = dict.fromkeys(others, (0.9, 0.07, 0.03))
    figures.plot_clients(
        {name: [0.2, 0.3]} | others, tmp_path / "c.png", shares=shares, paper=paper
    )
    own = [
        {"round": r, "budget": 1.0, "mse": 1 / r, **{f"mse_p{p}": 1 / r for p in PERCENTILES}}
        for r in (1, 10, 100)
    ]
    bands = dict.fromkeys((f"{name}, epsilon 1", f"{name}, no budget"), own)
    figures.plot_rounds(bands, tmp_path / "b.png", metric="mse", step="activation", paper=paper)
    figures.plot_rounds(
        {"pmtl": history()} | {other: history(best=0.5) for other in others},
        tmp_path / "h.png",
        paper=paper,
    )
    for figure in drawn:
        assert paper is None or figure.get_figwidth() == paper
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        boxes, axis = {}, [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
        ticks = {
            text for each in axis for text in each.get_ticklabels(which="both")
        }  # some of which are not drawn
        for text in {*figure.findobj(Text)} - ticks:
            box = text.get_window_extent(renderer)
            if text.get_text() and text.get_visible():
                assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, text.get_text()
                boxes[text] = box.padded(-2)
        for text, box in boxes.items():
            others_of = [
                other.get_text()
                for other, there in boxes.items()
                if other is not text and box.overlaps(there)
            ]
            assert not others_of, (text.get_text(), others_of)


@pytest.mark.parametrize(("objective", "scale"), [(9.0, "linear"), (0.1, "log")])
def test_every_budget_has_its_median_and_its_band(
    objective: float, scale: str, tmp_path: Path, drawn: list[Figure]
) -> None:
    """Of two budgets; the objective falls from 10, the accuracy rises."""
    lines = {}
    for budget in (1.0, 10.0):
        lines[f"epsilon {budget:g}"] = rows = []
        for r in range(1, 6):
            middle = {
                "accuracy": 0.5 + 0.01 * r * budget,
                "objective": 10 * (objective / 10) ** ((r - 1) / 4),
            }
            parts = {
                f"{name}_p{p}": v * (1 + (p - 50) / 1000)
                for name, v in middle.items()
                for p in PERCENTILES
            }
            rows.append({"round": float(r), "budget": budget} | middle | parts)
    figures.plot_rounds(lines, tmp_path / "bands.png", step="answer")
    above, below = drawn[0].axes
    assert (above.get_yscale(), below.get_yscale()) == ("linear", scale)
    assert scale == "linear" or {"0.1", "1", "10"} <= {
        text.get_text() for text in below.get_yticklabels()
    }
    for axes, number in ((above, "accuracy"), (below, "objective")):
        edges = np.concatenate([part.get_paths()[0].vertices[:, 1] for part in axes.collections])
        for line, rows in zip(axes.lines, lines.values(), strict=True):
            assert np.array_equal(line.get_ydata(), [row[f"{number}_p50"] for row in rows])
            assert {row[f"{number}_p{mark}"] for row in rows for mark in (5, 25, 75, 95)} <= set(
                edges
            )
    assert legend(drawn[0]) == {"epsilon 1", "epsilon 10"}
