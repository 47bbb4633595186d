"""A round on a device that is fed by a queue: nothing is waited for but the released sum, and the numbers are those of
the CPU."""

import dataclasses
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fedmtl import APFL, PMTL, PPSGD, Ditto, FedAvg, FedPer, FedRep, PFedMe, models
from fedmtl.local import Execution, LocalOptimizer, LocalSGD
from fedmtl.privacy import ClientPrivacy, PoissonSampling, open_channel
from fedmtl.schedules import rounds
from fedmtl.trainer.problem import build_problem
from tests.helpers import ragged_classification
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
        channel = open_channel(privacy, algorithm.plan(problem, bound), bound, seed=0, steps=steps)
        channel.record, waits = [], []
        state, order = algorithm.init(problem), torch.argsort(problem.data.keys, stable=True)
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


@pytest.mark.parametrize("model", [network, small_cnn])
def test_dropout_and_convolutions_do_not_wait(model):
    execution = Execution("stacked", graphs=True, data="device")
    assert run(ALGORITHMS["pmtl"], PRETEND, model=model, execution=execution)[2] == [[SUM]] * 3


def test_rows_of_the_host_travel_without_waiting_for_the_device():
    values, _, waits = run(ALGORITHMS["pmtl"], PRETEND, execution=Execution("stacked", data="host"))
    assert waits == [[SUM]] * 3
    assert torch.equal(values[0], run(ALGORITHMS["pmtl"], "cpu")[0][0])


def test_a_number_that_is_asked_for_is_found():
    waits = run(Asking(local=SGD), PRETEND, execution=Execution("stacked", data="device"))[2]
    assert waits == [["_local_scalar_dense", SUM]] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", [*ALGORITHMS, "network", "small_cnn"])
def test_a_round_on_a_gpu_gives_the_numbers_of_the_cpu(name, graphs):
    model = {"network": network, "small_cnn": small_cnn}.get(name)
    algorithm = ALGORITHMS[name if model is None else "pmtl"]
    values, personal, _ = run(algorithm, "cuda", model=model, execution=Execution(graphs=graphs, tf32=False))
    expected, models_expected, _ = run(algorithm, "cpu", model=model)
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(personal, models_expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_round_on_a_gpu_waits_for_the_released_sum_alone(name, graphs):
    waits = run(ALGORITHMS[name], "cuda", execution=Execution(graphs=graphs), steps=6)[2]
    assert waits[-1] == [SUM]
