"""Prediction modules against numbers recorded by running the reference implementations.

Every set below the golden root with a model and `*_mtp_input_ids` is used, whatever its sizes.
"""

import re
from dataclasses import replace

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.drafters.base import DraftContext, Rows
from jspec.drafters.mtp_formats import read_mtp
from jspec.targets import Prefix
from jspec.targets.mtp import FAMILIES
from jspec.trees import chain

TOLERANCE = 1e-4
FOUND = [
    (folder, prompt)
    for folder in golden.folders_with("io.npz", "model")
    for prompt in golden.prompts(golden.arrays(folder / "io.npz"), "mtp_input_ids")
]
each_prompt = golden.parametrize(
    "recorded",
    FOUND,
    "module recordings",
    ids=[f"{golden.label(folder)}-{prompt}" for folder, prompt in FOUND],
)


class Recording:
    """One prompt: the target, its own pass over it, and the recorded arrays."""

    def __init__(self, recorded):
        folder, self.prompt = recorded
        self.arrays = {
            name.removeprefix(self.prompt): array
            for name, array in golden.arrays(folder / "io.npz").items()
            if name.startswith(self.prompt)
        }
        self.target = jspec.load_target(folder / "model", dtype="float32")
        self.family = FAMILIES[self.target.config.family]
        self.tokens = golden.int32(self.arrays["input_ids"])
        self.next_tokens = golden.int32(self.arrays["mtp_input_ids"])
        self.length = self.tokens.shape[1]
        self.positions = jnp.arange(self.length, dtype=jnp.int32)[None]
        passed = self.target.forward(self.target.params, self.tokens, self.positions)
        self.hidden = passed.hidden
        close(self.hidden, self.arrays["target_hidden"])
        close(self.target.logits(self.target.params, self.hidden), self.arrays["target_logits"])

    def rows(self):
        lengths = jnp.asarray([self.length], jnp.int32)
        return Rows(self.tokens, self.next_tokens, lengths * 0, lengths, self.hidden, ())

    def taken_in(self, drafter):
        state = drafter.init_state(drafter.params, 1, self.length + 8)
        return jax.jit(drafter.prefill)(drafter.params, state, self.rows())

    def context(self):
        known = jnp.concatenate([self.tokens, self.next_tokens[:, -1:]], axis=1)
        lengths = jnp.asarray([self.length], jnp.int32)
        yes, keys = jnp.ones((1,), bool), jnp.zeros((1, 2), jnp.uint32)
        return DraftContext(known, lengths, known[:, -1], yes, keys)

    def has(self, pattern):
        return [m.groups() for name in self.arrays if (m := re.fullmatch(pattern, name))]


def close(got, want):
    np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, atol=TOLERANCE, rtol=0)


def variants(recording):
    """(family, names of step 1, names of step 2) as recorded: masking, and what is carried."""
    for mask, carry in recording.has(r"(masked|unmasked)_carry_(\w+norm)_step2_logits"):
        family = replace(
            recording.family, masks_first=mask == "masked", carries_norm=carry == "postnorm"
        )
        step1 = f"{mask}_step1"
        step2 = f"{mask}_carry_{carry}_step2"
        yield family, (f"{step1}_hidden_prenorm", f"{step1}_hidden_postnorm", step1), step2
    if recording.has(r"step1_block_out"):
        yield recording.family, ("step1_block_out", "step1_hidden", "step1"), "step2"


