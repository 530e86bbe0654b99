"""Lossless rules are lossless: every draft and every branch of the rules themselves, enumerated.

The rules run as they are, with their coins given. What they accept is monotone in a coin, so the
measure of each branch is found by bisection on that coin, to the last bit of a uniform. The
distribution of emitted tokens, continued by the target's own, is then compared with the target's
joint distribution.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given_logits import given

from jspec.drafters import Proposal
from jspec.trees import build, cartesian, chain, from_choices
from jspec.verify import Slots, TargetSampling, Thresholds, TypicalAcceptance
from jspec.verify.block import block_walk
from jspec.verify.rejection import rejection_walk

STEPS = 1 << 24
"""Coins are multiples of 1 / STEPS, finer than any uniform that is thrown."""

BATCH = 512


class Model:
    """Target and draft distributions after every path: random tables of one kind."""

    def __init__(self, kind, vocabulary, seed=0, token_map=None):
        self.vocabulary, self.kind, self.token_map = vocabulary, kind, token_map
        self.rng = np.random.default_rng(seed)
        self.known = {}

    def after(self, path):
        """(p over the vocabulary, q over the draft vocabulary) after a tuple of tokens."""
        if path not in self.known:
            self.known[path] = self._new()
        return self.known[path]

    def _new(self):
        size = self.vocabulary if self.token_map is None else len(self.token_map)
        p, q = self.rng.dirichlet(np.ones(self.vocabulary)), self.rng.dirichlet(np.ones(size))
        if self.kind == "sharp":
            p, q = self.rng.dirichlet(np.full(len(p), 0.2)), self.rng.dirichlet(np.full(size, 0.2))
        elif self.kind == "equal":
            q = p.copy() if self.token_map is None else q
        elif self.kind == "ties":
            p, q = np.ones(len(p)), np.ones(size)
            p[0], q[-1] = 2, 3
        elif self.kind == "zeros":
            p[self.rng.integers(len(p))] = 0
            q[self.rng.integers(size)] = 0
        elif self.kind == "apart":
            p[len(p) // 2 :] = 0
            q[: size // 2] = 0
        elif self.kind == "certain":  # fewer tokens than children
            q = np.eye(size)[self.rng.integers(size)]
        p, q = (np.float32(x / x.sum()) for x in (p, q))
        return p.astype(np.float64) / p.sum(dtype=np.float64), q

    def joint(self, depth):
        """The target's distribution of the next `depth` tokens."""
        joint = np.ones((self.vocabulary,) * depth)
        for place in range(depth):
            for path in itertools.product(range(self.vocabulary), repeat=place):
                joint[path] *= self.after(path)[0].reshape(-1, *[1] * (depth - place - 1))
        return joint


def drafts(shape, model):
    """Every draft of a fixed shape: tokens [N, T] and their probabilities [N]."""
    parents = shape.parents
    found = [((0,) * shape.num_nodes, {0: ()}, 1.0)]
    for node in range(shape.num_nodes):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if not children:
            continue
        following = []
        for tokens, paths, weight in found:
            q = np.float64(model.after(paths[node])[1])
            for picked in itertools.permutations(range(len(q)), len(children)):
                chance, left = 1.0, q.copy()
                for one in picked:
                    # Where nothing is left to draw, top-k takes the lowest ids.
                    first = min(i for i in range(len(q)) if i not in picked[: picked.index(one)])
                    chance *= left[one] / left.sum() if left.sum() > 0 else float(one == first)
                    left[one] = 0
                if chance == 0:
                    continue
                own, below = list(tokens), dict(paths)
                for child, one in zip(children, picked):
                    own[child] = one if model.token_map is None else model.token_map[one]
                    below[child] = (*paths[node], own[child])
                following.append((tuple(own), below, weight * chance))
        found = following
    return found


