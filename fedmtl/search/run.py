"""The run of a search: its secret coins, its repetitions and its releases."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._files import write_bytes, write_json
from .._rounding import rounded_up
from ..errors import PrivacyError, ResumeError
from ..privacy import (
    ClientPrivacy,
    FullParticipation,
    NoiseSource,
    ReleasePlan,
    RoundChannel,
    SecureSource,
    SeededSource,
    draw_repetitions,
    open_channel,
)
from ..trainer.engine import Engine
from ..trainer.fit import single_run
from ..trainer.folder import COLUMNS, MODEL, RunFolder
from ..trainer.outcome import table_settings, write_result
from ..trainer.result import Result
from .choice import best_of, client_scores
from .plan import SCORE_BOUND, SearchPlan
from .result import Repetition, SearchResult, search_report

if TYPE_CHECKING:
    from .search import PrivateSearch

SCORE = "search/score"
"""Name of the score's release; no algorithm has one of this name."""


@dataclass
class SearchRun:
    """One search, from its first coins to its releases."""

    settings: PrivateSearch
    plan: SearchPlan
    root: RunFolder | None

    def __post_init__(self) -> None:
        self.names = tuple(self.settings.candidates)
        first = next(iter(self.settings.candidates.values()))
        self.seed = first.seed
        privacy = first.privacy
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

    # The secret coins, and their file

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
        """Deletes the folder of a repetition that was interrupted before its score, if its noise
        cannot be drawn again."""
        place = self._place(index)
        if place is not None and self.secure and place.root.exists():
            shutil.rmtree(place.root)

    def _train(self, index: int, candidate: int) -> Result:
        """Returns the run of one repetition, from its last checkpoint on; nothing of a run that has
        ended is computed again."""
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
        assert isinstance(channel, RoundChannel)
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

    # Releases

    def _result(
        self, chosen: list[int], scores: list[float], best: int | None, run: Result | None
    ) -> SearchResult:
        settings = self.settings
        accuracy = "test accuracy"
        if settings.score_bound is not None:
            accuracy = f"1 - min(error, {settings.score_bound:g}) / bound"
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
        write_result(root, result.best, settings, trainer.data)

    def date(self, public: Path) -> None:
        """Dates the published files at the start of the search: its end would tell the number of
        repetitions."""
        # The folder last, since writing a file changes its date.
        for path in (*public.iterdir(), public):
            os.utime(path, (self.began, self.began))
