"""The draft heads inside the package, and the note that a head's folder may carry.

A folder of a head may hold `jspec.json` beside the weights: `target` (what it was trained for),
`tree` (what suits it best: `num_steps`, `topk`, `num_nodes`, or a list of nodes as `jspec
tune-tree` writes it), and whatever else its maker wants to say (data, command, figures, licence).
Other tools ignore the file.
"""

import json
from pathlib import Path
from typing import Any

from jspec.checkpoints.fetch import ALIASES
from jspec.trees import TreeConfig, TreeSpec, from_choices

NOTE = "jspec.json"

_HEADS = Path(__file__).parents[1] / "heads"


def shipped_heads() -> dict[str, Path]:
    """Folder of every head in the package, by the name that `load_drafter` takes."""
    return {path.parent.name: path.parent for path in sorted(_HEADS.glob(f"*/{NOTE}"))}


def default_drafter(target: str) -> str:
    """The drafter for a target nobody chose one for: its shipped head, else `ngram`.

    Args:
        target: as `load_target` takes it; an alias and its hub id are the same model.
    """
    for alias in ALIASES.values():
        if target in (alias.name, alias.hub_id) and alias.drafter in shipped_heads():
            return alias.drafter
    return "ngram"


def read_note(folder: Path) -> dict[str, Any]:
    """What `jspec.json` says; nothing where there is none.

    Raises:
        ValueError: it is not a JSON object.
    """
    path = folder / NOTE
    if not path.is_file():
        return {}
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); mend it or delete it.") from error
    if not isinstance(note, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(note).__name__}.")
    return note


def suggested_tree(folder: Path) -> TreeSpec | None:
    """The tree that `jspec.json` names, None where it names none.

    Raises:
        ValueError: it is no tree.
    """
    tree = read_note(folder).get("tree")
    try:
        if isinstance(tree, list):
            return from_choices(tree)
        return None if tree is None else TreeConfig(**tree)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / NOTE}: tree {json.dumps(tree)} is none ({error}); expected num_steps, topk "
            "and num_nodes, or a list of nodes such as [[0], [1], [0, 0]]."
        ) from error
