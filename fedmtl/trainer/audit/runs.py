"""Checks of the audit that run a configuration itself: its first releases on neighbouring data, and an early stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data import FederatedDataset
from ...errors import FedmtlError
from ...privacy import Privacy
from ...privacy.audit import Finding, Setup
from ...privacy.audit.findings import exact, skipped, too_large
from ...privacy.audit.stated import early_stop
from ...privacy.audit.statistics import auditor
from ...privacy.channel import FIRST
from ..evaluation import METRICS
from ..stopping import EarlyStopping
from ..trainer import Trainer
from .rerun import states

_LARGE = 1e4
_SLACK = 1 + 1e-6
_HISTORIES = 200
_MEASURED = ("loss", *METRICS, "worst_tenth", "spread", "global_accuracy", "objective", "time")


def audit_runs(trainer: Trainer, setup: Setup, seed: int, checks: Sequence[str]) -> list[Finding]:
    """Check first releases, what a run releases of rows, and the charge of an early stop, of a trainer on the CPU."""
    findings = []
    if setup.first is not None and "sensitivity" in checks:
        findings.append(first_sensitivity(trainer, setup, seed))
    if "charges" in checks and not setup.privacy.noiseless:
        findings.append(_stopped(trainer, setup, seed))
        findings.append(stopping_rule(trainer, seed))
    if "transcript" in checks and setup.gradients is None:
        findings.append(released_rows(trainer, setup))
    return findings


def released_rows(trainer: Trainer, setup: Setup, *, rounds: int = 2) -> Finding:
    """Check that a run releases, to the last bit, what the channel releases of the same rows when it is handed them.

    All other checks hand rows to releases. A run may add up long rows where clients make them, and draws noise in
    threads meanwhile. It is run as it is, and again with a tap, whose rows another channel releases. With its own clip
    norm, and with one of 2^-10 of it, so that rows are clipped.

    Args:
        trainer: the configuration.
        setup: of it.
        rounds: with each clip norm.
    """
    given = _seeded(trainer)
    assert given is not None
    norms: list[Any] = [given.clip_norm]
    if isinstance(given.clip_norm, float) and all(plan.form == "vector" for plan in setup.releases):
        norms.append(given.clip_norm * 2.0**-10)
    wrong = sum(_released_otherwise(replace(trainer, privacy=replace(given, clip_norm=norm)), rounds) for norm in norms)
    detail = "releases of a run that are not those of its rows handed to the channel"
    return exact("transcript: releases", wrong, detail)


def _released_otherwise(trainer: Trainer, rounds: int) -> int:
    """Return how many releases of a run differ from those of its rows."""
    recorded: list[tuple[int, str, Tensor]] = []
    again: list[tuple[int, str, Tensor]] = []
    for _ in states(trainer, trainer.data, rounds, record=recorded):
        pass
    problem = trainer.problem(device="cpu")
    with closing(problem.executor), closing(trainer.open(problem, "audit")[0]) as channel:
        channel.record, begun = again, {-1}

        def tap(step: int, name: str, clients: Tensor, rows: Tensor) -> None:
            if step not in begun:
                channel.begin(step, channel.draw(step))
                begun.add(step)
            channel.release(name, rows, clients)

        for _ in states(trainer, trainer.data, rounds, tap=tap):
            pass
    pairs = itertools.zip_longest(recorded, again, fillvalue=(-1, "", torch.zeros(0)))
    return sum(one[:2] != other[:2] or not torch.equal(one[2], other[2]) for one, other in pairs)


def stopping_rule(trainer: Trainer, seed: int) -> Finding:
    """Check that what ends a run early reads the released model alone: the same decision, whatever was measured on
    private data."""
    rule, coins = trainer.early_stopping or EarlyStopping(), auditor(seed, "stop")
    wrong = 0
    for _ in range(_HISTORIES):
        moved = np.cumsum(coins.normal(0.1, 1.0, size=int(coins.integers(1, 20)))).tolist()
        public = [{"round": step, "distance": abs(one)} for step, one in enumerate(moved, start=1)]
        decisions = set()
        for value in (0.0, 1.0, math.nan, 1e9):
            decisions.add(rule.stops([row | dict.fromkeys(_MEASURED, value) for row in public]))
        wrong += len(decisions) > 1
    return exact("charges: rule of an early stop", wrong, "histories in which private measurements decide")


def _seeded(trainer: Trainer) -> Privacy | None:
    return None if trainer.privacy is None else replace(trainer.privacy, source="seeded")


def _stopped(trainer: Trainer, setup: Setup, seed: int) -> Finding:
    """Check the run itself, with a rule that stops it at once."""
    rule = EarlyStopping(patience=1, min_delta=1e300)
    problem = trainer.problem(device="cpu")
    with closing(problem.executor):
        if trainer.algorithm.shared(trainer.algorithm.init(problem)) is None:
            return skipped("charges: early stop", "no model is common to all, so no run stops early")
    result = replace(trainer, early_stopping=rule, eval_every=1, folder=None, privacy=setup.privacy).fit()
    return early_stop(result.privacy.epsilon, result.stopped, setup, seed)


def first_sensitivity(trainer: Trainer, setup: Setup, seed: int) -> Finding:
    """Check that one record replaced moves the first release of its client by at most the sensitivity that its noise is
    for.

    The run's own first step is made on neighbouring data sets with the same noise: records that pull one way, that
    nothing else opposes, or as they are, and one record among them that turns round, vanishes or is not a number.
    """
    check = "sensitivity: first releases"
    assert setup.first is not None
    if trainer.data.train.x.layout == torch.sparse_csr:
        return skipped(check, "features are sparse")
    privacy = replace(setup.privacy, source="seeded")
    trainer = replace(trainer, privacy=privacy)
    moves = np.asarray(setup.first.sensitivity)
    counts = setup.sizes
    worst, where, pairs = 0.0, "", 0
    for base, others in _neighbours(trainer.data, seed):
        try:
            first = first_releases(trainer, base)
            for name, other in others:
                moved = torch.linalg.vector_norm(first - first_releases(trainer, other), dim=1).numpy()
                share = np.where(counts > 0, moved / moves, 0.0)
                place = int(share.argmax())
                pairs += int((counts > 0).sum())
                if not share[place] <= worst:
                    worst = float(share[place]) if math.isfinite(share[place]) else math.inf
                    where = f"{name} of {setup.records.ids[place]!r}"
        except FedmtlError as error:
            return too_large(check, math.inf, _SLACK, f"whether there is a release depends on the records: {error}")
    detail = f"largest change over the stated sensitivity, in {pairs} pairs of neighbours; {where}"
    return too_large(check, worst, _SLACK, detail)


def first_releases(trainer: Trainer, data: FederatedDataset) -> Tensor:
    """Return (n, D) what clients release before all activations, in a run on ``data``."""
    recorded: list[tuple[int, str, Tensor]] = []
    for _, block in states(trainer, data, trainer.rounds, record=recorded):
        if block is not None:
            break
    return next(value[0] for step, name, value in recorded if (step, name) == (-1, FIRST))


Neighbours = Iterator[tuple[FederatedDataset, list[tuple[str, FederatedDataset]]]]


def _neighbours(data: FederatedDataset, seed: int) -> Neighbours:
    """Return data sets, each with others in which one record of every client is replaced."""
    train, generator = data.train, torch.Generator().manual_seed(seed)
    counts = train.counts
    some = counts > 0
    places = train.offsets[:-1][some] + (torch.rand(int(some.sum()), generator=generator) * counts[some]).long()
    x = train.x if train.x.is_floating_point() else train.x.double()
    direction = torch.ones_like(x[0]) * _LARGE
    lowest, highest = _targets(data)
    aligned, single = direction.expand_as(x).clone(), torch.zeros_like(x)
    single[places] = direction
    for kind, rows, y in (
        ("a record", x, train.y),
        ("one of records that agree", aligned, torch.full_like(train.y, highest)),
        ("a record alone", single, torch.full_like(train.y, highest)),
    ):
        base = _with_records(data, rows.clone(), y.clone())
        others = []
        for sign, target in itertools.product((1.0, -1.0, 0.0, math.nan), (lowest, highest)):
            changed, targets = rows.clone(), y.clone()
            changed[places], targets[places] = sign * direction, target
            others.append((f"{kind}, times {sign:g} with target {target:g}", _with_records(data, changed, targets)))
        yield base, others


def _targets(data: FederatedDataset) -> tuple[float, float]:
    return (-_LARGE, _LARGE) if data.classes is None else (0, data.classes - 1)


def _with_records(data: FederatedDataset, x: Tensor, y: Tensor) -> FederatedDataset:
    return replace(data, train=replace(data.train, x=x, y=y), notes=(), verify=False)
