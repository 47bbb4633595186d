"""Private hyper-parameter search: the best of a secret number of runs, under one epsilon.

Papernot, Steinke, "Hyperparameter tuning with Renyi differential privacy", ICLR 2022.

    search = PrivateSearch(candidates={"lam=0.1": Trainer(...), "lam=1": Trainer(...)}, mean=4)
    result = search.fit()
    print(result.summary())

One repetition draws a candidate uniformly, trains it under calibrated noise, and releases its score
with noise. It is repeated K times, K drawn from a public law and kept secret, and the repetition
with the best noised score is the output; nothing else of the search leaves the private folder.

The bound holds for repetitions of one and the same mechanism, of which only the output of the best
is seen: which of them it was must stay as secret as their number. So all have the seed of the
search, and with it the start, the batches and everything else that is public; they differ only in
their secret coins (candidate, cohorts, noise), which in seeded mode are addressed by the number of
the repetition. The published files are a function of the chosen candidate and of the releases of
its run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .._check import Checked, Positive
from .._files import Json
from ..errors import ConfigError, ResumeError
from ..privacy import Ledger
from ..privacy.accounting.selection import halting_probability
from ..trainer.folder import RunFolder
from ..trainer.trainer import Trainer
from .plan import SearchPlan, check_candidates, plan_search
from .result import SearchResult
from .run import SearchRun


@dataclass(frozen=True, kw_only=True)
class PrivateSearch(Checked):
    """Chooses the best of several trainers under one privacy budget.

    The budget is the ``privacy.epsilon`` that all candidates have, for the whole search; the noise
    is calibrated to it by Renyi divergences. It holds against outsiders, which see the releases:
    the chosen run's public files, its name and its noised score.

    Args:
        candidates: trainers by name, which differ only in settings that do not enter the cost: the
            algorithm's settings, the model and ``privacy.clip_norm``. Their folder, baselines,
            callbacks and progress are not used.
        mean: expected number of repetitions, at least 1.
        shape: eta of the law of the number of repetitions, at least 0: 0 logarithmic, 1 geometric,
            ``inf`` Poisson (which may release nothing).
        score_noise: standard deviation of the noise on a score, above 0. A score is the mean over
            all clients of the test metric of the client's own model.
        score_bound: of a regression, the public b of the score ``1 - min(error, b) / b``; the error
            is the mean squared one, with the loss of a quantile the pinball loss.
        folder: in which the search is kept; ``None`` keeps nothing.
        progress: print one line for each repetition on standard error. Private, as the scores are.

    Raises:
        ConfigError: a value outside its range, or candidates that differ in a setting that enters
            the cost.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD
        >>> from fedmtl import PrivateSearch, Trainer, load_data, models
        >>> data = load_data("digits", clients=20)
        >>> def candidate(lr):
        ...     return Trainer(
        ...         algorithm=FedAvg(local=LocalSGD(lr=lr)),
        ...         data=data,
        ...         model=models.softmax_regression(),
        ...         schedule=FullParticipation(),
        ...         privacy=ClientPrivacy(clip_norm=0.5, epsilon=20.0),
        ...         rounds=2,
        ...         progress=False,
        ...     )
        >>> candidates = {str(lr): candidate(lr) for lr in (0.1, 0.5)}
        >>> search = PrivateSearch(candidates=candidates, score_noise=0.1, progress=False)
        >>> search.fit().privacy.epsilon <= 20.0
        True
    """

    candidates: Mapping[str, Trainer]
    mean: float = 4.0
    shape: float = 1.0
    score_noise: Positive = 0.01
    score_bound: Positive | None = None
    folder: str | Path | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        halting_probability(self.mean, self.shape)
        check_candidates(self.candidates)
        regression = self._first.data.classes is None
        if regression and self.score_bound is None:
            raise ConfigError(
                "score_bound is missing; scores of a regression need a public bound on the mean "
                "error (the main metric): --score-bound BOUND on the command line, "
                "PrivateSearch(score_bound=BOUND) in Python."
            )
        if not regression and self.score_bound is not None:
            raise ConfigError(
                "score_bound is for regression; the accuracy is in [0, 1]. Leave it out."
            )

    @property
    def _first(self) -> Trainer:
        return next(iter(self.candidates.values()))

    def plan(self) -> SearchPlan:
        """Returns the noise and the accounting of the search, before any work.

        Raises:
            ConfigError, PrivacyError: as :meth:`fit`.
        """
        return plan_search(
            self.candidates, mean=self.mean, shape=self.shape, score_noise=self.score_noise
        )

    def fit(self, *, resume: bool = False) -> SearchResult:
        """Runs every repetition, chooses the best one, and saves the releases.

        Args:
            resume: continue the search in ``folder``. In seeded mode the result is that of an
                undisturbed search. In secure mode the repetition that was interrupted is begun
                anew: continued, it would have had other noise than the others and perhaps fewer
                steps, and could be told from them. None of its earlier releases has left the
                private folder.

        Returns:
            The chosen run, with the epsilon of the whole search.

        Raises:
            ConfigError: a budget that cannot be met, or candidates whose releases differ.
            PrivacyError: a combination that Renyi accounting does not cover.
            ResumeError: the folder holds a run and ``resume`` is false, or another search.
        """
        root = RunFolder.of(self.folder)
        if root is None and resume:
            raise ResumeError("There is nothing to resume without a folder.")
        if root is None:
            return searched(self, resume)
        # Two processes in one folder would release two choices under one charge.
        with root.claimed(resume=resume):
            return searched(self, resume)


def searched(settings: PrivateSearch, resume: bool) -> SearchResult:
    """Returns the result of the search in a folder that is claimed; see
    :meth:`PrivateSearch.fit`."""
    root = RunFolder.of(settings.folder)
    search = SearchRun(settings, settings.plan(), root)
    header: dict[str, Json] = {
        "account": "search",
        "mean": settings.mean,
        "shape": str(settings.shape),
        "score_noise": settings.score_noise,
        "score_bound": settings.score_bound,
        "noise_multiplier": search.plan.noise_multiplier,
        "candidates": dict(search.plan.fingerprints),
    }
    # The search's own ledger pins its settings and locks its folder; charges are in those of its
    # runs. A copy of a secure search would release a second choice.
    path: Path | None = None
    if root is not None:
        path = root.ledger
    with Ledger(
        path, header, fingerprint="search", replays_free=True, resume=resume, single=search.secure
    ):
        result = search.run()
    if root is not None:
        root.write_lists()
        search.date(root.public)
    return result
