"""The node: one client's data, its model, and the client's part of every round."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from .._files import write_json
from .._fingerprint import differing
from ..algorithms.base import Problem, State
from ..algorithms.client_batch import ClientBatch, ClientStates
from ..algorithms.rounds import RoundAlgorithm
from ..data import FederatedDataset
from ..errors import ConfigError, DataError, ResumeError
from ..privacy import RoundChannel
from ..secure.masks import Identity
from ..trainer import Trainer
from ..trainer.evaluation import evaluate_each
from ..trainer.folder import RunFolder
from ..trainer.make_problem import coded_for
from ..trainer.metrics import main_metric
from ..trainer.model_file import bound_note, write_model
from ..trainer.personalize import finetuned, held_out, rows_at
from ..trainer.result_tables import client_rows
from ..trainer.run_fingerprint import fingerprint
from ..trainer.scored_models import ScoredModels
from .account import NodeAccount, schedule_of
from .last_answer import Answer, digest, folder_name
from .messages import OWN_AFFAIR, Facts, facts_of, logger, pack, tensors_of
from .population import check_records
from .secure_node import SecureNode

ONE = torch.tensor([0])  # a node's problem has one client, the first


class Node:
    """One client: it answers the messages of a server.

    A node keeps its state before and after its last answer in a run. A message says which of the
    client's rounds counted last: a round leaves no trace if its reply was lost or came too late, or
    if an interrupted server repeats it. A round of a run is answered once. If it is asked again
    with the same values, the node repeats its answer; with other values it gives none.

    Args:
        trainer: the settings.
        name: of the client.
        records: reads its examples.
        folder: of all clients on this machine.
    """

    def __init__(
        self, trainer: Trainer, name: str, records: Callable[[], Any], folder: Path
    ) -> None:
        self.name = name
        self.folder = folder / folder_name(name)
        problem = trainer.problem()
        # the noise is made for the cap of real clients, and finetuning goes by the noise
        trainer = trainer.resolved(problem, schedule_of(trainer))
        self.trainer = trainer
        assert isinstance(trainer.algorithm, RoundAlgorithm)  # see check
        self.algorithm = trainer.algorithm
        self.bound = self.algorithm.row_bound(problem)
        problem = replace(problem, data=problem.data.bounded(self.bound))
        self.settings = fingerprint(problem, trainer)
        try:
            data = self._records(records(), problem)
        except OSError as error:
            raise DataError(
                f"the records of client {name!r} cannot be read: {error}. Name a file that can be "
                f"read from {Path.cwd()}, or a whole path, in --node-config and start the node "
                "again."
            ) from error
        # a part of the training records is held out if finetuning chooses among models
        data, self.validation = held_out(data, trainer.finetune)
        self.problem = replace(problem, data=data)
        self.account = NodeAccount(trainer, problem, self.problem, RunFolder(self.folder))
        self.channel = self.account.channel
        self.first = self.algorithm.init(self.problem)
        self.population = problem
        self.sums: SecureNode | None = None

    def join_sums(self, identities: Mapping[str, bytes], identity: Identity) -> None:
        """Lets the client take part in secure sums.

        Args:
            identities: public keys of all clients.
            identity: its own.
        """
        self.sums = SecureNode(
            self.trainer,
            self.population,
            self.channel,
            self.settings,
            self.name,
            RunFolder(self.folder),
            identities,
            identity,
        )

    def _records(self, records: Any, problem: Problem) -> FederatedDataset:
        """Returns the client's examples as the problem needs them."""
        trainer = self.trainer
        if not isinstance(records, FederatedDataset):
            records = FederatedDataset.from_tensors(
                {self.name: records}, classes=trainer.data.classes, seed=trainer.seed
            )
        data = coded_for(records, trainer.loss, self.algorithm.loss)
        check_records(data, self.name, trainer.data)
        data = replace(data, ids=(self.name,), verify=False)
        return data.bounded(self.bound).to(problem.initial.device)

    # Messages, each with the memory of the SuperNode, which lasts from one to the next

    def hello(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Answers with the client's name."""
        return pack({"name": self.name})

    def train(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Takes part in a round, and answers with the rows; with the keys of a secure sum, which
        asks for the row later."""
        privacy = self.trainer.privacy
        shared = privacy is not None and privacy.aggregation is not None
        # its row has neither noise nor masks here, and no server may see it
        if shared and self.sums is None:
            raise ConfigError("this node has no part in secure sums, which its settings ask for.")
        states, last = self._state(content)
        facts = facts_of(content)
        step = int(facts["round"])
        asked = digest(content, states)
        answer = self._repeated(content, last, step, asked)
        # two sums of one draw of records would count as one coin, so every attempt draws anew
        if answer is None or self.account.pooled:
            with self.account.answer(step, asked) as (channel, receipt):
                sent, changed = self.algorithm.client_update(
                    self._batch(content, states, step, channel)
                )
                # clipped here, and noised if rows have noise against the server
                rows = {}
                for name, row in sent.items():
                    rows[name] = self.channel.row_to_send(name, row, receipt)
                parts = {"before": states, "after": {**states, **changed}, "rows": rows}
                answer = Answer(int(facts["counted"]), step + 1, asked, parts)
                # on the disk before the ledger is closed: the answer can be repeated
                answer.write(self._path(content))
        question = {"run": facts["run"], "round": step}
        if self.sums is not None:
            path = self._marks(content)
            return pack({**question, "message": self.sums.keys(facts, memory, path)})
        return pack(question, rows=answer.parts["rows"])

    def shares(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Answers the roster of a secure sum."""
        path = self._marks(content)
        return self._in_sum(content, lambda sums, facts: sums.shares(facts, memory, path))

    def row(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Answers with the masked row of a secure sum."""
        path = self._path(content)
        step = int(facts_of(content)["round"])

        def masked(sums: SecureNode, facts: Facts) -> bytes:
            answer = Answer.read(path, self.problem.initial.device)
            if answer.after != step + 1:
                raise ResumeError(f"the row of round {step + 1} is not the last one ({path}).")
            row = answer.parts["rows"][sums.release]
            return sums.row(facts, memory, self._marks(content), row)

        return self._in_sum(content, masked)

    def opening(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Answers whose rows came to a secure sum."""
        path = self._marks(content)
        return self._in_sum(content, lambda sums, facts: sums.opening(facts, memory, path))

    def _in_sum(
        self, content: RecordDict, answer: Callable[[SecureNode, Facts], bytes]
    ) -> RecordDict:
        """Returns the content of an answer in a secure sum."""
        if self.sums is None:
            raise ConfigError("the server asks for a secure sum, and the settings here have none.")
        facts = facts_of(content)
        return pack({"message": answer(self.sums, facts)})

    def _repeated(
        self, content: RecordDict, answer: Answer | None, step: int, asked: str
    ) -> Answer | None:
        """Returns the answer to a round that was answered before, to be received anew; else None.

        Raises:
            ConfigError: there is no such round.
            ResumeError: the round was asked with other values, or later ones were answered.
        """
        rounds = self.problem.rounds
        if not 0 <= step < rounds:
            asks = f"the server asks for round {step + 1}"
            raise ConfigError(f"{asks}, and the settings have {rounds}.")
        if answer is None or step >= answer.after:
            return None
        if step + 1 < answer.after or answer.asked != asked:
            raise ResumeError(
                f"the server asks for round {step + 1} again, with other values or after round "
                f"{answer.after}; a round of a run is answered once ({self._path(content)})."
            )
        answer = replace(answer, parts={**answer.parts, "received": {}})
        answer.write(self._path(content))
        return answer

    def receive(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Updates the client's state with the new public state at the end of a round."""
        self._state(content)
        return pack({})

    def finish(self, content: RecordDict, memory: RecordDict) -> RecordDict:
        """Makes the client's model from the last public state.

        The model and its scores stay in the client's folder.
        """
        states, _ = self._state(content)
        folder = self._path(content).parent
        public = self._public(content)
        row = self.algorithm.personal_models(ClientBatch(self.problem, ONE, public, states))
        shared = self.algorithm.shared(State(public, self.first.private))
        scored = self._scored(row, shared, public)
        model = folder / "model.safetensors"
        write_model(model, self.problem, scored.personal[0], bound_note(self.bound))
        (scores,) = client_rows(scored, (self.name,))
        known = {name: score for name, score in scores.items() if score is not None}
        write_json(folder / "scores.json", known)
        self.account.certify()
        if self.sums is not None:
            self.sums.certify()
        logger.info("%s has its model: %s", self.name, model)
        return pack({})

    def _scored(
        self, row: Tensor, shared: Tensor | None, public: Mapping[str, Tensor]
    ) -> ScoredModels:
        """Returns the client's model (1, D) with its scores, perhaps finetuned."""
        trainer = self.trainer
        problem = self.problem
        metrics = trainer.resolved_metrics
        models = {"personal": row}
        if shared is not None:
            models = {"shared": shared.expand(1, -1), "personal": row}
        scores = {}
        for name, rows in models.items():
            measured = evaluate_each(problem, partial(rows_at, rows), ONE, metrics)
            scores[name] = measured.by_client(problem)
        scored = ScoredModels(
            ids=problem.data.ids,
            personal=row,
            scores=scores,
            metric=main_metric(problem.data.spec, problem.loss).name,
            shared=shared,
        )
        if trainer.finetune is None:
            return scored
        result, *_ = finetuned(
            scored,
            problem,
            trainer.finetune.informed(public),
            name=self.algorithm.name,
            validation=self.validation,
            metrics=metrics,
        )
        return result

    def _batch(
        self, content: RecordDict, states: ClientStates, round: int, channel: RoundChannel
    ) -> ClientBatch:
        """Returns the batch of this one client in a round."""
        public = self._public(content)
        return ClientBatch(
            self.problem,
            ONE,
            public,
            states,
            round,
            clips=channel.clips,
            charged_steps=channel.local,
        )

    def _public(self, content: RecordDict) -> dict[str, Tensor]:
        """Returns the public state of a message, with the shapes and dtypes of the algorithm's."""
        sent = tensors_of(content, "public")
        public = {}
        for name, value in self.first.public.items():
            there = sent.get(name)
            if there is None or there.shape != value.shape or there.dtype != value.dtype:
                expected = f"shape {tuple(value.shape)} and {value.dtype}"
                raise ConfigError(f"the server sends no {name!r} of {expected}.")
            public[name] = there.to(value.device)
        return public

    # State

    def _path(self, content: RecordDict) -> Path:
        """Returns the file of the last answer in the run of a message."""
        run = str(facts_of(content)["run"])
        # it becomes the name of a folder, and comes from the network
        if not re.fullmatch("[0-9a-f]{16}", run):
            raise ConfigError("the server names no run: its identity is 16 hexadecimal digits.")
        return self.folder / run / "state.safetensors"

    def _marks(self, content: RecordDict) -> Path:
        """Returns the file of the answers that were given in an attempt at a secure sum."""
        return self._path(content).with_name("attempt.json")

    def _state(self, content: RecordDict) -> tuple[ClientStates, Answer | None]:
        """Takes the clip norms of a message and returns the client's state.

        Returns:
            The state as of the last of its rounds that counted; and the client's last answer in
            this run, None without one.

        Raises:
            ConfigError: the server has other settings, or sends something else than clip norms.
            ResumeError: the server counts a round of which nothing is here.
        """
        facts = facts_of(content)
        path = self._path(content)
        answer = None
        if path.exists():
            answer = Answer.read(path, self.problem.initial.device)
        other = set(differing(str(facts["settings"]), self.settings)) - set(OWN_AFFAIR)
        if other:
            named = ", ".join(sorted(other))
            raise ConfigError(f"the server has other settings than this node: {named}.")
        self._public(content)  # a wrong state is refused before anything is charged
        try:
            self.channel.set_norms(tensors_of(content, "channel"))
        except ConfigError as error:
            raise ConfigError(f"the server sends {error}") from error
        counted = int(facts["counted"])
        if answer is None:
            if counted:
                logger.warning("%s: %s is missing, so this client begins anew", self.name, path)
            return self.first.private.gather_all(ONE), None
        if counted not in (answer.before, answer.after):
            raise ResumeError(
                f"{path} has the states after {answer.before} and {answer.after} rounds, "
                f"but the server counts {counted}; one of the two was rolled back."
            )
        # the server did not count the last answer: the client goes on from before it
        if counted != answer.after:
            return answer.parts["before"], answer
        received = answer.parts["received"]
        if received:
            return received, answer
        states = answer.parts["after"]
        if type(self.algorithm).receive is RoundAlgorithm.receive:
            return states, answer
        batch = self._batch(content, states, counted - 1, self.channel)
        received = {**states, **self.algorithm.receive(batch)}
        replace(answer, parts={**answer.parts, "received": received}).write(path)
        return received, answer
