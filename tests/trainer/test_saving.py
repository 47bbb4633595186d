"""What a run counts, keeps and bounds between its checkpoints."""

import logging
from types import SimpleNamespace

import torch

from fedmtl import AsyncLearner, Ditto, LocalSGD, PoissonClocks, RecordPrivacy, models
from fedmtl.algorithms.problem import Tally
from fedmtl.ranks import SINGLE
from fedmtl.trainer.checkpoint import Checkpoint
from fedmtl.trainer.evaluations import Evaluations
from fedmtl.trainer.run import Run
from fedmtl.trainer.run_plan import prepare
from tests.helpers import regression
from tests.small import trainer


def test_only_files_of_clients_that_the_checkpoint_names_are_kept(tmp_path):
    """With rows of everybody in every round a file is replaced by a new one again and again."""
    algorithm = Ditto(local=LocalSGD(lr=0.1))
    trainer(algorithm=algorithm, folder=tmp_path / "run", rounds=5, checkpoint_every=1).fit()
    checkpoint = Checkpoint.read(tmp_path / "run" / "private" / "checkpoint.safetensors")
    files = {path.name for path in (tmp_path / "run" / "private" / "clients").iterdir()}
    assert files == set(checkpoint.clients) != {"1-0-of-1"}


def counted(tally, ranks):
    """A run that goes on from a checkpoint with counts of local trainings."""
    run = SimpleNamespace(
        ranks=ranks, problem=trainer().problem(), evaluations=Evaluations(), step_name="round"
    )
    Run._count_from(run, tally)
    return run


def test_diverged_trainings_of_a_checkpoint_are_warned_of_once(caplog):
    run = counted(Tally(10, 4), SINGLE)
    run.algorithm = SimpleNamespace(name="fedavg")
    run.evaluations.warn_first(run, 3)
    assert caplog.text == ""
    run.evaluations = Evaluations()
    with caplog.at_level(logging.WARNING, "fedmtl"):
        run.evaluations.warn_first(run, 3)
    assert "4 of 10 local trainings diverged" in caplog.text


def test_the_counts_of_a_checkpoint_are_those_of_the_first_rank_alone():
    """The sum over ranks has them once."""
    first = counted(Tally(10, 4), SINGLE)
    other = counted(Tally(10, 4), SimpleNamespace(first=False))
    assert (first.problem.tally.trained, other.problem.tally.trained) == (10, 0)


def test_rows_are_bounded_for_training_and_for_scores():
    asked = trainer(
        algorithm=AsyncLearner(row_norm=1.0),
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
