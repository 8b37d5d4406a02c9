// Trains one step with LibTorch alone, by the fused operator and by its formula in plain ATen, and compares.
#include <ATen/core/dispatch/Dispatcher.h>
#include <add_rms_norm.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

namespace {

constexpr double kEps = 1e-6;
constexpr double kTolerance = 1e-9;  // of fp64 results of order 1

struct Results {
  double loss_before, loss_after;
  std::vector<at::Tensor> gradients;
};

// residual stream -> add and norm -> linear, the loss on both outputs, one step of SGD
template <class AddRmsNorm>
Results train_step(const at::Device& device, AddRmsNorm add_rms_norm) {
  torch::manual_seed(0);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const auto random = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, options).to(device).requires_grad_();
  };
  const at::Tensor input = random({2, 5, 96}), residual = random({2, 5, 96}), weight = random({96});
  const at::Tensor projection = random({96, 8}), target = random({2, 5, 8}).detach();

  const auto forward = [&] {
    const auto [out, residual_out] = add_rms_norm(input, residual, weight);
    return at::mse_loss(at::matmul(out, projection), target) + residual_out.square().mean();
  };
  std::vector<at::Tensor> parameters = {input, residual, weight, projection};
  torch::optim::SGD optimizer(parameters, /*lr=*/1e-3);
  Results results;
  at::Tensor loss = forward();
  results.loss_before = loss.item<double>();
  loss.backward();
  for (const at::Tensor& parameter : parameters) results.gradients.push_back(parameter.grad().clone());
  optimizer.step();
  loss = forward();
  results.loss_after = loss.item<double>();
  return results;
}

// Whether both ways agree and the step lowered the loss.
bool check(const at::Device& device) {
  const Results fused = train_step(device, [](const auto& input, const auto& residual, const auto& weight) {
    return fused::add_rms_norm(input, residual, weight, kEps);
  });
  const Results plain = train_step(device, [](const auto& input, const auto& residual, const auto& weight) {
    const at::Tensor h = input + residual;
    return std::make_tuple(h * at::rsqrt(h.square().mean(-1, /*keepdim=*/true) + kEps) * weight, h);
  });
  bool ok = std::abs(fused.loss_before - plain.loss_before) < kTolerance &&
            std::abs(fused.loss_after - plain.loss_after) < kTolerance &&
            fused.loss_after < fused.loss_before;
  for (size_t i = 0; i < fused.gradients.size(); ++i) {
    ok = ok && at::allclose(fused.gradients[i], plain.gradients[i], kTolerance, kTolerance);
  }
  std::printf("%s: loss %.6f -> %.6f, by the formula %.6f -> %.6f: %s\n", device.str().c_str(),
              fused.loss_before, fused.loss_after, plain.loss_before, plain.loss_after, ok ? "ok" : "FAILED");
  return ok;
}

}  // namespace

int main() {
  bool ok = check(at::kCPU);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fused::add_rms_norm_forward", "");
  if (at::hasCUDA() && torch::cuda::is_available() && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    ok = check(at::kCUDA) && ok;
  }
  return ok ? 0 : 1;
}
