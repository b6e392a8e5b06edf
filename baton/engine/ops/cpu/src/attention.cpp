// Causal attention over a paged cache, read in place: one algorithm for decode and prefill.
//
// A query of one head is a column; the columns of a KV head are all its (query, head) pairs. Up to
// 64 columns meet 32 tokens at a time: scores^T[token][column], softmax down the columns (online,
// Milakov and Gimelshein 2018), then output[column][dim]. The token tiles begin at multiples of
// 32 from the start of the sequence, and columns never mix, so a query's result is the same
// whether it is decoded alone or prefilled among thousands.
#include "tiles.h"

namespace baton {
namespace {

constexpr long kTokens = kDepth;   // tokens of one step
constexpr long kColumns = 2 * kGroup;  // columns of one pass
constexpr long kMaxDim = 256;

struct Call {
  const bf16* q;
  bf16* out;           // (tokens, num_heads, head_dim)
  const bf16* keys;    // (slot, kv head, head_dim) of one layer
  const bf16* values;
  const int32_t* tables;  // (sequence, table_width)
  const int32_t* starts;   // (sequences + 1) first query of each
  const int32_t* lengths;  // (sequence) context including its queries
  const bf16* anchored;    // (tokens, num_heads, head_dim) queries that meet sinks, or null
  const int32_t* windows;  // (sequence), or null: all have `window`
  const int32_t* sinks;    // (sequence), or null
  long q_stride, table_width, num_heads, num_kv_heads, head_dim, block_size, window;
  float scale;  // of the scores, times log2(e)
};

struct Item {
  long seq, kv_head, column;
};

// Scratch of one thread. Dimensions past head_dim (it is padded to 32) stay zero.
struct Scratch {
  alignas(64) bf16 queries[kColumns * kMaxDim];              // groups, packed: depth is head_dim
  alignas(64) bf16 keys[kTokens * kMaxDim];                  // [token][dim]
  alignas(64) bf16 values[kMaxDim / kGroup * kGroupDepth];   // packed: depth is the tokens
  alignas(64) float scores[kTokens * kColumns];              // [token][column]
  alignas(64) bf16 weights[kColumns * kTokens];              // [column][token]
  alignas(64) float out[kColumns * kMaxDim];                 // [column][dim]
  alignas(64) float largest[kColumns], total[kColumns];
  alignas(64) int32_t position[kColumns];  // of the column's query in its sequence
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

class Pass {
 public:
  Pass(const Call& call, Scratch& s, const Item& item) : call_(call), s_(s) {
    group_ = call.num_heads / call.num_kv_heads;
    dim_ = (call.head_dim + kDepth - 1) / kDepth * kDepth;
    kv_head_ = item.kv_head;
    table_ = call.tables + item.seq * call.table_width;
    first_query_ = call.starts[item.seq];
    const long queries = call.starts[item.seq + 1] - first_query_;
    context_ = call.lengths[item.seq];
    before_ = context_ - queries;
    column_ = item.column;
    columns_ = std::min(kColumns, queries * group_ - item.column);
    window_ = call.windows ? call.windows[item.seq] : call.window;
    sinks_ = call.sinks ? call.sinks[item.seq] : 0;
  }

  void run(const Tiles& tiles) {
    begin();
    const long oldest = s_.position[0], newest = s_.position[columns_ - 1];
    if (sinks_) {
      const long window = window_;
      window_ = 0;
      load_queries(call_.anchored, call_.num_heads * call_.head_dim);
      from_ = 0, limit_ = std::min(sinks_, context_);
      see(tiles, oldest, std::min(newest, limit_ - 1));
      window_ = window;
    }
    load_queries(call_.q, call_.q_stride);
    from_ = std::max(sinks_, window_ ? oldest - window_ + 1 : 0), limit_ = context_;
    see(tiles, oldest, newest);
    store();
  }

 private:
  // Tokens [from, limit) as far as `newest`.
  void see(const Tiles& tiles, long oldest, long newest) {
    const long wide = (columns_ + kTile - 1) / kTile * kTile;
    locate(from_ / kTokens * kTokens);
    for (long token = from_ / kTokens * kTokens; token <= newest; token += kTokens) {
      load_tokens();
      locate(token + kTokens);
      for (long c = 0; c < wide; c += kGroup)
        tiles.multiply<false>(s_.keys, dim_, s_.queries + c * dim_, dim_, s_.scores + c, kColumns,
                              kTokens, wide - c);
      const bool partly = token + kTokens - 1 > oldest || token < from_ ||
                          token + kTokens > limit_ || (window_ && token <= newest - window_);
      for (long c = 0; c < wide; c += kTile)
        partly ? softmax<true>(token, c) : softmax<false>(token, c);
      for (long c = 0; c < wide; c += kGroup)
        for (long d = 0; d < dim_; d += kGroup)
          tiles.multiply<true>(s_.weights + c * kTokens, kTokens,
                               s_.values + d / kGroup * kGroupDepth, kTokens,
                               s_.out + c * dim_ + d, dim_, std::min(kGroup, wide - c), kGroup);
    }
  }

