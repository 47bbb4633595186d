"""Local steps that are recorded once and replayed on the same memory: the same numbers to the last bit."""

import dataclasses
import logging
import weakref

import pytest
import torch
from torch import nn

from fedmtl import PMTL, Callback, Ditto, FedAvg, Trainer, models
from fedmtl.errors import ConfigError
from fedmtl.local import Execution, LocalOptimizer, LocalSGD
from fedmtl.local.device import Program
from fedmtl.privacy import ClientPrivacy, FullParticipation, PoissonSampling
from fedmtl.stacked.graphs import Graphs
from tests.algorithms.harness import problem_of, run
from tests.helpers import ragged_classification
from tests.recording import ASKED, RecordedGraph, recording

CPU = torch.device("cpu")


def network(spec) -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(hidden, nn.Linear(6, 3))


def small_cnn(spec) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 3, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def released(algorithm, graphs, *, model=None, rounds=4, chunk=None, sampler=None, clients=11, loss="cross_entropy"):
    """Everything that a run released, its personal models, and how often a step was recorded."""
    execution = Execution("stacked", chunk=chunk, graphs=graphs)
    data = ragged_classification(clients)
    problem = problem_of(data, rounds=rounds, loss=loss, model=model or models.mlp(hidden=4), execution=execution)
    record = []
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
    state = run(algorithm, problem, sampler=sampler or PoissonSampling(cohort=7), privacy=privacy, record=record)
    with problem.executor.stack() as stack:
        captures = 0 if stack.graphs is None else stack.graphs.captures
    personal = algorithm.personalize(problem, state, torch.arange(problem.clients))
    return [value for _, _, value in record], personal, captures


SGD = LocalSGD(lr=0.1, epochs=2, batch_size=4)
CASES = {
    "anchor for all": (PMTL(lam=0.5, local=SGD), None),
    "momentum and weight decay": (PMTL(lam=0.5, local=dataclasses.replace(SGD, momentum=0.9, weight_decay=0.01)), None),
    "nesterov": (FedAvg(local=dataclasses.replace(SGD, momentum=0.5, nesterov=True)), None),
    "proximal step": (PMTL(lam=3.0, local=dataclasses.replace(SGD, proximal=True)), None),
    "two trainings": (Ditto(lam=0.3, local=SGD), None),
    "steps, not epochs": (FedAvg(local=LocalSGD(lr=0.1, steps=5, batch_size=4)), None),
    "all examples": (FedAvg(local=LocalSGD(lr=0.1, epochs=3, batch_size=None)), None),
    "a step size for some rounds": (FedAvg(local=dataclasses.replace(SGD, decay=0.5, decay_every=10)), None),
    "dropout": (PMTL(lam=0.5, local=dataclasses.replace(SGD, momentum=0.9)), network),
    "convolutions": (PMTL(lam=0.5, local=dataclasses.replace(SGD, momentum=0.9)), small_cnn),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_recorded_steps_give_the_same_bits(name, chunk):
    algorithm, model = CASES[name]
    values, personal, _ = released(algorithm, None, model=model, chunk=chunk)
    found, models_found, captures = released(algorithm, True, model=model, chunk=chunk)
    assert captures > 0
    assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))
    assert torch.equal(personal, models_found)


@pytest.mark.parametrize("name", CASES)
def test_operations_on_the_recorded_memory_are_all_that_a_step_is(name, monkeypatch):
    """No line of Python runs in a replay, as on a GPU."""
    algorithm, model = CASES[name]
    values, personal, _ = released(algorithm, None, model=model, chunk=8)
    with recording(monkeypatch) as graphs:
        found, models_found, captures = released(algorithm, True, model=model, chunk=8)
    assert captures == len(graphs) > 0
    assert sum(graph.replays for graph in graphs) > 2 * captures
    assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))
    assert torch.equal(personal, models_found)


def test_a_run_that_is_over_holds_no_memory_of_recordings(monkeypatch):
    """Without a collection of cycles, which knows nothing of a GPU's memory."""
    programs = []

    class Watched(Program):
        def __init__(self, *given):
            super().__init__(*given)
            programs.append(weakref.ref(self))

    monkeypatch.setattr("fedmtl.local.device.Program", Watched)
    data = ragged_classification(11)
    with recording(monkeypatch):
        execution = Execution("stacked", graphs=True)
        problem = problem_of(data, model=models.mlp(hidden=4), loss="cross_entropy", execution=execution)
        run(FedAvg(local=SGD), problem, sampler=PoissonSampling(cohort=7), privacy=None)
        assert programs
        assert programs[-1]() is not None
        problem.executor.close()
    assert not any(program() for program in programs)


