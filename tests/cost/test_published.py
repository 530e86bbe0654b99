"""Published derivations, from shapes and datasheets alone: bfloat16, an H100 at 3.35 TB/s."""

import pytest

from jspec.cost import (
    HARDWARE,
    Acceptance,
    RoundTime,
    candidates,
    chain_accept_length,
    constant_cost_speedup,
    eagle,
    eagle3,
    find_shape,
    lost_to_drafting,
    mask_bytes,
    medusa,
    relative_cost,
    standalone,
    target_pass,
    transient_slots,
)
from jspec.trees import TreeConfig

H100 = HARDWARE["h100"]
LLAMA = find_shape("llama-3-8b")
STEP = target_pass(LLAMA)
SIZE, VOCAB = 4096, 128_256


def near(value: float, digits: int):
    """Equal to what is printed with so many digits after the point."""
    return pytest.approx(value, abs=0.5 * 10**-digits)


def test_the_ridge():
    assert H100.ridge() == near(295, 0)


def test_a_step_of_the_target():
    assert STEP.bytes / 1e9 == near(15.01, 2)
    assert STEP.seconds(H100) * 1e3 == near(4.48, 2)
    assert STEP.bound(H100) == "memory"


def test_a_small_model_as_the_drafter():
    draft = standalone(find_shape("llama-3.2-1b")).step.cost()
    assert draft.bytes / 1e9 == near(2.47, 2)
    assert draft.seconds(H100) * 1e3 == near(0.74, 2)
    assert relative_cost(draft, STEP, H100) == near(0.165, 3)


def test_a_chain_of_five():
    expected = chain_accept_length(0.70, 5)
    assert expected == near(2.94, 2)
    assert near(1.83, 1) == 5 * 0.165 + 1  # 1.825, printed as 1.83
    assert constant_cost_speedup(expected, 0.165, 5) == near(1.61, 2)
    assert lost_to_drafting(0.165, 5) == near(0.45, 2)
    assert constant_cost_speedup(expected, 0.05, 5) == near(2.35, 2)


def test_medusa_heads_with_their_own_projections():
    heads = medusa(LLAMA)
    assert heads.projection / 1e6 == near(525.3, 1)
    assert heads.block / 1e6 == near(16.8, 1)
    (cost,) = heads.passes(num_steps=4)
    assert cost.bytes / 2 / 1e9 == near(2.168, 3)
    assert cost.bytes / 1e9 == near(4.34, 2)
    assert cost.seconds(H100) * 1e3 == near(1.29, 2)
    assert relative_cost(cost, STEP, H100) == near(0.289, 3)


def test_medusa_heads_with_one_projection():
    (cost,) = medusa(LLAMA, projection="shared").passes(num_steps=4)
    assert cost.bytes / 2 / 1e6 == near(592, 0)
    assert cost.bytes / 1e9 == near(1.185, 3)  # published as 1.19, rounded twice
    assert cost.seconds(H100) * 1e3 == near(0.354, 3)


def test_medusa_heads_with_one_truncated_projection():
    (cost,) = medusa(LLAMA, projection="shared", draft_vocab=32_000).passes(num_steps=4)
    assert cost.bytes / 2 / 1e6 == near(198, 0)
    assert cost.bytes / 1e9 == near(0.40, 2)
    assert cost.seconds(H100) * 1e3 == near(0.118, 3)


def test_an_eagle_pass():
    layer = LLAMA.shared_layer_params()
    assert layer / 1e6 == near(218.1, 1)
    step = eagle(LLAMA).step
    fc = step.body - layer
    assert fc == 2 * SIZE * SIZE
    assert fc / 1e6 == near(33.6, 1)
    assert step.head == VOCAB * SIZE
    assert relative_cost(step.cost(), STEP, H100) == near(0.104, 3)


def test_an_eagle3_pass_as_published():
    """229 µs is EAGLE-1's layer and fc under a head of 32,000 rows."""
    cost = eagle(LLAMA, draft_vocab=32_000).step.cost()
    assert cost.seconds(H100) * 1e6 == near(229, 0)
    assert relative_cost(cost, STEP, H100) == near(0.051, 3)


def test_an_eagle3_pass_as_it_is():
    """What differs: queries, keys and values read 2E, and fc is read once a round, not a step."""
    head = eagle3(LLAMA)
    fc = head.extend.body - head.step.body
    assert fc / 1e6 == near(50.3, 1)
    assert 2 * (fc - 2 * SIZE * SIZE) / 1e6 == near(33.6, 1)  # megabytes more than EAGLE-1's fc
    wider = LLAMA.attention_params(2 * SIZE) - LLAMA.attention_params()
    assert wider / 1e6 == near(25.2, 1)
    cost = head.step.cost()
    assert cost.seconds(H100) * 1e6 == near(223.5, 1)
    assert relative_cost(cost, STEP, H100) == near(0.050, 3)
    published = eagle(LLAMA, draft_vocab=32_000).step
    norms = 2 * SIZE  # of the hidden state and at the end
    assert head.step.body - published.body == wider - 2 * SIZE * SIZE + norms
    assert head.step.head == published.head


def test_four_tokens_a_round():
    step = eagle(LLAMA, draft_vocab=32_000).step.cost().seconds(H100)
    plain = STEP.seconds(H100)
    time = RoundTime(plain=plain, draft=5 * step, verify=plain, rest=10e-6)
    assert time.seconds * 1e3 == pytest.approx(5.635, abs=0.003)  # from rounded parts
    assert pytest.approx(5.635) == 4.48 + 5 * 0.229 + 0.010
    assert 4 * plain * 1e3 == near(17.92, 2)
    assert time.speedup(4.0) == near(3.18, 2)


def test_candidates_and_slots():
    tree = TreeConfig(num_steps=5, topk=4, num_nodes=8)
    assert candidates(tree.num_steps, tree.topk) == tree.num_candidates == 68
    assert transient_slots(5, 4, 8) == 28
    assert transient_slots(5, 4, 0) == 20


def test_masks():
    one = mask_bytes(nodes=8, context=2_000)
    assert (one.full, one.qlen_only, one.packed) == (16_064, 64, 8)
    many = mask_bytes(nodes=8, context=32_768, batch=256)
    assert many.full / 1e6 == near(67.1, 1)


def test_from_a_chain_to_a_tree():
    """EAGLE-1's ablation: τ 3.20 of a chain of five, 3.94 of a static tree of 25 drafted nodes.

    The default share of sibling guesses was chosen by it; α is what gives the chain's τ.
    """
    acceptance = Acceptance(by_depth=(0.738,) * 5)
    chain = TreeConfig(num_steps=5, topk=1)
    assert acceptance.accept_length(chain) == near(3.20, 2)
    tree = TreeConfig(num_steps=5, topk=4, num_nodes=26)
    assert acceptance.accept_length(tree) == pytest.approx(3.94, abs=0.02)
