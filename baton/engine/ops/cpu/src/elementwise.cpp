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

void norm_row(const float* x, const float* weight, float eps, bf16* out, long size) {
  const auto at = [&](long i) { return _mm512_maskz_loadu_ps(first(size - i), x + i); };
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(size, at) + eps));
  for (long i = 0; i < size; i += kTile) {
    const __m512 w = _mm512_maskz_loadu_ps(first(size - i), weight + i);
    store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(at(i), scale), w), first(size - i));
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
void rotate(const Heads& heads, const bf16* in, bf16* out, long token, long head) {
  const long half = heads.head_dim / 2;
  const float* cos = heads.cos + token * heads.head_dim;
  const float* sin = heads.sin + token * heads.head_dim + half;
  __m512 scale = _mm512_set1_ps(1.0f);
  if (heads.norm) {
    const auto at = [&](long i) { return load_bf16(in + i, first(heads.head_dim - i)); };
    scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(heads.head_dim, at) + heads.eps));
  }
  for (long i = 0; i < half; i += kTile) {
    const __mmask16 mask = first(half - i);
    __m512 low = load_bf16(in + i, mask), high = load_bf16(in + half + i, mask);
    if (heads.norm) {
      const float* weight = heads.norm + head * heads.head_dim + i;
      low = _mm512_mul_ps(_mm512_mul_ps(low, scale), _mm512_maskz_loadu_ps(mask, weight));
      high = _mm512_mul_ps(_mm512_mul_ps(high, scale), _mm512_maskz_loadu_ps(mask, weight + half));
    }
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
    store_bf16(out + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)), mask);
    store_bf16(out + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)), mask);
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_rms_norm(const float* x, const float* weight, float eps, bf16* out, long rows,
                               long size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= kParallelRows) schedule(static)
  for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, eps, out + row * size, size);
}

// qkv (tokens, query heads + 2 * kv heads, head_dim): queries are rotated in place, keys on their
// way into `keys`, values copied to `values`; both are (slot, kv head, head_dim) of one layer.
extern "C" void baton_rotate_and_store(bf16* qkv, const float* cos, const float* sin,
                                       const float* norm, float eps, bf16* keys, bf16* values,
                                       const int64_t* slots, long tokens, long num_heads,
                                       long num_kv_heads, long head_dim, int threads) {
  const Heads heads{cos, sin, norm, eps, head_dim};
  const long kv_size = num_kv_heads * head_dim, row_size = num_heads * head_dim + 2 * kv_size;
#pragma omp parallel for num_threads(threads) if (tokens >= kParallelRows) schedule(static)
  for (long token = 0; token < tokens; token++) {
    bf16* row = qkv + token * row_size;
    bf16* k = row + num_heads * head_dim;
    const long slot = slots[token] * kv_size;
    for (long head = 0; head < num_heads; head++)
      rotate(heads, row + head * head_dim, row + head * head_dim, token, head);
    for (long head = 0; head < num_kv_heads; head++)
      rotate(heads, k + head * head_dim, keys + slot + head * head_dim, token, num_heads + head);
    std::memcpy(values + slot, k + kv_size, kv_size * sizeof(bf16));
  }
}
