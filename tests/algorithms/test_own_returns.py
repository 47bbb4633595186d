"""Methods of a user's own whose functions return what does not fit: each is named, and no state changes in silence."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedmtl import Buffered, FullParticipation, LocalSGD, PoissonSampling
from fedmtl.algorithms import ClientBatch, Personalization, RoundAlgorithm, State
from fedmtl.algorithms.store import ClientStore
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import ReleasePlan
from fedmtl.schedules import RandomLatency
from tests.helpers import ragged_classification
from tests.small import trainer

FULL = FullParticipation()
POISSON = PoissonSampling(cohort=4)
LATE = Buffered(latency=RandomLatency("lognorm", {"s": 1.5}), concurrency=5, buffer=3)


class Average(RoundAlgorithm):
    """The mean of the clients' models; every client keeps three numbers."""

    name = "average of the tests"
    local = LocalSGD(lr=0.1)

    def plan(self, problem, schedule):
        return (ReleasePlan(name="step", dimension=problem.dimension),)

    def init(self, problem, replicates=1):
        return State({"w": problem.initial}, problem.client_store({"h": ((3,), torch.float32)}))

    def client_update(self, c):
        return {"step": self.rows(c)}, c.states

    def rows(self, c):
        return c.train(self.local, c.public["w"]) - c.public["w"]

    def server_update(self, problem, public, released):
        return {"w": public["w"] + released.values["step"].to(public["w"])}

    def personal_models(self, c):
        return c.public["w"].expand(len(c.clients), -1)


def with_functions(**functions):
    return type("Mine", (Average,), functions)()


def updated(change):
    """A method whose ``client_update`` returns ``change(rows, own)``."""
    return with_functions(client_update=lambda self, c: change(self.rows(c), c.states))


def run(algorithm, schedule):
    data = ragged_classification(8)
    return trainer(data=data, algorithm=algorithm, schedule=schedule, rounds=4).fit()


WRONG = {
    "no pair": (
        lambda rows, own: {"step": rows},
        "client_update returns a dict; it must .* a pair",
    ),
    "nothing": (lambda rows, own: None, "client_update returns nothing; it must return a pair"),
    "rows alone": (lambda rows, own: (rows, own), "as messages a tensor .*; it must be a mapping"),
    "a list": (lambda rows, own: ({"step": rows.tolist()}, own), "a list under 'step'"),
    "NumPy": (lambda rows, own: ({"step": rows.numpy()}, own), "a ndarray under 'step'"),
    "no message": (lambda rows, own: ({}, own), "no rows of the release 'step'.*returns: none"),
    "other name": (lambda rows, own: ({"stp": rows}, own), "no rows of .*it returns: 'stp'"),
    "another name": (lambda rows, own: ({"step": rows, "b": rows}, own), "'b' was not declared"),
    "short rows": (lambda rows, own: ({"step": rows[:, 1:]}, own), "float rows of shape"),
    "one row": (lambda rows, own: ({"step": rows[0]}, own), "float rows of shape"),
    "a sum": (lambda rows, own: ({"step": rows.sum(0)[None]}, own), "one row from each client"),
    "whole numbers": (lambda rows, own: ({"step": rows.long()}, own), "float rows of shape"),
    "unknown state": (lambda rows, own: ({"step": rows}, {"g": own["h"]}), "states 'g'.* has h"),
    "one state": (
        lambda rows, own: ({"step": rows}, {"h": own["h"][:1]}),
        r"'h' of shape \(1, 3\)",
    ),
    "narrow state": (lambda rows, own: ({"step": rows}, {"h": own["h"][:, :1]}), r"'h' of shape"),
    "states twice": (lambda rows, own: ({"step": rows}, {"h": own["h"].repeat(2, 1)}), "of shape"),
    "no states": (lambda rows, own: ({"step": rows}, own["h"]), "as states a tensor"),
}


