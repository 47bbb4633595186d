"""The summary of a result, as plain values and as text: scores, comparisons and privacy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._rounding import number_text, percent, rounded_up
from .._text import counted, shown
from ..data import RowBound
from ..report._settings import value_text
from .comparison import Stage, beside, spread_of
from .metrics import REGISTRY, Metric
from .stages import length_of, own_and_local, stages_of, verdict_of

if TYPE_CHECKING:
    from .result import Result


_WEAK = 1.1  # errors of local training over those of constants, from which on it is no measure
_COLUMNS = 3  # bands beside each other, as wide as a terminal


def numbers_of_result(result: Result, local: Result | None = None) -> dict[str, Any]:
    """Returns the numbers of the summary as plain values, by the names of result.json.

    Args:
        result: of a run.
        local: the baseline that it is compared with; None for its own ``"local"``, if it has one.
    """
    values = _facts(result)
    both = own_and_local(result, local)
    for metric in result.shown:
        values |= _numbers_of_metric(result, metric, both)
    # Wall time differs from machine to machine, and equal runs have equal files.
    if result.replicates is None:
        return values | {k: v for k, v in result.final.items() if k != "time"}
    rows = [{k: v for k, v in row.items() if k != "time"} for row in result.bands]
    return values | {"round": result.final["round"], "bands": rows, "replicates": result.replicates}


def _facts(result: Result) -> dict[str, Any]:
    """Returns the course of the run and the state of its clients; a name only if it applies."""
    values: dict[str, Any] = {
        "algorithm": result.algorithm,
        "step": result.step,
        "stopped": result.stopped,
        "metric": result.metric,
    }
    if result.chosen:
        values.update(result.chosen)
        values["chosen"] = dict(result.chosen)
    values["scored_clients"] = len(result.personal_accuracy)
    if result.lost:
        values["lost"] = result.lost
    if result.untrained:
        values["untrained_clients"] = len(result.untrained)
    if result.finetuned is not None:
        values |= result.finetuned.numbers()
    values |= {f"shortened_{side}": share for side, share in result.records.shortened.items()}
    verdict = verdict_of(result)
    if verdict:
        values["verdict"] = verdict
    if result.further_metrics:
        values["metrics"] = [metric.name for metric in result.shown]
    return values


def _numbers_of_metric(
    result: Result, metric: Metric, both: tuple[Stage, Stage] | None
) -> dict[str, Any]:
    """Returns the spread of a metric over clients, and its comparison with the baseline; names of
    all but the main metric begin with the metric's."""
    prefix = ""
    if metric.name != result.metric:
        prefix = f"{metric.name}_"
    spread = spread_of(result.by_client[metric.name], metric)
    values: dict[str, Any] = {f"{prefix}median": spread["median"]}
    if result.evaluated is not None:
        values[f"{prefix}standard_error"] = _standard_error(result, metric)
    if prefix:  # the last row of the history has those of the main metric
        values |= {f"{prefix}{key}": spread[key] for key in ("worst_tenth", "spread", "clients")}
    if both is None:
        return values
    compared = beside(*both, metric, result.personal.dtype)
    if compared is not None:
        names = (f"{prefix}{name}_local" for name in ("better_than", "as", "worse_than"))
        values |= dict(zip(names, compared, strict=True))
    return values


def summary_of(result: Result) -> str:
    """Returns the printed summary: scores over clients, comparisons, and the privacy block."""
    clients = counted(len(result.ids), "client")
    # The number of clients that the scores below are of: readers take them for those of all
    # clients.
    scored = len(result.personal_accuracy)
    if result.evaluated is not None:
        clients += f" ({len(result.evaluated):,} of them evaluated)"
    elif scored < len(result.ids):
        clients += f" ({scored:,} scored, the others have nothing to test on)"
    if result.privacy.interval is not None and result.privacy.interval["unit"] == "client":
        clients += f" and {result.privacy.interval['canaries']:,} canaries"
    head = f"{result.algorithm} on {shown(result.data_name)}: {clients}, {length_of(result)}"
    if result.stopped == "budget":
        head += " (stopped: the privacy budget is spent)"
    if result.stopped == "early":
        head += " (stopped early)"
    if result.replicates is None:
        lines = _one_run(result)
    else:
        lines = _several_runs(result)
    if result.lost:
        lines += [f"  {result.lost}"]
    if result.chosen:  # first, since all that follows depends on it
        text = "; ".join(f"{name} {value_text(value)}" for name, value in result.chosen.items())
        lines = [f"chosen from public rows and bounds: {text}", "", *lines]
    return "\n".join([head, "", *lines, "", result.privacy.text()])


