"""Nothing observable changes: whoever watches gets upstream's tensors, and nothing else is left unfused."""

import threading

import pytest
import torch
from hf_zoo import LAYERS, assert_same, gradients, run, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from fused_add_rms_norm import hf

ALL = 2 * LAYERS


def layers(model):
    return model.model.layers


# Where a hook may be, and how many adds it leaves fused: not what enters or leaves a layer or enters a norm.
PLACES = {
    "first layer": (lambda m: layers(m)[0], ALL - 1),
    "second layer": (lambda m: layers(m)[1], ALL - 2),
    "first norm": (lambda m: layers(m)[1].input_layernorm, ALL - 1),
    "second norm": (lambda m: layers(m)[1].post_attention_layernorm, ALL - 1),
    "final norm": (lambda m: m.model.norm, ALL - 1),
    "attention": (lambda m: layers(m)[1].self_attn, ALL),
    "mlp": (lambda m: layers(m)[1].mlp, ALL),
    "model": (lambda m: m.model, ALL),
}
places = pytest.mark.parametrize("place, expected_adds", PLACES.values(), ids=PLACES)


def replaced(value):
    if isinstance(value, torch.Tensor):
        return value * 0.5 if value.is_floating_point() else value
    if isinstance(value, tuple):
        return (replaced(value[0]), *value[1:]) if value else value
    value.last_hidden_state = value.last_hidden_state * 0.5
    return value


@places
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_see_and_replace_what_they_do_upstream(
    place, expected_adds, kind, replaces, patch_first
):
    def run_hooked(patched):
        model, seen = tiny(), []

        def hook(module, args, kwargs, *output):
            seen.extend([args, sorted(kwargs), *[value for value in output if not hasattr(value, "keys")]])
            if replaces:
                return replaced(output[0]) if output else (replaced(args), kwargs)

        if patched and patch_first:
            hf.patch(model)
        getattr(place(model), kind)(hook, with_kwargs=True)
        if patched and not patch_first:
            hf.patch(model)
        output, adds = run(model)
        return output.logits, seen, adds

    expected, expected_seen, _ = run_hooked(patched=False)
    actual, seen, adds = run_hooked(patched=True)
    assert_same(actual, expected)
    assert_same(seen, expected_seen)  # tensors, equal ones, and no argument of ours
    assert adds == expected_adds


def test_a_removed_hook_leaves_no_trace():
    model = tiny()
    hf.patch(model)
    handle = layers(model)[0].register_forward_hook(lambda *_: None)
    assert run(model)[1] == ALL - 1
    handle.remove()
    assert run(model)[1] == ALL


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize(
    "place, expected_adds", [PLACES[name] for name in ("first layer", "second layer", "final norm")]
)
def test_backward_hooks_see_the_gradients_they_do_upstream(place, expected_adds, kind):
    def run_hooked(patched):
        model, seen = tiny(), []
        if patched:
            hf.patch(model)
        getattr(place(model), kind)(lambda module, *grads: seen.extend(grads))
        with hf.count() as fused:
            return gradients(model, tokens()), seen, fused.adds

    expected, expected_seen, _ = run_hooked(patched=False)
    actual, seen, adds = run_hooked(patched=True)
    assert_same(actual, expected)
    assert_same(seen, expected_seen)
    assert adds == expected_adds


def test_global_hooks_see_every_module_and_a_flop_counter_counts_the_same():
    model = tiny()

    def observed():
        seen = []
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append((type(module).__name__, args, output))
        )
        try:
            _, adds = run(model, return_dict=False, use_cache=False)
        finally:
            handle.remove()
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            model(tokens())
        return seen, flops.get_flop_counts(), adds

    expected, expected_flops, _ = observed()
    hf.patch(model)
    actual, flops, adds = observed()
    assert_same(actual, expected)
    assert flops == expected_flops
    assert adds == 0


