"""Training with everything that people put around a model."""

import copy

import pytest
import torch
from hf_zoo import LAYERS, VOCAB, assert_same, gradients, tiny, tokens

from fused_add_rms_norm import hf

ALL = 2 * LAYERS


def autocast_gradients(model):
    with torch.autocast("cpu", torch.bfloat16):
        return gradients(model, tokens())


@pytest.mark.parametrize("layer", ["LlamaDecoderLayer", "GemmaDecoderLayer"])
def test_autocast_with_fp32_weights_is_fused_and_as_near_to_fp32_as_upstream(layer):
    """The branch is bf16, the stream and what the norm returns fp32."""
    model = tiny(layer).train()
    exact = gradients(model, tokens())
    upstream = autocast_gradients(model)
    hf.patch(model)
    with hf.count() as fused:
        actual = autocast_gradients(model)
    assert fused.adds == ALL

    def distance(found):
        return sum((found[name] - exact[name]).norm().square() for name in exact).sqrt()

    assert distance(actual) <= 1.05 * distance(upstream)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model.model(tokens()).last_hidden_state.dtype == torch.float32
        hidden = model(tokens(), output_hidden_states=True).hidden_states
        assert [state.dtype for state in hidden] == [torch.float32] * (LAYERS + 1)


@pytest.mark.parametrize("layer", ["LlamaDecoderLayer", "Gemma2DecoderLayer", "GptOssDecoderLayer"])
def test_bf16_gradients_are_no_farther_from_fp32_than_upstreams(layer):
    model = tiny(layer).train()
    exact = gradients(model, tokens())
    model.to(torch.bfloat16)
    upstream = gradients(model, tokens())
    hf.patch(model)
    actual = gradients(model, tokens())

    def distance(found):
        return sum((found[name].float() - exact[name]).norm().square() for name in exact).sqrt()

    assert distance(actual) <= 1.05 * distance(upstream)


def test_dropout_on_the_branch_draws_the_numbers_that_upstream_draws():
    model = tiny("Phi3DecoderLayer", resid_pdrop=0.5).train()
    expected = gradients(model, tokens())
    hf.patch(model)
    with hf.count() as fused:
        assert_same(gradients(model, tokens()), expected)
    assert fused.adds == ALL


