// Products on quantised weights; part of kernels.cpp, inside its namespace.
//
// Where the format allows it inputs are quantised, too, a scale for each row and 64 columns, and
// multiplied as integers. Else codes become bfloat16 in registers, or, for many rows, once for all of
// them in a buffer.

// ---- layouts -------------------------------------------------------------------------------------
//
// 8 bits: codes + 128 in panels of 32 outputs, [N / 32][K / 4][32][4], K filled up to whole groups.
//
// 4 bits: [N / 32][K / 4][32], a 16-bit word each with four codes. Word 2 o + c has, from its lowest bits
// on, column c of outputs o and 16 + o, then column 2 + c of them. So the low and the high nibbles of
// two words are the bytes of columns 0, 2, 1, 3 of one output each.

constexpr long kGroup8 = 64;

// Scales of `size` columns each: [N / 32][K / size][32], float16 or bfloat16; zero points of that shape
// less 8, or null.
struct Groups {
  long size;
  const uint16_t* scales;
  const int8_t* zeros;
  long half;         // whether scales are float16
  long input_group;  // columns of an input's scale, 0: inputs stay as they are; divides `size`
};

inline __m512 scales_of(const Groups& a, long at) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.scales + at));
  return a.half ? _mm512_cvtph_ps(bits) : load(a.scales + at);
}

inline __m512 zeros_of(const Groups& a, long at) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a.zeros + at))));
}

// How many tiles m rows are cut into: see `rows_times_panel`.
inline long num_tiles(long m) { return m > kAlone ? std::max<long>(2, (m + kTile - 1) / kTile) : 1; }

// ---- inputs as signed bytes ----------------------------------------------------------------------

// Rows of x by groups of columns, each with a scale; sums: of a group's codes. Columns of 4 bits' words
// are in the order of the words' bytes.
struct Bytes {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  long groups, size;

  void take(const bf16* x, long m, long k, long group_size, bool by_words, int threads) {
    size = group_size;
    groups = (k + size - 1) / size;
    codes.resize(m * groups * size + 16);  // sixteen at a time are written
    scales.resize(m * groups);
    sums.resize(m * groups);
    const long rows = m <= 16 ? m : 8;
    pool().run((m + rows - 1) / rows, threads, [&](long item) {
      for (long row = item * rows; row < std::min(m, (item + 1) * rows); ++row)
        for (long g = 0; g < groups; ++g)
          take(x + row * k + g * size, std::min(size, k - g * size), row * groups + g, by_words);
    });
  }

 private:
  void take(const bf16* x, long n, long at, bool by_words) {
    __m512 top = _mm512_setzero_ps(), bad = top;  // bad: not a number where any is not finite
    for (long i = 0; i < n; i += 16) {
      const __m512 v = load(x + i, first(n - i));
      top = _mm512_max_ps(top, _mm512_abs_ps(v));
      bad = _mm512_fmadd_ps(v, _mm512_setzero_ps(), bad);
    }
    const float largest = _mm512_reduce_max_ps(top);
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    const __m128i order = by_words
        ? _mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0)
        : _mm_set_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i sum = _mm512_setzero_si512();
    for (long i = 0; i < size; i += 16) {
      const __m512 v = load(x + i, first(std::max(0l, n - i)));
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
      sum = _mm512_add_epi32(sum, code);
      _mm_mask_storeu_epi8(codes.data() + at * size + i, first(size - i),
                           _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(code), order));
    }
    scales[at] = largest / 127.0f + _mm512_reduce_add_ps(bad);
    sums[at] = _mm512_reduce_add_epi32(sum);
  }
};

