// Quantized blocks, read in place as float32, and the tokens that are still exact. How numbers are
// stored is said in kv/numbers.py and kv/codec.py; a row of the table is a block in one layer.
#pragma once
#include "scratch.h"

namespace baton {

enum Kind : int { kFp8 = 0, kInt8 = 1, kInt4 = 2 };

struct QuantizedCache {
  uint8_t* rows;          // (block, row_bytes) of one layer
  const int32_t* tables;  // (sequence, table_width) blocks
  const int32_t* tails;   // (sequence, tail_width) rows that hold the newest tokens, side by side
  const int64_t* parts;   // where in a row begin: scales, zero points and numbers of keys, of values
  long row_bytes, table_width, tail_width, num_kv_heads, head_dim, block_size;
  int kind;
};

// Tokens of full blocks.
class QuantizedTokens {
 public:
  QuantizedTokens(const QuantizedCache& cache, long seq, long kv_head)
      : cache_(cache), table_(cache.tables + seq * cache.table_width), kv_head_(kv_head) {}

  // As of `PagedTokens`.
  void locate(long token, long from, long limit) {
    begin_ = std::max(0L, from - token);
    end_ = std::max(0L, std::min(kTokens, limit - token));
    const long size = cache_.block_size, bytes = head_bytes();
    long block = token / size, slot = token % size;
    for (long t = 0; t < end_; t++) {
      if (t >= begin_) {
        row_[t] = cache_.rows + table_[block] * cache_.row_bytes;
        slot_[t] = slot;
        for (long plane = 0; plane < 2; plane++)
          for (long i = 0; i < bytes; i += 64)
            _mm_prefetch((const char*)(numbers(t, plane) + i), _MM_HINT_T0);
      }
      if (++slot == size) slot = 0, block++;
    }
  }

  void load(Scratch<float>& s, long dim) const {
    switch (cache_.kind) {
      case kFp8: return load_as<kFp8>(s, dim);
      case kInt8: return load_as<kInt8>(s, dim);
      default: return load_as<kInt4>(s, dim);
    }
  }

 private:
  template <int kKind>
  void load_as(Scratch<float>& s, long dim) const {
    for (long d = 0; d < dim; d += kTile) {
      __m512 key_scale = _mm512_setzero_ps(), key_zero = _mm512_setzero_ps();
      for (long t = 0; t < kTokens; t++) {
        __m512 key = _mm512_setzero_ps(), value = _mm512_setzero_ps();
        if (t >= begin_ && t < end_ && d < cache_.head_dim) {
          if (t == begin_ || slot_[t] == 0) {
            key_scale = kKind == kFp8 ? half(part(t, 0), kv_head_) : halves(part(t, 0), d);
            key_zero = zeros<kKind>(part(t, 1), d);
          }
          const long token = slot_[t] * cache_.num_kv_heads + kv_head_;
          const __m512 value_scale = half(part(t, 3), token);
          key = numbers_as<kKind>(numbers(t, 0), d, key_scale, key_zero);
          const __m512 value_zero =
              kKind == kInt4 ? _mm512_set1_ps((float)(int8_t)part(t, 4)[token]) : _mm512_setzero_ps();
          value = numbers_as<kKind == kFp8 ? kFp8Plain : kKind>(numbers(t, 1), d, value_scale,
                                                                value_zero);
        }
        _mm512_store_ps(s.keys + t * dim + d, key);
        _mm512_store_ps(s.values + packed_at<float>(d, t, kTokens), value);
      }
    }
  }

  static constexpr int kFp8Plain = 3;  // fp8 without a zero point

  long channel(long d) const { return kv_head_ * cache_.head_dim + d; }
  long head_bytes() const { return cache_.kind == kInt4 ? cache_.head_dim / 2 : cache_.head_dim; }
  const uint8_t* part(long t, long index) const { return row_[t] + cache_.parts[index]; }

  // Of the head, in the keys or in the values.
  const uint8_t* numbers(long t, long plane) const {
    return part(t, 3 * plane + 2) + (slot_[t] * cache_.num_kv_heads + kv_head_) * head_bytes();
  }

