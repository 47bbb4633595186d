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
the repetition. What is published is a function of the chosen candidate and of what its run
released.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .._check import Checked, Positive
from .._files import write_bytes
from .._rounding import rounded_up
from ..errors import ConfigError, PrivacyError, ResumeError
from ..privacy import (
    ClientPrivacy,
    FullParticipation,
    Ledger,
    NoiseSource,
    ReleasePlan,
    Rounds,
    SecureSource,
    SeededSource,
    draw_repetitions,
    open_channel,
)
from ..privacy.accounting.selection import halting_probability
from ..trainer.engine import Engine
from ..trainer.folder import COLUMNS, MODEL, RunFolder, write_json
from ..trainer.result import Result
from ..trainer.run import single_run, table_settings
from ..trainer.trainer import Trainer
from .plan import SCORE_BOUND, SearchPlan, check_candidates, plan_search
from .result import Repetition, SearchResult, search_report
from .scores import best_of, client_scores

SCORE = "search/score"
"""Name of the score's release; no algorithm has one of this name."""


@dataclass(frozen=True, kw_only=True)
class PrivateSearch(Checked):
    """Chooses the best of several trainers under one privacy budget.

    The budget is the ``privacy.epsilon`` that all candidates have, for the whole search; the noise
    is calibrated to it by Renyi divergences. It holds against outsiders, who see what is released:
    the chosen run's public files, its name and its noised score.

    Args:
        candidates: trainers by name, which differ only in what costs nothing: the algorithm's
            settings, the model and ``privacy.clip_norm``. Their folder, baselines, callbacks and
            progress are not used.
        mean: expected number of repetitions, at least 1.
        shape: eta of the law of the number of repetitions, at least 0: 0 logarithmic, 1 geometric,
            ``inf`` Poisson (which may release nothing).
        score_noise: standard deviation of the noise on a score, above 0. A score is the mean over
            all clients of the test metric of the client's own model.
        score_bound: where the metric is a mean squared error, the public b of the score
            ``1 - min(mse, b) / b``.
        folder: where the search is kept; ``None`` keeps nothing.
        progress: print one line for each repetition on standard error. Private, as the scores are.

    Raises:
        ConfigError: a value outside its range, or candidates that differ in what the accounting
            needs equal.

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
        super().__post_init__()
        halting_probability(self.mean, self.shape)
        check_candidates(self.candidates)
        regression = self._first.data.classes is None
        if regression and self.score_bound is None:
            raise ConfigError(
                "score_bound is missing; scores of a regression need a public bound on the mean "
                "squared error: --score-bound BOUND on the command line, "
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
        """Run every repetition, choose, and save what is released.

        Args:
            resume: continue the search in ``folder``. In seeded mode the result is that of an
                undisturbed search. In secure mode the repetition that was interrupted is begun
                anew: continued, it would have had other noise than the others and perhaps fewer
                steps, and could be told from them. Nothing of what it released before has left the
                private folder.

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
        with root.claimed(resume=resume):
            return searched(self, resume)


