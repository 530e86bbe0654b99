"""Multi-token-prediction modules: what a target's own checkpoint ships for drafting.

A module predicts the token after the next one: from the target's hidden state at position i and
the embedding of token i + 1, through one more decoder block, to the shared head
(DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.targets.cache import KVCache, Prefix
from jspec.targets.config import TargetConfig
from jspec.targets.decoder import DecoderLayer
from jspec.targets.layers import Linear, RMSNorm
from jspec.targets.names import Source, layer_sources
from jspec.targets.rope import rotation


@dataclass(frozen=True, kw_only=True)
class MTPFamily:
    """How one published family differs from the others.

    Attributes:
        prefix: of a module's tensors, with `{layer}` where they are numbered on from the target's
            layers and `{index}` where they are counted by themselves.
        token_norm, hidden_norm, input_proj, norm: names of the tensors beside the block's.
        copies: tensors that repeat one of the target's, with its name.
        hidden_first: the hidden state comes before the embedding in the projection's input.
        masks_first: the embedding at position 0 counts as zeros.
        carries_norm: a chained step is fed the normalised output, not the residual stream.
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    input_proj: str
    norm: str
    copies: tuple[tuple[str, str], ...] = ()
    hidden_first: bool = False
    masks_first: bool = False
    carries_norm: bool = True


_DEEPSEEK = MTPFamily(
    prefix="model.layers.{layer}",
    token_norm="enorm",
    hidden_norm="hnorm",
    input_proj="eh_proj",
    norm="shared_head.norm",
    copies=(
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ),
)

FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "mimo": MTPFamily(
        prefix="model.mtp_layers.{index}",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        input_proj="input_proj",
        norm="final_layernorm",
        hidden_first=True,
        masks_first=True,
    ),
}
"""By the target's family. vLLM masks the first embedding of every family; SGLang and transformers
run DeepSeek's and GLM's modules without that, as they were trained."""


class MTPModule(nnx.Module):
    """Norms and projection of (hidden state, next token), one decoder block, and a final norm."""

    def __init__(self, config: TargetConfig, family: MTPFamily, *, dtype):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.family = config, family
        self.token_norm = RMSNorm(size, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, dtype=dtype)
        self.input_proj = Linear(2 * size, size, bias=False, dtype=dtype)
        # A module is a mixture of experts also where the target's first layers are dense.
        self.block = DecoderLayer(config, dtype=dtype, experts=config.experts is not None)
        self.norm = RMSNorm(size, eps, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "B T E"],
        embedded: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
        prefix: Prefix | None,
        ancestors,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "B T E"], KVCache]:
        """The block's output before the final norm, and its keys and values.

        Args:
            hidden: of the target (after its final norm), or carried from the step before.
            embedded: of the token that follows each hidden state.
            positions: of the hidden states.
            prefix, ancestors, implementation: as a `Decoder` takes them; the prefix's cache has
                one layer.
        """
        rope = rotation(self.config.rope, positions)
        x = self.inputs(hidden, embedded, positions)
        out, keys, values = self.block(x, rope, 0, prefix, ancestors, implementation)
        return out, KVCache((keys,), () if values is None else (values,))

    def inputs(
        self,
        hidden: Float[Array, "B T E"],
        embedded: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T E"]:
        """What the block reads."""
        if self.family.masks_first:
            embedded = jnp.where(positions[:, :, None] == 0, jnp.zeros_like(embedded), embedded)
        parts = [self.token_norm(embedded), self.hidden_norm(hidden)]
        if self.family.hidden_first:
            parts.reverse()
        return self.input_proj(jnp.concatenate(parts, axis=-1))

    def carried(self, out: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """What the next step is fed of a block's output."""
        return self.norm(out) if self.family.carries_norm else out

    def normed(self, carried: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """What the head reads, from what is carried."""
        return carried if self.family.carries_norm else self.norm(carried)


def module_prefix(config: TargetConfig, family: MTPFamily, index: int) -> str:
    """Where module `index` of a checkpoint lies."""
    return family.prefix.format(index=index, layer=config.num_layers + index)


def module_sources(
    path: tuple, shape: tuple[int, ...], config: TargetConfig, family: MTPFamily, index: int
) -> list[Source]:
    """Public tensors behind one parameter of module `index`."""
    prefix = module_prefix(config, family, index)
    if path[0] == "block":
        return layer_sources(prefix, path[1:], shape, config)
    name, leaf = path
    return [(f"{prefix}.{getattr(family, name)}.{leaf}", shape)]


def module_shapes(config: TargetConfig, family: MTPFamily, dtype=jnp.float32):
    """Graph and abstract parameters of a module."""
    return nnx.split(nnx.eval_shape(lambda: MTPModule(config, family, dtype=dtype)))


def tensor_shapes(config: TargetConfig, family: MTPFamily) -> dict[str, tuple[int, ...]]:
    """Public names and shapes of all that the modules of this config are made of."""
    found: dict[str, tuple[int, ...]] = {}
    _, shapes = module_shapes(config, family)
    for index in range(config.mtp_layers):
        for path, variable in nnx.to_flat_state(shapes):
            found.update(module_sources(path, variable.shape, config, family, index))
    return found


def module_names(config: TargetConfig) -> frozenset[str]:
    """Every tensor that a checkpoint of this config may hold for its modules, copies included."""
    family = FAMILIES.get(config.family)
    if family is None or not config.mtp_layers:
        return frozenset()
    copies = (
        f"{module_prefix(config, family, index)}.{copy}"
        for index in range(config.mtp_layers)
        for copy, _ in family.copies
    )
    return frozenset({*tensor_shapes(config, family), *copies})
