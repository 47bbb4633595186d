"""Receipts and sums against careless callers: what is refused has neither spent nor released anything."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import BlockReceipt, LocalReceipt, Receipt
from tests.privacy import activations
from tests.privacy.test_records import DIMENSION, EMPTY, NOISED, begin, door

EVERYONE = torch.arange(3)


def local(charged: int = 2) -> LocalReceipt:
    return LocalReceipt(0, torch.full((3,), charged), 1)


@pytest.mark.parametrize(
    "clients",
    [
        torch.tensor([-1, 2]),  # two names of the last client
        torch.tensor([3]),
        torch.tensor([[0, 1]]),
        torch.tensor([True, False, True]),
        torch.tensor([0, 1, 1], dtype=torch.uint8),
        torch.tensor([0.0]),
    ],
    ids=str,
)
def test_a_local_step_is_of_positions_of_clients(clients: Tensor) -> None:
    receipt = local()
    for spend in (receipt.next, lambda some: receipt.spend(some, torch.zeros(len(some)).long())):
        with pytest.raises(PrivacyError, match=r"int64 \(k,\) from 0 to 2"):
            spend(clients)
    assert receipt.next(EVERYONE).tolist() == [0, 0, 0]


@pytest.mark.parametrize("clients", [torch.tensor([0.0]), torch.tensor([True]), torch.zeros(0)])
def test_a_receipt_is_spent_on_positions_of_clients(clients: Tensor) -> None:
    receipt = Receipt(0, 0, EVERYONE)
    with pytest.raises(PrivacyError, match="positions of clients as int64"):
        receipt.spend("update", clients)
    receipt.spend("update", EVERYONE)


def test_a_step_is_paid_for_under_the_number_that_it_was_told() -> None:
    receipt = local()
    steps = receipt.next(EVERYONE[:2])
    receipt.spend(EVERYONE[1:2], steps[1:2])
    with pytest.raises(PrivacyError, match="while its gradients were added up"):
        receipt.spend(EVERYONE[:2], steps)
    assert receipt.next(EVERYONE).tolist() == [0, 1, 0]
    block = BlockReceipt(5, np.zeros((2, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64))
    block.spend(0)
    with pytest.raises(PrivacyError, match="Activation 5 was released"):
        block.spend(0)
    assert block.left == 1


def test_gradients_that_release_the_same_step_are_refused() -> None:
    """Both releases would have the noise of one address, and their difference would be of the gradients alone."""
    channel = door(NOISED)
    begin(channel)
    one = torch.tensor([2])

    def gradients() -> Iterator[tuple[Tensor, Tensor]]:
        channel.local.release(one, [EMPTY])
        yield torch.ones(1, DIMENSION), torch.zeros(1, dtype=torch.int64)

    with pytest.raises(PrivacyError, match="its noise would be used twice"):
        channel.local.release(one, gradients())
    assert channel.local.numbers(one).tolist() == [1]


def test_gradients_of_another_length_spend_nothing() -> None:
    """One number would be added to every coordinate of the noise: a gradient longer than the clip."""
    channel = door(NOISED)
    begin(channel)
    one = torch.tensor([2])
    for wrong in (torch.ones(1, 1), torch.ones(DIMENSION)):
        with pytest.raises(ConfigError, match=rf"needed: \(N, {DIMENSION}\)"):
            channel.local.release(one, [(wrong, torch.zeros(1, dtype=torch.int64))])
    assert channel.local.numbers(one).tolist() == [0]


@pytest.mark.parametrize(
    "gradients", [np.full((2, 5), 3.0), torch.ones(2, 5, activations.D)], ids=["factors", "whole"]
)
def test_a_replicate_in_which_no_client_acts_gets_no_sum(gradients: np.ndarray | Tensor) -> None:
    """It has no noise either."""
    channel = activations.door(replicates=2).channel
    channel.begin(0, torch.tensor([[-1], [0]]))
    with pytest.raises(PrivacyError, match="acts in 1 replicates; gradients of 2"):
        channel.release([gradients])
    assert not channel.release([gradients[1:]])[0].any()


def test_factors_are_of_each_row() -> None:
    channel = activations.door().channel
    channel.begin(0, torch.tensor([[0]]))
    for shape in ((1, 1), (1, 4), (1, 5, 1)):
        with pytest.raises(ConfigError, match=r"needed: \(k, 5\)"):
            channel.release([np.ones(shape)])
