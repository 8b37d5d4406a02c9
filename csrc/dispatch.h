// The dtype mixes of the contract, once for both backends.
#pragma once

#include "params.h"

namespace fused {

// Calls f(T(), R(), O()) with the element types of input, residual and out. Half and BFloat16 are the
// backend's own types.
template <class Half, class BFloat16, class F>
void dispatch_dtypes(DType input, DType residual, DType out, F f) {
  const auto dispatch_16_bit = [&](auto narrow) {
    if (residual == input) {
      f(narrow, narrow, narrow);
    } else if (out == input) {
      f(narrow, float(), narrow);
    } else {
      f(narrow, float(), float());
    }
  };
  switch (input) {
    case DType::kHalf:
      return dispatch_16_bit(Half());
    case DType::kBFloat16:
      return dispatch_16_bit(BFloat16());
    case DType::kFloat:
      return f(float(), float(), float());
    case DType::kDouble:
      return f(double(), double(), double());
  }
}

// Calls f(T(), R(), O(), W()) with the weight's element type too: input's or the one computed in.
template <class Half, class BFloat16, class F>
void dispatch_dtypes(DType input, DType residual, DType out, DType weight, F f) {
  dispatch_dtypes<Half, BFloat16>(input, residual, out, [&](auto t, auto r, auto o) {
    if constexpr (sizeof(t) == 2) {
      if (weight == DType::kFloat) return f(t, r, o, float());
    }
    f(t, r, o, t);
  });
}

template <class Half, class BFloat16, class F>
void dispatch_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kHalf:
      return f(Half());
    case DType::kBFloat16:
      return f(BFloat16());
    case DType::kFloat:
      return f(float());
    case DType::kDouble:
      return f(double());
  }
}

}  // namespace fused
