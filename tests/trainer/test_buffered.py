"""Runs whose clients answer late: their limits, their charges, and what is refused."""

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedmtl import (
    Buffered,
    Callback,
    ClientPrivacy,
    CyclicCohorts,
    Ditto,
    FedAvg,
    Finetune,
    FullParticipation,
    Interval,
    LocalSGD,
    QuantileClip,
    RecordPrivacy,
    ServerOptimizer,
    models,
    simulate,
)
from fedmtl.algorithms.problem import Problem
from fedmtl.audit import verify
from fedmtl.errors import ConfigError, PrivacyError, ResumeError
from fedmtl.local.clients import Piece
from fedmtl.privacy import open_channel
from fedmtl.privacy.release import ReleasePlan
from fedmtl.privacy.row_noise import RowNoise
from fedmtl.schedules import Dropouts, RandomLatency, TraceLatency
from fedmtl.trainer.checkpoint import Checkpoint
from tests import small
from tests.helpers import ragged_classification
from tests.methods import NETWORKS
from tests.small import Ended, check_resumed, check_same, trainer
from tests.trainer.ledgers import participations, read_lines

N = 12
LOGNORMAL = RandomLatency("lognorm", {"s": 1.5})
LATE = Buffered(latency=LOGNORMAL, concurrency=8, buffer=3, max_staleness=4)
NOISE = ClientPrivacy(clip_norm=0.5, epsilon=4.0, delta=1e-5)
RECORDS = RecordPrivacy(clip_norm=0.5, epsilon=4.0, delta=1e-4)


def made(**settings):
    defaults = {"data": ragged_classification(N), "schedule": LATE, "privacy": NOISE, "rounds": 9}
    return trainer(**defaults | settings)


STACKED = [name for name, method in NETWORKS.items() if method.own_starts]