class Verified:
    """All drafts of a model, as one batch for a rule's walk."""

    def __init__(self, shape, model, walk):
        self.shape, self.model, self.walk = shape, model, walk
        self.drafts = drafts(shape, model)
        nodes = range(shape.num_nodes)
        p = np.stack([[model.after(p[n])[0] for n in nodes] for _, p, _ in self.drafts])
        self.logits = log(p)
        self.q = np.stack([[model.after(p[n])[1] for n in nodes] for _, p, _ in self.drafts])
        self.tokens = np.asarray([tokens for tokens, _, _ in self.drafts], np.int32)

    def run(self, items, coins, final):
        """Paths, lengths and bonus tokens of drafts `items` with their coins."""
        outcomes = []
        for start in range(0, len(items), BATCH):
            part = slice(start, start + BATCH)
            pad = np.resize(np.arange(len(items))[part], BATCH)
            take = np.asarray(items)[pad]
            given = (self.logits[take], self.tokens[take], self.q[take], coins[pad], final[pad])
            walk = self.walk(*map(jnp.asarray, given))
            outcomes.append([np.asarray(x)[: len(items[part])] for x in walk])
        return [np.concatenate(parts) for parts in zip(*outcomes)]

    def measure(self, items, coins, final, column, holds):
        """For how much of a coin, from 0 up, `holds(path, length, bonus)`, for every item."""
        low, high = np.zeros(len(items), np.int64), np.full(len(items), STEPS)
        for _ in range(25):
            middle = (low + high) // 2
            where = coins if column >= 0 else final
            where[:, max(column, 1)] = np.minimum(middle, STEPS - 1) / STEPS
            fits = holds(*self.run(items, coins, final)) & (middle < STEPS)
            low, high = np.where(fits, middle + 1, low), np.where(fits, high, middle)
        return low / STEPS

    def bonus(self, items, coins):
        """Distribution of the token after the path, [N, V]."""
        final = np.full((len(items), 2), 0.5, np.float32)
        below = [
            self.measure(items, coins, final, -1, lambda _p, _l, bonus, v=v: bonus <= v)
            for v in range(self.model.vocabulary - 1)
        ]
        edges = np.stack([np.zeros(len(items)), *below, np.ones(len(items))], axis=1)
        return np.diff(edges, axis=1)

    def distance(self, branches):
        """Total variation of the emitted joint from the target's; branches are (item, path, p)."""
        depth, vocabulary = self.shape.num_steps + 1, self.model.vocabulary
        joint, emitted = self.model.joint(depth), np.zeros((vocabulary,) * depth)
        for item, accepted, probability in branches:
            paths = self.drafts[item][1]
            head = paths[accepted]
            for token in np.flatnonzero(probability):
                prefix = (*head, int(token))
                own = joint[prefix]
                rest = own / own.sum() if own.sum() > 0 else np.full(own.shape, 1 / own.size)
                emitted[prefix] += self.drafts[item][2] * probability[token] * rest
        assert emitted.sum() == pytest.approx(1, abs=1e-6)
        return 0.5 * np.abs(emitted - joint).sum()


def log(p):
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32)


def by_children(verified):
    """Branches of a rule that tests the children of a node one after another."""
    shape = verified.shape
    children = [[c for c, p in enumerate(shape.parents) if p == n] for n in range(shape.num_nodes)]
    count = len(verified.drafts)
    # (draft, node, child to test or none, probability so far, coins)
    open_ = [(i, 0, 0, 1.0, np.full(shape.num_nodes, 0.5, np.float32)) for i in range(count)]
    ended = []
    while open_:
        done = [item for item in open_ if item[2] == len(children[item[1]])]
        ended += done
        open_ = [item for item in open_ if item[2] < len(children[item[1]])]
        following = []
        by_node = {}
        for item in open_:
            by_node.setdefault(children[item[1]][item[2]], []).append(item)
        for child, group in by_node.items():
            items = [item[0] for item in group]
            coins = np.stack([item[4] for item in group])
            final = np.full((len(items), 2), 0.5, np.float32)
            accepts = verified.measure(
                items, coins, final, child, lambda path, *_, c=child: (path == c).any(axis=1)
            )
            for (index, node, place, weight, own), chance in zip(group, accepts):
                for coin, share, at in (
                    (0, chance, (child, 0)),
                    (1, 1 - chance, (node, place + 1)),
                ):
                    if share > 0:
                        fixed = own.copy()
                        fixed[child] = coin * (STEPS - 1) / STEPS
                        following.append((index, *at, weight * share, fixed))
        open_ = following
    items = [item[0] for item in ended]
    bonus = verified.bonus(items, np.stack([item[4] for item in ended]))
    return [(item[0], item[1], item[3] * row) for item, row in zip(ended, bonus)]


