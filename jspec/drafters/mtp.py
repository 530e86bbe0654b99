"""Multi-token prediction: drafting with the modules that a target's own checkpoint ships.

One module is run again and again, each step fed the state of the step before; several modules are
run in turn (`mtp_chain`). What the families do differently is a table, `jspec.targets.mtp`.

References:
    DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2.
    FastMTP, https://arxiv.org/abs/2509.18362, for one module trained to be run recurrently.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jspec.drafters.base import Rows
from jspec.drafters.feature_drafter import FeatureDrafter
from jspec.targets import Prefix, Target, TargetConfig
from jspec.targets.layers import product
from jspec.targets.mtp import MTPFamily, MTPModule
from jspec.trees import TreeConfig, TreeSpec


class MTP(nnx.Module):
    """A module between the target's own embedding and head; a `DraftModel`."""

    def __init__(self, config: TargetConfig, family: MTPFamily, *, dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(shape, dtype))
        self.head = nnx.Param(jnp.zeros(shape, dtype))
        self.module = MTPModule(config, family, dtype=dtype)

    def fuse(self, rows: Rows) -> Float[Array, "B R E"]:
        """The target's post-norm hidden states as they are."""
        return rows.hidden

    def __call__(self, tokens, hidden, positions, prefix: Prefix | None, ancestors):
        """One pass; see `DraftModel`. Without a prefix the rows see each other causally."""
        out, new = self.module(hidden, self.embed(tokens), positions, prefix, ancestors)
        return self.module.carried(out), new

    def embed(self, tokens) -> Float[Array, "B R E"]:
        """Rows of the target's embedding matrix."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """The target's head on the normalised output."""
        return product(self.head[...], self.module.normed(hidden))


@dataclass(frozen=True, eq=False, kw_only=True)
class MTPDrafter(FeatureDrafter):
    """One module, run recurrently; any tree."""

    def default_tree(self) -> TreeSpec:
        """A chain of 3: what the module's published users run."""
        return self.tree or TreeConfig(num_steps=3, topk=1)


def with_module(target: Target, family: MTPFamily, module: PyTree, source: str) -> MTPDrafter:
    """The drafter of one module.

    Args:
        target: its embedding and head are used, not copied.
        family: of the module.
        module: parameters of an `MTPModule`.
        source: where it came from, for the description.
    """
    config = target.config
    abstract = nnx.eval_shape(lambda: MTP(config, family, dtype=target.dtype))
    graphdef, shapes = nnx.split(abstract)
    shared = {"embedding": target.embedding, "head": target.head}
    inside = dict(nnx.to_flat_state(module))
    flat = [
        (path, variable.replace(shared[str(path[0])] if len(path) == 1 else inside[path[1:]][...]))
        for path, variable in nnx.to_flat_state(shapes)
    ]
    return MTPDrafter(
        name="mtp",
        description=f"MTP module of {source} ({config.family}), run recurrently",
        graphdef=graphdef,
        params=nnx.from_flat_state(flat),
        num_layers=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        cached_values=config.latent is None,
        hidden_size=config.hidden_size,
        draft_vocab_size=config.vocab_size,
        trained_length=config.max_context,
    )
