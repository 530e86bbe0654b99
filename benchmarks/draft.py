"""What drafting costs: `python benchmarks/draft.py --drafter HEAD [--json OUT]`.

1. One more level of the draft, over a one-token pass of the target: whole drafts of 2 and of more
   levels in turns, their difference divided by the levels between them.
2. The draft loop's machinery (top-k, scores, gathers, tree build), as a share of the draft: a whole
   draft against the same passes of the drafter alone, fed with fixed tokens.

Every time is a median of interleaved runs; read the ratios, not the milliseconds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import facts, in_turns, verify_pass
from flax import nnx

import jspec
from jspec.commands.figures import dump_json, write_json
from jspec.drafters import DraftContext
from jspec.drafters.expand import own_bits
from jspec.drafters.feature_drafter import FeatureDrafter, FeatureState
from jspec.targets import KVCache, Prefix, Target

CAPACITY, LENGTH = 512, 400
"""Tokens a slot's cache has room for, and holds."""


def main() -> None:
    """Run everything and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", required=True, help="an EAGLE head")
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--topk", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = jspec.load_target(args.target)
    drafter = jspec.load_drafter(args.drafter, target, probe=False)
    if not isinstance(drafter, FeatureDrafter):
        parser.error(f"--drafter {args.drafter}: expected an EAGLE head")
    figures: dict[str, Any] = {
        **facts(),
        "drafter": drafter.description,
    }
    for topk in args.topk:
        figures[f"topk_{topk}"] = draft(target, drafter, args.num_steps, topk, args.repeats)
        print(topk, dump_json(figures[f"topk_{topk}"]), flush=True)
        if args.json:
            write_json(args.json, figures)


def draft(
    target: Target, drafter: FeatureDrafter, num_steps: int, topk: int, repeats: int
) -> dict[str, Any]:
    """Figures of one tree shape."""
    state = filled_state(drafter)
    bounds = [
        jspec.TreeConfig(num_steps=levels, topk=topk, num_nodes=levels + 1)
        for levels in (2, num_steps)
    ]
    programs: dict[str, Callable[[], Any]] = {
        "target_pass": verify_pass(target, nodes=1, capacity=CAPACITY, length=LENGTH),
        "draft_of_2": proposal(drafter, state, bounds[0]),
        "draft": proposal(drafter, state, bounds[1]),
        "passes": passes_alone(drafter, state, num_steps, topk),
    }
    times = in_turns(programs, repeats)
    ms = {name: 1e3 * median(taken) for name, taken in times.items()}
    level = (ms["draft"] - ms["draft_of_2"]) / (num_steps - 2)
    machinery = median(
        (whole - bare) / whole for whole, bare in zip(times["draft"], times["passes"])
    )
    return {
        "num_steps": num_steps,
        "topk": topk,
        "ms": ms,
        "level_over_target_pass": level / ms["target_pass"],
        "draft_over_target_pass": ms["draft"] / ms["target_pass"],
        "machinery_share_of_draft": machinery,
    }


def filled_state(drafter: FeatureDrafter) -> FeatureState:
    """A state with noise in it: what is drafted does not matter, what it costs does."""
    state = drafter.init_state(drafter.params, 1, CAPACITY)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), state
    )


def proposal(drafter: FeatureDrafter, state: FeatureState, tree) -> Callable[[], Any]:
    """A whole draft."""
    context = DraftContext(
        tokens=jnp.zeros((1, CAPACITY), jnp.int32),
        lengths=jnp.full((1,), LENGTH, jnp.int32),
        root=jnp.full((1,), 7, jnp.int32),
        active=jnp.ones((1,), bool),
        keys=jnp.zeros((1, 2), jnp.uint32),
    )
    run = jax.jit(lambda params, state, context: drafter.propose(params, state, context, tree).tree)
    return lambda: run(drafter.params, state, context)


def passes_alone(
    drafter: FeatureDrafter, state: FeatureState, num_steps: int, topk: int
) -> Callable[[], Any]:
    """The same products: the head at the root, then num_steps - 1 passes of topk nodes."""

    @jax.jit
    def run(params, state, tokens, lengths):
        model = nnx.merge(drafter.graphdef, params)
        said = [model.logits(state.hidden[:, None])]
        hidden = jnp.broadcast_to(state.hidden[:, None], (1, topk, drafter.hidden_size))
        grown: KVCache | None = None
        for step in range(num_steps - 1):
            bits = jnp.asarray(own_bits(step * topk, topk))[None]
            position = jnp.broadcast_to(lengths[:, None] + step, tokens.shape)
            hidden, new = model(tokens, hidden, position, Prefix(state.cache, lengths, grown), bits)
            grown = new if grown is None else grown.join(new)
            said.append(model.logits(hidden))
        return said

    tokens = jnp.full((1, topk), 7, jnp.int32)
    lengths = jnp.full((1,), LENGTH, jnp.int32)
    return lambda: run(drafter.params, state, tokens, lengths)


if __name__ == "__main__":
    main()
