"""The scores of the models of a run in the order in which they were made, and their comparison with
local training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .comparison import Stage, verdict

if TYPE_CHECKING:
    from .result import Result


def stages_of(result: Result, name: str, *, shared: bool = False) -> list[Stage]:
    """Returns the scores of the personal models of a run: as trained, then finetuned.

    Args:
        result: of the run.
        name: of the run, which begins the labels.
        shared: puts the shared model first, if it is another one.
    """
    trained = result.scores["personal"]
    stages = [Stage(name, trained, result.epsilon, result.untrained)]
    if (
        shared
        and result.shared_by_client is not None
        and result.shared_by_client[result.metric] != trained[result.metric]
    ):
        # Methods without models of the clients' own have one row, not two equal ones.
        stages.insert(0, Stage(f"{name}, shared", result.shared_by_client, result.epsilon))
    if result.finetuned is not None:
        tuned = result.finetuned
        label = f"{name} + finetuning"
        stages.append(Stage(label, result.by_client, result.epsilon, tuned.diverged))
    return stages


def own_and_local(result: Result, local: Result | None = None) -> tuple[Stage, Stage] | None:
    """Returns the final models of a run and those of local training, which are compared.

    Args:
        result: of the run.
        local: of local training; None for the run's own baseline ``"local"``, if it has one.

    Returns:
        Both; None without local training.
    """
    if local is None:
        local = result.baselines.get("local")
    if local is None:
        return None
    return stages_of(result, result.algorithm)[-1], stages_of(local, "local")[-1]


def verdict_of(result: Result) -> str:
    """Returns the comparison with local training in one sentence: better, the same or worse by the
    mean, how many clients gain and lose, and the largest losses. Empty without the baseline
    ``"local"``, and for replicates."""
    both = own_and_local(result)
    # Scores by client are those of the first replicate only.
    if both is None or result.replicates is not None:
        return ""
    return verdict(*both, result.shown[0], result.personal.dtype)


def length_of(result: Result) -> str:
    """Returns the number of rounds or activations, in words; 0 for new clients, who only
    finetune."""
    count = 0
    if result.algorithm != "released":  # whose one round trains nobody
        count = result.final["round"]
    return f"{count:,} {result.step}{'' if count == 1 else 's'}"
