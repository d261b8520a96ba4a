// Kernels of a decoder step for x86 CPUs with AVX-512: products on packed bfloat16 weights, attention
// over paged KV, norms and rotations. Plain C functions on raw memory; engine/kernels/native/build.py builds
// and binds them, engine/kernels/native/kernels.py gives them the shapes of engine/kernels/base.py.
//
// Work is cut into items that threads take from a counter. The caller takes items too and waits only
// for threads that hold one, so a thread that the system does not run costs nothing but its help.

#include <immintrin.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

// ---- threads -------------------------------------------------------------------------------------

constexpr auto kSpin = std::chrono::microseconds(100);  // the gap between two calls of one step

class Pool {
 public:
  // Call fn(item) for every item below count on at most num_threads threads, this one among them.
  template <class Fn>
  void run(long count, int num_threads, const Fn& fn) {
    if (num_threads <= 1 || count <= 1 || !calls_.try_lock()) {  // busy with another engine's call
      for (long i = 0; i < count; ++i) fn(i);
      return;
    }
    grow(num_threads - 1);
    next_.store(0, std::memory_order_relaxed);
    count_ = count;
    context_ = &fn;
    call_ = [](const void* f, long i) { (*static_cast<const Fn*>(f))(i); };
    helpers_ = num_threads - 1;
    state_.store((++epoch_ << 16) | kOpen);  // seq_cst, against a helper going to sleep
    if (sleepers_.load() > 0) state_.notify_all();
    work();
    state_.fetch_and(~kOpen);
    for (int spins = 0; state_.load(std::memory_order_acquire) & kInside;)
      if (++spins < 2000) _mm_pause(); else sched_yield();
    calls_.unlock();
  }

 private:
  static constexpr uint64_t kOpen = 1u << 15, kInside = kOpen - 1;

  void work() {
    const long count = count_;
    for (long i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) call_(context_, i);
  }

  // A thread has the priority of the one that starts it for good: one that has stepped back, as it
  // does to load, starts none.
  void grow(int helpers) {
    if (getpriority(PRIO_PROCESS, 0) > getpriority(PRIO_PROCESS, getpid())) return;
    for (; started_ < helpers; ++started_) std::thread(&Pool::help, this, started_).detach();
  }

  void help(int index) {
    for (uint64_t seen = 0;;) {
      const uint64_t state = await(seen);
      seen = state >> 16;
      uint64_t now = state;
      while ((now >> 16) == seen && (now & kOpen) && !state_.compare_exchange_weak(now, now + 1)) {
      }
      if ((now >> 16) != seen || !(now & kOpen)) continue;
      if (index < helpers_) work();
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  // The state of a later call than `seen`: awaited awake at first, then asleep.
  uint64_t await(uint64_t seen) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1;; ++spins) {
      const uint64_t state = state_.load(std::memory_order_acquire);
      if ((state >> 16) != seen) return state;
      _mm_pause();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) {
        sleepers_.fetch_add(1);
        const uint64_t last = state_.load();
        if ((last >> 16) == seen) state_.wait(last);
        sleepers_.fetch_sub(1);
        until = std::chrono::steady_clock::now() + kSpin;
      }
    }
  }

  std::mutex calls_;
  alignas(64) std::atomic<uint64_t> state_{0};  // epoch, open, helpers inside
  alignas(64) std::atomic<long> next_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  long count_ = 0;
  const void* context_ = nullptr;
  void (*call_)(const void*, long) = nullptr;
  uint64_t epoch_ = 0;
  int started_ = 0, helpers_ = 0;
};

Pool& pool() {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive static destructors
  return *pool;
}

// ---- sixteen numbers -----------------------------------------------------------------------------

using bf16 = uint16_t;