// sum += weights . inputs of four bytes a lane. GCC 12 copies the sums of the intrinsic to and fro.
inline void dot4(__m512i& sum, __m512i weights, __m512i inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

// R rows from `row` on times one panel of kBits, into out [R][32]. a, at: the scales of the panel; those
// of 8 bits are one an output, and left to the caller. later: as in `tile`.
template <int kBits, int R, bool kLater>
void byte_tile(const Bytes& x, long row, const uint8_t* panel, const Groups& a, long at, float* out,
               const uint8_t* later) {
  constexpr long kStep = kBits * 16;  // bytes of four columns
  const long groups = x.groups, stride = groups * x.size;
  const int8_t* codes = x.codes.data() + row * stride;
  const int32_t* sums = x.sums.data() + row * groups;
  const float* scales = x.scales.data() + row * groups;
  const __m512i low = _mm512_set1_epi8(15);
  std::memset(out, 0, R * kPanel * sizeof(float));  // in memory: registers hold one group's sums
  for (long g = 0; g < groups; ++g, codes += x.size) {
    __m512i sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      sum[r][0] = sum[r][1] = _mm512_set1_epi32(-(1 << (kBits - 1)) * sums[r * groups + g]);
    for (long k = 0; k < x.size; k += 4, panel += kStep) {
      __m512i w0 = _mm512_loadu_si512(panel), w1;
      if constexpr (kBits == 8) {
        w1 = _mm512_loadu_si512(panel + 64);
      } else {
        w1 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), low);
        w0 = _mm512_and_si512(w0, low);
      }
      if constexpr (kLater) {
        _mm_prefetch(reinterpret_cast<const char*>(later), _MM_HINT_T1);
        later += kStep / 2;
      } else {
        for (long line = 0; line < kStep; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(panel + 2048 + line), _MM_HINT_T0);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int four;
        std::memcpy(&four, codes + r * stride + k, 4);
        const __m512i input = _mm512_set1_epi32(four);
        dot4(sum[r][0], w0, input);
        dot4(sum[r][1], w1, input);
      }
    }
    const long from = kBits == 8 ? 0 : at + g * x.size / a.size * kPanel;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512 scale = kBits == 8 ? _mm512_set1_ps(1) : scales_of(a, from + 16 * h);
      const bool shifted = kBits == 4 && a.zeros;
      const __m512 zero = shifted ? zeros_of(a, from + 16 * h) : _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* to = out + r * kPanel + 16 * h;
        __m512 v = _mm512_cvtepi32_ps(sum[r][h]);
        if (shifted) v = _mm512_fnmadd_ps(zero, _mm512_set1_ps(sums[r * groups + g]), v);
        __m512 factor = _mm512_set1_ps(scales[r * groups + g]);
        if constexpr (kBits == 4) factor = _mm512_mul_ps(factor, scale);
        store(to, _mm512_fmadd_ps(v, factor, load(to)));
      }
    }
  }
}

using ByteTile = void (*)(const Bytes&, long, const uint8_t*, const Groups&, long, float*, const uint8_t*);

template <int kBits, bool kLater, int... R>
constexpr std::array<ByteTile, kTile> byte_tiles(std::integer_sequence<int, R...>) {
  return {byte_tile<kBits, R + 1, kLater>...};
}

// Products of inputs as bytes. group_size: columns of an input's scale. a: scales of 4 bits. output_scales:
// those of 8 bits.
template <int kBits, class Done>
void byte_product(const bf16* x, long m, long k, const uint8_t* packed, const Groups& a,
                  const float* output_scales, long group_size, int threads, const Done& done) {
  static constexpr auto kNow = byte_tiles<kBits, false>(std::make_integer_sequence<int, kTile>());
  static constexpr auto kAhead = byte_tiles<kBits, true>(std::make_integer_sequence<int, kTile>());
  static thread_local Bytes buffer;
  Bytes& bytes = buffer;  // this thread's, in all threads
  bytes.take(x, m, k, group_size, kBits == 4, threads);
  const long size = bytes.groups * group_size * kBits * 4;
  by_panels(m, panels_of(done), threads, [&](long top, long rows, long p) {
    alignas(64) float out[kTile * kPanel];
    const uint8_t* panel = packed + p * size;
    const long at = kBits == 8 ? 0 : p * (k / a.size) * kPanel, tiles = num_tiles(rows);
    for (long t = 0, row = 0; t < tiles; ++t) {
      const long count = (rows - row + tiles - t - 1) / (tiles - t);
      const uint8_t* later = tiles == 2 ? panel + size + t * size / 2 : nullptr;
      (later ? kAhead : kNow)[count - 1](bytes, top + row, panel, a, at, out, later);
      for (long r = 0; r < count; ++r, ++row) {
        float* sums = out + r * kPanel;
        for (long i = 0; kBits == 8 && i < kPanel; i += 16)
          store(sums + i, _mm512_mul_ps(load(sums + i), load(output_scales + p * kPanel + i)));
        done(top + row, p, sums);
      }
    }
  });
}

