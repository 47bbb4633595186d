"""Models that torch.func.vmap does not take: the advice that is given for them, followed."""

import pytest
import torch
from torch import nn

from fedmtl import (
    Execution,
    FedAvg,
    FederatedDataset,
    FullParticipation,
    LocalSGD,
    RecordPrivacy,
    models,
)
from fedmtl.errors import ModelError
from tests import small


class LastOutput(nn.Module):
    """A classifier by the last output of a recurrent layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Branching(nn.Module):
    """A forward whose course depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.head(x.flatten(1))
        return outputs if bool((outputs.abs() < 1e9).all()) else outputs.clamp(-1e9, 1e9)


def prelu() -> nn.Module:
    """A layer that is batched over clients, and not over their examples."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.PReLU(), nn.Linear(4, 2))


GENERATOR = torch.Generator().manual_seed(0)
DATA = FederatedDataset.from_tensors(
    {
        f"c{i}": (torch.randn(6 + i, 4, 3, generator=GENERATOR), torch.arange(6 + i) % 2)
        for i in range(3)
    },
    classes=2,
)


def outputs_of(model: nn.Module, **settings) -> torch.Tensor:
    """What the shared model says of all records after two rounds on clipped gradients of single records."""
    defaults = {
        "algorithm": FedAvg(local=LocalSGD(lr=0.5, steps=2, batch_size=None)),
        "data": DATA,
        "model": model,
        "schedule": FullParticipation(),
        "privacy": RecordPrivacy(clip_norm=0.3, epsilon=float("inf")),
        "rounds": 2,
        "execution": Execution(processes=1),
    }
    return small.trainer(**defaults | settings).fit().shared_model()(DATA.train.x.double())


def by_hand(model: nn.Module) -> torch.Tensor:
    """The same by a plain loop over rounds, clients, steps and records."""
    shared = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        changes = []
        for client in DATA.ids:
            own = [p.clone() for p in shared]
            records = DATA.subset([client]).train
            for _ in range(2):
                total = [torch.zeros_like(p) for p in own]
                for x, y in zip(records.x.double(), records.y, strict=True):
                    for p, value in zip(model.parameters(), own, strict=True):
                        p.data.copy_(value)
                    loss = nn.functional.cross_entropy(model(x[None]), y[None])
                    gradient = torch.autograd.grad(loss, list(model.parameters()))
                    norm = float(torch.cat([g.flatten() for g in gradient]).norm())
                    for t, g in zip(total, gradient, strict=True):
                        t += g * min(1.0, 0.3 / norm)
                own = [p - 0.5 * t / len(records.y) for p, t in zip(own, total, strict=True)]
            changes.append([p - q for p, q in zip(own, shared, strict=True)])
        shared = [
            p + torch.stack(each).mean(0)
            for p, each in zip(shared, zip(*changes, strict=True), strict=True)
        ]
    for p, value in zip(model.parameters(), shared, strict=True):
        p.data.copy_(value)
    return model(DATA.train.x.double())


@pytest.mark.parametrize("make", [lambda: LastOutput(nn.GRU), Branching, prelu])
def test_gradients_of_single_records_need_no_batching_rule(make) -> None:
    torch.manual_seed(1)
    model = make().double()
    got = outputs_of(model), outputs_of(model, execution=Execution(chunk=1))
    assert torch.equal(*got)
    torch.testing.assert_close(got[0], by_hand(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_advice_for_a_recurrent_layer_is_true(kind) -> None:
    torch.manual_seed(1)
    model = LastOutput(kind).double()
    with pytest.raises(
        ModelError, match=r"model\.fix=true, in Python models\.fix\(model\).*Execution\(chunk=1\)"
    ):
        outputs_of(model, execution=Execution(chunk=4))
    followed = [outputs_of(model, execution=Execution(chunk=1)), outputs_of(models.fix(model))]
    torch.testing.assert_close(*followed, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(followed[0], model(DATA.train.x.double()), atol=1e-2)
