"""DP-SGD inside a client against plain training, and against Opacus' optimizer, one client at a time."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from fedmtl.data import FederatedDataset
from fedmtl.local import (
    Layout,
    LocalOptimizer,
    LocalSGD,
    LocalSolver,
    LocalTraining,
    StackedModule,
    plan_batches,
)
from fedmtl.local.losses import cross_entropy
from fedmtl.privacy import FullParticipation, GradientPlan, LocalSteps, RecordPrivacy, open_channel
from tests.local.test_local import ROUND, setting, train

CPU = torch.device("cpu")
CLIP = 0.7


class FakeRecords:
    """Records without privacy: chosen positions, a plain clip, no noise; it remembers whose data it was asked for."""

    def __init__(
        self,
        data: FederatedDataset,
        steps: list[int],
        *,
        draw: float | None = None,
        clip: bool = False,
    ):
        self.data, self.reserved, self.draw, self.clip = data, torch.tensor(steps), draw, clip
        self.made = torch.zeros(len(steps), dtype=torch.int64)
        self.asked: list[tuple[int, ...]] = []

    def steps(self, clients):
        return self.reserved[clients]

    def numbers(self, clients):
        return self.made[clients]

    def drawn(self, client: int, step: int) -> torch.Tensor:
        """Positions of one client's records in one step, whoever is computed beside it."""
        count = int(self.data.train.counts[client])
        if self.draw is None:
            return torch.arange(count)
        generator = torch.Generator().manual_seed(1000 * client + step)
        return (torch.rand(count, generator=generator) < self.draw).nonzero()[:, 0]

    def denominator(self, client: int) -> float:
        return int(self.data.train.counts[client]) * (1.0 if self.draw is None else self.draw)

    def batch(self, clients):
        own = [self.drawn(client, int(self.made[client])) for client in clients.tolist()]
        width = max(len(positions) for positions in own)
        index = torch.full((len(own), width), 10**9)  # padding must never be used as it is
        for row, positions in zip(index, own, strict=True):
            row[: len(positions)] = positions
        return index, torch.arange(width) < torch.tensor([[len(positions)] for positions in own])

    def release(self, clients, chunks):
        self.asked.append(tuple(clients.tolist()))
        self.made[clients] += 1
        total = 0.0
        for rows, owner in chunks:
            if self.clip:
                rows = (
                    rows * (CLIP / (rows.norm(dim=1) + 1e-6)).clamp(max=1.0)[:, None]
                )  # as Opacus
            total = total + rows.new_zeros(len(clients), rows.shape[1]).index_add_(0, owner, rows)
        return total / torch.tensor(
            [[self.denominator(client)] for client in clients.tolist()], dtype=torch.float64
        )


