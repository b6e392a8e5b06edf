#include "paged.h"
#include "pass.h"

namespace baton {
namespace {

template <class T>
void attention(const Queries<T>& call, const PagedCache<T>& cache, int threads) {
  attend<T>(call, threads, [&](Scratch<T>& scratch, const Tiles<T>& tiles, const Item& item) {
    Pass<T, T> pass(call, scratch, item);
    PagedTokens<T> tokens(cache, item.seq, item.kv_head);
    pass.run([&](const auto& begin, const auto& end) { pass.see(tiles, tokens, begin, end); });
  });
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

extern "C" int baton_enable() { return enable_tiles() ? 1 : 0; }
