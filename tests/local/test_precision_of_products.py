"""Products of local training in bfloat16: parameters, gradients and sums stay what they were."""

import pytest
import torch
from torch import nn

import fedmtl
from fedmtl import ClientPrivacy, FedAvg, LocalSGD, PoissonSampling, RecordPrivacy, Trainer, models
from fedmtl.errors import ConfigError
from fedmtl.local import Execution
from fedmtl.stacked import StackedModule
from fedmtl.trainer.problem import fingerprint
from tests.helpers import ragged_classification

CPU = torch.device("cpu")
SETTINGS = {"model": models.mlp(hidden=4), "schedule": PoissonSampling(cohort=6), "rounds": 2, "progress": False}


def trainer(dtype, **changes):
    given = {"algorithm": FedAvg(local=LocalSGD(lr=0.1)), "privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0)}
    return Trainer(data=ragged_classification(), **(SETTINGS | given | {"dtype": dtype, "device": "cpu"} | changes))


def test_products_are_rounded_and_parameters_are_not():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5))
    x = torch.randn(3, 7, 64)
    found = {}
    for dtype in (None, torch.bfloat16):
        stack = StackedModule(net, capacity=3, device=CPU, dtype=torch.float32)
        stack.train_in(dtype)
        stack.load(stack.layout.flatten(net), 3)
        outputs = stack.forward(x)
        gradients = stack.backward(outputs.square().flatten(1).sum(1)).clone()
        assert outputs.dtype == gradients.dtype == stack.rows.dtype == torch.float32
        found[dtype] = outputs.detach(), gradients
    for one, other in zip(found[None], found[torch.bfloat16], strict=True):
        off = float((one - other).norm() / one.norm())
        assert 2.0**-12 < off < 2.0**-6  # 8 bits of a fraction


def test_a_run_keeps_float32_and_its_released_values_are_close():
    execution = Execution("stacked")
    runs = [trainer(dtype, execution=execution).fit() for dtype in ("float32", "bfloat16")]
    assert all(run.personal.dtype == torch.float32 for run in runs)
    assert not torch.equal(runs[0].shared, runs[1].shared)
    assert (runs[0].shared - runs[1].shared).abs().max() < 0.02


def test_another_dtype_is_another_run():
    marks = []
    for dtype in ("float32", "bfloat16"):
        given = trainer(dtype)
        problem = given.problem()
        marks.append(fingerprint(problem, given.algorithm, given.privacy, given.schedule))
        problem.executor.close()
    assert marks[0] != marks[1]


def test_where_it_is_refused():
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'.*float32"):
        trainer("bfloat16", privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0))
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'.*float32"):
        trainer("bfloat16", algorithm=fedmtl.MPMTL(), schedule=fedmtl.FullParticipation())
    with pytest.raises(ConfigError, match="bfloat16"):
        trainer("float16")
