"""Checks of the audit that run a configuration itself: what it releases of rows, and an early stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._rounding import rounded_up
from ...privacy.audit import Finding, Setup
from ...privacy.audit.charges import planned_epsilon
from ...privacy.audit.findings import exact, skipped
from ...privacy.audit.statistics import auditor
from ..evaluation import METRICS
from ..stopping import EarlyStopping
from ..trainer import Trainer
from .rerun import Releases, seeded, states

_HISTORIES = 200
_MEASURED = ("loss", *METRICS, "worst_tenth", "spread", "global_accuracy", "objective", "time")


def audit_runs(trainer: Trainer, setup: Setup, seed: int, checks: Sequence[str]) -> list[Finding]:
    """Check what a run releases of rows, and the charge of an early stop, of a trainer on the CPU."""
    findings = []
    if "charges" in checks and not setup.privacy.noiseless:
        findings.append(_stopped(trainer, setup, seed))
        findings.append(stopping_rule(trainer, seed))
    if "transcript" in checks and setup.gradients is None:
        findings.append(released_rows(trainer, setup))
    return findings


def released_rows(trainer: Trainer, setup: Setup, *, rounds: int = 2) -> Finding:
    """Check that a run releases, to the last bit, what another channel releases of the same rows when it is handed
    them, and that these are rows of clients that were drawn for the round.

    All other checks hand rows to releases. A run may add up long rows where clients make them, and draws noise in
    threads meanwhile. It is run as it is, and again with a tap, whose rows another channel releases. With its own clip
    norm, and with one of 2^-10 of it, so that rows are clipped.

    Args:
        trainer: the configuration.
        setup: of it.
        rounds: with each clip norm.
    """
    trainer = seeded(trainer)
    privacy = trainer.privacy
    assert privacy is not None
    norms: list[Any] = [privacy.clip_norm]
    if isinstance(privacy.clip_norm, float) and all(plan.form == "vector" for plan in setup.releases):
        norms.append(privacy.clip_norm * 2.0**-10)
    runs = [replace(trainer, privacy=replace(privacy, clip_norm=norm)) for norm in norms]
    wrong = sum(_released_otherwise(run, rounds) for run in runs)
    detail = "releases of a run that are not those of its rows handed to a channel, or of clients that were not drawn"
    return exact("transcript: releases", wrong, detail)


def _released_otherwise(trainer: Trainer, rounds: int) -> int:
    """Return how many releases of a run differ from those that another channel makes of its rows, and how many have
    rows of clients that were not drawn."""
    plain, again, of, drawn = Releases(), Releases(), list[tuple[int, set[int]]](), dict[int, set[int]]()
    for _ in states(trainer, trainer.data, rounds, record=plain):
        pass
    problem = trainer.problem(device="cpu")
    with closing(problem.executor), closing(trainer.open(problem, "audit")[0]) as channel:
        channel.record = again
        pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}

        def tap(step: int, name: str, clients: Tensor, rows: Tensor) -> None:
            pieces.setdefault(name, []).append((clients, rows))

        for _, block in states(trainer, trainer.data, rounds, tap=tap):
            if block is None:
                continue
            drawn[block.first] = set(block.cohort.tolist())
            channel.begin(block.first, channel.draw(block.first))
            for name, parts in pieces.items():
                clients, rows = (torch.cat(each) for each in zip(*parts, strict=True))
                of.append((block.first, set(clients.tolist())))
                channel.release(name, rows, clients)
            pieces.clear()
    others = sum(not clients <= drawn[step] for step, clients in of)
    pairs = itertools.zip_longest(plain, again, fillvalue=(-1, "", torch.zeros(0)))
    return others + sum(first[:2] != other[:2] or not torch.equal(first[2], other[2]) for first, other in pairs)


def stopping_rule(trainer: Trainer, seed: int) -> Finding:
    """Check that what ends a run early reads the released model alone: the same decision, whatever was measured on
    private data."""
    rule, coins = trainer.early_stopping or EarlyStopping(), auditor(seed, "stop")
    wrong = 0
    for _ in range(_HISTORIES):
        moved = np.cumsum(coins.normal(0.1, 1.0, size=int(coins.integers(1, 20)))).tolist()
        public = [{"round": step, "distance": abs(distance)} for step, distance in enumerate(moved, start=1)]
        decisions = set()
        for value in (0.0, 1.0, math.nan, 1e9):
            decisions.add(rule.stops([row | dict.fromkeys(_MEASURED, value) for row in public]))
        wrong += len(decisions) > 1
    return exact("charges: rule of an early stop", wrong, "histories in which private measurements decide")


def _stopped(trainer: Trainer, setup: Setup, seed: int) -> Finding:
    """Check the run itself, with a rule that stops it at once."""
    rule = EarlyStopping(patience=1, min_delta=1e300)
    problem = trainer.problem(device="cpu")
    with closing(problem.executor):
        if trainer.algorithm.shared(trainer.algorithm.init(problem)) is None:
            return skipped("charges: early stop", "no model is common to all, so no run stops early")
    result = replace(trainer, early_stopping=rule, eval_every=1, finetune=None, privacy=setup.privacy).fit()
    if result.stopped != "early":
        return skipped("charges: early stop", f"the run did not stop early: {result.stopped}")
    stated, planned = result.privacy.epsilon, planned_epsilon(setup, seed)
    detail = f"epsilon {rounded_up(stated, 6)} after an early stop, {rounded_up(planned, 6)} of all that is planned"
    return exact("charges: early stop", int(not math.isclose(stated, planned, rel_tol=1e-9)), detail)