def _one_run(result: Result) -> list[str]:
    """Returns the lines of a single run: tables, the verdict, and the failures."""
    last = result.final
    stages = [*stages_of(result, result.algorithm, shared=True)[::-1]]
    for name, run in result.baselines.items():
        stages += stages_of(run, name)[::-1]
    lines = ["not private (computed on the clients' test data)"]
    if result.baselines:
        lines[0] += "; baselines are not released"
    reference = None
    both = own_and_local(result)
    if both is not None:
        _, reference = both
    lines += _tables(result, stages, reference)
    verdict = verdict_of(result)
    if verdict:
        # A long name of a client stays whole, so that it can be searched for.
        text = textwrap.fill(verdict, 78, break_long_words=False)
        lines.append(textwrap.indent(text, "  "))
    lines += _standard_errors(result)
    lines += _diverged_trainings(result)
    if result.finetuned is not None:
        lines += result.finetuned.lines()
    if math.isfinite(last.get("nmse", math.nan)) and REGISTRY["nmse"] not in result.shown:
        # The mean is that of the clients whose targets hardly vary; the median is robust to them.
        middle = spread_of(result.by_client["nmse"], REGISTRY["nmse"])["median"]
        lines.append(f"  nMSE {number_text(middle)}, median over clients")
    lines += _warning(result, stages)
    if reference is not None:
        lines += _weak_local(result, reference)
    bound = result.bounds.records
    if bound is not None and any(result.records.shortened.values()):
        lines.append(f"  records: {_shares(result.records.shortened, bound)}")
    if "objective" in last:
        lines.append(f"  training records: objective {last['objective']:.5g}")
    return lines


def _standard_errors(result: Result) -> list[str]:
    """Returns the line on the clients that were drawn for evaluation; none if all are scored."""
    if result.evaluated is None:
        return []
    texts = ", ".join(
        f"{one.name} {number_text(_standard_error(result, one), result.final.get(one.name))}"
        for one in result.shown
    )
    return [f"  clients drawn by the seed; standard error of the means: {texts}"]


def _standard_error(result: Result, metric: Metric) -> float:
    """Returns the standard error of the mean of a metric over the evaluated clients, as an
    estimate of the mean over all clients with test examples.

    It is that of a sample without replacement: 0 if all of them were evaluated; NaN for a single
    score.

    Args:
        result: of the run.
        metric: whose scores are averaged.
    """
    if result.evaluated is None:
        return 0.0
    scores = result.by_client[metric.name]
    count = len(scores)
    if count < 2:
        return math.nan
    # The correction for a finite population: a sample of everybody has no error.
    left = 1 - len(result.evaluated) / result.records.tested  # the share that was not drawn
    return spread_of(scores, metric)["spread"] * math.sqrt(left / (count - 1))


def _diverged_trainings(result: Result) -> list[str]:
    """Returns the line on local trainings that ended in no finite model; none without any."""
    runs = {result.algorithm: result, **result.baselines}
    lost = {
        name: sum(int(row.get("diverged_trainings", 0)) for row in run.history)
        for name, run in runs.items()
    }
    counts = ", ".join(f"{count:,} of {name}" for name, count in lost.items() if count)
    if not counts:
        return []
    return [f"  diverged, and not kept: local trainings, {counts}"]


def _warning(result: Result, stages: Sequence[Stage]) -> list[str]:
    """Returns the line on models that are worse than a constant, with advice; none without any."""
    worse = {text: stage for stage in stages if (text := _worse_than_constant(result, stage))}
    if not worse:
        return []
    advice = remedy(result, list(worse.values()))
    return [f"  warning: worse than predicting a constant: {', '.join(worse)}{advice}"]


def _weak_local(result: Result, local: Stage) -> list[str]:
    """Returns the line on local training whose mean error is far above that of each client's own
    constant; none if it is not.

    A median client may be fine while a few have errors so large that every method looks better than
    alone by the mean.
    """
    scores = local.by_client.get(result.metric, {})
    both = [name for name in result.records.constants if math.isfinite(scores.get(name, math.nan))]
    if not both:
        return []
    error = math.fsum(scores[name] for name in both) / len(both)
    constant = math.fsum(result.records.constants[name] for name in both) / len(both)
    if not error > _WEAK * constant:
        return []
    location = "mean"
    if result.metric == "pinball":
        location = "quantile"
    return [
        f"  warning: {local.label} has a mean error of {number_text(error)}, and the {location} of "
        f"each client's own training targets one of {number_text(constant)}: who is better than "
        f"{local.label} by the mean need not be better than alone"
    ]


def _tables(result: Result, stages: Sequence[Stage], reference: Stage | None) -> list[str]:
    """Returns the printed tables, one for each metric, and the meaning of their columns.

    Args:
        result: of the run.
        stages: the rows.
        reference: that each row is compared with; None for no comparison.
    """
    lines: list[str] = []
    for metric in result.shown:
        lines += _table(result, metric, stages, reference)
    lines.append("  tenth: mean over the tenth of the clients with the worst scores")
    meaning = ""
    if reference is not None:
        meaning = f"; vs {reference.label}: % of clients better/equal/worse"
    lines.append(f"  spread: standard deviation{meaning}")
    lost = ", ".join(
        f"{len(stage.left_out):,} of {stage.label}" for stage in stages if stage.left_out
    )
    return lines + (
        [f"  diverged, and in no comparison: models of clients, {lost}"] if lost else []
    )


