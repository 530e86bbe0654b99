"""Multi-token prediction: a target and its module, trained together from scratch.

Step 0 of the module reads the target's hidden state of position t and token t + 1, and predicts
token t + 2; step k reads what step k - 1 carried from the same row and token t + 1 + k, and
predicts token t + 2 + k. All rows of a step see each other causally.

References:
    DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2: one step,
    L = L_main + λ·L_mtp with λ = 0.3, then 0.1; embedding and head are shared.
    FastMTP, https://arxiv.org/abs/2509.18362: one module run for K = 3 steps, weights 0.6^k.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jspec.drafters.mtp import MTP
from jspec.targets import Target
from jspec.targets.mtp import MTPFamily


@dataclass(frozen=True, kw_only=True)
class MTPObjective:
    """What a target and its module are trained for.

    Attributes:
        steps: K, how often the module is run.
        weight: λ, of the module's loss beside the target's.
        decay: step k weighs decay^k within it.
    """

    steps: int = 3
    weight: float = 0.3
    decay: float = 0.6

    def __post_init__(self):
        if self.steps < 1 or self.weight < 0 or not 0 < self.decay <= 1:
            raise ValueError(
                f"steps={self.steps}, weight={self.weight}, decay={self.decay}; expected at least "
                "1, at least 0, and 0 < decay <= 1."
            )


class MTPFigures(NamedTuple):
    """How well the next tokens are predicted; entry 0 is the target, entry k + 1 step k.

    Attributes:
        losses: cross-entropy in nats a token.
        hits: share of rows whose likeliest token is the text's.
    """

    losses: Float[Array, "K1"]
    hits: Float[Array, "K1"]


def mtp_loss(
    target: Target,
    params: PyTree,
    module: PyTree,
    family: MTPFamily,
    tokens: Int[Array, "B T"],
    objective: MTPObjective,
) -> tuple[Float[Array, ""], MTPFigures]:
    """Loss of a batch of whole texts.

    Args:
        target: the shape of the model.
        params: of the target; embedding and head also serve the module, and learn from it.
        module: parameters of an `MTPModule`.
        family: of the module.
        tokens: T at least K + 2.
        objective: weights and number of steps.
    """
    width = tokens.shape[1]
    if width < objective.steps + 2:
        raise ValueError(
            f"texts of {width} tokens have no label for step {objective.steps}; expected at least "
            f"{objective.steps + 2}."
        )
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    hidden = target.forward(params, tokens, positions).hidden
    draft = _draft(target, params, module, family)
    seen = [_predict(target.logits(params, hidden), tokens, 1)]
    carried = hidden
    for step in range(objective.steps):
        following = jnp.pad(tokens[:, step + 1 :], ((0, 0), (0, step + 1)))
        with jax.named_scope(f"draft_step_{step}"):
            carried, _ = draft(following, carried, positions + step, None, None)
            seen.append(_predict(draft.logits(carried), tokens, step + 2))
    losses, hits = (jnp.stack(parts) for parts in zip(*seen))
    share = objective.decay ** jnp.arange(objective.steps, dtype=jnp.float32)
    total = losses[0] + objective.weight * (losses[1:] * share / share.sum()).sum()
    return total, MTPFigures(losses, hits)


def _draft(target: Target, params: PyTree, module: PyTree, family: MTPFamily) -> MTP:
    """The module between the very parameters of the target, so that gradients reach them."""
    config = target.config
    abstract = nnx.eval_shape(lambda: MTP(config, family, dtype=target.dtype))
    shared = params["embedding"], params["embedding" if config.tie_embeddings else "head"]
    flat = [
        (("embedding",), shared[0]),
        (("head",), shared[1]),
        *((("module", *path), variable) for path, variable in nnx.to_flat_state(module)),
    ]
    return nnx.merge(nnx.graphdef(abstract), nnx.from_flat_state(flat))


def _predict(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], ahead: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy and hit rate of row t's prediction of token t + ahead."""
    logits, label = logits[:, :-ahead], tokens[:, ahead:]
    own = jnp.take_along_axis(logits, label[:, :, None], axis=-1)[:, :, 0]
    loss = (jax.nn.logsumexp(logits, axis=-1) - own).mean()
    return loss, (jnp.argmax(logits, axis=-1) == label).mean(dtype=jnp.float32)
