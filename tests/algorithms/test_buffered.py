"""Rounds whose clients started from earlier public states, beside a slow event loop."""

import math
from types import SimpleNamespace

import pytest
import torch

from fedmtl import PMTL, Ditto, FedAvg, FullParticipation, LocalSGD, Scaffold
from fedmtl.algorithms.starts import weighted
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, Clip, clip_rows, open_channel
from fedmtl.schedules import RandomLatency
from fedmtl.schedules.buffered import Buffered
from tests.algorithms.harness import problem_of, run

N = 12
STEPS = 15
LR = 0.05


class Door:
    """A channel without privacy, for given rounds."""

    local = None
    denominator = 4.0

    def __init__(self, bound=math.inf):
        clip = None
        if bound < math.inf:
            clip = Clip(bound)
        self.clips = {"update": clip}
        self.releases = {"update": SimpleNamespace(bound=bound)}

    def new_total(self, name):
        return None

    def noise_std(self, name):
        return torch.zeros(1)

    def release(self, name, rows, clients):
        return clip_rows(rows, self.clips[name]).sum(0) / self.denominator


def problem():
    return problem_of(
        load_synthetic_tasks(N, problem="regression", noise=0.3, features=4), rounds=STEPS
    )


def schedule():
    latency = RandomLatency("lognorm", {"s": 1.5})
    return Buffered(latency=latency, concurrency=8, buffer=4, max_staleness=5).bind(N)


def blocks_of(bound):
    """The first steps of a schedule, as rounds."""
    return [bound.block(answers.step, answers.clients) for answers in bound.steps(STEPS)]


def slow_run(problem, kind, lam, bound):
    """Trains one client after the other, each from the shared model it was asked with."""
    train = problem.data.train
    history = [torch.zeros(problem.dimension, dtype=torch.float64)]
    own = {}

    def trained(client, start, anchor, pull):
        first, last = int(train.offsets[client]), int(train.offsets[client + 1])
        features, targets = train.x[first:last].double(), train.y[first:last].double()
        gradient = 2 * features.T @ (features @ start - targets) / len(targets)
        return start - LR * (gradient + pull * (start - anchor))

    for answers in schedule().steps(STEPS):
        total = torch.zeros_like(history[0])
        for client, version in zip(
            answers.clients.tolist(), answers.versions.tolist(), strict=True
        ):
            shared = history[version]
            row = trained(client, shared, shared, 0.0) - shared
            if kind == "pmtl":
                own[client] = trained(client, own.get(client, shared), shared, lam)
                row = own[client] - shared
            if kind == "ditto":
                own[client] = trained(client, own.get(client, history[0]), shared, lam)
            if row.norm() > bound * (1 - 2**-20):  # see Clip
                row = row * (bound * (1 - 2**-20) * (1 - 2**-22) / row.norm())
            total += row / math.sqrt(1 + answers.step - version)
        history.append(history[-1] + total / 4)
    return history[-1], own


SOLVER = LocalSGD(lr=LR, epochs=1, batch_size=60)
METHODS = {
    "fedavg": FedAvg(local=SOLVER),
    "pmtl": PMTL(lam=0.7, local=SOLVER),
    "ditto": Ditto(lam=0.7, local=SOLVER),
}


@pytest.mark.parametrize("bound", [math.inf, 0.2])
@pytest.mark.parametrize("kind", METHODS)
def test_every_method_equals_a_slow_event_loop(kind, bound):
    whole = problem()
    algorithm = METHODS[kind]
    channel = Door(bound)
    state = algorithm.init(whole)
    stale = 0
    for block in blocks_of(schedule()):
        stale += int((block.starts.versions < block.first).sum())
        state = algorithm.step(whole, state, block, channel)
        assert len(state.earlier) < schedule().versions_kept
    assert stale > STEPS
    shared, own = slow_run(whole, kind, 0.7, bound)
    assert torch.allclose(state.public["global"], shared, rtol=0, atol=1e-12)
    clients = torch.tensor(sorted(own))
    if len(clients):
        models = algorithm.personalize(whole, state, clients)
        expected = torch.stack([own[client] for client in clients.tolist()])
        assert torch.allclose(models, expected, rtol=0, atol=1e-12)


def noised(algorithm, whole, sampler, blocks):
    """The state after rounds under a real channel with noise."""
    bound = sampler.bind(N)
    privacy = ClientPrivacy(clip_norm=0.2, noise_multiplier=0.5, delta=1e-5)
    channel = open_channel(
        privacy,
        algorithm.plan(whole, bound),
        bound,
        order=torch.argsort(whole.data.keys, stable=True),
        seed=whole.seed,
        steps=whole.rounds,
        fingerprint="test",
    )
    state = algorithm.init(whole)
    for block in blocks:
        channel.begin(block.first, channel.draw(block.first))
        state = algorithm.step(whole, state, block, channel)
    channel.close()
    return state


@pytest.mark.parametrize("kind", METHODS)
def test_equal_latencies_and_a_buffer_of_all_are_full_rounds_to_the_bit(kind):
    whole = problem()
    everyone = Buffered(latency=1.0, concurrency=N, buffer=N).bind(N)
    state = noised(METHODS[kind], whole, FullParticipation(), blocks_of(everyone))
    privacy = ClientPrivacy(clip_norm=0.2, noise_multiplier=0.5, delta=1e-5)
    rounds = run(METHODS[kind], whole, privacy=privacy)
    assert torch.equal(state.public["global"], rounds.public["global"])
    clients = torch.arange(N)
    models = [METHODS[kind].personalize(whole, end, clients) for end in (state, rounds)]
    assert torch.equal(*models)


@pytest.mark.parametrize(
    "algorithm", [PMTL(reference="local", local=SOLVER), Scaffold(local=SOLVER)]
)
def test_methods_that_need_one_start_are_refused(algorithm):
    whole = problem()
    block = blocks_of(schedule())[0]
    with pytest.raises(ConfigError, match="needs one public state for all clients of a round"):
        algorithm.step(whole, algorithm.init(whole), block, Door())


def test_weights_leave_the_rows_of_the_clients_as_they_are():
    """A client may keep the row that it has sent."""
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    sent = weighted({"update": rows}, torch.tensor([1.0, 0.5, 0.25, 1.0]), {"update": Clip(0.1)})
    assert torch.equal(rows, before)
    assert torch.equal(sent["update"][[0, 3]], rows[[0, 3]])
    expected = torch.tensor([0.05, 0.025])
    torch.testing.assert_close(sent["update"][1:3].norm(dim=1), expected, rtol=1e-5, atol=0)
