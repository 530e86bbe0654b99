"""Parameter holders and the few operations every target and drafter is made of."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Linear(nnx.Module):
    """y = x Wᵀ (+ b), with W kept in the public checkpoints' `[out, in]` layout."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        y = linear(self.weight[...], x)
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """x / rms(x) · w over the last axis, computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))


_FEW_ROWS = 40
"""Up to here the turned product is faster on a CPU; a prefill chunk is far above it."""


def linear(weight: Float[Array, "O I"], x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
    """x Wᵀ, accumulated in float32, returned in x's dtype."""
    return product(weight, x).astype(x.dtype)


def product(weight: Float[Array, "O I"], x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
    """x Wᵀ in float32.

    On CPU a product with few rows is written W xᵀ and held in that form: XLA's own form is about
    1.7 times slower at 8 rows (measured: benchmarks/results/cpu-verify-pass.md). The barriers keep
    XLA from turning it back.
    """
    *lead, size = x.shape
    rows = math.prod(lead)
    if rows == 1 or rows > _FEW_ROWS or jax.default_backend() != "cpu":
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    hold = jax.lax.optimization_barrier
    turned = hold(x.reshape(rows, size).T)
    y = hold(jnp.matmul(weight, turned, preferred_element_type=jnp.float32))
    return y.T.reshape(*lead, weight.shape[0])
