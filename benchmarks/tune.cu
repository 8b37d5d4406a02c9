// Times the CUDA kernels' configurations on a shape beside a copy of the same bytes: where the bounds in
// csrc/cuda/config.h come from. Needs no torch: make tune ARGS="forward bf16 16384 4096".
//
//     tune forward|backward DTYPES ROWS COLS          L2 flushed before each timed call; share of the copy
//     tune decode|decode-backward DTYPES ROWS COLS    microseconds a call, in a CUDA graph of 20 calls
//
// Further arguments: chosen leaves out the search (for a profiler), plain the dependent launch; misaligned
// and odd-stride are layouts, as in problems.py.
// DTYPES: bf16, fp16, fp32, or mixed (bf16 input under an fp32 residual and weight).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/kernels.h"

namespace {

using namespace fused;
using namespace fused::cuda;

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

constexpr int kRepeats = 11;
constexpr int kGraphCalls = 20;
constexpr size_t kFlushBytes = size_t{256} << 20;

struct Timer {
  cudaStream_t stream;
  cudaEvent_t start, stop;
  void* flush;

  Timer() {
    check(cudaStreamCreate(&stream));
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
    check(cudaMalloc(&flush, kFlushBytes));
  }

  float elapsed() const {
    float milliseconds = 0;
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    return milliseconds * 1000;
  }

  // Microseconds of a call with a cold L2; the flush keeps the host ahead. Negative: the configuration cannot
  // be launched.
  float cold(const std::function<cudaError_t()>& call) const {
    std::vector<float> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      check(cudaMemsetAsync(flush, i, kFlushBytes, stream));
      check(cudaEventRecord(start, stream));
      if (call() != cudaSuccess) {
        cudaGetLastError();
        return -1;
      }
      check(cudaEventRecord(stop, stream));
      if (i >= 2) times.push_back(elapsed());
    }
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }

  // Microseconds of a call within a graph, the L2 hot.
  float in_graph(const std::function<cudaError_t()>& call) const {
    if (call() != cudaSuccess) {
      cudaGetLastError();
      return -1;
    }
    check(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kGraphCalls; ++i) check(call());
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      check(cudaGraphLaunch(executable, stream));
      check(cudaEventRecord(start, stream));
      check(cudaGraphLaunch(executable, stream));
      check(cudaEventRecord(stop, stream));
      if (i >= 2) times.push_back(elapsed() / kGraphCalls);
    }
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }
};

struct Problem {
  DType input, residual;
  int64_t rows, cols;
  int64_t offset = 0, stride = 0;  // of input, grad_out and grad_residual_out, in elements

  static int size(DType dtype) { return dtype == DType::kFloat ? 4 : 2; }
  int64_t elements() const { return rows * cols; }
  int vector_elements() const { return 16 / size(input); }
  RowShape row() const { return row_shape(cols, size(input), size(input), size(residual)); }
  int64_t vectors() const { return row().vectors; }
  bool aligned() const { return cols % vector_elements() == 0 && stride == cols && offset == 0; }

  void* tensor(DType dtype) const {
    void* data;
    check(cudaMalloc(&data, (rows * stride + 8) * size(dtype)));
    // Random bits of modest exponents: zeros are faster than data.
    std::vector<uint16_t> bits(elements() * size(dtype) / 2 > (1 << 24) ? 1 << 24
                                                                        : elements() * size(dtype) / 2);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = 0x3c00 + (i * 2654435761u >> 22);
    for (int64_t done = 0, all = elements() * size(dtype); done < all; done += bits.size() * 2) {
      check(cudaMemcpy(static_cast<char*>(data) + done, bits.data(),
                       std::min<int64_t>(bits.size() * 2, all - done), cudaMemcpyHostToDevice));
    }
    return data;
  }
  Rows arranged(DType dtype) const {
    return {static_cast<char*>(tensor(dtype)) + offset * size(dtype), 0, stride};
  }
  Rows dense(DType dtype) const { return {tensor(dtype), 0, cols}; }
};