@pytest.mark.parametrize("name", sorted(set(STACKED) - {"pmtl, running mean"}))
def test_clients_of_several_versions_are_one_stack_with_the_same_numbers(name, monkeypatch):
    run = {"algorithm": NETWORKS[name], "model": models.mlp(hidden=5), "rounds": 4}
    one = made(**run).fit()
    monkeypatch.setattr(type(NETWORKS[name]), "own_starts", False)
    assert torch.allclose(one.personal, made(**run).fit().personal, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ditto", "pmtl"])
def test_a_stack_that_is_cut_into_pieces_has_the_same_bits(name, monkeypatch):
    run = {"algorithm": NETWORKS[name], "model": models.mlp(hidden=5), "rounds": 4}
    whole = made(**run).fit()
    monkeypatch.setattr(Problem, "pieces", lambda self, clients, *_: map(Piece, clients.split(1)))
    cut = made(**run).fit()
    assert torch.equal(cut.personal, whole.personal)
    assert torch.equal(cut.shared, whole.shared)


class Halved(FedAvg):
    """FedAvg whose clients read a public tensor of their own."""

    def init(self, problem, replicates=1):
        state = super().init(problem, replicates)
        state.public["share"] = torch.tensor(0.5)
        return state

    def local_update(self, c):
        rows, own = super().local_update(c)
        return c.public["share"] * rows, own

    def server_update(self, problem, public, released):
        after = super().server_update(problem, public, released)
        return after | {"share": public["share"]}


def test_clients_of_a_subclass_read_all_of_the_public_state():
    """Its clients are no stack of one start each, which has the shared model alone."""
    assert not Halved.own_starts
    sgd = LocalSGD(lr=0.1)
    found = made(algorithm=Halved(local=sgd), privacy=None).fit()
    half = made(algorithm=FedAvg(local=sgd, server_lr=0.5), privacy=None).fit()
    assert torch.allclose(found.shared, half.shared, rtol=0, atol=1e-12)


REFUSED = ("pmtl, running mean", "scaffold", "mp_mtl_layers", "prior_layers")


@pytest.mark.parametrize("name", [*REFUSED, "local", "clustered_pmtl", "ifca"])
def test_methods_run_or_are_refused_before_anything_is_charged(name):
    run = {"algorithm": NETWORKS[name], "model": models.mlp(hidden=5), "rounds": 4}
    if name in REFUSED:
        with pytest.raises(ConfigError, match="needs one public state for all clients of a round"):
            made(**run)
        return
    result = made(**run).fit()
    assert torch.isfinite(result.personal).all()


@pytest.mark.parametrize(
    ("algorithm", "privacy"),
    [
        (NETWORKS["fedavg"], None),
        (NETWORKS["fedavg"], RECORDS),
        *((NETWORKS[name], NOISE) for name in ("fedavg", "pmtl", "ditto")),
    ],
)
def test_equal_latencies_and_a_buffer_of_all_are_full_rounds_to_the_bit(algorithm, privacy):
    everyone = Buffered(latency=1.0, concurrency=N, buffer=N)
    late = made(algorithm=algorithm, schedule=everyone, privacy=privacy, rounds=5).fit()
    rounds = made(algorithm=algorithm, schedule=FullParticipation(), privacy=privacy, rounds=5)
    check_same(late, rounds.fit())


@pytest.mark.parametrize("privacy", [None, NOISE, RECORDS])
def test_without_latency_clients_take_turns_to_the_bit(privacy):
    # 5 turns of 3 of 12 clients: some have one turn more than others
    quick = Buffered(latency=0.0, concurrency=3, buffer=3)
    late = made(schedule=quick, privacy=privacy, rounds=5).fit()
    check_same(late, made(schedule=CyclicCohorts(cohort=3), privacy=privacy, rounds=5).fit())


def test_a_buffer_of_one_is_fedasync_with_its_mixing_weight():
    """x <- (1 - a) x + a y, y trained from x, for a server that asks one client at a time."""
    data = ragged_classification(N)
    mixing = 0.6
    one = Buffered(latency=LOGNORMAL, concurrency=1, buffer=1)
    sgd = LocalSGD(lr=0.1, epochs=1, batch_size=30)
    steps = [
        (step.block.cohort.tolist(), step.shared.clone())
        for step in simulate(
            made(
                algorithm=FedAvg(local=sgd, server_optimizer=ServerOptimizer(lr=mixing)),
                schedule=one,
                privacy=None,
            )
        )
    ]
    problem = made(privacy=None).problem()
    shared = problem.initial.double()
    for (client,), found in steps:
        first, last = data.train.offsets[client : client + 2].tolist()
        model = models.softmax_regression()(data.spec).double()
        torch.nn.utils.vector_to_parameters(shared, model.parameters())
        outputs = model(data.train.x[first:last].double())
        loss = torch.nn.functional.cross_entropy(outputs, data.train.y[first:last])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        trained = shared - 0.1 * torch.nn.utils.parameters_to_vector(gradient)
        shared = (1 - mixing) * shared + mixing * trained.detach()
        assert torch.allclose(found, shared, rtol=0, atol=1e-12)


def test_a_client_is_charged_for_each_answer_that_is_used(tmp_path):
    run = made(folder=tmp_path / "run", rounds=20)
    run.fit()
    ledger = tmp_path / "run" / "private" / "ledger.jsonl"
    used = Counter()
    for step in run.bound_schedule.capped(20).steps(20):
        used.update(step.clients.tolist())
    assert participations(ledger) == used
    header = read_lines(ledger)[0]
    assert header["kinds"][0]["cap"] == max(used.values()) == run.bound_schedule.capped(20).cap
    settings = {"n": N, "cohort": 3, "rest": 1, "concurrency": 8, "max_staleness": 4}
    assert header["schedule"].items() >= settings.items()
    assert header["schedule"]["latency"] == "lognorm {'s': 1.5}"
    verified = verify(tmp_path / "run")
    assert {check.name: check.verdict for check in verified.checks}["charges"] == "confirmed"


def composed(multiplier, uses):
    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier), uses)
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("per_client", [None, 8])
def test_epsilon_is_that_of_unequal_participation_by_dp_accounting(per_client):
    run = made(schedule=replace(LATE, per_client=per_client), rounds=20)
    bound = run.bound_schedule
    plan = ReleasePlan(name="update", dimension=18)
    channel = open_channel(NOISE, [plan], bound, seed=0, steps=20)
    for step in range(20):
        members = channel.draw(step)
        channel.begin(step, members)
    uses = channel.accountant.uses[0]
    assert len(set(uses.tolist())) > 1
    z = channel.noise_multiplier
    cap = channel.sampler.cap
    assert uses.max() <= cap == (per_client or uses.max())
    # the noise is for the cap, and each account has what it was charged
    assert composed(z, cap) == pytest.approx(4.0, rel=1e-3)
    found = channel.accountant.epsilons()[0]
    for client in (int(uses.argmin()), int(uses.argmax())):
        assert found[client] == pytest.approx(composed(z, int(uses[client])), rel=2e-3)
    channel.close()


