"""Prediction modules against numbers recorded by running the reference implementations.

Every set below the golden root with a model and `*_mtp_input_ids` is used, whatever its sizes; its
prompts are one batch.
"""

import re
from dataclasses import replace

import golden
import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.drafters.base import DraftContext, Rows
from jspec.drafters.mtp_formats import read_mtp
from jspec.targets import Prefix
from jspec.targets.mtp import FAMILIES
from jspec.trees import chain

TOLERANCE = 1e-4
FOUND = [
    folder
    for folder in golden.folders_with("io.npz", "model")
    if golden.prompts(golden.arrays(folder / "io.npz"), "mtp_input_ids")
]


def sets_with(pattern, what):
    """Parametrises over the sets that recorded an array of this name."""
    found = [
        f for f in FOUND if any(map(re.compile(pattern).fullmatch, golden.arrays(f / "io.npz")))
    ]
    return golden.parametrize("folder", found, what, ids=[golden.label(f) for f in found])


class Recording:
    """A set: the target, its pass over all prompts, and the recorded arrays of each prompt."""

    def __init__(self, folder):
        self.recorded = golden.arrays(folder / "io.npz")
        self.prompts = golden.prompts(self.recorded, "mtp_input_ids")
        self.target = jspec.load_target(folder / "model", dtype="float32")
        self.family = FAMILIES[self.target.config.family]
        rows = self.each("input_ids")
        self.lengths = jnp.asarray([row.shape[1] for row in rows], jnp.int32)
        width = max(row.shape[1] for row in rows)
        self.tokens = golden.int32(golden.padded(rows, width))
        self.next_tokens = golden.int32(golden.padded(self.each("mtp_input_ids"), width))
        place = jnp.arange(width, dtype=jnp.int32)
        self.positions = jnp.broadcast_to(place, self.tokens.shape)
        self.last = self.lengths[:, None] - 1

        @jax.jit
        def run(params):
            hidden = self.target.forward(params, self.tokens, self.positions).hidden
            return hidden, self.target.logits(params, hidden)

        self.hidden, logits = run(self.target.params)
        self.close(self.hidden, "target_hidden")
        self.close(logits, "target_logits")

    def each(self, name):
        return [self.recorded[prompt + name] for prompt in self.prompts]

    def last_of(self, name):
        """The recorded array at each prompt's last row."""
        return np.stack([row[0, -1] for row in self.each(name)])

    def close(self, got, name):
        """`got` up to each prompt's length, or all of it, is what was recorded."""
        for slot, want in enumerate(self.each(name)):
            rows = np.asarray(got)[slot, : want.shape[1]]
            np.testing.assert_allclose(rows, want[0], atol=TOLERANCE, rtol=0, err_msg=name)

    def names(self, pattern):
        first = self.prompts[0]
        return [m.groups() for name in self.recorded if (m := re.fullmatch(first + pattern, name))]

    def taken_in(self, drafter, params):
        none = jnp.zeros_like(self.lengths)
        rows = Rows(self.tokens, self.next_tokens, none, self.lengths, self.hidden, ())
        capacity = self.tokens.shape[1] + 8
        state = drafter.init_state(params, len(self.prompts), capacity)
        return drafter.prefill(params, state, rows)

    def context(self):
        batch = len(self.prompts)
        root = jnp.take_along_axis(self.next_tokens, self.last, axis=1)
        known = jnp.concatenate([self.tokens, root], axis=1)
        known = known.at[jnp.arange(batch), self.lengths].set(root[:, 0])
        yes, keys = jnp.ones((batch,), bool), jnp.zeros((batch, 2), jnp.uint32)
        return DraftContext(known, self.lengths, root[:, 0], yes, keys)


def variants(recording):
    """(family, names of both steps' outputs) as recorded: masking, and what is carried."""
    for mask, carry in recording.names(r"(masked|unmasked)_carry_(\w+norm)_step2_logits"):
        family = replace(
            recording.family, masks_first=mask == "masked", carries_norm=carry == "postnorm"
        )
        steps = (f"{mask}_step1", f"{mask}_carry_{carry}_step2")
        yield (
            family,
            [(f"{step}_hidden_prenorm", f"{step}_hidden_postnorm", step) for step in steps],
        )
    if recording.names("step1_block_out"):
        steps = ("step1", "step2")
        yield recording.family, [(f"{step}_block_out", f"{step}_hidden", step) for step in steps]