def searched(settings: PrivateSearch, resume: bool) -> SearchResult:
    """Returns the result of the search in a folder that is claimed; see
    :meth:`PrivateSearch.fit`."""
    root = RunFolder.of(settings.folder)
    search = _Search(settings, settings.plan(), root)
    header = {
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


@dataclass
class _Search:
    """One search, from its first coins to what it releases."""

    settings: PrivateSearch
    plan: SearchPlan
    root: RunFolder | None

    def __post_init__(self) -> None:
        self.names = tuple(self.settings.candidates)
        self.seed = self.settings._first.seed
        privacy = self.settings._first.privacy
        assert isinstance(privacy, ClientPrivacy)
        self.privacy = privacy
        self.secure = privacy.source == "secure"
        self.source: NoiseSource = SeededSource(self.seed)
        if self.secure:
            self.source = SecureSource()
        self.began = time.time()

    def run(self) -> SearchResult:
        # Repetitions before an interruption are not run again: their scores were seen.
        chosen, scores = self._begin()
        best_run: Result | None = None
        for index in range(len(scores), len(chosen)):
            began = time.monotonic()
            self._clear(index)
            result = self._train(index, chosen[index])
            scores.append(self._score(index, chosen[index], result))
            self._write(chosen, scores)
            if best_of(scores) == index:
                best_run = result
            self._say(index, chosen[index], scores[-1], time.monotonic() - began)
        best = best_of(scores)
        if best is not None and best_run is None:  # the best was trained before an interruption
            best_run = self._train(best, chosen[best])
        return self._result(chosen, scores, best, best_run)

    # The secret coins, and what is kept of them

    @property
    def _state(self) -> Path | None:
        if self.root is None:
            return None
        return self.root.private / "search.json"

    def _begin(self) -> tuple[list[int], list[float]]:
        """Returns the candidate of each repetition, and the scores that are there already. Drawn
        once, before any training."""
        path = self._state
        if path is not None and path.exists():
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                self.began = float(state["began"])
                return [self.names.index(name) for name in state["candidates"]], list(
                    state["scores"]
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ResumeError(
                    f"{path} cannot be read as the state of this search: {error!r}"
                ) from error
        if path is not None and (path.parent / "candidates").exists():
            raise ResumeError(
                f"{path} is missing, but repetitions have been run. Their number cannot be drawn "
                f"again, since scores may have been seen; put the file back, or start a search in "
                f"another folder."
            )
        # The number of repetitions is secret; it is drawn once and kept in the private folder.
        count = draw_repetitions(
            self.source.coins("search/repetitions", 0), self.settings.mean, self.settings.shape
        )
        uniform = np.asarray(self.source.coins("search/candidates", 0).uniform(max(1, count)))[
            :count
        ]
        chosen = [int(number) for number in np.floor(uniform * len(self.names))]
        self._write(chosen, [])
        return chosen, []

    def _write(self, chosen: list[int], scores: list[float]) -> None:
        if self._state is not None:
            names = [self.names[k] for k in chosen]
            write_json(self._state, {"began": self.began, "candidates": names, "scores": scores})

    # One repetition

    def _place(self, index: int) -> RunFolder | None:
        if self.root is None:
            return None
        return RunFolder(self.root.private / "candidates" / str(index))

    def _coins(self, index: int) -> NoiseSource:
        """Returns the coins of the cohorts and noise of one repetition: all that its number
        addresses."""
        if self.secure:
            return SecureSource()
        return SeededSource(self.seed, index + 1)

    def _clear(self, index: int) -> None:
        """Takes away what an interruption has left of a repetition without a score, where its noise
        cannot be drawn again."""
        place = self._place(index)
        if place is not None and self.secure and place.root.exists():
            shutil.rmtree(place.root)

    def _train(self, index: int, candidate: int) -> Result:
        """Returns the run of one repetition, from where it stopped; nothing is left to do in one
        that has ended."""
        name = self.names[candidate]
        trainer = self.plan.trainers[name]  # has no folder of its own
        place = self._place(index)
        if place is not None:
            trainer = replace(trainer, folder=place.root)
        result = single_run(trainer, place is not None, Engine(coins=self._coins(index)))
        # NaN is refused too.
        if not result.epsilon <= self.plan.budget:
            raise PrivacyError(
                f"candidate {name!r}: a run spent epsilon = {rounded_up(result.epsilon, 6)}, more "
                f"than the {rounded_up(self.plan.budget, 6)} that the search accounts for; "
                f"nothing of it is released."
            )
        return result

    def _score(self, index: int, candidate: int, result: Result) -> float:
        """Returns the noised mean score, through a channel of its own with its own ledger."""
        n = len(result.ids)
        place = self._place(index)
        path: Path | None = None
        if place is not None:
            path = place.private / "score.jsonl"
        plans = (ReleasePlan(name=SCORE, dimension=1),)
        privacy = ClientPrivacy(
            clip_norm=SCORE_BOUND,
            noise_multiplier=self.settings.score_noise * n / SCORE_BOUND,
            delta=self.plan.delta,
            source=self.privacy.source,
        )
        channel = open_channel(
            privacy,
            plans,
            FullParticipation().bind(n),
            seed=self.seed,
            steps=1,
            source=self._coins(index),
            fingerprint=self.plan.fingerprints[self.names[candidate]],
            ledger_path=path,
            resume=not self.secure,
        )
        assert isinstance(channel, Rounds)
        with closing(channel):
            everyone = channel.draw(0)
            channel.begin(0, everyone)
            # Scores less 1/2 are released: their range is symmetric, and halves the sensitivity.
            # a client that has nothing to test on adds nothing
            scores = torch.full((n,), 0.5, dtype=torch.float64)
            own = torch.tensor([client in result.personal_accuracy for client in result.ids])
            scores[own] = client_scores(
                torch.tensor(list(result.personal_accuracy.values())), self.settings.score_bound
            )
            return float(channel.release(SCORE, (scores - 0.5)[:, None], everyone)) + 0.5

    def _say(self, index: int, candidate: int, score: float, seconds: float) -> None:
        if self.settings.progress:
            text = f"noised score {score:.3f}, {seconds:.0f} s"
            print(
                f"private: repetition {index + 1}, {self.names[candidate]}: {text}",
                file=sys.stderr,
                flush=True,
            )

    # What is released

    def _result(
        self, chosen: list[int], scores: list[float], best: int | None, run: Result | None
    ) -> SearchResult:
        settings = self.settings
        accuracy = "test accuracy"
        if settings.score_bound is not None:
            accuracy = f"1 - min(mse, {settings.score_bound:g}) / bound"
        own = self.plan.report
        releases = 0  # of no repetition
        if run is not None:
            own = run.privacy
            releases = own.releases + 1  # the score is one more
        shape: float | str = settings.shape
        if math.isinf(settings.shape):  # which JSON has no number for
            shape = "inf"
        search = {
            "candidates": list(self.names),
            "mean": settings.mean,
            "shape": shape,
            "score": f"mean over all clients of the {accuracy} of their own models",
            "score_noise": settings.score_noise,
        }
        budget = float(self.privacy.epsilon or 0.0)
        report = search_report(
            own, search, epsilon=self.plan.epsilon, budget=budget, releases=releases
        )
        folder: Path | None = None
        if self.root is not None:
            folder = self.root.root
        if run is not None:  # any look at the chosen run costs the whole search
            history = [row | {"epsilon": report.epsilon} for row in run.history]
            run = replace(run, privacy=report, history=history, final=history[-1], folder=folder)
        chosen_name: str | None = None
        score: float | None = None
        if best is not None:
            chosen_name = self.names[chosen[best]]
            score = scores[best]
        result = SearchResult(
            chosen=chosen_name,
            score=score,
            best=run,
            privacy=report,
            repetitions=tuple(
                Repetition(self.names[k], value) for k, value in zip(chosen, scores, strict=True)
            ),
            folder=folder,
        )
        if self.root is not None:
            self._publish(self.root, result, best)
        return result

    def _publish(self, root: RunFolder, result: SearchResult, best: int | None) -> None:
        write_json(root.public / "privacy.json", result.privacy.to_dict())
        write_json(root.public / "search.json", {"chosen": result.chosen, "score": result.score})
        if best is None or result.best is None or result.chosen is None:
            return
        place = self._place(best)
        assert place is not None  # the search has a folder
        for name in (MODEL, COLUMNS):
            file = place.public / name
            if file.exists():
                write_bytes(root.public / name, file.read_bytes())
        trainer = self.settings.candidates[result.chosen]
        settings = table_settings(trainer, result.best.module) | {"candidate": result.chosen}
        root.write_result(result.best, settings, trainer.data)

    def date(self, public: Path) -> None:
        """Dates the published files at the start of the search: its end would tell the number of
        repetitions."""
        # The folder last, since writing a file changes its date.
        for path in (*public.iterdir(), public):
            os.utime(path, (self.began, self.began))
