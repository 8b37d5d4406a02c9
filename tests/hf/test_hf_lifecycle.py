"""Patching, unpatching, copying and saving: a patched model is upstream's in every respect but its speed."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from hf_zoo import LAYERS, assert_same, tiny, tokens
from torch.nn.utils.parametrize import register_parametrization
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm

from fused_add_rms_norm import hf


def logits(model):
    with torch.no_grad(), hf.count() as fused:
        return model(tokens()).logits, fused.adds


def test_nothing_but_the_classes_changes():
    model = tiny()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    names = [(type(m).__module__, type(m).__qualname__, str(type(m))) for m in model.modules()]
    text, keys = repr(model), list(model.state_dict())
    hf.patch(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert [(type(m).__module__, type(m).__qualname__, str(type(m))) for m in model.modules()] == names
    assert repr(model) == text
    assert list(model.state_dict()) == keys
    assert isinstance(model.model, LlamaModel)
    assert all(isinstance(layer, LlamaDecoderLayer) for layer in model.model.layers)
    assert isinstance(model.model.norm, LlamaRMSNorm)


def test_patching_twice_changes_nothing():
    model = tiny()
    first = hf.patch(model)
    classes = [type(module) for module in model.modules()]
    assert str(hf.patch(model)) == str(first)
    assert [type(module) for module in model.modules()] == classes
    assert logits(model)[1] == 2 * LAYERS


def test_two_models_share_the_classes():
    one, two = tiny(), tiny()
    hf.patch(one), hf.patch(two)
    assert [type(module) for module in one.modules()] == [type(module) for module in two.modules()]


def test_unpatch_restores_exactly():
    model = tiny()
    classes = [type(module) for module in model.modules()]
    expected, _ = logits(model)
    hf.patch(model)
    hf.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    actual, adds = logits(model)
    assert torch.equal(actual, expected) and adds == 0
    hf.unpatch(model)  # an unpatched model is left alone
    assert hf.patch(model).fused_adds == 2 * LAYERS


def test_unpatch_refuses_a_class_that_is_no_longer_ours():
    model = tiny()
    hf.patch(model)
    layer = model.model.layers[1]
    layer.__class__ = type("Further", (type(layer),), {})
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="cannot unpatch Further"):
        hf.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert type(copy.deepcopy(layer)) is type(layer)


def test_deepcopy_keeps_the_patch_and_shares_nothing():
    model = tiny()
    expected, _ = logits(model)
    hf.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    actual, adds = logits(twin)
    assert_same(actual, expected)
    assert adds == 2 * LAYERS
    hf.unpatch(twin)
    assert type(twin.model.norm) is LlamaRMSNorm


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_weight_that_became_a_property():
    """As torch's parametrizations make one: it is no parameter of the norm any more."""
    model = tiny()
    hf.patch(model)
    plain, _ = logits(model)
    for norm in (model.model.layers[1].input_layernorm, model.model.norm):
        register_parametrization(norm, "weight", Doubled())
    doubled, adds = logits(model)
    assert adds == 2 * LAYERS
    assert not torch.equal(doubled, plain)
    unpatched = tiny()
    for norm in (unpatched.model.layers[1].input_layernorm, unpatched.model.norm):
        register_parametrization(norm, "weight", Doubled())
    assert_same(doubled, logits(unpatched)[0])


def test_pickle_and_torch_save_keep_the_patch():
    model = tiny()
    hf.patch(model)
    expected, _ = logits(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        actual, adds = logits(loaded)
        assert torch.equal(actual, expected)
        assert adds == 2 * LAYERS


@pytest.mark.slow
def test_a_pickle_loads_in_a_fresh_process(tmp_path):
    model = tiny()
    hf.patch(model)
    torch.save(model, tmp_path / "model.pt")
    script = (
        f"import torch; model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "from fused_add_rms_norm import hf\n"
        "with torch.no_grad(), hf.count() as fused: model(torch.ones(1, 3, dtype=torch.long))\n"
        f"assert fused.adds == {2 * LAYERS}, fused"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_save_pretrained_writes_an_upstream_checkpoint(tmp_path):
    model = tiny()
    expected, _ = logits(model)
    hf.patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model) is LlamaModel
    assert_same(logits(loaded)[0], expected)
    loaded.load_state_dict(model.state_dict())
    model.load_state_dict(loaded.state_dict())


def test_a_model_on_the_meta_device_is_patched_before_it_has_weights():
    model = tiny()
    expected, _ = logits(model)
    with torch.device("meta"):
        hollow = transformers.LlamaForCausalLM(model.config).eval()
        assert hf.patch(hollow).fused_adds == 2 * LAYERS
    hollow.load_state_dict(model.state_dict(), assign=True)
    hollow.model.rotary_emb = model.model.rotary_emb
    assert_same(logits(hollow)[0], expected)


def test_a_bare_model_is_patched_too():
    model = tiny().model
    assert hf.patch(model).fused_adds == 2 * LAYERS
    assert list(_parameters(model.forward)) == list(_parameters(LlamaModel.forward))[1:]


def _parameters(function):
    import inspect

    return inspect.signature(function).parameters


def test_the_report_is_a_table_that_counts():
    text = str(hf.patch(tiny(num_hidden_layers=12)))
    assert "model  0-11    attention  post_attention_layernorm" in text
    assert "model  0-10    mlp        next layer's input_layernorm" in text
    assert text.endswith("24 of 24 residual adds fused")


def test_the_report_says_what_is_watched():
    model = tiny()
    hf.patch(model)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    report = hf.patch(model)
    assert report.fused_adds == 2 * LAYERS - 1 == logits(model)[1]
    [site] = [site for site in report.sites if site.reason]
    assert (site.layer, site.add, site.reason) == (0, "mlp", "a forward hook")


def test_a_norm_that_computes_something_else_is_not_fused(monkeypatch):
    def forward(self, hidden_states):
        return self.weight * hidden_states / hidden_states.norm(dim=-1, keepdim=True)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    model = tiny()
    expected, _ = logits(model)
    with pytest.raises(ValueError, match="LlamaRMSNorm to compute llama, offset 0, got something"):
        hf.patch(model)
    actual, adds = logits(model)
    assert torch.equal(actual, expected) and adds == 0
