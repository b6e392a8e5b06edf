// y = x W^T for a constant W, at any number of rows: decode reads the weights once at the speed of
// memory, prefill keeps a group of weights in cache while the rows pass.
#include "tiles.h"

namespace baton {
namespace {

constexpr long kRows = 2 * kTile;    // rows of one product
constexpr long kChunk = 8 * kRows;   // rows that one thread takes through all its weights at once

enum Finish : int {
  kStore = 0,
  kStoreFloat = 1,
  kAddFloat = 2,
  kSiluAndMul = 3,
  kGeluAndMul = 4,
  kSilu = 5,
  kGelu = 6
};

template <class T>
struct Job {
  const T* x;
  const T* weight;
  const float* bias;  // per packed column, or null
  void* out;
  long rows, outputs, depth;
  int finish;
};

inline bool gates(int finish) { return finish == kSiluAndMul || finish == kGeluAndMul; }

// x * sigmoid(x), or GELU in its tanh form, which is x * sigmoid(2 root(2 / pi) (x + 0.044715 x^3)).
inline __m512 activate(__m512 x, int finish) {
  __m512 inner = x;
  if (finish == kGeluAndMul || finish == kGelu) {
    const __m512 square = _mm512_mul_ps(x, x), cubic = _mm512_set1_ps(0.044715f * 1.5957691216f);
    inner = _mm512_mul_ps(x, _mm512_fmadd_ps(square, cubic, _mm512_set1_ps(1.5957691216f)));
    inner = _mm512_max_ps(_mm512_min_ps(inner, _mm512_set1_ps(1e3f)), _mm512_set1_ps(-1e3f));
  }
  const __m512 power = exp2_ps(_mm512_mul_ps(inner, _mm512_set1_ps(-1.44269504f)));
  return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
}

// One row of 32 finished sums of group `group`.
template <class T>
inline void finish_row(const Job<T>& job, const float* sums, long row, long group) {
  const long column = group * kGroup;
  __m512 left = _mm512_loadu_ps(sums), right = _mm512_loadu_ps(sums + kTile);
  if (job.bias) {
    left = _mm512_add_ps(left, _mm512_loadu_ps(job.bias + column));
    right = _mm512_add_ps(right, _mm512_loadu_ps(job.bias + column + kTile));
  }
  if (gates(job.finish)) {  // the group's first tile is gate, its second up
    store((T*)job.out + row * job.outputs + group * kTile,
          _mm512_mul_ps(activate(left, job.finish), right), 0xffff);
    return;
  }
  const __mmask16 l = first(job.outputs - column), r = first(job.outputs - column - kTile);
  const long at = row * job.outputs + column;
  if (job.finish == kSilu || job.finish == kGelu)
    left = activate(left, job.finish), right = activate(right, job.finish);
  if (job.finish != kStoreFloat && job.finish != kAddFloat) {
    store((T*)job.out + at, left, l);
    store((T*)job.out + at + kTile, right, r);
    return;
  }
  float* out = (float*)job.out + at;
  if (job.finish == kAddFloat) {
    left = _mm512_add_ps(left, load(out, l));
    right = _mm512_add_ps(right, load(out + kTile, r));
  }
  store(out, left, l);
  store(out + kTile, right, r);
}

template <class T>
void product(const Job<T>& job, const Tiles<T>& tiles, long row, long rows, long group) {
  alignas(64) float sums[kRows * kGroup];
  tiles.template multiply<false>(job.x + row * job.depth, job.depth, job.weight + group * kGroup * job.depth,
                        job.depth, sums, kGroup, rows, kGroup);
  for (long i = 0; i < rows; i++) finish_row(job, sums + i * kGroup, row + i, group);
}

// Rows [begin, end) times groups [first_group, last_group).
template <class T>
void chunk(const Job<T>& job, long begin, long end, long first_group, long last_group) {
  const long whole = begin + (end - begin) / kRows * kRows;
  if (whole > begin) {
    const Tiles<T> tiles(kRows);
    for (long group = first_group; group < last_group; group++)
      for (long row = begin; row < whole; row += kRows) product(job, tiles, row, kRows, group);
  }
  if (end > whole) {
    const Tiles<T> tiles(end - whole);
    for (long group = first_group; group < last_group; group++)
      product(job, tiles, whole, end - whole, group);
  }
}

// `weight` (outputs, depth), depth a multiple of 32, into groups; outputs past the end are zeros.
template <class T>
void pack(const T* weight, T* packed, long outputs, long depth) {
  const long padded = (outputs + kGroup - 1) / kGroup * kGroup;
  for (long output = 0; output < padded; output++)
    for (long k = 0; k < depth; k += kPack<T>) {
      T* to = packed + packed_at<T>(output, k, depth);
      for (long i = 0; i < kPack<T>; i++) to[i] = output < outputs ? weight[output * depth + k + i] : 0;
    }
}

// x (rows, depth) times packed weights of `packed_outputs` rows. out is (rows, outputs) in the
// form that `finish` names; gated forms have half as many outputs as packed rows.
template <class T>
void linear(const T* x, const T* packed, const float* bias, void* out, long rows,
            long packed_outputs, long depth, int finish, int threads) {
  const long outputs = gates(finish) ? packed_outputs / 2 : packed_outputs;
  const Job<T> job{x, packed, bias, out, rows, outputs, depth, finish};
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

}  // namespace
}  // namespace baton

using namespace baton;

#define BATON_LINEAR(T)                                                                          \
  extern "C" void baton_pack_##T(const T* weight, T* packed, long outputs, long depth) {          \
    pack(weight, packed, outputs, depth);                                                         \
  }                                                                                               \
  extern "C" void baton_linear_##T(const T* x, const T* packed, const float* bias, void* out,     \
                                   long rows, long packed_outputs, long depth, int finish,        \
                                   int threads) {                                                 \
    linear(x, packed, bias, out, rows, packed_outputs, depth, finish, threads);                   \
  }

BATON_LINEAR(bf16)
BATON_LINEAR(float)
