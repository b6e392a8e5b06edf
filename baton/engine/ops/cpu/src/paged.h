// Keys and values of plain type in blocks that lie anywhere: where the tokens of a step are, and
// how they come into a scratch.
#pragma once
#include "scratch.h"

namespace baton {

template <class T>
struct PagedCache {
  const T* keys;  // (slot, kv head, head_dim) of one layer
  const T* values;
  const int32_t* tables;  // (sequence, table_width)
  long table_width, num_kv_heads, head_dim, block_size;
};

template <class T>
class PagedTokens {
 public:
  PagedTokens(const PagedCache<T>& cache, long seq, long kv_head)
      : cache_(cache), table_(cache.tables + seq * cache.table_width), kv_head_(kv_head) {}

  // Finds the tokens of the step at `token`, of which [from, limit) may be read, and asks memory
  // for them: blocks lie apart, and the hardware does not foresee the next one.
  void locate(long token, long from, long limit) {
    begin_ = std::max(0L, from - token);
    end_ = std::max(0L, std::min(kTokens, limit - token));
    const long size = cache_.block_size, token_size = cache_.num_kv_heads * cache_.head_dim;
    constexpr long kLine = 64 / sizeof(T);
    long block = token / size, offset = token % size;
    for (long t = 0; t < end_; t++) {
      at_[t] = (table_[block] * size + offset) * token_size + kv_head_ * cache_.head_dim;
      for (long d = 0; t >= begin_ && d < cache_.head_dim; d += kLine) {
        _mm_prefetch((const char*)(cache_.keys + at_[t] + d), _MM_HINT_T0);
        _mm_prefetch((const char*)(cache_.values + at_[t] + d), _MM_HINT_T0);
      }
      if (++offset == size) offset = 0, block++;
    }
  }

  // Keys as they are; values packed, as the second operand of a product wants them. Tokens that
  // no column sees are zeros: their weight is zero, and zero times garbage may be NaN.
  void load(Scratch<T>& s, long dim) const;

 private:
  __m512i read(const bf16* from, long t, long d) const {
    if (t < begin_ || t >= end_) return _mm512_setzero_si512();
    const long left = cache_.head_dim - d;
    return _mm512_maskz_loadu_epi16(left >= kDepth ? ~0u : (1u << left) - 1, from + at_[t] + d);
  }

  __m512 read(const float* from, long t, long d) const {
    if (t < begin_ || t >= end_) return _mm512_setzero_ps();
    return baton::load(from + at_[t] + d, first(cache_.head_dim - d));
  }

  const PagedCache<T>& cache_;
  const int32_t* table_;
  const long kv_head_;
  long at_[kTokens], begin_ = 0, end_ = 0;  // where tokens [begin, end) of the step at hand are
};

template <>
inline void PagedTokens<bf16>::load(Scratch<bf16>& s, long dim) const {
  const __m512i low = kLowLanes.load(), high = kHighLanes.load();
  for (long t = 0; t < kTokens; t += 2)
    for (long d = 0; d < dim; d += kDepth) {
      const __m512i even = read(cache_.values, t, d), odd = read(cache_.values, t + 1, d);
      bf16* to = s.values + packed_at<bf16>(d, t, kTokens);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(to + kGroupDepth / 2, _mm512_permutex2var_epi16(even, high, odd));
      _mm512_store_si512(s.keys + t * dim + d, read(cache_.keys, t, d));
      _mm512_store_si512(s.keys + (t + 1) * dim + d, read(cache_.keys, t + 1, d));
    }
}

template <>
inline void PagedTokens<float>::load(Scratch<float>& s, long dim) const {
  for (long t = 0; t < kTokens; t++)
    for (long d = 0; d < dim; d += kTile) {
      _mm512_store_ps(s.keys + t * dim + d, read(cache_.keys, t, d));
      _mm512_store_ps(s.values + packed_at<float>(d, t, kTokens), read(cache_.values, t, d));
    }
}

}  // namespace baton
