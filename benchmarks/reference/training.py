"""One run of a row, and one cell: settings chosen on validation rows, then scores of all seeds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl import (
    ClientPrivacy,
    FederatedDataset,
    Interval,
    RecordPrivacy,
    Result,
    SecureAggregation,
    Trainer,
    models,
)
from fedmtl.privacy import ReleasePlan, open_channel, privacy_report

from .measure import peak_memory, reset_peak
from .problems import load
from .settings import CANARIES, CONFIDENCE, DELTA, NO_NOISE, NOTHING_SENT, TUNING, Row, Setting


@dataclass(frozen=True)
class Cell:
    """What the runs of a row at one epsilon give.

    Attributes:
        scores: by seed, on test rows.
        worst_tenth: mean score of the tenth of the clients that score worst, mean over seeds.
        chosen: the setting, in words.
        results: of the seeds.
        lower_bound: of epsilon by canaries; None where none were planted.
        seconds: of the processor for one run, the mean over seeds.
        memory: the most of this process during these runs, in MiB.
    """

    scores: dict[int, float]
    worst_tenth: float
    chosen: str
    results: tuple[Result, ...]
    lower_bound: float | None
    seconds: float
    memory: float


def model_of(row: Row, data: FederatedDataset) -> Any:
    """Returns the model of every client."""
    if row.model == "automatic":
        return "auto"
    if row.model == "hidden":
        return models.mlp(hidden=32)
    if data.classes is None:
        return models.linear_regression(bias=row.problem.bias)
    return models.softmax_regression()


def size_of(row: Row, data: FederatedDataset) -> int:
    """Returns the number of parameters of a linear model."""
    outputs = data.classes or 1
    return (int(np.prod(data.spec.shape)) + row.problem.bias) * outputs


def privacy_of(row: Row, data: FederatedDataset, setting: Setting, epsilon: float) -> Any:
    """Returns the settings of privacy of a run; None without noise."""
    if epsilon in (NO_NOISE, NOTHING_SENT):
        return None
    if row.unit == "record":
        return RecordPrivacy(clip_norm=setting.clip, epsilon=epsilon, delta=DELTA)
    bands = None
    if row.bands:
        bands = "auto"
    privacy = ClientPrivacy(clip_norm=setting.clip, epsilon=epsilon, delta=DELTA, bands=bands)  # type: ignore[arg-type]
    if row.trust == "secure":
        return replace(privacy, aggregation=SecureAggregation())
    if row.trust == "local":
        return alone(row, data, privacy)
    return privacy


def alone(row: Row, data: FederatedDataset, privacy: ClientPrivacy) -> ClientPrivacy:
    """Returns the noise on a sum of rows of which each has all the noise that it needs.

    Args:
        row: in which everybody takes part in each round, so that nothing is amplified.
        data: of the clients.
        privacy: of a trusted server, whose sum needs as much noise as a single row does.
    """
    plan = ReleasePlan(name="update", dimension=size_of(row, data))
    channel = open_channel(privacy, [plan], row.schedule.bind(len(data)), seed=0, steps=row.rounds)
    multiplier = privacy_report(channel).noise_multiplier
    assert multiplier is not None
    return replace(privacy, epsilon=None, noise_multiplier=multiplier * math.sqrt(len(data)))


def train(
    row: Row, data: FederatedDataset, setting: Setting, epsilon: float, seed: int, **more: Any
) -> Result:
    """Returns one run.

    Args:
        row: its settings.
        data: of a seed.
        setting: one of those of the row.
        epsilon: of the run.
        seed: of the start, the cohorts and the noise.
        more: arguments of the Trainer, such as an audit.
    """
    every = None
    if isinstance(row.rounds, int):
        every = row.rounds
    loss = "auto"
    if data.classes is None:
        loss = "half_mse"
    finetune: Any = setting.finetune
    if setting.algorithm == "auto":
        finetune = "auto"
    return Trainer(
        algorithm=setting.algorithm,  # type: ignore[arg-type]
        data=data,
        model=model_of(row, data),
        loss=loss,
        schedule=row.schedule,
        privacy=privacy_of(row, data, setting, epsilon),
        rounds=row.rounds,
        finetune=finetune,
        seed=seed,
        eval_every=every,
        progress=False,
        **more,
    ).fit()


def choose(row: Row, data: FederatedDataset, epsilon: float) -> Setting:
    """Returns the setting with the best score on validation rows; no epsilon covers this choice."""
    settings = row.choices(epsilon)
    if len(settings) == 1:
        return settings[0]
    sign = 1.0 if row.problem.larger else -1.0

    def worth(setting: Setting) -> float:
        score = sign * train(row, data, setting, epsilon, TUNING).final[row.problem.metric]
        if not math.isfinite(score):
            # A run that diverged is the last choice.
            return -math.inf
        return float(score)

    return max(settings, key=worth)


def measure(
    row: Row,
    epsilon: float,
    seeds: Sequence[int],
    folder: Path,
    *,
    canaries: bool = True,
) -> Cell:
    """Returns a cell.

    Args:
        row: its settings.
        epsilon: one of the row's.
        seeds: of the scores.
        folder: of the data.
        canaries: False leaves the lower bound out.
    """
    logging.getLogger("fedmtl").setLevel(logging.ERROR)
    setting = choose(row, load(row.problem, folder, TUNING), epsilon)
    sides = {seed: load(row.problem, folder, seed) for seed in seeds}
    reset_peak()
    began = time.process_time()
    results = {seed: train(row, data, setting, epsilon, seed) for seed, data in sides.items()}
    seconds = (time.process_time() - began) / len(results)
    memory = peak_memory()
    scores = {seed: float(one.final[row.problem.metric]) for seed, one in results.items()}
    tenths = [worst_tenth(one, row) for one in results.values()]
    least = None
    if canaries and auditable(row, epsilon):
        # Canaries are clients of their own and cost accuracy, so they have a run of their own.
        audit = Interval(canaries=CANARIES, confidence=CONFIDENCE)
        first = seeds[0]
        found = train(row, sides[first], setting, epsilon, first, audit=audit).privacy.interval
        assert found is not None
        least = float(found["measured"])
    return Cell(
        scores,
        float(np.mean(tenths)),
        setting.words,
        tuple(results.values()),
        least,
        seconds,
        memory,
    )


def worst_tenth(result: Result, row: Row) -> float:
    """Returns the mean score of the tenth of the clients that score worst, of each row its own."""
    ordered = sorted(result.personal_accuracy.values(), reverse=not row.problem.larger)
    return float(np.mean(ordered[: math.ceil(len(ordered) / 10)]))


def auditable(row: Row, epsilon: float) -> bool:
    """Returns True if canaries can be planted cheaply in the run that a cell claims.

    Noise of each client alone is simulated by its sum, so its run is charged for another figure,
    and automatic settings would see the canaries as clients.
    """
    noised = epsilon not in (NO_NOISE, NOTHING_SENT)
    simulated = row.unit == "client" and row.trust == "local"
    return noised and not simulated and row.model != "automatic"