struct Result {
  float microseconds;
  std::string config;
};

void report(const char* what, std::vector<Result> results, float copy, size_t most) {
  std::sort(results.begin(), results.end(),
            [](const Result& a, const Result& b) { return a.microseconds < b.microseconds; });
  for (size_t i = 0; i < std::min(most, results.size()); ++i) {
    std::printf("%s %8.2f us  %.3f of the copy  %s\n", what, results[i].microseconds,
                copy / results[i].microseconds, results[i].config.c_str());
  }
}

std::string describe(const ForwardConfig& c) {
  char text[160];
  const char* kernels[] = {"registers", "shared", "loop"};
  std::snprintf(text, sizeof text, "%s threads %d vectors %d rows %d cluster %d",
                kernels[static_cast<int>(c.kernel)], c.threads, c.vectors_per_thread, c.rows_per_block,
                c.cluster);
  return text;
}

std::string describe(const BackwardConfig& c) {
  char text[160];
  const char* kernels[] = {"registers", "ring", "loop"};
  std::snprintf(text, sizeof text,
                "%s threads %d vectors %d rows %d blocks/SM %d%s teams %d stages %d cluster %d",
                kernels[static_cast<int>(c.kernel)], c.threads, c.vectors_per_thread, c.rows_per_block,
                c.blocks_per_sm, c.columns_apart ? " columns apart" : "", c.teams, c.stages, c.cluster);
  return text;
}

void tune_forward(const Problem& problem, const Gpu& gpu, const Timer& timer, bool decode, bool search) {
  ForwardParams p;
  p.shape = {problem.rows, problem.rows, problem.cols};
  p.input = problem.arranged(problem.input);
  p.residual = problem.dense(problem.residual);
  p.out = decode ? p.input : problem.dense(problem.input);
  p.residual_out = decode ? p.residual : problem.dense(problem.residual);
  void* weight;
  check(cudaMalloc(&weight, problem.cols * 4));
  check(cudaMemset(weight, 0x3f, problem.cols * 4));
  p.weight = {weight, problem.residual};
  p.input_dtype = p.out_dtype = problem.input;
  p.residual_dtype = problem.residual;
  p.eps = 1e-6;
  p.offset = 0;
  p.round_sum = p.round_normalized = false;

  const int64_t bytes = problem.elements() * (Problem::size(problem.input) + Problem::size(problem.residual));
  void *from, *to;
  check(cudaMalloc(&from, bytes));
  check(cudaMalloc(&to, bytes));
  check(cudaMemset(from, 0x3f, bytes));
  const auto copy_call = [&] {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, timer.stream);
  };
  const float copy = decode ? timer.in_graph(copy_call) : timer.cold(copy_call);
  std::printf("copy %.2f us (%.2f TB/s)\n", copy, 2.0 * bytes / copy / 1e6);

  const auto time = [&](const ForwardConfig& config) {
    const auto launch = config.kernel == ForwardKernel::kShared ? launch_forward_shared : launch_forward;
    const auto call = [&] { return launch(p, config, problem.aligned(), {gpu, 0, timer.stream}); };
    return decode ? timer.in_graph(call) : timer.cold(call);
  };
  std::vector<Result> results;
  const auto try_config = [&](const ForwardConfig& config) {
    const float microseconds = search ? time(config) : -1;
    if (microseconds > 0) results.push_back({microseconds, describe(config)});
  };
  for (int cluster : {1, 2, 4, 8, 16}) {
    if (gpu.clusters[log2_of(cluster)] == 0) continue;
    const ForwardConfig shared = forward_through_shared(problem.vectors(), cluster);
    if (shared.threads <= kSharedThreads && shared.threads >= kWarpThreads) try_config(shared);
    for (int vectors : {1, 2, 4, 8}) {
      for (int rows : {1, 2, 4, 8, 16, 32}) {
        ForwardConfig config = forward_in_registers(problem.vectors(), vectors, cluster);
        config.rows_per_block = rows;
        const int threads = config.threads * rows;
        if (threads > forward_threads(vectors) || threads % kWarpThreads || (rows > 1 && cluster > 1) ||
            (vectors > 1 && !problem.aligned()) || (vectors == 8 && problem.input != DType::kFloat))
          continue;  // no such kernel
        try_config(config);
      }
    }
  }
  const auto chosen = forward_config(problem.row(), problem.rows, problem.aligned(), gpu);
  report("chosen", {{time(chosen), describe(chosen)}}, copy, 1);
  report("forward", results, copy, 6);
}

