// Matrices in the blocks of GGUF files: repacked once, then multiplied with int8 activations.
//
// Weights keep the integers and the scales of the file. 16 rows are interleaved, four columns at a time, so that one
// instruction multiplies four columns of many rows with four activations of one token. Each group of 32 weights is
// unpacked once for all tokens of a tile. Integer sums are exact and floats are added in the order of the groups: a
// token's result does not depend on how many others are in its pass.
//
// Activations are int8 with a scale for each group. The few groups with far larger values than the others of their token
// would carry most of the rounding error; their rounding remainder is a second group of int8, multiplied as well.
//
// A strip of 16 rows is a sequence of blocks of 8 groups (the last may have fewer), each its codes, then its scales, so
// that memory is read in one direction:
//   codes of 4 bits: 4 pieces of 64 bytes, piece i has columns 8i … 8i+3 in the low and 8i+4 … 8i+7 in the high halves
//   codes of 6 bits: the same for their low 4 bits, then 2 pieces with 2 bits each for 16 columns
//   codes of 8 bits: 8 pieces of 64 bytes, as signed integers
//   scales: of the K types the halves d[16] and dmin[16] (Q4_K, Q5_K) or d[16] (Q6_K), then per group two times 16 bytes;
//   of the others per group the halves d[16], and m[16] where the type has one

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace blocks {

// as GGUF numbers them
enum Type : int32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

constexpr int kStrip = 16;   // rows
constexpr int kGroup = 32;   // columns
constexpr int kSuper = 256;  // columns of a block of the K types
constexpr int kBlock = 8;    // groups whose codes lie together
constexpr int kPart = 64;    // groups of a strip that stay in the first-level cache while it is passed over several times
constexpr int kAhead = 4096;  // prefetch distance in bytes: a page, where the hardware prefetcher stops
constexpr float kLarge = 2.0f;  // a group is large where its scale is so many times the mean of its token

constexpr bool is_k(int type) { return type >= Q4_K; }
constexpr bool has_min(int type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }
constexpr int bits(int type) { return type == Q8_0 ? 8 : type == Q4_0 || type == Q4_1 || type == Q4_K ? 4 : 6; }
// what is subtracted from a code
constexpr int offset(int type) { return type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0; }
constexpr int code_bytes(int type) { return kStrip * kGroup * bits(type) / 8; }
constexpr int scale_bytes(int type) { return is_k(type) || has_min(type) == false ? 32 : 64; }  // of a group
constexpr int super_bytes(int type) { return is_k(type) ? (has_min(type) ? 64 : 32) : 0; }

constexpr int block_bytes(int type, int groups) {
  return (groups * (code_bytes(type) + scale_bytes(type)) + super_bytes(type) + 63) / 64 * 64;
}

inline int64_t strip_bytes(int type, int cols) {
  const int groups = cols / kGroup, rest = groups % kBlock;
  return static_cast<int64_t>(groups / kBlock) * block_bytes(type, kBlock) + (rest ? block_bytes(type, rest) : 0);
}

inline int64_t row_bytes(int type, int cols) {
  switch (type) {
    case F32: return 4LL * cols;
    case F16: return 2LL * cols;
    case Q4_0: return cols / kGroup * 18LL;
    case Q4_1: return cols / kGroup * 20LL;
    case Q5_0: return cols / kGroup * 22LL;
    case Q5_1: return cols / kGroup * 24LL;
    case Q8_0: return cols / kGroup * 34LL;
    case Q4_K: return cols / kSuper * 144LL;
    case Q5_K: return cols / kSuper * 176LL;
    default: return cols / kSuper * 210LL;
  }
}

inline float to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// ---------------------------------------------------------------------------------------------------------- the file

// 32 weights of a row as they are in the file: weight = scale * (code - offset) + minimum, where scale and minimum of the
// K types are products of a half and a byte, and Q6_K has a scale for each 16.
struct Group {
  uint8_t code[kGroup];      // Q8_0: signed
  uint16_t d, m;             // halves; of the K types those of the block of 256
  uint8_t scale[2];          // K types: [scale, minimum], Q6_K: two signed scales
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

inline void read_k(int type, const uint8_t* p, int part, Group& out) {
  if (type == Q6_K) {  // low bits [128], high bits [64], scales [16], d
    const int shift = part % 4, from = part / 4 * 64 + (shift & 1) * 32;
    for (int j = 0; j < kGroup; ++j) {
      const uint8_t low = p[from + j], high = p[128 + part / 4 * 32 + j];
      out.code[j] = (shift < 2 ? low & 15 : low >> 4) | (high >> 2 * shift & 3) << 4;
    }
    out.scale[0] = p[192 + 2 * part];
    out.scale[1] = p[192 + 2 * part + 1];
    out.d = half_at(p + 208);
    return;
  }
  const uint8_t* packed = p + 4;  // 8 scales and 8 minima of 6 bits in 12 bytes
  out.d = half_at(p);
  out.m = half_at(p + 2);
  out.scale[0] = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
  out.scale[1] = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | packed[part] >> 6 << 4;
  const uint8_t* high = p + 16;
  const uint8_t* low = p + (type == Q5_K ? 48 : 16) + part / 2 * 32;
  for (int j = 0; j < kGroup; ++j) {
    out.code[j] = part % 2 ? low[j] >> 4 : low[j] & 15;
    if (type == Q5_K) out.code[j] |= (high[j] >> part & 1) << 4;
  }
}

// group g of a row of the file
inline void read_group(int type, const uint8_t* row, int g, Group& out) {
  if (is_k(type)) return read_k(type, row + row_bytes(type, kSuper) * (g / 8), g % 8, out);
  const uint8_t* p = row + row_bytes(type, kGroup) * g;
  out.d = half_at(p);
  p += 2;
  if (has_min(type)) {
    out.m = half_at(p);
    p += 2;
  }
  if (type == Q8_0) {
    std::memcpy(out.code, p, kGroup);
    return;
  }
  uint32_t high = 0;
  if (bits(type) == 6) {
    std::memcpy(&high, p, 4);
    p += 4;
  }
  for (int j = 0; j < 16; ++j) {
    out.code[j] = (p[j] & 15) | (high >> j & 1) << 4;
    out.code[j + 16] = p[j] >> 4 | (high >> (j + 16) & 1) << 4;
  }
}

// The floats that a group stands for.
inline void group_floats(int type, const Group& group, float* out) {
  const float d = to_float(group.d), m = has_min(type) ? to_float(group.m) : 0;
  for (int j = 0; j < kGroup; ++j) {
    const float code = type == Q8_0 ? static_cast<int8_t>(group.code[j]) : group.code[j] - offset(type);
    const float scale = type == Q6_K ? d * static_cast<int8_t>(group.scale[j / 16]) : is_k(type) ? d * group.scale[0] : d;
    const float least = is_k(type) ? -m * group.scale[1] : m;
    out[j] = has_min(type) ? scale * code + least : scale * code;
  }
}

// A row of the file as floats: the embedding of a token.
inline void dequantise(int type, const uint8_t* row, int cols, float* out) {
  if (type == F32) {
    std::memcpy(out, row, sizeof(float) * cols);
    return;
  }
  if (type == F16) {
    for (int k = 0; k < cols; ++k) out[k] = to_float(half_at(row + 2 * k));
    return;
  }
  Group group = {};
  for (int g = 0; g < cols / kGroup; ++g) {
    read_group(type, row, g, group);
    group_floats(type, group, out + g * kGroup);
  }
}

inline void pack_codes(int type, const Group* rows, uint8_t* out) {
  for (int r = 0; r < kStrip; ++r)
    for (int b = 0; b < 4; ++b) {
      const uint8_t* code = rows[r].code + b;
      uint8_t* at = out + 4 * r + b;
      if (bits(type) == 8) {
        for (int q = 0; q < 8; ++q) at[64 * q] = code[4 * q];
        continue;
      }
      for (int i = 0; i < 4; ++i) at[64 * i] = (code[8 * i] & 15) | (code[8 * i + 4] & 15) << 4;
      if (bits(type) == 6)
        for (int h = 0; h < 2; ++h)
          at[256 + 64 * h] = code[16 * h] >> 4 | code[16 * h + 4] >> 4 << 2 | code[16 * h + 8] >> 4 << 4 |
                             code[16 * h + 12] >> 4 << 6;
    }
}

// One strip. `rows` are 16 rows of the file; null where the matrix has ended.
inline void pack_strip(int type, const uint8_t* const* rows, int cols, uint8_t* out) {
  const int groups = cols / kGroup;
  Group group[kStrip];
  for (int first = 0; first < groups; first += kBlock) {
    const int count = groups - first < kBlock ? groups - first : kBlock;
    uint8_t* scales = out + count * code_bytes(type);
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < kStrip; ++r) {
        std::memset(&group[r], 0, sizeof(Group));
        if (rows[r]) read_group(type, rows[r], first + i, group[r]);
      }
      pack_codes(type, group, out + i * code_bytes(type));
      const bool halves = i == 0 || !is_k(type);
      for (int r = 0; r < kStrip && halves; ++r) {
        std::memcpy(scales + 2 * r, &group[r].d, 2);
        if (has_min(type)) std::memcpy(scales + 32 + 2 * r, &group[r].m, 2);
      }
      if (halves) scales += super_bytes(type);
      for (int r = 0; r < kStrip && is_k(type); ++r) {
        scales[r] = group[r].scale[0];
        scales[16 + r] = group[r].scale[1];
      }
      scales += scale_bytes(type);
    }
    out += block_bytes(type, count);
  }
}

