// What a thread keeps of the step that attention is at: 32 tokens, up to 64 columns.
#pragma once
#include "tiles.h"

namespace baton {

constexpr long kTokens = kDepth;       // tokens of one step
constexpr long kColumns = 2 * kGroup;  // columns of one pass
constexpr long kMaxDim = 256;

// T is what products are made of. Dimensions past head_dim (it is padded to 32) stay zero.
template <class T>
struct Scratch {
  alignas(64) T queries[kColumns * kMaxDim];               // groups, packed: depth is head_dim
  alignas(64) T keys[kTokens * kMaxDim];                   // [token][dim]
  alignas(64) T values[kMaxDim / kGroup * kGroupDepth];    // packed: depth is the tokens
  alignas(64) float scores[kTokens * kColumns];            // [token][column]
  alignas(64) T weights[kColumns * kTokens];               // [column][token]
  alignas(64) float out[kColumns * kMaxDim];               // [column][dim]
  alignas(64) float largest[kColumns], total[kColumns];
  alignas(64) int32_t position[kColumns];  // of the column's query in its sequence
  alignas(64) int32_t begin[kColumns], end[kColumns];  // tokens that it sees
};

// Lane 2i takes value `first + i` of two vectors laid end to end, lane 2i + 1 value `second + i`.
struct alignas(64) Lanes {
  uint16_t at[32];
  constexpr Lanes(int first, int second) : at() {
    for (int i = 0; i < 16; i++) {
      at[2 * i] = (uint16_t)(first + i);
      at[2 * i + 1] = (uint16_t)(second + i);
    }
  }
  __m512i load() const { return _mm512_load_si512(at); }
};
constexpr Lanes kLowLanes(0, 32), kHighLanes(16, 48), kPairLanes(0, 16);

inline void transpose(__m512i (&r)[kTile]) {
  __m512i t[kTile];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 2; half++) {
      t[8 * half + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + i + 4], 0x88);
      t[8 * half + i + 4] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + i + 4], 0xdd);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[12 + i], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[12 + i], 0xdd);
  }
}

// Weights [token] of columns [c, c + 16) into rows [column][token].
inline void store_weights(Scratch<bf16>& s, const __m512 (&weight)[kTokens], long c) {
  __m512i pair[kTile];
  const __m512i order = kPairLanes.load();
  for (long i = 0; i < kTile; i++) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight[2 * i + 1], weight[2 * i]);
    pair[i] = _mm512_permutexvar_epi16(order, both);
  }
  transpose(pair);
  for (long i = 0; i < kTile; i++) _mm512_store_si512(s.weights + (c + i) * kTokens, pair[i]);
}

inline void store_weights(Scratch<float>& s, const __m512 (&weight)[kTokens], long c) {
  for (long half = 0; half < kTokens; half += kTile) {
    __m512i token[kTile];
    for (long i = 0; i < kTile; i++) token[i] = _mm512_castps_si512(weight[half + i]);
    transpose(token);
    for (long i = 0; i < kTile; i++)
      _mm512_store_si512(s.weights + (c + i) * kTokens + half, token[i]);
  }
}

}  // namespace baton
