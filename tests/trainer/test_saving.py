"""What a run counts, keeps and bounds between its checkpoints."""

import logging
from dataclasses import replace

import torch

from fedmtl import AsyncLearner, Ditto, LocalSGD, PoissonClocks, RecordPrivacy, models
from fedmtl.algorithms.problem import Tally
from fedmtl.ranks import Ranks
from fedmtl.trainer.checkpoint import Checkpoint
from fedmtl.trainer.engine import Engine
from fedmtl.trainer.evaluator import Evaluator
from fedmtl.trainer.run import _counting
from fedmtl.trainer.run_plan import RunPlan, prepare
from tests.helpers import regression
from tests.small import trainer


def test_only_files_of_clients_that_the_checkpoint_names_are_kept(tmp_path):
    """With rows of everybody in every round a file is replaced by a new one again and again."""
    algorithm = Ditto(local=LocalSGD(lr=0.1))
    trainer(algorithm=algorithm, folder=tmp_path / "run", rounds=5, checkpoint_every=1).fit()
    checkpoint = Checkpoint.read(tmp_path / "run" / "private" / "checkpoint.safetensors")
    files = {path.name for path in (tmp_path / "run" / "private" / "clients").iterdir()}
    assert files == set(checkpoint.clients) != {"1-0-of-1"}


def counted(tally: Tally, rank: int = 0) -> RunPlan:
    """The plan of a rank whose run goes on from a checkpoint with counts of local trainings."""
    plan = prepare(trainer(), trainer().problem())
    problem = replace(plan.problem, ranks=Ranks(rank=rank))
    return _counting(replace(plan, problem=problem), tally)


def evaluator(plan: RunPlan) -> Evaluator:
    engine = Engine()
    return Evaluator(plan, engine, engine.open(plan, resume=False), (), ())


def test_diverged_trainings_of_a_checkpoint_are_warned_of_once(caplog):
    resumed = evaluator(counted(Tally(10, 4)))
    resumed.warn_first(3)
    assert caplog.text == ""
    plan = counted(Tally())
    begun = evaluator(plan)
    plan.problem.tally.trained += 10
    plan.problem.tally.diverged += 4
    with caplog.at_level(logging.WARNING, "fedmtl"):
        begun.warn_first(3)
    assert "4 of 10 local trainings diverged" in caplog.text
    caplog.clear()
    begun.warn_first(4)
    assert caplog.text == ""


def test_the_counts_of_a_checkpoint_are_those_of_the_first_rank_alone():
    """The sum over ranks has them once."""
    first = counted(Tally(10, 4))
    other = counted(Tally(10, 4), rank=1)
    assert (first.problem.tally.trained, other.problem.tally.trained) == (10, 0)


def test_rows_are_bounded_for_training_and_for_scores():
    asked = trainer(
        algorithm=AsyncLearner(feature_norm=1.0),
        data=regression(3),
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=2),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        rounds=6,
    )
    plan = prepare(asked, asked.problem())
    for data, side in ((plan.problem.data, "train"), (plan.evaluated.data, "test")):
        rows = torch.arange(len(getattr(data, side).y))
        x, _ = data.gather(side, rows, dtype=torch.float64)
        norms = torch.linalg.vector_norm(x, 1, dim=1)
        assert 0.9 < float(norms.max()) <= 1 + 1e-6
