"""From settings to an open channel of owners who act one at a time: noise calibrated to caps, and a ledger."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .._check import positive_int
from ..errors import ConfigError
from .ledger import Ledger, read_header
from .noise.laws import Norm
from .noise.registry import LAWS
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .owner_account import OwnerAccount
from .owner_channel import OwnerChannel
from .owner_first import WarmStartRelease
from .owner_records import Participation, RecordSums
from .owner_report import PublishedClaim
from .owner_terms import owner_terms
from .settings import RecordPrivacy

Privacies = RecordPrivacy | Sequence[RecordPrivacy] | None


def open_owner_channel(
    privacy: Privacies,
    x: Sequence[Tensor] | None,
    *,
    ids: tuple[str, ...],
    caps: np.ndarray,
    seed: int,
    replicates: int = 1,
    allocation: Sequence[np.ndarray] | None = None,
    first: WarmStartRelease | None = None,
    arrivals: Sequence[np.ndarray] | None = None,
    rate: float | np.ndarray = 1.0,
    counts: np.ndarray | None = None,
    dimension: int | None = None,
    schedule: str = "",
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    replay: Sequence[tuple[int, str, Tensor]] | None = None,
    notes: tuple[str, ...] = (),
    published: PublishedClaim | None = None,
) -> OwnerChannel:
    """Calibrate every owner's noise to its cap, open the ledger and return the channel.

    Args:
        privacy: settings; its ``epsilon`` is a budget for each owner over all its answers. None: nothing is clipped or
            noised. Repetitions may have settings of their own, R of them, that differ in ``epsilon`` or
            ``noise_multiplier`` alone; ``epsilon=inf`` is a repetition without noise.
        x: (n_i, D) rows of each owner's records; None where gradients are not multiples of rows.
        ids: of the owners.
        caps: (n,) int64, most answers of each owner, at least 1 where it may answer.
        seed: of seeded noise.
        replicates: R repetitions, each with its own noise; simulations, in memory.
        allocation: public positive weights (caps[i],) of the first, second, ... answer of owner i, of any mean: the
            noise of an answer is z / weight for weights scaled to mean 1, and one z makes all answers cost the budget.
            None: equal ones.
        first: an extra release of every owner that has data, within the same budget; see
            :meth:`OwnerChannel.release_first`.
        arrivals: int64 (n_i,) of each owner, the activation from which each record is there; public. None: from the
            start.
        rate: q in (0, 1], one for all or (n,): every record takes part in an answer with that probability, by secret
            coins of its own; sums are divided by q n_i. Not for :meth:`OwnerChannel.release_bounded`.
        counts, dimension: n_i (n,) int64 and D, where there are no rows ``x``.
        schedule: one phrase for the report.
        fingerprint, ledger_path, resume, replay, notes: as for :func:`~fedmtl.privacy.open_channel`.
        published: the accounting of an algorithm that runs under ``guarantee="paper"``, else None. The caps and the
            calibration are the same, and the epsilon is infinite.

    Raises:
        ConfigError: a budget that cannot be met, weights or numbers of records that do not fit, or repetitions of a
            private or a kept run.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without ``resume``.
    """
    settings = _settings(privacy, replicates)
    base = settings[0] if settings else None
    caps = _whole("caps", caps, len(ids))
    secure = base is not None and base.source == "secure"
    if replicates > 1 and (secure or ledger_path is not None):
        raise ConfigError(f"{replicates} repetitions are a simulation: they need source='seeded' and no folder.")
    sources: list[NoiseSource] = [SecureSource() if secure else SeededSource(seed, r) for r in range(replicates)]
    counts, dimension = _shape(x, counts, dimension, len(ids))
    norm: Norm = "l2" if base is None else LAWS[base.mechanism].norm
    sums = RecordSums(x, counts, dimension, bound=math.inf if base is None else base.clip_norm, norm=norm)
    rates = _rates(rate, counts.size)
    participation = Participation(counts, arrivals, rates, sources)
    shares = None if first is None else first.shares(counts)
    common: dict[str, Any] = {"ids": ids, "schedule": schedule, "replay": replay, "notes": notes, "first": first}
    if base is None or all(one.noiseless for one in settings):
        account = OwnerAccount(caps, terms=None, ledger=None, replicates=replicates)
        return OwnerChannel(settings, sums, participation, sources, account, **common)
    delta = base.resolved_delta(int(counts.sum()))
    header = read_header(ledger_path) if resume and ledger_path is not None else None
    terms = owner_terms(
        settings, ids, caps, dimension, delta, allocation=allocation, shares=shares, rates=rates, header=header
    )
    ledger = None
    if replicates == 1:
        about: dict[str, Any] = {"account": "owner", "privacy": asdict(base), "delta": delta, "dimension": dimension}
        about["clients"] = len(ids)
        if published is not None:
            about["guarantee"] = "paper"  # what was charged so stays refuted
        public = _digest(counts, *(arrivals or ()), *([] if first is None else [first.sensitivity]))
        ledger = Ledger(
            ledger_path,
            about | terms.header() | {"public": public},
            fingerprint=fingerprint,
            replays_free=not secure,
            clients=len(ids),
            resume=resume,
        )
    account = OwnerAccount(terms.caps, terms=terms, ledger=ledger, replicates=replicates)
    in_memory = "in memory only: a crash forgets what was spent"
    return OwnerChannel(
        settings,
        sums,
        participation,
        sources,
        account,
        ledger_name=in_memory if ledger_path is None else ledger_path.name,
        published=published,
        **common,
    )


def _shape(
    x: Sequence[Tensor] | None, counts: np.ndarray | None, dimension: int | None, owners: int
) -> tuple[np.ndarray, int]:
    """Numbers of records, and the length of a gradient."""
    if x is not None:
        if not len(x) or len(x) != owners or any(rows.ndim != 2 or rows.shape[1] != x[0].shape[1] for rows in x):
            raise ConfigError(f"x must have rows (n_i, D) of each of {owners} owners, with the same D of at least 1.")
        counts, dimension = np.array([len(rows) for rows in x], dtype=np.int64), x[0].shape[1]
    if counts is None or dimension is None:
        raise ConfigError("A channel of owners needs their rows x, or counts and dimension.")
    positive_int("open_owner_channel", dimension=dimension)
    return _whole("counts", counts, owners), int(dimension)


def _whole(name: str, values: np.ndarray, owners: int) -> np.ndarray:
    """(n,) int64 whole numbers of at least 0."""
    given = np.asarray(values)
    if given.shape != (owners,) or given.dtype.kind not in "iu" or bool((given < 0).any()):
        raise ConfigError(
            f"{name} has shape {given.shape} and dtype {given.dtype}; it must be a whole number of at least 0 for each "
            f"of {owners} owners."
        )
    return given.astype(np.int64)


def _rates(rate: float | np.ndarray, owners: int) -> np.ndarray:
    """(n,) float64 probabilities."""
    given = np.asarray(rate)
    if (
        given.shape not in ((), (owners,))
        or given.dtype.kind not in "fiu"
        or not bool(((given > 0) & (given <= 1)).all())
    ):
        raise ConfigError(f"rate is {rate!r}; it must be in (0, 1], one for all or one for each of {owners} owners.")
    return np.broadcast_to(given.astype(np.float64), (owners,))


def _digest(*arrays: np.ndarray) -> str:
    """Of public numbers that the noise depends on: a run goes on with the same ones."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        given = np.ascontiguousarray(array)
        digest.update(f"{given.dtype} {given.shape} ".encode() + given.tobytes())
    return digest.hexdigest()


def _settings(privacy: Privacies, replicates: int) -> tuple[RecordPrivacy, ...]:
    """Settings of all repetitions, or of each, which differ in the budgets alone."""
    if privacy is None or isinstance(privacy, RecordPrivacy):
        return () if privacy is None else (privacy,)
    given = tuple(privacy)
    if len(given) != replicates:
        raise ConfigError(
            f"{len(given)} privacy settings for {replicates} repetitions; give one to each, or one to all."
        )
    for one in given:
        if replace(one, epsilon=1.0, noise_multiplier=None) != replace(given[0], epsilon=1.0, noise_multiplier=None):
            raise ConfigError(f"Repetitions differ in epsilon or noise_multiplier alone, not as {given[0]} and {one}.")
    return given
