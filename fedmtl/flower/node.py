"""The node: one client's data, its model, and the client's part of every round."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from torch import Tensor

from .._fingerprint import differing
from ..algorithms.base import Algorithm, Problem, State
from ..algorithms.cohort import Cohort, Own
from ..data import FederatedDataset
from ..errors import ConfigError, DataError, FedmtlError, ResumeError
from ..privacy import Rounds
from ..trainer import Trainer
from ..trainer.evaluation import evaluate_each
from ..trainer.folder import RunFolder, bound_note, clients_frame, read_parts, write_json, write_model, write_parts
from ..trainer.metrics import main_metric
from ..trainer.personalize import finetuned, held_out, rows_at
from ..trainer.problem import coded_for, fingerprint
from ..trainer.scored import Scored
from .account import NodeAccount
from .messages import FINISH, NAME, RECEIVE, ROUND, facts_of, log_as_flower, logger, pack, tensors_of
from .population import check_records
from .server import check

ReadRecords = Callable[[str, Mapping[str, Any]], Any]
Act = Callable[["Node", RecordDict], RecordDict]
ONE = torch.tensor([0])
_LONGEST, _BEGINNING = 200, 100  # letters of the name of a folder
_OWN_AFFAIR = ("execution", "threads", "device", "version of torch")


def client_app(trainer: Trainer, records: ReadRecords, *, folder: str | Path = "nodes") -> ClientApp:
    """Return the Flower ``ClientApp`` of a node, which has the records of one client.

    Args:
        trainer: the settings, those of the server.
        records: (name, configuration of the node) -> its examples: a dataset of this one client, or a pair (x, y) of
            which a fifth is held out for the node's own scores. It is called on the node, and only there.
        folder: where nodes keep their state and at the end their model, a folder for each client; the configuration
            of a node may override it by ``folder``. The client's name is ``client`` there, or that of number
            ``partition-id``.

    Raises:
        ConfigError: as of :func:`~fedmtl.flower.server_app`.
    """
    check(trainer)
    app, nodes = ClientApp(), dict[str, Node]()

    def answer(message: FlowerMessage, context: Context, act: Act) -> FlowerMessage:
        log_as_flower()
        try:
            name = name_of(trainer, context.node_config)
            if name not in nodes:
                place = Path(str(context.node_config.get("folder", folder)))
                nodes[name] = Node(trainer, name, lambda: records(name, context.node_config), place)
            content = act(nodes[name], message.content)
        except Exception as error:  # its text may speak of the records, and would travel to the server
            named = isinstance(error, FedmtlError)
            logger.error("this client has no answer, and adds nothing to the sums: %s", error, exc_info=not named)
            content = RecordDict()
        return FlowerMessage(content, reply_to=message)

    for kind, act in {NAME: Node.hello, ROUND: Node.train, RECEIVE: Node.receive, FINISH: Node.finish}.items():
        category, action = kind.split(".")
        getattr(app, category)(action)(partial(answer, act=act))
    return app


def name_of(trainer: Trainer, config: Mapping[str, Any]) -> str:
    """Return the client of a node, from the node's configuration.

    Raises:
        ConfigError: none, or one that is not in the population.
    """
    names = trainer.data.ids
    if not {"client", "partition-id"} & set(config):
        raise ConfigError("the node does not know whose it is: start it with --node-config 'client=\"...\"'.")
    number = int(config.get("partition-id", -1))
    name = str(config["client"]) if "client" in config else dict(enumerate(names)).get(number, f"number {number}")
    if name not in names:
        some = ", ".join(names[:10]) + ", …" * (len(names) > 10)
        raise ConfigError(
            f"client {name!r} is not in the population, whose {len(names):,} names are {some}. Give one of them in "
            "--node-config 'client=\"...\"' and start the node again."
        )
    return name


def folder_name(name: str) -> str:
    """Return the name of a client's folder, which lies in that of all clients whatever the client is called: ``..`` and
    ``a/b`` are ``%2E%2E`` and ``a%2Fb``, and of a long name a digest stands for its end."""
    text = quote(name, safe="", errors="surrogatepass")
    if not text.strip("."):
        text = text.replace(".", "%2E") or "%"
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_BEGINNING]}%-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True)
class Answer:
    """The last answer of a client in a run, as it stands on the node's disk.

    Attributes:
        before: rounds of the server that had ended when a row of the client last counted, before this answer.
        after: the same where this answer counts.
        asked: a digest of the question and of what the client keeps.
        parts: tensors by name: of the client before the round (``"before"``), after it (``"after"``), and after it has
            received the new public state (``"received"``, empty until then); the rows that were sent (``"rows"``).
    """

    before: int
    after: int
    asked: str
    parts: Mapping[str, Own]

    @classmethod
    def read(cls, path: Path, device: torch.device) -> Answer:
        """Read it from a file."""
        parts, notes = read_parts(path, "before", "after", "received", "rows")
        placed = {part: {name: row.to(device) for name, row in own.items()} for part, own in parts.items()}
        return cls(**notes, parts=placed)

    def write(self, path: Path) -> None:
        """Write all of it in one file, or nothing."""
        write_parts(path, self.parts, {"before": self.before, "after": self.after, "asked": self.asked})


class Node:
    """One client: it answers the messages of a server.

    Its state of a run is that before and that after its last answer. A message says which of its rounds counted last,
    so that a round whose reply was lost, came too late, or is repeated by a server that was interrupted, leaves no
    trace. A round of a run is answered once: where it is repeated with the same values the node repeats its answer, and
    with others there is none.

    Args:
        trainer: the settings.
        name: of the client.
        records: reads its examples.
        folder: of all clients on this machine.
    """

    def __init__(self, trainer: Trainer, name: str, records: Callable[[], Any], folder: Path) -> None:
        self.name, self.folder = name, folder / folder_name(name)
        problem = trainer.problem()
        self.trainer = trainer = trainer.resolved(problem)
        self.algorithm, self.position = trainer.algorithm, trainer.data.ids.index(name)
        self.bound = self.algorithm.row_bound(problem)
        problem = replace(problem, data=problem.data.bounded(self.bound))
        self.settings = fingerprint(problem, trainer)
        try:
            data = self._records(records(), problem)
        except OSError as error:
            raise DataError(
                f"the records of client {name!r} cannot be read: {error}. Name a file that can be read from "
                f"{Path.cwd()}, or a whole path, in --node-config and start the node again."
            ) from error
        data, self.validation = held_out(data, trainer.finetune)
        self.problem = replace(problem, data=data)
        self.account = NodeAccount(trainer, problem, self.problem, RunFolder(self.folder))
        self.channel = self.account.channel
        self.first = self.algorithm.init(self.problem)

    def _records(self, records: Any, problem: Problem) -> FederatedDataset:
        if not isinstance(records, FederatedDataset):
            classes, seed = self.trainer.data.classes, self.trainer.seed
            records = FederatedDataset.from_tensors({self.name: records}, classes=classes, seed=seed)
        data = coded_for(records, self.trainer.loss, self.algorithm.loss)
        check_records(data, self.name, self.trainer.data.spec)
        return replace(data, ids=(self.name,), verify=False).bounded(self.bound).to(problem.initial.device)

    # Messages

    def hello(self, content: RecordDict) -> RecordDict:
        """Return the client's name."""
        return pack({"name": self.name})

    def train(self, content: RecordDict) -> RecordDict:
        """Take part in a round, and return the rows."""
        (own, last), facts = self._state(content), facts_of(content)
        asked, step = _digest(content, own), int(facts["round"])
        answer = self._repeated(content, last, step, asked)
        if answer is None:
            with self.account.answer(step, asked) as channel:
                sent, changed = self.algorithm.client(self._cohort(content, own, step, channel))
                rows = {name: self.channel.sent(name, row, self.position, step) for name, row in sent.items()}
                parts = {"before": own, "after": {**own, **changed}, "rows": rows}
                answer = Answer(int(facts["counted"]), step + 1, asked, parts)
                answer.write(self._path(content))
        return pack({}, rows=answer.parts["rows"])

    def _repeated(self, content: RecordDict, answer: Answer | None, step: int, asked: str) -> Answer | None:
        """Return the answer to a round that was answered before, which is received anew; None where it was not.

        Raises:
            ConfigError: there is no such round.
            ResumeError: the round was asked with other values, or later ones were answered.
        """
        if not 0 <= step < self.problem.rounds:
            raise ConfigError(f"the server asks for round {step + 1}, and the settings have {self.problem.rounds}.")
        if answer is None or step >= answer.after:
            return None
        if step + 1 < answer.after or answer.asked != asked:
            raise ResumeError(
                f"the server asks for round {step + 1} again, with other values or after round {answer.after}; a round "
                f"of a run is answered once ({self._path(content)})."
            )
        answer = replace(answer, parts={**answer.parts, "received": {}})
        answer.write(self._path(content))
        return answer

    def receive(self, content: RecordDict) -> RecordDict:
        """Keep what the new public state at the end of a round makes of the client's own."""
        self._state(content)
        return pack({})

    def finish(self, content: RecordDict) -> RecordDict:
        """Make the client's model of the last public state; it and its scores stay in the folder."""
        (own, _), place = self._state(content), self._path(content).parent
        public = self._public(content)
        row = self.algorithm.personal(Cohort(self.problem, ONE, public, own))
        scored = self._scored(row, self.algorithm.shared(State(public, self.first.private)))
        write_model(place / "model.safetensors", self.problem, scored.personal[0], bound_note(self.bound))
        write_json(place / "scores.json", clients_frame(scored, (self.name,)).loc[self.name].dropna().to_dict())
        self.account.certify()
        logger.info("%s has its model: %s", self.name, place / "model.safetensors")
        return pack({})

    def _scored(self, row: Tensor, shared: Tensor | None) -> Scored:
        """Return the client's model (1, D), finetuned where the settings say so, with its scores."""
        trainer, problem, metrics = self.trainer, self.problem, self.trainer.asked_metrics
        models = ({} if shared is None else {"shared": shared.expand(1, -1)}) | {"personal": row}
        measured = {name: evaluate_each(problem, partial(rows_at, rows), ONE, metrics) for name, rows in models.items()}
        scores = {name: own.by_client(problem) for name, own in measured.items()}
        metric = main_metric(problem.data.spec).name
        scored = Scored(ids=problem.data.ids, personal=row, scores=scores, metric=metric, shared=shared)
        if trainer.finetune is None:
            return scored
        about: dict[str, Any] = {"name": self.algorithm.name, "validation": self.validation, "metrics": metrics}
        return finetuned(scored, problem, trainer.finetune, **about)[0]

    def _cohort(self, content: RecordDict, own: Own, round: int, channel: Rounds) -> Cohort:
        """Return the client in a round."""
        public = self._public(content)
        return Cohort(self.problem, ONE, public, own, round, clip=channel.clip, local=channel.local)

    def _public(self, content: RecordDict) -> dict[str, Tensor]:
        sent, public = tensors_of(content, "public"), self.first.public
        for name, value in public.items():
            if name not in sent or (sent[name].shape, sent[name].dtype) != (value.shape, value.dtype):
                raise ConfigError(f"the server sends no {name!r} of shape {tuple(value.shape)} and {value.dtype}.")
        return {name: sent[name].to(value.device) for name, value in public.items()}

    # State

    def _path(self, content: RecordDict) -> Path:
        """Return the file of the last answer in the run of a message."""
        run = str(facts_of(content)["run"])
        if not re.fullmatch("[0-9a-f]{16}", run):
            raise ConfigError("the server names no run: its identity is 16 hexadecimal digits.")
        return self.folder / run / "state.safetensors"

    def _state(self, content: RecordDict) -> tuple[Own, Answer | None]:
        """Take the clip norms of a message; return what the client keeps, as of the last of its rounds that counted,
        and its last answer in this run, None without one.

        Raises:
            ConfigError: the server has other settings, or sends what is no clip norm.
            ResumeError: it speaks of a round of which there is nothing here.
        """
        facts, path = facts_of(content), self._path(content)
        answer = Answer.read(path, self.problem.initial.device) if path.exists() else None
        other = set(differing(str(facts["settings"]), self.settings)) - set(_OWN_AFFAIR)
        if other:
            raise ConfigError(f"the server has other settings than this node: {', '.join(sorted(other))}.")
        self._public(content)  # is refused before anything is charged
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
                f"{path} has the states after {answer.before} and {answer.after} rounds, but the server counts "
                f"{counted}; one of the two was rolled back."
            )
        if counted != answer.after:
            return answer.parts["before"], answer
        own, received = answer.parts["after"], answer.parts["received"]
        if received or type(self.algorithm).receive is Algorithm.receive:
            return received or own, answer
        received = {**own, **self.algorithm.receive(self._cohort(content, own, counted - 1, self.channel))}
        replace(answer, parts={**answer.parts, "received": received}).write(path)
        return received, answer


def _digest(content: RecordDict, own: Own) -> str:
    """Return a digest of all values that an answer depends on beside the node's records: those of the message, and
    those that the client keeps."""
    digest = hashlib.blake2b(str(facts_of(content)["counted"]).encode(), digest_size=16)
    parts = {"public": tensors_of(content, "public"), "channel": tensors_of(content, "channel"), "own": own}
    for part, values in parts.items():
        for name, value in sorted(values.items()):
            array = value.detach().cpu().contiguous().numpy()
            digest.update(f"{part} {name} {value.dtype} {tuple(value.shape)}".encode() + array.tobytes())
    return digest.hexdigest()
