"""The gated MLP of a decoder layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jspec.targets.config import TargetConfig
from jspec.targets.layers import Linear


class MLP(nnx.Module):
    """down(silu(gate x) · up x); gate and up are one product."""

    def __init__(self, config: TargetConfig, *, dtype):
        size, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(size, 2 * wide, bias=config.mlp_bias, dtype=dtype)
        self.down_proj = Linear(wide, size, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)
