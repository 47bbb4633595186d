"""Peer-to-peer learning beyond the paper: agents that come and go, records that arrive, agents without data, models."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmtl import AsyncLearner, Callback, Latencies, PoissonClocks, RecordPrivacy, Trainer, load_data, models
from fedmtl.algorithms import PeerToPeer
from fedmtl.data import FederatedDataset
from fedmtl.data.examples import Examples
from fedmtl.errors import ConfigError, DataError
from fedmtl.graphs import Ring
from fedmtl.local import Execution
from fedmtl.schedules import Dropouts, ExponentialLatency
from fedmtl.trainer.problem import build_problem

from ..trainer.settings import quick_figures
from .harness import run_activations as run
from .p2p_harness import COUNTS, NOISED, D, agents, arrays, mean_gradient, random_graph, schedule

N = len(COUNTS)
CLIP_ONLY = RecordPrivacy(clip_norm=0.4, epsilon=math.inf)
AWAY = {"a1": [(0.0, 20.0)], "a3": [(10.0, 30.0)], "a5": [(35.0, math.inf)]}
FOREVER = {"a4": [(0.0, math.inf)]}


def present(name: str, time: float, away: dict) -> bool:
    return not any(start <= time < end for start, end in away.get(name, ()))


def events(away: dict, steps: int, seed: int, replicates: int = 1) -> torch.Tensor:
    """Event k is at time k, of somebody who is there."""
    rng = np.random.default_rng(seed)
    out = np.empty((replicates, steps), dtype=np.int64)
    for k in range(steps):
        there = [i for i in range(N) if present(f"a{i}", k, away)]
        out[:, k] = rng.choice(there, replicates)
    return torch.from_numpy(out)


def slow_network(data, weights, clients, *, away=None, arrivals=None, departed="forget", mu=0.7, clip=0.4):
    """One replicate, event by event, with who is counted found from the whole history each time."""
    away, theta = away or {}, np.zeros((N, D))
    woke: dict[int, int] = {}
    sent = 0
    for k, i in enumerate(clients.tolist()):

        def counts(j: int, k: int = k) -> bool:
            if f"a{j}" not in away:
                return True
            ends = [0.0 if not present(f"a{j}", 0, away) else -1.0]
            if departed == "forget":
                ends += [start for start, _ in away[f"a{j}"] if 0 < start <= k]
            started = max(ends)  # it must have woken after the last time it went away
            return started < 0 or woke.get(j, -1) >= started

        share = np.array([weights[i, j] if j != i and counts(j) else 0.0 for j in range(N)])
        around = share / share.sum() @ theta if share.sum() else theta[i]
        x, y = data[i]
        if arrivals is not None:
            there = arrivals[i] <= k
            x, y = x[there], y[there]
        if not present(f"a{i}", 0, away) and i not in woke:
            theta[i] = around if share.sum() else theta[i]
            around = theta[i].copy() if not share.sum() else around
            sent += int((share > 0).sum())
        m = len(y)
        c = m / max(COUNTS) if m else 1e-3
        ridge, smooth = 1 / max(m, 1), 0.25 if m else 0.0
        alpha = 1 / (1 + mu * c * (smooth + 2 * ridge))
        gradient = 2 * ridge * theta[i] + (mean_gradient("logistic", x, y, theta[i], clip) if m else 0.0)
        theta[i] = (1 - alpha) * theta[i] + alpha * (around - mu * c * gradient)
        sent += int((share > 0).sum())
        woke[i] = k
    return theta, sent


@pytest.mark.parametrize("departed", ["forget", "keep"])
@pytest.mark.parametrize("replicates", [1, 3])
def test_agents_that_come_and_go(departed: str, replicates: int) -> None:
    problem, graph, away = agents(), random_graph(N), AWAY | FOREVER
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=0.7, absences=Dropouts(intervals=away), departed=departed)
    clients = events(away, 60, 4, replicates)
    whole, _ = run(algorithm, problem, clients, CLIP_ONLY)
    for r in range(replicates):
        expected, sent = slow_network(
            arrays(problem), graph.weights.toarray(), clients[r], away=away, departed=departed
        )
        assert np.allclose(whole.public["theta"][r].numpy(), expected, rtol=1e-9, atol=1e-12)
        assert int(whole.public["sent"][r]) == sent
    for pieces in (1, 7):
        cut, _ = run(algorithm, problem, clients, CLIP_ONLY, pieces=pieces)
        for name, value in whole.public.items():
            assert torch.allclose(cut.public[name].double(), value.double(), rtol=1e-10, atol=1e-12), name
    never = algorithm.personalize(problem, whole, torch.tensor([4, 0]))
    counted = whole.public["counted"][0].double().numpy()
    share = graph.weights.toarray()[4] * counted
    assert np.allclose(never[0].numpy(), share / share.sum() @ whole.public["theta"][0].numpy(), rtol=1e-6)
    assert torch.allclose(never[1].double(), whole.public["theta"][0, 0], rtol=1e-6)
    other = PeerToPeer(row_norm=1.0, graph=graph, mu=0.7)
    assert not torch.allclose(run(other, problem, clients, CLIP_ONLY)[0].public["theta"], whole.public["theta"])


def test_an_agent_that_is_away_cannot_wake() -> None:
    algorithm = PeerToPeer(row_norm=1.0, graph=random_graph(N), absences=Dropouts(intervals=AWAY))
    with pytest.raises(ConfigError, match=r"Agent 'a1' wakes at time 2.*give the schedule the same absences"):
        run(algorithm, agents(), torch.tensor([[0, 2, 1]]))
    for absences, message in (
        (Dropouts(rate=1.0, duration=1.0), "absences needs intervals"),
        (Dropouts(intervals={"nobody": [(0, 1)]}), "names client 'nobody'"),
    ):
        with pytest.raises(ConfigError, match=message):
            PeerToPeer(row_norm=1.0, graph=random_graph(N), absences=absences).network(agents())


def trainer(away: Dropouts | None, activations: int, algorithm: dict, **settings) -> Trainer:
    """Six clients of eight records on a ring."""
    rng = np.random.default_rng(0)
    clients = {f"c{k}": (rng.normal(size=(8, 3)), rng.integers(0, 2, 8)) for k in range(6)}
    return Trainer(
        algorithm=PeerToPeer(row_norm=1.0, graph=Ring(), **algorithm),
        data=FederatedDataset.from_tensors(clients, test=clients, classes=2),
        model=models.linear_regression(bias=False),
        schedule=Latencies(latency=ExponentialLatency(1.0), activations=activations, dropouts=away),
        privacy=RecordPrivacy(clip_norm=0.5, epsilon=2.0, delta=1e-4),
        rounds=1000,
        device="cpu",
        progress=False,
        **settings,
    )


def test_budgets_persist_over_absences_in_a_run_of_the_trainer() -> None:
    away = Dropouts(intervals={"c1": [(0, 3.0)], "c2": [(1.0, 4.0)], "c4": [(2.0, math.inf)]})
    result = trainer(away, 5, {"absences": away}).fit()
    low, _, high = result.privacy.by_client
    assert high == pytest.approx(2.0, rel=1e-3), "all five answers, before and after an absence"
    assert low < 1.9, "c4 never came back"
    assert result.stopped == "rounds"


class Stop(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", [0, 3, 11])
@pytest.mark.parametrize("options", [{"warm_start": 0.3, "allocation": 3.0}, {"absences": True, "arrivals": True}])
def test_an_interrupted_run_resumes_to_the_same_bits(at: int, options: dict, tmp_path, monkeypatch) -> None:
    class Dies(Callback):
        def on_event(self, event, state) -> None:
            if event.step >= at:
                raise Stop

    quick_figures(monkeypatch)
    away = Dropouts(intervals={"c1": [(0, 3.0)], "c2": [(1.0, 2.0)]}) if "absences" in options else None
    if away is not None:
        options = {"absences": away, "arrivals": {"c3": [0, 0, 5, 5, 9, 9, 9, 30]}}

    def run_of(folder: str, *callbacks: Callback) -> Trainer:
        times = {"eval_every": 100, "checkpoint_every": 2}
        return trainer(away, 3, options, dtype="float64", folder=tmp_path / folder, callbacks=callbacks, **times)

    whole = run_of("whole").fit()
    with pytest.raises(Stop):
        run_of("run", Dies()).fit()
    again = run_of("run").fit(resume=True)
    assert torch.equal(again.personal, whole.personal)
    assert again.epsilon == whole.epsilon
    assert whole.epsilon == pytest.approx(2.0, rel=1e-3)
    assert again.privacy.releases == whole.privacy.releases == 18 + 6 * ("warm_start" in options)


@pytest.mark.parametrize("replicates", [1, 2])
def test_records_that_arrive_are_used_from_then_on(replicates: int) -> None:
    problem, graph, rng = agents(), random_graph(N), np.random.default_rng(2)
    times = [rng.integers(0, 30, m) for m in COUNTS]
    times[2][:] = 15  # nothing before
    times[4][:] = 0
    arrivals = {f"a{k}": t.tolist() for k, t in enumerate(times) if k != 4}
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=0.7, arrivals=arrivals)
    clients = schedule(replicates, 45, 6, nobody=0.0)
    whole, _ = run(algorithm, problem, clients, CLIP_ONLY)
    for r in range(replicates):
        expected, _ = slow_network(arrays(problem), graph.weights.toarray(), clients[r], arrivals=times)
        assert np.allclose(whole.public["theta"][r].numpy(), expected, rtol=1e-9, atol=1e-12)
    cut, _ = run(algorithm, problem, clients, CLIP_ONLY, pieces=4)
    assert torch.allclose(cut.public["theta"], whole.public["theta"], rtol=1e-10, atol=1e-12)
    for given, message in (
        ({"nobody": [0]}, "arrivals names 'nobody'"),
        ({"a2": [0, 1]}, "arrivals of 'a2' has 2 numbers.*3 training records"),
        ({"a2": [0, 1, -1]}, "at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            PeerToPeer(row_norm=1.0, graph=graph, arrivals=given).network(problem)


# Any model


class Small(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("replicates", [1, 3])
def test_a_linear_model_by_its_gradients_is_the_linear_path(loss: str, replicates: int) -> None:
    problem, clients = agents(loss, model=models.linear_regression(bias=True)), schedule(replicates, 30, 7)
    smooth = {"logistic": 0.5, "squared": 4.0}[loss]
    for privacy in (None, NOISED):
        rows = PeerToPeer(row_norm=1.0, graph=random_graph(N), mu=0.7, loss=loss, smoothness=smooth)
        either = PeerToPeer(row_norm=1.0, graph=random_graph(N), mu=0.7, loss="model", smoothness=smooth)
        first, _ = run(rows, problem, clients, privacy)
        second, _ = run(either, problem, clients, privacy)
        assert torch.allclose(first.public["theta"], second.public["theta"], rtol=1e-9, atol=1e-11)
        objective = rows.objective(problem, first)
        assert torch.allclose(either.objective(problem, second), objective, rtol=1e-9)


def test_data_and_model_of_a_run_die_with_it() -> None:
    def references() -> list[weakref.ref[object]]:
        data = load_data("synthetic_agents", agents=4, features=3)
        result = Trainer(
            algorithm=PeerToPeer(row_norm=1.0, graph=Ring(), loss="model", smoothness=1.0),
            data=data,
            model=models.linear_regression(bias=False),
            schedule=PoissonClocks(per_client=1),
            privacy=None,
            rounds=5,
            progress=False,
        ).fit()
        return [weakref.ref(data), weakref.ref(result.module)]

    alive = references()
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_network_descends_and_its_gradients_are_clipped_one_by_one() -> None:
    torch.manual_seed(0)
    problem, clients = agents(counts=(6, 5, 7), model=Small(D, 1)), torch.arange(3).repeat(60)[None]
    graph = random_graph(3)
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=2.0, loss="model", smoothness=4.0, lam=1e-3)
    state = algorithm.init(problem)
    assert torch.allclose(state.public["theta"][0], problem.initial.expand(3, -1)), "the model's public start"
    before = float(algorithm.objective(problem, state))
    state, _ = run(algorithm, problem, clients)
    assert float(algorithm.objective(problem, state)) < 0.9 * before
    one, _ = run(algorithm, problem, clients[:, :1], RecordPrivacy(clip_norm=0.05, epsilon=math.inf))
    model, start = problem.module.double(), problem.initial
    total = torch.zeros_like(start)
    for x, y in zip(problem.data.train.x[:6].double(), problem.data.train.y[:6].double(), strict=True):
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x[None])[0, 0], y).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        total += gradient * min(1.0, 0.05 * (1 - 2.0**-20) / float(gradient.norm()))
    alpha = 1 / (1 + 2.0 * 6 / 7 * (4.0 + 2e-3))
    expected = (1 - alpha) * start + alpha * (start - 2.0 * 6 / 7 * (total / 6 + 2e-3 * start))
    assert torch.allclose(one.public["theta"][0, 0], expected, rtol=1e-9)


def test_a_model_with_dropout_is_refused() -> None:
    problem = agents(model=nn.Sequential(nn.Linear(D, 2), nn.Dropout(0.5), nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match="without dropout"):
        PeerToPeer(row_norm=1.0, graph=random_graph(N), loss="model", smoothness=1.0).network(problem)


# Agents without data


def test_agents_without_data_pass_on_what_they_hear() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(9, D)), rng.integers(0, 2, 9)
    x *= 0.9 / np.linalg.norm(x, axis=1, keepdims=True)
    train = Examples(torch.from_numpy(x), torch.from_numpy(y), torch.tensor([0, 5, 5, 9]))
    test = Examples(torch.from_numpy(x), torch.from_numpy(y), torch.tensor([0, 4, 6, 9]))
    data = FederatedDataset(train, test, ("a0", "a1", "a2"), classes=2, name="three", idle=True)
    problem = build_problem(
        data,
        models.linear_regression(bias=False),
        "binary_cross_entropy",
        Execution("stacked"),
        10,
        0,
        "cpu",
        "float64",
    )
    graph, clients = random_graph(3, density=1.0), torch.tensor([[0, 1, 2, 1, 0, 1]])
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=0.7, idle_confidence=0.01)
    privacy = RecordPrivacy(clip_norm=0.4, epsilon=2.0, delta=1e-5, mechanism="l2_laplace")
    for replicates in (1, 2):
        state, channel = run(algorithm, problem, clients.expand(replicates, -1).contiguous(), privacy)
        noise = torch.stack([value for _, _, value in channel.record]).numpy()
        assert np.abs(noise[[0, 2, 4]]).min() > 0
        assert np.all(noise[[1, 3, 5]] == 0), "nothing is released of them"
        weights, theta = graph.weights.toarray(), np.zeros((3, D))
        for k, i in enumerate(clients[0].tolist()):
            m = (5, 0, 4)[i]
            c, ridge = (m / 5, 1 / m) if m else (0.01, 1.0)
            alpha = 1 / (1 + 0.7 * c * ((0.25 if m else 0) + 2 * ridge))
            around = weights[i] @ theta / weights[i].sum()
            gradient = noise[k, 0] + 2 * ridge * theta[i]
            theta[i] = (1 - alpha) * theta[i] + alpha * (around - 0.7 * c * gradient)
        assert np.allclose(state.public["theta"][0].numpy(), theta, rtol=1e-10)
        assert channel.account.epsilons()[0, 1] == 0
        assert channel.epsilon == pytest.approx(2.0, rel=1e-3)
    warm, _ = run(PeerToPeer(row_norm=1.0, graph=graph, mu=0.7, warm_start=0.5, lam=0.2), problem, clients, privacy)
    assert bool(torch.isfinite(warm.public["theta"]).all())


def test_other_algorithms_refuse_clients_without_training_examples(tmp_path) -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    part = Examples(x, y, torch.tensor([0, 4, 4]))
    other = Examples(x, y, torch.tensor([0, 2, 4]))
    data = FederatedDataset(part, other, ("a", "b"), classes=2, idle=True)
    settings = {"data": data, "model": models.linear_regression(), "privacy": None, "rounds": 5, "progress": False}
    with pytest.raises(ConfigError, match="client 'b' has no training examples; async_learner needs them"):
        Trainer(algorithm=AsyncLearner(), schedule=PoissonClocks(events=5), **settings).fit()
    with pytest.raises(DataError, match="client 'b' has no training examples"):
        replace(data, idle=False)
    data.save(tmp_path / "data")
    assert FederatedDataset.load(tmp_path / "data").train.counts.tolist() == [4, 0]
