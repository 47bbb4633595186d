"""The updates of the asynchronous learner on plain arrays: equations (5), (6) and (7') of Farokhi et al. 2021."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...privacy import BoundedMeans, GradientMessage, ScaledRows
from ..linear.data import LinearLoss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .learner_data import LearnerData

Array = np.ndarray
Step = float | Array
_FEW = 32  # clients, of whose statistics each repetition's point is multiplied with all


class Updates:
    """Activations of R repetitions, on the arrays of the public state.

    Args:
        work: records and constants.
        state: arrays of the public state; :meth:`update` changes them in place.
        a: the step size, or (R,) one for each repetition.
        clipped: whether every record's gradient is clipped.
    """

    def __init__(self, work: LearnerData, state: dict[str, Array], a: Step, *, clipped: bool) -> None:
        settings = work.settings
        self.work, self.state, self.loss = work, state, LinearLoss(settings.loss)
        self.arrays = work.data.arrays
        self.central, self.own = state["theta_l"], state["theta"]
        self.top, n_copies = settings.theta_max, work.copies
        if isinstance(a, Array):  # by replicate
            if len(a) != len(self.central):
                raise ConfigError(f"AsyncLearner.kappa has {len(a)} values for {len(self.central)} replicates.")
            a = a[:, None]
        slope = 2 * settings.reg  # grad g(theta) = 2 reg theta
        self.keep_own = 1 - a * slope / 2  # (5): a N / (2 N)
        share = 0.5 if settings.guarantee == "sound" else (n_copies - 1) / n_copies
        self.keep_central = 1 - a * share * slope  # (7'), or the printed (7)
        self.gain = a * work.shares  # of Qbar_i in (5), (n,) or (R, n)
        self.padded = np.zeros((len(self.central) + 1, self.central.shape[1]))  # with a row for no repetition
        self.points = self.padded[:-1]
        self.single = len(self.points) == 1
        self.every = np.arange(len(self.points))
        self.grouped = work.copies < len(work.data.x)
        few = work.statistics is not None and len(work.data.x) <= _FEW
        single = self.single and work.statistics is not None
        means = BoundedMeans(self._means_of_one if single else self.means, self.means_together if few else None)
        stacked = None if self.single else work.stacked
        rows = ScaledRows(self.factors, together=None if stacked is None else self.factors_together)
        self.message: GradientMessage = rows if clipped else means

    # What clients compute at the query points

    def factors(self, client: int, which: Array, where: Array) -> Array:
        """Return (k, n_i) factors of the rows at the points of repetitions ``where``."""
        points = self.points if self.single else self.points[where]
        return self.loss.factors(points, *self.arrays[client])

    def factors_together(self, places: Array) -> Array:
        """Return (n, k, m) factors of all clients' rows at the points of repetitions ``places`` (n, k)."""
        assert self.work.stacked is not None
        x, y = self.work.stacked
        margins = np.matmul(self.padded.take(places, axis=0), x)
        if self.loss.name == "squared":  # of doubled records, see LearnerData.stacked
            return np.subtract(margins, y, out=margins)
        return self.loss.slopes(margins, y)

    def means(self, client: int, which: Array, where: Array) -> Array:
        """Return (k, p) mean gradients, equation (3)."""
        if self.work.statistics is None:
            x, _ = self.arrays[client]
            return self.factors(client, which, where) @ x / len(x)
        second, first = self.work.statistics[client]
        product: Array = self.points[where].dot(second)
        product -= first
        return product

    def _means_of_one(self, client: int, which: Array, where: Array) -> Array:
        """Compute as :meth:`means` from the statistics, of a single run."""
        assert self.work.statistics is not None
        second, first = self.work.statistics[client]
        product: Array = self.points.dot(second)
        product -= first
        return product

    def means_together(self, who: Array) -> Array:
        """Return (R, p) :meth:`means` of clients ``who`` (R,): the product of all clients' statistics with all points
        is one product, of which the acting client's columns are taken."""
        second, first = self.work.pooled_statistics
        products = self.points.dot(second).reshape(-1, first.shape[1])  # of every repetition and client
        means: Array = products.take(self.every * len(first) + who, axis=0)
        means -= first.take(who, axis=0)
        return means

    def query(self, who: Array) -> None:
        """Set the points at which clients ``who`` (R,) answer; -1 is nobody, whose point is not used."""
        if not self.grouped:
            at: Any = (slice(0, 1), who[0]) if self.single else (self.every, who)  # a view where there is one
            np.add(self.central, self.own[at], out=self.points)  # (6)
            self.points *= 0.5
            return
        where = np.flatnonzero(who >= 0)
        group = self.work.copy_of[who[where]]
        new = self._is_new(where, group)
        points = self.state["query"][where, group]
        points[new] = 0.5 * (self.central[where[new]] + self.own[where[new], group[new]])  # (6)
        self.points[where] = points

    # What the learner computes

    def update(self, who: Array, answer: Array) -> None:
        """Take the noised mean gradients (R, p) of ``who`` at the points of :meth:`query`."""
        if self.grouped:
            self._update_groups(who, answer)
            return
        if self.single and who[0] >= 0:
            at: Any = (slice(0, 1), who[0])
            answer = answer * self.gain[..., who[0]]
            if "events" in self.state:
                answer *= self._weights(at)
            self._move(at, slice(None), self.points, answer)
        elif not self.single and who.min() >= 0:
            at = (self.every, who)
            self._move(at, slice(None), self.points, answer * (self._gain(*at) * self._weights(at)))
        elif not self.single:
            some = np.flatnonzero(who >= 0)
            at = (some, who[some])
            self._move(at, some, self.points[some], answer[some] * (self._gain(*at) * self._weights(at)))

    def _move(self, at: Any, where: Any, tbar: Array, push: Array) -> None:
        """Apply (5) and (7') to copies ``at`` of repetitions ``where``; ``push`` is a N (n_i / n) Qbar_i, weighted."""
        moved = tbar * self._of(self.keep_own, where)
        moved -= push
        self.own[at] = np.minimum(np.maximum(moved, -self.top, out=moved), self.top, out=moved)
        moved = tbar * self._of(self.keep_central, where)
        self.central[where] = np.minimum(np.maximum(moved, -self.top, out=moved), self.top, out=moved)

    def _gain(self, where: Array, who: Array) -> Array:
        """Return (k, 1) gains of clients ``who`` in replicates ``where``."""
        gain: Array = self.gain[who] if self.gain.ndim == 1 else self.gain[where, who]
        return gain[:, None]

    @staticmethod
    def _of(factor: Any, where: Any) -> Any:
        """Return a factor of all replicates, or those of ``where``, (k, 1)."""
        return factor[where] if isinstance(factor, Array) else factor

    def _weights(self, at: Any) -> Any:
        """Return reciprocal observed frequencies (Remark 4) of copies that act now, (k, 1); 1 where not asked for."""
        if "events" not in self.state:
            return 1.0
        events, n_copies = self.state["events"], self.work.copies
        events[at] += 1
        total = events.sum(1)[at[0]]
        return ((total + n_copies) / (n_copies * (events[at] + 1)))[:, None]

    def _members(self, group: Array) -> Array:
        """Return (k, n) bool: the members of each group."""
        members: Array = self.work.copy_of[None, :] == group[:, None]
        return members

    def _is_new(self, where: Array, group: Array) -> Array:
        """Return (k,) bool: whether no member has answered the group's query yet."""
        new: Array = ~(self._members(group) & (self.state["answers"][where] > 0)).any(1)
        return new

    def _update_groups(self, who: Array, answer: Array) -> None:
        """Update where clients answer in groups: a group moves when its last member has answered."""
        answers, sums = self.state["answers"], self.state["sums"]
        where = np.flatnonzero(who >= 0)
        client, group = who[where], self.work.copy_of[who[where]]
        new = self._is_new(where, group)
        self.state["query"][where[new], group[new]] = self.points[where[new]]
        sums[where, client] += answer[where]
        answers[where, client] += 1
        members = self._members(group)
        done = (~members | (answers[where] > 0)).all(1)
        if not done.any():
            return
        where, group, members = where[done], group[done], members[done]
        gain = self.gain if self.gain.ndim == 1 else self.gain[where]
        share = np.where(members, gain / np.maximum(answers[where], 1), 0.0)  # of each sum, (k, n)
        push = np.einsum("kn,knp->kp", share, sums[where])
        at = (where, group)
        tbar = 0.5 * (self.central[where] + self.own[at])
        self._move(at, where, tbar, push * self._weights(at))
        sums[where] = np.where(members[:, :, None], 0.0, sums[where])
        answers[where] = np.where(members, 0.0, answers[where])

    def run(self, clients: Array, answers: Iterator[Array]) -> None:
        """Compute activations ``clients`` (S, R), in order; ``answers`` to :attr:`message` has the noised means (R, p)
        of each."""
        simple = not self.grouped and "events" not in self.state
        if simple and self.single:
            self._run_single(clients[:, 0], answers)
            return
        if simple and clients.min(initial=0) >= 0:
            self._run_several(clients, answers)
            return
        for who in clients:
            self.query(who)
            self.update(who, next(answers))

    def _run_single(self, clients: Array, answers: Iterator[Array]) -> None:
        """Compute :meth:`run` of a single run: the same equations on rows of one shape, faster than numbers."""
        shape, point, copies = self.points.shape, self.points, self.own[0][:, None]
        half, keep_own, keep_central = (np.full(shape, one) for one in (0.5, self.keep_own, self.keep_central))
        gains = np.repeat(self.gain.reshape(-1)[clients], shape[1]).reshape(-1, *shape)
        both = np.concatenate([point, self.central])  # the copy that moves, and the central model
        own, central = both[:1], both[1:]
        top = np.full_like(both, self.top)
        low = -top
        add, multiply, alike = np.add, np.multiply, bool((keep_own == keep_central).all())
        for client, gain in zip(clients.tolist(), gains, strict=True):
            if client < 0:
                next(answers)
                continue
            add(central, copies[client], point)  # (6)
            multiply(point, half, point)
            push = multiply(next(answers), gain)
            multiply(point, keep_central, central)  # (7')
            np.subtract(central if alike else multiply(point, keep_own), push, own)  # (5)
            np.maximum(both, low, out=both)
            np.minimum(both, top, out=both)
            copies[client] = own
        self.central[:] = central

    def _run_several(self, clients: Array, answers: Iterator[Array]) -> None:
        """Compute :meth:`run` of several repetitions in each of which somebody acts in every activation."""
        point, copies = self.points, self.own.reshape(-1, self.points.shape[1])
        gains = (self.gain[clients] if self.gain.ndim == 1 else self.gain[self.every, clients])[:, :, None]
        both = np.stack([point, self.central])  # the copies that move, and the central models
        own, central = both
        top = np.full_like(both, self.top)
        low = -top
        alike = np.array_equal(self.keep_own, self.keep_central)
        for where, gain in zip(self.every * self.work.copies + clients, gains, strict=True):
            np.add(central, copies.take(where, axis=0), out=point)  # (6)
            np.multiply(point, 0.5, out=point)
            push = next(answers) * gain
            np.multiply(point, self.keep_central, out=central)  # (7')
            np.subtract(central if alike else point * self.keep_own, push, out=own)  # (5)
            np.maximum(both, low, out=both)
            np.minimum(both, top, out=both)
            copies[where] = own
        self.central[:] = central
