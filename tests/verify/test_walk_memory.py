"""What verification holds beside the logits, and what the compiler makes of the filters."""

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec.drafters import Proposal
from jspec.sampling import History, NodeLogits, Shaping, branch_tokens
from jspec.sampling.filters import keep_threshold
from jspec.trees import build
from jspec.verify import RULES, Greedy, Slots

B, T, V = 2, 32, 4096
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
FILTERS = {"top_k": 200, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize("name", ["greedy", *RULES])
def test_beside_the_logits_there_is_one_array_of_their_size_at_most(name):
    """With everything asked; rules that go node by node need no such array at all."""
    rule = Greedy() if name == "greedy" else RULES[name]()
    sampled = name != "greedy"
    asked = [jspec.SamplingParams(temperature=1.0, logit_bias={3: 1.0}, **PENALTIES, **FILTERS)]
    shaping = Shaping.of(asked * B, B, V)

    @jax.jit
    def verify(raw, prompt, output, tokens, drawn_from):
        parents = jnp.broadcast_to(jnp.arange(-1, T - 1, dtype=jnp.int32), (B, T))
        tree = build(tokens, parents, jnp.ones((B, T), bool))
        zeros = jnp.zeros((B,), jnp.int32)
        slots = Slots(jnp.full((B,), float(sampled)), jnp.zeros((B, 2), jnp.uint32), zeros)
        branch = branch_tokens(tree, 2)
        logits = NodeLogits(
            raw, slots.temperature, tree.depth, shaping, History(prompt, output), branch, sampled
        )
        return rule.walk(logits, Proposal(tree, (), drawn_from), slots, max_path=T)

    table = jnp.zeros((B, T, V))
    counts = jnp.zeros((B, V), jnp.int32)
    given = (table, counts > 0, counts, jnp.zeros((B, T), jnp.int32), table)
    compiled = verify.lower(*given).compile()
    used = compiled.memory_analysis().temp_size_in_bytes / (B * T * V * 4)
    assert used < (1.3 if name in ("greedy", "thresholds") else 0.5)


def test_the_filters_sort_no_vocabulary():
    """The compiler would, if it were let to take the last of the largest logits by itself."""
    row, number = jnp.zeros((1, 1, V)), jnp.ones((1,))
    count = jnp.ones((1,), jnp.int32)
    program = jax.jit(keep_threshold).lower(row, count, number, number).compile().as_text()
    assert "TopK" in program
    assert " sort(" not in program
