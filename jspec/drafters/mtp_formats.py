"""Prediction modules on disk: in the target's checkpoint, or in a folder of their own.

| format | tensors | config.json |
|---|---|---|
| mtp | the whole model, modules included; what vLLM and SGLang load | the target's |
| mtp-modules | the modules alone, by the same names and without copies | the target's |
| nextn | one module alone as layer 0: SGLang's draft folders | one layer, `…ForCausalLMNextN` |
"""

import dataclasses
from collections.abc import Iterable
from functools import partial

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints.fp8 import scale_name
from jspec.checkpoints.source import Checkpoint, StrictReader, open_checkpoint
from jspec.drafters.base import Drafter
from jspec.drafters.mtp import with_module
from jspec.drafters.mtp_chain import with_modules
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.mtp import (
    FAMILIES,
    MTPFamily,
    module_names,
    module_prefix,
    module_shapes,
    module_sources,
    tensor_shapes,
)
from jspec.targets.names import fill
from jspec.targets.target import Target

WRITABLE = ("mtp", "mtp-modules", "nextn")

_NEXTN = "NextN"
_NEXTN_PREFIX = "model.layers.0."


def recognise(checkpoint: Checkpoint) -> str | None:
    """The format of a folder with modules alone; None for anything else, a whole model included."""
    if _architecture(checkpoint).endswith(_NEXTN):
        return "nextn"
    counted = checkpoint.config.get("num_nextn_predict_layers")
    alone = counted and "model.embed_tokens.weight" not in checkpoint.names()
    return "mtp-modules" if alone else None


def read_mtp(target: Target, *, family: MTPFamily | None = None) -> Drafter:
    """The drafter of the modules in the target's own checkpoint.

    Args:
        target: loaded from a folder.
        family: how its modules are run; default by the target's family.

    Raises:
        NotImplementedError: a family whose modules are not supported, by name.
        ValueError: a checkpoint without modules, or with modules of which tensors are missing or
            misshapen (all are named), or whose copies of embedding and head are not the target's.
    """
    family = family or family_of(target.config)
    return _drafter(target, family, own_modules(target, family), target.name)


def read_modules(checkpoint: Checkpoint, form: str, target: Target) -> Drafter:
    """The drafter of modules that lie in a folder of their own.

    Args:
        checkpoint: of the modules.
        form: from `recognise`.
        target: the model they were taken from, or trained for.

    Raises:
        NotImplementedError: a family whose modules are not supported, by name.
        ValueError: modules of another model, or tensors that are missing, misshapen or left over.
    """
    family = family_of(target.config)
    checkpoint = by_target_names(checkpoint, form, target.config)
    config = fitting(checkpoint, target.config)
    # The model is needed only for copies of its tensors, which these formats leave out.
    copies = [copy for copy, _ in copies_in(checkpoint, config, family)]
    if copies and target.path is None:
        raise ValueError(
            f"{checkpoint.path} repeats tensors of its target ({', '.join(copies)}), which cannot "
            f"be compared: {target.name!r} was made in memory; load the target from a folder."
        )
    model = open_checkpoint(target.path) if copies and target.path else checkpoint
    refuse_left_over(checkpoint, config)
    modules = _filled(checkpoint, model, config, family, target.dtype)
    return _drafter(target, family, modules, str(checkpoint.path))


def own_modules(target: Target, family: MTPFamily) -> list[PyTree]:
    """Parameters of every module in the target's checkpoint; errors as of `read_mtp`."""
    config = target.config
    if target.path is None:
        raise ValueError(
            f"target {target.name!r} was made in memory, and its modules are read from a "
            "checkpoint; load the target from a folder."
        )
    checkpoint = open_checkpoint(target.path)
    refuse_none(checkpoint, config)
    return _filled(checkpoint, checkpoint, config, family, target.dtype)


def family_of(config: TargetConfig) -> MTPFamily:
    """How a target's modules are built and run.

    Raises:
        NotImplementedError: it has none that are supported; it is named.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise NotImplementedError(
            f"prediction modules of {config.family!r} targets are not supported; expected one of "
            f"{', '.join(FAMILIES)} (Qwen3-Next's and Ernie-4.5's are not either)."
        )
    return family


def refuse_none(checkpoint: Checkpoint, config: TargetConfig) -> None:
    """Raise ValueError where a checkpoint has no modules."""
    if not config.mtp_layers:
        raise ValueError(
            f"{checkpoint.path} has no prediction modules: its config says "
            f"num_nextn_predict_layers={config.mtp_layers}; use another drafter, or train a module "
            "(jspec train mtp)."
        )


def by_target_names(checkpoint: Checkpoint, form: str, target: TargetConfig) -> Checkpoint:
    """The same tensors by the names, and with the config, that they have beside their target.

    Raises:
        ValueError: a `nextn` folder of more than one module.
    """
    if form != "nextn":
        return checkpoint
    count = checkpoint.config.get("num_nextn_predict_layers")
    if count != 1:
        raise ValueError(
            f"{checkpoint.path}: num_nextn_predict_layers={count!r}; expected 1 in a folder of "
            f"{_architecture(checkpoint)}."
        )
    place = f"model.layers.{target.num_layers}."
    names = {
        name: place + name.removeprefix(_NEXTN_PREFIX) if name.startswith(_NEXTN_PREFIX) else name
        for name in checkpoint.names()
    }
    return dataclasses.replace(
        checkpoint,
        config=checkpoint.config
        | {
            "architectures": [_architecture(checkpoint).removesuffix(_NEXTN)],
            "num_hidden_layers": target.num_layers,
        },
        tensors={names[name]: tensor for name, tensor in checkpoint.tensors.items()},
    )


def refuse_nextn(target: TargetConfig, count: int) -> None:
    """Raise NotImplementedError where a `nextn` folder has no word for these modules."""
    if count != 1 or not family_of(target).prefix.startswith("model.layers."):
        raise NotImplementedError(
            f"nextn holds one module as a decoder layer, not {count} of {target.family!r}; "
            "expected mtp-modules or mtp."
        )


def by_nextn_names(
    public: dict, tensors: dict[str, np.ndarray], target: TargetConfig
) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and tensors of a `nextn` folder; the inverse of `by_target_names`.

    Args:
        public: config.json by the target's terms.
        tensors: of the modules, by the target's names.
        target: config of the target.
    """
    place = f"model.layers.{target.num_layers}."
    changed = {"architectures": [public["architectures"][0] + _NEXTN], "num_hidden_layers": 1}
    renamed = {_NEXTN_PREFIX + name.removeprefix(place): rows for name, rows in tensors.items()}
    return public | changed, renamed


