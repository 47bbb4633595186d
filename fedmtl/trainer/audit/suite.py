"""The audit of a whole configuration: every check of the release path, and the transcript of the algorithm.

    findings = audit_trainer(Trainer(algorithm=PMTL(), data=data, ...))
    print(table(findings))

Nothing is trained to the end and nothing is written: channels are opened as the run would open them, with ledgers in
memory or in temporary files.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...algorithms.base import Algorithm, Problem, State
from ...algorithms.local import Local
from ...data import FederatedDataset
from ...data.examples import Examples
from ...data.rows import csr, offsets_of
from ...privacy import BoundSampler, Channel, RecordPrivacy, SeededSource
from ...privacy.audit import CHECKS, Clocks, Effort, Finding, Setup, audit_channel
from ...privacy.audit.findings import exact, skipped
from ...privacy.channel import Recording
from ...privacy.noise.sources import NoiseSource
from ...random import derive_key
from ...schedules import BoundSchedule
from ..sources import releases_of, windows
from ..trainer import Trainer
from .independence import independence, public_shape
from .local_steps import drawn_records
from .publication import publication
from .rerun import states
from .runs import audit_runs

_ROUNDS, _PUBLISHED = 10, 2
_SHAPES = {"__get__", "__len__", "size", "dim", "ndimension", "numel", "is_floating_point"}  # which tell no number


def audit_trainer(
    trainer: Trainer, *, seed: int = 0, rounds: int = _ROUNDS, effort: Effort | None = None
) -> list[Finding]:
    """Make every check on the configuration of ``trainer``, on the CPU.

    Args:
        trainer: what would be run; its folder, baselines and callbacks are not used.
        seed: of the audit.
        rounds: rounds of the transcript, at most those of the run.
        effort: how much is drawn.

    Returns:
        The findings; none of them proves anything, and a refuted one contradicts what the run would state.
    """
    given = replace(trainer.first_run(), device="cpu", client_store="memory", callbacks=(), progress=False)
    trainer = _resolved(given)
    findings: list[Finding] = []
    setup = setup_of(trainer)
    if setup is not None:
        findings += audit_channel(setup, seed=seed, effort=effort)
        findings += audit_runs(trainer, setup, seed, CHECKS if effort is None else effort.checks)
        if setup.gradients is not None and not setup.one_at_a_time and (effort is None or "sampler" in effort.checks):
            findings += drawn_records(trainer, partial(replaced_data, trainer.data, counts=False), seed=seed)
    else:
        findings.append(skipped("release path", "privacy is none: neither clip nor noise is claimed"))
    if effort is None or "transcript" in effort.checks:
        findings.append(transcript(trainer, seed=seed, rounds=min(rounds, trainer.rounds)))
        findings += automatic_settings(given, trainer, seed=seed)
        findings += frozen_parameters(trainer, rounds=min(rounds, trainer.rounds))
        findings += published(trainer, seed=seed)
    if effort is None or "independence" in effort.checks:
        findings += independence(trainer, seed=seed, rounds=min(rounds, trainer.rounds))
        findings += [public_shape(trainer.data)] if trainer.privacy is not None else []
    return findings


def setup_of(trainer: Trainer) -> Setup | None:
    """Return how a run opens its channel, for :func:`fedmtl.privacy.audit.audit_channel`; None without privacy."""
    if trainer.privacy is None:
        return None
    problem, bound = trainer.problem(device="cpu"), trainer.bound
    with closing(problem.executor):
        return Setup(
            privacy=trainer.privacy,
            plans=releases_of(trainer.algorithm, problem, bound),
            schedule=bound if isinstance(bound, BoundSampler) else _clocks(trainer, bound, problem.rounds),
            steps=problem.rounds,
            tensors=tuple(b - a for a, b in itertools.pairwise(problem.layout.offsets)),
            counts=tuple(trainer.data.train.counts.tolist()),
        )


def _clocks(trainer: Trainer, bound: BoundSchedule, stop: int) -> Clocks:
    """Return the public schedule of the run's own activations, in its own blocks."""
    cuts = [trainer.eval_every or max(1, stop // 20), *filter(None, [trainer.checkpoint_every])]

    def blocks(channel: Channel, seed: int) -> Iterator[tuple[int, Tensor]]:
        for first, end in windows(0, stop, cuts):
            yield first, bound.events(seed, first, end, replicates=channel.replicates).client

    return Clocks(bound.describe(), blocks)


def transcript(trainer: Trainer, *, seed: int = 0, rounds: int = _ROUNDS) -> Finding:
    """Check that the public state is a function of the releases alone.

    A run's releases are recorded; the run is repeated with every client's examples and numbers of examples replaced,
    the secret coins drawn anew, and the releases forced to the recording. The public state, the shared model and the
    clip norms must be bit-identical from the start to the last round. Secret coins are the cohorts; under record-level
    privacy who takes part when and the numbers of examples are public and stay, the coins are the subsamples of
    records, and the clients' own models must be bit-identical too.
    """
    check = "transcript: public state"
    recording: list[tuple[int, str, Tensor]] = []
    first = public_states(trainer, trainer.data, rounds, record=recording)
    if first[-1] == _digest({}, None):
        return skipped(check, "the algorithm has no public state")
    data = replaced_data(trainer.data, seed, counts=not isinstance(trainer.privacy, RecordPrivacy))
    again = public_states(trainer, data, rounds, replay=recording, coins=derive_key(seed, "audit/coins") >> 1)
    differing = [index for index, (a, b) in enumerate(zip(first, again, strict=False)) if a != b]
    if len(first) != len(again):
        differing.append(min(len(first), len(again)))
    detail = f"states that differ of {len(first)}, data replaced, coins drawn anew and releases forced"
    if differing:
        when = "at the start" if differing[0] == 0 else f"after round {differing[0]}"
        detail = f"the public state depends on private data or coins otherwise than through the releases, first {when}"
    return exact(check, len(differing), detail)


def automatic_settings(given: Trainer, resolved: Trainer, *, seed: int = 0) -> list[Finding]:
    """Check that an algorithm chooses the settings that it fills in by itself, such as a step size, without a look at
    any record, and the same where every client's data are replaced; nothing without privacy, where it may read them.

    Such settings shape every client's numbers and are in no release, and all other checks take them as they are.

    Args:
        given: the configuration as it was written.
        resolved: the same with its settings from public rows, bounds and sizes.
        seed: of the data that are put in place.
    """
    if given.privacy is None or resolved.algorithm is given.algorithm:
        return []
    data = replaced_data(given.data, seed, counts=not isinstance(given.privacy, RecordPrivacy))
    read: list[str] = []
    again, found = _resolved(replace(given, data=data), read).algorithm, resolved.algorithm
    wrong = [one.name for one in fields(found) if getattr(found, one.name) != getattr(again, one.name)]  # type: ignore[arg-type]
    wrong += [f"what {name} reads of the records" for name in dict.fromkeys(read)]
    detail = "settings that an algorithm chose by itself and that depend on records, or differ where all are replaced"
    detail = f"automatic settings depend on private data: {', '.join(wrong[:3])}" if wrong else detail
    return [exact("transcript: automatic settings", len(wrong), detail)]


def published(trainer: Trainer, *, seed: int = 0) -> list[Finding]:
    """Make the check of :mod:`.publication` with the examples of all clients replaced; nothing without noise, where
    nothing is published."""
    if trainer.privacy is None or trainer.privacy.noiseless:
        return []
    data = replaced_data(trainer.data, seed, counts=not isinstance(trainer.privacy, RecordPrivacy))
    data = replace(data, notes=trainer.data.notes, verify=False)
    return publication(trainer, data, seed=seed, rounds=_PUBLISHED)


def frozen_parameters(trainer: Trainer, *, rounds: int = _ROUNDS) -> list[Finding]:
    """What is frozen in the model has every bit after a run that it had before; nothing where nothing is frozen.

    It is in every model that a run gives out, and no release covers it.

    Args:
        trainer: the configuration.
        rounds: rounds that are run.
    """
    fresh = trainer.problem(device="cpu")
    with closing(fresh.executor):
        before = {name: value.clone() for name, value in fresh.layout.frozen(fresh.module).items()}
    if not before:
        return []
    changed: list[str] = []

    def finish(problem: Problem, state: State) -> None:
        after = problem.layout.frozen(problem.module)
        changed.extend(name for name, value in before.items() if not torch.equal(value, after[name]))

    for _ in states(trainer, trainer.data, rounds, finish=finish):
        pass
    detail = f"tensors that a run changed, of {len(before)} that are frozen and public"
    detail = f"a run changes {', '.join(changed)}, frozen and public" if changed else detail
    return [exact("transcript: frozen parameters", len(changed), detail)]


def public_states(
    trainer: Trainer,
    data: FederatedDataset,
    rounds: int,
    *,
    record: list[tuple[int, str, Tensor]] | None = None,
    replay: Recording | None = None,
    coins: int | None = None,
) -> list[str]:
    """Return digests of the public state at the start and after every round, of the trainer's algorithm on ``data``.

    Releases are appended to ``record``, or forced to ``replay``; ``coins`` seeds the secret coins in place of the run.
    """
    private = isinstance(trainer.privacy, RecordPrivacy) and not isinstance(trainer.algorithm, Local)
    channels: list[Channel] = []

    def opened(channel: Channel) -> None:
        channels.append(channel)
        if coins is not None:
            _redraw(channel, SeededSource(coins))

    run = states(trainer, data, rounds, record=record, replay=replay, opened=opened)
    return [_digest_of(trainer.algorithm, channels[0], state, private=private) for state, _ in run]


def _redraw(channel: Channel, source: NoiseSource) -> None:
    """Take the secret coins of a channel from ``source``: its cohorts, or the records that take part, where these are
    secret and the cohorts are public."""
    if channel.draws is None:
        channel.sources = [source]
    else:
        channel.draws.sources = [source]


def replaced_data(data: FederatedDataset, seed: int, *, counts: bool = True) -> FederatedDataset:
    """Return the same clients with other examples, and other numbers of them: only public facts stay.

    Features become uniform numbers over half of their range, labels a skewed draw of the classes, floating targets
    uniform numbers; the total number of examples stays.

    Without ``counts`` the numbers of examples stay, which are public under record-level privacy.
    """
    generator = torch.Generator().manual_seed(derive_key(seed, "audit/replaced") >> 1)
    train, test = (_replaced_side(side, data.classes, generator, counts) for side in (data.train, data.test))
    return replace(data, train=train, test=test, notes=(), verify=False)


def _replaced_side(side: Examples, classes: int | None, generator: torch.Generator, counts: bool) -> Examples:
    if side.x.layout == torch.sparse_csr:
        values = _noise_like(side.x.values(), generator)
        x = csr(side.x.crow_indices(), side.x.col_indices(), values, side.x.shape[1])
    else:
        x = _noise_like(side.x, generator)
    if classes is None:
        y = _noise_like(side.y, generator)
    else:
        y = (torch.rand(side.y.shape, generator=generator) ** 2 * classes).to(side.y.dtype)
    return Examples(x, y, offsets_of(_replaced_counts(side.counts, generator)) if counts else side.offsets)


def _replaced_counts(counts: Tensor, generator: torch.Generator) -> Tensor:
    """Return other numbers of examples with the same total: shuffled, and one example moved in every second pair."""
    mixed = counts[torch.randperm(len(counts), generator=generator)].clone()
    half = len(mixed) // 2
    giving = (mixed[:half] > 1) & (torch.rand(half, generator=generator) < 0.5)
    mixed[:half] -= giving.to(mixed)
    mixed[half : 2 * half] += giving.to(mixed)
    return mixed


def _noise_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform numbers over the lower half of the range of ``values``, in its shape and dtype."""
    if not values.numel():
        return values.clone()
    low, high = float(values.min()), float(values.max())
    if values.dtype == torch.bool or not values.is_floating_point():
        top = int(low) + max(1, (int(high) - int(low)) // 2 + 1)
        return torch.randint(int(low), top, values.shape, generator=generator).to(values.dtype)
    if high <= low:
        high = low + 1.0
    return (low + 0.5 * (high - low) * torch.rand(values.shape, generator=generator)).to(values.dtype)


def _resolved(trainer: Trainer, read: list[str] | None = None) -> Trainer:
    """Return the trainer with its settings from public rows, chosen once for all that is checked; every operation on
    the numbers of a record is appended to ``read``."""
    problem = trainer.problem(device="cpu")
    with closing(problem.executor):
        if read is not None:
            problem = replace(problem, data=_watched(problem.data, read))
            read.clear()  # of what a data set looks at when it is made
        return trainer.resolved(problem)


def _watched(data: FederatedDataset, read: list[str]) -> FederatedDataset:
    """Return the same data, whose records append to ``read`` what is done with them."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ not in _SHAPES:
                read.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def watched(side: Examples) -> Examples:
        return replace(side, x=side.x.as_subclass(Watched), y=side.y.as_subclass(Watched))

    return replace(data, train=watched(data.train), test=watched(data.test), verify=False)


def _digest_of(algorithm: Algorithm, channel: Channel, state: State, *, private: bool) -> str:
    """Return the digest of all that is a function of the releases: under record-level privacy also the clients' own
    tensors."""
    public = dict(state.public)
    if channel.gradients is None:
        public |= {f"clip norm of {name}": value for name, value in channel.state().items()}
    if private:
        everyone = torch.arange(state.private.clients)
        public |= {f"own {name}": value for name, value in state.private.gather_all(everyone).items()}
    return _digest(public, algorithm.shared(state))


def _digest(public: dict[str, Tensor], shared: Tensor | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    tensors = dict(public) if shared is None else {**public, "shared model": shared}
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
