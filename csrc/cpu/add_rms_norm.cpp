// CPU kernels. A row is worked on in blocks of kBlock elements with one partial sum an element of the block,
// so that the order of every sum depends on cols alone: not on the instruction set, the number of threads,
// the other rows or the alignment.
#include <ATen/Parallel.h>

#include <type_traits>
#include <vector>

#include "dispatch.h"
#include "host.h"

namespace fused {
namespace {

constexpr int64_t kBlock = 32;  // two AVX-512 registers of floats
constexpr int64_t kSegment =
    16 * kBlock;  // columns one after the other in a partial sum: more would lose digits
constexpr int64_t kGrainElements = 32768;  // a task smaller than this costs more to hand out than to do
constexpr int64_t kWeightGroups =
    64;  // partial sums of grad_weight; fixed, so that its bits do not depend on the threads
constexpr int64_t kWeightRows = 64;  // of a group, one after the other in a sum of their own

template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// --- Instruction sets: `body` is compiled for each and inlined into the one the machine has

#if defined(__x86_64__) && defined(__GNUC__)
template <class Body>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]] void run_avx512(const Body& body,
                                                                                    int64_t begin,
                                                                                    int64_t end) {
  body(begin, end);
}
template <class Body>
[[gnu::target("avx2,fma,f16c")]] void run_avx2(const Body& body, int64_t begin, int64_t end) {
  body(begin, end);
}
template <class Body>
void run(const Body& body, int64_t begin, int64_t end) {
  static const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512) return run_avx512(body, begin, end);
  if (avx2) return run_avx2(body, begin, end);
  body(begin, end);
}
#else
template <class Body>
void run(const Body& body, int64_t begin, int64_t end) {
  body(begin, end);
}
#endif

// --- Blocks ----------------------------------------------------------------
// `count` is kBlock in the main loop, where the compiler sees the constant and vectorises, and less in a
// row's last block.

template <class A>
struct Block {
  A v[kBlock];
};

template <class A, class T>
[[gnu::always_inline]] inline Block<A> load(const T* from, int64_t count) {
  Block<A> block;
  for (int64_t i = 0; i < count; ++i) block.v[i] = static_cast<A>(from[i]);
  return block;
}

template <class A, class T>
[[gnu::always_inline]] inline void store(const Block<A>& block, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(block.v[i]);
}

template <class T, class A>
[[gnu::always_inline]] inline void round_to(Block<A>& block, int64_t count) {
  for (int64_t i = 0; i < count; ++i) block.v[i] = static_cast<A>(static_cast<T>(block.v[i]));
}

template <class Step>
[[gnu::always_inline]] inline void for_each_block(int64_t begin, int64_t end, const Step& step) {
  int64_t col = begin;
  for (; col + kBlock <= end; col += kBlock) step(col, kBlock);
  if (col < end) step(col, end - col);
}

// The sum over a row of what `step` adds to the elements of its last argument: segments one after the other,
// those by pairs, pairs of pairs and so on, so that the error grows with the logarithm of cols.
template <class A, class Step>
[[gnu::always_inline]] inline A sum_blocks(int64_t cols, const Step& step) {
  constexpr int kLevels = 48;
  Block<A> parts[kLevels];  // parts[l], where bit l of `segments` is set: the sums of 2^l segments
  int64_t segments = 0;
  const auto add = [](Block<A> & to, const Block<A>& part) __attribute__((always_inline)) {
    for (int64_t i = 0; i < kBlock; ++i) to.v[i] += part.v[i];
  };
  for (int64_t begin = 0; begin < cols; begin += kSegment, ++segments) {
    Block<A> sums = {};
    for_each_block(
        begin,
        std::min(begin + kSegment, cols), [&](int64_t col, int64_t count) __attribute__((always_inline)) {
          step(col, count, sums);
        });
    int level = 0;
    for (; segments >> level & 1; ++level) add(sums, parts[level]);
    parts[level] = sums;
  }
  Block<A> sums = {};
  for (int level = 0; segments >> level > 0; ++level) {
    if (segments >> level & 1) add(sums, parts[level]);
  }
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums.v[i] += sums.v[i + half];
  }
  return sums.v[0];
}