def asks(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that asks for its own numbers."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return losses if float(losses.detach().mean()) < 1.0 else 2.0 * losses


def does_nothing(self: RecordedGraph) -> None:
    """The replay of a graph that was recorded on another device or stream."""


def refuses(self: RecordedGraph) -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("loss", "broken", "said"),
    [
        (asks, {}, ASKED),
        ("cross_entropy", {"replay": does_nothing}, "its replay gives other numbers"),
        ("cross_entropy", {"pool": refuses}, "no memory"),
    ],
)
def test_what_cannot_be_recorded_is_computed_all_the_same_and_said_once(loss, broken, said, monkeypatch, caplog):
    algorithm = PMTL(lam=0.5, local=dataclasses.replace(SGD, momentum=0.9))
    values, personal, _ = released(algorithm, None, loss=loss)
    with recording(monkeypatch) as graphs, caplog.at_level(logging.WARNING, "fedmtl"):
        for name, function in broken.items():
            monkeypatch.setattr(RecordedGraph, name, function)
        found, models_found, captures = released(algorithm, True, loss=loss)
    assert any(graph.calls for graph in graphs) == bool(broken)  # what waits is found before
    assert (captures > 0) == ("pool" in broken)  # which the second graph of a program asks the first one for
    assert caplog.text.count("launched kernel by kernel") == caplog.text.count(said) == 1
    assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))
    assert torch.equal(personal, models_found)


def test_a_step_is_recorded_once_for_each_size():
    # 11 clients in stacks of multiples of 8 (batches of 4): at most 8 and 16 of them, whatever their numbers of steps
    counts = [released(FedAvg(local=SGD), True, rounds=rounds, sampler=FullParticipation())[2] for rounds in (1, 6)]
    assert counts[0] == counts[1] <= 2


def test_sizes_are_few_and_cover_every_count():
    graphs = Graphs(chunk=1000)
    sizes = {graphs.size(count, 4) for count in range(1, 1001)}
    assert all(count <= graphs.size(count, 4) <= 1.5 * (count + 3) for count in range(4, 1001))
    assert sorted(sizes) == [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert Graphs(chunk=100).size(100, 16) == 112
    assert Graphs(chunk=3).size(1, 1) == 1


def test_a_step_size_of_every_round_is_not_recorded():
    assert released(FedAvg(local=dataclasses.replace(SGD, decay=0.9)), True)[2] == 0


def test_optimizers_with_states_of_their_own_are_not_recorded():
    adam = FedAvg(local=LocalOptimizer(optimizer_name="Adam", lr=0.01, batch_size=4))
    values, _, captures = released(adam, True)
    assert captures == 0
    assert all(torch.equal(a, b) for a, b in zip(values, released(adam, None)[0], strict=True))


def test_replays_read_the_memory_that_was_recorded(monkeypatch):
    """A stand-in whose replay does nothing is noticed: the numbers come from replays alone."""
    monkeypatch.setattr(
        Graphs, "capture", lambda self, work, device, beside: type("Nothing", (), {"replay": lambda self: None})()
    )
    values, *_ = released(FedAvg(local=SGD), None)
    found, *_ = released(FedAvg(local=SGD), True)
    assert not torch.equal(values[0], found[0])


def test_threads_record_nothing():
    assert Execution(graphs=True).resolve(nn.Linear(4, 3), CPU).strategy == "stacked"
    assert Execution().resolve(nn.Linear(4, 3), torch.device("cuda")).graphs
    with pytest.raises(ConfigError, match="graphs"):
        Execution("threads", graphs=True)


def test_a_run_goes_on_after_an_interruption_to_the_same_bits(tmp_path):
    """What a stack records and keeps between rounds is no part of the run: a new process has none of it."""

    class Stop(Callback):
        def on_event(self, event, state):
            if event.first == 2 and not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise KeyboardInterrupt

    def trainer(**changes):
        solver = dataclasses.replace(SGD, momentum=0.9, decay=0.5, decay_every=10)
        return Trainer(
            algorithm=PMTL(lam=0.5, local=solver), data=ragged_classification(11), model=models.mlp(hidden=4),
            schedule=PoissonSampling(cohort=7), privacy=ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5), rounds=5,
            checkpoint_every=1, device="cpu", progress=False, **changes,
        )  # fmt: skip

    recorded = Execution("stacked", graphs=True)
    whole = trainer(execution=recorded).fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(execution=recorded, folder=tmp_path / "run", callbacks=[Stop()]).fit()
    found = trainer(execution=recorded, folder=tmp_path / "run").fit(resume=True)
    for one in (found, trainer(execution=Execution("stacked")).fit()):
        assert torch.equal(one.personal, whole.personal)
        assert torch.equal(one.shared, whole.shared)
