"""The updates of the asynchronous learner on plain arrays: equations (5), (6) and (7') of Farokhi et al. 2021."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, PrivacyError
from ...privacy import OwnerChannel
from ..linear.data import LinearLoss

if TYPE_CHECKING:
    from .learner_data import LearnerData

Step = float | np.ndarray


class Updates:
    """The updates of one block, on the arrays of the state."""

    def __init__(self, work: LearnerData, state: dict[str, np.ndarray], channel: OwnerChannel, a: Step) -> None:
        settings, counts = work.settings, work.data.counts.numpy()
        self.work, self.state, self.loss = work, state, LinearLoss(settings.loss)
        self.central, self.own = state["theta_l"], state["theta"]
        self.top, n_copies = settings.theta_max, work.copies
        if isinstance(a, np.ndarray):  # by replicate
            if len(a) != len(self.central):
                raise ConfigError(f"AsyncLearner.kappa has {len(a)} values for {len(self.central)} replicates.")
            a = a[:, None]
        slope = 2 * settings.reg  # grad g(theta) = 2 reg theta
        self.keep_own = 1 - a * slope / 2  # (5): a N / (2 N)
        share = 0.5 if settings.guarantee == "sound" else (n_copies - 1) / n_copies
        self.keep_central = 1 - a * share * slope  # (7'), or the printed (7)
        self.gain = (
            a * n_copies * counts / counts.sum() * work.weights[work.copy_of]
        )  # of Qbar_i in (5), (n,) or (R, n)
        self.points = np.zeros_like(self.central)
        self.query = torch.from_numpy(self.points)
        self.alone = len(self.points) == 1
        self.every = np.arange(len(self.points))
        self.release = self._door(channel)

    def _door(self, channel: OwnerChannel) -> Callable[[], np.ndarray]:
        settings = self.work.settings
        if settings.bound == "domain":
            xi = settings.xi
            if xi is None or xi > channel.bound:
                raise PrivacyError(
                    f"The domain bounds gradients by Xi = {xi:g}, but clip_norm is {channel.bound:g}; set "
                    f"clip_norm to at least {xi:g}, or bound='clip'."
                )
            return lambda: channel.release_bounded(self.means).numpy()
        if self.work.statistics is not None and channel.bound == np.inf:
            return lambda: channel.release_bounded(self.means).numpy()  # nothing is clipped
        return lambda: channel.release(self.scales).numpy()

    # What owners compute at the query points

    def scales(self, owner: int, where: Tensor) -> Tensor:
        """(k, n_i) factors of the rows at the points of repetitions ``where``."""
        points = self.query if self.alone else torch.from_numpy(self.points[where.numpy()])
        return self.loss.scale(points, self.work.data.x[owner], self.work.data.y[owner])

    def means(self, owner: int, where: Tensor) -> Tensor:
        """(k, p) mean gradients, equation (3)."""
        if self.work.statistics is None:
            x = self.work.data.x[owner]
            return self.scales(owner, where) @ x / len(x)
        second, first = self.work.statistics[owner]
        return torch.addmm(first, self.query if self.alone else self.query[where], second, beta=-1)

    # What the learner computes

    def move(self, who: np.ndarray) -> None:
        """One activation of every repetition, owners ``who`` (R,); -1 is nobody."""
        at: Any = (slice(0, 1), who[0]) if self.alone else (self.every, who)  # a view where there is one
        np.add(self.central, self.own[at], out=self.points)  # (6); nobody's is not used
        self.points *= 0.5
        answer = self.release()
        active = self.alone and who[0] >= 0
        if active or (not self.alone and who.min() >= 0):
            gain = self.gain[..., who[0]] if self.alone else self._gain(self.every, who)
            self._update(at, slice(None), self.points, answer * (gain * self._weights(at)))
        elif not self.alone:
            some = np.flatnonzero(who >= 0)
            at = (some, who[some])
            self._update(at, some, self.points[some], answer[some] * (self._gain(*at) * self._weights(at)))

    def _update(self, at: Any, where: Any, tbar: np.ndarray, push: np.ndarray) -> None:
        """(5) and (7') at copies ``at`` of repetitions ``where``; ``push`` is a N (n_i / n) Qbar_i, weighted."""
        moved = tbar * self._of(self.keep_own, where)
        moved -= push
        self.own[at] = np.minimum(np.maximum(moved, -self.top, out=moved), self.top, out=moved)
        moved = tbar * self._of(self.keep_central, where)
        self.central[where] = np.minimum(np.maximum(moved, -self.top, out=moved), self.top, out=moved)

    def _gain(self, where: np.ndarray, who: np.ndarray) -> np.ndarray:
        """(k, 1) gains of owners ``who`` in replicates ``where``."""
        return (self.gain[who] if self.gain.ndim == 1 else self.gain[where, who])[:, None]

    @staticmethod
    def _of(factor: Any, where: Any) -> Any:
        """A factor of all replicates, or those of ``where``, (k, 1)."""
        return factor[where] if isinstance(factor, np.ndarray) else factor

    def _weights(self, at: Any) -> Any:
        """Reciprocal observed frequencies (Remark 4) of copies that act now, (k, 1); 1 where they are not asked for."""
        if "events" not in self.state:
            return 1.0
        events, n_copies = self.state["events"], self.work.copies
        events[at] += 1
        total = events.sum(1)[at[0]]
        return ((total + n_copies) / (n_copies * (events[at] + 1)))[:, None]

    def move_groups(self, who: np.ndarray) -> None:
        """As :meth:`move` where owners answer in groups: a group moves when its last member has answered."""
        answers, sums, query, copy_of = (
            self.state["answers"],
            self.state["sums"],
            self.state["query"],
            self.work.copy_of,
        )
        where = np.flatnonzero(who >= 0)
        owner, group = who[where], copy_of[who[where]]
        members = copy_of[None, :] == group[:, None]  # (k, n)
        new = ~(members & (answers[where] > 0)).any(1)
        query[where[new], group[new]] = 0.5 * (self.central[where[new]] + self.own[where[new], group[new]])  # (6)
        self.points[where] = query[where, group]
        answer = self.release()
        sums[where, owner] += answer[where]
        answers[where, owner] += 1
        done = (~members | (answers[where] > 0)).all(1)
        if not done.any():
            return
        where, group, members = where[done], group[done], members[done]
        gain = self.gain if self.gain.ndim == 1 else self.gain[where]
        share = np.where(members, gain / np.maximum(answers[where], 1), 0.0)  # of each sum, (k, n)
        push = np.einsum("kn,knp->kp", share, sums[where])
        at = (where, group)
        tbar = 0.5 * (self.central[where] + self.own[at])
        self._update(at, where, tbar, push * self._weights(at))
        sums[where] = np.where(members[:, :, None], 0.0, sums[where])
        answers[where] = np.where(members, 0.0, answers[where])