template <class T>
T* row_of(const Rows& rows, const Shape& shape, int64_t row) {
  if (rows.data == nullptr) return nullptr;
  return static_cast<T*>(rows.data) + row / shape.inner_rows * rows.outer_stride +
         row % shape.inner_rows * rows.inner_stride;
}

// offset + weight, or ones.
template <class A>
std::vector<A> scale_row(const Weight& weight, double offset, int64_t cols) {
  std::vector<A> scale(cols, A(1));
  if (weight.data == nullptr) return scale;
  dispatch_dtype<at::Half, at::BFloat16>(weight.dtype, [&](auto w) {
    const auto* data = static_cast<const decltype(w)*>(weight.data);
    for (int64_t i = 0; i < cols; ++i) scale[i] = static_cast<A>(offset) + static_cast<A>(data[i]);
  });
  return scale;
}

// --- Forward ---------------------------------------------------------------

template <class T, class R, class O>
struct ForwardRows {
  using A = Accumulate<T>;
  const ForwardParams& p;
  const A* scale;

  [[gnu::always_inline]] void operator()(int64_t begin, int64_t end) const {
    const int64_t cols = p.shape.cols;
    std::vector<A> sum(cols);
    for (int64_t row = begin; row < end; ++row) {
      const T* input = row_of<T>(p.input, p.shape, row);
      const R* residual = row_of<R>(p.residual, p.shape, row);
      R* residual_out = row_of<R>(p.residual_out, p.shape, row);
      O* out = row_of<O>(p.out, p.shape, row);

      const auto add_squares = [&](int64_t col, int64_t count, Block<A> & squares)
          __attribute__((always_inline)) {
        Block<A> h = load<A>(input + col, count);
        if (residual) {
          const Block<A> r = load<A>(residual + col, count);
          for (int64_t i = 0; i < count; ++i) h.v[i] += r.v[i];
          store(h, residual_out + col, count);
          if (p.round_sum) round_to<R>(h, count);
        }
        for (int64_t i = 0; i < count; ++i) squares.v[i] += h.v[i] * h.v[i];
        store(h, sum.data() + col, count);
      };
      const A mean = sum_blocks<A>(cols, add_squares) / static_cast<A>(cols);
      const A rstd = A(1) / std::sqrt(mean + static_cast<A>(p.eps));
      if (p.rstd) static_cast<A*>(p.rstd)[row] = rstd;

      for_each_block(
          0, cols, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
            Block<A> n = load<A>(sum.data() + col, count);
            for (int64_t i = 0; i < count; ++i) n.v[i] *= rstd;
            if (p.round_normalized) round_to<R>(n, count);
            const Block<A> w = load<A>(scale + col, count);
            for (int64_t i = 0; i < count; ++i) n.v[i] *= w.v[i];
            store(n, out + col, count);
          });
    }
  }
};

// --- Backward --------------------------------------------------------------

template <class T, class R, class O>
struct BackwardRows {
  using A = Accumulate<T>;
  const BackwardParams& p;
  const A* scale;
  A* grad_weight_partials;  // [kWeightGroups, cols], or null

  // Rows [begin, end) of one group.
  [[gnu::always_inline]] void operator()(int64_t begin, int64_t end) const {
    const int64_t cols = p.shape.cols;
    for (int64_t row = begin; row < end; ++row) {
      const O* grad_out = row_of<O>(p.grad_out, p.shape, row);
      const R* residual_out = row_of<R>(p.residual_out, p.shape, row);
      const R* grad_residual_out = row_of<R>(p.grad_residual_out, p.shape, row);
      T* grad_input = row_of<T>(p.grad_input, p.shape, row);
      R* grad_residual = row_of<R>(p.grad_residual, p.shape, row);
      const A rstd = static_cast<const A*>(p.rstd)[row];

      A projection = 0;  // mean(dy * w * n)
      if (grad_input || grad_residual) {
        const auto add_products = [&](int64_t col, int64_t count, Block<A> & sums)
            __attribute__((always_inline)) {
          const Block<A> dy = load<A>(grad_out + col, count), h = load<A>(residual_out + col, count);
          const Block<A> w = load<A>(scale + col, count);
          for (int64_t i = 0; i < count; ++i) sums.v[i] += dy.v[i] * w.v[i] * h.v[i];
        };
        projection = sum_blocks<A>(cols, add_products) * rstd / static_cast<A>(cols);
      }

      for_each_block(
          0, cols, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
            const Block<A> dy = load<A>(grad_out + col, count);
            Block<A> n = load<A>(residual_out + col, count);
            for (int64_t i = 0; i < count; ++i) n.v[i] *= rstd;
            if (grad_weight_partials) {
              A* grad_weight = grad_weight_partials + col;
              for (int64_t i = 0; i < count; ++i) grad_weight[i] += dy.v[i] * n.v[i];
            }
            if (grad_input || grad_residual) {
              const Block<A> w = load<A>(scale + col, count);
              Block<A> dx;
              for (int64_t i = 0; i < count; ++i) dx.v[i] = rstd * (dy.v[i] * w.v[i] - n.v[i] * projection);
              if (grad_residual_out) {
                const Block<A> dh = load<A>(grad_residual_out + col, count);
                for (int64_t i = 0; i < count; ++i) dx.v[i] += dh.v[i];
              }
              if (grad_input) store(dx, grad_input + col, count);
              if (grad_residual) store(dx, grad_residual + col, count);
            }
          });
    }
  }
};

