"""Configuration files with the defaults of the classes that they name.

Hydra's source of files, :class:`Defaults`, completes a file under ``configs/``, which lists only
the values that differ from the defaults of its ``_target_``: every setting has a key that Hydra can
override, sweep and print. A file makes only the objects that
:func:`fedmtl.trainer.targets.resolved_target` lets it name, and sets only the keys of Hydra itself
that :func:`fedmtl.cli.received.check_file` accepts."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError

from ..errors import ConfigError, first_line
from .arguments import arguments_of
from .names import GROUPS, config_folder, config_folders
from .received import check_file, check_size

# arguments that are no settings of their class
_OF_PROGRAMS = ("folder", "callbacks", "transform", "model")


class Defaults(FileConfigSource):
    """Configuration files in a folder, with the defaults of the classes that they name."""

    @staticmethod
    def scheme() -> str:
        return "fedmtl"

    def load_config(self, config_path: str) -> ConfigResult:
        if Path(self.path) == config_folder().resolve():
            # the package's files stay as they are, and to read one takes ten times as long
            result: ConfigResult = pickle.loads(_packaged(self.path, config_path))
            return result
        return self.completed(config_path)

    def completed(self, config_path: str) -> ConfigResult:
        """Returns the content of a file, checked, with the defaults of the classes that it
        names."""
        name = self._normalize_file_name(config_path)
        check_size(Path(self.path) / name)
        try:
            result = super().load_config(config_path)
        except GrammarParseError as error:
            raise ConfigError(
                f"{Path(self.path) / name} has a text with '${{' that is no reference to a "
                f"setting, such as ${{seed}} ({first_line(error)})."
            ) from error
        check_file(Path(self.path), name, result)
        folder = Path(config_path).parent.as_posix().replace("/", ".").strip(".")
        assert isinstance(result.config, DictConfig)
        add_defaults(result.config, "" if result.header.get("package") else folder)
        return result


@cache
def _packaged(folder: str, config_path: str) -> bytes:
    """Returns a file of the package, complete, pickled: Hydra changes the loaded content in
    place."""
    source = Defaults("fedmtl", f"{Defaults.scheme()}://{folder}")
    return pickle.dumps(source.completed(config_path))


class Loader(ConfigLoaderImpl):
    """Hydra's composition of files, without the settings of options that the words replace."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        *checks: Any,
        **named: Any,
    ) -> DictConfig:
        config = super().load_configuration(config_name, overrides, run_mode, *checks, **named)
        # that of a whole sweep has no values of the settings that it goes through
        if run_mode is RunMode.RUN:
            typed = OverridesParser.create().parse_overrides(overrides)
            drop_leftovers(config, {one.key_or_group: one.value() for one in typed})
        return config


def drop_leftovers(config: DictConfig, typed: Mapping[str, Any]) -> None:
    """Drops settings for an option that the command line has replaced, in place.

    An experiment sets ``algorithm.lam`` for the algorithm that it chooses;
    ``experiment=NAME algorithm=fedavg`` chooses another one. Settings for which
    that one has no argument are dropped, and so is a value for an argument that is an object.

    Args:
        config: composed.
        typed: values of the command line by key or group, which stay as they are.
    """
    keys = [re.split("[./]", key) for key in typed]
    for group in (group for group in GROUPS if isinstance(config.get(group), DictConfig)):
        node = config[group]
        target = config[group].get("_target_")
        # only a choice on the command line leaves settings of another option behind
        if target is not None and not {group, "algorithm"} & typed.keys():
            continue
        fresh = load(group, str(typed.get(group)))
        accepted: Collection[str] = ()
        if target is not None:
            accepted = arguments_of(target, group).names
        stays = {
            "_target_",
            "lora",
            "fix",
            *(key[1] for key in keys if key[0] == group and len(key) > 1),
        }
        with open_dict(config):
            for name in [name for name in node if name not in stays]:
                if name not in accepted:
                    del node[name]
                elif isinstance(fresh._get_node(name), DictConfig) and not isinstance(
                    node._get_node(name), DictConfig
                ):
                    node[name] = fresh[name]


def load(group: str, option: str) -> DictConfig:
    """Returns the settings of one option of a group as its file has them, with the defaults."""
    for folder in config_folders():
        if (folder / group / f"{option}.yaml").is_file():
            source = Defaults("fedmtl", f"{Defaults.scheme()}://{folder}")
            config: Any = source.load_config(f"{group}/{option}.yaml").config
            return config.get(group) or config  # type: ignore[no-any-return]
    return OmegaConf.create()


def add_defaults(node: DictConfig, place: str) -> None:
    """Adds the arguments that a mapping does not list, in place; those of the mappings in it, too.

    An argument without a default is ``???``, Hydra's mark of a value that is required, and the seed
    of a part is that of the run.

    Args:
        node: it describes an object if it has a ``_target_``.
        place: its dotted key.

    Raises:
        ConfigError: a ``_target_`` that a file may not name.
    """
    for name in (str(name) for name in node if name != "defaults"):
        if isinstance(node._get_node(name), DictConfig):
            add_defaults(node[name], f"{place}.{name}".lstrip("."))
    if (target := node.get("_target_")) is None:
        return
    arguments = arguments_of(target, place)
    # other defaults, such as a transform, can be given by a program only
    left_out = {*(str(name) for name in node), *_chosen(node), *_OF_PROGRAMS}
    for name, default in arguments.defaults.items():
        if name in left_out:
            continue
        if name == "seed" and place:
            node[name] = "${seed}"
        else:
            node[name] = default
    for name in arguments.mappings:
        if isinstance(node._get_node(name), DictConfig):
            OmegaConf.set_struct(node[name], False)  # the keys are free


def _chosen(node: DictConfig) -> list[str]:
    """Returns the keys of a file that its list of ``defaults`` fills, such as ``local`` for
    ``solver@local: sgd``."""
    entries = (entry for entry in node.get("defaults") or () if isinstance(entry, DictConfig))
    return [re.split("[@/.]", str(key))[-1] for entry in entries for key in entry]
