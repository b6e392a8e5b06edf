// Rows of bytes from place to place with their XXH3-64, each byte read from memory once.
// The hash is that of Yann Collet's xxHash (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md)
// for seed 0 and inputs of more than 240 bytes, here of whole stripes.
#include "common.h"

namespace baton {
namespace {

constexpr long kStripe = 64;
constexpr long kStripesPerBlock = 16;
constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
constexpr uint64_t kAvalanche = 0x165667919E3779F9;

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t word(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
  const auto product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

class Digest {
 public:
  void add(__m512i data) {
    accumulate(data, kSecret + 8 * stripe_);
    if (++stripe_ == kStripesPerBlock) {
      scramble();
      stripe_ = 0;
    }
  }

  // Of `length` bytes that end with this stripe.
  uint64_t finish(__m512i last, uint64_t length) {
    accumulate(last, kSecret + sizeof kSecret - kStripe - 7);
    alignas(64) uint64_t sums[8];
    _mm512_store_si512(sums, sums_);
    uint64_t hash = length * kPrime64[0];
    for (int i = 0; i < 4; ++i) {
      const uint8_t* key = kSecret + 11 + 16 * i;
      hash += folded_product(sums[2 * i] ^ word(key), sums[2 * i + 1] ^ word(key + 8));
    }
    hash = (hash ^ (hash >> 37)) * kAvalanche;
    return hash ^ (hash >> 32);
  }

 private:
  void accumulate(__m512i data, const uint8_t* secret) {
    const __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    const __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
    sums_ = _mm512_add_epi64(product, _mm512_add_epi64(sums_, swapped));
  }

  void scramble() {
    const __m512i prime = _mm512_set1_epi64(kPrime32[0]);
    const __m512i mixed = _mm512_xor_si512(sums_, _mm512_srli_epi64(sums_, 47));
    const __m512i keyed = _mm512_xor_si512(mixed, _mm512_load_si512(kSecret + 128));
    sums_ = _mm512_mullo_epi64(keyed, prime);
  }

  __m512i sums_ = _mm512_set_epi64(kPrime32[0], kPrime64[4], kPrime32[1], kPrime64[3], kPrime64[2],
                                   kPrime64[1], kPrime64[0], kPrime32[2]);
  long stripe_ = 0;
};

template <bool kStreamed>
inline __m512i copy_stripe(const uint8_t* from, uint8_t* to) {
  const __m512i data = _mm512_loadu_si512(from);
  kStreamed ? _mm512_stream_si512((__m512i*)to, data) : _mm512_storeu_si512(to, data);
  return data;
}

// One side of a copy: rows in planes `stride` bytes apart.
struct Rows {
  uint8_t* memory;
  long stride;
  const int64_t* rows;
  uint8_t* at(long plane, long number, long row_bytes) const {
    return memory + plane * stride + rows[number] * row_bytes;
  }
};

template <bool kHashed, bool kStreamed>
uint64_t copy(const Rows& source, const Rows& target, long planes, long count, long row_bytes) {
  Digest digest;
  __m512i data = _mm512_setzero_si512();
  for (long plane = 0; plane < planes; ++plane) {
    for (long row = 0; row < count; ++row) {
      const uint8_t* from = source.at(plane, row, row_bytes);
      uint8_t* to = target.at(plane, row, row_bytes);
      const bool is_last = plane + 1 == planes && row + 1 == count;
      const long end = row_bytes - (is_last ? kStripe : 0);
      for (long at = 0; at < end; at += kStripe) {
        data = copy_stripe<kStreamed>(from + at, to + at);
        if (kHashed) digest.add(data);
      }
      if (is_last) data = copy_stripe<kStreamed>(from + end, to + end);
    }
  }
  _mm_sfence();  // streamed stores are in no order of their own
  return kHashed ? digest.finish(data, (uint64_t)planes * count * row_bytes) : 0;
}

}  // namespace
}  // namespace baton

// `count` rows of every plane in turn. `row_bytes` is a multiple of 64; hashed: more than 240 bytes
// in all. `streamed`: past the caches, to targets at multiples of 64 that nobody reads soon.
extern "C" uint64_t baton_copy_rows(void* source, long source_stride, const int64_t* source_rows,
                                    void* target, long target_stride, const int64_t* target_rows,
                                    long planes, long count, long row_bytes, int hashed,
                                    int streamed) {
  const baton::Rows from{(uint8_t*)source, source_stride, source_rows};
  const baton::Rows to{(uint8_t*)target, target_stride, target_rows};
  const auto copy = hashed ? (streamed ? baton::copy<true, true> : baton::copy<true, false>)
                           : (streamed ? baton::copy<false, true> : baton::copy<false, false>);
  return copy(from, to, planes, count, row_bytes);
}
