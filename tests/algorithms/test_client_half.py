"""The client half of a round, one client in a process of its own: it sends the rows of the stacked run."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from fedmtl import FedAvg, FullParticipation, Trainer, models
from fedmtl.algorithms import ClientBatch, Released
from fedmtl.audit.recording import RecordedRounds
from fedmtl.data import load_synthetic_tasks
from fedmtl.privacy import ClientPrivacy, PoissonSampling, RecordPrivacy, SeededSource, open_channel
from fedmtl.schedules import rounds
from fedmtl.trainer.run_channel import releases_of
from tests.algorithms.harness import problem_of, repeated
from tests.helpers import ragged_classification
from tests.methods import LINEAR, NETWORKS, SOLVER
from tests.small import check_resumed

CLIENTS, ROUNDS = 6, 3
NAMES = [*NETWORKS, *LINEAR]
PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5)


def settings_of(name: str) -> dict[str, Any]:
    """Settings of a short run of a method."""
    algorithm, once = (NETWORKS | LINEAR)[name], name.startswith(("private_prior", "prior_layers"))
    data, model, privacy = ragged_classification(CLIENTS), models.mlp(hidden=5), PRIVACY
    if name in LINEAR:
        kind = "regression" if algorithm.loss == "squared" else "classification"
        sizes = {
            "tasks": CLIENTS,
            "train_examples": 9,
            "test_examples": 4,
            "features": 5,
            "rank": 1,
            "seed": 2,
        }
        data = load_synthetic_tasks(**sizes, problem=kind, structure="group_sparse")
        model = models.linear_regression(bias=True)
    if name == "mp_mtl, published":
        privacy = replace(PRIVACY, mechanism="wishart")
    if once:  # so little noise that clients train again
        privacy = replace(PRIVACY, noise_multiplier=0.01)
    return {
        "algorithm": algorithm,
        "data": data,
        "model": model,
        "schedule": FullParticipation() if once or name in LINEAR else PoissonSampling(cohort=4),
        "privacy": privacy,
        "rounds": 1 if once else ROUNDS,
    }


@cache
def trainer_of(name: str) -> Trainer:
    """A short run of a method in one process."""
    return Trainer(**settings_of(name), seed=3, progress=False)


class _Client:
    """One client's process: a problem that has its data only, a store with its tensors only, and the server's channel,
    or one of its own, by which its gradients leave where single records are protected."""

    def __init__(self, algorithm, problem, client: int, server, privacy=None) -> None:
        data = problem.data.subset([problem.data.ids[client]])
        self.algorithm, self.problem, self.channel = algorithm, replace(problem, data=data), server
        self.store = algorithm.init(self.problem).private
        if problem.protects_records:
            one = FullParticipation().bind(1)
            self.channel = open_channel(
                privacy,
                releases_of(algorithm, self.problem, one),
                one,
                seed=3,
                steps=ROUNDS,
                channel_class=RecordedRounds,
            )
            self.channel.record = []

    def batch(self, public, round: int):
        own = self.store.gather_all(ONE)
        return ClientBatch(
            self.problem,
            ONE,
            public,
            own,
            round,
            clips=self.channel.clips,
            charged_steps=self.channel.local,
        )

    def send(self, public, round: int):
        if self.problem.protects_records:
            self.channel.begin(round, self.channel.draw(round))
        rows, own = self.algorithm.client_update(self.batch(public, round))
        self.store.scatter_all(ONE, own)
        return rows

    def receive(self, public, round: int) -> None:
        self.store.scatter_all(ONE, self.algorithm.receive(self.batch(public, round)))

    def model(self, public):
        return self.algorithm.personal_models(
            ClientBatch(self.problem, ONE, public, self.store.gather_all(ONE))
        )[0]


ONE = torch.tensor([0])


def both(algorithm, problem, privacy, bound):
    """Run the stack, and a server with the clients apart; their public states and personal models agree.

    Returns:
        What the stack, the server and each client have recorded.
    """
    plans = releases_of(algorithm, problem, bound)
    options = {
        "seed": 3,
        "steps": problem.rounds,
        "channel_class": RecordedRounds,
        "order": torch.argsort(problem.data.keys, stable=True),
    }
    stacked, server = (open_channel(privacy, plans, bound, **options) for _ in range(2))
    stacked.record, server.record = [], []
    state = algorithm.init(problem)
    public = {
        key: value.clone() for key, value in state.public.items()
    }  # what the server of the clients apart has
    clients = [
        _Client(algorithm, problem, client, server, privacy) for client in range(problem.clients)
    ]
    for block in rounds(stacked.draw, start=0, stop=problem.rounds):
        stacked.begin(block.step, block.cohort)
        state = algorithm.step(problem, state, block, stacked)
        server.begin(block.step, server.draw(block.step))
        cohort = block.cohort.sort().values
        sent = [clients[client].send(public, block.step) for client in cohort.tolist()]
        values = {
            name: server.release(name, torch.cat([rows[name] for rows in sent]), cohort)
            for name in server.releases
        }
        public = algorithm.server_update(
            problem,
            public,
            Released(values, server.denominator, {name: server.noise_std(name) for name in values}),
        )
        for client in cohort.tolist():
            clients[client].receive(public, block.step)
    for key, value in state.public.items():
        torch.testing.assert_close(public[key], value, rtol=1e-10, atol=1e-12)
    personal = torch.stack([client.model(public) for client in clients])
    stack = algorithm.personalize(problem, state, torch.arange(problem.clients))
    torch.testing.assert_close(personal, stack, rtol=1e-10, atol=1e-12)
    return stacked.record, server.record, [client.channel.record for client in clients]


@pytest.mark.parametrize("name", NAMES)
def test_one_client_at_a_time_sends_what_the_stack_sends(name: str) -> None:
    settings = settings_of(name)
    steps = settings["rounds"]
    problem = problem_of(settings["data"], rounds=steps, model=settings["model"], loss="auto")
    bound = settings["schedule"].bind(problem.clients)
    stacked, alone, _ = both(settings["algorithm"], problem, settings["privacy"], bound)
    assert [key[:2] for key in stacked] == [key[:2] for key in alone]
    assert len(alone) >= steps * len(settings["algorithm"].plan(problem, bound))
    for (*_, one), (*_, other) in zip(stacked, alone, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_every_method_resumes_to_the_same_bits(name: str, tmp_path) -> None:
    run = trainer_of(name)
    check_resumed(partial(replace, run, checkpoint_every=1), tmp_path, min(1, run.rounds - 1))


@pytest.mark.parametrize("name", LINEAR)
def test_replicates_under_different_budgets_are_runs_of_their_own(name: str) -> None:
    settings = settings_of(name)
    algorithm, rounds = settings["algorithm"], settings["rounds"]
    problem = problem_of(settings["data"], rounds=rounds, model=settings["model"], loss="auto")
    budgets = [
        replace(settings["privacy"], noise_multiplier=None, epsilon=epsilon)
        for epsilon in (0.5, 5.0, 50.0)
    ]
    state = repeated(algorithm, problem, budgets, 3)
    together = algorithm.models(problem, state, torch.arange(CLIENTS))
    objectives = algorithm.objective(problem, state)
    assert together.shape == (3, CLIENTS, problem.dimension)
    for r, budget in enumerate(budgets):
        own = repeated(algorithm, problem, budget, 1, (SeededSource(3, r),))
        alone = algorithm.models(problem, own, torch.arange(CLIENTS))[0]
        torch.testing.assert_close(together[r], alone, rtol=1e-10, atol=1e-12)
        if objectives is not None:
            torch.testing.assert_close(objectives[r], algorithm.objective(problem, own)[0])
    assert not torch.equal(together[0], together[2])


def test_a_client_that_looks_beside_its_own_data_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above fails for an algorithm whose clients read the data of others."""

    class Curious(FedAvg):
        def client_update(self, c):
            rows, own = super().client_update(c)
            return {"update": rows["update"] * c.problem.data.train.x.float().mean()}, own

    monkeypatch.setitem(NETWORKS, "curious", Curious(local=SOLVER))
    with pytest.raises(AssertionError):
        test_one_client_at_a_time_sends_what_the_stack_sends("curious")


@pytest.mark.parametrize("name", ["pmtl", "fedprox", "ditto", "apfl", "scaffold"])
def test_a_client_that_protects_its_records_alone_sends_what_the_stack_sends(name: str) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5)
    problem = problem_of(
        ragged_classification(7), rounds=ROUNDS, model=models.mlp(hidden=5), loss="auto"
    )
    problem = replace(problem, protects_records=True)
    stacked, _, clients = both(
        NETWORKS[name], problem, privacy, FullParticipation().bind(problem.clients)
    )
    gradients = {(step, key): value for step, key, value in stacked if "gradient/" in key}
    apart = {
        (step, key): value
        for record in clients
        for step, key, value in record
        if "gradient/" in key
    }
    assert gradients.keys() == apart.keys()
    assert len(apart) > ROUNDS * problem.clients
    for key, value in gradients.items():
        torch.testing.assert_close(apart[key], value, rtol=1e-10, atol=1e-12)