def fitting(checkpoint: Checkpoint, target: TargetConfig) -> TargetConfig:
    """The target's config with as many modules as a checkpoint of the same model says it has.

    Raises:
        ValueError: it is of another model; what differs is named.
    """
    theirs = config_from_hf(checkpoint.config)
    config = dataclasses.replace(target, mtp_layers=theirs.mtp_layers)
    differing = [
        f"{field.name} is {getattr(theirs, field.name)}, the target's {getattr(config, field.name)}"
        for field in dataclasses.fields(TargetConfig)
        if getattr(theirs, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise ValueError(
            f"the modules in {checkpoint.path} are another target's: {'; '.join(differing)}."
        )
    refuse_none(checkpoint, config)
    return config


def refuse_left_over(checkpoint: Checkpoint, config: TargetConfig) -> None:
    """Raise ValueError where a folder of modules alone holds anything else; all is named."""
    left = sorted(checkpoint.names() - module_tensors(checkpoint, config))
    if left:
        raise ValueError(
            f"{checkpoint.path} has {len(left)} tensors that are not of its prediction modules: "
            f"{', '.join(left)}."
        )


def check_modules(
    checkpoint: Checkpoint, model: Checkpoint, config: TargetConfig, family: MTPFamily
) -> None:
    """Check that every module is whole, without reading it.

    Args:
        checkpoint: with the modules.
        model: with the model's own tensors.
        config: of the model; says how many modules there are.
        family: of the modules.

    Raises:
        ValueError: tensors that are missing (all are named) or misshapen, or copies of embedding
            and head that are not the model's.
    """
    shapes = tensor_shapes(config, family)
    missing = sorted(set(shapes) - checkpoint.names())
    if missing:
        raise ValueError(
            f"{checkpoint.path}: its config says num_nextn_predict_layers={config.mtp_layers}, but "
            f"{len(missing)} tensors of the modules are missing: {', '.join(missing)}; the "
            "checkpoint was converted without them, or only in part."
        )
    for name, shape in shapes.items():
        if checkpoint.shape(name) != shape:
            raise ValueError(
                f"{checkpoint.path}: tensor {name!r} has shape {checkpoint.shape(name)}, its "
                f"config asks for {shape}; the config and the weights are not of the same model."
            )
    for copy, name in copies_in(checkpoint, config, family):
        if not np.array_equal(checkpoint.read(copy), model.read(name)):
            raise ValueError(
                f"{checkpoint.path}: {copy!r} differs from {name!r}, which it should repeat; "
                "a module with an embedding or a head of its own is not supported."
            )


def module_tensors(checkpoint: Checkpoint, config: TargetConfig) -> set[str]:
    """Names of the tensors that are modules', copies and block scales included."""
    names = module_names(config)
    return set(checkpoint.names()) & {*names, *map(scale_name, names)}


def copies_in(
    checkpoint: Checkpoint, config: TargetConfig, family: MTPFamily
) -> list[tuple[str, str]]:
    """Tensors of modules that repeat the model's, as far as they are there, with their names."""
    return [pair for pair in _copies(config, family) if pair[0] in checkpoint.names()]


def _copies(config: TargetConfig, family: MTPFamily) -> Iterable[tuple[str, str]]:
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
    for index in range(config.mtp_layers):
        prefix = module_prefix(config, family, index)
        for copy, name in family.copies:
            yield f"{prefix}.{copy}", tied.get(name, name)


def _filled(
    checkpoint: Checkpoint, model: Checkpoint, config: TargetConfig, family: MTPFamily, dtype
) -> list[PyTree]:
    check_modules(checkpoint, model, config, family)
    reader = StrictReader(checkpoint)
    _, shapes = module_shapes(config, family, dtype)
    return [
        fill(reader, shapes, partial(module_sources, config=config, family=family, index=index))
        for index in range(config.mtp_layers)
    ]


def _drafter(target: Target, family: MTPFamily, modules: list[PyTree], source: str) -> Drafter:
    if len(modules) == 1:
        return with_module(target, family, modules[0], source)
    return with_modules(target, family, modules, source)


def _architecture(checkpoint: Checkpoint) -> str:
    return (checkpoint.config.get("architectures") or [""])[0]
