"""GLM-4.5's prediction module against transformers, on random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_experts import GLM

import jspec

pytestmark = pytest.mark.once

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MtpModel", allow_module_level=True)

LENGTH = 20


def _randomise(module, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            norm = "norm" in name
            weight.copy_(1.0 + 0.2 * noise if norm else noise / weight.shape[-1] ** 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def _public(name, array):
    """Names on disk: experts are split, in memory they are fused."""
    name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    if ".experts." not in name:
        return {name: array}
    parts = {"gate": 0, "up": 1} if "gate_up" in name else {"down": 0}
    return {
        f"mlp.experts.{expert}.{part}_proj.weight": np.split(rows, len(parts))[at]
        for expert, rows in enumerate(array)
        for part, at in parts.items()
    }


def test_glm(tmp_path):
    config = transformers.Glm4MoeConfig(
        **{k: v for k, v in GLM.items() if k not in ("architectures", "num_nextn_predict_layers")},
        num_mtp_layers=1,
        use_qk_norm=True,
        attention_bias=True,
        pad_token_id=0,
    )
    model = transformers.Glm4MoeForCausalLM(config).float().eval()
    _randomise(model, 0)
    module = modeling_layers.MtpModel(model, 1).float().eval()
    _randomise(module.layers[0], 1)
    tokens = np.random.default_rng(2).integers(0, 40, (1, LENGTH + 1))
    places = torch.arange(LENGTH)[None]
    with torch.inference_mode():
        hidden = model.model(torch.from_numpy(tokens[:, :-1])).last_hidden_state
        following = torch.from_numpy(tokens[:, 1:])
        want = module.forward_layer(0, hidden, places, None, input_ids=following)
        want_logits = model.lm_head(want).numpy()

    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, array in module.layers[0].state_dict().items():
        parts = _public(name, array.numpy())
        tensors |= {f"model.layers.2.{k}": np.ascontiguousarray(v) for k, v in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")

    target = jspec.load_target(tmp_path, dtype="float32")
    drafter = jspec.load_drafter("mtp", target, probe=False)

    @jax.jit
    def run(params):
        draft = drafter._model(params)
        ids, positions = jnp.asarray(tokens, jnp.int32), jnp.asarray(places.numpy(), jnp.int32)
        seen = target.forward(target.params, ids[:, :-1], positions).hidden
        carried, _ = draft(ids[:, 1:], seen, positions, None, None)
        return seen, carried, draft.logits(carried)

    for got, good in zip(run(drafter.params), (hidden.numpy(), want.numpy(), want_logits)):
        np.testing.assert_allclose(got, good, atol=1e-4, rtol=0)
