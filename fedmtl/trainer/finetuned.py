"""What finetuning made of a run, for its result and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from ..algorithms.finetune import Finetune
from .summary import ByClient, percent


@dataclass(frozen=True)
class Finetuned:
    """What finetuning made of a run, by client id. All of it is computed on private data.

    Attributes:
        settings: of the finetuning.
        start: ``"shared"`` or ``"personal"``, the model that every client started from.
        metric: the main metric.
        by_client: scores of each client's ``"shared"`` (where there is one), ``"personal"`` and ``"finetuned"`` model,
            and ``"local"`` where clients chose, each by metric and client.
        chosen: name of the model that each client chose; empty where they did not choose.
        better, equal, worse: shares of the clients whose final model scores better than, as, or worse than the model
            that finetuning started from; of those whose finetuning did not diverge, NaN without any.
        diverged: ids of the clients whose finetuning did: they keep the model that they started from, and are in no
            comparison.
    """

    settings: Finetune
    start: str
    metric: str
    by_client: Mapping[str, ByClient]
    chosen: Mapping[str, str]
    better: float
    equal: float
    worse: float
    diverged: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[str, Mapping[str, float]]:
        """The main metric of every model, by client."""
        return {name: scores[self.metric] for name, scores in self.by_client.items()}

    def numbers(self) -> dict[str, Any]:
        """Plain values for tables."""
        found: dict[str, Any] = {
            "finetune": self.settings.kind,
            "finetuned_from": self.start,
            "better": self.better,
            "equal": self.equal,
            "worse": self.worse,
            "finetuning_diverged": len(self.diverged),
        }
        names = [name for name in self.scores if any(name == one for one in self.chosen.values())]
        for name in names:
            found[f"chose_{name}"] = sum(one == name for one in self.chosen.values()) / len(self.chosen)
        return found

    def lines(self) -> list[str]:
        """The lines of the summary."""
        found = [f"  finetuning: {self.settings.text()}, from the {self.start} model"]
        if not isnan(self.equal):
            three = percent((self.better, self.equal, self.worse))
            found.append(f"    better/equal/worse than the {self.start} model for {three} % of the clients")
        if self.diverged:
            found.append(f"    diverged for {len(self.diverged):,} clients, who keep the {self.start} model")
        if self.chosen:
            shares = ", ".join(
                f"{key.removeprefix('chose_')} {share:.0%}"
                for key, share in self.numbers().items()
                if key.startswith("chose_")
            )
            found.append(f"  chosen by each client on its own validation records: {shares}")
        return found
