// Causal attention over a cache: one algorithm for decode and prefill.
//
// A query of one head is a column; the columns of a KV head are all its (query, head) pairs. Up to
// 64 columns meet 32 tokens at a time: scores^T[token][column], softmax down the columns (online,
// Milakov and Gimelshein 2018), then output[column][dim]. The token tiles begin at multiples of
// 32 from the start of the sequence, and columns never mix, so a query's result is the same
// whether it is decoded alone or prefilled among thousands.
#pragma once
#include "scratch.h"

#include <atomic>

namespace baton {

// Queries of element type E.
template <class E>
struct Queries {
  const E* q;
  E* out;                 // (tokens, num_heads, head_dim)
  const int32_t* starts;   // (sequences + 1) first query of each
  const int32_t* lengths;  // (sequence) context including its queries
  const E* anchored;       // (tokens, num_heads, head_dim) queries that meet sinks, or null
  const int32_t* windows;  // (sequence), or null: all have `window`
  const int32_t* sinks;    // (sequence), or null
  long sequences, q_stride, num_heads, num_kv_heads, head_dim, window;
  float scale;  // of the scores, times log2(e)
};

struct Item {
  long seq, kv_head, column;
};

struct Range {
  long begin, end;
};

// Products of type T: of E, or float over a cache that is read as float.
template <class E, class T>
class Pass {
 public:
  Pass(const Queries<E>& call, Scratch<T>& s, const Item& item) : call_(call), s_(s) {
    group_ = call.num_heads / call.num_kv_heads;
    dim_ = (call.head_dim + kDepth - 1) / kDepth * kDepth;
    kv_head_ = item.kv_head;
    first_query_ = call.starts[item.seq];
    const long queries = call.starts[item.seq + 1] - first_query_;
    before_ = call.lengths[item.seq] - queries;
    column_ = item.column;
    columns_ = std::min(kColumns, queries * group_ - item.column);
    window_ = call.windows ? call.windows[item.seq] : call.window;
    sinks_ = call.sinks ? call.sinks[item.seq] : 0;
    std::memset(s_.out, 0, dim_ * kColumns * sizeof(float));
    for (long c = 0; c < kColumns; c++) {
      s_.largest[c] = -3e38f;
      s_.total[c] = 0;
      s_.position[c] = (int32_t)(before_ + (column_ + std::min(c, columns_ - 1)) / group_);
    }
  }

  // `see` looks at tokens, with the ranges that it is given.
  template <class See>
  void run(const See& see) {
    if (sinks_) {
      load_queries(call_.anchored, call_.num_heads * call_.head_dim);
      see([&](long) { return 0L; }, [&](long c) { return std::min(sinks_, s_.position[c] + 1L); });
    }
    load_queries(call_.q, call_.q_stride);
    see([&](long c) { return std::max(sinks_, window_ ? s_.position[c] - window_ + 1L : 0L); },
        [&](long c) { return s_.position[c] + 1L; });
    store_out();
  }

  // Column c meets tokens [begin(c), end(c)), which do not fall from one column to the next.
  template <class Tokens, class Begin, class End>
  void see(const Tiles<T>& tiles, Tokens& tokens, const Begin& begin, const End& end) {
    for (long c = 0; c < kColumns; c++) {
      s_.begin[c] = (int32_t)begin(c);
      s_.end[c] = (int32_t)end(c);
    }
    const long wide = (columns_ + kTile - 1) / kTile * kTile, last = columns_ - 1;
    const long from = s_.begin[0], limit = s_.end[last];
    if (from >= limit) return;
    tokens.locate(from / kTokens * kTokens, from, limit);
    for (long token = from / kTokens * kTokens; token < limit; token += kTokens) {
      tokens.load(s_, dim_);
      tokens.locate(token + kTokens, from, limit);
      for (long c = 0; c < wide; c += kGroup)
        tiles.template multiply<false>(s_.keys, dim_, s_.queries + c * dim_, dim_, s_.scores + c,
                                       kColumns, kTokens, wide - c);
      const bool partly = token < s_.begin[last] || token + kTokens > s_.end[0];
      for (long c = 0; c < wide; c += kTile) partly ? softmax<true>(token, c) : softmax<false>(token, c);
      for (long c = 0; c < wide; c += kGroup)
        for (long d = 0; d < dim_; d += kGroup)
          tiles.template multiply<true>(s_.weights + c * kTokens, kTokens,
                                        s_.values + d / kGroup * kGroupDepth, kTokens,
                                        s_.out + c * dim_ + d, dim_, rows_from(c), kGroup);
    }
  }

  long position(long c) const { return s_.position[c]; }
  long first_query() const { return first_query_; }
  long before() const { return before_; }  // tokens before the first query

 private:
  long query_of(long c) const { return first_query_ + (column_ + c) / group_; }
  long head_of(long c) const { return kv_head_ * group_ + (column_ + c) % group_; }

  long rows_from(long c) const {
    constexpr long kStep = Tiles<T>::kRowStep;
    return std::min(kGroup, (columns_ - c + kStep - 1) / kStep * kStep);
  }

  void load_queries(const E* from, long stride) {
    std::memset(s_.queries, 0, dim_ * kColumns * sizeof(T));
    for (long c = 0; c < columns_; c++) {
      const E* q = from + query_of(c) * stride + head_of(c) * call_.head_dim;
      for (long d = 0; d < call_.head_dim; d += kTile) {
        alignas(64) T part[kTile];
        const __mmask16 mask = first(call_.head_dim - d);
        store(part, load(q + d, mask), 0xffff);
        for (long i = 0; i < kTile; i += kPack<T>)
          std::memcpy(s_.queries + packed_at<T>(c, d + i, dim_), part + i, sizeof(int32_t));
      }
    }
  }

