"""Every family of the table: upstream's real classes, patched, against themselves unpatched."""

import copy

import pytest
import torch
import transformers
from hf_zoo import LAYERS, ZOO, assert_same, gradients, tiny, tokens

from fused_add_rms_norm import hf
from fused_add_rms_norm.hf.families import FAMILIES

every_family = pytest.mark.parametrize("layer", sorted(ZOO))


def test_the_zoo_has_every_supported_family():
    assert sorted(ZOO) == list(hf.supported())


@every_family
def test_inference_fuses_both_adds_of_every_layer_and_changes_nothing(layer):
    model, ids = tiny(layer), tokens()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        expected_tokens = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    report = hf.patch(model)
    assert report.fused_adds == report.adds == 2 * LAYERS, report

    with torch.no_grad(), hf.count() as fused:
        logits = model(ids).logits
    assert fused.adds == 2 * LAYERS
    assert_same(logits, expected.logits)

    with hf.count() as fused:
        generated = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    assert fused.adds == 4 * 2 * LAYERS
    assert torch.equal(generated, expected_tokens)

    with torch.no_grad(), hf.count() as fused:
        captured = model(ids, output_hidden_states=True)
    assert fused.adds == LAYERS, "the attention adds: those between layers are being watched"
    assert len(captured.hidden_states) == LAYERS + 1
    assert_same(captured.hidden_states, expected.hidden_states)


@every_family
def test_training_fuses_both_adds_and_gives_every_parameter_its_gradient(layer):
    model, ids = tiny(layer).train(), tokens()
    expected = gradients(model, ids)
    # What one rounding of the weights does to a gradient: some are differences of large sums.
    nudged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter *= 1 + 2**-24 * torch.randn(parameter.shape, generator=generator)
    conditioned = gradients(nudged, ids)
    hf.patch(model)
    with hf.count() as fused:
        actual = gradients(model, ids)
    assert fused.adds == 2 * LAYERS
    assert actual.keys() == expected.keys()
    for name in expected:
        scale = expected[name].norm().clamp_min(1e-12)
        error, noise = (
            ((found[name] - expected[name]).norm() / scale).item() for found in (actual, conditioned)
        )
        assert error < max(2e-5, 4 * noise), (
            f"{name}: relative error {error:.1e}, of one rounding {noise:.1e}"
        )


@every_family
def test_bf16_rounds_where_upstream_rounds(layer):
    """One of the op's contracts gives upstream's bits, another would differ in a tenth of the values."""
    model, ids = tiny(layer).to(torch.bfloat16), tokens()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    hf.patch(model)
    with torch.no_grad():
        actual = model(ids, output_hidden_states=True).hidden_states
    differing = sum((a != e).sum().item() for a, e in zip(actual, expected, strict=True))
    assert differing <= 0.02 * sum(e.numel() for e in expected)


@every_family
def test_the_norms_compute_what_the_table_says(layer):
    family = FAMILIES[layer]
    for site in hf.patch(tiny(layer)).sites:
        if site.add:
            assert site.contract == f"{family.casting_mode}, offset {family.offset:g}"


@pytest.mark.parametrize(
    "name, config",
    [
        ("Olmo2", dict(num_key_value_heads=4)),  # norm, then add: one add of 2N has a norm after it
        ("Cohere2", {}),  # attention and MLP side by side, LayerNorm
        ("Nemotron", dict(num_key_value_heads=4)),  # LayerNorm
        ("GPT2", dict(n_embd=64, n_head=4, n_layer=2)),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name_and_left_alone(name, config):
    config = (
        dict(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        )
        | config
    )
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"cannot patch {name}.*LlamaDecoderLayer"):
        hf.patch(model)
    assert [type(module) for module in model.modules()] == classes