@sets_with(r"p0_(\w+_)?step2_logits", "recordings of one module")
def test_two_chained_steps_of_one_module(folder):
    recording = Recording(folder)
    for family, steps in variants(recording):
        drafter = read_mtp(recording.target, family=family)

        @jax.jit
        def run(params, drafter=drafter):
            model = drafter._model(params)
            module = model.module

            def outputs(out):
                return out, module.norm(out), model.logits(module.carried(out))

            embedded = model.embed(recording.next_tokens)
            out, _ = module(recording.hidden, embedded, recording.positions, None, None)
            # The same through the drafter: over its cache, then one more row, one position on.
            state = recording.taken_in(drafter, params)
            said = model.logits(state.hidden)
            token = jnp.argmax(said, axis=-1).astype(jnp.int32)[:, None]
            own = jnp.ones((len(recording.prompts), 1, 1), jnp.uint32)
            prefix = Prefix(state.cache, recording.lengths)
            embedded = model.embed(token)
            after, _ = module(
                state.hidden[:, None], embedded, recording.lengths[:, None], prefix, own
            )
            proposal = drafter.propose(params, state, recording.context(), chain(2))
            return (outputs(out), outputs(after)), said, proposal.tree

        passes, said, tree = run(drafter.params)
        for (out, normed, logits), (out_name, normed_name, step) in zip(passes, steps):
            recording.close(out, out_name)
            recording.close(normed, normed_name)
            recording.close(logits, f"{step}_logits")
        want = recording.last_of(f"{steps[0][2]}_logits")
        np.testing.assert_allclose(said, want, atol=TOLERANCE, rtol=0)
        tokens = [[row.item() for row in recording.each(f"{step}_token")] for *_, step in steps]
        np.testing.assert_array_equal(tree.token[:, 1:], np.stack(tokens, axis=1))


@sets_with(r"p0_hf_layer1_logits", "recordings of several modules")
def test_modules_in_turn(folder):
    recording = Recording(folder)
    layers = sorted(int(layer) for (layer,) in recording.names(r"hf_layer(\d+)_logits"))
    drafter = read_mtp(recording.target)
    assert drafter.count == len(layers)
    width = recording.tokens.shape[1]

    def batch(layer, name):
        return golden.int32(golden.padded(recording.each(f"hf_layer{layer}_{name}"), width))

    @jax.jit
    def run(params):
        stack = drafter._stack(params)
        hidden, states = recording.hidden, []
        for layer in layers:
            embedded = jnp.take(stack.embedding[...], batch(layer, "input_ids"), axis=0)
            positions = batch(layer, "position_ids")
            out, _ = stack.modules[layer](hidden, embedded, positions, None, None)
            hidden = stack.modules[layer].carried(out)
            states.append(hidden)
        logits = [jnp.einsum("bte,ve->btv", state, stack.head[...]) for state in states]
        # The same through the drafter, which runs true rows once and guesses beside them.
        state = recording.taken_in(drafter, params)
        proposal = drafter.propose(params, state, recording.context(), chain(len(layers)))
        return states, logits, proposal.tree

    states, logits, tree = run(drafter.params)
    share = np.ones(len(recording.prompts))
    for layer in layers:
        recording.close(states[layer], f"hf_layer{layer}_hidden_postnorm")
        recording.close(logits[layer], f"hf_layer{layer}_logits")
        want = [row.item() for row in recording.each(f"hf_layer{layer}_token")]
        assert tree.token[:, layer + 1].tolist() == want
        share *= jax.nn.softmax(recording.last_of(f"hf_layer{layer}_logits"), axis=-1).max(axis=-1)
        np.testing.assert_allclose(tree.score[:, layer + 1], share, atol=TOLERANCE, rtol=0)


@sets_with(r"p0_unmasked_router_logits", "recordings of a router")
def test_router(folder):
    """Which experts a module's block chooses, and what they weigh."""
    recording = Recording(folder)
    drafter = read_mtp(recording.target)

    @jax.jit
    def run(params, x):
        block = drafter._model(params).module.block
        return block.mlp.router(block.post_attention_norm(x))

    for slot, x in enumerate(recording.each("unmasked_attn_residual_out")):
        chosen, weights = map(np.asarray, run(drafter.params, jnp.asarray(x[0])))
        order = np.argsort(chosen, axis=1)
        got, want = np.take_along_axis(chosen, order, axis=1), "unmasked_topk_experts_sorted"
        np.testing.assert_array_equal(got, recording.each(want)[slot])
        got, want = np.take_along_axis(weights, order, axis=1), "unmasked_topk_weights_sorted"
        np.testing.assert_allclose(got, recording.each(want)[slot], atol=TOLERANCE, rtol=0)
