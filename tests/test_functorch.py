"""torch.func and forward-mode AD, each against the same transform of the formula in plain torch."""

from __future__ import annotations

import pytest
import torch
from observe import operators
from reference import CASTING_MODES, DTYPES
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fused_add_rms_norm as fused

EPS, OFFSET = 1e-3, 1.0


def call(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return fused.add_rms_norm(input, residual, weight, EPS, offset=OFFSET)


def plain(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = input + residual
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * (OFFSET + weight), h


def arguments(device: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        torch.randn(*shape, device=device, dtype=torch.float64) for shape in ((4, 3, 6), (4, 3, 6), (6,))
    )


def loss_of(f):
    def loss(*args: Tensor) -> Tensor:
        out, residual_out = f(*args)
        return (out.sin() + residual_out.square()).sum()

    return loss


TRANSFORMS = {
    "grad": lambda f, args: grad(loss_of(f), (0, 1, 2))(*args),
    "vjp": lambda f, args: vjp(f, *args)[1]((args[0].cos(), args[1])),
    "jvp": lambda f, args: jvp(f, args, tuple(t.cos() for t in args)),
    "jacrev": lambda f, args: jacrev(f, (0, 1, 2))(*args),
    "jacfwd": lambda f, args: jacfwd(f, (0, 1, 2))(*args),
    "hessian": lambda f, args: hessian(loss_of(f), (0, 2))(*args),
    "grad of grad": lambda f, args: grad(lambda w: grad(loss_of(f))(args[0], args[1], w).square().sum())(
        args[2]
    ),
    "vmap of grad": lambda f, args: vmap(grad(loss_of(f), (0, 1, 2)), (0, 0, None))(*args),
    "grad of vmap": lambda f, args: grad(lambda *a: loss_of(vmap(f, (0, 0, None)))(*a), (0, 1, 2))(*args),
    "vmap of jvp": lambda f, args: vmap(lambda *a: jvp(f, a, a), (0, 0, None))(*args),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transform(device, transform):
    args = arguments(device)
    torch.testing.assert_close(transform(call, args), transform(plain, args))


@pytest.mark.parametrize("weight_dim", [None, 0, 1])
@pytest.mark.parametrize("residual_dim", [None, 0, 2, -1])
@pytest.mark.parametrize("input_dim", [0, 1, -1])
def test_vmap_of_any_dimension(device, input_dim, residual_dim, weight_dim):
    """Bit for bit what a loop over the samples gives where the kernel is kept, else to rounding."""
    samples = [arguments(device) for _ in range(5)]
    dims = (input_dim, residual_dim, weight_dim)
    stacked = [
        values[0] if dim is None else torch.stack(values, dim)
        for values, dim in zip(zip(*samples, strict=True), dims, strict=True)
    ]
    loop = [
        call(*(samples[0 if dim is None else i][position] for position, dim in enumerate(dims)))
        for i in range(5)
    ]
    for actual, expected in zip(vmap(call, dims)(*stacked), zip(*loop, strict=True), strict=True):
        rtol = 0 if weight_dim is None else 1e-14
        torch.testing.assert_close(actual, torch.stack(expected), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("weight_dim", [None, 0])
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_vmap_rounds_as_the_kernel(device, dtypes, casting_mode, weight_dim):
    """Only the order of the sum over a row may differ, by which few outputs round to the other side."""
    x, r = (torch.randn(5, 64, device=device).to(dtype) for dtype in dtypes[:2])
    w = torch.randn(5, 64, device=device).to(dtypes[0])
    options = {"casting_mode": casting_mode, "offset": OFFSET, "out_dtype": dtypes[2]}
    dims = (0, 0, weight_dim)
    out, residual_out = vmap(lambda *a: fused.add_rms_norm(*a, **options), dims)(
        x, r, w if weight_dim == 0 else w[0]
    )
    loop = [fused.add_rms_norm(x[i], r[i], w[i if weight_dim == 0 else 0], **options) for i in range(5)]
    expected = torch.stack([out for out, _ in loop])
    assert torch.equal(residual_out, torch.stack([h for _, h in loop])) and out.dtype == dtypes[2]
    if weight_dim is None:
        assert torch.equal(out, expected)
    elif dtypes[2].itemsize == 2:
        assert (out != expected).float().mean() < 0.02
    torch.testing.assert_close(out, expected)


def test_vmap_is_one_kernel_call(device):
    x, r, w = arguments(device)
    batched = (0, 1, None)
    assert operators(lambda: vmap(call, batched)(x, r.movedim(0, 1), w)) == ["fused.add_rms_norm"]
    assert operators(lambda: vmap(lambda x: fused.rms_norm(x, w))(x)) == ["fused.rms_norm"]
    assert operators(lambda: vmap(vmap(call, (0, 0, None)), (0, 0, None))(x, r, w)) == ["fused.add_rms_norm"]

    leaves = [t.requires_grad_() for t in (x, r, w)]
    with torch.enable_grad():
        results = []
        run = operators(lambda: results.extend(vmap(call, (0, 0, None))(*leaves)))
    assert run == ["fused.add_rms_norm_forward"]
    backward = operators(lambda: torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results]))
    assert backward.count("fused.add_rms_norm_backward") == 1


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_vmap_over_gradients(device, wanted):
    """A Jacobian, row by row of the result, through one graph."""
    leaves = [t.requires_grad_(i in wanted) for i, t in enumerate(arguments(device))]
    out, _ = call(*leaves)
    rows = torch.randn(5, *out.shape, device=device, dtype=out.dtype)

    def gradients(grad_out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, [leaves[i] for i in wanted], grad_out, retain_graph=True)

    expected = [torch.stack(grads) for grads in zip(*map(gradients, rows), strict=True)]
    torch.testing.assert_close(list(vmap(gradients)(rows)), expected)
    batched = torch.autograd.grad(out, [leaves[i] for i in wanted], rows, is_grads_batched=True)
    torch.testing.assert_close(list(batched), expected)


def test_per_sample_gradients_of_a_model(device):
    norm = fused.AddRMSNorm(6, EPS, device=device, dtype=torch.float64)
    x, r, _ = arguments(device)
    weights = dict(norm.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor, r: Tensor) -> Tensor:
        return functional_call(norm, weights, (x, r))[0].sin().sum()

    actual = vmap(grad(loss), (None, 0, 0))(weights, x, r)["weight"]
    expected = [torch.autograd.grad(loss(weights, x[i], r[i]), norm.weight)[0] for i in range(len(x))]
    torch.testing.assert_close(actual, torch.stack(expected))


def test_per_sample_gradients_without_a_weight(device):
    x, r, _ = arguments(device)
    actual, expected = (
        vmap(grad(loss_of(f), (0, 1)))(x, r)
        for f in (
            lambda x, r: fused.add_rms_norm(x, r, None, EPS),
            lambda x, r: plain(x, r, torch.full((6,), 1 - OFFSET, device=device)),
        )
    )
    torch.testing.assert_close(actual, expected)


def test_ensemble_of_models(device):
    norms = [fused.AddRMSNorm(6, EPS, device=device, dtype=torch.float64) for _ in range(3)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights, buffers = torch.func.stack_module_state(norms)
    x, r, _ = arguments(device)
    out, _ = vmap(lambda *state: functional_call(norms[0], state, (x, r)))(weights, buffers)
    torch.testing.assert_close(out, torch.stack([norm(x, r)[0] for norm in norms]))


def test_forward_mode(device):
    leaves = [t.requires_grad_() for t in arguments(device)]
    gradcheck(call, leaves, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True)
    gradcheck(lambda x, w: fused.rms_norm(x, w, EPS), (leaves[0], leaves[2]), check_forward_ad=True)


def test_second_derivatives_in_every_order(device):
    leaves = [t.requires_grad_() for t in arguments(device)]
    gradgradcheck(call, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)
    gradgradcheck(lambda x, w: fused.rms_norm(x, w, EPS), (leaves[0], leaves[2]), check_fwd_over_rev=True)


def test_third_derivative(device):
    x, r, w = arguments(device)

    def third(f) -> Tensor:
        value, point = loss_of(f), x.clone().requires_grad_()
        result = value(point, r, w)
        for _ in range(3):
            (result,) = torch.autograd.grad(result.sum(), point, create_graph=True)
        return result

    torch.testing.assert_close(third(call), third(plain))


def test_tangent_without_grad_mode(device):
    x, r, w = arguments(device)
    with torch.no_grad(), forward_ad.dual_level():
        out, residual_out = call(forward_ad.make_dual(x, r), r, w)
        tangents = [forward_ad.unpack_dual(t).tangent for t in (out, residual_out)]
    torch.testing.assert_close(tangents, list(jvp(lambda x: plain(x, r, w), (x,), (r,))[1]))


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_results_are_contiguous_whatever_computes_them(device, transform):
    x, r, w = arguments(device)
    x, r = x.transpose(0, 1), r.transpose(0, 1)
    if transform == "jvp":
        results = jvp(lambda x: call(x, r, w), (x,), (x,))[0]
    else:
        results = vmap(call, (1, 1, 0))(x, r, w.expand(x.shape[1], -1))
    assert all(t.is_contiguous() for t in results)


def test_in_place_forms_refuse_transforms(device):
    """A sample of a batch would be written to a temporary."""
    x, r, w = arguments(device)
    before = x.clone()
    with pytest.raises(RuntimeError):
        vmap(lambda x, r: fused.add_rms_norm_(x, r, w))(x, r)
    with pytest.raises(RuntimeError, match="that requires grad or carries a tangent"):
        jvp(lambda x: fused.add_rms_norm_(x, r, w), (x,), (x,))
    assert torch.equal(x, before)