// ---- 4 bits, inputs as they are ------------------------------------------------------------------

constexpr long kBuffered4 = 128;  // rows from which on codes are converted once for all

// codes - 8 as bfloat16, for five bits of which the highest says nothing.
inline __m512i table4() {
  alignas(64) bf16 values[32];
  for (int i = 0; i < 32; ++i) {
    const float value = i % 16 - 8;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    values[i] = bits >> 16;
  }
  return _mm512_load_si512(values);
}

// R rows of x times one panel, into out [R][32]. at: of the panel's scales. sums: of each row's inputs
// by group, where there are zero points. later: as in `tile`.
template <int R, bool kLater>
void tile4(const bf16* x, long k, const uint16_t* panel, const Groups& a, long at, const float* sums,
           float* out, const uint16_t* later) {
  constexpr int kChains = R <= 2 ? 2 : 1;  // sums that do not wait for each other
  const __m512i table = table4();
  const long groups = k / a.size;
  std::memset(out, 0, R * kPanel * sizeof(float));
  for (long g = 0; g < groups; ++g, at += kPanel) {
    __m512 sum[R][2][kChains];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kChains; ++c) sum[r][0][c] = sum[r][1][c] = _mm512_setzero_ps();
    const bf16* from = x + g * a.size;
    for (long i = 0; i < a.size; i += 4, panel += 32) {
      const __m512i words = _mm512_loadu_si512(panel);
      if constexpr (kLater) {
        if (i % 8 == 0) _mm_prefetch(reinterpret_cast<const char*>(later), _MM_HINT_T1), later += 32;
      } else {
        _mm_prefetch(reinterpret_cast<const char*>(panel + 1024), _MM_HINT_T0);
      }
      const __m512i w0 = _mm512_permutexvar_epi16(words, table);
      const __m512i w1 = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
      const __m512i w2 = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
      const __m512i w3 = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int two[2];
        std::memcpy(two, from + r * k + i, 8);
        const __m512i a0 = _mm512_set1_epi32(two[0]), a1 = _mm512_set1_epi32(two[1]);
        sum[r][0][0] = dot2(sum[r][0][0], a0, w0);
        sum[r][1][0] = dot2(sum[r][1][0], a0, w1);
        sum[r][0][kChains - 1] = dot2(sum[r][0][kChains - 1], a1, w2);
        sum[r][1][kChains - 1] = dot2(sum[r][1][kChains - 1], a1, w3);
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512 scale = scales_of(a, at + 16 * h);
      const __m512 zero = a.zeros ? zeros_of(a, at + 16 * h) : _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        __m512 v = sum[r][h][0];
        if constexpr (kChains == 2) v = _mm512_add_ps(v, sum[r][h][1]);
        if (a.zeros) v = _mm512_fnmadd_ps(zero, _mm512_set1_ps(sums[r * groups + g]), v);
        float* to = out + r * kPanel + 16 * h;
        store(to, _mm512_fmadd_ps(v, scale, load(to)));
      }
    }
  }
}

using Tile4 = void (*)(const bf16*, long, const uint16_t*, const Groups&, long, const float*, float*,
                       const uint16_t*);