def _table(
    result: Result, metric: Metric, stages: Sequence[Stage], reference: Stage | None
) -> list[str]:
    """Returns the lines of the table of one metric; see :func:`_tables`."""
    names = ("mean", "median", "worst_tenth", "spread")
    rows = [[metric.name, "mean", "median", "tenth", "spread"]]
    if reference is not None:
        rows[0].append(f"vs {reference.label}")
    rows[0].append("epsilon")
    for stage in stages:
        spread = spread_of(stage.by_client[metric.name], metric)
        row = [stage.label, *(number_text(spread[key], spread["mean"]) for key in names)]
        if reference is not None:
            compared = None
            # Beside itself a model is equal for everybody, which says nothing.
            if stage.by_client is not reference.by_client:
                compared = beside(stage, reference, metric, result.personal.dtype)
            row.append("-" if compared is None else percent(compared))
        rows.append([*row, rounded_up(stage.epsilon, 3)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        line = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label:<{widths[0]}}{line}")
    defined = [len(stage.by_client[metric.name]) for stage in stages]
    clients = len(result.personal_ids)
    if min(defined) < clients:
        most = ""
        if max(defined) > min(defined):
            most = f" to {max(defined):,}"
        lines.append(
            f"  ({metric.name}: defined for {min(defined):,}{most} of {counted(clients, 'client')})"
        )
    return lines


def remedy(result: Result, stages: Sequence[Stage]) -> str:
    """Returns the advice on settings that may make bad models better; empty without one.

    Args:
        result: of the run.
        stages: the bad models.
    """
    names = ["features and targets scaled to [-1, 1]"] * result.records.unscaled
    names += ["wider data.bounds of the target, which cut off most targets"] * (
        result.records.cut_targets > 0.5
    )
    names += ["a larger privacy.epsilon"] * any(0 < stage.epsilon < math.inf for stage in stages)
    names += ["a smaller algorithm.local.lr"] * (
        result.adaptation is not None and result.adaptation["local"] is not None
    )
    # A pull to a shared model that is bad keeps a client from a good one of its own.
    pulled = result.finetuned is not None and result.finetuned.settings.kind in (
        "kl",
        "vanilla",
        "ewc",
    )
    names += ["finetune=auto"] * (pulled and "nmse" in result.by_client)
    if names:
        return f"; try {' or '.join(names)}"
    return ""


def _worse_than_constant(result: Result, stage: Stage) -> str:
    """Returns the warning of models that are worse than a constant; empty if they are not.

    Models of a real target are compared with the mean, or the quantile, of each client's own
    training targets, and are bad if they are worse for more than half of the clients. Others are
    bad if their mean loss is above that of the best constant outputs.
    """
    if "nmse" in stage.by_client or result.metric == "pinball":
        location = "mean"
        if result.metric == "pinball":
            location = "quantile"
        own = Stage("own constant", {result.metric: result.records.constants})
        compared = beside(stage, own, REGISTRY[result.metric], result.personal.dtype)
        if compared is None or not compared[2] > 0.5:
            return ""
        return (
            f"{stage.label} (for {compared[2]:.0%} of the clients, than the {location} of their "
            "own training targets)"
        )
    # Losses of one model differ in rounding, which must not raise a warning.
    mean = spread_of(stage.by_client["loss"], REGISTRY["loss"])["mean"]
    if result.records.constant is None or not mean > result.records.constant * (
        1 + REGISTRY["loss"].resolution(result.personal.dtype)
    ):
        return ""
    return f"{stage.label} (loss {number_text(mean)}, above {number_text(result.records.constant)})"


def _several_runs(result: Result) -> list[str]:
    """Returns the lines of replicates: the bands of each budget, some columns at a time."""
    assert result.replicates is not None
    rows = result.bands
    names = [
        result.metric,
        "nmse",
        *(metric.name for metric in result.further_metrics),
        "worst_tenth",
        "objective",
    ]
    names = [name for name in dict.fromkeys(names) if name in rows[0]]
    lines = [
        "not private (computed on the clients' data): "
        f"mean of {len(result.replicates) // len(rows)} runs, and 5th to 95th percentile"
    ]
    for part in (names[i : i + _COLUMNS] for i in range(0, len(names), _COLUMNS)):
        lines.append(
            "".join([f"{'epsilon':>8}", *(f"{name.replace('_', ' '):>24}" for name in part)])
        )
        for row in rows:
            budget = "-"
            if row["budget"] is not None:
                budget = rounded_up(row["budget"], 6)
            lines.append("".join([f"{budget:>8}", *(f"{_band(row, name):>24}" for name in part)]))
    return lines


def _shares(shortened: Mapping[str, float], bound: RowBound) -> str:
    """Returns the shares of records that were scaled down, by side, in words."""
    shares = ", ".join(f"{share:.1%} ({side})" for side, share in shortened.items())
    return (
        f"{shares} scaled down to {bound.norm.upper()} norm {bound.bound:g}, for training and "
        "for scores"
    )


def _band(row: Mapping[str, Any], name: str) -> str:
    """Returns the mean of a number over replicates with its 5th and 95th percentile."""
    low, high = (number_text(row.get(f"{name}_p{mark}", float("nan"))) for mark in (5, 95))
    return number_text(row[name]) + (f" [{low}, {high}]" if f"{name}_p5" in row else "")