def private(
    data, module, solver: LocalSolver, start, records, clients=None, **options
) -> torch.Tensor:
    """The models of some clients, whose order in the stack is that of their numbers of steps."""
    stack = StackedModule(module, capacity=1, device=CPU, dtype=torch.float64)
    clients = torch.arange(len(data)) if clients is None else clients
    own = {
        name: value[clients] if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    run = LocalTraining(data, cross_entropy, solver, ROUND, start[clients], **own)
    steps, models = records.steps(clients), start[clients].clone()
    order = torch.argsort(steps, descending=True, stable=True)
    order = order[steps[order] > 0]
    if len(order):
        for place, trained in run.train(
            stack, order, run.on_records(stack, clients[order], records)
        ):
            models[place] = trained
    return models


@pytest.mark.parametrize(
    "solver",
    [
        LocalSGD(lr=0.2, steps=4, batch_size=None),
        LocalSGD(lr=0.1, steps=5, batch_size=None, momentum=0.9, weight_decay=0.01),
        LocalSGD(lr=0.4, steps=3, batch_size=None, proximal=True, decay=0.5, decay_every=2),
        LocalOptimizer(lr=0.05, steps=4, batch_size=None, optimizer_name="Adam"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_all_records_without_clip_and_noise_are_plain_training(solver, dropout):
    data, module, start, anchor = setting(dropout)
    clients = torch.arange(7)
    stack = StackedModule(module, capacity=7, device=CPU, dtype=torch.float64)
    plan = plan_batches(data, solver, clients, seed=0, round=ROUND)
    expected = train(stack, data, solver, plan, start, clients, lam=0.7, anchor=anchor)
    records = FakeRecords(data, [solver.steps] * 7)
    got = private(data, module, solver, start, records, lam=0.7, anchor=anchor)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def opacus_training(
    data, module, solver: LocalSGD, start, records: FakeRecords, client: int
) -> torch.Tensor:
    """The specification: one client, Opacus' clipping and its optimizer, with a noise of 0."""
    layout = Layout.of(module)
    model = GradSampleModule(
        layout.load(copy.deepcopy(module), start[client]), loss_reduction="sum"
    )
    inner = torch.optim.SGD(
        model.parameters(), lr=solver.lr, momentum=solver.momentum, weight_decay=solver.weight_decay
    )
    optimizer = DPOptimizer(
        inner,
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=records.denominator(client),
        loss_reduction="mean",
    )
    for step in range(int(records.reserved[client])):
        index = data.train.offsets[client] + records.drawn(client, step)
        optimizer.zero_grad()
        F.cross_entropy(model(data.train.x[index]), data.train.y[index], reduction="sum").backward()
        optimizer.step()
    return layout.flatten(model._module)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (6, 0.0), (6, 0.9)])
def test_clipped_steps_equal_opacus(steps, momentum):
    data, module, start, _ = setting()
    solver = LocalSGD(lr=0.3, momentum=momentum, weight_decay=0.01)
    reserved = [max(1, steps - client) for client in range(7)]
    records = FakeRecords(data, reserved, draw=0.8, clip=True)
    unclipped = private(data, module, solver, start, FakeRecords(data, reserved, draw=0.8))
    got = private(data, module, solver, start, records)
    assert not torch.allclose(got, unclipped, rtol=1e-3)
    for client in range(7):
        expected = opacus_training(data, module, solver, start, records, client)
        torch.testing.assert_close(got[client], expected, rtol=1e-10, atol=1e-12)


def test_a_client_without_a_reserved_step_keeps_its_start_and_is_not_asked():
    data, module, start, anchor = setting()
    reserved = [0, 2, 0, 1, 3, 0, 0]
    records = FakeRecords(data, reserved)
    solver = LocalSGD(lr=0.2, momentum=0.9, weight_decay=0.1)
    got = private(data, module, solver, start, records, lam=1.0, anchor=anchor)
    assert records.asked == [(4, 1, 3), (4, 1), (4,)]
    for client, steps in enumerate(reserved):
        assert torch.equal(got[client], start[client]) == (steps == 0)


def test_nobody_to_train_and_nothing_drawn():
    data, module, start, _ = setting()
    solver = LocalSGD(lr=0.2, weight_decay=0.5)
    assert torch.equal(private(data, module, solver, start, FakeRecords(data, [0] * 7)), start)
    empty = torch.arange(0)
    assert private(data, module, solver, start, FakeRecords(data, [1] * 7), empty).shape == (
        0,
        start.shape[1],
    )
    got = private(data, module, solver, start, FakeRecords(data, [1] * 7, draw=1e-12))
    torch.testing.assert_close(got, start * (1 - 0.2 * 0.5), rtol=1e-12, atol=1e-14)


def releases(data: FederatedDataset, dimension: int, batch_size: int | None) -> LocalSteps:
    """The production release path, with noise, open for all clients but the second in round ``ROUND``."""
    counts = data.train.counts.numpy()
    plan = GradientPlan(
        ids=data.ids,
        keys=data.keys,
        counts=counts,
        dimension=dimension,
        steps=np.array([3, 2, 4, 1, 2, 4, 3]),
        batch_size=batch_size,
    )
    privacy = RecordPrivacy(clip_norm=CLIP, noise_multiplier=1.0, delta=1e-5)
    channel = open_channel(
        privacy, (plan,), FullParticipation().bind(len(data)), seed=3, steps=ROUND + 1
    )
    cohort = torch.tensor([0, 2, 3, 4, 5, 6])
    channel._drawn[ROUND] = cohort
    channel.begin(ROUND, cohort)
    assert channel.local is not None
    return channel.local


@pytest.mark.parametrize("batch_size", [None, 4, 1])
def test_with_production_draws_and_noise_company_and_order_do_not_matter(batch_size):
    """At an expected batch of 1, many a client alone has an empty batch: its step is noise alone."""
    data, module, start, anchor = setting(0.2)
    solver, options = LocalSGD(lr=0.2, momentum=0.5), {"lam": 0.5, "anchor": anchor}
    size = start.shape[1]
    whole = private(data, module, solver, start, releases(data, size, batch_size), **options)
    assert torch.equal(whole[1], start[1])
    assert float((whole - start).norm(dim=1)[[0, 2, 3, 4, 5, 6]].min()) > 0.1
    for clients in (
        torch.tensor([6, 1, 0]),
        torch.tensor([2, 3]),
        torch.tensor([5]),
        torch.tensor([4]),
    ):
        part = private(
            data, module, solver, start, releases(data, size, batch_size), clients, **options
        )
        torch.testing.assert_close(part, whole[clients], rtol=1e-10, atol=1e-12)


def test_a_record_has_the_same_gradient_whoever_is_drawn_with_it():
    """With dropout, too: else one record more or less would move the sum by more than its own clipped gradient."""
    data, module, start, _ = setting(0.5)

    def moved(*positions: int) -> torch.Tensor:
        records = FakeRecords(data, [1] * 7)
        records.drawn = lambda client, step: torch.tensor(positions)  # type: ignore[method-assign]
        return private(data, module, LocalSGD(lr=1.0), start, records) - start

    torch.testing.assert_close(
        moved(0, 1, 2), moved(0) + moved(1) + moved(2), rtol=1e-10, atol=1e-12
    )
