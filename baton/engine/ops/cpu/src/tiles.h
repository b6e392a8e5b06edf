// The one product everything is made of: C[rows][32] (+)= A[rows][depth] * B, with B packed.
//
// A word is 32 bits of a row: two bfloat16 values or one float32. Packed B of one group of 32
// columns: [depth / 32][2 tiles][words][16 columns][values of a word]. Of bfloat16 that is the
// layout of AMX's second operand; of both it is one vector of 16 words per 64 bytes. Every variant
// adds the products of a column in order of depth.
#pragma once
#include "common.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {

template <class T>
constexpr long kPack = sizeof(int32_t) / sizeof(T);  // values of a word

// Where the word of value `k` of `column` is in a packed operand of some depth.
template <class T>
inline long packed_at(long column, long k, long depth) {
  return column / kGroup * kGroup * depth + k / kDepth * kGroupDepth +
         column % kGroup / kTile * kGroupDepth / 2 + k % kDepth / kPack<T> * kTile * kPack<T> +
         column % kTile * kPack<T>;
}

inline __m512 add_products(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

inline __m512 add_products(__m512 sum, __m512bh a, __m512bh b) {
  return _mm512_dpbf16_ps(sum, a, b);
}

inline __m512 words(const float* p) { return _mm512_loadu_ps(p); }
inline __m512bh words(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline __m512 repeated(const float* p) { return _mm512_set1_ps(*p); }

inline __m512bh repeated(const bf16* p) {
  int32_t both;
  std::memcpy(&both, p, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Bytes from the weights in use to those that memory is asked for. They come into the second cache:
// the first has too few requests open at a time to keep memory busy.
constexpr long kAhead = 16384;

template <class T>
class Tiles {
 public:
  static constexpr long kRowStep = 1;  // `rows` are a multiple of it

  explicit Tiles(long) {}

  // C is [rows][ldc] float32; with 16 `columns` only the first tile of the group is computed.
  template <bool kAdd>
  [[gnu::noinline]] void multiply(const T* a, long lda, const T* b, long depth, float* c, long ldc,
                                  long rows, long columns) const {
    for (; rows > kMost; rows -= kMost, a += kMost * lda, c += kMost * ldc)
      rows_of<kAdd, kMost>(a, lda, b, depth, c, ldc, kMost, columns);
    if (rows > 0) rows_of<kAdd, kMost>(a, lda, b, depth, c, ldc, rows, columns);
  }

 private:
  static constexpr int kMost = 12;  // rows whose sums of two tiles stay in registers

  // 1 to kRows rows at once.
  template <bool kAdd, int kRows>
  static void rows_of(const T* a, long lda, const T* b, long depth, float* c, long ldc, long rows,
                      long columns) {
    if constexpr (kRows > 1)
      if (rows < kRows) return rows_of<kAdd, kRows - 1>(a, lda, b, depth, c, ldc, rows, columns);
    if (columns > kTile)
      block<kAdd, kRows, 2>(a, lda, b, depth, c, ldc);
    else
      block<kAdd, kRows, 1>(a, lda, b, depth, c, ldc);
  }

  template <bool kAdd, int kRows, int kWide>
  static void block(const T* a, long lda, const T* b, long depth, float* c, long ldc) {
    using Words = decltype(words(b));
    __m512 sum[kRows][kWide];
    for (int r = 0; r < kRows; r++)
      for (int w = 0; w < kWide; w++)
        sum[r][w] = kAdd ? _mm512_loadu_ps(c + r * ldc + w * kTile) : _mm512_setzero_ps();
    const auto add = [&](long i) {
      Words columns[kWide];
      for (int w = 0; w < kWide; w++) {
        const T* at = b + w * kGroupDepth / 2 + i * kTile;
        columns[w] = words(at);
        if (!kAdd) _mm_prefetch((const char*)at + kAhead, _MM_HINT_T1);
      }
      for (int r = 0; r < kRows; r++) {
        const Words value = repeated(a + r * lda + i);
        for (int w = 0; w < kWide; w++) sum[r][w] = add_products(sum[r][w], value, columns[w]);
      }
    };
    for (long k = 0; k < depth; k += kDepth, a += kDepth, b += kGroupDepth)
      if constexpr (kRows == 1) {  // waits for memory, the longer the fewer loads there are in sight
#pragma GCC unroll 16
        for (long i = 0; i < kDepth; i += kPack<T>) add(i);
      } else {
        for (long i = 0; i < kDepth; i += kPack<T>) add(i);
      }
    for (int r = 0; r < kRows; r++)
      for (int w = 0; w < kWide; w++) _mm512_storeu_ps(c + r * ldc + w * kTile, sum[r][w]);
  }
};

#ifdef __AMX_BF16__

// Tile registers of the calling thread, for A with up to `rows` (1 to 32) rows.
template <>
class Tiles<bf16> {
 public:
  static constexpr long kRowStep = kTile;
  explicit Tiles(long rows) {
    alignas(64) uint8_t config[64] = {1};
    uint16_t* bytes = (uint16_t*)(config + 16);
    const long upper = std::min(rows, kTile), lower = std::max(rows - kTile, 1L);
    const long count[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
    for (int tile = 0; tile < 8; tile++) {
      bytes[tile] = 64;
      config[48 + tile] = (uint8_t)count[tile];
    }
    _tile_loadconfig(config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // `rows` is the configured number, or 16 of more.
  template <bool kAdd>
  void multiply(const bf16* a, long lda, const bf16* b, long depth, float* c, long ldc, long rows,
                long columns) const {
    const bool low = rows > kTile, right = columns > kTile;
    float* c2 = c + kTile * ldc;
    if (low && right) return block<kAdd, true, true>(a, lda, b, depth, c, c2, ldc);
    if (low) return block<kAdd, true, false>(a, lda, b, depth, c, c2, ldc);
    if (right) return block<kAdd, false, true>(a, lda, b, depth, c, c2, ldc);
    return block<kAdd, false, false>(a, lda, b, depth, c, c2, ldc);
  }

 private:
  template <bool kAdd, bool kLow, bool kRight>
  static void block(const bf16* a, long lda, const bf16* b, long depth, float* c, float* c2,
                    long ldc) {
    const long stride = ldc * sizeof(float), row = lda * sizeof(bf16);
    if (kAdd) {
      _tile_loadd(0, c, stride);
      if (kRight) _tile_loadd(1, c + kTile, stride);
      if (kLow) _tile_loadd(2, c2, stride);
      if (kLow && kRight) _tile_loadd(3, c2 + kTile, stride);
    } else {
      _tile_zero(0);
      if (kRight) _tile_zero(1);
      if (kLow) _tile_zero(2);
      if (kLow && kRight) _tile_zero(3);
    }
    for (long k = 0; k < depth; k += kDepth, a += kDepth, b += kGroupDepth) {
      _tile_loadd(4, a, row);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (kRight) {
        _tile_loadd(7, b + kGroupDepth / 2, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (kLow) {
        _tile_loadd(5, a + kTile * lda, row);
        _tile_dpbf16ps(2, 5, 6);
        if (kRight) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, stride);
    if (kRight) _tile_stored(1, c + kTile, stride);
    if (kLow) _tile_stored(2, c2, stride);
    if (kLow && kRight) _tile_stored(3, c2 + kTile, stride);
  }
};

// Linux gives a process the tile registers only when it asks.
inline bool enable_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

inline bool enable_tiles() { return true; }

#endif

}  // namespace baton
