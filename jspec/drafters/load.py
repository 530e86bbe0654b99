"""Find the drafter that a name or a path stands for, and say what was found."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from jspec.checkpoints.fetch import resolve_source
from jspec.checkpoints.source import Checkpoint, open_draft_checkpoint
from jspec.drafters import eagle_formats, medusa_formats, mtp_formats
from jspec.drafters.base import Drafter
from jspec.drafters.eagle_build import build_drafter
from jspec.drafters.medusa_build import read_medusa
from jspec.drafters.mtp_formats import read_mtp
from jspec.drafters.ngram import NGram
from jspec.drafters.probe import warn_if_useless
from jspec.drafters.shipped import read_note, shipped_heads, suggested_tree
from jspec.drafters.standalone import standalone
from jspec.targets.load import load_target
from jspec.targets.target import Target

logger = logging.getLogger("jspec")


def load_drafter(source: str | Path, target: Target, *, probe: bool = True) -> Drafter:
    """The drafter called `source`, ready for `target`.

    The format is recognised from the files themselves; what was found is logged (logger `jspec`)
    and kept as the drafter's `description`.

    Args:
        source: a head in the package, such as `smollm2-135m-eagle3` (`shipped_heads`); `ngram`;
            `mtp` for the prediction modules in the target's own checkpoint (DeepSeek-V3, GLM-4.5,
            MiMo); a folder, alias or hub id of a draft head in the format of SafeAILab (EAGLE-1,
            EAGLE-2, EAGLE-3), SpecForge, speculators, ModelOpt, FasterDecoding or vLLM (Medusa),
            or SGLang (NextN); or of a small model with the target's vocabulary, GGUF files
            included.
        target: the model it drafts for.
        probe: write a few tokens with it, and warn with the likely causes where almost none of its
            guesses are accepted. Costs compiling a small engine; False skips it, and so does a
            head in the package with the very target it was trained for.

    Raises:
        ValueError: no such drafter, one that belongs to another target, or files that contradict
            themselves: a tensor missing, left over or misshapen, or maps that disagree.
        NotImplementedError: a variant that is not supported (it is named).
    """
    if source == "ngram":
        return NGram()
    head = shipped_heads().get(str(source))
    if source == "mtp":
        drafter = read_mtp(target)
    else:
        drafter = _from_files(head or _resolved(source), target)
    logger.info("%s: %s", source, drafter.description)
    if probe and not (head and target.name == read_note(head)["target"]):
        warn_if_useless(target, drafter)
    return drafter


def _resolved(source: str | Path) -> Path:
    try:
        return resolve_source(source)
    except ValueError as error:
        raise ValueError(
            f"drafter {str(source)!r}: {error}; by name there are 'ngram' and 'mtp' (and 'none' "
            f"for plain), and the heads {', '.join(shipped_heads())}."
        ) from error


def _from_files(path: Path, target: Target) -> Drafter:
    if path.is_file():
        return standalone(load_target(path, dtype=target.dtype.name), target)
    checkpoint = open_draft_checkpoint(path)
    for recognise, read in _FAMILIES:
        form = recognise(checkpoint)
        if form is not None:
            drafter = read(checkpoint, form, target)
            return dataclasses.replace(drafter, tree=suggested_tree(path))
    if checkpoint.config.get("architectures"):
        return standalone(load_target(path, dtype=target.dtype.name), target)
    raise ValueError(
        f"{path} is no draft head that jspec knows: expected the tensors of a Medusa or an "
        f"EAGLE head, or a model with `architectures` in its config; it holds "
        f"{', '.join(sorted(checkpoint.names())[:4])}, …"
    )


def _read_eagle(checkpoint: Checkpoint, form: str, target: Target) -> Drafter:
    return build_drafter(eagle_formats.read_head(checkpoint, form, target.config), target)


_FAMILIES: tuple[tuple[Callable, Callable], ...] = (
    (eagle_formats.recognise, _read_eagle),
    (medusa_formats.recognise, read_medusa),
    (mtp_formats.recognise, mtp_formats.read_modules),
)
