// Keys and values of plain type in blocks that lie anywhere: where the tokens of a step are, and
// how they come into a scratch.
#pragma once
#include "pass.h"

namespace baton {

template <class T>
struct PagedCache {
  const T* keys;  // (slot, kv head, head_dim) of one layer
  const T* values;
  const int32_t* tables;  // (sequence, table_width)
  long table_width, num_kv_heads, head_dim, block_size;
};

constexpr long kTokensAhead = 3 * kTokens;  // from those in use to those that memory is asked for

// Tokens of an item. Blocks lie apart and the hardware does not foresee the next one, so memory is
// asked for tokens ahead: into the second cache, and one by one between the loads, because a burst
// of requests is not served.
template <class T>
class PagedTokens {
 public:
  // `seen`: what is asked for.
  PagedTokens(const PagedCache<T>& cache, const Item& item, Range seen)
      : cache_(&cache),
        table_(cache.tables + item.seq * cache.table_width),
        head_(item.kv_head * cache.head_dim),
        unasked_(seen) {}

  // Where there is nothing before to ask for the first tokens.
  void ask_first() {
    for (long done = 0; done < kTokensAhead; done += kTokens) {
      ask_ahead(*this);
      for (long t = 0; t < kTokens; t++)
        for (long d = 0; d < cache_->head_dim; d += kLine) ask(t, d);
    }
  }

  // Finds the tokens of the step at `token`, of which [from, limit) may be read.
  void locate(long token, long from, long limit) {
    begin_ = std::max(0L, from - token);
    end_ = std::max(0L, std::min(kTokens, limit - token));
    find(token, end_, at_);
    if (begin_ < end_) ask_ahead(unasked_.begin < unasked_.end || !next_ ? *this : *next_);
  }

  // Those of `next` are asked for when all of these have been.
  void precede(PagedTokens* next) { next_ = next; }

  // Keys as they are; values packed, as the second operand of a product wants them. Tokens that
  // no column sees are zeros: their weight is zero, and zero times garbage may be NaN.
  void load(Scratch<T>& s, long dim) const;

 private:
  static constexpr long kLine = 64 / sizeof(T);

  void find(long token, long count, long* at) const {
    const long size = cache_->block_size, token_size = cache_->num_kv_heads * cache_->head_dim;
    long block = token / size, offset = token % size;
    for (long t = 0; t < count; t++) {
      at[t] = (table_[block] * size + offset) * token_size + head_;
      if (++offset == size) offset = 0, block++;
    }
  }

  void ask_ahead(PagedTokens& from) {
    const long count = std::min(kTokens, from.unasked_.end - from.unasked_.begin);
    from.find(from.unasked_.begin, count, ahead_);
    from.unasked_.begin += count;
    for (long t = count; t < kTokens; t++) ahead_[t] = at_[begin_];
  }

  void ask(long t, long d) const {
    _mm_prefetch((const char*)(cache_->keys + ahead_[t] + d), _MM_HINT_T1);
    _mm_prefetch((const char*)(cache_->values + ahead_[t] + d), _MM_HINT_T1);
  }

  bool unseen(long t) const { return t < begin_ || t >= end_; }

  __m512i read(const bf16* from, long t, long d, __mmask32 dims) const {
    return unseen(t) ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(dims, from + at_[t] + d);
  }

  __m512 read(const float* from, long t, long d) const {
    if (unseen(t)) return _mm512_setzero_ps();
    return baton::load(from + at_[t] + d, first(cache_->head_dim - d));
  }

  const PagedCache<T>* cache_;
  const int32_t* table_;
  long head_;
  Range unasked_;
  PagedTokens* next_ = nullptr;
  long at_[kTokens] = {}, begin_ = 0, end_ = 0;  // where tokens [begin, end) of the step at hand are
  long ahead_[kTokens];
};

template <>
inline void PagedTokens<bf16>::load(Scratch<bf16>& s, long dim) const {
  const __m512i low = kLowLanes.load(), high = kHighLanes.load();
  for (long d = 0; d < dim; d += kDepth) {
    const long left = cache_->head_dim - d;
    const __mmask32 dims = left >= kDepth ? ~0u : (1u << left) - 1;
    for (long t = 0; t < kTokens; t += 2) {
      ask(t, d);
      ask(t + 1, d);
      const __m512i even = read(cache_->values, t, d, dims);
      const __m512i odd = read(cache_->values, t + 1, d, dims);
      bf16* to = s.values + packed_at<bf16>(d, t, kTokens);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(to + kGroupDepth / 2, _mm512_permutex2var_epi16(even, high, odd));
      _mm512_store_si512(s.keys + t * dim + d, read(cache_->keys, t, d, dims));
      _mm512_store_si512(s.keys + (t + 1) * dim + d, read(cache_->keys, t + 1, d, dims));
    }
  }
}

template <>
inline void PagedTokens<float>::load(Scratch<float>& s, long dim) const {
  for (long t = 0; t < kTokens; t++)
    for (long d = 0; d < dim; d += kTile) {
      ask(t, d);
      _mm512_store_ps(s.keys + t * dim + d, read(cache_->keys, t, d));
      _mm512_store_ps(s.values + packed_at<float>(d, t, kTokens), read(cache_->values, t, d));
    }
}

}  // namespace baton
