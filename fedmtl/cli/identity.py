"""The command ``identity``: the key of a client for secure sums."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from .output import show
from .parsers import command_parser


def identity(words: list[str]) -> int:
    """Make the identity key of a client, by which others know it in secure sums.

    The private key goes into a new file, which stays on the client's node. The printed key is the
    public one, for identities= of the server and of all nodes.

    examples
      fedmtl identity north                     north.key, in this folder
      fedmtl identity north --file keys/n.key   another file
    """
    parser = command_parser(identity)
    parser.add_argument("name", help="of the client, as in the population")
    parser.add_argument("--file", type=Path, help="a new one, for the private key")
    options = parser.parse_args(words)

    from ..secure.identity import new_identity

    file = options.file
    if file is None:
        file = Path(f"{quote(options.name, safe='')}.key")
    public = new_identity(file)
    show(f'"{options.name}": "{public}"')
    return 0
