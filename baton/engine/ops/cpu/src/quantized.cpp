// Attention of one query per sequence over quantized blocks, read in place, and over the newest
// tokens, which lie beside them in full precision. A block's numbers are unpacked into a cache line
// or two at a time, so memory is read once, in its small form. Everything is computed in float32, a
// sequence and head at a time and a token after the other: the batch changes nothing.
#include "common.h"

namespace baton {
namespace {

constexpr long kTokens = 16;  // that are unpacked at a time
constexpr long kHeads = 16;   // query heads that meet them
constexpr long kMaxDim = 256;

enum Kind { kFp8, kInt8, kInt4 };

// See QuantizedSizes.parts: where in a block its parts begin.
struct Parts {
  int64_t key_scales, value_scales, key_zeros, value_zeros, keys, values;
};

struct Call {
  const float* q;  // (sequence, head, head_dim)
  float* out;
  const float* anchored;  // queries that meet sinks, or null
  const uint8_t* table;   // (block, row_bytes)
  const int64_t* rows;    // (sequence, width): the full blocks
  const int64_t* full;    // (sequence): how many
  const uint8_t* tails;   // (sequence, tail_bytes), of each (slot, key|value, kv_head, head_dim)
  const int64_t* slots;   // (sequence): the query's own slot in its tail
  const int32_t* windows;  // (sequence), or null: all have `window`
  const int32_t* sinks;    // (sequence), or null
  Parts parts;
  long width, row_bytes, tail_bytes, num_heads, num_kv_heads, head_dim, block_size, window;
  float scale;  // of the scores, times log2(e)
  int kind, wide_tail;
};

struct Scratch {
  alignas(64) float keys[kTokens * kMaxDim], values[kTokens * kMaxDim];
  alignas(64) float scales[kMaxDim], offsets[kMaxDim];  // of the channels of keys
  alignas(64) float out[kHeads * kMaxDim];
};

float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
}

__m512 halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

__m512 whole(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// 16 numbers of a row of `dim`, as they are stored.
template <Kind kKind>
__m512 numbers(const uint8_t* row, long d, long dim) {
  if constexpr (kKind == kInt8) return whole(row + d);
  if constexpr (kKind == kInt4) {
    const bool high = d >= dim / 2;
    const __m128i both = _mm_loadu_si128((const __m128i*)(row + (high ? d - dim / 2 : d)));
    const __m512i wide = _mm512_cvtepu8_epi32(both);
    const __m512i one = high ? _mm512_srli_epi32(wide, 4) : wide;
    return _mm512_cvtepi32_ps(_mm512_and_si512(one, _mm512_set1_epi32(15)));
  }
  // e4m3 has the bits of a float16 whose exponent is 8 less, but for its not-a-number.
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(row + d)));
  const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
  const __mmask16 none = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
  const __m256i found = _mm256_mask_blend_epi16(none, _mm256_slli_epi16(size, 7),
                                                _mm256_set1_epi16(0x7e00));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(bits, size), 8);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(found, sign)), _mm512_set1_ps(256.0f));
}

template <Kind kKind>
class Query {
 public:
  // Heads [head, head + heads) of one sequence, which share a head of the cache.
  Query(const Call& call, Scratch& s, long seq, long kv_head, long head, long heads)
      : c_(call), s_(s), seq_(seq), kv_head_(kv_head), heads_(heads) {
    first_ = (seq * call.num_heads + head) * call.head_dim;
    std::memset(s_.out, 0, heads * call.head_dim * sizeof(float));
    std::fill(largest_, largest_ + heads, -3e38f);
    std::fill(total_, total_ + heads, 0.0f);
  }

  void run() {
    const long last = c_.full[seq_] * c_.block_size + c_.slots[seq_];
    const long sinks = c_.sinks ? c_.sinks[seq_] : 0;
    const long window = c_.windows ? c_.windows[seq_] : c_.window;
    if (sinks) see(c_.anchored + first_, 0, std::min(sinks, last + 1));
    see(c_.q + first_, std::max(sinks, window ? last - window + 1 : 0), last + 1);
    for (long g = 0; g < heads_; g++)
      for (long d = 0; d < c_.head_dim; d += kTile) {
        const __m512 share = _mm512_set1_ps(1.0f / total_[g]);
        const long at = g * c_.head_dim + d;
        store(c_.out + first_ + at, _mm512_mul_ps(load(s_.out + at), share), 0xffff);
      }
  }

 private:
  // Tokens [from, limit).
  void see(const float* q, long from, long limit) {
    const long size = c_.block_size, full = c_.full[seq_];
    for (long block = from / size; block * size < limit; block++) {
      const long begin = std::max(from - block * size, 0L), end = std::min(limit - block * size, size);
      const uint8_t* row = nullptr;
      if (block < full) {
        row = c_.table + c_.rows[seq_ * c_.width + block] * c_.row_bytes;
        load_channels(row);
      }
      for (long t = begin; t < end; t += kTokens) {
        const long count = std::min(kTokens, end - t);
        row ? unpack(row, t, count) : copy(t, count);
        attend(q, count);
      }
    }
  }

  // A key is its number times the channel's scale, plus the channel's offset.
  void load_channels(const uint8_t* row) {
    const uint8_t *scales = row + c_.parts.key_scales, *zeros = row + c_.parts.key_zeros;
    const long first = kv_head_ * c_.head_dim;
    for (long d = 0; d < c_.head_dim; d += kTile) {
      __m512 scale, offset = _mm512_setzero_ps();
      if constexpr (kKind == kFp8) {
        scale = _mm512_set1_ps(half(scales + 2 * kv_head_));
        offset = halves(zeros + 2 * (first + d));
      } else {
        scale = halves(scales + 2 * (first + d));
      }
      if constexpr (kKind == kInt4)
        offset = _mm512_sub_ps(offset, _mm512_mul_ps(scale, whole(zeros + first + d)));
      store(s_.scales + d, scale, 0xffff);
      store(s_.offsets + d, offset, 0xffff);
    }
  }