inline __mmask16 first(long n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

inline __m512 load(const bf16* p, __mmask16 m = 0xffff) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline __m512 load(const float* p, __mmask16 m = 0xffff) { return _mm512_maskz_loadu_ps(m, p); }

inline __m256i rounded(__m512 v) {  // to nearest, ties to even; not a number stays one
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}
inline void store(bf16* p, __m512 v, __mmask16 m = 0xffff) {
  _mm256_mask_storeu_epi16(p, m, rounded(v));
}
inline void store(float* p, __m512 v, __mmask16 m = 0xffff) { _mm512_mask_storeu_ps(p, m, v); }

// e4m3 codes of sixteen numbers: to nearest, ties to even, at most 448; not a number stays one.
inline __m128i codes_of(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32(120 << 3));
  // Below 2^-6 codes count 2^-9.
  const __m512i small = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(512)));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(121 << 23));
  __m512i code = _mm512_min_epi32(_mm512_mask_mov_epi32(normal, is_small, small), _mm512_set1_epi32(0x7e));
  code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

// The bfloat16 of 32 e4m3 codes: exponents get the other bias; codes below 8 have none, a table has
// them.
inline __m512i numbers_of(__m256i codes) {
  const __m512i small = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i code = _mm512_cvtepu8_epi16(codes), size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  __m512i number = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  number = _mm512_mask_permutexvar_epi16(
      number, _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8)), size, small);
  number = _mm512_mask_mov_epi16(
      number, _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(number, _mm512_slli_epi16(_mm512_srli_epi16(code, 7), 15));
}

