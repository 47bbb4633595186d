"""Activations one client at a time: the parts of client and server give the numbers of the fast loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl import (
    PPDMTL,
    AsyncLearner,
    Moments,
    PeerAveraging,
    PeerToPeer,
    PublicStart,
    SharedDirections,
    models,
)
from fedmtl.algorithms import State
from fedmtl.algorithms.one_at_a_time import Answer, simulated_objectives
from fedmtl.contrib.published.async_learner import PublishedAsyncLearner
from fedmtl.contrib.published.p2p import PublishedPeerToPeer
from fedmtl.data import load_synthetic_tasks
from fedmtl.graphs import Ring
from fedmtl.privacy import RecordPrivacy, SeededSource
from fedmtl.privacy.records import GRADIENT
from tests.algorithms.harness import (
    GivenCaps,
    block_of,
    blocks_of,
    open_activations,
    problem_of,
    run_activations,
)

TASKS, STEPS = 6, 40
NOISED = RecordPrivacy(clip_norm=0.5, noise_multiplier=0.7, mechanism="l2_laplace", delta=1e-5)
ALGORITHMS = {
    "pp_dmtl": PPDMTL(feature_norm=1.0, lam=0.02, a1=0.2),
    "shared_directions": SharedDirections(feature_norm=1.0, lam=0.02, a2=None),
    "pp_dmtl, subsets": PPDMTL(feature_norm=1.0, lam=0.02, penalty="l21", batch_rate=0.5),
    "async_learner": AsyncLearner(loss="logistic", reg=0.01),
    "async_learner, published": PublishedAsyncLearner(loss="logistic", reg=0.01),
    "async_learner, hinge": AsyncLearner(loss="hinge", reg=0.01),
    "async_learner, public start": PublicStart(loss="logistic", reg=0.01),
    "p2p": PeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5, allocation=2.0),
    "p2p, published": PublishedPeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5),
    "peer_averaging": PeerAveraging(feature_norm=1.0, graph=Ring(), mu=0.5),
    "peer_averaging, three releases": PeerAveraging(
        feature_norm=1.0, graph=Ring(), mu=0.5, releases=3
    ),
}
REGRESSION = {
    "async_learner, bounded rows": AsyncLearner(
        reg=0.01, feature_norm=2.0, target=1.0, theta_max=0.3
    ),
    "async_learner, moments": Moments(reg=0.01),
    "pp_dmtl, squared": PPDMTL(feature_norm=1.0, loss="squared", lam=0.02, a1=0.1),
}


def setting(name: str):
    """A problem, its algorithm with everything resolved, and who acts (1, S)."""
    kind = "regression" if name in REGRESSION else "classification"
    data = load_synthetic_tasks(
        tasks=TASKS,
        train_examples=9,
        test_examples=4,
        features=5,
        problem=kind,
        public_examples=20,
        seed=2,
    )
    model, algorithm = models.linear_regression(bias=False), (ALGORITHMS | REGRESSION)[name]
    clients = torch.from_numpy(np.random.default_rng(len(name)).integers(-1, TASKS, (1, STEPS)))
    return problem_of(data, model=model, loss="auto", rounds=STEPS), algorithm, clients


def privacy_of(name: str) -> RecordPrivacy:
    return replace(NOISED, mechanism="laplace") if name == "p2p, published" else NOISED


class _Client:
    """One client's process: a problem with its data only (the others' records are zeros), and a channel of its own
    that releases its gradients alone."""

    def __init__(self, algorithm, problem, clients, client: int, privacy) -> None:
        train, test = problem.data.train, problem.data.test
        mine = slice(int(train.offsets[client]), int(train.offsets[client + 1]))
        x, y = torch.zeros_like(train.x), torch.full_like(train.y, train.y[mine][0])
        x[mine], y[mine] = train.x[mine], train.y[mine]
        data = replace(
            problem.data,
            train=replace(train, x=x, y=y),
            test=replace(test, x=torch.zeros_like(test.x)),
        )
        self.algorithm, self.problem, self.client = (
            algorithm,
            replace(problem, data=data),
            torch.tensor([client]),
        )
        self.channel = open_activations(algorithm, self.problem, clients, privacy)
        self.store = algorithm.init(self.problem).private

    def release(self, public, block):
        """What leaves the client in one activation."""
        algorithm, channel = self.algorithm, self.channel.channel
        channel.begin(block.first, block.client)
        answered, client = channel.answering, block.client[:, 0].numpy()
        server, own = arrays_of(algorithm, public, client)
        point = algorithm.query_point(algorithm.constants(self.problem), server, own)
        x, y = algorithm.data(self.problem).arrays[int(client[0])]
        gradient = channel.release(
            [algorithm.gradient_factors(x, y, point[runs]) for _, runs in channel.acting]
        )
        return Answer(client, point, gradient, answered, channel.noise_std().numpy())

    def model(self, public):
        """The client's personal model, from the public state and what it keeps."""
        return self.algorithm.personalize(self.problem, State(public, self.store), self.client)[0]


def arrays_of(algorithm, public, client):
    """The public state of one run, and the rows of the client that acts."""
    server = {name: tensor.numpy() for name, tensor in public.items()}
    return server, {name: server[name][:, int(client[0])] for name in algorithm.by_client}


