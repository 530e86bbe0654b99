"""Rotary position embedding and the ways published models stretch it.

References:
    Su et al. 2021, RoFormer (https://arxiv.org/abs/2104.09864).
    Peng et al. 2023, YaRN (https://arxiv.org/abs/2309.00071), section 3.2 for the ramp and
    section 3.4 for the attention temperature.
    Llama 3.1's frequency-dependent scaling, as its model card describes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a head: base, width and scaling.

    Attributes:
        theta: base of the geometric frequency series.
        dim: R, rotated width of a head (all of D for most families).
        kind: `default`, `linear`, `llama3` or `yarn`.
        factor: how many times the trained context is stretched.
        original_context: positions the unscaled frequencies were trained on (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band, in turns over the original context.
        beta_fast, beta_slow: yarn's band, in turns over the original context.
        truncate: yarn rounds its band to whole frequency indices.
        attention_factor: multiplies cos and sin (yarn's temperature), 1 otherwise.
    """

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self):
        if self.kind not in _KINDS:
            raise NotImplementedError(
                f"rope type {self.kind!r} is not supported; expected one of {', '.join(_KINDS)}."
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], head_dim: int, *, partial: float | None = None
    ) -> "RopeConfig":
        """Read either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

        Args:
            config: the `config.json` dictionary.
            head_dim: D.
            partial: for families that rotate the first part of a head: the part that is meant
                where the config does not say. None for those that rotate all of it.

        Raises:
            NotImplementedError: an unknown rope type or a partial rotation.
            ValueError: a scaling whose own numbers are missing.
        """
        scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        part = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        part = (partial or 1.0) if part is None else part
        if partial is None and part != 1.0:
            raise NotImplementedError(
                f"partial_rotary_factor={part} is not supported; expected 1.0."
            )
        common = {"theta": float(theta), "dim": int(head_dim * part), "kind": kind}
        if kind == "linear":
            return cls(**common, factor=_number(scaling, kind, "factor"))
        if kind == "llama3":
            return cls(
                **common,
                factor=_number(scaling, kind, "factor"),
                low_freq_factor=_number(scaling, kind, "low_freq_factor"),
                high_freq_factor=_number(scaling, kind, "high_freq_factor"),
                original_context=int(_number(scaling, kind, "original_max_position_embeddings")),
            )
        if kind == "yarn":
            # Older configs leave the trained length to max_position_embeddings.
            original = int(
                scaling.get("original_max_position_embeddings")
                or config.get("original_max_position_embeddings")
                or config.get("max_position_embeddings")
                or 0
            )
            factor = scaling.get("factor") or config["max_position_embeddings"] / original
            return cls(
                **common,
                factor=float(factor),
                original_context=original,
                beta_fast=float(scaling.get("beta_fast") or 32),
                beta_slow=float(scaling.get("beta_slow") or 1),
                truncate=bool(scaling.get("truncate", True)),
                attention_factor=_yarn_attention_factor(scaling, float(factor)),
            )
        return cls(**common)


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angular frequency of each pair of dimensions, radians a position: [dim/2] float32."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    plain = np.float32(1.0) / np.power(np.float32(rope.theta), exponent)
    if rope.kind == "linear":
        return (plain / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def rotation(
    rope: RopeConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T 1 D"], Float[Array, "B T 1 D"]]:
    """cos and sin of every position's angles, float32, the halves repeated (see `rotate`)."""
    frequencies = jnp.asarray(inverse_frequencies(rope))
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T 1 R"], sin: Float[Array, "B T 1 R"]
) -> Float[Array, "B T H D"]:
    """Rotate dimension i against dimension i + R/2 (the layout of public Llama checkpoints).

    Dimensions from R on are not rotated.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


def pairs_to_halves(x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Reorder dimensions that are rotated in pairs (0, 1), (2, 3), … to the halves of `rotate`.

    Queries and keys are reordered alike, so their products do not change.
    """
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long waves are stretched, short ones kept, the band between blended linearly in turns."""
    turns = rope.original_context * plain.astype(np.float64) / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Dimensions that turn often keep their frequency, slow ones are stretched, a ramp between."""

    def index_turning(turns: float) -> float:
        """Frequency index whose wave makes `turns` turns over the original context."""
        waves = rope.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = index_turning(rope.beta_fast), index_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all)
    return yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, weight: float) -> float:
    """How much sharper attention is made over a context stretched by `factor` (YaRN, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(scaling: Mapping[str, Any], kind: str, key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float):
        raise ValueError(
            f"rope type {kind!r} needs the number {key!r} in the config, got {value!r}."
        )
    return float(value)
