"""MTP training: a target and data in, the target's checkpoint with a trained module out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.mtp import MTP
from jspec.drafters.mtp_export import check_writable, write_mtp
from jspec.drafters.mtp_formats import family_of, own_modules
from jspec.targets import Target
from jspec.targets.mtp import MTPFamily, module_shapes
from pallas_kernels.masks import from_qlen_only
from train.config import MTPHeadConfig
from train.heads import Trained, merge_head
from train.loop import Method, no_extras
from train.methods.common import Prepared
from train.methods.features import stored_features
from train.methods.view import target_view
from train.objectives.mtp import MTPBatch, mtp_loss
from train.objectives.teacher import seen_by

Parts = Mapping[tuple, Any]


def mtp_method(
    config: MTPHeadConfig,
    target: Target,
    prepared: Prepared,
    *,
    seed: int,
    features: Path | None = None,
) -> Method:
    """Find or make the first module, and put the loss together.

    Args:
        config: of the module.
        target: frozen, or where training starts.
        prepared: the data.
        seed: of random weights.
        features: a folder to keep the target's hidden states in; None runs the target every time.

    Raises:
        NotImplementedError: a target whose family has no modules, or that has several.
        ValueError: settings that contradict each other, or a first module that cannot be made.
    """
    family = family_of(target.config)
    _check(config, features)
    stored = check_writable(target, 1, config.format)
    dtype = config.export_dtype or stored.read("model.embed_tokens.weight").dtype.name
    module = first_module(config.start, target, family, seed=seed)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: MTP(target.config, family, dtype=target.dtype)))
    whole: Trained = {("module", *path): x for path, x in _flat(module).items()}
    if config.joint:
        whole |= {("target", *path): x for path, x in _flat(target.params).items()}
    # What only corrects the choice of experts has no gradient, and must not decay either.
    fixed = {path: x for path, x in whole.items() if path[-1] == "correction"}
    trained = {path: x for path, x in whole.items() if path not in fixed}
    packed = prepared.schedule.config.packing
    objective, joint = config.objective, config.joint
    extras, layers = no_extras, ()
    if features is not None:  # with the layers of EAGLE-3, so that both can share one store
        layers = default_feature_layers(target.config.num_layers)
        extras = stored_features(features, target, prepared, layers)[1]

    def observe(trained: Trained, frozen: PyTree, batch: dict[str, Any], key) -> Any:
        parts = _as_held(trained | frozen["fixed"])
        tokens, rows = batch["tokens"], batch["rows"]
        if joint:
            params = _below(parts, "target")
            state = _state(params)
            bits = from_qlen_only(seen_by(batch["documents"])) if packed else None
            with jax.named_scope("target"):
                hidden = target.forward(state, tokens, batch["positions"], None, bits).hidden
            tied = target.config.tie_embeddings
            head = params[("embedding",) if tied else ("head",)]
            shared = {("embedding",): params[("embedding",)], ("head",): head}
            width = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            rows = jnp.broadcast_to(width, tokens.shape)
        else:
            shared = frozen["shared"]
            _, teacher, _ = target_view(
                target,
                frozen["target"],
                batch,
                layers=layers,
                packed=packed,
                dtype=shared[("head",)].dtype,
            )
            hidden = teacher.hidden
        module = {("module", *path): x for path, x in _below(parts, "module").items()}
        seen = MTPBatch(
            tokens=tokens,
            positions=batch["positions"],
            documents=batch["documents"],
            mask=batch["mask"],
            rows=rows,
            hidden=hidden,
        )
        return mtp_loss(merge_head(graphdef, module, shared), seen, objective, joint=joint)

    def export(trained: Trained, path: Path) -> None:
        parts = {path: np.asarray(x) for path, x in (trained | fixed).items()}
        write_mtp(
            target,
            [_state(_below(parts, "module"))],
            path,
            to=config.format,
            params=_state(_below(parts, "target")) if joint else None,
            dtype=dtype,
        )

    return Method(
        name="mtp",
        trained=trained,
        frozen={
            "target": {} if joint or features is not None else target.params,
            "shared": {} if joint else {("embedding",): target.embedding, ("head",): target.head},
            "fixed": fixed,
        },
        observe=observe,
        decay=objective.decay,
        export=export,
        extras=extras,
        facts={
            "target": target.name,
            "data": prepared.dataset.fingerprint,
            "joint": joint,
            "start": config.start,
            "objective": vars(objective),
        },
        best_by="loss" if joint else "tau",
    )


def first_module(start: str, target: Target, family: MTPFamily, *, seed: int) -> PyTree:
    """Parameters of the module that training starts from.

    Args:
        start: `own`, the one in the target's checkpoint; `target`, where the block is the target's
            last layer, which reads the hidden state as it is and a little of the token; `random`.
        target: what it is for.
        family: how its modules are built.
        seed: of the noise.

    Raises:
        NotImplementedError: `own` with several modules.
        ValueError: `own` without one, or `target` where the last layer is not of a module's kind.
    """
    config = target.config
    if start == "own":
        if not config.mtp_layers:
            raise ValueError(f"{target.name} has no module; start from target or random.")
        modules = own_modules(target, family)
        if len(modules) > 1:
            raise NotImplementedError(
                f"{target.name} has {len(modules)} modules run in turn; only one module run "
                "recurrently can be trained: start from target or random."
            )
        return modules[0]
    rng = np.random.default_rng(seed)
    _, shapes = module_shapes(config, family, target.dtype)

    def draw(path, shape) -> np.ndarray:
        if len(shape) == 1:
            return np.full(shape, "norm" in str(path[-2]), np.float32)
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    found = {path: draw(path, x.shape) for path, x in nnx.to_flat_state(shapes)}
    if start == "target":
        found |= _like_target(target, family, found)
    return nnx.from_flat_state(
        (path, variable.replace(jnp.asarray(found[path], variable.dtype)))
        for path, variable in nnx.to_flat_state(shapes)
    )


def _like_target(target: Target, family: MTPFamily, drawn: dict) -> dict:
    """The target's last layer and final norm, and a projection that passes the hidden half."""
    config, size = target.config, target.config.hidden_size
    flat = _flat(target.params)
    last = ("layers", config.num_layers - 1)
    layer = {("block", *path[2:]): np.asarray(x) for path, x in flat.items() if path[:2] == last}
    shapes = {path: x.shape for path, x in drawn.items() if path[0] == "block"}
    if {path: x.shape for path, x in layer.items()} != shapes:
        raise ValueError(
            f"the last layer of {target.name} is dense, and a module of its family is a mixture of "
            "experts; start from random."
        )
    halves = np.split(0.1 * drawn[("input_proj", "weight")], 2, axis=1)
    halves[0 if family.hidden_first else 1] = np.eye(size, dtype=np.float32)
    return layer | {
        ("input_proj", "weight"): np.concatenate(halves, axis=1),
        ("norm", "weight"): np.asarray(flat[("norm", "weight")]),
    }


def _check(config: MTPHeadConfig, features: Path | None) -> None:
    if config.joint and features is not None:
        raise ValueError(
            "--features keeps a frozen target's hidden states, and --joint trains the target; "
            "leave one out."
        )
    if config.joint and config.format != "mtp":
        raise ValueError(
            f"--format {config.format} leaves out the target, which --joint trains; expected mtp."
        )


def _flat(params: PyTree) -> Trained:
    return {path: variable[...] for path, variable in nnx.to_flat_state(params)}


def _below(parts: Parts, name: str) -> dict[tuple, Any]:
    return {path[1:]: x for path, x in parts.items() if path[0] == name}


def _state(parts: Parts) -> PyTree:
    return nnx.from_flat_state((path, nnx.Param(x)) for path, x in parts.items())


def _as_held(parts: Parts) -> Trained:
    """Routers are float32 whatever is computed in."""
    return {p: x.astype(jnp.float32) if "router" in p else x for p, x in parts.items()}