  void unpack(const uint8_t* row, long first, long count) {
    const long dim = c_.head_dim, bytes = kKind == kInt4 ? dim / 2 : dim;
    for (long t = 0; t < count; t++) {
      const long token = (first + t) * c_.num_kv_heads + kv_head_;
      const uint8_t* keys = row + c_.parts.keys + token * bytes;
      const uint8_t* values = row + c_.parts.values + token * bytes;
      const float scale = half(row + c_.parts.value_scales + 2 * token);
      const float offset =
          kKind == kInt4 ? -scale * (int8_t)row[c_.parts.value_zeros + token] : 0.0f;
      for (long d = 0; d < dim; d += kTile) {
        const __m512 key = _mm512_fmadd_ps(numbers<kKind>(keys, d, dim), load(s_.scales + d),
                                           load(s_.offsets + d));
        const __m512 value = _mm512_fmadd_ps(numbers<kKind>(values, d, dim), _mm512_set1_ps(scale),
                                             _mm512_set1_ps(offset));
        store(s_.keys + t * dim + d, key, 0xffff);
        store(s_.values + t * dim + d, value, 0xffff);
      }
    }
  }

  // Tokens of the tail.
  void copy(long first, long count) {
    c_.wide_tail ? copy_as<float>(first, count) : copy_as<bf16>(first, count);
  }

  template <typename T>
  void copy_as(long first, long count) {
    const long dim = c_.head_dim, plane = c_.num_kv_heads * dim;
    const T* tail = (const T*)(c_.tails + seq_ * c_.tail_bytes) + kv_head_ * dim;
    for (long t = 0; t < count; t++)
      for (long d = 0; d < dim; d += kTile) {
        const T* key = tail + (first + t) * 2 * plane + d;
        store(s_.keys + t * dim + d, load(key), 0xffff);
        store(s_.values + t * dim + d, load(key + plane), 0xffff);
      }
  }

  void attend(const float* q, long count) {
    const long dim = c_.head_dim;
    for (long g = 0; g < heads_; g++) {
      alignas(64) float score[kTokens];
      for (long t = 0; t < count; t++) {
        __m512 sum = _mm512_setzero_ps();
        for (long d = 0; d < dim; d += kTile)
          sum = _mm512_fmadd_ps(load(q + g * dim + d), load(s_.keys + t * dim + d), sum);
        score[t] = _mm512_reduce_add_ps(sum) * c_.scale;
      }
      const __mmask16 seen = first(count);
      const __m512 scores = load(score, seen);
      const float largest = std::max(largest_[g], _mm512_mask_reduce_max_ps(seen, scores));
      const __m512 top = _mm512_set1_ps(largest);
      const __m512 weights = _mm512_maskz_mov_ps(seen, exp2_ps(_mm512_sub_ps(scores, top)));
      const __m512 before = exp2_ps(_mm512_sub_ps(_mm512_set1_ps(largest_[g]), top));
      largest_[g] = largest;
      total_[g] = total_[g] * _mm512_cvtss_f32(before) + _mm512_reduce_add_ps(weights);
      store(score, weights, 0xffff);
      for (long d = 0; d < dim; d += kTile) {
        float* to = s_.out + g * dim + d;
        __m512 sum = _mm512_mul_ps(load(to), before);
        for (long t = 0; t < count; t++)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(score[t]), load(s_.values + t * dim + d), sum);
        store(to, sum, 0xffff);
      }
    }
  }

  const Call& c_;
  Scratch& s_;
  const long seq_, kv_head_, heads_;
  long first_;
  float largest_[kHeads], total_[kHeads];
};

template <Kind kKind>
void attend_all(const Call& call, long sequences, int threads) {
  const long group = call.num_heads / call.num_kv_heads, parts = (group + kHeads - 1) / kHeads;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1) collapse(3)
    for (long seq = 0; seq < sequences; seq++)
      for (long kv_head = 0; kv_head < call.num_kv_heads; kv_head++)
        for (long part = 0; part < parts; part++) {
          const long head = part * kHeads;
          Query<kKind>(call, scratch, seq, kv_head, kv_head * group + head,
                       std::min(kHeads, group - head))
              .run();
        }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// One query of each sequence, float32; head_dim a multiple of 16 (int4: of 32) and at most 256.
// kind 0: fp8, 1: int8, 2: int4. `parts` are offsets in a block's row; `wide_tail`: tails are
// float32, not bfloat16. window 0: no window; the three pointers may be null.
extern "C" void baton_quantized_attention(
    const float* q, float* out, const float* anchored, const uint8_t* table, const int64_t* rows,
    const int64_t* full, const uint8_t* tails, const int64_t* slots, const int32_t* windows,
    const int32_t* sinks, const int64_t* parts, long sequences, long width, long row_bytes,
    long tail_bytes, long num_heads, long num_kv_heads, long head_dim, long block_size, long window,
    float scale, int kind, int wide_tail, int threads) {
  Parts offsets;
  std::memcpy(&offsets, parts, sizeof offsets);
  const Call call{q,         out,        anchored,  table,        rows,     full,
                  tails,     slots,      windows,   sinks,        offsets,  width,
                  row_bytes, tail_bytes, num_heads, num_kv_heads, head_dim, block_size,
                  window,    scale * 1.44269504f, kind, wide_tail};
  if (kind == kFp8) return attend_all<kFp8>(call, sequences, threads);
  if (kind == kInt8) return attend_all<kInt8>(call, sequences, threads);
  attend_all<kInt4>(call, sequences, threads);
}