  static __m512 half(const uint8_t* from, long index) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(((const int16_t*)from)[index]));
  }

  // Of the head's channels [d, d + 16).
  __m512 halves(const uint8_t* from, long d) const {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(dims(d), (const int16_t*)from + channel(d)));
  }

  __mmask16 dims(long d) const { return first(cache_.head_dim - d); }

  template <int kKind>
  __m512 zeros(const uint8_t* from, long d) const {
    if (kKind == kFp8) return halves(from, d);
    if (kKind == kInt8) return _mm512_setzero_ps();
    const __m128i steps = _mm_maskz_loadu_epi8(dims(d), from + channel(d));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(steps));
  }

  // Dimensions [d, d + 16) of a head.
  template <int kKind>
  __m512 numbers_as(const uint8_t* from, long d, __m512 scale, __m512 zero) const {
    if (kKind == kInt4) {
      const __m512 steps = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(nibbles(from, d)));
      return _mm512_mul_ps(_mm512_sub_ps(steps, zero), scale);
    }
    const __m128i bytes = _mm_maskz_loadu_epi8(dims(d), from + d);
    if (kKind == kInt8) return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
    const __m512 value = _mm512_mul_ps(from_e4m3(bytes), scale);
    return kKind == kFp8 ? _mm512_add_ps(value, zero) : value;
  }

  // The first half of a head's values are low nibbles, the second high ones.
  __m128i nibbles(const uint8_t* from, long d) const {
    const long half = cache_.head_dim / 2;
    const __mmask16 low = first(half - d);
    const __m128i a = _mm_maskz_loadu_epi8(low, from + d);
    const __m128i b = _mm_maskz_loadu_epi8(dims(d) & ~low, from + d - half);
    const __m128i mask = _mm_set1_epi8(15);
    return _mm_or_si128(_mm_and_si128(a, mask), _mm_and_si128(_mm_srli_epi16(b, 4), mask));
  }

  // By way of float16, whose exponent is biased by 8 more.
  static __m512 from_e4m3(__m128i bytes) {
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(size, sign)), _mm512_set1_ps(256.0f));
  }

  const QuantizedCache& cache_;
  const int32_t* table_;
  const long kv_head_;
  const uint8_t* row_[kTokens];
  long slot_[kTokens], begin_ = 0, end_ = 0;
};

// A sequence's tail: (slot, key|value, kv head, head_dim) of the block that is not full, in rows
// that need not end with a token.
template <class T>
class Tail {
 public:
  Tail(const QuantizedCache& cache, long seq)
      : cache_(cache), rows_(cache.tails + seq * cache.tail_width) {}

  void read(long slot, long plane, long kv_head, T* to) const {
    copy(((slot * 2 + plane) * cache_.num_kv_heads + kv_head) * cache_.head_dim * sizeof(T),
         cache_.head_dim * sizeof(T),
         [&](uint8_t* at, long done, long count) { std::memcpy((uint8_t*)to + done, at, count); });
  }

  // Keys and values of all heads.
  void write(long slot, const T* from) const {
    const long size = 2 * cache_.num_kv_heads * cache_.head_dim * sizeof(T);
    copy(slot * size, size, [&](uint8_t* at, long done, long count) {
      std::memcpy(at, (const uint8_t*)from + done, count);
    });
  }

 private:
  template <class Piece>
  void copy(long offset, long size, const Piece& piece) const {
    for (long done = 0; done < size;) {
      const long row = (offset + done) / cache_.row_bytes, within = (offset + done) % cache_.row_bytes;
      const long count = std::min(size - done, cache_.row_bytes - within);
      piece(cache_.rows + rows_[row] * cache_.row_bytes + within, done, count);
      done += count;
    }
  }

  const QuantizedCache& cache_;
  const int32_t* rows_;
};

// The batch's own keys and values, (token, key|value, kv head, head_dim) with `stride` values from
// token to token.
template <class T>
struct Fresh {
  const T* kv;
  long stride;
};

// Tokens as they were computed: in the tail before `before`, from there on the batch's own.
template <class T>
class ExactTokens {
 public:
  ExactTokens(const QuantizedCache& cache, const Fresh<T>& fresh, long seq, long kv_head,
              long first_query, long before)
      : cache_(cache), fresh_(fresh), tail_(cache, seq), kv_head_(kv_head),
        first_query_(first_query), before_(before) {}

  void locate(long token, long from, long limit) {
    token_ = token;
    begin_ = std::max(0L, from - token);
    end_ = std::max(0L, std::min(kTokens, limit - token));
  }

  void load(Scratch<float>& s, long dim) const {
    for (long t = 0; t < kTokens; t++) {
      alignas(64) T copy[2][kMaxDim];
      const T *key = nullptr, *value = nullptr;
      if (t >= begin_ && t < end_) find(token_ + t, copy, key, value);
      for (long d = 0; d < dim; d += kTile) {
        const __mmask16 mask = key ? first(cache_.head_dim - d) : 0;
        _mm512_store_ps(s.keys + t * dim + d, baton::load(key + d, mask));
        _mm512_store_ps(s.values + packed_at<float>(d, t, kTokens), baton::load(value + d, mask));
      }
    }
  }

 private:
  void find(long place, T (&copy)[2][kMaxDim], const T*& key, const T*& value) const {
    if (place >= before_) {
      key = fresh_.kv + (first_query_ + place - before_) * fresh_.stride + kv_head_ * cache_.head_dim;
      value = key + cache_.num_kv_heads * cache_.head_dim;
      return;
    }
    tail_.read(place % cache_.block_size, 0, kv_head_, copy[0]);
    tail_.read(place % cache_.block_size, 1, kv_head_, copy[1]);
    key = copy[0], value = copy[1];
  }

  const QuantizedCache& cache_;
  const Fresh<T>& fresh_;
  const Tail<T> tail_;
  const long kv_head_, first_query_, before_;
  long token_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace baton
