"""A target model: its parameters, and the pure functions over them."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jspec.targets.cache import KVCache, Prefix
from jspec.targets.config import TargetConfig
from jspec.targets.decoder import Decoder, Pass
from jspec.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """The model being accelerated.

    The module lives split: `params` holds the arrays, `graphdef` the rest, and every method that
    computes takes the parameters as an argument, so it can be jitted as a plain function.

    Attributes:
        name: what the user called it.
        config: shapes and switches.
        graphdef: the static half of the NNX module.
        params: the arrays.
        path: checkpoint it came from (None for a model made in memory).
        eos_token_ids: tokens that end a text, from the checkpoint's own configs.
    """

    name: str
    config: TargetConfig
    graphdef: nnx.GraphDef = field(repr=False)
    params: PyTree = field(repr=False)
    path: Path | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights, activations and cache."""
        return jax.tree.leaves(self.params)[0].dtype

    @property
    def num_params(self) -> int:
        """Parameters held in memory (tied ones once)."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def embedding(self) -> Float[Array, "V E"]:
        """The embedding matrix itself, not a copy."""
        return self.params["embedding"][...]

    @property
    def head(self) -> Float[Array, "V E"]:
        """The matrix that logits are read with: its own, or the embedding where they are tied."""
        return self.params["embedding" if self.config.tie_embeddings else "head"][...]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer.

        Raises:
            ValueError: the checkpoint has none; give token ids instead of text.
        """
        if self.path is None:
            raise ValueError(
                f"target {self.name!r} was made in memory and has no tokenizer; "
                "give token ids instead of text."
            )
        return load_tokenizer(self.path)

    def find_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where the checkpoint has none."""
        try:
            return self.tokenizer
        except ValueError:
            return None

    def forward(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        prefix: Prefix | None = None,
        ancestors: UInt32[Array, "B T W"] | None = None,
        *,
        feature_layers: tuple[int, ...] = (),
        implementation: str | None = None,
    ) -> Pass:
        """One pass over T new tokens a slot; see `Decoder.__call__`."""
        model = nnx.merge(self.graphdef, params)
        return model(
            tokens,
            positions,
            prefix,
            ancestors,
            feature_layers=feature_layers,
            implementation=implementation,
        )

    def logits(self, params: PyTree, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Float32 logits of post-norm hidden states."""
        return nnx.merge(self.graphdef, params).logits(hidden)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of zeros for `batch` slots of `capacity` tokens."""
        config = self.config
        return KVCache.empty(
            config.num_layers,
            batch,
            capacity,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            values=config.latent is None,
        )


def random_target(
    config: TargetConfig, *, seed: int = 0, dtype=jnp.float32, sharpness: float = 1.0
) -> Target:
    """A target of the given shape with random weights, for tests, notebooks and timing shapes.

    Args:
        config: of a dense decoder or one of experts.
        seed: of the weights.
        dtype: of the weights.
        sharpness: factor on the last norm, and so on the logits: the larger, the surer the model
            is of its next token, and the more its text repeats itself.
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    graphdef, shapes = nnx.split(abstract)
    rng = np.random.default_rng(seed)

    def draw(path, variable):
        if len(path) > 1 and "norm" in str(path[-2]):
            noise = 1.0 + 0.1 * rng.standard_normal(variable.shape)
        else:
            fan_in = variable.shape[-1] if len(variable.shape) > 1 else 50
            noise = rng.standard_normal(variable.shape) / np.sqrt(fan_in)
        array = jnp.asarray(noise, variable.dtype)
        return variable.replace(sharpness * array if tuple(path) == ("norm", "weight") else array)

    flat = [(path, draw(path, variable)) for path, variable in nnx.to_flat_state(shapes)]
    return Target(name="random", config=config, graphdef=graphdef, params=nnx.from_flat_state(flat))