@pytest.mark.parametrize("frozen", ["norm", "proj"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(frozen):
    model = tiny().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    expected = gradients(model, tokens())
    hf.patch(model)
    assert_same(gradients(model, tokens()), expected)


def test_a_training_run_follows_upstreams_losses():
    def losses(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for step in range(20):
            loss = model(tokens(seed=step % 4), labels=tokens(seed=step % 4)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return torch.tensor(found)

    model, twin = tiny().train(), tiny().train()
    hf.patch(twin)
    expected = losses(model)
    assert expected[-1] < expected[0] - 1
    torch.testing.assert_close(losses(twin), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_with_norms_in_modules_to_save(patch_first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["input_layernorm", "post_attention_layernorm", "norm"],
        init_lora_weights=False,
    )

    def lora(base):
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config)
        with torch.no_grad():  # the trained copies of the norms differ from those under them
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        return model.train()

    upstream, base = lora(tiny()), tiny()
    if patch_first:
        hf.patch(base)
    model = lora(base)
    report = hf.patch(model)
    assert report.fused_adds == report.adds == ALL, report

    expected = gradients(upstream, tokens())
    with hf.count() as fused:
        actual = gradients(model, tokens())
    assert fused.adds == ALL
    assert any("modules_to_save" in name for name in actual)
    assert_same(actual, expected)

    with model.disable_adapter(), upstream.disable_adapter(), torch.no_grad():
        assert_same(model(tokens()).logits, upstream(tokens()).logits)
    with torch.no_grad():
        assert_same(model(tokens()).logits, upstream(tokens()).logits)
        merged, fused_merged = upstream.merge_and_unload(), model.merge_and_unload()
        assert_same(fused_merged(tokens()).logits, merged(tokens()).logits)


@pytest.mark.parametrize("place", ["layer", "model"])
def test_a_hook_on_a_wrapped_norm_sees_tensors(place):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["input_layernorm", "post_attention_layernorm", "norm"]
    )
    model = peft.get_peft_model(tiny(), config).eval()
    hf.patch(model)
    inner = model.base_model.model.model
    wrapper = inner.norm if place == "model" else inner.layers[1].post_attention_layernorm
    seen = []
    wrapper.register_forward_pre_hook(lambda module, args: seen.extend(args))
    with torch.no_grad(), hf.count() as fused:
        model(tokens())
    assert [type(value) for value in seen] == [torch.Tensor]
    assert fused.adds < ALL


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("offloaded", ["model.layers.0", "everything"])
def test_accelerate_offload(patch_first, offloaded, tmp_path):
    """Offloaded weights are on the meta device until their hook runs: those norms run as upstream's."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits
    if patch_first:
        hf.patch(model)
    if offloaded == "everything":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        parts = ["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
        device_map = {offloaded: "disk", **dict.fromkeys(parts, "cpu")}
        state_dict = {
            name: value.clone() for name, value in model.state_dict().items() if name.startswith(offloaded)
        }
        accelerate.dispatch_model(
            model,
            device_map,
            main_device="cpu",
            state_dict=state_dict,
            force_hooks=True,
            offload_dir=tmp_path,
        )
    if not patch_first:
        hf.patch(model)
    report = hf.patch(model)
    with torch.no_grad(), hf.count() as fused:
        assert_same(model(tokens(), use_cache=False).logits, expected)
    assert fused.adds == report.fused_adds == (0 if offloaded == "everything" else ALL // 2 + 1)


@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_dispatch_without_offload_stays_fused(patch_first):
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits
    if patch_first:
        hf.patch(model)
    model = accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    for layer in model.model.layers:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook("cpu"))
        accelerate.hooks.add_hook_to_module(layer.input_layernorm, accelerate.hooks.AlignDevicesHook("cpu"))
    if not patch_first:
        hf.patch(model)
    with torch.no_grad(), hf.count() as fused:
        assert_same(model(tokens(), use_cache=False).logits, expected)
    assert fused.adds == ALL
    hf.unpatch(model)
    with torch.no_grad(), hf.count() as fused:
        assert_same(model(tokens(), use_cache=False).logits, expected)
    assert fused.adds == 0


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens(batch=16)]

    def train(model):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return model.state_dict()

    model, twin = tiny(), tiny()
    hf.patch(twin)
    assert_same(train(twin), train(model))


def test_a_sequence_classifier_and_its_patched_twin():
    from transformers import LlamaForSequenceClassification

    base = tiny()
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(copy.deepcopy(base.config)).train()
    labels = torch.tensor([0, 1])

    def grads():
        model.zero_grad()
        model(tokens(), labels=labels).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads()
    assert hf.patch(model).fused_adds == ALL
    assert_same(grads(), expected)


def test_peak_memory_is_no_higher_than_upstreams():
    """Counted in the storages alive, MLP as wide as the stream, so that one tensor more would show."""

    def peaks(model):
        return [
            peak_of(lambda: model(ids, use_cache=False)),
            peak_of(lambda: model(ids, labels=ids, use_cache=False).loss.backward(), grad=True),
        ]

    model = tiny(num_hidden_layers=4, intermediate_size=64).to(torch.bfloat16).train()
    ids = torch.randint(3, VOCAB, (1, 512))
    expected = peaks(model)
    hf.patch(model)
    for actual, upstream in zip(peaks(model), expected, strict=True):
        assert actual <= upstream


def peak_of(step, grad=False):
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Peak(TorchDispatchMode):
        alive, now, peak = set(), 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
            self.peak = max(self.peak, self.now)
            return result

        def free(self, key, nbytes):
            self.alive.discard(key)
            self.now -= nbytes

    with torch.set_grad_enabled(grad), Peak() as memory:
        step()
    return memory.peak
