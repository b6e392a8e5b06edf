// Types and vector helpers shared by the kernels. Values are bfloat16 or float32 in memory and
// float32 in registers; a sum of one output is always added up in the same order, whatever the
// batch around it, so a token's result does not depend on who it is computed with.
#pragma once
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

namespace baton {

constexpr long kTile = 16;        // rows and columns of a tile; float32 lanes of a vector
constexpr long kDepth = 32;       // values of a row that are multiplied at once
constexpr long kGroup = 32;       // outputs that are packed together: two tiles
constexpr long kGroupDepth = kGroup * kDepth;  // packed weights of a group per depth step

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }

inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }

inline __m512 load(const bf16* p, __mmask16 mask) {
  return widen(_mm256_maskz_loadu_epi16(mask, p));
}

inline void store(float* p, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, x); }

inline void store(bf16* p, __m512 x, __mmask16 mask) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

inline __mmask16 first(long count) {
  return count >= kTile ? 0xffff : (__mmask16)((1u << std::max(count, 0L)) - 1);
}

// 2^x for finite x, relative error below 2e-7 (a minimax polynomial); 0 far below.
inline __m512 exp2_ps(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.326472721e-03f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.671512812e-03f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550733745e-02f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402224208e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469776e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

// [begin, end) of `count` items for the calling thread of a team.
struct Share {
  long begin, end;
};

inline Share share(long count) {
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  return {count * me / threads, count * (me + 1) / threads};
}

}  // namespace baton