// Row r of a strip as floats, the same as before it was packed.
inline void dequantise_packed(int type, const uint8_t* strip, int r, int cols, float* out) {
  const int groups = cols / kGroup;
  Group group = {};
  for (int g = 0; g < groups; ++g, out += kGroup) {
    const int i = g % kBlock, count = groups - (g - i) < kBlock ? groups - (g - i) : kBlock;
    const uint8_t* block = strip + (g - i) / kBlock * block_bytes(type, kBlock);
    for (int b = 0; b < 4; ++b) {
      const uint8_t* at = block + i * code_bytes(type) + 4 * r + b;
      uint8_t* code = group.code + b;
      for (int q = 0; q < 8; ++q) {
        code[4 * q] = bits(type) == 8 ? at[64 * q] : at[64 * (q / 2)] >> 4 * (q % 2) & 15;
        if (bits(type) == 6) code[4 * q] |= (at[256 + 64 * (q / 4)] >> 2 * (q % 4) & 3) << 4;
      }
    }
    const uint8_t* scales = block + count * code_bytes(type);
    const uint8_t* halves = scales + (is_k(type) ? 0 : i * (super_bytes(type) + scale_bytes(type)));
    group.d = half_at(halves + 2 * r);
    if (has_min(type)) group.m = half_at(halves + 32 + 2 * r);
    const uint8_t* own = scales + super_bytes(type) + i * scale_bytes(type);
    for (int s = 0; s < 2 && is_k(type); ++s) group.scale[s] = own[16 * s + r];
    group_floats(type, group, out);
  }
}

