"""The number of processes that compute a run, and the settings that need a single one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithms.base import Problem
from ..errors import ConfigError
from ..privacy import BoundSampler
from ..ranks import Ranks

if TYPE_CHECKING:
    from .trainer import Trainer


NO_FORK = (
    "a run has others on Linux only, and where there is no GPU (torchrun starts them anywhere)"
)
_FEW_CLIENTS = 8  # of a round, for a process: the work of fewer does not pay for its start


def in_one_process(settings: Trainer) -> str:
    """Returns the setting that needs all clients in one process; empty if there is none."""
    if settings.audit is not None:
        return "audit=Interval(...)"
    if settings.runs > 1:
        return f"{settings.runs} replicates"
    if settings.algorithm.one_at_a_time:
        return f"{settings.algorithm.name}, whose clients act one at a time,"
    return ""


def processes(settings: Trainer, problem: Problem) -> int:
    """Returns the number of processes that compute a run.

    It is the number that is asked for; otherwise one for each core if clients train models of their
    own, and at most one for 8 clients of a round.

    Args:
        settings: of the run.
        problem: on the ranks that were started.

    Raises:
        ConfigError: several processes for replicates, canaries, or clients that act one at a time.
    """
    algorithm = settings.algorithm
    schedule = settings.bound_schedule
    requested = settings.execution.processes
    ranks = problem.ranks
    kind = in_one_process(settings)
    size = ranks.size
    if kind and size > 1:
        raise ConfigError(
            f"A run with {kind} needs one process, and {size} were started. Start it "
            "without torchrun."
        )
    if requested is not None and requested > 1 and (kind or size > 1 or not Ranks.can_fork()):
        if kind:
            reason = f"a run with {kind} needs one"
        elif size > 1:
            reason = f"{size} were started by torchrun"
        else:
            reason = NO_FORK
        raise ConfigError(f"execution.processes is {requested}, but {reason}; leave it out.")
    if not ranks.may_fork or kind or not isinstance(schedule, BoundSampler):
        return 1
    # A computation for all clients at once has the threads of one process.
    if algorithm.local is None or algorithm.all_at_once or problem.initial.device.type != "cpu":
        return requested or 1
    return requested or min(
        problem.executor.execution.processes or 1, max(1, int(schedule.denominator) // _FEW_CLIENTS)
    )
