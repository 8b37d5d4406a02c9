"""torch.compile and torch.export: one graph, the fused ops in it, nothing compiled again."""

import pytest
import torch
from hf_zoo import LAYERS, ZOO, assert_same, gradients, tiny, tokens
from torch._dynamo.testing import CompileCounterWithBackend

from fused_add_rms_norm import hf


def adds(graph_module):
    return sum("fused.add_rms_norm" in str(node.target) for node in graph_module.graph.nodes)


def compiled_adds(backend):
    return [adds(graph_module) for graph_module in backend.graphs]


@pytest.mark.parametrize(
    "layer", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "GptOssDecoderLayer", "Phi3DecoderLayer"]
)
def test_a_whole_model_is_one_graph_with_both_adds_of_every_layer(layer):
    model, ids = tiny(layer), tokens()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    hf.patch(model)
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(ids, use_cache=False).logits, expected)
    assert compiled_adds(backend) == [2 * LAYERS]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [layer for layer in ZOO if "layer_types" not in ZOO[layer][2]])
def test_every_family_is_one_graph(layer):
    """But those of linear attention, which upstream does not compile into one."""
    model, ids = tiny(layer), tokens()
    hf.patch(model)
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            compiled(ids, use_cache=False)
    assert compiled_adds(backend) == [2 * LAYERS]


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_shapes_are_compiled_as_often_as_upstream(dynamic):
    def graphs(patched):
        torch._dynamo.reset()
        model, backend = tiny(), CompileCounterWithBackend("eager")
        if patched:
            hf.patch(model)
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
        with torch.no_grad():
            for length in (9, 12, 17, 9):
                compiled(tokens(length=length), use_cache=False)
        return backend.frame_count

    assert graphs(patched=True) == graphs(patched=False)


def test_a_compiled_training_step_gives_the_same_gradients():
    model, ids = tiny().train(), tokens()
    expected = gradients(model, ids)
    hf.patch(model)
    backend = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_same(gradients(model, ids), expected)
    assert compiled_adds(backend) == [2 * LAYERS]


def test_layers_compiled_one_by_one_share_two_graphs():
    """One for the first layer, which the embeddings enter, one for all others: however many there are."""
    model, ids = tiny(num_hidden_layers=5), tokens()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    hf.patch(model)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            assert_same(model(ids, use_cache=False).logits, expected)
    assert compiled_adds(backend) == [1, 2]


def test_layers_compiled_one_by_one_train():
    model, ids = tiny(num_hidden_layers=3).train(), tokens()
    expected = gradients(model, ids)
    hf.patch(model)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        assert_same(gradients(model, ids), expected)
    assert compiled_adds(backend) == [1, 2]


def test_compiled_layers_in_the_layers_place_exchange_tensors():
    """``layers[i] = torch.compile(layers[i])``: the module that the loop calls is torch's."""
    model, ids = tiny(), tokens()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    hf.patch(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, fullgraph=True, backend="aot_eager")
    report = hf.patch(model)
    assert report.fused_adds == LAYERS and "OptimizedModule" in str(report)
    with torch.no_grad():
        assert_same(model(ids, use_cache=False).logits, expected)


def test_hidden_states_of_a_compiled_model():
    model, ids = tiny(), tokens()
    with torch.no_grad():  # the first capture installs upstream's hooks, under a lock that does not trace
        expected = model(ids, use_cache=False, output_hidden_states=True)
    hf.patch(model)
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        plain = compiled(ids, use_cache=False)
        captured = compiled(ids, use_cache=False, output_hidden_states=True)
    assert_same(plain.logits, expected.logits)
    assert_same(captured.hidden_states, expected.hidden_states)
    assert compiled_adds(backend) == [2 * LAYERS, LAYERS]


def test_an_exported_model_has_both_adds_of_every_layer():
    model, ids = tiny(), tokens()
    expected = model(ids, use_cache=False).logits
    hf.patch(model)
    program = torch.export.export(model, (ids,), {"use_cache": False})
    assert adds(program.graph_module) == 2 * LAYERS
    assert_same(program.module()(ids, use_cache=False).logits, expected)


@pytest.mark.slow
def test_inductor_gives_the_same_logits_and_gradients():
    model, ids = tiny().train(), tokens()
    expected = gradients(model, ids)
    hf.patch(model)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert_same(gradients(model, ids), expected)


@pytest.mark.slow
def test_generate_with_a_compiled_static_cache():
    model = tiny()
    options = dict(max_new_tokens=6, do_sample=False, cache_implementation="static")
    expected = model.generate(tokens(), disable_compile=True, **options)
    hf.patch(model)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(tokens(), **options), expected)
