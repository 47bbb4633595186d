"""The checks that the public state of a run, and its published files, depend on the data through
the releases only.

Data. If the protected unit is a client, its records and their number are private,
and so they are in a run without privacy; the cohorts and their sizes belong to the mechanism and
are no client's data. If the unit is a record, and for algorithms whose clients act one at a time,
the numbers of records are public.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms.local_only import Local
from ..contrib.automatic import Automatic, automatic
from ..data import FederatedDataset
from ..data.examples import Examples
from ..errors import ConfigError
from ..privacy import Privacy, RecordPrivacy
from ..random import derive_key
from ..trainer.run_fingerprint import describe
from ..trainer.trainer import Trainer
from .findings import Finding, exact, skipped
from .other_clients import replaced_data
from .rerun import AGAIN, RELEASED, Notes, differing, released_again, watched, when
from .setup import Setup

_DEPENDS = "depends on private data or coins otherwise than through the releases"
_SHAPES = {
    "__get__",
    "__len__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "is_floating_point",
    "is_contiguous",
}
"""Operations on records that tell none of their numbers."""


def transcript(trainer: Trainer, first: Notes, *, seed: int = 0, rounds: int) -> list[Finding]:
    """Checks that the public state, and the published files, are functions of the releases.

    The run is repeated with every client's examples and numbers of examples replaced, the secret
    coins drawn anew, and the releases forced to those of the ``first`` one. The public state, the
    shared model and the clip norms must be bit-identical from the start to the last round. So must
    be the published files, if there are any, the privacy report, its signal-to-noise ratios, and
    the way in which the run ends, but for the random number of the run and the released values,
    which are compared with the recording.

    Secret coins are the cohorts, unless clients are charged when they take part. Under record-level
    privacy the cohorts and the numbers of examples are public and stay, the coins are those of the
    subsamples of records, and the tensors that clients keep must be bit-identical too.

    Frozen parameters have the same bits before and after the run: no release covers them.
    """
    records = isinstance(trainer.privacy, RecordPrivacy)
    check = "transcript: public state"
    data = replaced_data(trainer.data, seed, counts=not records)
    # shifted, as a seed of PyTorch is a signed number of 64 bits
    coins = derive_key(seed, "audit/coins") >> 1
    again = watched(
        trainer,
        rounds,
        data=data,
        coins=coins,
        replay=first.releases,
        publish=bool(first.published),
    )
    # local training keeps models that no release covers, and does not claim otherwise
    store = records and not isinstance(trainer.algorithm, Local)
    pairs = sorted(
        differing(first.public, again.public)
        + (differing(first.store, again.store) if store else [])
    )
    wrong = [f"the public state {_DEPENDS}, first {when(block)}" for block, _, _ in pairs]
    detail = (
        f"tensors that differ of {len(first.public):,}, data replaced, coins drawn anew and "
        "releases forced"
    )
    findings = [exact(check, wrong, detail)]
    # nothing was compared, which confirms nothing
    if not first.public and not (store and first.store):
        findings = [skipped(check, "the algorithm has no public state")]
    if first.frozen:
        changed = [
            f"a run changes {name}, frozen and public"
            for name, moved in first.frozen.items()
            if moved
        ]
        detail = f"tensors that a run changed, of {len(first.frozen)} that are frozen and public"
        findings.append(exact("transcript: frozen parameters", changed, detail))
    if not first.published:
        return findings
    files = first.published
    others = again.published
    strange = [
        f"{name} {_DEPENDS}"
        for name in sorted(files | others)
        if files.get(name) != others.get(name)
    ]
    detail = (
        f"of {len(files)} files and facts that differ, data replaced, coins drawn anew and "
        "releases forced"
    )
    findings.append(exact("transcript: published files", strange, detail))
    if first.values:
        detail = f"of {len(first.values)} values in public/{RELEASED} are none that was released"
        findings.append(
            exact("transcript: published values", list(first.values.values()).count(False), detail)
        )
    return findings


def released_rows(trainer: Trainer, first: Notes, setup: Setup) -> Finding:
    """Checks that the releases of a run are, to the last bit, those of another channel that is
    handed the same rows, and that these are rows of clients that were drawn for the round.

    All other checks hand rows to releases. A run may add up long rows as clients make them, and
    draws noise in threads meanwhile. Compared are the first two rounds of the run without a tap, as
    every run is, with the rows of the ``first`` one; and those of a run with a clip norm of 2^-10
    of its own, so that rows are clipped.
    """
    privacy = trainer.privacy
    runs = [(trainer, first)]
    wrong = 0
    if (
        privacy is not None
        and isinstance(privacy.clip_norm, float)
        and all(p.form == "vector" for p in setup.releases)
    ):
        tight = replace(
            trainer, privacy=replace(privacy, clip_norm=privacy.clip_norm * 2.0**-10), finetune=None
        )
        runs.append((tight, watched(tight, AGAIN)))
    for run, noted in runs:
        again, strangers = released_again(run, noted)
        # without a tap, as every other run is: with one, rows are added up by another class
        plain = watched(replace(run, finetune=None), AGAIN, tapped=False)
        made, handed = (
            {(step, name): value for step, name, value in of} for of in (plain.releases, again)
        )
        # equal to no release, so that one that only one of the runs has counts as wrong
        missing = torch.zeros(0)
        same = (
            torch.equal(made.get(key, missing), handed.get(key, missing)) for key in made | handed
        )
        wrong += strangers + [*same].count(False)
    detail = (
        "releases of a run that are not those of its rows handed to a channel, or of clients "
        "that were not drawn"
    )
    return exact("transcript: releases", wrong, detail)


def automatic_settings(written: Trainer, trainer: Trainer, *, seed: int = 0) -> list[Finding]:
    """Checks that the settings that a run fills in by itself, those of an algorithm such as a step
    size and all that ``algorithm=auto`` chooses, are chosen without a look at any record, and the
    same if every client's data are replaced; nothing without privacy, in which they may be read.

    Such settings shape every client's numbers and are in no release, and all other checks take them
    as they are.

    Args:
        written: the configuration as it was written.
        trainer: the same with its settings from public rows, bounds and sizes.
        seed: of the data that are put in place.
    """
    privacy = written.privacy
    pairs = list[tuple[Any, Any]]()
    if privacy is None:
        return []
    data = replaced_data(written.data, seed, counts=not isinstance(privacy, RecordPrivacy))
    read = list[str]()
    if trainer.algorithm is not written.algorithm:
        pairs.append((trainer.algorithm, resolved(replace(written, data=data), read).algorithm))
    if (
        first := _of_no_setting(written.data, privacy)
    ) is not None and first.algorithm == written.algorithm:
        pairs.append((first, _of_no_setting(_watched(data, read), privacy)))
    if not pairs:
        return []
    wrong = [
        f"the automatic {name} differs"
        for before, after in (map(describe, pair) for pair in pairs)
        for name in before
        if after is None or before[name] != after[name]
    ]
    wrong += [
        f"automatic settings follow what {name} reads of the records"
        for name in dict.fromkeys(read)
    ]
    detail = (
        "settings that a run chose by itself and that depend on records, or differ where all "
        "are replaced"
    )
    return [exact("transcript: automatic settings", wrong, detail)]


def _of_no_setting(data: FederatedDataset, privacy: Privacy) -> Automatic | None:
    """Returns the automatic settings of data, all of them; None if there are none for such
    data."""
    try:
        return automatic(data, replace(privacy, clip_norm=None))
    except ConfigError:
        return None


def resolved(trainer: Trainer, read: list[str] | None = None) -> Trainer:
    """Returns the trainer with its settings from public rows, chosen once for all that is checked;
    every operation on the numbers of a record is appended to ``read``."""
    problem = trainer.problem()
    if read is not None:
        problem = replace(problem, data=_watched(problem.data, read))
    return trainer.resolved(problem)


def _watched(data: FederatedDataset, read: list[str]) -> FederatedDataset:
    """Returns the same data, whose records append to ``read`` the name of every operation on their
    numbers."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__ not in _SHAPES:
                read.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def watched(side: Examples) -> Examples:
        return replace(side, x=side.x.as_subclass(Watched), y=side.y.as_subclass(Watched))

    before = len(read)
    made = replace(data, train=watched(data.train), test=watched(data.test), verify=False)
    del read[before:]  # the operations by which a data set is made
    return made
