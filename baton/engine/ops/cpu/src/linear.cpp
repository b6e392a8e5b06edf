// y = x W^T for a constant W, at any number of rows: decode reads the weights once at the speed of
// memory, prefill keeps a group of weights in cache while the rows pass.
#include "tiles.h"

namespace baton {
namespace {

constexpr long kRows = 2 * kTile;    // rows of one product
constexpr long kChunk = 8 * kRows;   // rows that one thread takes through all its weights at once

enum Finish : int { kStoreBf16 = 0, kStoreFloat = 1, kAddFloat = 2, kSiluAndMul = 3 };

struct Job {
  const bf16* x;
  const bf16* weight;
  const float* bias;  // per packed column, or null
  void* out;
  long rows, outputs, depth;
  int finish;
};

// One row of 32 finished sums of group `group`.
inline void finish_row(const Job& job, const float* sums, long row, long group) {
  const long column = group * kGroup;
  __m512 left = _mm512_loadu_ps(sums), right = _mm512_loadu_ps(sums + kTile);
  if (job.bias) {
    left = _mm512_add_ps(left, _mm512_loadu_ps(job.bias + column));
    right = _mm512_add_ps(right, _mm512_loadu_ps(job.bias + column + kTile));
  }
  if (job.finish == kSiluAndMul) {  // the group's first tile is gate, its second up
    const __m512 power = exp2_ps(_mm512_mul_ps(left, _mm512_set1_ps(-1.44269504f)));
    const __m512 gate = _mm512_div_ps(left, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
    store_bf16((bf16*)job.out + row * job.outputs + group * kTile, _mm512_mul_ps(gate, right));
    return;
  }
  const __mmask16 l = first(job.outputs - column), r = first(job.outputs - column - kTile);
  const long at = row * job.outputs + column;
  if (job.finish == kStoreBf16) {
    store_bf16((bf16*)job.out + at, left, l);
    store_bf16((bf16*)job.out + at + kTile, right, r);
    return;
  }
  float* out = (float*)job.out + at;
  if (job.finish == kAddFloat) {
    left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(l, out));
    right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(r, out + kTile));
  }
  _mm512_mask_storeu_ps(out, l, left);
  _mm512_mask_storeu_ps(out + kTile, r, right);
}

void product(const Job& job, const Tiles& tiles, long row, long rows, long group) {
  alignas(64) float sums[kRows * kGroup];
  tiles.multiply<false>(job.x + row * job.depth, job.depth, job.weight + group * kGroup * job.depth,
                        job.depth, sums, kGroup, rows, kGroup);
  for (long i = 0; i < rows; i++) finish_row(job, sums + i * kGroup, row + i, group);
}

// Rows [begin, end) times groups [first_group, last_group).
void chunk(const Job& job, long begin, long end, long first_group, long last_group) {
  const long whole = begin + (end - begin) / kRows * kRows;
  if (whole > begin) {
    const Tiles tiles(kRows);
    for (long group = first_group; group < last_group; group++)
      for (long row = begin; row < whole; row += kRows) product(job, tiles, row, kRows, group);
  }
  if (end > whole) {
    const Tiles tiles(end - whole);
    for (long group = first_group; group < last_group; group++)
      product(job, tiles, whole, end - whole, group);
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// `weight` (outputs, depth), depth a multiple of 32, into groups; outputs past the end are zeros.
extern "C" void baton_pack(const bf16* weight, bf16* packed, long outputs, long depth) {
  const long groups = (outputs + kGroup - 1) / kGroup;
  for (long group = 0; group < groups; group++)
    for (long k = 0; k < depth; k += 2)
      for (long column = 0; column < kGroup; column++) {
        const long output = group * kGroup + column, pair = k % kDepth / 2;
        bf16* to = packed + group * kGroup * depth + k / kDepth * kGroupDepth +
                   column / kTile * kGroupDepth / 2 + pair * kDepth + column % kTile * 2;
        to[0] = output < outputs ? weight[output * depth + k] : 0;
        to[1] = output < outputs ? weight[output * depth + k + 1] : 0;
      }
}

// x (rows, depth) times packed weights of `packed_outputs` rows. out is (rows, outputs) in the
// form that `finish` names; kSiluAndMul has half as many outputs as packed rows.
extern "C" void baton_linear(const bf16* x, const bf16* packed, const float* bias, void* out,
                             long rows, long packed_outputs, long depth, int finish, int threads) {
  const long outputs = finish == kSiluAndMul ? packed_outputs / 2 : packed_outputs;
  const Job job{x, packed, bias, out, rows, outputs, depth, finish};
  const long groups = (packed_outputs + kGroup - 1) / kGroup;
  const long chunks = (rows + kChunk - 1) / kChunk;
#pragma omp parallel num_threads(threads)
  {
    const Share mine = share(chunks * groups);
    for (long item = mine.begin; item < mine.end;) {
      const long c = item / groups, group = item % groups;
      const long stop = std::min(groups, group + mine.end - item);
      chunk(job, c * kChunk, std::min(rows, (c + 1) * kChunk), group, stop);
      item += stop - group;
    }
  }
}
