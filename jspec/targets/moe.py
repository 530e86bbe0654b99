"""Mixture of experts with sigmoid routing, as DeepSeek-V3 and GLM-4.5 have it.

Two forms of the same sum: with few tokens in flight each (token, expert) pair gathers its expert,
so that only experts in use are read; with many, pairs are sorted by expert and multiplied in
groups, so that each expert is read once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.targets.config import TargetConfig
from jspec.targets.deepseek_config import ExpertsConfig
from jspec.targets.mlp import MLP


class Router(nnx.Module):
    """Chooses and weighs experts (DeepSeek-V3, section 2.1.2), in float32 whatever the model's."""

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((config.num_experts, hidden_size), jnp.float32))
        self.correction = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def __call__(self, x: Float[Array, "N E"]) -> tuple[Int[Array, "N A"], Float[Array, "N A"]]:
        """Experts of each token and their weights; A = per_token.

        The correction bias and the groups decide which experts are chosen; what an expert weighs
        is its own score.
        """
        config = self.config
        logits = jnp.einsum(
            "ne,xe->nx",
            x.astype(jnp.float32),
            self.weight[...],
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jax.nn.sigmoid(logits)
        biased = scores + self.correction[...][None, :]
        if config.num_groups > 1:
            biased = self._within_groups(biased)
        chosen = jax.lax.top_k(biased, config.per_token)[1].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if config.normalise:
            weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
        return chosen, weights * config.scale

    def _within_groups(self, biased: Float[Array, "N X"]) -> Float[Array, "N X"]:
        """-inf outside the groups whose two best experts score highest together."""
        config = self.config
        grouped = biased.reshape(biased.shape[0], config.num_groups, -1)
        group_score = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        best = jax.lax.top_k(group_score, config.groups_per_token)[1]
        groups = jnp.arange(config.num_groups, dtype=best.dtype)
        kept = (best[:, :, None] == groups[None, None, :]).any(axis=1)
        return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(biased.shape)


class Experts(nnx.Module):
    """Σ over a token's experts of weight · down(silu(gate x) · up x), plus the shared experts."""

    def __init__(self, config: TargetConfig, *, dtype):
        assert config.experts is not None
        experts, size = config.experts, config.hidden_size
        self.config = experts
        wide = experts.intermediate_size
        self.router = Router(size, experts)
        self.gate_up_proj = nnx.Param(jnp.zeros((experts.num_experts, 2 * wide, size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((experts.num_experts, size, wide), dtype))
        shape = dataclasses.replace(config, intermediate_size=wide * experts.num_shared)
        self.shared = MLP(shape, dtype=dtype) if experts.num_shared else None

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        # Gathering reads an expert once a pair, grouping reads every expert once.
        mix = self._gathered if chosen.size <= self.config.num_experts else self._grouped
        routed = jnp.einsum("na,nae->ne", weights, mix(tokens, chosen))
        routed = routed.astype(x.dtype).reshape(x.shape)
        return routed if self.shared is None else routed + self.shared(x)

    def _gathered(
        self, tokens: Float[Array, "N E"], chosen: Int[Array, "N A"]
    ) -> Float[Array, "N A E"]:
        """Every pair by its own copy of its expert, float32."""
        up = jnp.einsum(
            "ne,nafe->naf",
            tokens,
            jnp.take(self.gate_up_proj[...], chosen, axis=0),
            preferred_element_type=jnp.float32,
        )
        return jnp.einsum(
            "naf,naef->nae",
            _gated(up).astype(tokens.dtype),
            jnp.take(self.down_proj[...], chosen, axis=0),
            preferred_element_type=jnp.float32,
        )

    def _grouped(
        self, tokens: Float[Array, "N E"], chosen: Int[Array, "N A"]
    ) -> Float[Array, "N A E"]:
        """All pairs of an expert in one product, float32."""
        count, per_token = chosen.shape
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=self.config.num_experts).astype(jnp.int32)
        rows = jnp.take(tokens, order // per_token, axis=0)
        up = _grouped_product(rows, self.gate_up_proj[...], sizes)
        down = _grouped_product(_gated(up).astype(tokens.dtype), self.down_proj[...], sizes)
        back = jnp.zeros_like(down).at[order].set(down)
        return back.reshape(count, per_token, -1)


def _gated(up: Float[Array, "*N F2"]) -> Float[Array, "*N F"]:
    gate, rest = jnp.split(up, 2, axis=-1)
    return jax.nn.silu(gate) * rest


def _grouped_product(
    rows: Float[Array, "M I"], weights: Float[Array, "X O I"], sizes: Int[Array, "X"]
) -> Float[Array, "M O"]:
    """Consecutive rows times the transpose of their group's matrix, in float32."""
    return jax.lax.ragged_dot_general(
        rows,
        weights,
        sizes,
        jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        ),
        preferred_element_type=jnp.float32,
    )
