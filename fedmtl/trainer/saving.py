"""The checkpoints of a run: when one is due, and the state that it gives back."""

from __future__ import annotations

import time
from collections.abc import Set

from torch import Tensor

from ..algorithms.base import State
from ..errors import ResumeError
from ..privacy import ActivationChannel, RoundChannel
from ..schedules import BoundBuffered
from .checkpoint import Checkpoint
from .evaluator import Evaluator
from .run_plan import RunPlan

_SECONDS = 20.0  # between checkpoints, if the settings name no number of steps


class Checkpoints:
    """The checkpoints of a run; none are written without a folder.

    Args:
        plan: of the run.
        channel: open.
        evaluator: whose history is kept.
    """

    def __init__(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, evaluator: Evaluator
    ) -> None:
        self._plan = plan
        self._channel = channel
        self._evaluator = evaluator
        self._saved = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns True if a checkpoint is due: by the settings, or after some seconds.

        Clocks differ between ranks, so that the answer of rank 0 counts.

        Args:
            step: number of steps done.
        """
        every = self._plan.settings.checkpoint_every
        # A number of steps is kept to whatever time they take, so that runs can be compared.
        if every:
            return step % every == 0
        return time.monotonic() - self._saved > _SECONDS

    def save(self, state: State, step: int) -> None:
        """Writes a checkpoint of the state after ``step`` steps.

        Each rank writes the rows of its clients, then rank 0 the rest: a checkpoint names files
        that are whole and on the disk.
        """
        plan = self._plan
        folder = plan.folder
        if folder is None:
            return
        tally = plan.problem.trainings()
        with plan.ranks.agree():
            own = state.private.save(folder.clients, step)
        files = {file: length for each in plan.ranks.gather(own) for file, length in each.items()}
        plan.ranks.share(
            lambda: Checkpoint(
                step=step,
                public=dict(state.public),
                clients=files,
                history=self._evaluator.history,
                fingerprint=plan.fingerprint,
                channel=self._channel.state(),
                ledger=self._channel.sync(),
                tally=tally,
                earlier={
                    f"v{version}/{name}": tensor
                    for version, public in state.earlier.items()
                    for name, tensor in public.items()
                },
            ).write(folder.checkpoint)
        )
        # The new checkpoint is on the disk, and nothing names the files of the one before.
        state.private.commit(folder.clients, files)
        self._saved = time.monotonic()


def restore(
    plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, checkpoint: Checkpoint
) -> None:
    """Puts the state and the channel back to those of a checkpoint, in place.

    Args:
        plan: of the run.
        channel: open.
        state: before the first step.
        checkpoint: of the run's folder.

    Raises:
        ResumeError: a checkpoint of another run, or one that the ledger does not hold.
    """
    folder = plan.folder
    assert folder is not None  # a checkpoint was read from it
    checkpoint.check(folder.checkpoint, plan.fingerprint)
    # A run may continue on another device than the one on which it began.
    device = plan.problem.initial.device
    state.earlier = _earlier(plan, channel, state.public.keys(), checkpoint)
    state.public = {name: tensor.to(device) for name, tensor in checkpoint.public.items()}
    with plan.ranks.agree():
        state.private.load(folder.clients, checkpoint.clients)
    channel.restore(checkpoint.channel)


def _earlier(
    plan: RunPlan,
    channel: RoundChannel | ActivationChannel,
    names: Set[str],
    checkpoint: Checkpoint,
) -> dict[int, dict[str, Tensor]]:
    """Returns the earlier public states of a checkpoint, by version.

    Args:
        plan: of the run that is resumed.
        channel: open.
        names: of the tensors of the public state before the first step.
        checkpoint: of the run.

    Raises:
        ResumeError: they are not those from which clients started that have not answered yet.
    """
    folder = plan.folder
    assert folder is not None  # a checkpoint was read from it
    needed: frozenset[int] = frozenset()
    sampler = None
    if isinstance(channel, RoundChannel):
        sampler = channel.sampler
    if isinstance(sampler, BoundBuffered) and checkpoint.step > 0:
        needed = sampler.kept(checkpoint.step - 1)
    earlier = {f"v{version}": dict[str, Tensor]() for version in needed}
    strange = [key for key in checkpoint.earlier if key.partition("/")[0] not in earlier]
    for key, tensor in checkpoint.earlier.items():
        version, _, name = key.partition("/")
        earlier.setdefault(version, {})[name] = tensor.to(plan.problem.initial.device)
    # later states may have more tensors, such as those of a server optimizer
    common = names & checkpoint.public.keys()
    if strange or any(not common <= public.keys() for public in earlier.values()):
        versions = ", ".join(map(str, sorted(needed))) or "none"
        raise ResumeError(
            f"{folder.checkpoint} lacks public states from which clients have started; after "
            f"step {checkpoint.step} it must hold the versions {versions}."
        )
    return {version: earlier[f"v{version}"] for version in needed}
