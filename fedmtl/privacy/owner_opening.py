"""From settings to an open channel of owners who act one at a time: noise calibrated to caps, and a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ConfigError
from .ledger import Ledger, read_header
from .mechanisms import Norm
from .owner_account import OwnerAccount
from .owner_channel import OwnerChannel, OwnerRecords, Published
from .owner_terms import owner_terms
from .settings import RecordPrivacy
from .sources import NoiseSource, SecureSource, SeededSource

Privacies = RecordPrivacy | Sequence[RecordPrivacy] | None


def open_owner_channel(
    privacy: Privacies,
    x: Sequence[Tensor],
    *,
    ids: tuple[str, ...],
    caps: np.ndarray,
    seed: int,
    replicates: int = 1,
    schedule: str = "",
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    replay: Sequence[tuple[int, str, Tensor]] | None = None,
    notes: tuple[str, ...] = (),
    published: Published | None = None,
) -> OwnerChannel:
    """Calibrate every owner's noise to its cap, open the ledger and return the channel.

    Args:
        privacy: settings; its ``epsilon`` is a budget for each owner over all its answers. None: nothing is clipped or
            noised. Repetitions may have settings of their own, R of them, that differ in ``epsilon`` or
            ``noise_multiplier`` alone; ``epsilon=inf`` is a repetition without noise.
        x: (n_i, D) rows of each owner's records.
        ids: of the owners.
        caps: (n,) int64, most answers of each owner, at least 1 where it may answer.
        seed: of seeded noise.
        replicates: R repetitions, each with its own noise; simulations, in memory.
        schedule: one phrase for the report.
        fingerprint, ledger_path, resume, replay, notes: as for :func:`~fedmtl.privacy.open_channel`.
        published: the accounting of an algorithm that runs under ``guarantee="paper"``, else None. The caps and the
            calibration are the same, and the epsilon is infinite.

    Raises:
        ConfigError: a budget that cannot be met, or repetitions of a private or a kept run.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without ``resume``.
    """
    settings = _settings(privacy, replicates)
    first = settings[0] if settings else None
    caps = np.asarray(caps, dtype=np.int64)
    secure = first is not None and first.source == "secure"
    if replicates > 1 and (secure or ledger_path is not None):
        raise ConfigError(f"{replicates} repetitions are a simulation: they need source='seeded' and no folder.")
    sources: list[NoiseSource] = [SecureSource() if secure else SeededSource(seed, r) for r in range(replicates)]
    norm: Norm = "l1" if first is not None and first.mechanism == "laplace" else "l2"
    records = [OwnerRecords.of(rows, norm) for rows in x]
    common: dict[str, Any] = {"ids": ids, "schedule": schedule, "replay": replay, "notes": notes}
    if first is None or all(one.noiseless for one in settings):
        account = OwnerAccount(caps, terms=None, ledger=None, replicates=replicates)
        return OwnerChannel(settings, records, sources, account, **common)
    delta, dimension = first.resolved_delta(sum(len(rows) for rows in x)), records[0].x.shape[1]
    header = read_header(ledger_path) if resume and ledger_path is not None else None
    terms = owner_terms(settings, ids, caps, dimension, delta, header)
    ledger = None
    if replicates == 1:
        about = {"account": "owner", "privacy": asdict(first), "delta": delta, "dimension": dimension}
        ledger = Ledger(
            ledger_path,
            about | terms.header(),
            fingerprint=fingerprint,
            replays_free=not secure,
            clients=len(ids),
            resume=resume,
        )
    account = OwnerAccount(terms.caps, terms=terms, ledger=ledger, replicates=replicates)
    in_memory = "in memory only: a crash forgets what was spent"
    return OwnerChannel(
        settings,
        records,
        sources,
        account,
        ledger_name=in_memory if ledger_path is None else ledger_path.name,
        published=published,
        **common,
    )


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
