"""Find the drafter that a name or a path stands for."""

from jspec.drafters.base import Drafter
from jspec.drafters.ngram import NGram
from jspec.targets.target import Target


def load_drafter(source: str, target: Target) -> Drafter:
    """The drafter called `source`, ready for `target`.

    Args:
        source: `ngram`.
        target: the model it drafts for.

    Raises:
        ValueError: no such drafter; the message lists what there is.
    """
    if source == "ngram":
        return NGram()
    raise ValueError(f"drafter {source!r} is not known; expected 'ngram' (or 'none' for plain).")
