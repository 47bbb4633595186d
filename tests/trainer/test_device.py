"""A round on a device that is fed by a queue: nothing is waited for but the released sum, and the numbers are those of
the CPU."""

import dataclasses
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fedmtl import (
    APFL,
    MPMTL,
    PMTL,
    PPDMTL,
    PPSGD,
    Ditto,
    FedAvg,
    FedPer,
    FedRep,
    FullParticipation,
    PFedMe,
    PoissonClocks,
    PrivatePrior,
    RecordPrivacy,
    Trainer,
    models,
)  # fmt: skip
from fedmtl.algorithms.finetune import Finetune
from fedmtl.errors import ConfigError
from fedmtl.local import Execution, LocalOptimizer, LocalSGD
from fedmtl.privacy import ClientPrivacy, PoissonSampling, open_channel
from fedmtl.schedules import rounds
from fedmtl.stacked.graphs import EagerGraph
from fedmtl.trainer.problem import build_problem
from tests.helpers import ragged_classification, regression
from tests.local.test_graphs import network, small_cnn
from tests.pretend import PRETEND, Pretending

SGD = LocalSGD(lr=0.1, epochs=2, batch_size=4)
ALGORITHMS = {
    "pmtl": PMTL(lam=0.5, local=dataclasses.replace(SGD, momentum=0.9)),
    "pmtl, local": PMTL(lam=0.5, local=SGD, delta="local"),
    "fedavg": FedAvg(local=SGD),
    "adam": FedAvg(local=LocalOptimizer(optimizer_name="Adam", lr=0.01, batch_size=4)),
    "ditto": Ditto(lam=0.3, local=SGD),
    "apfl": APFL(local=SGD),
    "pfedme": PFedMe(local=SGD),
    "ppsgd": PPSGD(local=SGD),
    "fedrep": FedRep(local=SGD),
    "fedper": FedPer(local=SGD),
}
SUM = "_to_copy to the host"


class Asking(FedAvg):
    """Asks the device for a number in the middle of its round."""

    def client(self, problem, public, own, clients, round):
        rows, own = super().client(problem, public, own, clients, round)
        assert float(rows["update"][0, 0]) < 1e9
        return rows, own


@contextmanager
def waiting(pretending, device):
    """Within the block, gather what is waited for: on a real GPU every wait is a ``SUM``."""
    found = []
    if pretending is not None:
        pretending.waits.clear()
        yield found
        found += pretending.waits
    elif device.type == "cuda":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            yield found
            torch.cuda.set_sync_debug_mode("default")
        found += [SUM for one in seen if "synchronizing CUDA operation" in str(one.message)]
    else:
        yield found


def run(algorithm, device, *, model=None, execution=None, steps=3):
    """(released values, personal models, what every round waited for) of a run on a device."""
    away = torch.device(device).type == PRETEND.type
    execution, model = execution or Execution("stacked"), model or models.mlp(hidden=4)
    with Pretending() if away else nullcontext() as pretending:
        data = ragged_classification(11)
        problem = build_problem(data, model, "cross_entropy", execution, steps, 0, device, "float32")
        bound = PoissonSampling(cohort=7).bind(problem.clients)
        privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        order = torch.argsort(problem.data.keys, stable=True)
        channel = open_channel(privacy, algorithm.plan(problem, bound), bound, seed=0, steps=steps, order=order)
        channel.record, waits = [], []
        state = algorithm.init(problem)
        for block in rounds(channel.draw, order, start=0, stop=steps):
            channel.begin(block.first, torch.argsort(order)[block.cohort])
            with waiting(pretending, problem.initial.device) as found:
                state = algorithm.step(problem, state, block, channel)
            waits.append(found)
        personal = algorithm.personalize(problem, state, torch.arange(problem.clients)).cpu()
        channel.close()
    return [value for _, _, value in channel.record], personal, waits


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_round_waits_for_the_released_sum_alone(name, graphs):
    execution = Execution("stacked", graphs=graphs, data="device")
    values, personal, waits = run(ALGORITHMS[name], PRETEND, execution=execution)
    assert waits == [[SUM]] * 3
    expected, models_expected, _ = run(ALGORITHMS[name], "cpu")
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(personal, models_expected, rtol=1e-5, atol=1e-6)


def test_rows_of_the_host_travel_without_waiting_for_the_device():
    values, _, waits = run(ALGORITHMS["pmtl"], PRETEND, execution=Execution("stacked", data="host"))
    assert waits == [[SUM]] * 3
    assert torch.equal(values[0], run(ALGORITHMS["pmtl"], "cpu")[0][0])


@pytest.mark.parametrize("model", [network, small_cnn])
def test_nothing_enters_or_leaves_the_device_within_a_recorded_step(model, monkeypatch):
    """A graph would copy from the host's memory of the day it was recorded."""
    crossed = []

    class Watched(EagerGraph):
        def __init__(self, work):
            def watched():
                device = _get_current_dispatch_mode()
                before = len(device.crossings)
                work()
                crossed.append(device.crossings[before:])

            super().__init__(watched)

    monkeypatch.setattr("fedmtl.stacked.graphs.EagerGraph", Watched)
    execution = Execution("stacked", graphs=True, data="device", convolutions="products")
    assert run(ALGORITHMS["pmtl"], PRETEND, model=model, execution=execution, steps=2)[2] == [[SUM]] * 2
    assert len(crossed) > 5
    assert not any(crossed)


