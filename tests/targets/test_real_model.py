"""A real model: plain greedy text equals that of transformers, token for token."""

import json

import numpy as np
import pytest

import jspec
from jspec.checkpoints import open_checkpoint, resolve_source

ALIAS = "smollm2-135m"
NEW = 64
NEAR_TIE = 1e-3
"""Two float32 implementations may order the top two logits differently below this margin."""
MOST_NEAR_TIES = 2


@pytest.fixture(scope="session")
def real_path():
    """The model's local path; downloaded once, skipped where that is impossible."""
    try:
        return resolve_source(ALIAS, progress=False)
    except ValueError as error:
        pytest.skip(f"the real model {ALIAS} cannot be fetched: {error}")


@pytest.fixture(scope="module")
def target(real_path):
    return jspec.load_target(real_path, dtype="float32")


@pytest.fixture(scope="module")
def reference(real_path):
    """The same weights in transformers' own model."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(real_path)
    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(checkpoint.config))).float().eval()
    weights = {
        name: torch.from_numpy(np.array(checkpoint.read(name), np.float32))
        for name in checkpoint.names()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    return model


@pytest.fixture(scope="module")
def prompts(data_root, target):
    """First turns of MT-bench as chat prompts."""
    lines = (data_root / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines]
    assert len(turns) == 80
    return [target.tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns]


def test_greedy_text_equals_transformers(target, reference, prompts):
    sampling = jspec.SamplingParams(max_new_tokens=NEW)
    outputs = jspec.Engine(target, batch_size=8).generate(prompts, sampling)
    near_ties, errors = [], []
    for number, (prompt, output) in enumerate(zip(prompts, outputs)):
        want, got = _generate(reference, prompt), list(output.token_ids)
        if got == want:
            continue
        at = _first_difference(got, want)
        margin = _top_two_margin(reference, prompt + want[:at])
        report = (
            f"prompt {number}: differs at new token {at} of {len(want)}, jspec {got[at : at + 1]}, "
            f"transformers {want[at : at + 1]}, top-two logit margin {margin:.2e}"
        )
        (near_ties if margin < NEAR_TIE else errors).append(report)
    assert not errors, "\n".join(errors + near_ties)
    assert len(near_ties) <= MOST_NEAR_TIES, "\n".join(near_ties)


def _generate(model, prompt):
    """transformers' greedy continuation, up to and including the end token."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=2,
            pad_token_id=2,
        )
    return text[0, len(prompt) :].tolist()


def _first_difference(got, want):
    shared = min(len(got), len(want))
    return next((i for i in range(shared) if got[i] != want[i]), shared)


def _top_two_margin(model, tokens):
    """How far the best logit after `tokens` is above the second."""
    import torch

    with torch.inference_mode():
        first, second = model(torch.tensor([tokens])).logits[0, -1].topk(2).values.tolist()
    return first - second
