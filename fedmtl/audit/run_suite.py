"""The audit of a whole configuration: every check of the release path, and the transcript of the
algorithm.

    findings = audit_trainer(Trainer(algorithm=PMTL(), data=data, ...))
    print(table(findings))

Nothing is trained to the end and nothing is written: channels are opened as the run would open
them, with ledgers in memory or in temporary files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..privacy import ActivationChannel, BoundSampler
from ..schedules import BoundSchedule
from ..trainer.run_channel import releases_of
from ..trainer.trainer import Trainer
from .early_stop import stopped_early, stopping_rule
from .findings import Finding, skipped
from .independence import independence, public_shape
from .local_steps import drawn_records
from .release_suite import Effort, audit_channel
from .rerun import watched
from .setup import Clocks, Setup
from .transcript import automatic_settings, released_rows, resolved, transcript

ROUNDS = 10


def audit_trainer(
    trainer: Trainer, *, seed: int = 0, rounds: int = ROUNDS, effort: Effort | None = None
) -> list[Finding]:
    """Makes every check on the configuration of ``trainer``, on the CPU.

    Args:
        trainer: the configuration under test; its folder, baselines and callbacks are not used.
        seed: of the audit.
        rounds: rounds of the transcript, at most those of the run.
        effort: sizes of the samples, and the checks that run.

    Returns:
        The findings; none of them proves anything, and a refuted one contradicts a statement of the
        run's report.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models
        >>> from fedmtl.audit import Effort, any_refuted, audit_trainer
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=4),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> effort = Effort(noise=10_000, checks=("charges",))
        >>> any_refuted(audit_trainer(trainer, effort=effort))
        False
    """
    written = replace(trainer.first_run(), device="cpu", callbacks=(), progress=False)
    rounds = min(rounds, trainer.rounds)
    trainer = resolved(written)
    effort = effort or Effort()
    findings: list[Finding] = []
    setup = setup_of(trainer)
    if setup is not None:
        findings += audit_channel(setup, seed=seed, effort=effort)
        if "charges" in effort.checks and not setup.privacy.noiseless:
            findings += [stopped_early(trainer, setup, seed), stopping_rule(trainer, seed)]
        of_rounds = setup.gradients is not None and not setup.one_at_a_time
        if (of_rounds or setup.pooled is not None) and "sampler" in effort.checks:
            findings += drawn_records(trainer, seed=seed)
    else:
        findings.append(
            skipped("release path", "privacy is none: neither clip nor noise is claimed")
        )
    if trainer.privacy is not None and "independence" in effort.checks:
        shape = [public_shape(trainer.data)]
    else:
        shape = []
    # a shape that follows the records would stop the runs on other data
    if not any(finding.refuted for finding in shape) and {"transcript", "independence"} & set(
        effort.checks
    ):
        first = watched(
            trainer, rounds, publish=trainer.privacy is not None and not trainer.privacy.noiseless
        )
        if "transcript" in effort.checks:
            if setup is not None and setup.gradients is None:
                findings.append(released_rows(trainer, first, setup))
            findings += transcript(trainer, first, seed=seed, rounds=rounds)
            findings += automatic_settings(written, trainer, seed=seed)
        if "independence" in effort.checks:
            findings += independence(trainer, first, seed=seed, rounds=rounds)
    return findings + shape  # models of other data have another shape where this is refuted


def setup_of(trainer: Trainer) -> Setup | None:
    """Returns the channel setup of a run for :func:`fedmtl.audit.audit_channel`; None without
    privacy."""
    if trainer.privacy is None:
        return None
    problem = trainer.problem()
    bound = trainer.bound_schedule
    return Setup(
        privacy=trainer.privacy,
        plans=releases_of(trainer.algorithm, problem, bound),
        schedule=bound
        if isinstance(bound, BoundSampler)
        else _clocks(trainer, bound, problem.rounds),
        steps=problem.rounds,
        tensors=tuple(b - a for a, b in itertools.pairwise(problem.layout.offsets)),
        counts=tuple(trainer.data.train.counts.tolist()),
    )


def _clocks(trainer: Trainer, bound: BoundSchedule, stop: int) -> Clocks:
    """Returns the public schedule of the run's own activations, in its own blocks."""
    # blocks end where the run evaluates and saves, as in training
    cuts = [trainer.eval_every or max(1, stop // 20), *filter(None, [trainer.checkpoint_every])]

    def blocks(channel: ActivationChannel, seed: int) -> Iterator[tuple[int, Tensor]]:
        for block in bound.blocks(seed, 0, stop, cuts=cuts, replicates=channel.replicates):
            yield block.first, block.client

    return Clocks(bound.describe(), blocks)