@each_prompt
def test_two_chained_steps_of_one_module(recorded):
    recording = Recording(recorded)
    found = list(variants(recording))
    if not found:
        pytest.skip("this set records several modules in turn")
    arrays, length = recording.arrays, recording.length
    for family, (block_out, normed, step1), step2 in found:
        drafter = read_mtp(recording.target, family=family)
        model = drafter._model(drafter.params)
        embedded = model.embed(recording.next_tokens)
        module = model.module
        out, _ = module(recording.hidden, embedded, recording.positions, None, None)
        close(out, arrays[block_out])
        close(module.norm(out), arrays[normed])
        close(model.logits(module.carried(out)), arrays[f"{step1}_logits"])

        # The same through the drafter: over its cache, then one more row at the next position.
        state = recording.taken_in(drafter)
        close(state.hidden, np.asarray(module.carried(out))[:, -1])
        said = model.logits(state.hidden)
        close(said, arrays[f"{step1}_logits"][:, -1])
        token = jnp.argmax(said, axis=-1).astype(jnp.int32)[:, None]
        np.testing.assert_array_equal(token, arrays[f"{step1}_token"])
        lengths = jnp.asarray([length], jnp.int32)
        own = jnp.ones((1, 1, 1), jnp.uint32)
        prefix = Prefix(state.cache, lengths)
        out, _ = module(state.hidden[:, None], model.embed(token), lengths[:, None], prefix, own)
        mimo = step2 == "step2"
        close(out, arrays[f"{step2}_block_out" if mimo else f"{step2}_hidden_prenorm"])
        close(module.norm(out), arrays[f"{step2}_hidden" if mimo else f"{step2}_hidden_postnorm"])
        logits = model.logits(module.carried(out))
        close(logits, arrays[f"{step2}_logits"])

        tree = drafter.propose(drafter.params, state, recording.context(), chain(2)).tree
        assert tree.token[0, 1] == arrays[f"{step1}_token"].item()
        assert tree.token[0, 2] == arrays[f"{step2}_token"].item()


@each_prompt
def test_modules_in_turn(recorded):
    recording = Recording(recorded)
    layers = sorted(int(layer) for (layer,) in recording.has(r"hf_layer(\d+)_logits"))
    if not layers:
        pytest.skip("this set records one module")
    arrays = recording.arrays
    drafter = read_mtp(recording.target)
    assert drafter.count == len(layers)
    stack = drafter._stack(drafter.params)
    hidden, share, shares = recording.hidden, 1.0, []
    for layer in layers:
        tokens = golden.int32(arrays[f"hf_layer{layer}_input_ids"])
        positions = golden.int32(arrays[f"hf_layer{layer}_position_ids"])
        embedded = jnp.take(stack.embedding[...], tokens, axis=0)
        out, _ = stack.modules[layer](hidden, embedded, positions, None, None)
        hidden = stack.modules[layer].carried(out)
        close(hidden, arrays[f"hf_layer{layer}_hidden_postnorm"])
        logits = jnp.einsum("bte,ve->btv", hidden, stack.head[...])
        close(logits, arrays[f"hf_layer{layer}_logits"])
        last = jax.nn.softmax(jnp.asarray(arrays[f"hf_layer{layer}_logits"][0, -1]))
        share *= float(last.max())
        shares.append(share)

    state = recording.taken_in(drafter)
    draft = jax.jit(drafter.propose, static_argnums=3)
    tree = draft(drafter.params, state, recording.context(), chain(len(layers))).tree
    want = [arrays[f"hf_layer{layer}_token"].item() for layer in layers]
    assert tree.token[0, 1:].tolist() == want
    np.testing.assert_allclose(tree.score[0, 1:], shares, atol=TOLERANCE, rtol=0)


@each_prompt
def test_router(recorded):
    """Which experts a module's block chooses, and what they weigh."""
    recording = Recording(recorded)
    arrays = recording.arrays
    if "unmasked_router_logits" not in arrays:
        pytest.skip("this set records no routing")
    drafter = read_mtp(recording.target)
    block = drafter._model(drafter.params).module.block
    x = block.post_attention_norm(jnp.asarray(arrays["unmasked_attn_residual_out"]))
    chosen, weights = block.mlp.router(x[0])
    order = np.argsort(chosen, axis=1)
    experts = np.take_along_axis(np.asarray(chosen), order, axis=1)
    np.testing.assert_array_equal(experts, arrays["unmasked_topk_experts_sorted"])
    close(
        np.take_along_axis(np.asarray(weights), order, axis=1),
        arrays["unmasked_topk_weights_sorted"],
    )
