"""Medusa heads for tiny targets: random ones, and ones fitted to what the target writes."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.medusa import MedusaConfig
from jspec.drafters.medusa_formats import StoredHeads


def random_heads(
    target_config,
    *,
    num_heads=3,
    num_layers=1,
    projection="own",
    draft_vocab_size=None,
    bias=True,
    seed=0,
    dtype=np.float32,
) -> StoredHeads:
    """Heads of the given shape; a smaller vocabulary is a random choice of tokens."""
    rng = np.random.default_rng(seed)
    size, vocab = target_config.hidden_size, target_config.vocab_size
    small = draft_vocab_size or vocab

    def matrix(rows):
        return (rng.standard_normal((rows, size)) / np.sqrt(size)).astype(dtype)

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = matrix(size)
            if bias:
                tensors[f"{name}.bias"] = rng.standard_normal(size).astype(dtype)
        if projection == "own":
            tensors[f"lm_heads.{head}.weight"] = matrix(small)
    if projection == "one":
        tensors["lm_head.weight"] = matrix(small)
    if small != vocab:
        tensors["token_map"] = np.sort(rng.permutation(vocab)[:small]).astype(np.int64)
    config = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=size,
        vocab_size=vocab,
        draft_vocab_size=small,
        bias=bias,
        projection=projection,
    )
    return StoredHeads(name="random heads", format="vllm-medusa", config=config, tensors=tensors)


def fitted_heads(target, texts, **shape) -> StoredHeads:
    """Heads whose projections are fitted to `texts` (token-id lists), so that some guesses hold."""
    heads = random_heads(target.config, **shape)
    tensors = dict(heads.tensors)
    # Padded to one shape, so that it compiles once; a causal pass does not see what follows.
    width = max(map(len, texts))
    ids = np.zeros((len(texts), width), np.int32)
    for row, text in zip(ids, texts):
        row[: len(text)] = text
    places = np.broadcast_to(np.arange(width, dtype=np.int32), ids.shape)
    passed = jax.jit(target.forward)(target.params, jnp.asarray(ids), jnp.asarray(places))
    hidden = [np.asarray(row)[: len(text)] for row, text in zip(passed.hidden, texts)]
    for head in range(heads.config.num_heads):
        ahead = head + 2
        x = np.concatenate([h[:-ahead] for h in hidden])
        for layer in range(heads.config.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            inside = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)
            x = x + inside / (1 + np.exp(-inside))
        came = np.concatenate([np.asarray(text[ahead:]) for text in texts])
        wanted = np.eye(target.config.vocab_size)[came]
        fitted = np.linalg.lstsq(x, 8 * wanted - 4, rcond=None)[0].T.astype(np.float32)
        if "token_map" in tensors:
            fitted = fitted[tensors["token_map"]]
        tensors[f"lm_heads.{head}.weight"] = fitted
    return StoredHeads(
        name="fitted heads", format="vllm-medusa", config=heads.config, tensors=tensors
    )
