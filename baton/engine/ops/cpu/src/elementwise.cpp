// What stands between the products: normalisation, rotary embedding, writing keys and values.
#include "common.h"

#include <cmath>

namespace baton {
namespace {

constexpr long kParallelRows = 32;  // below, waking a thread costs more than the rows

template <class Load>
inline float mean_square(long size, Load load) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < size; i += kTile) {
    const __m512 x = load(i);
    sum = _mm512_fmadd_ps(x, x, sum);
  }
  return _mm512_reduce_add_ps(sum) / size;
}

template <class T>
void norm_row(const float* x, const float* weight, float eps, T* out, long size) {
  const auto at = [&](long i) { return load(x + i, first(size - i)); };
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(size, at) + eps));
  for (long i = 0; i < size; i += kTile) {
    const __m512 w = load(weight + i, first(size - i));
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(at(i), scale), w), first(size - i));
  }
}

struct Heads {
  const float* cos;   // (tokens, head_dim), both halves alike
  const float* sin;   // (tokens, head_dim), the first half negated
  const float* norm;  // (query and key heads, head_dim) or null
  float eps;
  long head_dim;
};

// Normalises (if the model does) and rotates one head, from `in` to `out`, which may be the same.
template <class T>
void rotate(const Heads& heads, const T* in, T* out, long token, long head) {
  const long half = heads.head_dim / 2;
  const float* cos = heads.cos + token * heads.head_dim;
  const float* sin = heads.sin + token * heads.head_dim + half;
  __m512 scale = _mm512_set1_ps(1.0f);
  if (heads.norm) {
    const auto at = [&](long i) { return load(in + i, first(heads.head_dim - i)); };
    scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(heads.head_dim, at) + heads.eps));
  }
  for (long i = 0; i < half; i += kTile) {
    const __mmask16 mask = first(half - i);
    __m512 low = load(in + i, mask), high = load(in + half + i, mask);
    if (heads.norm) {
      const float* weight = heads.norm + head * heads.head_dim + i;
      low = _mm512_mul_ps(_mm512_mul_ps(low, scale), load(weight, mask));
      high = _mm512_mul_ps(_mm512_mul_ps(high, scale), load(weight + half, mask));
    }
    const __m512 c = load(cos + i, mask), s = load(sin + i, mask);
    store(out + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)), mask);
    store(out + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)), mask);
  }
}

template <class T>
void rms_norm(const float* x, const float* weight, float eps, T* out, long rows, long size,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= kParallelRows) schedule(static)
  for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, eps, out + row * size, size);
}

// qkv (tokens, query heads + 2 * kv heads, head_dim): queries are rotated in place, keys on their
// way into `keys`, values copied to `values`; both are (slot, kv head, head_dim) of one layer, or
// null: then keys are rotated in place too.
template <class T>
void rotate_and_store(const Heads& heads, T* qkv, T* keys, T* values, const int64_t* slots,
                      long tokens, long num_heads, long num_kv_heads, int threads) {
  const long dim = heads.head_dim, kv_size = num_kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (tokens >= kParallelRows) schedule(static)
  for (long token = 0; token < tokens; token++) {
    T* row = qkv + token * (num_heads * dim + 2 * kv_size);
    T* k = row + num_heads * dim;
    const long slot = keys ? slots[token] * kv_size : 0;
    T* rotated = keys ? keys + slot : k;
    for (long head = 0; head < num_heads; head++)
      rotate(heads, row + head * dim, row + head * dim, token, head);
    for (long head = 0; head < num_kv_heads; head++)
      rotate(heads, k + head * dim, rotated + head * dim, token, num_heads + head);
    if (keys) std::memcpy(values + slot, k + kv_size, kv_size * sizeof(T));
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

#define BATON_ELEMENTWISE(T)                                                                      \
  extern "C" void baton_rms_norm_##T(const float* x, const float* weight, float eps, T* out,      \
                                     long rows, long size, int threads) {                         \
    rms_norm(x, weight, eps, out, rows, size, threads);                                           \
  }                                                                                               \
  extern "C" void baton_rotate_and_store_##T(                                                     \
      T* qkv, const float* cos, const float* sin, const float* norm, float eps, T* keys,          \
      T* values, const int64_t* slots, long tokens, long num_heads, long num_kv_heads,            \
      long head_dim, int threads) {                                                               \
    const Heads heads{cos, sin, norm, eps, head_dim};                                             \
    rotate_and_store(heads, qkv, keys, values, slots, tokens, num_heads, num_kv_heads, threads);  \
  }

BATON_ELEMENTWISE(bf16)
BATON_ELEMENTWISE(float)
