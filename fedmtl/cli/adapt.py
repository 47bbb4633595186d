"""``fedmtl adapt``: personal models of new clients, from the released model of a run."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from . import build
from .build import Config
from .config import of_place
from .defaults import load
from .folders import new_folder
from .names import TRUST
from .output import say, show
from .parsers import command_parser
from .stored import changed, stored_config
from .words import understood

_COLUMNS = (
    "client",
    "target",
    "features",
    "one_hot",
    "bounds",
    "missing",
    "missing_client",
    "missing_target",
    "target_scale",
    "labels",
    "classes",
)
# settings of a run that its new clients may have
_ADAPTED = ("data", "finetune", "metrics", "device", "seed")


def adapt(words: list[str]) -> int:
    """Make personal models of clients that took no part in a run, from its released model.

    Every new client finetunes the model in public/ on its own records and sends nothing, so this
    costs no epsilon. Model, loss and finetuning are those of the run unless given; features and
    classes must be coded as those of the run. Settings of a table that are not given, such as its
    columns and bounds, are those of the run.

    examples, where RUN is a folder such as outputs/2025-01-31/12-00-00
      fedmtl adapt RUN data.clients=20 data.seed=1   new clients of the same source
      fedmtl adapt RUN new.csv                       of another table with these columns
      fedmtl adapt RUN new.csv client=who            whose clients another column names
      fedmtl adapt RUN finetune=mean finetune.lam=0.5 metrics=[auc]
    """
    parser = command_parser(adapt, f"of {', '.join(_ADAPTED)}", folder=True)
    goes = "where the files go; default outputs/DATE/TIME"
    parser.add_argument("--out", type=Path, help=goes)
    options = parser.parse_intermixed_args(words)
    out = options.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "has files already" if out.is_dir() else "is a file"
        raise ConfigError(f"--out is {out}, which {state}; choose another folder.")
    options.overrides, kept = _of_the_same_table(options)
    config = _adapted_config(options)
    if kept:
        say(f"as in the run: {kept}")

    from ..algorithms import Personalization
    from ..trainer.result import Result

    settings = build.settings(config)
    if settings.finetune is None and of_place(options.overrides, "finetune"):
        raise ConfigError(
            "finetune is none, but new clients have nothing to do without; leave it "
            "out, or choose one."
        )
    # after all settings, which are checked faster than data are read
    data = build.made(config["data"], "data")
    # an automatic model is a factory in the files
    model = None
    if settings.model != "auto":
        model = settings.model
    run = Result.load(options.folder, model, trust=TRUST.get())
    run.shared_model()  # of a run that has none nothing can start
    if not of_place(options.overrides, "data"):
        raise ConfigError(
            "no setting of data is given, so these would be the clients of the run; say where the "
            "new ones are, such as data.clients=20 data.seed=1, or the path of a table, new.csv."
        )
    finetune = None
    if of_place(options.overrides, "finetune"):
        finetune = settings.finetune
    adaptation = run.adaptation
    if adaptation:
        if isinstance(finetune, Personalization):
            # a setting on the command line leaves the releases of the run as they are
            finetune = finetune.with_releases_of(adaptation["finetune"])
        adaptation = {**adaptation, "metrics": settings.metrics, "seed": config["seed"]}
    with new_folder("outputs") if out is None else nullcontext(out) as place:
        adapted = replace(run, adaptation=adaptation).adapt(
            data, finetune=finetune, device=config["device"], folder=place
        )
    public = "public/   the released model, covered by the epsilon of the run it comes from"
    private = "private/  covered by no epsilon: clients.csv, result.json, models.safetensors"
    show(f"{adapted.summary()}\n\nSaved in {place}\n  {public}\n  {private}")
    return 0


def _of_the_same_table(options: argparse.Namespace) -> tuple[list[str], str]:
    """Returns the settings that are typed, without ``data=table`` beside a run on a table, whose
    settings are kept but for its test rows beside another table, and those that are kept as they
    are typed; empty of other data."""
    typed = understood(options.overrides, automatic=False)
    stored = stored_config(options.folder).get("data") or {}
    if not str(stored.get("_target_")).endswith(".read_table") or not of_place(typed, "data"):
        return typed, ""
    words = [word for word in typed if word != "data=table"]
    # another source, to which the settings of the table mean nothing
    if any(word.startswith("data=") for word in words):
        return typed, ""
    given = {word.partition("=")[0].lstrip("+") for word in words}
    if "data.path" in given and "data.test_path" not in given and stored.get("test_path"):
        words.append("data.test_path=null")  # those of the run's clients
    usual = load("data", "table")
    names = [
        name
        for name in _COLUMNS
        if stored.get(name) != usual.get(name) and f"data.{name}" not in given
    ]
    return words, " ".join(shlex.quote(f"data.{name}={_flow(stored[name])}") for name in names)


_UNQUOTED = re.compile(r"(?!(nan|inf)$)[a-z_][\w/+.%*@?| -]*", re.ASCII | re.IGNORECASE)


class _Typed(yaml.SafeDumper):
    """Writes texts that need quotes with double ones, which a shell takes within single ones.

    Hydra needs more of them than YAML: about letters that are not ASCII, and about 1e3, which it
    reads as a number. It takes none about keys.
    """

    def choose_scalar_style(self) -> str:
        style: str = super().choose_scalar_style()
        scalar = self.event
        assert isinstance(scalar, yaml.ScalarEvent)
        text = scalar.tag == "tag:yaml.org,2002:str" and not self.simple_key_context
        if style == "'" or (text and not _UNQUOTED.fullmatch(scalar.value)):
            return '"'
        return style


def _flow(value: object) -> str:
    """Returns a setting in one line, as it is typed."""
    options: dict[str, Any] = {"width": math.inf, "allow_unicode": True, "sort_keys": False}
    return yaml.dump(value, Dumper=_Typed, default_flow_style=True, **options).split("\n")[0]


def _adapted_config(options: argparse.Namespace) -> Config:
    """Returns the settings of the run, with those of the new clients in their place."""
    folder: Path = options.folder
    config = stored_config(folder)
    if "search" in config:
        raise ConfigError(
            f"{folder} holds a search; use fedmtl.personalize with the model in its public/ folder."
        )
    if not (folder / "private" / "result.json").is_file():
        raise ConfigError(f"{folder} has not finished; continue it with fedmtl resume {folder}.")
    config = changed({"metrics": []} | config, options.overrides, _ADAPTED)
    return config | {"baselines": [], "replicates": 1, "epsilons": None}