@pytest.mark.parametrize("through_config", [True, False])
def test_hidden_states_are_captured_and_later_calls_are_fused_again(through_config):
    model = tiny()
    expected = run(model, output_hidden_states=True)[0].hidden_states
    hf.patch(model)
    assert run(model)[1] == ALL
    if through_config:
        model.config.output_hidden_states = True
        output, adds = run(model)
        model.config.output_hidden_states = False
    else:
        output, adds = run(model, output_hidden_states=True)
    assert_same(output.hidden_states, expected)
    assert adds == LAYERS
    assert run(model)[1] == ALL, "upstream's capture hooks stay, idle"


def test_captured_hidden_states_get_the_gradients_they_do_upstream():
    def hidden_grads(model):
        output = model(tokens(), labels=tokens(), output_hidden_states=True)
        for state in output.hidden_states:
            state.retain_grad()
        output.loss.backward()
        return [state.grad for state in output.hidden_states]

    model = tiny()
    expected = hidden_grads(model)
    hf.patch(model)
    assert_same(hidden_grads(model), expected)


def test_attentions_are_captured_and_everything_stays_fused():
    model = tiny(attn_implementation="eager")
    expected = run(model, output_attentions=True)[0].attentions
    hf.patch(model)
    output, adds = run(model, output_attentions=True)
    assert_same(output.attentions, expected)
    assert adds == ALL


def test_router_logits_are_captured_and_everything_stays_fused():
    model = tiny("MixtralDecoderLayer")
    expected = run(model, output_router_logits=True)[0].router_logits
    hf.patch(model)
    output, adds = run(model, output_router_logits=True)
    assert_same(output.router_logits, expected)
    assert adds == ALL


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_and_keeps_the_attention_adds_fused(use_reentrant):
    model = tiny().train()
    expected = gradients(model, tokens())
    hf.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with hf.count() as fused:
        loss = model(tokens(), labels=tokens()).loss
    assert fused.adds == LAYERS
    model.zero_grad()
    with hf.count() as recomputed:
        loss.backward()
    assert recomputed.adds == LAYERS
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected)
    assert run(model.eval())[1] == ALL


def test_a_forward_of_the_instances_own_is_the_one_that_runs():
    model = tiny()
    hf.patch(model)
    norm, layer = layers(model)[1].post_attention_layernorm, layers(model)[0]
    seen = []

    def own_forward(module):
        forward = module.forward

        def wrapper(hidden_states, *args, **kwargs):
            seen.append((type(hidden_states), sorted(kwargs)))
            return forward(hidden_states, *args, **kwargs)

        return wrapper

    expected, _ = run(model)
    norm.forward, layer.forward = own_forward(norm), own_forward(layer)
    output, adds = run(model)
    assert_same(output.logits, expected.logits)
    assert [kind for kind, _ in seen] == [torch.Tensor] * 2
    assert "lazy_stream" not in seen[0][1]
    assert adds == ALL - 2  # the norm's, and the one between the layers


@pytest.mark.parametrize("patch_first", [True, False])
def test_the_class_s_own_forward_bound_to_an_instance_is_no_watcher(patch_first):
    """kernelize binds it where it has no kernel."""
    model = tiny()
    expected, _ = run(model)
    if patch_first:
        hf.patch(model)
    for module in (model.model, layers(model)[0], layers(model)[1].input_layernorm):
        module.forward = module.forward
    hf.patch(model)
    output, adds = run(model)
    assert_same(output.logits, expected.logits)
    assert adds == ALL
    hf.unpatch(model)
    output, adds = run(model)
    assert torch.equal(output.logits, expected.logits) and adds == 0


