"""The node: one client's data, its model, and the client's part of every round."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from torch import Tensor

from .._fingerprint import differing
from ..algorithms.base import Algorithm, Own, Problem, Round, State
from ..data import FederatedDataset
from ..errors import ConfigError, FedmtlError, ResumeError
from ..privacy import Channel, ClientPrivacy
from ..privacy.channel import Message
from ..privacy.clip import clip_rows
from ..privacy.quantile import QuantileClip
from ..trainer import Trainer
from ..trainer.checkpoint import read_tensors, write_json, write_tensors
from ..trainer.evaluation import evaluate_rows, metric_name
from ..trainer.finetuning import finetuned, held_out
from ..trainer.folder import RunFolder, model_state
from ..trainer.problem import coded_for, fingerprint
from ..trainer.result import Result
from .account import NodeAccount
from .messages import FINISH, NAME, RECEIVE, ROUND, facts_of, log_as_flower, logger, pack, tensors_of
from .population import check_records
from .server import check

ReadRecords = Callable[[str, Mapping[str, Any]], Any]
Act = Callable[["Node", RecordDict], RecordDict]
ONE = torch.tensor([0])
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
            logger.error("this client has no answer, and counts as zeros: %s", error, exc_info=not named)
            content = RecordDict()
        return FlowerMessage(content, reply_to=message)

    def serve(kind: str, act: Act) -> None:
        category, action = kind.split(".")
        getattr(app, category)(action)(lambda message, context: answer(message, context, act))

    serve(NAME, lambda node, content: pack({"name": node.name}))
    serve(ROUND, Node.train)
    serve(RECEIVE, Node.receive)
    serve(FINISH, Node.finish)
    return app


def name_of(trainer: Trainer, config: Mapping[str, Any]) -> str:
    """Return the client of a node, from the node's configuration.

    Raises:
        ConfigError: none, or one that is not in the population.
    """
    names = trainer.data.ids
    if "client" in config:
        name = str(config["client"])
    elif "partition-id" in config:
        number = int(config["partition-id"])
        name = names[number] if 0 <= number < len(names) else f"number {number}"
    else:
        raise ConfigError("the node does not know whose it is: start it with --node-config 'client=\"...\"'.")
    if name not in names:
        raise ConfigError(f"client {name!r} is not in the population, which has {len(names):,} names.")
    return name


class Node:
    """One client: it answers the messages of a server.

    Its state of a run is that before and that after the last round that it took part in. A message says which of its
    rounds counted last, so that a round whose reply was lost, came too late, or is repeated by a server that was
    interrupted, leaves no trace. A round of a run is answered once: where it is repeated with the same values the node
    gives the answer that it has kept, and with others none.

    Args:
        trainer: the settings.
        name: of the client.
        records: reads its examples.
        folder: of all clients on this machine.
    """

    def __init__(self, trainer: Trainer, name: str, records: Callable[[], Any], folder: Path) -> None:
        self.name, self.folder = name, folder / quote(name, safe="")
        problem = trainer.problem()
        self.trainer = trainer = trainer.resolved(problem)
        self.algorithm, self.position = trainer.algorithm, trainer.data.ids.index(name)
        self.bound = self.algorithm.row_bound(problem)
        if self.bound is not None:
            problem = replace(problem, data=problem.data.bounded(self.bound))
        self.settings = fingerprint(problem, self.algorithm, trainer.privacy, trainer.schedule)
        data, self.validation = held_out(self._records(records(), problem), trainer.finetune)
        self.problem = replace(problem, data=data)
        self.account = NodeAccount(trainer, problem, self.problem, RunFolder(self.folder))
        self.channel = self.account.channel
        self.first = self.algorithm.init(self.problem)

    def _records(self, given: Any, problem: Problem) -> FederatedDataset:
        if not isinstance(given, FederatedDataset):
            classes, seed = self.trainer.data.classes, self.trainer.seed
            given = FederatedDataset.from_tensors({self.name: given}, classes=classes, seed=seed)
        data = coded_for(given, self.algorithm, self.trainer.loss)
        check_records(data, self.name, self.trainer.data.spec)
        data = replace(data, ids=(self.name,), verify=False)
        return (data if self.bound is None else data.bounded(self.bound)).to(problem.initial.device)

    # Messages

    def train(self, content: RecordDict) -> RecordDict:
        """Take part in a round, and return the rows."""
        before, step = self._state(content), int(facts_of(content)["round"])
        self._round(content, step)  # what is no clip norm is refused before anything is charged
        rows, kept = self._kept(content, step) or self._answered(content, step, before)
        pending = type(self.algorithm).receive is not Algorithm.receive
        self._write(content, before, before | kept, step + 1, pending)
        return pack({}, rows=rows)

    def _answered(self, content: RecordDict, step: int, before: Own) -> tuple[dict[str, Tensor], Own]:
        """Return the rows of a round and what the client keeps of it, charged before and on the disk after."""
        with self.account.answer(step, _digest(content, before)) as channel:
            round, public = self._round(content, step, channel), self._public(content)
            found, kept = self.algorithm.client(self.problem, public, before, ONE, round)
            rows = {name: self._sent(name, row, step) for name, row in found.items()}
            tensors = {f"row.{name}": row for name, row in rows.items()}
            tensors |= {f"kept.{name}": value.clone() for name, value in kept.items()}
            notes = {"round": str(step), "asked": _digest(content)}
            write_tensors(self._path(content, "answer.safetensors"), tensors, notes)
        return rows, dict(kept)

    def _kept(self, content: RecordDict, step: int) -> tuple[dict[str, Tensor], Own] | None:
        """Return the answer to a round that was answered before; None where it was not.

        Raises:
            ConfigError: there is no such round.
            ResumeError: the round was asked with other values, or later ones were answered.
        """
        path = self._path(content, "answer.safetensors")
        if not 0 <= step < self.problem.rounds:
            raise ConfigError(f"the server asks for round {step + 1}, and the settings have {self.problem.rounds}.")
        if not path.exists():
            return None
        tensors, notes = read_tensors(path)
        last = int(notes["round"])
        if step > last:
            return None
        if step < last or notes["asked"] != _digest(content):
            raise ResumeError(
                f"the server asks for round {step + 1} again, with other values or after round {last + 1}; a round of "
                f"a run is answered once ({path})."
            )
        rows, kept = (
            {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
            for part in ("row.", "kept.")
        )
        return rows, {name: value.to(self.problem.initial.device) for name, value in kept.items()}

    def receive(self, content: RecordDict) -> RecordDict:
        """Keep what the new public state at the end of a round makes of the client's own."""
        self._state(content)
        return pack({})

    def finish(self, content: RecordDict) -> RecordDict:
        """Make the client's model of the last public state; it and its scores stay in the folder."""
        own, place = self._state(content), self._path(content).parent
        public = self._public(content)
        row = self.algorithm.personal(self.problem, public, own, ONE)
        result = self._result(row, self.algorithm.shared(State(public, self.first.private)))
        state, names = model_state(self.problem, result.personal[0])
        bound = {} if self.bound is None else {"bound": json.dumps(asdict(self.bound))}
        write_tensors(place / "model.safetensors", state, names | bound)
        write_json(place / "scores.json", _scores(result, self.name))
        self.account.certify()
        logger.info("%s has its model: %s", self.name, place / "model.safetensors")
        return pack({})

    def _result(self, row: Tensor, shared: Tensor | None) -> Result:
        """Return the client's own part of a result: its model (1, D), finetuned where the settings say so, and its
        scores."""
        trainer, problem, metrics = self.trainer, self.problem, self.trainer.further_metrics
        found = evaluate_rows(problem, row, ONE, "test", metrics).by_client(problem)
        of_shared = None if shared is None else evaluate_rows(problem, shared[None], ONE, "test", metrics)
        result = Result(
            algorithm=self.algorithm.name,
            epsilon=float("nan"),
            privacy=self.channel.report,
            history=[],
            ids=problem.data.ids,
            personal=row,
            shared=shared,
            by_client=found,
            shared_by_client=None if of_shared is None else of_shared.by_client(problem),
            final={},
            stopped="rounds",
            metric=metric_name(problem),
            data_name=problem.data.name,
            module=None,
        )
        if trainer.finetune is None:
            return result
        return finetuned(result, problem, trainer.finetune, self.validation, trainer.privacy, metrics)

    def _sent(self, name: str, row: Message, step: int) -> Tensor:
        """Return a row (1, d) as it leaves: clipped, and with noise of its own where the server is to see none
        without."""
        assert isinstance(row, Tensor)  # in rounds
        noise, privacy = self.channel.rows.get(name), self.channel.privacy
        if noise is not None:
            return noise.added(row, torch.tensor([self.position]), step, self.channel.source)
        if isinstance(privacy, ClientPrivacy) and isinstance(privacy.clip_norm, QuantileClip):
            clip = self.channel.releases[name].clip  # the server counts who is above it, and clips to it
            return clip_rows(row, replace(clip, bound=2 * clip.bound))
        return self.channel.counted(name, row)

    def _round(self, content: RecordDict, number: int, channel: Channel | None = None) -> Round:
        channel = self.channel if channel is None else channel
        try:
            channel.set_norms(tensors_of(content, "channel"))
        except ConfigError as error:
            raise ConfigError(f"the server sends {error}") from error
        return Round(number, channel.clip, channel.local, clips=channel.privacy is not None)

    def _public(self, content: RecordDict) -> dict[str, Tensor]:
        sent = tensors_of(content, "public")
        return {name: sent[name].to(value.device) for name, value in self.first.public.items()}

    # State

    def _path(self, content: RecordDict, file: str = "state.safetensors") -> Path:
        run = str(facts_of(content)["run"])
        if not re.fullmatch("[0-9a-f]{16}", run):
            raise ConfigError("the server names no run: its identity is 16 hexadecimal digits.")
        return self.folder / run / file

    def _state(self, content: RecordDict) -> Own:
        """Return what the client keeps, as of the last of its rounds that counted.

        Raises:
            ConfigError: the server has other settings.
            ResumeError: it speaks of a round of which there is nothing here.
        """
        facts, path = facts_of(content), self._path(content)
        other = set(differing(str(facts["settings"]), self.settings)) - set(_OWN_AFFAIR)
        if other:
            raise ConfigError(f"the server has other settings than this node: {', '.join(sorted(other))}.")
        counted = int(facts["counted"])
        if not path.exists():
            if counted:
                logger.warning("%s: %s is missing, so this client begins anew", self.name, path)
            return self.first.private.gather_all(ONE)
        tensors, notes = read_tensors(path)
        rounds = {part: int(notes[part]) for part in ("before", "after")}
        part = "after" if rounds["after"] == counted else "before"
        if rounds[part] != counted:
            raise ResumeError(
                f"{path} has the states after {rounds['before']} and {rounds['after']} rounds, but the server counts "
                f"{counted}; one of the two was rolled back."
            )
        fields = self.first.private.fields
        own = {name: tensors[f"{part}.{name}"].to(self.problem.initial.device) for name in fields}
        if part == "after" and notes["pending"] == "yes":
            round, public = self._round(content, counted - 1), self._public(content)
            own = own | dict(self.algorithm.receive(self.problem, public, own, ONE, round))
            before = {name: tensors[f"before.{name}"] for name in fields}
            self._write(content, before, own, counted, False, of=rounds["before"])
        return own

    def _write(
        self, content: RecordDict, before: Own, after: Own, rounds: int, pending: bool, of: int | None = None
    ) -> None:
        """Write both states in one file, or none."""
        tensors = {f"before.{name}": value.clone() for name, value in before.items()}
        tensors |= {f"after.{name}": value for name, value in after.items()}
        notes = {"before": facts_of(content)["counted"] if of is None else of, "after": rounds}
        text = {name: str(value) for name, value in notes.items()} | {"pending": "yes" if pending else "no"}
        write_tensors(self._path(content), tensors, text)


def _digest(content: RecordDict, own: Own | None = None) -> str:
    """Return a digest of all values that an answer depends on beside the node's records, with those that the client
    keeps where ``own`` has them."""
    digest = hashlib.blake2b(str(facts_of(content)["counted"]).encode(), digest_size=16)
    parts = {"public": tensors_of(content, "public"), "channel": tensors_of(content, "channel"), "own": own or {}}
    for part, values in parts.items():
        for name, value in sorted(values.items()):
            array = value.detach().cpu().contiguous().numpy()
            digest.update(f"{part} {name} {value.dtype} {tuple(value.shape)}".encode() + array.tobytes())
    return digest.hexdigest()


def _scores(result: Result, client: str) -> dict[str, Any]:
    """Return the scores of a client's final model by metric and, where it was finetuned, those of the others by model,
    with the one that it chose."""

    def of(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {metric: values[client] for metric, values in found.items() if client in values}

    scores: dict[str, Any] = of(result.by_client)
    if result.finetuned is not None:
        scores["models"] = {name: of(found) for name, found in result.finetuned.by_client.items()}
        scores |= {"chosen": choice} if (choice := result.finetuned.chosen.get(client)) else {}
    return scores