def test_records_are_charged_by_client_and_answer(tmp_path):
    run = made(folder=tmp_path / "run", privacy=RECORDS, rounds=20)
    result = run.fit()
    used = participations(tmp_path / "run" / "private" / "ledger.jsonl")
    capped = run.bound_schedule.capped(20)
    assert used == Counter(client for step in capped.steps(20) for client in step.clients.tolist())
    assert result.epsilon <= 4.0
    assert result.privacy.by_client[0] < result.privacy.by_client[2]
    assert all(check.verdict != "FAILED" for check in verify(tmp_path / "run").checks)


def test_correlated_noise_needs_the_rest_of_the_schedule(tmp_path):
    rested = replace(LATE, rest=4)
    auto = replace(NOISE, bands="auto")
    result = made(schedule=rested, privacy=auto, folder=tmp_path / "run").fit()
    assert "correlated over 4 rounds" in result.privacy.mechanism
    assert all(check.verdict != "FAILED" for check in verify(tmp_path / "run").checks)
    with pytest.raises(PrivacyError, match="between two turns"):
        made(schedule=rested, privacy=replace(NOISE, bands=5)).fit()
    with pytest.raises(PrivacyError, match="makes 1"):
        made(privacy=auto).fit()


def test_a_row_with_a_weight_is_never_longer_than_the_clip(monkeypatch):
    """The sensitivity does not rest on the weights."""
    monkeypatch.setattr(Buffered, "weights", lambda self, staleness: 5.0 + 0.0 * staleness.double())
    quiet = ClientPrivacy(clip_norm=0.05, epsilon=float("inf"))
    before = None
    for step in simulate(made(privacy=quiet, algorithm=FedAvg(local=LocalSGD(lr=5.0)))):
        if before is not None:
            assert float((step.shared - before).norm()) <= 0.05 * (1 + 1e-9)
        before = step.shared.clone()


# its first step adds tensors to the public state, which the versions in use lack
ADAM = FedAvg(local=LocalSGD(lr=0.1), server_optimizer=ServerOptimizer(optimizer_name="Adam"))


@pytest.mark.parametrize(
    ("algorithm", "every", "step"),
    [(NETWORKS["pmtl"], 4, 6), (ADAM, 1, 2), (NETWORKS["local"], 4, 6)],
)
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, algorithm, every, step):
    def make(folder, callbacks=()):
        return made(folder=folder, callbacks=callbacks, algorithm=algorithm, checkpoint_every=every)

    check_resumed(make, tmp_path, step)


class Ends(Callback):
    """Ends the process's run after a step."""

    def on_block(self, event, state):
        if event.step == 5:
            raise KeyboardInterrupt


SECURE = replace(NOISE, source="secure")


@pytest.mark.parametrize("per_client", [None, 14])
def test_a_secure_run_that_was_killed_leaves_out_who_is_spent(tmp_path, caplog, per_client):
    """Lost steps are released anew and charged again. Who has no answer left for that gives none later, the others go
    on, and a larger cap has answers to spare."""
    run = made(
        folder=tmp_path / "run",
        privacy=SECURE,
        schedule=replace(LATE, per_client=per_client),
        rounds=30,
        checkpoint_every=3,
    )
    with pytest.raises(Ended):
        replace(run, callbacks=(small.Ends(14),)).fit()
    caplog.set_level(logging.INFO, "fedmtl")
    result = run.fit(resume=True)
    assert (result.stopped, result.final["round"]) == ("rounds", 30)
    assert "steps 13 to 15 were charged, and an interruption has lost them" in caplog.text

    planned = [step.clients.tolist() for step in run.bound_schedule.capped(30).steps(30)]
    most = max(Counter(client for step in planned for client in step).values())
    cap = per_client or most
    uses = Counter()
    charged = []
    for step in [*range(15), *range(12, 30)]:
        able = [client for client in planned[step] if uses[client] < cap]
        uses.update(able)
        charged.append((step, able))
    lost = 3 * 33 - uses.total()
    assert (lost > 0) == (per_client is None)
    assert (f"{lost} answers were left out" in caplog.text) == (per_client is None)
    found = []
    for line in read_lines(tmp_path / "run" / "private" / "ledger.jsonl"):
        if line["kind"] == "charge":
            found += zip(range(line["first"], line["end"]), line["cohorts"], strict=True)
    assert found == charged
    z = result.privacy.noise_multiplier
    assert composed(z, cap) == pytest.approx(4.0, rel=1e-3)
    assert result.epsilon == pytest.approx(composed(z, max(uses.values())), rel=2e-3)
    assert all(check.verdict != "FAILED" for check in verify(tmp_path / "run").checks)


