// Types and vector helpers shared by the kernels. Everything is bfloat16 in memory and float32
// in registers; a float32 sum of one output is always added up in the same order, whatever the
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
constexpr long kDepth = 32;       // bfloat16 values of a row that one tile multiplies
constexpr long kGroup = 32;       // outputs that are packed together: two tiles
constexpr long kGroupDepth = kGroup * kDepth;  // packed weights of a group per depth step

inline __m512 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m512 load_bf16(const bf16* p, __mmask16 mask) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void store_bf16(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }

inline void store_bf16(bf16* p, __m512 x, __mmask16 mask) {
  _mm256_mask_storeu_epi16(p, mask, to_bf16(x));
}

inline __mmask16 first(long count) {
  return count >= kTile ? 0xffff : (__mmask16)((1u << std::max(count, 0L)) - 1);
}

// 2^x for finite x, relative error below 3e-6 (a minimax polynomial); 0 far below.
inline __m512 exp2_ps(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.582853008e-03f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590642727e-02f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402409863e-01f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931241931e-01f));
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