// ------------------------------------------------------------------------------------------------------- activations

// 32 activations of one token
struct Activation {
  int8_t q[kGroup];
  float scale, sum;      // sum of scale * q
  int16_t half_sum[2];   // of q, for each 16
  int16_t group, token;  // of a rounding remainder: where it belongs (below 2^20 columns); the group is -1 after the last
};
static_assert(sizeof(Activation) == 48, "kernels count on it");

// q = x / scale, rounded to even; the largest becomes ±127. Where an x is not finite, neither is the scale.
inline void quantise(const float* x, Activation& out) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512 wide = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
  const float most = _mm512_reduce_max_ps(wide);
  const bool nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
  const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  const __m512i i = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), j = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q), _mm512_cvtsepi32_epi8(i));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + 16), _mm512_cvtsepi32_epi8(j));
  out.half_sum[0] = _mm512_reduce_add_epi32(i);
  out.half_sum[1] = _mm512_reduce_add_epi32(j);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 v[4], wide = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  for (int k = 0; k < 4; ++k) {
    v[k] = _mm256_loadu_ps(x + 8 * k);
    wide = _mm256_max_ps(wide, _mm256_andnot_ps(sign, v[k]));
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v[k], v[k], _CMP_UNORD_Q));
  }
  const bool nan = _mm256_movemask_ps(odd) != 0;
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  const float most = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  const __m256 inverse = _mm256_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  for (int h = 0; h < 2; ++h) {
    const __m256i i = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * h], inverse));
    const __m256i j = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * h + 1], inverse));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(i, j), 0xD8);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + 16 * h), _mm_packs_epi16(low, high));
    __m128i sum = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    out.half_sum[h] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  float32x4_t v[8], wide = vdupq_n_f32(0);
  for (int k = 0; k < 8; ++k) {
    v[k] = vld1q_f32(x + 4 * k);
    wide = vmaxq_f32(wide, vabsq_f32(v[k]));  // keeps NaN
  }
  const float most = vmaxvq_f32(wide);
  const bool nan = most != most;
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  for (int h = 0; h < 2; ++h) {
    int16x4_t words[4];
    for (int k = 0; k < 4; ++k) words[k] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v[4 * h + k], inverse)));
    const int16x8_t low = vcombine_s16(words[0], words[1]), high = vcombine_s16(words[2], words[3]);
    vst1q_s8(out.q + 16 * h, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    out.half_sum[h] = vaddlvq_s16(vaddq_s16(low, high));
  }
#else
  float most = 0;
  bool nan = false;
  for (int k = 0; k < kGroup; ++k) {
    const float size = std::fabs(x[k]);
    most = most > size ? most : size;
    nan |= x[k] != x[k];
  }
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  out.half_sum[0] = out.half_sum[1] = 0;
  for (int k = 0; k < kGroup; ++k) {
    out.q[k] = nan || most > 3e38f ? 0 : static_cast<int8_t>(std::nearbyint(x[k] * inverse));
    out.half_sum[k / 16] = static_cast<int16_t>(out.half_sum[k / 16] + out.q[k]);
  }
#endif
  out.scale = nan ? NAN : most / 127.0f;
  out.sum = out.scale * static_cast<float>(out.half_sum[0] + out.half_sum[1]);
}

// ------------------------------------------------------------------------------- what the processor offers for a strip

