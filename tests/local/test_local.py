"""Stacked local training against one client at a time with torch's own optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedmtl import models
from fedmtl.local import (
    Layout,
    LocalOptimizer,
    LocalSGD,
    LocalTraining,
    StackedModule,
    plan_batches,
    prepare_module,
)
from fedmtl.local.losses import cross_entropy
from tests.helpers import ragged_classification

SOLVERS = {
    "plain": LocalSGD(lr=0.3, epochs=3, batch_size=4),
    "momentum": LocalSGD(lr=0.1, epochs=2, batch_size=5, momentum=0.9, weight_decay=0.01),
    "steps": LocalSGD(lr=0.2, steps=11, batch_size=4),
    "full": LocalSGD(lr=0.2, epochs=4, batch_size=None),
    "adam": LocalOptimizer(lr=0.05, epochs=2, batch_size=4, optimizer_name="Adam"),
    "decayed": LocalSGD(lr=0.4, epochs=2, batch_size=4, decay=0.5, decay_every=2),
}
ROUND = 4


def setting(dropout: float = 0.0):
    """Data, a perceptron, and the starts and anchors of seven clients."""
    torch.manual_seed(0)
    data = ragged_classification(7)
    module = models.mlp(hidden=6, dropout=dropout)(data.spec).double()
    module = prepare_module(module, torch.zeros(2, 5).double(), seed=0)
    start, anchor = torch.randn(2, 7, Layout.of(module).dimension, dtype=torch.float64) * 0.4
    return data, module, start, anchor


def train(stack, data, solver, plan, start, place, *, round=ROUND, **pull):
    """Return the models (n, D) of the clients of a plan."""
    rows = torch.full((7, start.shape[-1]), torch.nan, dtype=torch.float64)
    run = LocalTraining(data, cross_entropy, solver, round, start, **pull)
    for done, trained in run.train(stack, place, run.on_batches(stack, plan, place)):
        rows[done] = trained
    return rows


def plain_loop(data, module, solver, start, anchor, lam, client):
    """The specification: one client, its own model, torch.optim."""
    layout = Layout.of(module)
    model = layout.load(copy.deepcopy(module), start[client])
    lr = solver.lr_at(ROUND)
    if isinstance(solver, LocalSGD):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=lr, momentum=solver.momentum, weight_decay=solver.weight_decay
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for batch in plan_batches(data, solver, torch.tensor([client]), seed=0, round=ROUND).batches():
        index = batch.index[0][batch.weight[0] > 0]
        flat = torch.cat([p.reshape(-1) for p in model.parameters()])
        loss = F.cross_entropy(model(data.train.x[index]), data.train.y[index])
        loss = loss + 0.5 * lam * (flat - anchor[client]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layout.flatten(model)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_stacked_training_equals_the_plain_loop(name, lam):
    data, module, start, anchor = setting()
    solver = SOLVERS[name]
    clients = torch.argsort(solver.step_counts(data.train.counts), descending=True, stable=True)
    stack = StackedModule(module, capacity=7, device=torch.device("cpu"), dtype=torch.float64)
    plan = plan_batches(data, solver, clients, seed=0, round=ROUND)
    rows = train(stack, data, solver, plan, start, clients, lam=lam, anchor=anchor)
    for client in range(len(rows)):
        expected = plain_loop(data, module, solver, start, anchor, lam, client)
        torch.testing.assert_close(rows[client], expected, rtol=1e-10, atol=1e-12)