class Wrapper(torch.nn.Module):
    """What some tool puts in a module's place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        assert type(hidden_states) is torch.Tensor
        output = self.inner(hidden_states, **kwargs)
        assert type(output) is torch.Tensor
        return output


def wrap_layer(model):
    layers(model)[0] = Wrapper(layers(model)[0])


def wrap_first_norm(model):
    layers(model)[1].input_layernorm = Wrapper(layers(model)[1].input_layernorm)


def wrap_second_norm(model):
    layers(model)[1].post_attention_layernorm = Wrapper(layers(model)[1].post_attention_layernorm)


def wrap_final_norm(model):
    model.model.norm = Wrapper(model.model.norm)


@pytest.mark.parametrize("wrap", [wrap_layer, wrap_first_norm, wrap_second_norm, wrap_final_norm])
@pytest.mark.parametrize("patch_first", [True, False])
def test_what_stands_in_a_modules_place_gets_and_gives_tensors(wrap, patch_first):
    model = tiny()
    expected, _ = run(model)
    if patch_first:
        hf.patch(model)
        wrap(model)
    else:
        wrap(model)
        hf.patch(model)
    report = hf.patch(model)
    output, adds = run(model)
    assert_same(output.logits, expected.logits)
    assert adds == report.fused_adds < ALL
    assert "Wrapper" in str(report)


def test_reordered_repeated_and_dropped_layers_run_as_upstream():
    model, order = tiny(num_hidden_layers=3), [2, 0, 0]
    hf.patch(model)
    shuffled, expected = tiny(num_hidden_layers=3), None
    for each in (model, shuffled):
        each.model.layers = torch.nn.ModuleList(each.model.layers[index] for index in order)
    (expected, _), (output, adds) = run(shuffled, use_cache=False), run(model, use_cache=False)
    assert_same(output.logits, expected.logits)
    assert adds == 6
    for each in (model, shuffled):
        each.config.num_hidden_layers = 1  # upstream slices its layers by it
    (expected, _), (output, adds) = run(shuffled, use_cache=False), run(model, use_cache=False)
    assert_same(output.logits, expected.logits)
    assert adds == 2


def test_a_layer_called_on_its_own_takes_and_gives_tensors():
    model = tiny()
    layer = layers(model)[0]
    hidden_states = torch.randn(1, 5, 64)
    position_embeddings = model.model.rotary_emb(hidden_states, torch.arange(5)[None])
    expected = layer(hidden_states, position_embeddings=position_embeddings)
    hf.patch(model)
    before = hidden_states.clone()
    for actual in (
        layer(hidden_states, position_embeddings=position_embeddings),
        layer(hidden_states=hidden_states, position_embeddings=position_embeddings),
    ):
        assert type(actual) is torch.Tensor
        assert_same(actual, expected)
    assert torch.equal(hidden_states, before)


def test_threads_that_capture_and_threads_that_do_not_keep_apart():
    model = tiny()
    expected = run(model, output_hidden_states=True)[0]
    hf.patch(model)
    run(model, output_hidden_states=True)  # installs upstream's hooks
    failures, start = [], threading.Barrier(4)

    def work(capture):
        start.wait()
        for _ in range(20):
            with torch.no_grad(), hf.count() as fused:
                output = model(tokens(), output_hidden_states=capture)
            try:
                assert fused.adds == (LAYERS if capture else ALL)
                assert_same(output.logits, expected.logits)
                assert_same(output.hidden_states, expected.hidden_states if capture else None)
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(bool(index % 2),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens_with_every_cache(cache):
    model = tiny()
    options = dict(max_new_tokens=6, do_sample=False)
    if cache == "static":
        options |= dict(cache_implementation="static", disable_compile=True)
    expected = model.generate(tokens(), **options)
    hf.patch(model)
    with hf.count() as fused:
        assert torch.equal(model.generate(tokens(), **options), expected)
    assert fused.adds == 6 * ALL


def test_the_embeddings_handed_in_stay_as_they_were():
    model = tiny()
    embeddings = model.get_input_embeddings()(tokens()).detach()
    before = embeddings.clone()
    hf.patch(model)
    with torch.no_grad():
        model(inputs_embeds=embeddings)
    assert torch.equal(embeddings, before)


def test_module_call_is_left_out_only_where_it_would_do_nothing(monkeypatch):
    model = tiny()
    expected, _ = run(model)
    hf.patch(model)
    layer, called = layers(model)[1], []
    call = torch.nn.Module.__call__
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda m, *a, **k: called.append(m) or call(m, *a, **k))

    def is_called():
        called.clear()
        assert_same(run(model)[0].logits, expected.logits)
        return layer in called

    assert not is_called()
    handle = layer.register_forward_hook(lambda *args: None)
    assert is_called()
    handle.remove()
    assert not is_called()
    layer.forward = layer.forward
    assert is_called()
    del layer.forward
    layer.compile(backend="eager")
    assert is_called()
