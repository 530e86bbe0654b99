"""The real engine draws from the target's distribution, whatever the rule and the drafter.

Seeds are fixed, so a test passes always or never; its threshold is set for false alarms of 1e-4 in
all tests together, had the seeds been drawn.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_heads import eagle3_head, eagle_head
from scipy.stats import chi2
from scripted_drafters import Drawn
from tiny_experts import random_module
from tiny_medusa import random_heads
from tiny_models import tiny_target

import jspec
from jspec.drafters.eagle_build import build_drafter
from jspec.drafters.medusa_build import build_medusa
from jspec.drafters.mtp import with_module
from jspec.drafters.standalone import standalone
from jspec.targets.mtp import FAMILIES
from jspec.trees import cartesian, chain, from_choices

pytestmark = pytest.mark.once

V, NEW, SEEDS = 6, 4, 400
PROMPT = [1, 4, 2, 2]
ASKED = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3, "repetition_penalty": 1.5},
    {"temperature": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {0: 1.0}},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=V, num_layers=3, seed=2)


@pytest.fixture(scope="module")
def logits(target):
    """The target's logits after the prompt and every continuation."""
    texts = [text for n in range(NEW) for text in itertools.product(range(V), repeat=n)]
    padded = np.zeros((len(texts), len(PROMPT) + NEW), np.int32)
    for row, text in zip(padded, texts):
        row[: len(PROMPT) + len(text)] = [*PROMPT, *text]
    places = jnp.broadcast_to(jnp.arange(padded.shape[1], dtype=jnp.int32), padded.shape)

    @jax.jit
    def every(tokens, places):
        return target.logits(target.params, target.forward(target.params, tokens, places).hidden)

    rows = np.asarray(every(jnp.asarray(padded), places), np.float64)
    return {text: row[len(PROMPT) + len(text) - 1] for text, row in zip(texts, rows)}


def processed(row, text, asked):
    """The definition, by sorting, one row at a time."""
    row = row.copy()
    for token, bias in asked.get("logit_bias", {}).items():
        row[token] += bias
    for token in {*PROMPT, *text}:
        penalty = asked.get("repetition_penalty", 1.0)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(text):
        row[token] -= asked.get("presence_penalty", 0.0)
        row[token] -= asked.get("frequency_penalty", 0.0) * text.count(token)
    p = np.exp((row - row.max()) / asked["temperature"])
    order = np.argsort(-p)
    p[order[asked.get("top_k", V) :]] = 0
    p /= p.sum()
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= asked.get("top_p", 1.0)]] = 0
    p[p < asked.get("min_p", 0.0) * p.max()] = 0
    return p / p.sum()


def joint(logits, asked):
    """Of all tokens but the first, which the prefill draws."""
    chance = np.ones((V,) * NEW)
    for text, row in logits.items():
        rest = (1,) * (NEW - len(text) - 1)
        chance[text] *= processed(row, text, asked).reshape(-1, *rest)
    return chance.sum(axis=0).ravel()


def drawn_table(target, seed):
    rng = np.random.default_rng(seed)
    alone = target.forward(
        target.params, jnp.arange(V, dtype=jnp.int32)[:, None], jnp.zeros((V, 1), jnp.int32)
    )
    table = np.asarray(target.logits(target.params, alone.hidden)[:, 0])
    return table + 0.5 * rng.standard_normal(table.shape).astype(np.float32)


def engine_of(name, target):
    """Every family of drafters, every lossless rule, trees that are fixed, grown and lopsided."""
    grown = {"tree": jspec.TreeConfig(num_steps=3, topk=2, num_nodes=6)}
    lopsided = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    small = tiny_target(vocab_size=V, num_layers=1, seed=3)
    reduced = eagle3_head(target, draft_vocab_size=5, feature_layers=(0, 1, 2))
    family = FAMILIES["mimo"]
    module = random_module(target.config, family, np.random.default_rng(4))
    settings = {
        "ngram": ("ngram", grown),
        "eagle": (
            build_drafter(eagle_head(target), target),
            {"tree": lopsided, "draft_temperature": 0.8},
        ),
        "eagle3": (
            build_drafter(reduced, target),
            {"tree": cartesian([2, 2]), "verification": "rejection"},
        ),
        "medusa": (
            build_medusa(random_heads(target.config), target),
            {"tree": cartesian([3, 2]), "draft_temperature": 1.2},
        ),
        "mtp": (with_module(target, family, module, "memory"), grown),
        "standalone": (standalone(small, target), {"tree": chain(3), "verification": "block"}),
    }
    drafter, options = settings[name]
    return jspec.Engine(target, drafter, batch_size=len(ASKED) * SEEDS, **options)


NAMES = ["ngram", "eagle", "eagle3", "medusa", "mtp", "standalone"]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_draws_from_the_target(target, logits, name):
    engine = engine_of(name, target)
    counts = np.zeros((len(ASKED), V ** (NEW - 1)))
    for run in range(2):
        sampling = [
            jspec.SamplingParams(max_new_tokens=NEW, seed=1000 * run + seed, **asked)
            for asked in ASKED
            for seed in range(SEEDS)
        ]
        outputs = engine.generate([PROMPT] * len(sampling), sampling)
        for place, output in enumerate(outputs):
            cell = np.ravel_multi_index(output.token_ids[1:], (V,) * (NEW - 1))
            counts[place // SEEDS, cell] += 1
    assert outputs[0].stats.rule == engine.round.rule.name
    assert sum(output.stats.correct for output in outputs) > 0
    for asked, observed in zip(ASKED, counts):
        expected = joint(logits, asked) * observed.sum()
        assert observed[expected == 0].sum() == 0, asked
        common = expected >= 5
        pairs = [
            (observed[common], expected[common]),
            ([observed[~common].sum()], [expected[~common].sum()]),
        ]
        seen, wanted = (np.concatenate(x) for x in zip(*pairs))
        keep = wanted > 0
        statistic = np.sum((seen[keep] - wanted[keep]) ** 2 / wanted[keep])
        tail = chi2.sf(statistic, keep.sum() - 1)
        assert tail > 1e-4 / (len(ASKED) * len(NAMES)), asked


def test_the_text_depends_on_its_seed_only(target):
    """Not on the slot or the neighbours; greedy and drawn requests mix."""
    drafter = Drawn(table=drawn_table(target, 0))
    engine = jspec.Engine(target, drafter, tree=cartesian([2, 2]), draft_temperature=1.0)
    asked = [
        jspec.SamplingParams(max_new_tokens=16, temperature=t, seed=s)
        for t, s in ((1.0, 5), (0.0, 6), (0.7, 7))
    ]
    prompts = [PROMPT, [2] * 5, [3, 1]]
    together = engine.generate(prompts, asked)
    turned = engine.generate(prompts[::-1], asked[::-1])[::-1]
    assert [o.token_ids for o in turned] == [o.token_ids for o in together]
    assert [o.stats.rule for o in together] == ["rejection", "target-sampling", "rejection"]
    among_others = engine.generate([[0], PROMPT, [1]], [asked[1], asked[0], asked[0]])
    assert among_others[1].token_ids == together[0].token_ids
    plain = jspec.Engine(target).generate(prompts, asked)
    assert plain[1].token_ids == together[1].token_ids