  long query_of(long c) const { return first_query_ + (column_ + c) / group_; }
  long head_of(long c) const { return kv_head_ * group_ + (column_ + c) % group_; }

  void begin() {
    std::memset(s_.out, 0, dim_ * kColumns * sizeof(float));
    for (long c = 0; c < kColumns; c++) {
      s_.largest[c] = -3e38f;
      s_.total[c] = 0;
      s_.position[c] = c < columns_ ? (int32_t)(before_ + (column_ + c) / group_) : -1;
    }
  }

  void load_queries(const bf16* from, long stride) {
    std::memset(s_.queries, 0, dim_ * kColumns * sizeof(bf16));
    for (long c = 0; c < columns_; c++) {
      const bf16* q = from + query_of(c) * stride + head_of(c) * call_.head_dim;
      for (long d = 0; d < call_.head_dim; d += 2)
        std::memcpy(s_.queries + c / kGroup * kGroup * dim_ + d / kDepth * kGroupDepth +
                        c % kGroup / kTile * kGroupDepth / 2 + d % kDepth / 2 * kDepth +
                        c % kTile * 2,
                    q + d, 2 * sizeof(bf16));
    }
  }

  // Finds the tokens of the next step and asks memory for them: blocks lie apart, and the
  // hardware does not foresee the next one.
  void locate(long token) {
    begin_ = std::max(0L, from_ - token);
    end_ = std::max(0L, std::min(kTokens, limit_ - token));
    long block = token / call_.block_size, offset = token % call_.block_size;
    const long token_size = call_.num_kv_heads * call_.head_dim;
    for (long t = 0; t < end_; t++) {
      at_[t] = (table_[block] * call_.block_size + offset) * token_size + kv_head_ * call_.head_dim;
      for (long d = 0; t >= begin_ && d < call_.head_dim; d += kDepth) {
        _mm_prefetch((const char*)(call_.keys + at_[t] + d), _MM_HINT_T0);
        _mm_prefetch((const char*)(call_.values + at_[t] + d), _MM_HINT_T0);
      }
      if (++offset == call_.block_size) offset = 0, block++;
    }
  }

  // Keys as they are; values in pairs of tokens, as the second operand of a product wants them.
  // Tokens that no column sees are zeros: their weight is zero, and zero times garbage may be NaN.
  void load_tokens() {
    const __m512i low = kLowLanes.load(), high = kHighLanes.load();
    for (long t = 0; t < kTokens; t += 2)
      for (long d = 0; d < dim_; d += kDepth) {
        const __m512i even = read(call_.values, t, d), odd = read(call_.values, t + 1, d);
        bf16* to = s_.values + d / kGroup * kGroupDepth + t / 2 * kDepth;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + kGroupDepth / 2, _mm512_permutex2var_epi16(even, high, odd));
        _mm512_store_si512(s_.keys + t * dim_ + d, read(call_.keys, t, d));
        _mm512_store_si512(s_.keys + (t + 1) * dim_ + d, read(call_.keys, t + 1, d));
      }
  }

  __m512i read(const bf16* from, long t, long d) const {
    return begin_ <= t && t < end_ ? _mm512_maskz_loadu_epi16(dims(d), from + at_[t] + d)
                      : _mm512_setzero_si512();
  }

  __mmask32 dims(long d) const {
    return call_.head_dim - d >= kDepth ? 0xffffffffu : (1u << (call_.head_dim - d)) - 1;
  }