def by_length(verified):
    """Branches of block verification: the longest prefix whose own coin allows it."""
    nodes, count = verified.shape.num_nodes, len(verified.drafts)
    last = np.float32((STEPS - 1) / STEPS)
    items = np.arange(count)
    left, branches = np.ones(count), []
    for end in range(nodes - 1, -1, -1):
        coins = np.full((count, nodes), last, np.float32)
        final = np.full((count, 2), 0.5, np.float32)
        reached = np.ones(count)
        if end:
            reached = verified.measure(
                items, coins, final, end, lambda _p, length, _b, e=end: length > e
            )
        share, left = left * reached, left * (1 - reached)
        coins[:, end] = 0
        some = np.flatnonzero(share > 0)
        bonus = verified.bonus(some, coins[some]) if len(some) else []
        branches += [(i, end, share[i] * row) for i, row in zip(some, bonus)]
    return branches


@partial(jax.jit, static_argnames=("rule", "token_map", "parents"))
def walked(logits, tokens, q, coins, final, *, rule, token_map, parents):
    shape = tokens.shape
    parent = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), shape)
    known = None if token_map is None else jnp.asarray(token_map, jnp.int32)
    proposal = Proposal(build(tokens, parent, jnp.ones(shape, bool)), (), q, known)
    temperature = jnp.ones(shape[:1])
    if rule == "block":
        return block_walk(given(logits), proposal, temperature, coins, final)
    return rejection_walk(given(logits), proposal, temperature, coins, final, shape[1])


def slots_of(batch):
    """One seed each."""
    keys = np.stack([np.zeros(batch, np.uint32), np.arange(batch, dtype=np.uint32)], axis=1)
    return Slots(jnp.ones((batch,)), jnp.asarray(keys), jnp.zeros((batch,), jnp.int32))


def distance(rule, shape, model):
    walk = partial(walked, rule=rule, token_map=model.token_map, parents=shape.parents)
    verified = Verified(shape, model, walk)
    return verified.distance(by_length(verified) if rule == "block" else by_children(verified))


KINDS = ["random", "sharp", "equal", "ties", "zeros", "apart", "certain"]
WIDE = from_choices([[0], [1], [2], [0, 0]])
DEEP = from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])


SETTINGS = {
    "chain": ("rejection", chain(3), 4, None, KINDS),
    "pairs": ("rejection", cartesian([2, 2]), 4, None, ["random", "zeros", "certain"]),
    "wide": ("rejection", WIDE, 5, None, ["sharp", "ties", "equal"]),
    "deep-reduced": ("rejection", DEEP, 4, (3, 0, 1), KINDS),
    "block": ("block", chain(3), 4, None, KINDS),
    "block-reduced": ("block", chain(2), 8, (5, 2, 7), ["random", "zeros"]),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in SETTINGS for kind in SETTINGS[name][-1]]
)
def test_drawn_drafts(name, kind):
    rule, shape, vocabulary, token_map, _ = SETTINGS[name]
    model = Model(kind, vocabulary, token_map=token_map)
    assert distance(rule, shape, model) < 1e-6


def test_a_wrong_q_is_noticed():
    """What the drafter says it drew from is not what it drew from."""
    honest = Verified(chain(2), Model("random", 4), None)
    lying = Verified(chain(2), Model("random", 4), None)
    lying.q = np.roll(lying.q, 1, axis=-1)
    distances = []
    for verified in (honest, lying):
        verified.walk = partial(
            walked, rule="rejection", token_map=None, parents=verified.shape.parents
        )
        distances.append(verified.distance(by_children(verified)))
    assert distances[0] < 1e-6
    assert distances[1] > 0.01


def test_what_a_drawn_draft_is_worth():
    """Accepted tokens on average: Σ p·q when q is ignored, Σ min(p, q), and the most there is."""
    shape, mean = chain(3), {}
    for rule in ("rejection", "block"):
        walk = partial(walked, rule=rule, token_map=None, parents=shape.parents)
        verified = Verified(shape, Model("random", 4), walk)
        branches = by_length(verified) if rule == "block" else by_children(verified)
        mean[rule] = sum(
            verified.drafts[item][2] * probability.sum() * len(verified.drafts[item][1][accepted])
            for item, accepted, probability in branches
        )
    model, ignored = verified.model, 0.0
    for path in itertools.chain(*(itertools.product(range(4), repeat=n) for n in (1, 2, 3))):
        steps = [model.after(path[:n]) for n in range(len(path))]
        ignored += np.prod([p[x] * q[x] for (p, q), x in zip(steps, path)])
    assert mean["rejection"] > ignored + 0.2
    assert mean["block"] > mean["rejection"] + 0.01