@pytest.mark.parametrize("name", [*ALGORITHMS, *REGRESSION])
def test_a_client_in_its_own_process_releases_what_the_stack_releases(name: str) -> None:
    problem, algorithm, clients = setting(name)
    stacked = open_activations(algorithm, problem, clients, privacy_of(name))
    stacked.record = []
    state = algorithm.init(problem)
    processes = [_Client(algorithm, problem, clients, k, privacy_of(name)) for k in range(TASKS)]
    public, record = {key: value.clone() for key, value in state.public.items()}, []
    for block in blocks_of(clients, 1):
        stacked.begin(block.first, block.client)
        state = algorithm.step(problem, state, block, stacked.channel)
        for k, process in enumerate(processes):  # everyone follows the public schedule
            if k != int(block.client):
                process.channel.begin(block.first, torch.full((1, 1), -1))
                process.channel.release(lambda *_: torch.zeros(1, 1))
        if int(block.client) >= 0:
            answer = processes[int(block.client)].release(public, block)
            record += (
                [(block.first, GRADIENT, torch.from_numpy(answer.gradient))]
                if answer.answered[0]
                else []
            )
            server, own = arrays_of(algorithm, public, answer.client)
            constants = algorithm.constants(problem)
            new, new_own = algorithm.server_update(constants, server, own, answer)
            for key, value in new.items():
                public[key] = torch.from_numpy(value)
            for key, value in new_own.items():
                public[key][:, int(block.client)] = torch.from_numpy(value)
            after = getattr(algorithm, "model", None)
            if after is not None:
                clip = processes[int(block.client)].channel.channel.records.clip
                public["theta_l"] = after(problem, public, problem.data.train.counts, clip)
    acting = [key for key in stacked.record if bool(key[2].any())]
    assert [key[:2] for key in acting] == [key[:2] for key in record]
    apart = torch.stack([process.model(public) for process in processes])
    stack = algorithm.personalize(problem, state, torch.arange(TASKS))
    found, expected = ([value for *_, value in each] for each in (record, acting))
    for one, other in ((found, expected), (public, state.public), (apart, stack)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*ALGORITHMS, *REGRESSION])
def test_replicates_and_pieces_of_a_schedule_are_runs_of_their_own(name: str) -> None:
    problem, algorithm, clients = setting(name)
    both = torch.cat([clients, clients.flip(1)])
    caps = np.full(TASKS, STEPS)
    together, _ = run_activations(algorithm, problem, both, privacy_of(name), caps=caps)
    alone, _ = run_activations(algorithm, problem, clients, privacy_of(name), caps=caps, pieces=7)
    some = torch.tensor([4, 1])
    models = algorithm.models(problem, together, some)
    torch.testing.assert_close(
        algorithm.models(problem, alone, some)[0], models[0], rtol=1e-10, atol=1e-12
    )
    assert not torch.equal(models[0], models[1])


def test_simulated_runs_end_where_the_budget_does() -> None:
    problem, algorithm, _ = setting("async_learner")
    privacy, caps = (
        replace(NOISED, noise_multiplier=None, epsilon=1.0),
        GivenCaps(np.array([1, 9, 9, 9, 9, 9])),
    )
    clients = torch.tensor(
        [[0, 1, 0, 1, 2], [2, 1, 1, 0, 2]]
    )  # the first replicate ends before its second 0
    ended = torch.tensor([[0, 1, -1, -1, -1], [2, 1, 1, 0, 2]])
    short, expected = (
        simulated_objectives(algorithm, problem, caps, block_of(each), privacy, seed=0, parts=2)
        for each in (clients, ended)
    )
    assert torch.equal(short, expected)
    assert not problem.prepared


class _Curious(PPDMTL):
    """Its tasks look at the records of another one."""

    def data(self, problem):
        plain = super().data(problem)
        before = (plain.x[-1], *plain.x[:-1])
        x = [own + 1e-3 * float(other.mean()) for own, other in zip(plain.x, before, strict=True)]
        return replace(plain, x=tuple(x))


def test_a_client_that_reads_the_data_of_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for it."""
    monkeypatch.setitem(ALGORITHMS, "broken", _Curious(feature_norm=1.0, lam=0.02, a1=0.2))
    with pytest.raises(AssertionError):
        test_a_client_in_its_own_process_releases_what_the_stack_releases("broken")


def test_adding_a_client_changes_nobody_elses_noise() -> None:
    """Noise is addressed by a client and its own count: others may act between, or not be there."""
    algorithm = ALGORITHMS["pp_dmtl"]
    few, many = (
        load_synthetic_tasks(tasks=tasks, train_examples=9, test_examples=4, features=5, seed=2)
        for tasks in (4, 6)
    )
    noise = []
    for data, order in ((few, [0, 2, 0, 3]), (many, [5, 0, 4, 2, 5, 0, 3, 1])):
        problem = problem_of(
            data, model=models.linear_regression(bias=False), loss="auto", rounds=STEPS
        )
        clients = torch.tensor([order])
        channel = open_activations(algorithm, problem, clients, NOISED, caps=np.full(len(data), 5))
        channel.begin(0, clients)
        drawn = [
            channel.release(lambda k, where: torch.zeros(len(where), 9, dtype=torch.float64))
            for _ in order
        ]
        noise.append(
            {
                (k, order[:at].count(k)): one
                for at, (k, one) in enumerate(zip(order, drawn, strict=True))
            }
        )
    for key in noise[0]:
        assert torch.equal(noise[0][key], noise[1][key]), key
    assert isinstance(channel.source, SeededSource)