template <class A>
void finish_grad_weight(const std::vector<A>& partials, int64_t groups, const BackwardParams& p) {
  dispatch_dtype<at::Half, at::BFloat16>(p.grad_weight_dtype, [&](auto w) {
    auto* grad_weight = static_cast<decltype(w)*>(p.grad_weight);
    at::parallel_for(0, p.shape.cols, std::max<int64_t>(1, kGrainElements / groups),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t col = begin; col < end; ++col) {
                         A sum = 0;
                         for (int64_t group = 0; group < groups; ++group)
                           sum += partials[group * p.shape.cols + col];
                         grad_weight[col] = static_cast<decltype(w)>(sum);
                       }
                     });
  });
}

struct Cpu {
  static constexpr bool kTracing = false;

  static void forward(const ForwardParams& p, const at::Tensor&) {
    dispatch_dtypes<at::Half, at::BFloat16>(
        p.input_dtype, p.residual_dtype, p.out_dtype, [&](auto t, auto r, auto o) {
          using Rows = ForwardRows<decltype(t), decltype(r), decltype(o)>;
          const auto scale = scale_row<typename Rows::A>(p.weight, p.offset, p.shape.cols);
          const Rows rows{p, scale.data()};
          at::parallel_for(0, p.shape.rows, std::max<int64_t>(1, kGrainElements / p.shape.cols),
                           [&](int64_t begin, int64_t end) { run(rows, begin, end); });
        });
  }

  static void backward(const BackwardParams& p, const at::Tensor&) {
    dispatch_dtypes<at::Half, at::BFloat16>(
        p.input_dtype, p.residual_dtype, p.out_dtype, [&](auto t, auto r, auto o) {
          using Rows = BackwardRows<decltype(t), decltype(r), decltype(o)>;
          using A = typename Rows::A;
          const int64_t rows = p.shape.rows, cols = p.shape.cols, groups = std::min(rows, kWeightGroups);
          const auto scale = scale_row<A>(p.weight, p.offset, cols);
          std::vector<A> partials(p.grad_weight ? groups * cols : 0);
          const int64_t group_elements = (rows + groups - 1) / groups * cols;
          at::parallel_for(0, groups, std::max<int64_t>(1, kGrainElements / group_elements),
                           [&](int64_t begin, int64_t end) {
                             std::vector<A> recent(p.grad_weight ? cols : 0);
                             const Rows body{p, scale.data(), p.grad_weight ? recent.data() : nullptr};
                             for (int64_t group = begin; group < end; ++group) {
                               const int64_t last = rows * (group + 1) / groups;
                               for (int64_t row = rows * group / groups; row < last; row += kWeightRows) {
                                 std::fill(recent.begin(), recent.end(), A(0));
                                 run(body, row, std::min(row + kWeightRows, last));
                                 A* sums = partials.data() + group * cols;
                                 for (size_t col = 0; col < recent.size(); ++col) sums[col] += recent[col];
                               }
                             }
                           });
          if (p.grad_weight) finish_grad_weight(partials, groups, p);
        });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { Ops<Cpu>::register_in(m); }

}  // namespace fused
