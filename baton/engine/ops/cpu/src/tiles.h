// The one product everything is made of: C[rows][32] (+)= A[rows][depth] * B, with B packed.
//
// Packed B of one group of 32 columns: [depth / 32][2 tiles][16 pairs][16 columns][2 values], the
// layout of AMX's second operand, which is also one 16-lane vector of pairs per 64 bytes for
// AVX512-BF16. Both variants add the products of a column in order of depth.
#pragma once
#include "common.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {

#ifdef __AMX_BF16__

// Tile registers of the calling thread, for A with up to `rows` (1 to 32) rows.
class Tiles {
 public:
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

  // C is [rows][ldc] float32. `rows` is the configured number, or 16 of more; with 16 `columns`
  // only the first tile of the group is computed.
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

class Tiles {
 public:
  explicit Tiles(long) {}

  template <bool kAdd>
  void multiply(const bf16* a, long lda, const bf16* b, long depth, float* c, long ldc, long rows,
                long columns) const {
    long row = 0;
    for (; row + 12 <= rows; row += 12) rows_of<kAdd, 12>(a, lda, b, depth, c, ldc, columns, row);
    for (; row + 4 <= rows; row += 4) rows_of<kAdd, 4>(a, lda, b, depth, c, ldc, columns, row);
    for (; row < rows; row++) rows_of<kAdd, 1>(a, lda, b, depth, c, ldc, columns, row);
  }

 private:
  template <bool kAdd, int kRows>
  static void rows_of(const bf16* a, long lda, const bf16* b, long depth, float* c, long ldc,
                      long columns, long row) {
    a += row * lda;
    c += row * ldc;
    if (columns > kTile) return block<kAdd, kRows, 2>(a, lda, b, depth, c, ldc);
    return block<kAdd, kRows, 1>(a, lda, b, depth, c, ldc);
  }

  template <bool kAdd, int kRows, int kWide>
  static void block(const bf16* a, long lda, const bf16* b, long depth, float* c, long ldc) {
    __m512 sum[kRows][kWide];
    for (int r = 0; r < kRows; r++)
      for (int w = 0; w < kWide; w++)
        sum[r][w] = kAdd ? _mm512_loadu_ps(c + r * ldc + w * kTile) : _mm512_setzero_ps();
    for (long k = 0; k < depth; k += kDepth, a += kDepth, b += kGroupDepth)
      for (long pair = 0; pair < kTile; pair++) {
        __m512bh columns[kWide];
        for (int w = 0; w < kWide; w++)
          columns[w] = (__m512bh)_mm512_loadu_si512(b + w * kGroupDepth / 2 + pair * kDepth);
        for (int r = 0; r < kRows; r++) {
          int32_t both;
          std::memcpy(&both, a + r * lda + 2 * pair, sizeof both);
          const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
          for (int w = 0; w < kWide; w++) sum[r][w] = _mm512_dpbf16_ps(sum[r][w], value, columns[w]);
        }
      }
    for (int r = 0; r < kRows; r++)
      for (int w = 0; w < kWide; w++) _mm512_storeu_ps(c + r * ldc + w * kTile, sum[r][w]);
  }
};

inline bool enable_tiles() { return true; }

#endif

}  // namespace baton
