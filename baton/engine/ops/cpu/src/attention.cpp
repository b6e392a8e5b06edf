#include "paged.h"
#include "pass.h"
#include "quantized.h"

namespace baton {
namespace {

template <class T>
void attention(const Queries<T>& call, const PagedCache<T>& cache, int threads) {
  attend<T>(call, threads, [&](Scratch<T>& scratch, const Tiles<T>& tiles, Items<T>& items) {
    Item item{}, next{};
    bool more = items.take(item);
    if (!more) return;
    PagedTokens<T> tokens(cache, item, items.seen(item));
    tokens.ask_first();
    while (more) {
      more = items.take(next);
      PagedTokens<T> coming(cache, next, more ? items.seen(next) : Range{});
      tokens.precede(&coming);
      Pass<T, T> pass(call, scratch, item);
      pass.run([&](const auto& begin, const auto& end) { pass.see(tiles, tokens, begin, end); });
      tokens = coming;
      item = next;
    }
  });
}

// A token sees the block it is in as it was computed, and the blocks before it quantized.
template <class T>
void quantized_attention(const Queries<T>& call, const QuantizedCache& cache, const Fresh<T>& fresh,
                         int threads) {
  const long size = cache.block_size;
  const auto work = [&](Scratch<float>& scratch, const Tiles<float>& tiles, Items<T>& items) {
    for (Item item; items.take(item);) {
      Pass<T, float> pass(call, scratch, item);
      QuantizedTokens full(cache, item.seq, item.kv_head);
      ExactTokens<T> own(cache, fresh, item.seq, item.kv_head, pass.first_query(), pass.before());
      const auto block = [&](long c) { return pass.position(c) / size * size; };
      pass.run([&](const auto& begin, const auto& end) {
        pass.see(tiles, full, begin, [&](long c) { return std::min(end(c), block(c)); });
        pass.see(tiles, own, [&](long c) { return std::max(begin(c), block(c)); }, end);
      });
    }
  };
  attend<float>(call, threads, work);
}

// The newest tokens of each sequence that fill no block go into its tail.
template <class T>
void keep_tails(const Queries<T>& call, const QuantizedCache& cache, const Fresh<T>& fresh) {
  for (long s = 0; s < call.sequences; s++) {
    const long end = call.lengths[s], before = end - (call.starts[s + 1] - call.starts[s]);
    const Tail<T> tail(cache, s);
    for (long t = std::max(before, end / cache.block_size * cache.block_size); t < end; t++)
      tail.write(t % cache.block_size, fresh.kv + (call.starts[s] + t - before) * fresh.stride);
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// q (tokens, num_heads, head_dim) with `q_stride` values from token to token; head_dim even and at
// most 256. Sequence s has the queries starts[s] to starts[s + 1], the last of lengths[s] tokens,
// whose keys and values are all in the cache. window 0: no window. The first sinks[s] tokens are
// met by the queries `anchored`, whatever the window; the three pointers may be null.
#define BATON_ATTENTION(T)                                                                        \
  extern "C" void baton_attention_##T(                                                            \
      const T* q, T* out, const T* keys, const T* values, const int32_t* tables,                  \
      const int32_t* starts, const int32_t* lengths, const T* anchored, const int32_t* windows,   \
      const int32_t* sinks, long sequences, long q_stride, long table_width, long num_heads,      \
      long num_kv_heads, long head_dim, long block_size, long window, float scale, int threads) { \
    const PagedCache<T> cache{keys, values, tables, table_width, num_kv_heads, head_dim,          \
                              block_size};                                                        \
    attention({q, out, starts, lengths, anchored, windows, sinks, sequences, q_stride, num_heads, \
               num_kv_heads, head_dim, window, scale * 1.44269504f},                              \
              cache, threads);                                                                    \
  }

BATON_ATTENTION(bf16)
BATON_ATTENTION(float)

// The same over quantized blocks, which must hold the blocks that the batch fills. `kv` are the
// batch's own tokens; those that fill no block are in the tails afterwards.
#define BATON_QUANTIZED_ATTENTION(T)                                                              \
  extern "C" void baton_quantized_attention_##T(                                                  \
      const T* q, T* out, const T* kv, uint8_t* rows, const int32_t* tables, const int32_t* tails, \
      const int64_t* parts, const int32_t* starts, const int32_t* lengths, const T* anchored,     \
      const int32_t* windows, const int32_t* sinks, long sequences, long q_stride,                \
      long kv_stride, long row_bytes, long table_width, long tail_width, long num_heads,          \
      long num_kv_heads, long head_dim, long block_size, long window, float scale, int kind,      \
      int threads) {                                                                              \
    const Queries<T> call{q,        out,       starts,       lengths,  anchored, windows, sinks,  \
                          sequences, q_stride, num_heads,    num_kv_heads, head_dim, window,      \
                          scale * 1.44269504f};                                                   \
    const QuantizedCache cache{rows,       tables,     tails,        parts,    row_bytes,  table_width, \
                               tail_width, num_kv_heads, head_dim, block_size, kind};             \
    const Fresh<T> fresh{kv, kv_stride};                                                          \
    quantized_attention(call, cache, fresh, threads);                                             \
    keep_tails(call, cache, fresh);                                                               \
  }

BATON_QUANTIZED_ATTENTION(bf16)
BATON_QUANTIZED_ATTENTION(float)

extern "C" int baton_enable() { return enable_tiles() ? 1 : 0; }
