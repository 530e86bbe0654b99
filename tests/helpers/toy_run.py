"""A training run small enough to be killed: a few weights, the whole loop.

As a script: `toy_run.py OUT [--die-at N] [--devices N] [--fsdp] [--coordinator HOST:PORT
--process I]`, where a coordinator makes it one of two processes.
"""

import argparse
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from train.config import OptimizerConfig, RunConfig
from train.data import BatchConfig, Example, Schedule
from train.loop import Method, fit
from train.objectives.teacher import DraftRows
from train.placement import join


def toy_method(*, before_batch=lambda number: None, broken=()) -> Method:
    """Predicts a token from the one before it; noise on the logits makes the seed count.

    Args:
        before_batch: called with the number of each batch that is fetched.
        broken: numbers of batches whose loss is not finite.
    """
    fetched = iter(range(1 << 30))

    def extras(batch):
        number = next(fetched)
        before_batch(number)
        scale = np.nan if number in broken else 1.0
        return {"scale": np.full((batch.tokens.shape[0],), scale, np.float32)}

    def observe(trained, frozen, batch, key):
        logits = trained["w"][batch["tokens"]] + frozen["bias"]
        if key is not None:
            logits = logits + 0.1 * jax.random.normal(key, logits.shape)
        far = -jnp.take_along_axis(
            jax.nn.log_softmax(logits[:, :-1]), batch["tokens"][:, 1:, None], axis=-1
        )[..., 0]
        far = jnp.pad(far, ((0, 0), (1, 0)))
        active = batch["mask"] & (batch["positions"] > 0)
        weight = active.astype(jnp.float32) * batch["scale"][:, None]
        weight = weight / active.sum(dtype=jnp.float32)
        right = jnp.pad(jnp.argmax(logits, -1)[:, :-1], ((0, 0), (1, 0))) == batch["tokens"]
        rows = DraftRows(
            active=active[None],
            counted=active[None],
            loss=(far * weight)[None],
            hit=right[None].astype(jnp.float32),
            overlap=jnp.zeros((1, *active.shape)),
            outside=jnp.zeros((1, *active.shape)),
        )
        return (far * weight).sum(), rows

    def export(trained, path):
        path.mkdir()
        np.save(path / "w.npy", trained["w"])

    return Method(
        name="toy",
        trained={"w": jnp.zeros((16, 16))},
        frozen={"bias": jnp.linspace(0.0, 1.0, 16)[None, None]},
        observe=observe,
        decay=1.0,
        export=export,
        extras=extras,
        facts={"kind": "toy"},
    )


def toy_schedule() -> Schedule:
    """Texts that count upwards, with noise."""
    rng = np.random.default_rng(0)
    examples = []
    for index in range(24):
        tokens = (rng.integers(16) + np.arange(32) + rng.integers(0, 2, 32)) % 16
        mask = np.arange(32) > 3
        examples.append(Example(id=str(index), tokens=tokens.astype(np.int32), mask=mask))
    config = BatchConfig(tokens=256, max_length=32, shortest=32, packing=False, lookback=0)
    return Schedule(examples, config)


def toy_fit(out: Path, *, steps: int = 20, **changes):
    """One run: checkpoints every 5 steps, an evaluation every 10."""
    method = changes.pop("method", None) or toy_method()
    optimizer = changes.pop("optimizer", OptimizerConfig(learning_rate=0.1, ema=0.9, accumulate=2))
    schedule = toy_schedule()
    settings = {"save_every": 5, "eval_every": 10, "quiet": True, "devices": 1} | changes
    run = RunConfig(out=out, steps=steps, **settings)
    return fit(method, schedule, [schedule[0]], run, optimizer, dtype=jnp.float32)


def main() -> None:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int, default=0)
    asked = parser.parse_args()
    join(asked.coordinator, 2, asked.process)

    def die(number):
        if number == asked.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    toy_fit(
        asked.out,
        method=toy_method(before_batch=die),
        resume=True,
        devices=asked.devices,
        fsdp=asked.fsdp,
    )


if __name__ == "__main__":
    main()