void tune_backward(const Problem& problem, const Gpu& gpu, const Timer& timer, bool decode, bool search) {
  BackwardParams p;
  p.shape = {problem.rows, problem.rows, problem.cols};
  p.grad_out = problem.arranged(problem.input);
  p.residual_out = problem.dense(problem.residual);
  p.grad_residual_out = problem.arranged(problem.residual);
  p.grad_input = problem.dense(problem.input);
  const bool mixed = problem.input != problem.residual;
  if (mixed) p.grad_residual = problem.dense(problem.residual);
  void *weight, *rstd, *grad_weight, *partials;
  check(cudaMalloc(&weight, problem.cols * 4));
  check(cudaMemset(weight, 0x3f, problem.cols * 4));
  check(cudaMalloc(&rstd, problem.rows * 4));
  check(cudaMemset(rstd, 0x3f, problem.rows * 4));
  check(cudaMalloc(&grad_weight, problem.cols * 4));
  check(cudaMalloc(&partials, size_t{132} * 64 * problem.cols * 4));
  p.rstd = rstd;
  p.weight = {weight, problem.residual};
  p.grad_weight = grad_weight;
  p.input_dtype = p.out_dtype = problem.input;
  p.residual_dtype = problem.residual;
  p.offset = 0;

  p.grad_weight_dtype = problem.residual;

  const int item = Problem::size(problem.input), residual_item = Problem::size(problem.residual);
  const int64_t bytes = problem.elements() * (2 * item + (mixed ? 3 : 2) * residual_item) / 2;
  void *from, *to;
  check(cudaMalloc(&from, bytes));
  check(cudaMalloc(&to, bytes));
  check(cudaMemset(from, 0x3f, bytes));
  const auto time_of = [&](const std::function<cudaError_t()>& call) {
    return decode ? timer.in_graph(call) : timer.cold(call);
  };
  const float copy =
      time_of([&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, timer.stream); });
  std::printf("copy %.2f us (%.2f TB/s)\n", copy, 2.0 * bytes / copy / 1e6);

  const auto run = [&](const BackwardParams& params, const BackwardConfig& config) {
    void* partial = partial_rows(config, problem.rows, gpu) > 0 ? partials : nullptr;
    const auto launch = config.kernel == BackwardKernel::kRing ? launch_backward_ring : launch_backward;
    return launch(params, config, partial, problem.aligned(), {gpu, 0, timer.stream});
  };
  const auto finish = [&](const BackwardConfig& config) {
    if (partial_rows(config, problem.rows, gpu) == 0) return cudaSuccess;
    return launch_finish_grad_weight(p, partials, partial_rows(config, problem.rows, gpu),
                                     {gpu, 0, timer.stream});
  };
  const auto time = [&](const BackwardConfig& config) {
    return time_of([&] {
      const cudaError_t error = run(p, config);
      return error != cudaSuccess ? error : finish(config);
    });
  };
  std::vector<Result> results;
  const auto try_config = [&](const BackwardConfig& config) {
    const float microseconds = search ? time(config) : -1;
    if (microseconds > 0) results.push_back({microseconds, describe(config)});
  };
  for (int vectors : {1, 2, 4}) {
    BackwardConfig config;
    config.vectors_per_thread = vectors;
    if (vectors == ring_vectors(problem.aligned(), problem.row().residual_bytes))
      for (int cluster : {1, 2, 4, 8, 16}) {
        if (gpu.clusters[log2_of(cluster)] == 0) continue;
        config.kernel = BackwardKernel::kRing;
        config.cluster = cluster;
        config.threads = threads_of_row(div_up(problem.vectors(), cluster), vectors);
        for (int stages = min_stages(problem.aligned()); stages <= kMaxStages; ++stages) {
          for (int teams : {1, 2, 3, 4, 6, 8, 12, 16}) {
            config.stages = stages;
            config.teams = teams;
            const int threads = std::max(config.threads, kWarpThreads) * teams;
            const auto layout = ring_layout(config, problem.row(), problem.aligned());
            if (threads > ring_threads(problem.aligned()) || threads < 64 || layout.bytes > gpu.shared_bytes)
              continue;
            if (layout.bytes < gpu.shared_bytes / 4) continue;  // too few bytes on their way
            try_config(config);
          }
        }
      }
    config = {};
    config.kernel = BackwardKernel::kRegisters;
    config.vectors_per_thread = vectors;
    config.threads = threads_of_row(problem.vectors(), vectors);
    for (const bool columns_apart : {false, true}) {
      for (int rows : {1, 2, 4, 8}) {
        for (int blocks : {1, 2, 3, 4}) {
          config.rows_per_block = rows;
          config.blocks_per_sm = blocks;
          config.columns_apart = columns_apart;
          if (config.threads * rows <= backward_threads(vectors) && config.threads * rows >= 64)
            try_config(config);
        }
      }
    }
  }
  const auto chosen = backward_config(problem.row(), problem.rows, problem.aligned(), true, gpu);
  report("chosen", {{time(chosen), describe(chosen)}}, copy, 1);
  const float alone = time_of([&] { return run(p, chosen); }),
              finishing = time_of([&] { return finish(chosen); });
  std::printf("of which %.2f us before the partial sums are added up, %.2f us to add them up alone\n", alone,
              finishing);
  report("backward", results, copy, 8);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr,
                 "usage: tune forward|backward|decode|decode-backward bf16|fp16|fp32|mixed ROWS COLS "
                 "[chosen] [plain] [misaligned|odd-stride]\n");
    return 2;
  }
  const auto given = [&](const char* option) {
    return std::find(arguments + 5, arguments + count, std::string(option)) != arguments + count;
  };
  const std::string what = arguments[1], dtypes = arguments[2];
  Problem problem;
  problem.input = dtypes == "fp32" ? DType::kFloat : dtypes == "fp16" ? DType::kHalf : DType::kBFloat16;
  problem.residual = dtypes == "mixed" ? DType::kFloat : problem.input;
  problem.rows = std::atoll(arguments[3]);
  problem.cols = std::atoll(arguments[4]);
  problem.offset = given("misaligned");
  problem.stride = problem.cols + given("odd-stride");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  Gpu gpu{properties.multiProcessorCount,
          static_cast<int>(properties.sharedMemPerBlockOptin),
          properties.major >= 9,
          properties.major >= 9,
          {}};
  gpu.clusters[0] = gpu.sms;
  for (int i = 1; gpu.hopper && i < 5; ++i) {
    if (resident_clusters(1 << i, gpu.shared_bytes, &gpu.clusters[i]) != cudaSuccess) gpu.clusters[i] = 0;
    cudaGetLastError();
  }
  std::printf("resident clusters of 1, 2, 4, 8, 16: %d %d %d %d %d\n", gpu.clusters[0], gpu.clusters[1],
              gpu.clusters[2], gpu.clusters[3], gpu.clusters[4]);
  std::printf("==");
  for (int i = 1; i < count; ++i) std::printf(" %s", arguments[i]);
  std::printf("\n");
  const Timer timer;
  const bool search = !given("chosen");
  if (given("plain")) gpu.dependent = false;
  if (what == "backward" || what == "decode-backward") {
    tune_backward(problem, gpu, timer, what == "decode-backward", search);
  } else {
    tune_forward(problem, gpu, timer, what == "decode", search);
  }
}