  // Columns [c, c + 16): scores become weights of this step; sums and outputs of earlier steps
  // are scaled to the new maximum.
  template <bool kPartly>
  void softmax(long token, long c) {
    const __m512 old = _mm512_load_ps(s_.largest + c), scale = _mm512_set1_ps(call_.scale);
    __mmask16 seen[kTokens];
    __m512 score[kTokens], largest = old;
    for (long t = 0; t < kTokens; t++) {
      seen[t] = kPartly ? visible(token + t, c) : 0xffff;
      score[t] = _mm512_load_ps(s_.scores + t * kColumns + c);
      largest = _mm512_mask_max_ps(largest, seen[t], largest, score[t]);
    }
    __m512 sum = _mm512_setzero_ps();
    const __m512 shift = _mm512_mul_ps(largest, scale);
    for (long t = 0; t < kTokens; t++) {
      score[t] = exp2_ps(_mm512_fmsub_ps(score[t], scale, shift));
      if (kPartly) score[t] = _mm512_maskz_mov_ps(seen[t], score[t]);
      sum = _mm512_add_ps(sum, score[t]);
    }
    store_weights(s_, score, c);
    if (_mm512_cmpneq_ps_mask(old, largest)) rescale(old, largest, c);
    _mm512_store_ps(s_.total + c, _mm512_add_ps(_mm512_load_ps(s_.total + c), sum));
  }

  __mmask16 visible(long token, long c) const {
    const __m512i at = _mm512_set1_epi32((int32_t)token);
    return _mm512_cmple_epi32_mask(_mm512_load_si512(s_.begin + c), at) &
           _mm512_cmplt_epi32_mask(at, _mm512_load_si512(s_.end + c));
  }

  // A column whose maximum stays has a factor of exactly 1.
  void rescale(__m512 old, __m512 largest, long c) {
    const __m512 scale = _mm512_set1_ps(call_.scale);
    const __m512 factor = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(old, largest), scale));
    _mm512_store_ps(s_.total + c, _mm512_mul_ps(_mm512_load_ps(s_.total + c), factor));
    _mm512_store_ps(s_.largest + c, largest);
    __mmask16 moved = _mm512_cmpneq_ps_mask(old, largest);
    alignas(64) float factors[kTile];
    _mm512_store_ps(factors, factor);
    for (; moved; moved &= moved - 1) {
      const int i = __builtin_ctz(moved);
      float* row = s_.out + (c + i) * dim_;
      for (long d = 0; d < dim_; d += kTile)
        _mm512_store_ps(row + d, _mm512_mul_ps(_mm512_load_ps(row + d), _mm512_set1_ps(factors[i])));
    }
  }

  void store_out() {
    for (long c = 0; c < columns_; c++) {
      const __m512 scale = _mm512_set1_ps(1.0f / s_.total[c]);
      E* to = call_.out + (query_of(c) * call_.num_heads + head_of(c)) * call_.head_dim;
      for (long d = 0; d < call_.head_dim; d += kTile)
        store(to + d, _mm512_mul_ps(_mm512_load_ps(s_.out + c * dim_ + d), scale),
              first(call_.head_dim - d));
    }
  }

  const Queries<E>& call_;
  Scratch<T>& s_;
  long group_, dim_, kv_head_, first_query_, before_, column_, columns_;
  long window_ = 0, sinks_ = 0;
};

// The columns of all sequences and KV heads, handed out to threads. Passes of a sequence are counted
// from the last: the longest come first, so threads end together.
template <class E>
class Items {
 public:
  explicit Items(const Queries<E>& call) : call_(call), group_(call.num_heads / call.num_kv_heads) {
    for (long s = 0; s < call.sequences; s++) most_ = std::max(most_, passes(s));
  }

  bool take(Item& item) {
    const long heads = call_.num_kv_heads, all = call_.sequences * heads;
    for (long i = next_++; i < most_ * all; i = next_++) {
      const long seq = i % all / heads, later = passes(seq) - i / all;
      if (later <= 0) continue;
      item = {seq, i % heads, (later - 1) * kColumns};
      return true;
    }
    return false;
  }

  // The tokens that some column of it sees, sinks aside.
  Range seen(const Item& item) const {
    const long columns = std::min(item.column + kColumns, columns_of(item.seq));
    const long before = call_.lengths[item.seq] - queries_of(item.seq);
    const long window = call_.windows ? call_.windows[item.seq] : call_.window;
    const long first = before + item.column / group_, last = before + (columns - 1) / group_;
    return {window ? std::max(0L, first - window + 1) : 0, last + 1};
  }

 private:
  long queries_of(long s) const { return call_.starts[s + 1] - call_.starts[s]; }
  long columns_of(long s) const { return queries_of(s) * group_; }
  long passes(long s) const { return (columns_of(s) + kColumns - 1) / kColumns; }

  const Queries<E>& call_;
  const long group_;
  long most_ = 0;
  std::atomic<long> next_{0};
};

// Runs `work(scratch, tiles, items)` in every thread.
template <class T, class E, class Work>
void attend(const Queries<E>& call, int threads, const Work& work) {
  Items<E> items(call);
#pragma omp parallel num_threads(threads)
  {
    alignas(64) Scratch<T> scratch;
    work(scratch, Tiles<T>(2 * kTile), items);
  }
}

}  // namespace baton