@pytest.mark.parametrize("schedule", [FULL, POISSON, LATE], ids=["full", "Poisson", "buffered"])
@pytest.mark.parametrize("case", WRONG)
def test_an_update_that_does_not_fit_is_refused(case, schedule):
    change, message = WRONG[case]
    with pytest.raises((ConfigError, PrivacyError), match=message):
        run(updated(change), schedule)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"plan": lambda self, p, s: None}, "plan returns nothing; it must return a sequence"),
        ({"plan": lambda self, p, s: ("step",)}, "plan returns a tuple; it must return a sequence"),
        ({"init": lambda self, p, replicates=1: {}}, "init returns a dict; it must return State"),
        ({"init": lambda self, p, replicates=1: State({}, None)}, "init returns a State; it must"),
        (
            {"init": lambda self, p, replicates=1: State({"w": [0.0]}, p.client_store({}))},
            "as a public state a list under 'w'",
        ),
        ({"server_update": lambda self, p, public, r: None}, "as a public state nothing"),
        (
            {"receive": lambda self, c: {"h": c.states["h"][:1]}},
            "receive returns states 'h' of shape",
        ),
        ({"personal_models": lambda self, c: c.public["w"]}, r"must return a tensor \(8, 18\)"),
        ({"personal_models": lambda self, c: None}, "personal_models returns nothing"),
    ],
)
def test_other_functions_that_do_not_fit_are_refused(functions, message):
    with pytest.raises(ConfigError, match=message):
        run(with_functions(**functions), FULL)


def test_a_method_without_a_name_is_refused_before_the_run():
    class Nameless(RoundAlgorithm):
        pass

    with pytest.raises(ConfigError, match="Nameless has no name, which results and reports need"):
        trainer(algorithm=Nameless())


def moved(public):
    public["w"] += 1.0


IN_PLACE = {
    "client_update": lambda self, c: moved(c.public),
    "receive": lambda self, c: moved(c.public),
    "server_update": lambda self, problem, public, released: moved(public),
    "personal_models": lambda self, c: c.public["w"][:1].zero_(),
}


@pytest.mark.parametrize("function", IN_PLACE)
def test_a_public_state_that_is_changed_in_place_is_refused(function):
    """It would carry data of clients past the releases."""
    algorithm = with_functions(**{function: IN_PLACE[function]})
    with pytest.raises(
        PrivacyError, match=f"Mine.{function} changes 'w' in place, which all clients"
    ):
        run(algorithm, FULL)


def test_a_rank_computes_all_of_its_clients_by_their_positions_among_its_own():
    data = ragged_classification(4)
    owner = torch.tensor([0, 1, 0, 1])
    whole = replace(trainer(data=data).problem(), rank_of=owner, ranks=SimpleNamespace(rank=1))
    method = with_functions(all_at_once=True)
    store = ClientStore(4, {}, members=torch.tensor([1, 3]))
    ((ids, c),) = method._pieces(ClientBatch(whole, torch.tensor([1, 3])), store)
    assert (ids.tolist(), c.clients.tolist()) == ([1, 3], [0, 1])
    assert c.problem.data.ids == (data.ids[1], data.ids[3])


def test_a_run_in_inference_mode_trains():
    """Changes of its tensors are not counted."""
    with torch.inference_mode():
        found = run(Average(), FULL).personal
    assert torch.equal(found, run(Average(), FULL).personal)


def test_models_of_another_precision_are_joined_with_earlier_ones():
    def server_update(self, problem, public, released):
        return {"w": public["w"].double() + released.values["step"]}

    data = ragged_classification(8)
    late = {"data": data, "schedule": LATE, "rounds": 6}
    wide = trainer(**late, algorithm=with_functions(server_update=server_update), dtype="float32")
    usual = trainer(**late, algorithm=Average(), dtype="float32")
    assert torch.allclose(wide.fit().personal.float(), usual.fit().personal, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("reach", "error", "message"),
    [
        (
            lambda start, k: None,
            ConfigError,
            "personalize returns nothing; it must return a tensor",
        ),
        (
            lambda start, k: start[None],
            ConfigError,
            r"personalize returns a tensor \(1, 18\); it must",
        ),
        (lambda start, k: start.expand(k, -1)[:, 1:], ConfigError, r"\(8, 17\); it must return"),
        (lambda start, k: start.add_(1).expand(k, -1), PrivacyError, "changes 'start' in place"),
    ],
)
def test_a_finetuning_that_does_not_fit_is_refused(reach, error, message):
    class Reach(Personalization):
        kind = "reach"

        def text(self):
            return "of the test"

        def personalize(self, problem, start, clients):
            return reach(start, len(clients))

    run = trainer(data=ragged_classification(8), finetune=Reach())
    with pytest.raises(error, match=message):
        run.fit()