@pytest.mark.parametrize("kind", ["random", "zeros", "ties"])
@pytest.mark.parametrize("shape", [chain(3), DEEP, cartesian([3])], ids=["chain", "deep", "flat"])
def test_target_sampling(shape, kind):
    """Any draft, chosen in any order, against every combination of draws at its nodes."""
    model, rule = Model(kind, 4), TargetSampling()
    nodes, rng = shape.num_nodes, np.random.default_rng(1)
    draws = np.asarray(list(itertools.product(range(4), repeat=nodes)), np.int32)
    slots = slots_of(len(draws))
    certain = jnp.asarray(log(np.eye(4)[draws]))

    @jax.jit
    def walk(proposal):
        return rule.walk(given(certain), proposal, slots, max_path=shape.path_width)

    depth = shape.num_steps + 1
    for _ in range(3):
        tokens, paths = np.zeros(nodes, np.int32), {0: ()}
        for node, parent in enumerate(shape.parents):
            if parent >= 0:
                elder = [tokens[n] for n in range(node) if shape.parents[n] == parent]
                tokens[node] = rng.choice([t for t in range(4) if t not in elder])
                paths[node] = (*paths[parent], int(tokens[node]))
        batch = (len(draws), nodes)
        parent = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), batch)
        tree = build(jnp.broadcast_to(jnp.asarray(tokens), batch), parent, jnp.ones(batch, bool))
        path, length, bonus = map(np.asarray, walk(Proposal(tree, ())))
        chance = np.prod([model.after(paths[n])[0][draws[:, n]] for n in range(nodes)], axis=0)
        joint, emitted = model.joint(depth), np.zeros((4,) * depth)
        for row in range(len(draws)):
            prefix = (*paths[path[row, length[row] - 1]], int(bonus[row]))
            own = joint[prefix]
            if chance[row]:
                emitted[prefix] += chance[row] * own / own.sum()
        assert 0.5 * np.abs(emitted - joint).sum() < 1e-6


class TestLossyRules:
    """How far the lossy rules are from the target, as their docstrings say."""

    p = np.array([0.35, 0.25, 0.2, 0.15, 0.05])
    children = (1, 3)

    def emitted(self, rule, batch):
        """First emitted token's frequencies over many seeds."""

        @jax.jit
        def first():
            token = jnp.broadcast_to(jnp.asarray([0, *self.children], jnp.int32), (batch, 3))
            parent = jnp.broadcast_to(jnp.asarray([-1, 0, 0], jnp.int32), (batch, 3))
            tree = build(token, parent, jnp.ones((batch, 3), bool))
            logits = jnp.broadcast_to(jnp.asarray(log(self.p)), (batch, 3, 5))
            walk = rule.walk(given(logits), Proposal(tree, ()), slots_of(batch), max_path=2)
            child = tree.token[jnp.arange(batch), walk.path[:, 1]]
            return jnp.where(walk.length > 1, child, walk.bonus)

        return np.bincount(first(), minlength=5) / batch

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            (Thresholds(), 0.0),
            (Thresholds(acc=0.8), 0.4 / 0.8 - 0.4),
            (Thresholds(acc=0.25), 1 - 0.25),
            (Thresholds(single=0.25), 0.75),
        ],
        ids=["exact", "acc", "saturated", "single"],
    )
    def test_thresholds(self, rule, expected):
        found = 0.5 * np.abs(self.emitted(rule, 1 << 15) - self.p).sum()
        assert found == pytest.approx(expected, abs=0.012)

    def test_typical_draws_nothing(self):
        """Every seed gives the same token: child 1, since 0.25 > min(0.09, 0.3·exp(-H))."""
        assert self.emitted(TypicalAcceptance(), 64).tolist() == [0, 1, 0, 0, 0]
