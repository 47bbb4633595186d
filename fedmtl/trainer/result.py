"""What a run returns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._rounding import rounded_up
from ..data import RowBound
from ..errors import ConfigError
from ..models import BoundedInputs
from ..privacy import PrivacyReport
from ..privacy.noise.grid import GridValue
from ..stacked import Layout
from .evaluation import shares

if TYPE_CHECKING:
    from .finetuning import Finetuned


@dataclass(frozen=True)
class Result:
    """The outcome of a run. Everything but ``shared`` and ``privacy`` is computed on private data.

    Attributes:
        algorithm: its name.
        epsilon: spent.
        privacy: everything the epsilon depends on.
        history: one mapping per evaluated round.
        ids: the clients' ids.
        personal: (n, D), the clients' models.
        shared: (D,), the released model, if the algorithm has one.
        personal_accuracy: the metric of each client's own model on its test examples, by id, without the clients that
            have no test examples.
        shared_accuracy: the same for the shared model; ``None`` without one.
        final: the last row of the history.
        stopped: ``"rounds"``, or ``"budget"`` when the privacy budget ended the run, ``"early"`` when
            it stopped improving.
        metric: ``"accuracy"``, ``"mse"`` or, for many labels an example, ``"recall_at_5"``.
        baselines: results of the comparison runs, by name.
        folder: of the run, if any.
        replicates: where several runs were computed together, the last numbers of each: its ``budget``, its
            ``repetition`` and the numbers. ``history`` then has a row for each round and budget, with means (``loss``,
            ...) and percentiles (``loss_p5``, ``loss_p25``, ``loss_p50``, ``loss_p75``, ``loss_p95``); ``final`` is
            that of the last budget, and the models and the scores by client are those of the first run.
        step: what a round is: ``"round"``, or ``"activation"`` where clients act one at a time.
        released: in secure mode, the last value of every release with the public grid on which it lies.
        chosen: settings that were ``"auto"``, and what public rows and bounds made of them.
        bound: on the features of a record, for an algorithm that has one: records were scaled down to it for training
            and for every score, and the models of :meth:`model_for` and :meth:`shared_model` do so themselves.
        shortened: the share of the training and of the test records, by side, that were; not private.
        finetuned: where the clients finetuned after the run, the scores before and after; ``personal``,
            ``personal_accuracy`` and ``final`` are then those of the finetuned models.
    """

    algorithm: str
    epsilon: float
    privacy: PrivacyReport
    history: list[dict[str, Any]]
    ids: tuple[str, ...]
    personal: Tensor
    shared: Tensor | None
    personal_accuracy: dict[str, float]
    shared_accuracy: dict[str, float] | None
    final: dict[str, Any]
    stopped: str
    metric: str
    data_name: str
    module: nn.Module
    folder: Path | None = None
    baselines: Mapping[str, Result] = field(default_factory=dict)
    replicates: list[dict[str, Any]] | None = None
    step: str = "round"
    released: Mapping[str, GridValue] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    bound: RowBound | None = None
    shortened: Mapping[str, float] = field(default_factory=dict)
    finetuned: Finetuned | None = None

    def model_for(self, client: str) -> nn.Module:
        """A client's personal model, in evaluation mode.

        Raises:
            ConfigError: no client of that id.
        """
        if client not in self.ids:
            raise ConfigError(f"There is no client {client!r}; the clients are {self.ids[0]!r} .. {self.ids[-1]!r}.")
        return self._module(self.personal[self.ids.index(client)])

    def shared_model(self) -> nn.Module:
        """The released model, in evaluation mode.

        Raises:
            ConfigError: the algorithm has none.
        """
        if self.shared is None:
            raise ConfigError(f"{self.algorithm} has no shared model.")
        return self._module(self.shared)

    def _module(self, row: Tensor) -> nn.Module:
        module = copy.deepcopy(self.module).to(device=row.device, dtype=row.dtype)
        Layout.of(module).load(module, row)
        return (module if self.bound is None else BoundedInputs(module, self.bound)).eval()

    @property
    def bands(self) -> list[dict[str, Any]]:
        """The last row of the history of each budget; only one without ``replicates``."""
        return [row for row in self.history if row["round"] == self.final["round"]]

    def numbers(self) -> dict[str, Any]:
        """The summary's numbers, as plain values."""
        values = {"algorithm": self.algorithm, "stopped": self.stopped, "metric": self.metric, **self.chosen}
        values["scored_clients"] = len(self.personal_accuracy)
        values |= {} if self.finetuned is None else self.finetuned.numbers()
        if self.beside_local is not None:
            values |= dict(zip(("better_than_local", "as_local", "worse_than_local"), self.beside_local, strict=True))
        values |= {f"shortened_{side}": share for side, share in self.shortened.items()}
        if self.replicates is None:
            return values | {k: v for k, v in self.final.items() if k != "time"}
        rows = [{k: v for k, v in row.items() if k != "time"} for row in self.bands]
        return values | {"round": self.final["round"], "bands": rows, "replicates": self.replicates}

    def summary(self) -> str:
        """The printed summary: accuracy over clients, comparisons, and the privacy block."""
        last = self.final
        clients, scored = f"{len(self.ids):,} clients", len(self.personal_accuracy)
        if scored < len(self.ids):
            clients += f" ({scored:,} scored, the others have nothing to test on)"
        head = f"{self.algorithm} on {self.data_name}: {clients}, {last['round']:,} {self.step}s"
        if self.stopped == "budget":
            head += " (stopped: the privacy budget is spent)"
        if self.stopped == "early":
            head += " (stopped early)"
        lines = self._one_run() if self.replicates is None else self._several_runs()
        if self.chosen:
            text = "; ".join(f"{name} {_plain(value)}" for name, value in self.chosen.items())
            lines = [f"chosen from public rows and bounds: {text}", "", *lines]
        return "\n".join([head, "", *lines, "", self.privacy.text()])

    def _one_run(self) -> list[str]:
        last, metric = self.final, self.metric
        lines = [
            "not private (computed on the clients' test data)",
            f"  personal models   {metric} {last[metric]:.4g}   worst tenth {last['worst_tenth']:.4g}   "
            f"spread {last['spread']:.4g}" + (f"   nMSE {last['nmse']:.4g}" if "nmse" in last else ""),
        ]
        if self.finetuned is not None:
            before = last[f"{'global' if self.finetuned.start == 'shared' else 'trained'}_{metric}"]
            lines += self.finetuned.lines(metric, before)
        if self.shared is not None:
            lines.append(f"  shared model      {metric} {last[f'global_{metric}']:.4g}")
        if self.bound is not None and any(self.shortened.values()):
            lines.append(f"  records           {_shares(self.shortened, self.bound)}")
        if "objective" in last:
            cost = f"   cost of privacy psi {last['psi']:.4g}" if "psi" in last else ""
            lines.append(f"  training records  objective {last['objective']:.5g}{cost}")
        if self.baselines:
            lines.append("  comparison, not released:")
            for name, run in self.baselines.items():
                for label, row in run.stages(name):
                    lines.append(
                        f"    {label:<23} {metric} {row[metric]:.4g}   worst tenth {row['worst_tenth']:.4g}   "
                        f"spread {row['spread']:.4g}   epsilon {rounded_up(run.epsilon, 3)}"
                    )
            if (beside := self.beside_local) is not None:
                better, equal, worse = beside
                lines.append(
                    f"  beside local      with this run's models {better:.0%} of the clients are better off, "
                    f"{equal:.0%} as well, {worse:.0%} worse"
                )
            lines.append(f"  best of these     {self._best()}")
        return lines

    def stages(self, name: str) -> list[tuple[str, dict[str, float]]]:
        """What the run's personal models score, by label: as trained, and finetuned where they were. ``name`` is that
        of the run, and each mapping has the ``metric``, ``worst_tenth`` and ``spread``."""
        names = (self.metric, "worst_tenth", "spread")
        last = {key: self.final[key] for key in names}
        if self.finetuned is None:
            return [(name, last)]
        before = {key: self.final[f"trained_{key}"] for key in names}
        return [(name, before), (f"{name} + finetuning", last)]

    def scores(self, name: str) -> list[tuple[str, Mapping[str, float]]]:
        """The scores by client of :meth:`stages`, by label."""
        if self.finetuned is None:
            return [(name, self.personal_accuracy)]
        return [(name, self.finetuned.scores["personal"]), (f"{name} + finetuning", self.personal_accuracy)]

    @property
    def beside_local(self) -> tuple[float, float, float] | None:
        """Shares of the clients whose personal model scores better than, as, and worse than what they have alone; None
        without the baseline ``"local"``."""
        if "local" not in self.baselines:
            return None
        alone = self.baselines["local"].personal_accuracy
        both = [name for name in self.personal_accuracy if name in alone]
        own, others = (torch.tensor([scores[name] for name in both]) for scores in (self.personal_accuracy, alone))
        return shares(own, others, metric=self.metric)

    def _best(self) -> str:
        """The best mean score of this run and of its baselines, and what comes next."""
        metric, sign = self.metric, 1 if self.metric == "mse" else -1
        own = [(f"{label} (this run)", row) for label, row in self.stages(self.algorithm)]
        others = [stage for name, run in self.baselines.items() for stage in run.stages(name)]
        first, second = sorted([*own, *others], key=lambda stage: sign * stage[1][metric])[:2]
        return f"{first[0]}, {first[1][metric]:.4g}; next {second[0]}, {second[1][metric]:.4g}"

    def _several_runs(self) -> list[str]:
        assert self.replicates is not None
        rows = self.bands
        names = [name for name in (self.metric, "nmse", "worst_tenth", "objective", "psi") if name in rows[0]]
        lines = [
            "not private (computed on the clients' data): "
            f"mean of {len(self.replicates) // len(rows)} runs, and 5th to 95th percentile",
            "".join([f"  {'epsilon':>8}", *(f"  {name.replace('_', ' '):>26}" for name in names)]),
        ]
        for row in rows:
            budget = "-" if row["budget"] is None else rounded_up(row["budget"], 6)
            cells = [_band(row, name) for name in names]
            lines.append("".join([f"  {budget:>8}", *(f"  {cell:>26}" for cell in cells)]))
        return lines


def _shares(shortened: Mapping[str, float], bound: RowBound) -> str:
    shares = ", ".join(f"{share:.1%} ({side})" for side, share in shortened.items())
    return f"{shares} scaled down to {bound.norm.upper()} norm {bound.bound:g}, for training and for scores"


def _band(row: Mapping[str, Any], name: str) -> str:
    spread = f" [{row[f'{name}_p5']:.4g}, {row[f'{name}_p95']:.4g}]" if f"{name}_p5" in row else ""
    return f"{row[name]:.4g}{spread}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items() if name != "class")
    return f"{value:g}" if isinstance(value, float) else str(value)
