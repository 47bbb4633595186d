"""The messages of a round, collected piece by piece, and the pieces."""

import pytest
import torch
from torch import Tensor

from fedmtl import Execution, LocalSGD
from fedmtl.algorithms.rounds import Messages, _joined
from fedmtl.data import FederatedDataset
from fedmtl.local import Executor
from fedmtl.local.clients import pieces_of
from fedmtl.local.stacking import LANES, batch_widths, lanes, places, stack_sizes
from fedmtl.privacy import ClientPrivacy, Clip, FullParticipation, ReleasePlan, open_channel
from fedmtl.privacy.clip import RowTotal, clipped_sum

CLIENTS = 9
PIECES = [torch.tensor([4, 1]), torch.tensor([8]), torch.tensor([0, 7, 3]), torch.tensor([6, 2, 5])]
SHORT = 5
LONG = 1 << 14


def collected(dimension: int, rows: torch.Tensor, pieces=PIECES):
    """The messages of the pieces, in a round that has begun."""
    plan = ReleasePlan(name="update", dimension=dimension)
    privacy = ClientPrivacy(clip_norm=1.5, noise_multiplier=1.0, delta=1e-5)
    channel = open_channel(privacy, (plan,), FullParticipation().bind(CLIENTS), seed=0, steps=1)
    channel.begin(0, channel.draw(0))
    messages = Messages(channel)
    for clients in pieces:
        messages.add(clients, {"update": rows[clients]})
    clients, sent = messages.take()
    assert torch.equal(clients, torch.cat(pieces))
    return channel, clients, sent["update"]


@pytest.mark.parametrize("pieces", [PIECES, [torch.arange(CLIENTS).flip(0)]])
def test_short_rows_are_those_of_the_clients_that_come_with_them(pieces):
    """One stack may hold all clients, those with most local steps first."""
    rows = torch.randn(CLIENTS, SHORT, generator=torch.Generator().manual_seed(1))
    channel, clients, message = collected(SHORT, rows, pieces)
    assert torch.equal(message, rows[clients])
    released = channel.release("update", message, clients)
    channel, _, ordered = collected(SHORT, rows, [torch.arange(CLIENTS)])
    assert torch.equal(channel.release("update", ordered, torch.arange(CLIENTS)), released)


def test_long_rows_are_a_sum_with_the_bits_of_all_rows_at_once():
    rows = torch.randn(CLIENTS, LONG, generator=torch.Generator().manual_seed(1))
    rows[:5] *= 1e-3  # shorter than the clip
    channel, _, message = collected(LONG, rows)
    assert isinstance(message, RowTotal)
    assert message.clients == list(range(CLIENTS))
    assert torch.equal(message.sum(), clipped_sum(rows, Clip(1.5), message.width))
    released = channel.release("update", message, torch.arange(CLIENTS))
    assert torch.isfinite(released).all()


def test_rows_of_replicates_are_joined_by_client():
    rows = torch.randn(2, CLIENTS, SHORT, generator=torch.Generator().manual_seed(1))

    class Door:
        """A channel that needs the rows."""

        def new_total(self, name):
            return None

    messages = Messages(Door())
    for clients in PIECES:
        messages.add(clients, {"update": rows[:, clients]})
    clients, sent = messages.take()
    assert torch.equal(sent["update"], rows[:, clients])


def test_rows_off_the_cpu_are_kept_as_they_are():
    """A sum is exact on the CPU alone."""
    rows = torch.zeros(CLIENTS, LONG, device="meta")
    _, _, message = collected(LONG, rows)
    assert isinstance(message, Tensor)
    assert message.device.type == "meta"


def test_pieces_of_several_precisions_keep_the_digits_of_the_finest():
    rows = torch.randn(CLIENTS, SHORT, generator=torch.Generator().manual_seed(1)).double()
    rows[4:] += 2.0**-40
    joined = _joined([rows[:4].float(), rows[4:]])
    assert joined.dtype == torch.float64
    assert torch.equal(joined[4:], rows[4:])
    assert torch.equal(joined[:4], rows[:4].float().double())


@pytest.mark.parametrize(
    ("cohort", "ranks"), [(None, [2, 5, 9]), ([9, 2, 7, 5], [1, 3, 0]), ([2, 5, 9], [0, 1, 2])]
)
def test_the_lane_of_a_client_follows_its_place_in_the_cohort(cohort, ranks):
    if cohort is not None:
        cohort = torch.tensor(cohort)
    assert lanes(torch.tensor([2, 5, 9]), cohort).tolist() == [rank % LANES for rank in ranks]


def computed(data: FederatedDataset, solver: LocalSGD, clients: Tensor, chunk: int) -> int:
    """The number of places in the stacks of some clients, fillers among them."""
    counts = data.train.counts[clients]
    widths = batch_widths(counts, solver.batch_size)
    steps = solver.step_counts(counts)
    number = 0
    for width in widths.unique().tolist():
        alike = widths == width
        order, _ = places(steps[alike], clients[alike] % LANES, stack_sizes(width, chunk)[0])
        number += len(order)
    return number


@pytest.mark.parametrize("chunk", [1, 4, 8])
@pytest.mark.parametrize("size", [1, 8, 1000])
def test_every_client_is_in_one_piece_and_pieces_have_whole_stacks(chunk, size):
    """In pieces no more is computed than for all clients at once."""
    counts = torch.randint(2, 60, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    given = {f"c{i}": (torch.zeros(n, 1), torch.zeros(n)) for i, n in enumerate(counts)}
    data = FederatedDataset.from_tensors(given, test_fraction=0.1)
    solver = LocalSGD(lr=0.1, epochs=1, batch_size=None)
    execution = Execution(chunk=chunk, processes=1)
    cpu = torch.device("cpu")
    executor = Executor(execution, torch.nn.Linear(1, 1), device=cpu, dtype=torch.float32)
    clients = torch.arange(0, 37, 2)
    pieces = [
        piece.clients
        for piece in pieces_of(data, solver, executor, clients, size=size, seed=0, round=0)
    ]
    assert torch.equal(torch.cat(pieces).sort().values, clients)
    assert max(len(piece) for piece in pieces) <= max(size, chunk)
    each = [computed(data, solver, piece, chunk) for piece in pieces]
    assert sum(each) == computed(data, solver, clients, chunk)