// e^x by Cody and Waite's reduction and a polynomial of degree 6: within 2 units in the last place.
inline __m512 exp(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 y = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// ---- products ------------------------------------------------------------------------------------
//
// Weights [N, K] lie in panels of 32 outputs: [N / 32][K / 2][32][2], so that one register holds the
// next two inputs' weights of 16 outputs.

constexpr long kPanel = 32, kTile = 12, kAlone = 8, kRowBlock = 192;

inline __m512 dot2(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                        _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                         _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
#endif
}

// R rows of x times one panel over `pairs` pairs of inputs, into out [R][32]. Weights are asked for
// early: those of this panel, or else one cache line for each pair from `later` on.
template <int R, bool kLater>
void tile(const bf16* x, long stride, const bf16* panel, long pairs, float* out, const bf16* later) {
  __m512 sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (long k = 0; k < pairs; ++k) {
    const __m512i w0 = _mm512_loadu_si512(panel + k * 64);
    const __m512i w1 = _mm512_loadu_si512(panel + k * 64 + 32);
    if constexpr (kLater) {
      _mm_prefetch(reinterpret_cast<const char*>(later + k * 32), _MM_HINT_T1);
    } else {
      _mm_prefetch(reinterpret_cast<const char*>(panel + k * 64 + 1024), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(panel + k * 64 + 1056), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int two;
      std::memcpy(&two, x + r * stride + 2 * k, 4);
      const __m512i a = _mm512_set1_epi32(two);
      sum[r][0] = dot2(sum[r][0], a, w0);
      sum[r][1] = dot2(sum[r][1], a, w1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(out + r * kPanel, sum[r][0]);
    _mm512_storeu_ps(out + r * kPanel + 16, sum[r][1]);
  }
}

using Tile = void (*)(const bf16*, long, const bf16*, long, float*, const bf16*);

template <bool kLater, int... R>
constexpr std::array<Tile, kTile> tiles(std::integer_sequence<int, R...>) {
  return {tile<R + 1, kLater>...};
}

void tile(long rows, const bf16* x, long stride, const bf16* panel, long pairs, float* out,
          const bf16* later) {
  static constexpr auto kNow = tiles<false>(std::make_integer_sequence<int, kTile>());
  static constexpr auto kAhead = tiles<true>(std::make_integer_sequence<int, kTile>());
  (later ? kAhead : kNow)[rows - 1](x, stride, panel, pairs, out, later);
}

// All rows of x [m, 2 pairs] times one panel; done(row, sums[32]) for each row.
template <class Done>
void rows_times_panel(const bf16* x, long m, long stride, const bf16* panel, long pairs,
                      const Done& done) {
  alignas(64) float out[kTile * kPanel];
  const long tiles = m > kAlone ? std::max<long>(2, (m + kTile - 1) / kTile) : 1;
  for (long t = 0, row = 0; t < tiles; ++t) {
    const long rows = (m - row + tiles - t - 1) / (tiles - t);
    // Of two tiles, each brings half of the next panel into the second cache, so that memory is
    // read all the time. One tile alone waits for memory; with more, the weights are read once.
    const bf16* later = tiles == 2 ? panel + (64 + t * 32) * pairs : nullptr;
    tile(rows, x + row * stride, stride, panel, pairs, out, later);
    for (long r = 0; r < rows; ++r) done(row + r, out + r * kPanel);
    row += rows;
  }
}

// multiply(top, rows, panel) for all of m rows, in blocks, and all panels.
template <class Multiply>
void by_panels(long m, long panels, int threads, const Multiply& multiply) {
  const long blocks = (m + kRowBlock - 1) / kRowBlock;
  const long group = std::max<long>(1, panels / (threads * 8));
  const long groups = (panels + group - 1) / group;
  pool().run(blocks * groups, threads, [&](long item) {
    const long top = item / groups * kRowBlock, rows = std::min(kRowBlock, m - top);
    const long from = item % groups * group, to = std::min(panels, from + group);
    for (long p = from; p < to; ++p) multiply(top, rows, p);
  });
}

// done(row, panel, sums) for all of x [m, 2 pairs] times `panels` panels.
template <class Done>
void product(const bf16* x, long m, const bf16* packed, long panels, long pairs, int threads,
             const Done& done) {
  by_panels(m, panels, threads, [&](long top, long rows, long p) {
    rows_times_panel(x + top * 2 * pairs, rows, 2 * pairs, packed + p * pairs * 64, pairs,
                     [&](long row, const float* sums) { done(top + row, p, sums); });
  });
}

// What becomes of the sums of a row and a panel: sums + bias + residual, either of which may be null,
// or silu(sums + bias) of the first 16 times the others.
struct Sum {
  long n;
  const bf16 *bias, *residual;
  bf16* out;
  static constexpr long kOutputs = kPanel;  // of one panel

  void operator()(long row, long panel, const float* sums) const {
    for (long c = panel * kPanel, end = std::min(n, c + kPanel); c < end; c += 16, sums += 16) {
      const __mmask16 mask = first(end - c);
      __m512 v = load(sums);
      if (bias) v = _mm512_add_ps(v, load(bias + c, mask));
      if (residual) v = _mm512_add_ps(v, load(residual + row * n + c, mask));
      store(out + row * n + c, v, mask);
    }
  }
};

struct Gate {
  long n;
  const bf16 *gate_bias, *up_bias;
  bf16* out;
  static constexpr long kOutputs = 16;

  void operator()(long row, long panel, const float* sums) const {
    const long c = panel * 16;
    const __mmask16 mask = first(n - c);
    __m512 gate = load(sums), up = load(sums + 16);
    if (gate_bias) gate = _mm512_add_ps(gate, load(gate_bias + c, mask));
    if (up_bias) up = _mm512_add_ps(up, load(up_bias + c, mask));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 turn = _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    store(out + row * n + c, _mm512_mul_ps(_mm512_div_ps(gate, turn), up), mask);
  }
};

template <class Done>
long panels_of(const Done& done) {
  return (done.n + Done::kOutputs - 1) / Done::kOutputs;
}

#include "quantized.h"

// ---- attention -----------------------------------------------------------------------------------

struct Attention {
  long q_heads, kv_heads, dim, block_size, row_stride;  // row_stride: of q, in elements
  long window;  // tokens that a query sees, itself included; 0: all
  float scale, softcap;  // softcap 0: none

  // The first token that the last of `context` sees.
  long seen_from(long context) const { return window ? std::max(0l, context - window) : 0; }
};

// Scores of `context` tokens before the softmax: through the softcap c tanh(x / c), if any, and
// without those that are not seen.
void finish(const Attention& a, float* scores, long context) {
  if (a.softcap) {
    const __m512 cap = _mm512_set1_ps(a.softcap), one = _mm512_set1_ps(1.0f);
    for (long i = 0; i < context; i += 16) {
      const __m512 e = exp(_mm512_mul_ps(load(scores + i, first(context - i)), _mm512_set1_ps(2 / a.softcap)));
      const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
      store(scores + i, _mm512_mul_ps(cap, tanh), first(context - i));
    }
  }
  std::fill(scores, scores + a.seen_from(context), -INFINITY);
}

// KV of a layer: bfloat16, or e4m3 codes.
struct Pages {
  uint8_t* data;
  long item;  // bytes of a value

  // Where the keys of a block begin, and its values.
  uint8_t* keys(const Attention& a, long block, long head) const {
    return data + (block * 2 * a.kv_heads + head) * a.block_size * a.dim * item;
  }
  uint8_t* values(const Attention& a, long block, long head) const {
    return keys(a, block, a.kv_heads + head);
  }
  // n values, a multiple of 32; those of codes in `buffer`.
  const bf16* numbers(const uint8_t* from, long n, std::vector<bf16>& buffer) const {
    if (item == 2) return reinterpret_cast<const bf16*>(from);
    buffer.resize(n);
    for (long i = 0; i < n; i += 32)
      _mm512_storeu_si512(&buffer[i], numbers_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
    return buffer.data();
  }
};

void ask_for(const uint8_t* p, long n) {
  for (long i = 0; i < n; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// scores[0 .. n) to probabilities; returns 1 / their sum, which the caller applies.
float softmax(float* scores, long n) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (long i = 0; i < n; i += 16)
    top = _mm512_mask_max_ps(top, first(n - i), top, _mm512_maskz_loadu_ps(first(n - i), scores + i));
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < n; i += 16) {
    const __m512 p = exp(_mm512_sub_ps(load(scores + i, first(n - i)), top));
    store(scores + i, p, first(n - i));
    sum = _mm512_mask_add_ps(sum, first(n - i), sum, p);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// Scores of n tokens to what their values are multiplied by; zeros up to `width`.
void to_weights(float* scores, long n, long width, bf16* weights) {
  const __m512 share = _mm512_set1_ps(softmax(scores, n));
  for (long i = 0; i < width; i += 16)
    store(weights + i, _mm512_mul_ps(load(scores + i, first(std::max(0l, n - i))), share));
}

// Lane i of v[j] and lane j of v[i] change places.
inline void transpose(__m512i (&v)[16]) {
  __m512i twos[16], fours[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    twos[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    twos[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {  // fours[4 i + n]: column n of each quarter, of rows 4 i ..
      fours[4 * i + 2 * k] = _mm512_unpacklo_epi64(twos[4 * i + k], twos[4 * i + 2 + k]);
      fours[4 * i + 2 * k + 1] = _mm512_unpackhi_epi64(twos[4 * i + k], twos[4 * i + 2 + k]);
    }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const __m512i even01 = _mm512_shuffle_i32x4(fours[n], fours[4 + n], 0x88);  // quarters 0, 2
    const __m512i odd01 = _mm512_shuffle_i32x4(fours[n], fours[4 + n], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(fours[8 + n], fours[12 + n], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(fours[8 + n], fours[12 + n], 0xdd);
    v[n] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    v[4 + n] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    v[8 + n] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    v[12 + n] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}

// scores[g][i] = q[g] . k[i] of G queries and n keys, summed as `tile` sums: pair after pair.
template <int D, int G>
void score(const bf16* q, const bf16* k, long n, float scale, float* scores, long width) {
  for (long from = 0; from < n; from += 16) {
    __m512 sums[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[g] = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 32) {
      __m512i pairs[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        pairs[i] = _mm512_loadu_si512(k + std::min(from + i, n - 1) * D + d);
      transpose(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          int two;
          std::memcpy(&two, q + g * D + d + 2 * i, 4);
          sums[g] = dot2(sums[g], _mm512_set1_epi32(two), pairs[i]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      store(scores + g * width + from, _mm512_mul_ps(sums[g], _mm512_set1_ps(scale)), first(n - from));
  }
}

// sums[g] += weights[g][i] v[i] over values `from` .. n, pair after pair, as `tile` sums. The sums of
// 32 dims are those of each 8's first halves, then of their second halves.
template <int D, int G>
void weigh(const bf16* weights, long width, const bf16* v, long from, long n, float* sums) {
  __m512 sum[G][D / 16];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
    for (int d = 0; d < D / 16; ++d) sum[g][d] = _mm512_loadu_ps(sums + g * D + d * 16);
  for (long i = from / 2 * 2; i < n; i += 2) {
    const __mmask32 left = i < from ? 0 : ~0u, right = i + 1 < n ? ~0u : 0;
#pragma GCC unroll 8
    for (int d = 0; d < D / 32; ++d) {
      const __m512i a = _mm512_maskz_loadu_epi16(left, v + i * D + d * 32);
      const __m512i b = _mm512_maskz_loadu_epi16(right, v + (i + 1) * D + d * 32);
      const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        int two;
        std::memcpy(&two, weights + g * width + i, 4);
        sum[g][2 * d] = dot2(sum[g][2 * d], _mm512_set1_epi32(two), low);
        sum[g][2 * d + 1] = dot2(sum[g][2 * d + 1], _mm512_set1_epi32(two), high);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
    for (int d = 0; d < D / 16; ++d) _mm512_storeu_ps(sums + g * D + d * 16, sum[g][d]);
}

// 32 such sums in the order of their dims.
inline void store_dims(bf16* out, const float* sums) {
  const __m512i firsts = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
  store(out, _mm512_permutex2var_ps(low, firsts, high));
  store(out + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(firsts, _mm512_set1_epi32(8)), high));
}

// f(g, size) for the query heads of one KV head, up to `most` at once, as there are registers for.
template <class F>
void by_registers(long group, long most, const F& f) {
  for (long g = 0; g < group; g += most) f(g, std::min(most, group - g));
}

// One query of every query head of KV heads `head` .. `end`, over `context` tokens. Blocks lie
// anywhere, so the processor cannot guess the next one: it is asked for while one is used, and with
// the last of them `after`, where the keys lie that will be read after this. Where blocks are a
// multiple of 16 tokens, every sum has the order that it has in `attend_tile`: a row's result is the
// same to the bit, whether it runs alone or within a chunk.
template <int D>
void attend_one(const Attention& a, const bf16* q, const Pages& kv, const int32_t* blocks, long context,
                long head, long end, const uint8_t* after, bf16* out) {
  static thread_local std::vector<float> scores, sums;
  static thread_local std::vector<bf16> numbers, weights;
  const long group = a.q_heads / a.kv_heads, heads = (end - head) * group;
  const long width = (context + 15) / 16 * 16, size = a.block_size * D * kv.item, last = (context - 1) / a.block_size;
  const long hidden = a.seen_from(context);
  scores.resize(heads * width);
  weights.resize(heads * width + 1);  // pairs may begin with the last
  sums.assign(heads * D, 0.0f);
  q += head * group * D;
  out += head * group * D;
  for (long b = 0; b <= last; ++b) {
    const long n = std::min(a.block_size, context - b * a.block_size);
    for (long h = 0; h < end - head; ++h) {
      const bf16* k = kv.numbers(kv.keys(a, blocks[b], head + h), n * D, numbers);
      ask_for(b < last ? kv.keys(a, blocks[b + 1], head + h) : kv.values(a, *blocks, head + h), size);
      by_registers(group, 4, [&](long g, long count) {
        float* to = scores.data() + (h * group + g) * width + b * a.block_size;
        constexpr decltype(&score<D, 1>) parts[] = {score<D, 1>, score<D, 2>, score<D, 3>, score<D, 4>};
        const auto part = parts[count - 1];
        part(q + (h * group + g) * D, k, n, a.scale, to, width);
      });
    }
  }
  for (long h = 0; h < heads; ++h) {
    float* mine = scores.data() + h * width;
    finish(a, mine, context);
    to_weights(mine, context, width, weights.data() + h * width);
  }
  for (long b = 0; b <= last; ++b) {
    const long n = std::min(a.block_size, context - b * a.block_size);
    for (long h = 0; h < end - head; ++h) {
      const long skip = std::clamp(hidden - b * a.block_size, 0l, n);  // they may be no numbers
      const bf16* v = kv.numbers(kv.values(a, blocks[b], head + h), n * D, numbers);
      ask_for(b < last ? kv.values(a, blocks[b + 1], head + h) : after + h * size, size);
      by_registers(group, D == 64 ? 3 : D == 256 ? 1 : 2, [&](long g, long count) {
        const bf16* from = weights.data() + (h * group + g) * width + b * a.block_size;
        const auto part = count == 3 ? weigh<D, 3> : count == 2 ? weigh<D, 2> : weigh<D, 1>;
        part(from, width, v, skip, n, sums.data() + (h * group + g) * D);
      });
    }
  }
  for (long i = 0; i < heads * D; i += 32) store_dims(out + i, sums.data() + i);
}

// `queries` consecutive queries, the last of them at token seen - 1, over packed keys and values.
void attend_tile(const Attention& a, const bf16* q, long queries, long seen, const Pages& kv,
                 const int32_t* blocks, long head, bf16* out) {
  static thread_local std::vector<bf16> keys, values, weights, key_row, value_row;
  static thread_local std::vector<float> scores;
  const long unseen = a.seen_from(seen - queries + 1), skipped = unseen / a.block_size;
  blocks += skipped;
  seen -= skipped * a.block_size;
  const long d2 = a.dim / 2, panels = (seen + kPanel - 1) / kPanel, width = panels * kPanel;
  const long columns = (a.dim + kPanel - 1) / kPanel, group = a.q_heads / a.kv_heads;
  keys.resize(width * a.dim);
  values.assign(columns * kPanel * width, 0);
  for (long t = unseen - skipped * a.block_size; t < seen; ++t) {
    const long block = blocks[t / a.block_size], at = t % a.block_size * a.dim * kv.item;
    const bf16* k = kv.numbers(kv.keys(a, block, head) + at, a.dim, key_row);
    const bf16* v = kv.numbers(kv.values(a, block, head) + at, a.dim, value_row);
    bf16* to = keys.data() + t / kPanel * kPanel * a.dim + t % kPanel * 2;
    for (long d = 0; d < d2; ++d) std::memcpy(to + d * 64, k + 2 * d, 4);
    for (long d = 0; d < a.dim; ++d)
      values[(d / kPanel * width / 2 + t / 2) * 64 + d % kPanel * 2 + t % 2] = v[d];
  }
  scores.resize(queries * width);
  weights.resize(queries * width);
  for (long g = head * group; g < (head + 1) * group; ++g) {
    for (long p = 0; p < panels; ++p)
      rows_times_panel(q + g * a.dim, queries, a.row_stride, keys.data() + p * d2 * 64, d2,
                       [&](long row, const float* sums) {
                         std::memcpy(&scores[row * width + p * kPanel], sums, kPanel * 4);
                       });
    for (long row = 0; row < queries; ++row) {
      float* mine = &scores[row * width];
      const long n = seen - queries + row + 1;
      for (long i = 0; i < n; i += 16)
        store(mine + i, _mm512_mul_ps(load(mine + i), _mm512_set1_ps(a.scale)), first(n - i));
      finish(a, mine, n);
      to_weights(mine, n, width, &weights[row * width]);
    }
    for (long c = 0; c < columns; ++c)
      rows_times_panel(weights.data(), queries, width, values.data() + c * width / 2 * 64,
                       (seen + 1) / 2, [&](long row, const float* sums) {
                         bf16* to = out + row * a.q_heads * a.dim + g * a.dim + c * kPanel;
                         const long n = a.dim - c * kPanel;
                         store(to, load(sums), first(n));
                         if (n > 16) store(to + 16, load(sums + 16), first(n - 16));
                       });
  }
}

void attend_one(const Attention& a, const bf16* q, const Pages& kv, const int32_t* blocks, long context,
                long head, long end, const uint8_t* after, bf16* out) {
  switch (a.dim) {
    case 64: return attend_one<64>(a, q, kv, blocks, context, head, end, after, out);
    case 96: return attend_one<96>(a, q, kv, blocks, context, head, end, after, out);
    case 128: return attend_one<128>(a, q, kv, blocks, context, head, end, after, out);
    case 256: return attend_one<256>(a, q, kv, blocks, context, head, end, after, out);
  }
}

constexpr long kQueries = 64;  // of one item of a chunk

}  // namespace

extern "C" {

// Weights [n, k] into panels; the outputs that fill the last panel are zeros. k is even.
void baton_pack(const bf16* weight, long n, long k, bf16* packed) {
  for (long o = 0; o < (n + kPanel - 1) / kPanel * kPanel; ++o)
    for (long i = 0; i < k; ++i)
      packed[(o / kPanel * k / 2 + i / 2) * 64 + o % kPanel * 2 + i % 2] =
          o < n ? weight[o * k + i] : 0;
}

// out [m, n] = x [m, k] W^T + bias + residual, either of which may be null.
void baton_linear(const bf16* x, long m, long k, const bf16* packed, long n, const bf16* bias,
                  const bf16* residual, bf16* out, int threads) {
  const Sum done{n, bias, residual, out};
  product(x, m, packed, panels_of(done), k / 2, threads, done);
}

// out [m, n] = silu(x G^T + gate_bias) * (x U^T + up_bias); panels hold 16 outputs of G, then of U.
void baton_gated(const bf16* x, long m, long k, const bf16* packed, long n, const bf16* gate_bias,
                 const bf16* up_bias, bf16* out, int threads) {
  const Gate done{n, gate_bias, up_bias, out};
  product(x, m, packed, panels_of(done), k / 2, threads, done);
}

// The same with weights of 8 bits: a scale for each output.
void baton_linear_int8(const bf16* x, long m, long k, const uint8_t* packed, const float* scales,
                       long n, const bf16* bias, const bf16* residual, bf16* out, int threads) {
  byte_product<8>(x, m, k, packed, Groups{}, scales, kGroup8, threads, Sum{n, bias, residual, out});
}

void baton_gated_int8(const bf16* x, long m, long k, const uint8_t* packed, const float* scales,
                      long n, const bf16* gate_bias, const bf16* up_bias, bf16* out, int threads) {
  const Gate done{n, gate_bias, up_bias, out};
  byte_product<8>(x, m, k, packed, Groups{}, scales, kGroup8, threads, done);
}

// The same with weights of 4 bits: scales and zero points as `Groups` has them.
void baton_linear_int4(const bf16* x, long m, long k, const uint16_t* packed, const Groups* groups,
                       long n, const bf16* bias, const bf16* residual, bf16* out, int threads) {
  product4(x, m, k, packed, *groups, threads, Sum{n, bias, residual, out});
}

void baton_gated_int4(const bf16* x, long m, long k, const uint16_t* packed, const Groups* groups,
                      long n, const bf16* gate_bias, const bf16* up_bias, bf16* out, int threads) {
  product4(x, m, k, packed, *groups, threads, Gate{n, gate_bias, up_bias, out});
}
}

namespace {

template <class Weight>
void rms_norm(const bf16* x, long m, long h, const Weight* weight, float eps, bf16* out, int threads) {
  const long rows = 16;
  pool().run((m + rows - 1) / rows, threads, [=](long item) {
    for (long row = item * rows; row < std::min(m, (item + 1) * rows); ++row) {
      const bf16* from = x + row * h;
      __m512 sum = _mm512_setzero_ps();
      for (long i = 0; i < h; i += 16) {
        const __m512 v = load(from + i, first(h - i));
        sum = _mm512_fmadd_ps(v, v, sum);
      }
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / h + eps));
      for (long i = 0; i < h; i += 16) {
        const __mmask16 mask = first(h - i);
        const __m512 v = _mm512_mul_ps(load(from + i, mask), scale);
        store(out + row * h + i, _mm512_mul_ps(v, load(weight + i, mask)), mask);
      }
    }
  });
}

// Rotate the halves of q and k in place, copy k and v to their slots. cos, sin: [positions, D / 2].
void rope_and_write(bf16* qkv, long m, const Attention& a, const float* cos, const float* sin,
                    const int64_t* positions, const int64_t* slots, const Pages& kv, int threads) {
  const long rows = 16, half = a.dim / 2;
  pool().run((m + rows - 1) / rows, threads, [=](long item) {
    for (long row = item * rows; row < std::min(m, (item + 1) * rows); ++row) {
      bf16* heads = qkv + row * a.row_stride;
      const float* c = cos + positions[row] * half;
      const float* s = sin + positions[row] * half;
      for (long head = 0; head < a.q_heads + a.kv_heads; ++head)
        for (long i = 0; i < half; i += 16) {
          const __mmask16 mask = first(half - i);
          bf16* low = heads + head * a.dim + i;
          bf16* high = low + half;
          const __m512 x = load(low, mask), y = load(high, mask);
          const __m512 cs = load(c + i, mask), sn = load(s + i, mask);
          store(low, _mm512_fmsub_ps(x, cs, _mm512_mul_ps(y, sn)), mask);
          store(high, _mm512_fmadd_ps(y, cs, _mm512_mul_ps(x, sn)), mask);
        }
      const long block = slots[row] / a.block_size, offset = slots[row] % a.block_size;
      for (long head = 0; head < 2 * a.kv_heads; ++head) {
        const bf16* from = heads + (a.q_heads + head) * a.dim;
        uint8_t* to = kv.keys(a, block, head) + offset * a.dim * kv.item;
        if (kv.item == 2)
          std::memcpy(to, from, a.dim * 2);
        else
          for (long i = 0; i < a.dim; i += 16)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), codes_of(load(from + i)));
      }
    }
  });
}

// Attention of all rows. Sequence s has queries[s] rows, contexts[s] tokens, and its block table begins
// at tables[starts[s]].
void attend(const Attention& a, const bf16* q, const Pages& kv, long sequences, const int32_t* queries,
            const int32_t* contexts, const int32_t* starts, const int32_t* tables, bf16* out, int threads) {
  struct Item {
    long row, sequence, tile, head, end;
  };
  static thread_local std::vector<Item> items;
  items.clear();
  // Heads of a decode lie side by side, and are read faster together; but every thread needs some.
  const long together = sequences >= 4 * threads ? a.kv_heads : 1;
  for (long s = 0, row = 0; s < sequences; row += queries[s++])
    for (long tile = 0; tile < queries[s]; tile += kQueries)
      for (long head = 0, step = queries[s] == 1 ? together : 1; head < a.kv_heads; head += step)
        items.push_back({row, s, tile, head, head + step});
  const Item* list = items.data();
  const long count = items.size();
  pool().run(count, threads, [=](long index) {
    const Item& item = list[count - 1 - index];  // chunks, which take longest, first
    const long s = item.sequence, row = item.row + item.tile;
    const bf16* mine = q + row * a.row_stride;
    bf16* to = out + row * a.q_heads * a.dim;
    const int32_t* blocks = tables + starts[s];
    if (queries[s] == 1) {
      const Item& next = list[std::max(0l, count - 2 - index)];
      const uint8_t* after = kv.keys(a, tables[starts[next.sequence]], next.head);
      return attend_one(a, mine, kv, blocks, contexts[s], item.head, item.end, after, to);
    }
    const long n = std::min(kQueries, queries[s] - item.tile);
    attend_tile(a, mine, n, contexts[s] - queries[s] + item.tile + n, kv, blocks, item.head, to);
  });
}

#include "layers.h"

}  // namespace

extern "C" {

void baton_rms_norm(const bf16* x, long m, long h, const bf16* weight, float eps, bf16* out,
                         int threads) {
  rms_norm(x, m, h, weight, eps, out, threads);
}

void baton_rms_norm_f32(const bf16* x, long m, long h, const float* weight, float eps, bf16* out,
                        int threads) {
  rms_norm(x, m, h, weight, eps, out, threads);
}

void baton_rope(bf16* qkv, long m, const Attention* a, const float* cos, const float* sin,
                const int64_t* positions, const int64_t* slots, uint8_t* kv, long item, int threads) {
  rope_and_write(qkv, m, *a, cos, sin, positions, slots, Pages{kv, item}, threads);
}

// `item`: bytes of a value of `kv`.
void baton_attend(const Attention* a, const bf16* q, uint8_t* kv, long item, long sequences,
                  const int32_t* queries, const int32_t* contexts, const int32_t* starts,
                  const int32_t* tables, bf16* out, int threads) {
  attend(*a, q, Pages{kv, item}, sequences, queries, contexts, starts, tables, out, threads);
}

// The rows h [m, hidden] through `count` layers, in place; a plan and KV for each.
void baton_layers(const Layer* layers, long count, const Plan* const* plans, uint8_t* const* kv, long item,
                  bf16* h, long m, int threads) {
  static thread_local Rows rows;
  for (long i = 0; i < count; ++i) run_layer(layers[i], *plans[i], kv[i], item, h, m, rows, threads);
}
}
