"""What results do not depend on, and what of its process a run leaves as it was."""

import copy
import ctypes
import signal
import warnings
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_info

from fedmtl import (
    PMTL,
    Callback,
    ClientPrivacy,
    Execution,
    FedAvg,
    FederatedDataset,
    FixedCohort,
    FullParticipation,
    Local,
    LocalSGD,
    PoissonSampling,
    RecordPrivacy,
    Trainer,
    models,
)
from fedmtl.algorithms import problem, rounds
from fedmtl.local import Layout
from tests import small
from tests.methods import NETWORKS

from ..small import Ends
from .settings import CLIENTS, DATA, DELTA, NOISE, SOLVER, trainer


def run_of(**settings):
    return trainer(**{"rounds": 3, "eval_every": 3} | settings).fit()


def assert_close(found, expected, tolerance):
    order = [found.ids.index(client) for client in expected.ids]
    torch.testing.assert_close(
        found.personal[order], expected.personal, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(found.shared, expected.shared, rtol=tolerance, atol=tolerance)
    assert found.epsilon == expected.epsilon
    assert found.final["loss"] == pytest.approx(expected.final["loss"], rel=10 * tolerance)


CASES = {
    **{
        name: {"algorithm": NETWORKS[name]}
        for name in ("pmtl", "pmtl, running mean", "fedavg", "local")
    },
    "records": {"privacy": RecordPrivacy(clip_norm=0.5, noise_multiplier=NOISE, delta=DELTA)},
    "fixed": {"schedule": FixedCohort(cohort=4)},
    "full": {"schedule": FullParticipation()},
}


@pytest.mark.parametrize("case", CASES)
def test_order_and_chunks_do_not_matter(case):
    common = {"model": models.mlp(hidden=4, dropout=0.3)} | CASES[case]
    expected = run_of(**common)
    order = torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(0)).tolist()
    for other in ({"data": DATA.subset([DATA.ids[i] for i in order])}, {"execution": Execution(3)}):
        assert_close(run_of(**common | other), expected, 1e-10)
    with pytest.raises(AssertionError):
        assert_close(run_of(**common | {"seed": 1}), expected, 1e-10)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *((name, ClientPrivacy) for name in NETWORKS),
        *((name, RecordPrivacy) for name in ("fedavg", "ditto", "apfl")),
    ],
)
def test_a_round_in_pieces_has_the_same_bits(name, unit, monkeypatch):
    """Short rows are joined in the clients' order, and long ones are added to one sum."""
    privacy = unit(clip_norm=0.5, noise_multiplier=NOISE, delta=DELTA)
    common = {
        "algorithm": NETWORKS[name],
        "schedule": PoissonSampling(cohort=10),
        "privacy": privacy,
        "rounds": 2,
    }
    common |= {"dtype": "float32", "execution": Execution(chunk=4)}
    if name.startswith("prior_layers"):  # has one round of all clients
        common |= {"schedule": FullParticipation(), "rounds": 1, "eval_every": 1}
    whole = run_of(**common)
    if unit is ClientPrivacy:
        monkeypatch.setattr("fedmtl.privacy.clip._LONG", 8)
        small.check_same(run_of(**common), whole)
    sent = Counter()
    add = rounds.Messages.add

    def counted(collected, clients, rows):
        sent[collected] += bool(rows)
        add(collected, clients, rows)

    monkeypatch.setattr(problem, "_PIECE_BYTES", 1)
    monkeypatch.setattr(rounds.Messages, "add", counted)
    small.check_same(run_of(**common), whole)
    assert name == "local" or max(sent.values()) >= 2


def test_client_that_never_took_part_is_personalized():
    """Full-batch descent on its own loss and the pull, from the shared mean: written out."""
    lam, lr, steps = 0.5, 0.2, 6
    seen = set()

    class Cohorts(Callback):
        def on_block(self, event, state):
            seen.update(event.cohort.tolist())

    result = trainer(
        algorithm=PMTL(lam=lam, local=LocalSGD(lr=lr, steps=steps, batch_size=None)),
        rounds=2,
        schedule=FixedCohort(cohort=3),
        callbacks=[Cohorts()],
    ).fit()
    unseen = sorted(set(range(CLIENTS)) - seen)
    assert len(unseen) >= CLIENTS - 6
    mean, layout = result.shared, Layout.of(result.module)
    for client in unseen:
        own = DATA.subset([DATA.ids[client]]).train
        row = mean.clone()
        for _ in range(steps):
            model = layout.load(copy.deepcopy(result.module), row)
            loss = F.cross_entropy(model(own.x), own.y)
            gradient = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
            )
            row = row - lr * (gradient + lam * (row - mean))
        torch.testing.assert_close(result.personal[client], row, rtol=1e-10, atol=1e-12)


def state() -> tuple[object, ...]:
    """What of a process its parts share: threads, precision, random numbers, warnings and signals."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        (torch.get_num_threads(), [pool["num_threads"] for pool in threadpool_info()]),
        (
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            matmul.allow_tf32,
            cudnn.allow_tf32,
        ),
        (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        (list(warnings.filters), warnings.showwarning),
        (signal.getsignal(signal.SIGINT), np.geterr()),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_leaves_its_process_as_it_was(workers, fails, monkeypatch):
    opened, library = [], ctypes.CDLL
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name=None, **options: opened.append(name) or library(name, **options)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        run = trainer(
            algorithm=FedAvg(local=SOLVER),
            execution=Execution(processes=workers),
            rounds=2,
            callbacks=[Ends(0, RuntimeError)] * fails,
        )
        with pytest.raises(RuntimeError, match="at the end") if fails else nullcontext():
            run.fit()
        assert state() == before
        assert None not in opened, "what is set in the C library, such as mallopt, stays for good"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_a_loss_of_the_callers_own_sees_one_client_at_a_time(chunk):
    """It scales by the largest target above 100, which the examples that it is tried on do not have; the targets of one
    client move no other client's model."""

    def rescaled(outputs, targets):
        return ((outputs[:, 0] - targets) / targets.abs().max().clamp(min=100.0)).square()

    def models_of(largest):
        generator = torch.Generator().manual_seed(0)
        rows = {}
        for place in range(6):
            x = torch.randn(8, 3, generator=generator)
            rows[f"c{place}"] = (x, torch.randn(8, generator=generator) * 10)
        rows["c0"][1][:] = largest
        trainer = Trainer(
            algorithm=Local(local=LocalSGD(lr=50.0, batch_size=4)),
            data=FederatedDataset.from_tensors(rows, classes=None),
            model=models.linear_regression(),
            loss=rescaled,
            schedule=FullParticipation(),
            privacy=None,
            rounds=1,
            execution=Execution(chunk=chunk, processes=1),
            progress=False,
            finetune=None,
        )
        return trainer.fit().personal

    small, large = models_of(1.0), models_of(1e9)
    assert not torch.equal(small[0], large[0])
    assert torch.equal(small[1:], large[1:])
