"""``fedmtl adapt``: personal models of clients that took no part in a run, from its released model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from .config import Config, changed, made, of_place, settings, stored_config
from .names import TRUST
from .options import add_folder, add_settings, command_parser, new_folder

_KEYS = ("data", "finetune", "metrics", "device", "seed")


def adapt(words: list[str]) -> int:
    """Make personal models of clients that took no part in a run, from its released model.

    Every new client finetunes the model in public/ on its own records and sends nothing, so this costs no epsilon.
    Model, loss and finetuning are those of the run unless given; features and classes must be coded as those of the
    run.

    examples
      fedmtl adapt outputs/2025-01-31/12-00-00 data.clients=20 data.seed=1      new clients of the same source
      fedmtl adapt outputs/2025-01-31/12-00-00 data=table data.path=new.csv data.client=who data.target=y
      fedmtl adapt outputs/2025-01-31/12-00-00 finetune=mean finetune.lam=0.5 metrics=[auc]
    """
    parser = command_parser(adapt)
    add_folder(parser)
    add_settings(parser, what=f"of {', '.join(_KEYS)}")
    parser.add_argument("--out", type=Path, help="where the files go; default outputs/DATE/TIME")
    options = parser.parse_intermixed_args(words)
    out = options.out or new_folder()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "has files already" if out.is_dir() else "is a file"
        raise ConfigError(f"--out is {out}, which {state}; choose another folder.")
    config = _config(options)

    from ..trainer.result import Result

    objects = settings(config)
    if objects["finetune"] is None and of_place(options.overrides, "finetune"):
        raise ConfigError("finetune is none, but new clients have nothing to do without; leave it out, or choose one.")
    data = made(config["data"], "data")
    model = None if objects["model"] == "auto" else objects["model"]  # an automatic model is a factory in the files
    run = Result.load(options.folder, model, trust=TRUST.get())
    run.shared_model()  # of a run that has none nothing can start
    if not of_place(options.overrides, "data"):
        raise ConfigError(
            "no setting of data is given, so these would be the clients of the run; say where the new ones are, "
            "such as data.clients=20 data.seed=1, or data=table data.path=FILE and its columns."
        )
    finetune = objects["finetune"] if of_place(options.overrides, "finetune") else None
    terms = run.terms and {**run.terms, "metrics": objects["metrics"], "seed": config["seed"]}
    adapted = replace(run, terms=terms).adapt(data, finetune=finetune, device=config["device"], folder=out)
    public = "public/   the released model, covered by the epsilon of the run it comes from"
    private = "private/  covered by no epsilon: clients.csv, result.json, models.safetensors"
    print(f"{adapted.summary()}\n\nSaved in {out}\n  {public}\n  {private}")
    return 0


def _config(options: argparse.Namespace) -> Config:
    """The settings of the run, with those of the new clients in their place."""
    folder: Path = options.folder
    config = stored_config(folder)
    if "search" in config:
        raise ConfigError(f"{folder} holds a search; use fedmtl.personalize with the model in its public/ folder.")
    if not (folder / "private" / "result.json").is_file():
        raise ConfigError(f"{folder} has not finished; continue it with fedmtl resume {folder}.")
    config = changed({"metrics": []} | config, options.overrides, _KEYS)
    return config | {"baselines": [], "replicates": 1, "epsilons": None}