def whole(device, **changes):
    """Every number of a run from beginning to end."""
    given = {
        "algorithm": PMTL(lam=0.5, local=SGD), "model": models.mlp(hidden=4), "schedule": PoissonSampling(cohort=7),
        "privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0), "rounds": 2, "baselines": ("local",), "progress": False,
        "execution": Execution("stacked", graphs=True, data="device", convolutions="products", tf32=False),
    }  # fmt: skip
    result = Trainer(data=ragged_classification(11), device=str(device), **given | changes).fit()
    return result.personal.cpu(), result.final, result.by_client


WHOLE = {
    "clients that are drawn for evaluation": {"evaluate_clients": 4, "finetune": Finetune(validation=0.3)},
    "records": {
        "model": small_cnn, "privacy": RecordPrivacy(clip_norm=1.0, epsilon=8.0, source="seeded"), "rounds": 1,
        "baselines": (),
    },
    "nothing is released": {"model": network, "privacy": None, "rounds": 1, "baselines": ()},
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_mixes_no_tensors_of_two_devices(name):
    with Pretending():
        personal, final, by_client = whole(PRETEND, **WHOLE[name])
    expected, final_there, by_client_there = whole("cpu", **WHOLE[name])
    torch.testing.assert_close(personal, expected, rtol=1e-5, atol=1e-6)
    assert final.keys() == final_there.keys()
    assert by_client.keys() == by_client_there.keys()


@pytest.mark.parametrize(
    "algorithm", [MPMTL(row_norm=1.0), PPDMTL(loss="squared", row_norm=1.0), PrivatePrior(row_norm=1.0)]
)
def test_methods_in_numpy_are_on_the_cpu_whatever_the_device(algorithm):
    given = {"algorithm": algorithm, "model": models.linear_regression(), "privacy": None, "baselines": ()}
    if algorithm.one_at_a_time:
        given |= {"schedule": PoissonClocks(events=10), "rounds": 10}
    else:
        given |= {"schedule": FullParticipation(), "rounds": 1}
    with Pretending() as device:
        result = Trainer(data=regression(3), device=str(PRETEND), progress=False, **given).fit()
    assert result.personal.device.type == "cpu"
    assert not device.crossings
    with pytest.raises(ConfigError, match="'cud'"):
        Trainer(data=regression(3), device="cud", progress=False, **given).problem()


def test_clients_of_data_on_a_device_are_chosen_there():
    data = ragged_classification(5)
    with Pretending():
        there = data.to(PRETEND)
        parts = [(one.train.x.cpu(), one.test.y.cpu()) for one in (there.subset([3, 1]), there.split(0.5))]
    for found, one in zip(parts, (data.subset([3, 1]), data.split(0.5)), strict=True):
        assert torch.equal(found[0], one.train.x)
        assert torch.equal(found[1], one.test.y)


def test_a_number_that_is_asked_for_is_found():
    waits = run(Asking(local=SGD), PRETEND, execution=Execution("stacked", data="device"))[2]
    assert waits == [["_local_scalar_dense", SUM]] * 3


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
another = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LOGGED = "kernel by kernel"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", [*ALGORITHMS, "network", "small_cnn"])
def test_a_round_on_a_gpu_gives_the_numbers_of_the_cpu(name, graphs, caplog):
    model = {"network": network, "small_cnn": small_cnn}.get(name)
    algorithm = ALGORITHMS[name if model is None else "pmtl"]
    values, personal, _ = run(algorithm, "cuda", model=model, execution=Execution(graphs=graphs, tf32=False))
    expected, models_expected, _ = run(algorithm, "cpu", model=model)
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(personal, models_expected, rtol=1e-4, atol=1e-5)
    assert LOGGED not in caplog.text


@pytest.mark.gpu
@another
@pytest.mark.parametrize("model", [None, small_cnn])
def test_a_gpu_that_is_not_the_current_one_records_its_own_steps(model, caplog):
    values, *_ = run(ALGORITHMS["pmtl"], "cuda:1", model=model, execution=Execution(tf32=False))
    for one, other in zip(values, run(ALGORITHMS["pmtl"], "cpu", model=model)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert LOGGED not in caplog.text


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_on_a_gpu(name):
    execution = Execution(graphs=None, tf32=False)
    found, expected = (whole(device, **WHOLE[name] | {"execution": execution})[0] for device in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_round_on_a_gpu_waits_for_the_released_sum_alone(name, graphs):
    waits = run(ALGORITHMS[name], "cuda", execution=Execution(graphs=graphs), steps=6)[2]
    assert min(waits, key=len) == [SUM]  # a round that records waits more often
