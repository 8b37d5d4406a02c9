"""What the op does not compute, and loops that do more than hand the stream on, run as upstream's."""

import torch
import transformers
from hf_zoo import LAYERS, assert_same, run, tiny, tokens

from fused_add_rms_norm import hf
from fused_add_rms_norm.hf.modules import fits


def test_fp32_norms_in_a_bf16_model_return_upstreams_dtype():
    """fp32 in the llama contract, which the op has not; the stream's in GPT-OSS's, which is fused."""
    for layer, expected_adds, dtype in (
        ("LlamaDecoderLayer", 0, torch.float32),
        ("GptOssDecoderLayer", 2 * LAYERS, None),
    ):
        model = tiny(layer).to(torch.bfloat16)
        for name, module in model.named_modules():
            if "norm" in name:
                module.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            expected = model.model(tokens()).last_hidden_state
            hf.patch(model)
            with hf.count() as fused:
                actual = model.model(tokens()).last_hidden_state
        assert fused.adds == expected_adds
        assert actual.dtype == expected.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(actual, expected)


def test_a_norm_whose_weight_is_elsewhere_is_not_fused():
    """Where accelerate moves a norm's input to its weight's device, in a hook."""
    model = tiny()
    hf.patch(model)
    x, norm = torch.randn(3, 64), model.model.norm
    assert fits(x, x, norm.weight, norm.contract)
    assert not fits(x, x, norm.weight.to("meta"), norm.contract)


def test_an_fp64_model_runs_as_upstream():
    """Upstream's statistics are fp32 there too; the op's are not."""
    model = tiny().double()
    expected, _ = run(model)
    hf.patch(model)
    output, adds = run(model)
    assert torch.equal(output.logits, expected.logits)
    assert adds == 0


def test_unsupported_loops_keep_the_adds_inside_layers_fused(monkeypatch):
    from fused_add_rms_norm.hf import patching

    monkeypatch.setattr(patching, "find_loop", lambda cls: None)
    model = tiny()
    expected, _ = run(model)
    report = hf.patch(model)
    output, adds = run(model)
    assert_same(output.logits, expected.logits)
    assert adds == report.fused_adds == LAYERS
    assert "does more than hand the stream on" in str(report)


def test_transformers_version_is_one_that_the_drop_in_was_written_for():
    assert tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)