// Four activations, loaded by themselves: a broadcast from memory uses a load port. Eight at once would go through an
// integer register, and a broadcast from there uses a port that multiplies.
inline int32_t int_at(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return four;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
struct Lanes {  // 16 rows in a register, 8 tokens in 16 registers
  static constexpr int kRows = 16, kTokens = 8, kShift = 128;
  static constexpr const char* name = "avx512-vnni";
  typedef __m512i bytes;
  typedef __m512i ints;
  typedef __m512 floats;
  static bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static bytes load_signed(const uint8_t* p) { return _mm512_xor_si512(load(p), _mm512_set1_epi8(-128)); }
  static bytes low(bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
  static bytes high(bytes b) { return low(_mm512_srli_epi16(b, 4)); }
  template <int Q>
  static bytes with_bits(bytes both, bytes two) {  // the low or, of an odd Q, the high half; then bits 2Q and 2Q+1
    const bytes b = Q % 2 ? high(both) : low(both);
    const bytes moved = Q < 2 ? _mm512_slli_epi16(two, 4 - 2 * Q) : _mm512_srli_epi16(two, 2 * Q - 4);
    return _mm512_ternarylogic_epi32(b, moved, _mm512_set1_epi8(48), 0xF8);
  }
  static ints fill(int32_t v) { return _mm512_set1_epi32(v); }
  // The instruction spreads the four activations over its register itself; GCC 12 makes a second instruction of that.
  static ints dot(ints sum, bytes w, const int8_t* x) {
#ifdef __clang__
    return _mm512_dpbusd_epi32(sum, w, fill(int_at(x)));
#else
    typedef int8_t four[4];
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const four*>(x)));
    return sum;
#endif
  }
  template <int Bits>
  static ints dot(ints sum, bytes a, bytes b, const int8_t* x) {  // 4 columns of a, the next 4 of b
    return dot(dot(sum, a, x), b, x + 4);
  }
  static floats zero() { return _mm512_setzero_ps(); }
  static floats halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static floats unsigned_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static floats signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static floats convert(ints v) { return _mm512_cvtepi32_ps(v); }
  static floats times(floats a, floats b) { return _mm512_mul_ps(a, b); }
  static floats times(floats a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
  static floats add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
  static floats add(floats a, float b, floats c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
  static floats minus(floats a, float b, floats c) { return _mm512_fnmadd_ps(a, _mm512_set1_ps(b), c); }  // c - a b
  static floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, floats v) { _mm512_storeu_ps(p, v); }
};
template <int T>
using LanesOf = Lanes;  // for T tokens
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
struct Lanes {  // 8 rows in a register, 4 tokens in 8 registers
  static constexpr int kRows = 8, kTokens = 4;
  typedef __m256i bytes;
  typedef __m256i ints;
  typedef __m256 floats;
  static bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static bytes low(bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
  static bytes high(bytes b) { return low(_mm256_srli_epi16(b, 4)); }
  template <int Q>
  static bytes with_bits(bytes both, bytes two) {
    const bytes b = Q % 2 ? high(both) : low(both);
    const bytes moved = Q < 2 ? _mm256_slli_epi16(two, 4 - 2 * Q) : _mm256_srli_epi16(two, 2 * Q - 4);
    return _mm256_or_si256(b, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
  }
  static ints fill(int32_t v) { return _mm256_set1_epi32(v); }
#ifdef __AVXVNNI__
  static constexpr int kShift = 128;
  static constexpr const char* name = "avx-vnni";
  static bytes load_signed(const uint8_t* p) { return _mm256_xor_si256(load(p), _mm256_set1_epi8(-128)); }
  template <int Bits>
  static ints dot(ints sum, bytes a, bytes b, const int8_t* x) {
    sum = _mm256_dpbusd_avx_epi32(sum, a, _mm256_set1_epi32(int_at(x)));
    return _mm256_dpbusd_avx_epi32(sum, b, _mm256_set1_epi32(int_at(x + 4)));
  }
#else
  static constexpr int kShift = 0;
  static constexpr const char* name = "avx2";
  static bytes load_signed(const uint8_t* p) { return load(p); }
  template <int Bits>
  static ints dot(ints sum, bytes w, const int8_t* x) {  // sums of two products fit 16 bits: 2 · 127 · 128 < 2¹⁵
    const bytes b = _mm256_set1_epi32(int_at(x));
    const ints pairs = Bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(b, w)) : _mm256_maddubs_epi16(w, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  template <int Bits>
  static ints dot(ints sum, bytes a, bytes b, const int8_t* x) {
    return dot<Bits>(dot<Bits>(sum, a, x), b, x + 4);
  }
#endif
  static floats zero() { return _mm256_setzero_ps(); }
  static floats halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static floats unsigned_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static floats signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static floats convert(ints v) { return _mm256_cvtepi32_ps(v); }
  static floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
  static floats times(floats a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
  static floats add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
  static floats add(floats a, float b, floats c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
  static floats minus(floats a, float b, floats c) { return _mm256_fnmadd_ps(a, _mm256_set1_ps(b), c); }
  static floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, floats v) { _mm256_storeu_ps(p, v); }
};
template <int T>
using LanesOf = Lanes;
#elif defined(__ARM_FEATURE_DOTPROD)
template <int R>
struct Neon {  // 4 R rows in R registers
  static constexpr int kRows = 4 * R, kTokens = 8, kShift = 0;
  static constexpr int32_t kMagic = 0x4b400000;  // the bits of 1.5 · 2²³
  static constexpr const char* name = "neon-dotprod";
  struct bytes { int8x16_t v[R]; };
  struct ints { int32x4_t v[R]; };
  struct floats { float32x4_t v[R]; };
  template <class Out, class F>
  static Out each(F f) {  // written out: the compiler keeps arrays in registers only where it sees every index
    if constexpr (R == 1) return {{f(0)}};
    else if constexpr (R == 2) return {{f(0), f(1)}};
    else return {{f(0), f(1), f(2), f(3)}};
  }
  static bytes load(const uint8_t* p) {
    return each<bytes>([&](int r) { return vreinterpretq_s8_u8(vld1q_u8(p + 16 * r)); });
  }
  static bytes load_signed(const uint8_t* p) { return load(p); }
  static bytes low(bytes b) {
    return each<bytes>([&](int r) { return vandq_s8(b.v[r], vdupq_n_s8(15)); });
  }
  static bytes high(bytes b) {
    return each<bytes>([&](int r) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(b.v[r]), 4)); });
  }
  template <int Q>
  static bytes with_bits(bytes both, bytes two) {
    return each<bytes>([&](int r) {
      const uint8x16_t four = vreinterpretq_u8_s8(both.v[r]), bits = vreinterpretq_u8_s8(two.v[r]), six = vdupq_n_u8(63);
      uint8x16_t code;
      // the highest two bits may be any until the end
      if constexpr (Q == 0) code = vsliq_n_u8(four, bits, 4);
      else if constexpr (Q == 1) code = vsriq_n_u8(vshlq_n_u8(bits, 2), four, 4);
      else if constexpr (Q == 2) code = vbslq_u8(vdupq_n_u8(15), four, bits);
      else code = vsriq_n_u8(vshrq_n_u8(bits, 2), four, 4);
      return vreinterpretq_s8_u8(vandq_u8(code, six));
    });
  }
  static ints fill(int32_t v) {
    return each<ints>([&](int) { return vdupq_n_s32(kMagic + v); });
  }
  template <int Bits>
  static ints dot(ints sum, bytes a, bytes b, const int8_t* x) {
    const int8x8_t eight = vld1_s8(x);
    return each<ints>([&](int r) {
      return vdotq_lane_s32(vdotq_lane_s32(sum.v[r], a.v[r], eight, 0), b.v[r], eight, 1);
    });
  }
  static floats zero() {
    return each<floats>([](int) { return vdupq_n_f32(0); });
  }
  static floats halves(const uint8_t* p) {
    return each<floats>([&](int r) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * r))); });
  }
  // each byte as the lowest of a float that is 2²³ without it
  static float32x4_t bytes_as_floats(uint32_t four, float less) {
    const uint8x16_t from = vcombine_u8(vreinterpret_u8_u32(vdup_n_u32(four)), vcreate_u8(0x4b));
    const uint8x16_t places = vcombine_u8(vcreate_u8(0x08090901'08090900), vcreate_u8(0x08090903'08090902));
    return vsubq_f32(vreinterpretq_f32_u8(vqtbl1q_u8(from, places)), vdupq_n_f32(less));
  }
  static floats unsigned_bytes(const uint8_t* p) {
    return each<floats>([&](int r) { return bytes_as_floats(word_at(p + 4 * r), 0x1p23f); });
  }
  static floats signed_bytes(const uint8_t* p) {
    return each<floats>([&](int r) { return bytes_as_floats(word_at(p + 4 * r) ^ 0x80808080, 0x1p23f + 128); });
  }
  // a sum that began with kMagic is a float's bits: exact below 2²², and cheaper than a conversion
  static floats convert(ints v) {
    return each<floats>([&](int r) { return vsubq_f32(vreinterpretq_f32_s32(v.v[r]), vdupq_n_f32(0x1.8p23f)); });
  }
  static floats times(floats a, floats b) {
    return each<floats>([&](int r) { return vmulq_f32(a.v[r], b.v[r]); });
  }
  static floats times(floats a, float b) {
    return each<floats>([&](int r) { return vmulq_n_f32(a.v[r], b); });
  }
  static floats add(floats a, floats b, floats c) {
    return each<floats>([&](int r) { return vfmaq_f32(c.v[r], a.v[r], b.v[r]); });
  }
  static floats add(floats a, float b, floats c) {
    return each<floats>([&](int r) { return vfmaq_n_f32(c.v[r], a.v[r], b); });
  }
  static floats minus(floats a, float b, floats c) {
    return each<floats>([&](int r) { return vfmsq_n_f32(c.v[r], a.v[r], b); });
  }
  static floats load(const float* p) {
    return each<floats>([&](int r) { return vld1q_f32(p + 4 * r); });
  }
  static void store(float* p, floats v) {
    for (int r = 0; r < R; ++r) vst1q_f32(p + 4 * r, v.v[r]);
  }
};
typedef Neon<4> Lanes;
template <int T>
using LanesOf = Neon<T <= 2 ? 4 : T <= 4 ? 2 : 1>;  // the sums of T tokens, in integers and in floats, fit the registers
#else
struct Lanes {  // any processor; one token at a time, so that every pass runs the same instructions
  static constexpr int kRows = 16, kTokens = 1, kShift = 0;
  static constexpr const char* name = "portable";
  struct bytes { int8_t v[64]; };
  struct ints { int32_t v[16]; };
  struct floats { float v[16]; };
  template <class Out, class F>
  static Out each(F f) {
    Out out;
    for (size_t i = 0; i < sizeof out.v / sizeof out.v[0]; ++i) out.v[i] = f(i);
    return out;
  }
  static bytes load(const uint8_t* p) {
    bytes b;
    std::memcpy(b.v, p, sizeof b.v);
    return b;
  }
  static bytes load_signed(const uint8_t* p) { return load(p); }
  static bytes low(bytes b) { return each<bytes>([&](size_t i) { return b.v[i] & 15; }); }
  static bytes high(bytes b) { return each<bytes>([&](size_t i) { return static_cast<uint8_t>(b.v[i]) >> 4; }); }
  template <int Q>
  static bytes with_bits(bytes both, bytes two) {
    const bytes b = Q % 2 ? high(both) : low(both);
    return each<bytes>([&](size_t i) { return b.v[i] | (static_cast<uint8_t>(two.v[i]) >> 2 * Q & 3) << 4; });
  }
  static ints fill(int32_t v) { return each<ints>([&](size_t) { return v; }); }
  template <int Bits>
  static ints dot(ints sum, bytes a, bytes b, const int8_t* x) {
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 4; ++k) sum.v[r] += a.v[4 * r + k] * x[k] + b.v[4 * r + k] * x[4 + k];
    return sum;
  }
  static floats zero() { return each<floats>([](size_t) { return 0.0f; }); }
  static floats halves(const uint8_t* p) { return each<floats>([&](size_t i) { return to_float(half_at(p + 2 * i)); }); }
  static floats unsigned_bytes(const uint8_t* p) { return each<floats>([&](size_t i) { return static_cast<float>(p[i]); }); }
  static floats signed_bytes(const uint8_t* p) {
    return each<floats>([&](size_t i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
  }
  static floats convert(ints v) { return each<floats>([&](size_t i) { return static_cast<float>(v.v[i]); }); }
  static floats times(floats a, floats b) { return each<floats>([&](size_t i) { return a.v[i] * b.v[i]; }); }
  static floats times(floats a, float b) { return each<floats>([&](size_t i) { return a.v[i] * b; }); }
  static floats add(floats a, floats b, floats c) { return each<floats>([&](size_t i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  static floats add(floats a, float b, floats c) { return each<floats>([&](size_t i) { return a.v[i] * b + c.v[i]; }); }
  static floats minus(floats a, float b, floats c) { return each<floats>([&](size_t i) { return c.v[i] - a.v[i] * b; }); }
  static floats load(const float* p) { return each<floats>([&](size_t i) { return p[i]; }); }
  static void store(float* p, floats v) { std::memcpy(p, v.v, sizeof v.v); }
};
template <int T>
using LanesOf = Lanes;
#endif

// --------------------------------------------------------------------------------------------------- the multiplication

// Columns 8I … 8I+7 of a group: unpacked once, multiplied with every token.
template <class L, int Kind, int T, int I>
__attribute__((always_inline)) inline void eight_columns(const uint8_t* w, const Activation* x, typename L::ints (&sum)[T]) {
  constexpr int B = bits(Kind);
  typename L::bytes a, b;
  if (B == 8) {
    a = L::load_signed(w + 128 * I);
    b = L::load_signed(w + 128 * I + 64);
  } else {
    const typename L::bytes both = L::load(w + 64 * I);
    if (B == 6) {
      const typename L::bytes two = L::load(w + 256 + 64 * (I / 2));
      a = L::template with_bits<2 * (I % 2)>(both, two);
      b = L::template with_bits<2 * (I % 2) + 1>(both, two);
    } else {
      a = L::low(both);
      b = L::high(both);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) sum[t] = L::template dot<B>(sum[t], a, b, x[t].q + 8 * I);
}

// The scales of a block of 256 for the rows of a register or two.
template <class L, int Kind>
struct Super {
  typename L::floats d = L::zero(), least = L::zero();
  explicit Super(const uint8_t* halves) {
    if (!is_k(Kind)) return;
    d = L::halves(halves);
    if (has_min(Kind)) least = L::halves(halves + 32);
  }
};

// total[t][r] += one group of weights times the activations of T tokens. w and s are its codes and scales.
template <class L, int Kind, int T>
__attribute__((always_inline)) inline void add_group(const uint8_t* w, const uint8_t* s, int lane,
                                                     const Super<L, Kind>& super, const Activation* x,
                                                     typename L::floats (&total)[T]) {
  constexpr int away = offset(Kind) + (bits(Kind) == 8 ? L::kShift : 0);
  typedef typename L::floats floats;
  typename L::ints sum[T];
  w += 4 * lane;
  if (Kind == Q6_K) {  // a scale for each 16
    floats half[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sum[t] = L::fill(-away * x[t].half_sum[0]);
    eight_columns<L, Kind, T, 0>(w, x, sum);
    eight_columns<L, Kind, T, 1>(w, x, sum);
    const floats first = L::times(L::signed_bytes(s + lane), super.d);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      half[t] = L::times(L::convert(sum[t]), first);
      sum[t] = L::fill(-away * x[t].half_sum[1]);
    }
    eight_columns<L, Kind, T, 2>(w, x, sum);
    eight_columns<L, Kind, T, 3>(w, x, sum);
    const floats second = L::times(L::signed_bytes(s + 16 + lane), super.d);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      total[t] = L::add(L::add(L::convert(sum[t]), second, half[t]), x[t].scale, total[t]);
    return;
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) sum[t] = L::fill(away ? -away * (x[t].half_sum[0] + x[t].half_sum[1]) : 0);
  eight_columns<L, Kind, T, 0>(w, x, sum);
  eight_columns<L, Kind, T, 1>(w, x, sum);
  eight_columns<L, Kind, T, 2>(w, x, sum);
  eight_columns<L, Kind, T, 3>(w, x, sum);
  const floats scale = is_k(Kind) ? L::times(L::unsigned_bytes(s + lane), super.d) : L::halves(s + 2 * lane);
  floats minimum = L::zero();
  if (has_min(Kind))
    minimum = is_k(Kind) ? L::times(L::unsigned_bytes(s + 16 + lane), super.least) : L::halves(s + 32 + 2 * lane);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    total[t] = L::add(L::times(L::convert(sum[t]), x[t].scale), scale, total[t]);
    if (has_min(Kind)) total[t] = is_k(Kind) ? L::minus(minimum, x[t].sum, total[t]) : L::add(minimum, x[t].sum, total[t]);
  }
}

// y[t][r] for T tokens and the rows of a strip that L holds, from `lane` on: groups [from, to), added to y after the
// first. x is [groups][stride].
template <class L, int Kind, int T>
__attribute__((noinline)) void some_rows(const uint8_t* strip, int lane, const Activation* x, int stride, int groups,
                                         int from, int to, float (*y)[kStrip]) {
  constexpr int passes = kStrip / L::kRows, lines = block_bytes(Kind, kBlock) / 64;
  constexpr int share = (lines + kBlock * passes - 1) / (kBlock * passes);  // of the lines that are fetched ahead
  constexpr int ahead = passes == 1 ? kAhead : kPart / kBlock * block_bytes(Kind, kBlock);
  typename L::floats total[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) total[t] = from ? L::load(y[t] + lane) : L::zero();
  x += static_cast<int64_t>(from) * stride;
  for (int g = from; g < to; g += kBlock) {
    const int count = groups - g < kBlock ? groups - g : kBlock;
    const uint8_t* w = strip + static_cast<int64_t>(g / kBlock) * block_bytes(Kind, kBlock);
    const uint8_t* s = w + count * code_bytes(Kind);
    const Super<L, Kind> super(s + 2 * lane);
    const uint8_t* next = w + ahead + 64 * share * kBlock * (lane / L::kRows);
    s += super_bytes(Kind);
    for (int i = 0; i < count; ++i, w += code_bytes(Kind), s += scale_bytes(Kind), x += stride) {
      for (int j = 0; j < share; ++j, next += 64) __builtin_prefetch(next);
      add_group<L, Kind, T>(w, s, lane, super, x, total);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) L::store(y[t] + lane, total[t]);
}

// Adds to y what rounding left of large groups. Most of them are large in few tokens of a tile: each is multiplied alone.
template <int Kind>
__attribute__((noinline)) void add_rest(const uint8_t* strip, const Activation* rest, int groups, float (*y)[kStrip]) {
  typedef LanesOf<1> L;
  for (; rest->group >= 0; ++rest) {
    const int i = rest->group % kBlock, first = rest->group - i;
    const int count = groups - first < kBlock ? groups - first : kBlock;
    const uint8_t* w = strip + static_cast<int64_t>(first / kBlock) * block_bytes(Kind, kBlock);
    const uint8_t* s = w + count * code_bytes(Kind);
    for (int lane = 0; lane < kStrip; lane += L::kRows) {
      const Super<L, Kind> super(s + 2 * lane);
      typename L::floats total[1] = {L::load(y[rest->token] + lane)};
      add_group<L, Kind, 1>(w + i * code_bytes(Kind), s + super_bytes(Kind) + i * scale_bytes(Kind), lane, super, rest,
                            total);
      L::store(y[rest->token] + lane, total[0]);
    }
  }
}

// The types of most files have kernels for many tokens; the others are unpacked again for every two: compilation time.
constexpr int most_tokens(int type) {
  const bool common = type == Q4_0 || type == Q4_1 || type == Q8_0 || type == Q4_K || type == Q6_K;
  return Lanes::kTokens == 1 || common ? Lanes::kTokens : 2;
}

template <int Kind, int T>
void tile_of(const uint8_t* w, const Activation* x, int stride, int groups, float (*y)[kStrip]) {
  typedef LanesOf<T> L;
  const int part = L::kRows == kStrip ? groups : kPart;
  for (int from = 0; from < groups; from += part) {
    const int to = groups - from < part ? groups : from + part;
    for (int lane = 0; lane < kStrip; lane += L::kRows)
      some_rows<L, Kind, T>(w, lane, x, stride, groups, from, to, y);
  }
}

// y[t][r] for the tokens of a tile and the rows of a strip. x is [groups][tokens], then what rounding left.
template <int Kind>
void strip(const uint8_t* w, const Activation* x, int tokens, int groups, float (*y)[kStrip]) {
  constexpr int most = most_tokens(Kind);
  for (int t = 0; t < tokens;) {
    const int left = tokens - t;
    if constexpr (most >= 8) {
      if (left >= 8) { tile_of<Kind, 8>(w, x + t, tokens, groups, y + t); t += 8; continue; }
      if (left == 6) { tile_of<Kind, 6>(w, x + t, tokens, groups, y + t); t += 6; continue; }
      if (left == 5) { tile_of<Kind, 5>(w, x + t, tokens, groups, y + t); t += 5; continue; }
    }
    if constexpr (most >= 4) {
      if (left >= 4) { tile_of<Kind, 4>(w, x + t, tokens, groups, y + t); t += 4; continue; }
      if (left == 3) { tile_of<Kind, 3>(w, x + t, tokens, groups, y + t); t += 3; continue; }
    }
    if constexpr (most >= 2) {
      if (left >= 2) { tile_of<Kind, 2>(w, x + t, tokens, groups, y + t); t += 2; continue; }
    }
    tile_of<Kind, 1>(w, x + t, tokens, groups, y + t);
    t += 1;
  }
  add_rest<Kind>(w, x + static_cast<int64_t>(groups) * tokens, groups, y);
}

__attribute__((noinline)) inline void multiply(int type, const uint8_t* w, const Activation* x, int tokens, int groups,
                                               float (*y)[kStrip]) {
  switch (type) {
    case Q4_0: return strip<Q4_0>(w, x, tokens, groups, y);
    case Q4_1: return strip<Q4_1>(w, x, tokens, groups, y);
    case Q5_0: return strip<Q5_0>(w, x, tokens, groups, y);
    case Q5_1: return strip<Q5_1>(w, x, tokens, groups, y);
    case Q8_0: return strip<Q8_0>(w, x, tokens, groups, y);
    case Q4_K: return strip<Q4_K>(w, x, tokens, groups, y);
    case Q5_K: return strip<Q5_K>(w, x, tokens, groups, y);
    default: return strip<Q6_K>(w, x, tokens, groups, y);
  }
}

// Tokens of the tile that begins at token m: even shares, 9 tokens are 5 + 4.
inline int tile(int tokens, int m) {
  const int tiles = (tokens - m + Lanes::kTokens - 1) / Lanes::kTokens;
  return (tokens - m + tiles - 1) / tiles;
}

// Room for the activations of a token: every group twice, and an end.
constexpr int64_t activations(int64_t cols) { return 2 * (cols / kGroup) + 1; }

// What rounding left of 32 activations, once more in int8.
inline void quantise_rest(const float* x, const Activation& rounded, Activation& out) {
  float rest[kGroup];
  for (int k = 0; k < kGroup; ++k) rest[k] = x[k] - rounded.scale * static_cast<float>(rounded.q[k]);
  quantise(rest, out);
}

// The activations of a tile: [groups][tokens], then what rounding left of every group that is large in its token, in the
// order of the groups.
inline void quantise_tile(const float* x, int tokens, int cols, Activation* out) {
  const int groups = cols / kGroup;
  float limit[Lanes::kTokens];
  for (int t = 0; t < tokens; ++t) {
    float sum = 0;
    for (int g = 0; g < groups; ++g) {
      Activation& a = out[static_cast<int64_t>(g) * tokens + t];
      quantise(x + static_cast<int64_t>(t) * cols + g * kGroup, a);
      sum += a.scale;
    }
    limit[t] = kLarge * sum / static_cast<float>(groups);
  }
  Activation* rest = out + static_cast<int64_t>(groups) * tokens;
  for (int g = 0; g < groups; ++g) {
    const Activation* rounded = out + static_cast<int64_t>(g) * tokens;
    for (int t = 0; t < tokens; ++t) {
      if (!(rounded[t].scale > limit[t])) continue;
      quantise_rest(x + static_cast<int64_t>(t) * cols + g * kGroup, rounded[t], *rest);
      rest->group = static_cast<int16_t>(g);
      rest->token = static_cast<int16_t>(t);
      ++rest;
    }
  }
  rest->group = -1;
}

// Activations [tokens, cols] as the kernels read them, tile by tile.
inline void quantise(const float* x, int tokens, int cols, Activation* out) {
  for (int m = 0, height; m < tokens; m += height) {
    height = tile(tokens, m);
    quantise_tile(x + static_cast<int64_t>(m) * cols, height, cols, out);
    out += height * activations(cols);
  }
}

}  // namespace blocks
