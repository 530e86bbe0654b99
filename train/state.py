"""The state of a training run and the one step that changes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from train.config import OptimizerConfig

LossFunction = Callable[[PyTree, PyTree, PyTree, Any], tuple[Array, dict[str, Array]]]
"""(trained, frozen, batch, key) -> (loss, sums); without a key nothing is random."""


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step of a run."""
    warmup = max(1, round(config.warmup * steps))
    return optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup,
        max(steps, warmup + 1),
        config.final * config.learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimiser of a run."""
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    return optax.chain(
        clip,
        optax.adamw(
            learning_rates(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that changes, and that a checkpoint has to hold.

    Attributes:
        step: optimiser steps taken, skipped ones included.
        params: trained parameters, float32 whatever is computed in.
        optimizer: its state.
        ema: moving average of the parameters; empty without one.
        bad_steps: skipped steps in a row.
        skipped: skipped steps in all.
    """

    step: Int[Array, ""]
    params: PyTree
    optimizer: Any
    ema: PyTree
    bad_steps: Int[Array, ""]
    skipped: Int[Array, ""]

    @property
    def best(self) -> PyTree:
        """The weights to evaluate and export."""
        return self.ema if jax.tree.leaves(self.ema) else self.params


def start_state(params: PyTree, config: OptimizerConfig, steps: int) -> TrainState:
    """Before the first step."""
    # Copies: the step donates the state, and the parameters may be the target's own arrays.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=params,
        optimizer=make_optimizer(config, steps).init(params),
        ema=jax.tree.map(jnp.array, params) if config.ema else {},
        bad_steps=jnp.array(zero),
        skipped=jnp.array(zero),
    )


def make_step(
    loss: LossFunction, config: OptimizerConfig, steps: int, *, dtype, seed: int
) -> Callable[[TrainState, PyTree, list[PyTree]], tuple[TrainState, dict[str, Array]]]:
    """The jitted step; its state is donated.

    Args:
        loss: of one batch.
        config: of the optimiser.
        steps: of the whole run.
        dtype: that the loss is computed in; the parameters stay float32.
        seed: of the noise that a loss may draw.
    """
    optimizer = make_optimizer(config, steps)
    schedule = learning_rates(config, steps)

    def cast_loss(params, frozen, batch, key):
        return loss(jax.tree.map(lambda x: x.astype(dtype), params), frozen, batch, key)

    def step(state: TrainState, frozen: PyTree, batches: list[PyTree]):
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        parts = [
            jax.value_and_grad(cast_loss, has_aux=True)(
                state.params, frozen, batch, jax.random.fold_in(key, index)
            )
            for index, batch in enumerate(batches)
        ]
        value = sum(value for (value, _), _ in parts) / len(parts)
        sums = jax.tree.map(lambda *x: sum(x), *[seen for (_, seen), _ in parts])
        grads = jax.tree.map(lambda *x: sum(x) / len(parts), *[grad for _, grad in parts])
        norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises rates to integer counts
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
            rate = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, updates)
        good = jnp.isfinite(value) & jnp.isfinite(norm)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        params, optimizer_state = keep(params, state.params), keep(optimizer_state, state.optimizer)
        ema = (
            jax.tree.map(
                lambda old, new: config.ema * old + (1.0 - config.ema) * new, state.ema, params
            )
            if config.ema
            else state.ema
        )
        bad = (~good).astype(jnp.int32)
        after = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer_state,
            ema=ema,
            bad_steps=bad * (state.bad_steps + 1),
            skipped=state.skipped + bad,
        )
        told = {
            "loss": value,
            "grad_norm": norm,
            "learning_rate": rate,
            "bad_steps": after.bad_steps,
            "skipped": after.skipped,
            "sums": sums,
        }
        return after, told

    return jax.jit(step, donate_argnums=0)


def make_eval(loss: LossFunction, *, dtype) -> Callable[..., tuple[Float[Array, ""], dict]]:
    """The jitted loss of one batch, without a gradient."""

    def evaluate(params, frozen, batch):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        return loss(params, frozen, batch, None)

    return jax.jit(evaluate)
