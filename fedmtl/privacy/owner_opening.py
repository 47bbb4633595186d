"""From settings to an open channel of owners who act one at a time: noise calibrated to caps, and a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import ConfigError
from .account import Cost
from .calibration import calibrate_multiplier
from .composition import largest_uses
from .ledger import Ledger, read_header
from .mechanisms import Norm
from .owner_account import OwnerAccount
from .owner_channel import OwnerChannel, OwnerRecords, Published
from .release import LAWS, StepEvent
from .settings import RecordPrivacy
from .sources import NoiseSource, SecureSource, SeededSource


def open_owner_channel(
    privacy: RecordPrivacy | None,
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
            noised.
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
    caps = np.asarray(caps, dtype=np.int64)
    secure = privacy is not None and privacy.source == "secure"
    if replicates > 1 and (secure or ledger_path is not None):
        raise ConfigError(f"{replicates} repetitions are a simulation: they need source='seeded' and no folder.")
    sources: list[NoiseSource] = [SecureSource() if secure else SeededSource(seed, r) for r in range(replicates)]
    norm: Norm = "l1" if privacy is not None and privacy.mechanism == "laplace" else "l2"
    records = [OwnerRecords.of(rows, norm) for rows in x]
    if privacy is None or privacy.noiseless:
        account = OwnerAccount(caps, cost=None, ledger=None, replicates=replicates)
        return OwnerChannel(privacy, records, sources, account, ids=ids, schedule=schedule, replay=replay, notes=notes)
    delta = privacy.resolved_delta(sum(len(rows) for rows in x))
    header = read_header(ledger_path) if resume and ledger_path is not None else None
    dimension = records[0].x.shape[1]
    if header is not None and "caps" in header:
        multipliers, caps = list(header["noise_multipliers"]), np.array(header["caps"], dtype=np.int64)
    else:
        multipliers, caps = _terms(privacy, ids, caps, dimension, delta)
    events = tuple(_step(privacy, z, dimension) for z in multipliers)
    ledger = None
    if replicates == 1:
        about = {
            "account": "owner",
            "privacy": asdict(privacy),
            "delta": delta,
            "caps": caps.tolist(),
            "noise_multipliers": multipliers,
            "dimension": dimension,
        }
        ledger = Ledger(
            ledger_path, about, fingerprint=fingerprint, replays_free=not secure, clients=len(ids), resume=resume
        )
    account = OwnerAccount(caps, cost=Cost(delta, events), ledger=ledger, replicates=replicates)
    in_memory = "in memory only: a crash forgets what was spent"
    return OwnerChannel(
        privacy,
        records,
        sources,
        account,
        multipliers=np.array(multipliers),
        ids=ids,
        schedule=schedule,
        ledger_name=in_memory if ledger_path is None else ledger_path.name,
        notes=notes,
        replay=replay,
        published=published,
    )


def _step(privacy: RecordPrivacy, multiplier: float, dimension: int) -> StepEvent:
    return StepEvent(LAWS[privacy.mechanism](multiplier).event(dimension), privacy.accountant)


def _terms(
    privacy: RecordPrivacy, ids: tuple[str, ...], caps: np.ndarray, dimension: int, delta: float
) -> tuple[list[float], np.ndarray]:
    """Noise multiplier and hard cap of each owner."""
    multipliers, capped = [], caps.copy()
    for k, budget in enumerate(privacy.budgets(ids)):
        if privacy.noise_multiplier is None:
            assert budget is not None
            uses = max(1, int(caps[k]))
            multipliers.append(
                calibrate_multiplier(lambda z: _step(privacy, z, dimension), target=budget, delta=delta, uses=uses)
            )
            continue
        multipliers.append(float(privacy.noise_multiplier))
        if budget is not None:
            step = _step(privacy, privacy.noise_multiplier, dimension)
            fitting = largest_uses(step.event, budget, delta, accountant=step.accountant)
            capped[k] = min(int(capped[k]), fitting)
    return multipliers, capped