def test_a_secure_run_ends_where_nobody_of_a_step_has_an_answer_left(tmp_path, caplog):
    """Clients that take turns have none to spare."""
    turns = CyclicCohorts(cohort=3)
    run = made(folder=tmp_path, privacy=SECURE, schedule=turns, rounds=8, checkpoint_every=8)
    with pytest.raises(Ended):
        replace(run, callbacks=(small.Ends(1),)).fit()
    caplog.set_level(logging.INFO, "fedmtl")
    result = run.fit(resume=True)
    # everybody has two turns; those of the lost steps 0 and 1 had one of them there
    assert (result.stopped, result.final["round"]) == ("budget", 4)
    assert (
        "all its clients have given the answers that their privacy pays for, 2 each" in caplog.text
    )


def test_a_checkpoint_without_a_version_in_use_is_refused(tmp_path):
    run = made(folder=tmp_path / "run", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        replace(run, callbacks=[Ends()]).fit()
    path = tmp_path / "run" / "private" / "checkpoint.safetensors"
    whole = Checkpoint.read(path)
    kept = run.bound_schedule.capped(9).answers(whole.step - 1).kept
    assert {name.split("/")[0] for name in whole.earlier} == {f"v{version}" for version in kept}
    missing = min(whole.earlier)
    without = {name: value for name, value in whole.earlier.items() if name != missing}
    tensor = whole.earlier[missing]
    for earlier in (without, without | {"global": tensor}, whole.earlier | {"v99/global": tensor}):
        replace(whole, earlier=earlier).write(path)
        with pytest.raises(ResumeError, match="lacks public states from which clients have"):
            run.fit(resume=True)


def test_memory_and_clients_that_never_count_are_said_before_the_run(caplog):
    slow = [1.0] * 10 + [1e6] * 2
    with caplog.at_level(logging.INFO, "fedmtl"):
        made(schedule=replace(LATE, scale=slow), rounds=20).fit()
    assert "Buffered keeps up to 5 shared models, 720 bytes" in caplog.text
    assert "no answer of 2 of the 12 clients counts in 20 rounds" in caplog.text


def test_the_order_of_the_clients_in_the_data_does_not_matter():
    data = ragged_classification(N)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    one = made(privacy=NOISE).fit()
    other = made(data=data.take_clients(order)).fit()
    assert torch.allclose(one.shared, other.shared, rtol=0, atol=1e-12)


def test_the_history_and_canaries_of_a_late_run():
    audited = made(audit=Interval(canaries=30), rounds=12).fit()
    assert audited.privacy.interval is not None
    finetuned = made(finetune=Finetune(), algorithm=Ditto(local=LocalSGD(lr=0.1))).fit()
    assert torch.isfinite(finetuned.personal).all()


def rows_noised():
    return ReleasePlan(name="update", dimension=4, rows=RowNoise(epsilon=3.0))


@pytest.mark.parametrize(
    ("privacy", "plan", "message"),
    [
        (
            ClientPrivacy(clip_norm=QuantileClip(0.5), epsilon=4.0),
            ReleasePlan(name="update", dimension=4),
            "clip_norm is a number",
        ),
        (NOISE, ReleasePlan(name="update", dimension=4, form="symmetric"), "which have no weights"),
        (NOISE, rows_noised(), "which have no weights"),
    ],
)
def test_releases_whose_sensitivity_does_not_follow_are_refused(privacy, plan, message):
    bound = LATE.bind(N)
    with pytest.raises(PrivacyError, match=message):
        open_channel(privacy, [plan], bound, seed=0, steps=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": ClientPrivacy(clip_norm=QuantileClip(0.5), epsilon=4.0)}, "a number"),
        ({"schedule": replace(LATE, concurrency=40)}, "at most the number of clients, 12"),
        ({"algorithm": "auto", "finetune": "auto"}, "algorithm=auto chooses among methods"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        made(**settings).fit()


def test_traces_and_absences_go_by_the_names_of_the_clients():
    names = ragged_classification(N).ids
    trace = TraceLatency({name: [1.0 + place] for place, name in enumerate(names)})
    away = Dropouts(intervals={names[0]: [(0.5, float("inf"))]})
    run = made(schedule=replace(LATE, latency=trace, dropouts=away), rounds=10)
    run.fit()
    assert 0 not in torch.cat([step.clients for step in run.bound_schedule.steps(10)]).tolist()
