"""`jspec fetch`: a model by its alias."""

from jspec.checkpoints.fetch import describe, fetch
from jspec.commands.options import Fetch


def run(options: Fetch) -> int:
    """Print the path and what it is."""
    path = fetch(options.alias)
    print(path)
    print(describe(path))
    return 0