  // Columns [c, c + 16): scores become weights of this step; sums and outputs of earlier steps
  // are scaled to the new maximum.
  template <bool kPartly>
  void softmax(long token, long c) {
    const __m512i position = _mm512_load_si512(s_.position + c);
    const __m512 old = _mm512_load_ps(s_.largest + c), scale = _mm512_set1_ps(call_.scale);
    __mmask16 seen[kTokens];
    __m512 score[kTokens], largest = old;
    for (long t = 0; t < kTokens; t++) {
      seen[t] = kPartly ? visible(token + t, position) : 0xffff;
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
    store_weights(score, c);
    if (_mm512_cmpneq_ps_mask(old, largest))
      rescale(old, largest, c);
    _mm512_store_ps(s_.total + c, _mm512_add_ps(_mm512_load_ps(s_.total + c), sum));
  }

  __mmask16 visible(long token, __m512i position) const {
    const __m512i at = _mm512_set1_epi32((int32_t)token);
    if (token < from_ || token >= limit_) return 0;
    __mmask16 mask = _mm512_cmple_epi32_mask(at, position);
    if (window_) {
      const __m512i end = _mm512_add_epi32(at, _mm512_set1_epi32((int32_t)window_));
      mask &= _mm512_cmpgt_epi32_mask(end, position);
    }
    return mask;
  }

  // Transposes pairs of tokens, so that a column's 32 weights lie in one row.
  void store_weights(const __m512 (&weight)[kTokens], long c) {
    __m512i pair[kTile];
    const __m512i order = kPairLanes.load();
    for (long i = 0; i < kTile; i++) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight[2 * i + 1], weight[2 * i]);
      pair[i] = _mm512_permutexvar_epi16(order, both);
    }
    transpose(pair);
    for (long i = 0; i < kTile; i++) _mm512_store_si512(s_.weights + (c + i) * kTokens, pair[i]);
  }

  static void transpose(__m512i (&r)[kTile]) {
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

  void store() {
    for (long c = 0; c < columns_; c++) {
      const __m512 scale = _mm512_set1_ps(1.0f / s_.total[c]);
      bf16* to = call_.out + (query_of(c) * call_.num_heads + head_of(c)) * call_.head_dim;
      for (long d = 0; d < call_.head_dim; d += kTile)
        store_bf16(to + d, _mm512_mul_ps(_mm512_load_ps(s_.out + c * dim_ + d), scale),
                   first(call_.head_dim - d));
    }
  }

  const Call& call_;
  Scratch& s_;
  const int32_t* table_;
  long group_, dim_, kv_head_, first_query_, context_, before_, column_, columns_;
  long window_ = 0, sinks_ = 0;
  // Tokens [from, limit) are looked at; blocks before the oldest that is may be another's by now.
  long from_ = 0, limit_ = 0;
  long at_[kTokens], begin_ = 0, end_ = 0;  // where tokens [begin, end) of the step at hand are
};

}  // namespace
}  // namespace baton

using namespace baton;

// q (tokens, num_heads, head_dim) with `q_stride` values from token to token; head_dim even and at
// most 256. Sequence s has the queries starts[s] to starts[s + 1], the last of lengths[s] tokens,
// whose keys and values are all in the cache. window 0: no window. The first sinks[s] tokens are
// met by the queries `anchored`, whatever the window; the three pointers may be null.
extern "C" void baton_attention(const bf16* q, bf16* out, const bf16* keys, const bf16* values,
                                const int32_t* tables, const int32_t* starts,
                                const int32_t* lengths, const bf16* anchored,
                                const int32_t* windows, const int32_t* sinks, long sequences,
                                long q_stride,
                                long table_width, long num_heads, long num_kv_heads, long head_dim,
                                long block_size, long window, float scale, int threads) {
  const Call call{q,        out,     keys,  values,   tables,      starts,
                  lengths,  anchored, windows, sinks, q_stride,    table_width,
                  num_heads, num_kv_heads, head_dim, block_size, window, scale * 1.44269504f};
  const long group = num_heads / num_kv_heads;
  // Passes of a sequence, counted from the last: the longest come first, so threads end together.
  const auto passes = [&](long s) {
    return ((starts[s + 1] - starts[s]) * group + kColumns - 1) / kColumns;
  };
  long most = 0;
  for (long s = 0; s < sequences; s++) most = std::max(most, passes(s));
#pragma omp parallel num_threads(threads)
  {
    alignas(64) Scratch scratch;
    const Tiles tiles(2 * kTile);
#pragma omp for schedule(dynamic, 1) collapse(3)
    for (long pass = 0; pass < most; pass++)
      for (long s = 0; s < sequences; s++)
        for (long head = 0; head < num_kv_heads; head++) {
          const long mine = passes(s);
          if (pass >= mine) continue;
          Pass(call, scratch, {s, head, (mine - 1 - pass) * kColumns}).run(tiles);
        }
  }
}

extern "C" int baton_enable() { return enable_tiles() ? 1 : 0; }
