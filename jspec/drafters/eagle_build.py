"""From a head on disk, or in training, to a drafter that the engine runs."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.drafters.eagle import Eagle, EagleConfig
from jspec.drafters.eagle3 import Eagle3, Eagle3Config
from jspec.drafters.feature_drafter import FeatureDrafter
from jspec.drafters.heads import Head, target_ids
from jspec.targets.names import Source, layer_sources
from jspec.targets.target import Target


def build_drafter(head: Head, target: Target) -> FeatureDrafter:
    """The drafter of a head, in the target's dtype; its file is used up exactly.

    The embedding and, where the head has none of its own, the output projection are the target's
    arrays, not copies.

    Args:
        head: from `read_head`, or out of training.
        target: what it drafts for.

    Raises:
        ValueError: a tensor that is missing, left over or misshapen (it is named), a width or a
            vocabulary that is not the target's, or a map that contradicts itself.
    """
    config, decoder = head.config, head.config.decoder
    if isinstance(config, EagleConfig) and decoder.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{head.name} has hidden size {decoder.hidden_size}, the target {target.name} has "
            f"{target.config.hidden_size}; an EAGLE-1/2 head has its target's."
        )
    ids = target_ids(head)

    def empty() -> Eagle | Eagle3:
        if isinstance(config, Eagle3Config):
            return Eagle3(config, dtype=target.dtype)
        return Eagle(config, dtype=target.dtype)

    graphdef, shapes = nnx.split(nnx.eval_shape(empty))
    filler = _Filler(head, target)
    flat = [
        (path, variable.replace(filler.fill(path, variable.shape)))
        for path, variable in nnx.to_flat_state(shapes)
    ]
    filler.finish()
    layers, draft_vocab = (), decoder.vocab_size
    if isinstance(config, Eagle3Config):
        layers, draft_vocab = config.feature_layers, config.draft_vocab_size
    return FeatureDrafter(
        name=head.method,
        description=describe(head),
        feature_layers=layers,
        graphdef=graphdef,
        params=nnx.from_flat_state(flat),
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        hidden_size=decoder.hidden_size,
        draft_vocab_size=draft_vocab,
        token_map=None if ids is None else ids.astype(np.int32),
        trained_length=decoder.max_context,
    )


def describe(head: Head) -> str:
    """What a head is, in a line for people."""
    config, decoder = head.config, head.config.decoder
    layers = f"{decoder.num_layers} layer{'s' if decoder.num_layers > 1 else ''}"
    said = f"{head.method} head in {head.format} format, {layers} of width {decoder.hidden_size}"
    if not isinstance(config, Eagle3Config):
        return f"{said}, trained on {decoder.max_context} positions"
    switches = [
        switch
        for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(config, switch)
    ]
    return (
        f"{said}, reads the outputs of layers {', '.join(map(str, config.feature_layers))} of "
        f"{config.target_num_layers}, drafts {config.draft_vocab_size} of {decoder.vocab_size} "
        f"tokens, {', '.join(switches) or 'no extra norms'}, trained on {decoder.max_context} "
        "positions"
    )


class _Filler:
    """Takes every tensor of a head once, by the path of the parameter it fills."""

    def __init__(self, head: Head, target: Target):
        self.head, self.target = head, target
        self.left = set(head.tensors) - {"d2t", "t2d"}

    def fill(self, path: tuple, shape: tuple[int, ...]):
        """The parameter at `path`."""
        if path == ("embedding",):
            return self._shared("embed_tokens.weight", "embedding", shape)
        if path == ("head",):
            return self._shared("lm_head.weight", "head", shape)
        sources = head_sources(path, shape, self.head.config)
        parts = [self._take(name, part) for name, part in sources]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return jnp.asarray(array, self.target.dtype)

    def finish(self) -> None:
        """Nothing may be left over."""
        if self.left:
            raise ValueError(
                f"{self.head.name} has {len(self.left)} tensors that its config does not explain: "
                f"{', '.join(sorted(self.left))}; the config and the weights are not of one head."
            )

    def _shared(self, name: str, what: str, shape: tuple[int, ...]):
        """The head's own matrix, or the target's array where it has none or the same one."""
        theirs = self._of_target(what)
        if name not in self.head.tensors:
            if theirs.shape != shape:
                raise ValueError(
                    f"{self.head.name} has no {name!r} of shape {shape}, and the target's "
                    f"{what} of shape {theirs.shape} cannot stand in for it."
                )
            return theirs
        own = self._take(name, shape)
        if theirs.shape == shape and _equal(own, theirs):
            return theirs
        return jnp.asarray(own, self.target.dtype)

    def _of_target(self, what: str):
        state = dict(nnx.to_flat_state(self.target.params))
        found = state.get((what,), state[("embedding",)])
        return found[...]

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.head.tensors:
            raise ValueError(
                f"{self.head.name} has no tensor {name!r} of shape {shape}, which its config asks "
                f"for; it has {', '.join(sorted(self.head.tensors))}."
            )
        array = self.head.tensors[name]
        if array.shape != shape:
            raise ValueError(
                f"{self.head.name}: tensor {name!r} has shape {array.shape}, its config and the "
                f"target ask for {shape}; the head belongs to another target or another config."
            )
        self.left.discard(name)
        return array


def head_sources(
    path: tuple, shape: tuple[int, ...], config: EagleConfig | Eagle3Config
) -> list[Source]:
    """Tensors of a `Head` behind one parameter of its module, in order.

    Args:
        path: of the parameter in `Eagle` or `Eagle3`.
        shape: of the parameter.
        config: of the head.
    """
    match path:
        case ("embedding",):
            return [("embed_tokens.weight", shape)]
        case ("head",):
            return [("lm_head.weight", shape)]
        case ("fc_norm", index, leaf):
            return [(f"fc_norm.{index}.{leaf}", shape)]
        case (name, leaf) if name in ("fc", "norm", "input_norm"):
            return [(f"{name}.{leaf}", shape)]
        case ("first", *inside):
            prefix = "layers.0"
        case ("layers", index, *inside):
            first = 1 if isinstance(config, Eagle3Config) else 0
            prefix = f"layers.{int(index) + first}"
        case _:
            raise AssertionError(f"no public name for parameter {path}")
    return layer_sources(prefix, tuple(inside), shape, config.decoder)


def _equal(own: np.ndarray, theirs) -> bool:
    """Whether casting the file's matrix gives the target's, bit for bit."""
    return bool(jnp.array_equal(jnp.asarray(own, theirs.dtype), theirs))