template <bool kLater, int... R>
constexpr std::array<Tile4, kTile> tiles4(std::integer_sequence<int, R...>) {
  return {tile4<R + 1, kLater>...};
}

// A panel as the products of bfloat16 weights take it: [K / 2][32][2].
inline void dequantise4(const uint16_t* panel, const Groups& a, long at, long k, bf16* out) {
  const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (long g = 0; g < k / a.size; ++g, at += kPanel) {
    __m512 scale[2][2], zero[2][2];  // of each half's outputs, each twice: for two columns
    for (int h = 0; h < 2; ++h) {
      const __m512 s = scales_of(a, at + 16 * h);
      const __m512 z = a.zeros ? zeros_of(a, at + 16 * h) : _mm512_setzero_ps();
      scale[h][0] = _mm512_permutexvar_ps(low, s), scale[h][1] = _mm512_permutexvar_ps(high, s);
      zero[h][0] = _mm512_permutexvar_ps(low, z), zero[h][1] = _mm512_permutexvar_ps(high, z);
    }
    for (long i = 0; i < a.size; i += 4, panel += 32, out += 128) {
      const __m512i words[2] = {
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel))),
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 16)))};
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {  // pair of columns, half of the outputs
        const int h = part % 2;
        __m512 v[2];
        for (int c = 0; c < 2; ++c) {
          v[c] = _mm512_permutexvar_ps(_mm512_srli_epi32(words[c], 4 * part), table);
          v[c] = _mm512_mul_ps(_mm512_sub_ps(v[c], zero[h][c]), scale[h][c]);
        }
        _mm512_storeu_si512(out + 32 * part, (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
      }
    }
  }
}

// sums[row][group] of x [m, k].
inline void sum_groups(const bf16* x, long m, long k, long size, float* sums) {
  for (long g = 0; g < m * k / size; ++g) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16)
      sum = _mm512_add_ps(sum, load(x + g * size + i, first(size - i)));
    sums[g] = _mm512_reduce_add_ps(sum);
  }
}

// k is a multiple of the groups' size, and that of 4.
template <class Done>
void product4(const bf16* x, long m, long k, const uint16_t* packed, const Groups& a, int threads,
              const Done& done) {
  if (a.input_group)
    return byte_product<4>(x, m, k, reinterpret_cast<const uint8_t*>(packed), a, nullptr,
                           a.input_group, threads, done);
  static constexpr auto kNow = tiles4<false>(std::make_integer_sequence<int, kTile>());
  static constexpr auto kAhead = tiles4<true>(std::make_integer_sequence<int, kTile>());
  static thread_local std::vector<float> mine;
  const long groups = k / a.size, size = k / 4 * 32;
  if (m < kBuffered4 && a.zeros) {
    mine.resize(m * groups);
    sum_groups(x, m, k, a.size, mine.data());
  }
  const float* sums = mine.data();
  by_panels(m, panels_of(done), threads, [&](long top, long rows, long p) {
    const uint16_t* panel = packed + p * size;
    const long at = p * groups * kPanel;
    if (m >= kBuffered4) {
      static thread_local std::vector<bf16> buffer;
      buffer.resize(k * kPanel);
      dequantise4(panel, a, at, k, buffer.data());
      return rows_times_panel(x + top * k, rows, k, buffer.data(), k / 2,
                              [&](long row, const float* s) { done(top + row, p, s); });
    }
    alignas(64) float out[kTile * kPanel];
    const long tiles = num_tiles(rows);
    for (long t = 0, row = 0; t < tiles; ++t) {
      const long count = (rows - row + tiles - t - 1) / (tiles - t);
      const uint16_t* later = tiles == 2 ? panel + size + t * size / 2 : nullptr;
      (later ? kAhead : kNow)[count - 1](x + row * k, k, panel, a, at, sums + row * groups, out, later);
      for (long r = 0; r < count; ++r, ++row) done(row, p, out + r * kPanel);
    }
  });
}
