"""The interface of an audit that takes part in a run.

The trainer knows audits by this interface alone; :class:`fedmtl.Interval` of :mod:`fedmtl.audit` is
one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..privacy import ActivationChannel, GradientPlan, ReleasePlan, RoundChannel

if TYPE_CHECKING:
    from .trainer import Trainer


class RunAudit(ABC):
    """An audit in the run: it adds canaries to the participants and measures their effect on the
    releases.

    The trainer calls the hooks in the order in which they are listed here. A run with an audit has
    one replicate and one process.

    Attributes:
        canaries: number of canaries.
        outside: the part of the report of privacy that epsilon does not cover because of the audit.
    """

    canaries: int
    outside: ClassVar[str]

    @abstractmethod
    def check(self, settings: Trainer) -> None:
        """Refuses a run that cannot be audited.

        Args:
            settings: of the run.

        Raises:
            ConfigError: the setting that must change.
        """

    @abstractmethod
    def channel_class(
        self, settings: Trainer, plans: Sequence[ReleasePlan | GradientPlan]
    ) -> type[RoundChannel | ActivationChannel]:
        """Returns the class of the channel of a run.

        Args:
            settings: of the run.
            plans: its releases.
        """

    @abstractmethod
    def plant(self, settings: Trainer, channel: Any, counts: Tensor) -> None:
        """Adds the canaries to a channel that is open and has released nothing.

        Args:
            settings: of the run.
            channel: of the class that :meth:`channel_class` gives.
            counts: int64 (n,), number of records of each client without canaries.

        Raises:
            ConfigError: the run releases nothing.
            PrivacyError: the canaries cannot measure the claim of this run.
        """

    @abstractmethod
    def certificate(self, channel: Any, epsilon: float, change: Tensor | None) -> dict[str, Any]:
        """Returns the certificate of a finished run, which JSON can hold.

        Args:
            channel: of the run, with its canaries.
            epsilon: the claim.
            change: (D,), change of the shared model from its start to its end; None if there is no
                shared model.
        """
