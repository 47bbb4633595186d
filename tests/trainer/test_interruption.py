"""An interruption from the keyboard: after the event, with a checkpoint, and nothing is paid for twice."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from fedmtl import AsyncLearner, Callback, PoissonClocks, RecordPrivacy, Trainer, models
from fedmtl.data import load_synthetic_tasks
from fedmtl.trainer.run import held_interruption

from .ledgers import charges
from .settings import trainer

TASKS, ANSWERS = 5, 8


@pytest.fixture(autouse=True)
def keyboard():
    """Python's own handler, also where the tests were started by a shell that ignores SIGINT in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(Callback):
    """Presses Ctrl-C while the event of ``step`` is being dealt with."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, []

    def on_event(self, event, state) -> None:
        self.seen.append(event.step)
        if event.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stops_after_the_event_and_goes_on_to_the_same_bits(tmp_path):
    whole = trainer(folder=tmp_path / "whole").fit()
    part = trainer(folder=tmp_path / "part", checkpoint_every=None)
    pressed = Interrupting(2)
    with pytest.raises(KeyboardInterrupt):
        replace(part, callbacks=(pressed,)).fit()
    assert pressed.seen == [0, 1, 2]
    rest = Interrupting(-1)
    result = replace(part, callbacks=(rest,)).fit(resume=True)
    assert rest.seen == [3, 4, 5], "nothing is computed again"
    for client in whole.personal_accuracy:
        for a, b in zip(whole.model_for(client).parameters(), result.model_for(client).parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_secure_run_pays_once_for_every_answer(tmp_path):
    data = load_synthetic_tasks(tasks=TASKS, train_examples=15, test_examples=10, features=6)
    run = Trainer(
        algorithm=AsyncLearner(loss="logistic", reg=1e-3),
        data=data,
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=ANSWERS),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=5.0, mechanism="laplace", delta=0.0, source="secure"),
        rounds=1000,
        folder=tmp_path / "run",
        eval_every=10,
        progress=False,
    )
    with pytest.raises(KeyboardInterrupt):
        replace(run, callbacks=(Interrupting(19),)).fit()
    result = run.fit(resume=True)
    assert result.stopped == "rounds"
    charged = charges(tmp_path / "run" / "private" / "ledger.jsonl")
    assert charged == dict.fromkeys(range(TASKS * ANSWERS), 1)


def test_a_second_one_interrupts_at_once_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with held_interruption() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_others_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with held_interruption() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == [1]
            assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
