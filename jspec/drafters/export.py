"""Draft heads from one public format into another."""

from pathlib import Path

import numpy as np

from jspec.checkpoints.fetch import resolve_source
from jspec.checkpoints.source import Checkpoint, open_checkpoint, open_draft_checkpoint
from jspec.drafters import eagle_formats, medusa_formats, mtp_formats
from jspec.drafters.mtp_export import export_modules
from jspec.targets.config import config_from_hf

FORMATS = (*eagle_formats.WRITABLE, *medusa_formats.WRITABLE, *mtp_formats.WRITABLE)

_MODULES = "a set of prediction modules"


def export_head(
    source: str | Path, target: str | Path, path: str | Path, *, to: str, embedding: bool = True
) -> str:
    """Write a head in another format; nothing of it passes through another dtype.

    Args:
        source: the head, as for `load_drafter`; `mtp` for the modules in the target's checkpoint.
        target: the model it drafts for, as for `load_target`; only its config is read, and what a
            format stores although the head shares it with its target.
        path: a folder that does not exist yet; it appears whole or not at all.
        to: one of `FORMATS`.
        embedding: whether `speculators` gets the target's embedding beside the head. vLLM takes
            the target's where it is missing; speculators' own tools want it there.

    Returns:
        The format the head was found in.

    Raises:
        ValueError: an unknown format or source, a head of another kind, or a folder that exists.
        NotImplementedError: something of the head that the format cannot say, by name.
    """
    if to not in FORMATS:
        raise ValueError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}.")
    model = open_checkpoint(resolve_source(target))
    if source == "mtp":
        _check_kind(_MODULES, to, mtp_formats.WRITABLE)
        return export_modules(None, model, path, to=to)
    checkpoint = open_draft_checkpoint(resolve_source(source))
    if mtp_formats.recognise(checkpoint) is not None:
        _check_kind(_MODULES, to, mtp_formats.WRITABLE)
        return export_modules(checkpoint, model, path, to=to)
    config = config_from_hf(model.config)
    if (form := eagle_formats.recognise(checkpoint)) is not None:
        _check_kind("an EAGLE head", to, eagle_formats.WRITABLE)
        head = eagle_formats.read_head(checkpoint, form, config)
        shared = None
        if to == "speculators" and embedding and "embed_tokens.weight" not in head.tensors:
            dtype = head.tensors["fc.weight"].dtype
            shared = model.read("model.embed_tokens.weight").astype(dtype)
        known = {"name_or_path": str(target), "architectures": model.config.get("architectures")}
        eagle_formats.write_head(head, path, to, embedding=shared, verifier=known)
    elif (form := medusa_formats.recognise(checkpoint)) is not None:
        _check_kind("a set of Medusa heads", to, medusa_formats.WRITABLE)
        heads = medusa_formats.read_heads(checkpoint, form, config)
        projection = None
        if to == "vllm-medusa" and heads.config.projection == "target":
            projection = _projection(model).astype(next(iter(heads.tensors.values())).dtype)
        medusa_formats.write_heads(heads, path, to, projection=projection)
    else:
        raise ValueError(
            f"{source} is neither an EAGLE head nor a set of Medusa heads nor a folder of "
            "prediction modules; those in a model's own checkpoint are called 'mtp'."
        )
    return form


def _check_kind(what: str, to: str, expected: tuple[str, ...]) -> None:
    if to not in expected:
        raise ValueError(f"{what} cannot be written as {to!r}; expected {' or '.join(expected)}.")


def _projection(model: Checkpoint) -> np.ndarray:
    tied = "lm_head.weight" not in model.names()
    return model.read("model.embed_tokens.weight" if tied else "lm_head.weight")
