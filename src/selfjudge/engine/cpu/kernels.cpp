// One forward pass of a described model (models/shape.py) over a few tokens, on a CPU.
//
// Decoding needs every weight once per pass, however many tokens the pass has. General matrix libraries repack the
// weights for 2 or more tokens, which costs more than that. Here each thread reads its share of the rows of every
// matrix once and multiplies them with up to four tokens at a time. Weights are float, or blocks of a GGUF file
// (blocks.h); activations are then quantised to int8.
//
// Tokens of a pass are independent (row, position) pairs. Every row has its own keys and values, so a ragged batch needs
// no padding, no mask and no holes: rewinding a row is forgetting its last positions. Sums have one order, whatever else
// is in the pass: a prompt read in pieces gives the same bits as one read at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

#include "blocks.h"

namespace {

constexpr int kTokens = 4;   // tokens per micro-kernel: 16 sums, 4 weights and 4 inputs fit the registers
constexpr int kRows = 4;     // matrix rows per micro-kernel

constexpr int kFirstLevel = 1 << 15, kSecondLevel = 1 << 18;  // bytes of a core's caches that may be counted on

constexpr int min_int(int a, int b) { return a < b ? a : b; }

typedef float vec __attribute__((vector_size(16), aligned(4)));
constexpr int kLanes = 4;

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline float total(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
typedef int32_t lanes __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, lanes{i, j, k, l})
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#endif

// the totals of four vectors
inline vec totals(vec a, vec b, vec c, vec d) {
  const vec ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
  const vec cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
  return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// kWide floats fill a register; `folded` adds them up to four. `mix` sums kMixed registers of values at a time.
#if defined(__AVX512F__)
constexpr int kWide = 16, kMixed = 4;
#elif defined(__AVX__)
constexpr int kWide = 8, kMixed = 2;
#else
constexpr int kWide = 4, kMixed = 4;
#endif
typedef float Wide __attribute__((vector_size(4 * kWide), aligned(4)));

inline Wide load_wide(const float* p) { return *reinterpret_cast<const Wide*>(p); }
inline void store(float* p, Wide v) { *reinterpret_cast<Wide*>(p) = v; }

inline vec folded(Wide v) {
#if defined(__AVX512F__)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), high);
#elif defined(__AVX__)
  const __m256 half = (__m256)v;
#endif
#ifdef __AVX__
  return (vec)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  return v;
#endif
}

// exp(x) for x <= 0 to float accuracy, without branches so that the compiler can vectorise the loop around it
inline float exp_neg(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = std::floor(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

inline float silu(float x) {
  const float e = exp_neg(-std::fabs(x));
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

inline float gelu(float x) {  // by tanh: x times the logistic function of 2 · sqrt(2/π) · (x + 0.044715 x³)
  const float z = 1.5957691216f * (x + 0.044715f * x * x * x), e = exp_neg(-std::fabs(z));
  return x * (z < 0 ? e : 1.0f) / (1.0f + e);
}

// x = limit · tanh(x / limit)
inline void cap(float* x, int count, float limit) {
  const float steep = -2.0f / limit;
  for (int s = 0; s < count; ++s) {
    const float e = exp_neg(steep * std::fabs(x[s])), y = limit * (1.0f - e) / (1.0f + e);
    x[s] = x[s] < 0 ? -y : y;
  }
}

}  // namespace

extern "C" {

struct Matrix {
  const void* weight;  // [rows, cols] float, or strips of blocks
  const float* bias;   // [rows] or null
  int32_t rows, cols;
  int32_t type;        // blocks::Type
};

struct Layer {
  Matrix query, key, value, out, gate, up, down;
  const float *attention_norm, *mlp_norm;    // before attention and feed-forward layer, or null
  const float *attention_after, *mlp_after;  // of what they add to the residual stream, or null
  const float *query_norm, *key_norm;        // [head_dim], or [heads, head_dim] with whole_norms; or null
  int32_t window;                            // positions that a token sees, its own included; 0: all
  int32_t table;                             // which rotary table
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  float epsilon, attention_scale, attention_cap, embedding_scale, residual_scale, logit_scale, logit_cap;  // cap 0: none
  int32_t gelu, whole_norms;
  const void* embedding;  // [vocabulary, hidden] as in the file, or as packed
  int32_t embedding_type, embedding_packed;
  const Layer* layer;
  const float* norm;
  Matrix head;
  // only for a draft head, whose one layer reads the embedding and a state side by side; null and empty in a model
  const float* state_norm;
  Matrix fuse;            // [hidden, 3 · hidden] turns the target's features into a state
  int32_t norm_before_residual;  // the layer adds to the state after its norm, not to the state itself
};

struct Pass {
  int32_t tokens, slots, outputs;  // slots: the most that a row has
  const int64_t* ids;        // [tokens]
  const int32_t *row, *position;  // [tokens]
  const int32_t* output;     // [outputs] tokens whose logits are wanted
  const int32_t* row_slots;  // [rows]
  const float *cosine, *sine;  // [tables, table_slots, head_dim]
  float* const* cache;       // of each row: keys and values [2, layers, kv_heads, row_slots, head_dim]
  float* logits;             // [outputs, head.rows]
  float* states;             // [outputs, hidden] after the final norm
  float* scratch;            // scratch_size floats
  int32_t threads;
  int32_t taps;              // how many layers' inputs are wanted
  const int32_t* tap;        // [taps]
  float* features;           // [tokens, taps, hidden]
  const float* states_in;    // [tokens, states_width] a head's own states (hidden) or target features (3 · hidden)
  int32_t states_width;
  float* residual;           // [outputs, hidden] a head's states after its layer
  int32_t table_slots;
  int64_t* best;             // [outputs] the first of the most likely tokens, -1 where a logit is NaN or +inf
};

}  // extern "C"

namespace {

// Activations as a matrix product reads them: float, or quantised.
struct Input {
  const float* x;
  const blocks::Activation* q;
};

// Where the largest of these values is first; -1 where one is NaN or +inf.
int64_t likeliest(const float* x, int count) {
  constexpr int kLanes = 32;
  float most[kLanes];
  int32_t at[kLanes] = {}, bad[kLanes] = {};
  std::fill(most, most + kLanes, -INFINITY);
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const float value = x[i + j];
      bad[j] |= !(value < INFINITY);
      at[j] = value > most[j] ? i + j : at[j];
      most[j] = value > most[j] ? value : most[j];
    }
  float best = -INFINITY;
  int64_t place = 0;
  for (int j = 0; j < kLanes; ++j) {
    if (bad[j]) return -1;
    if (most[j] > best || (most[j] == best && most[j] > -INFINITY && at[j] < place)) best = most[j], place = at[j];
  }
  for (int i = whole; i < count; ++i) {
    if (!(x[i] < INFINITY)) return -1;
    if (x[i] > best) best = x[i], place = i;
  }
  return place;
}

template <int M, int N>
inline void multiply(const float* x, int stride, const float* w, int cols, float (*y)[kRows]) {
  Wide sum[M][N] = {};
  int k = 0;
#pragma GCC unroll 2
  for (; k + kWide <= cols; k += kWide) {
    if (k % 16 == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) __builtin_prefetch(w + static_cast<size_t>(n + N) * cols + k);  // the next rows
    }
    Wide a[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) a[n] = load_wide(w + static_cast<size_t>(n) * cols + k);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Wide b = load_wide(x + static_cast<size_t>(m) * stride + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] += a[n] * b;
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    if (N == 4) {
      const vec four = totals(folded(sum[m][0]), folded(sum[m][1 % N]), folded(sum[m][2 % N]), folded(sum[m][3 % N]));
      std::memcpy(y[m], &four, sizeof four);
    } else {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) y[m][n] = total(folded(sum[m][n]));
    }
    for (int n = 0; n < N; ++n)
      for (int j = k; j < cols; ++j)
        y[m][n] += x[static_cast<size_t>(m) * stride + j] * w[static_cast<size_t>(n) * cols + j];
  }
}

// y[m][n] for M tokens and N rows of the matrix, chosen at compile time
template <int M, int N>
inline void tile(const Matrix& w, const Input& in, int m, int n, float (*y)[kRows]) {
  multiply<M, N>(in.x + static_cast<size_t>(m) * w.cols, w.cols,
                 static_cast<const float*>(w.weight) + static_cast<size_t>(n) * w.cols, w.cols, y);
}

template <int N>
inline void tile(int tokens, const Matrix& w, const Input& in, int m, int n, float (*y)[kRows]) {
  switch (tokens) {
    case 1: return tile<1, N>(w, in, m, n, y);
    case 2: return tile<2, N>(w, in, m, n, y);
    case 3: return tile<3, N>(w, in, m, n, y);
    default: return tile<4, N>(w, in, m, n, y);
  }
}

template <class Store>
void block_product(const Matrix& w, const Input& in, int tokens, int thread, int threads, Store store) {
  const int groups = w.cols / blocks::kGroup, strips = (w.rows + blocks::kStrip - 1) / blocks::kStrip;
  const int64_t size = blocks::strip_bytes(w.type, w.cols);
  const int begin = static_cast<int>(static_cast<int64_t>(strips) * thread / threads);
  const int end = static_cast<int>(static_cast<int64_t>(strips) * (thread + 1) / threads);
  const int several = min_int(end - begin, static_cast<int>(kSecondLevel / size + 1));  // tiles pass over so many in turn
  alignas(64) float y[blocks::Lanes::kTokens][blocks::kStrip];
  for (int first = begin; first < end; first += several) {
    const blocks::Activation* x = in.q;
    for (int m = 0, height; m < tokens; m += height) {
      height = blocks::tile(tokens, m);
      for (int i = first; i < min_int(first + several, end); ++i) {
        const int n = i * blocks::kStrip, width = min_int(w.rows - n, blocks::kStrip);
        blocks::multiply(w.type, static_cast<const uint8_t*>(w.weight) + i * size, x, height, groups, y);
        for (int t = 0; t < height; ++t) {
          if (w.bias)
            for (int j = 0; j < width; ++j) y[t][j] += w.bias[n + j];
          store(m + t, n, width, y[t]);
        }
      }
      x += height * blocks::activations(w.cols);
    }
  }
}

// Rows n … n + width of a matrix of floats for the tokens [from, to).
template <class Store>
void float_rows(const Matrix& w, const Input& in, int from, int to, int n, int width, Store store) {
  float y[kTokens][kRows];
  for (int m = from, height; m < to; m += height) {
    const int tiles = (to - m + kTokens - 1) / kTokens;  // even shares: 5 tokens are 3 + 2, not 4 + 1
    height = (to - m + tiles - 1) / tiles;
    if (width == kRows) {
      tile<kRows>(height, w, in, m, n, y);
    } else {
      for (int j = 0; j < width; ++j) {
        float column[kTokens][kRows];
        tile<1>(height, w, in, m, n + j, column);
        for (int i = 0; i < height; ++i) y[i][j] = column[i][0];
      }
    }
    for (int i = 0; i < height; ++i) {
      if (w.bias)
        for (int j = 0; j < width; ++j) y[i][j] += w.bias[n + j];
      store(m + i, n, width, y[i]);
    }
  }
}

// Calls store(token, row, count, values) for this thread's share of the rows. Weights are read from memory once: as many
// rows as fit the second-level cache stay there while all tokens pass over them, so many tokens at a time as fit the
// first-level one.
template <class Store>
void product(const Matrix& w, const Input& in, int tokens, int thread, int threads, Store store) {
  if (w.type != blocks::F32) return block_product(w, in, tokens, thread, threads, store);
  const int parts = (w.rows + kRows - 1) / kRows;
  const int begin = static_cast<int>(static_cast<int64_t>(parts) * thread / threads) * kRows;
  const int end = min_int(static_cast<int>(static_cast<int64_t>(parts) * (thread + 1) / threads) * kRows, w.rows);
  const int row = static_cast<int>(sizeof(float)) * w.cols;
  const int rows = (kSecondLevel / row / kRows + 1) * kRows, some = (kFirstLevel / row / kTokens + 1) * kTokens;
  for (int first = begin; first < end; first += rows)
    for (int m = 0; m < tokens; m += some)
      for (int n = first; n < min_int(first + rows, end); n += kRows)
        float_rows(w, in, m, min_int(m + some, tokens), n, min_int(w.rows - n, kRows), store);
}

void normalise(const float* x, const float* weight, float epsilon, int tokens, int hidden, float* y) {
  for (int m = 0; m < tokens; ++m, x += hidden, y += hidden) {
    vec squares = {};
    int k = 0;
    for (; k + kLanes <= hidden; k += kLanes) squares += load(x + k) * load(x + k);
    float sum = total(squares);
    for (; k < hidden; ++k) sum += x[k] * x[k];
    const float scale = 1.0f / std::sqrt(sum / hidden + epsilon);
    for (k = 0; k < hidden; ++k) y[k] = x[k] * scale * weight[k];
  }
}

constexpr int64_t quantised_floats(int64_t width) {  // of one token
  return blocks::activations(width + blocks::kGroup - 1) * static_cast<int64_t>(sizeof(blocks::Activation)) / 4;
}

constexpr int kAligned = 16;  // a multiple of kWide
constexpr int kKeys = 32;  // keys or values that stay in the first-level cache while several queries use them

// Of scores x, of which the first `hidden` are not seen.
void softmax(float* x, int hidden, int count) {
  for (int s = 0; s < hidden; ++s) x[s] = x[hidden];
  int s = 0;
  Wide high = Wide{} + x[0];
  for (; s + kWide <= count; s += kWide) {
    const Wide next = load_wide(x + s);
    high = next > high ? next : high;
  }
  float most = high[0];
  for (int i = 1; i < kWide; ++i) most = high[i] > most ? high[i] : most;
  for (; s < count; ++s) most = x[s] > most ? x[s] : most;
  for (s = 0; s < count; ++s) x[s] = exp_neg(x[s] - most);
  for (s = 0; s < hidden; ++s) x[s] = 0;
  Wide sum = {};
  for (s = 0; s + kWide <= count; s += kWide) sum += load_wide(x + s);
  float mass = total(folded(sum));
  for (; s < count; ++s) mass += x[s];
  const float inverse = 1.0f / mass;
  for (s = 0; s < count; ++s) x[s] *= inverse;
}

// out[t][0 … P·kWide) += sum of score[t][s] · v[s], s in [from, to), for T tokens
template <int T, int P>
inline void mix(const float* score, int slots, const float* v, int from, int to, int D, float* out, int stride) {
  Wide sum[T][P];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) sum[t][j] = load_wide(out + static_cast<int64_t>(t) * stride + j * kWide);
  for (int s = from; s < to; ++s) {
    Wide value[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) value[j] = load_wide(v + static_cast<int64_t>(s) * D + j * kWide);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) sum[t][j] += value[j] * score[static_cast<int64_t>(t) * slots + s];
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) store(out + static_cast<int64_t>(t) * stride + j * kWide, sum[t][j]);
}

template <int T>
inline void mix(const float* score, int slots, const float* v, int from, int to, int D, float* out, int stride) {
  int d = 0;
  for (; d + kMixed * kWide <= D; d += kMixed * kWide)
    mix<T, kMixed>(score, slots, v + d, from, to, D, out + d, stride);
  for (; d + kWide <= D; d += kWide) mix<T, 1>(score, slots, v + d, from, to, D, out + d, stride);
  for (; d < D; ++d)
    for (int t = 0; t < T; ++t)
      for (int s = from; s < to; ++s)
        out[static_cast<int64_t>(t) * stride + d] +=
            v[static_cast<int64_t>(s) * D + d] * score[static_cast<int64_t>(t) * slots + s];
}

// Some heads of one token or more that follow each other in a row, against one key-value head.
struct Heads {
  const float* q;       // [tokens, stride] of which the first heads · D
  int stride, heads;
  const float *k, *v;   // [count + tokens - 1, D]
  int count, D;         // token t sees the first count + t of them, without the first hidden + t
  int hidden;           // less than −kTokens without a window
  float scale, cap;
  float* scores;        // [heads, tokens, slots]
  int slots;
  float* out;           // [tokens, out_stride]
  int out_stride;
};

template <int T>
void attend(const Heads& a) {
  const int D = a.D;
  const float root = a.scale;
  float y[kTokens][kRows];
  for (int from = 0; from < a.count; from += kKeys) {
    const int to = from + kKeys < a.count ? from + kKeys : a.count;
    for (int g = 0; g < a.heads; ++g) {
      float* score = a.scores + static_cast<int64_t>(g) * T * a.slots;
      int s = from;
      for (; s + kRows <= to; s += kRows) {
        multiply<T, kRows>(a.q + g * D, a.stride, a.k + static_cast<int64_t>(s) * D, D, y);
        for (int t = 0; t < T; ++t)
          for (int j = 0; j < kRows; ++j) score[static_cast<int64_t>(t) * a.slots + s + j] = y[t][j] * root;
      }
      for (; s < to; ++s) {
        multiply<T, 1>(a.q + g * D, a.stride, a.k + static_cast<int64_t>(s) * D, D, y);
        for (int t = 0; t < T; ++t) score[static_cast<int64_t>(t) * a.slots + s] = y[t][0] * root;
      }
    }
  }
  for (int g = 0; g < a.heads; ++g)
    for (int t = 0; t < T; ++t) {  // the few keys that not all of the tokens see
      float* score = a.scores + static_cast<int64_t>(g * T + t) * a.slots;
      for (int s = a.count; s < a.count + t; ++s) {
        multiply<1, 1>(a.q + static_cast<int64_t>(t) * a.stride + g * D, 0, a.k + static_cast<int64_t>(s) * D, D, y);
        score[s] = y[0][0] * root;
      }
      if (a.cap > 0) cap(score, a.count + t, a.cap);
      softmax(score, a.hidden + t > 0 ? a.hidden + t : 0, a.count + t);
    }
  for (int t = 0; t < T; ++t)
    std::memset(a.out + static_cast<int64_t>(t) * a.out_stride, 0, sizeof(float) * a.heads * D);
  for (int from = 0; from < a.count; from += kKeys) {
    const int to = from + kKeys < a.count ? from + kKeys : a.count;
    for (int g = 0; g < a.heads; ++g)
      mix<T>(a.scores + static_cast<int64_t>(g) * T * a.slots, a.slots, a.v, from, to, D, a.out + g * D, a.out_stride);
  }
  for (int g = 0; g < a.heads; ++g)
    for (int t = 1; t < T; ++t)
      mix<1>(a.scores + static_cast<int64_t>(g * T + t) * a.slots, 0, a.v, a.count, a.count + t, D,
             a.out + static_cast<int64_t>(t) * a.out_stride + g * D, 0);
}

void attend(int tokens, const Heads& a) {
  switch (tokens) {
    case 1: return attend<1>(a);
    case 2: return attend<2>(a);
    case 3: return attend<3>(a);
    default: return attend<4>(a);
  }
}

int64_t widest_input(const Model& model) {
  const int64_t attention = static_cast<int64_t>(model.heads) * model.head_dim;
  const int64_t wide = model.intermediate > attention ? model.intermediate : attention;
  const int64_t own = (model.state_norm ? 3 : 1) * static_cast<int64_t>(model.hidden);
  return wide > own ? wide : own;
}

}  // namespace

extern "C" {

// Floats of scratch a pass of `tokens` needs. Layout: shared x, added, qkv, attention, mlp; then per thread the quantised
// input, the normalised input and attention scores.
int64_t scratch_size(const Model* model, int32_t tokens, int32_t slots, int32_t threads) {
  const int64_t attention = static_cast<int64_t>(model->heads) * model->head_dim, widest = widest_input(*model);
  const int64_t qkv = (model->heads + 2 * model->kv_heads) * static_cast<int64_t>(model->head_dim);
  const int64_t shared = tokens * (2 * model->hidden + qkv + attention + model->intermediate);
  const int64_t scores = static_cast<int64_t>(slots) * kTokens * (model->heads / model->kv_heads);
  return shared + threads * (tokens * widest + tokens * quantised_floats(widest) + scores) + 64;
}

// Returns whether all logits are finite or -inf.
bool forward(const Model* model, const Pass* pass) {
  const int M = pass->tokens, H = model->hidden, D = model->head_dim, heads = model->heads, kv = model->kv_heads;
  const int G = heads / kv, I = model->intermediate, width = (heads + 2 * kv) * D;
  const int64_t widest = widest_input(*model);
  float* x = pass->scratch;
  float* added = x + static_cast<int64_t>(M) * H;
  float* qkv = added + static_cast<int64_t>(M) * H;
  float* mixed = qkv + static_cast<int64_t>(M) * width;
  float* active = mixed + static_cast<int64_t>(M) * heads * D;
  float* shared_end = active + static_cast<int64_t>(M) * I;
  const int64_t room = static_cast<int64_t>(pass->slots) * kTokens * G;  // of a thread's scores
  const int64_t own = M * (widest + quantised_floats(widest)) + room;
  // keys of a row; its values lie `values_offset` further on
  auto cached = [&](int row, int layer, int head) {
    return pass->cache[row] + (static_cast<int64_t>(layer) * kv + head) * pass->row_slots[row] * D;
  };
  auto values_offset = [&](int row) { return static_cast<int64_t>(model->layers) * kv * pass->row_slots[row] * D; };

#pragma omp parallel num_threads(pass->threads)
  {
#ifdef _OPENMP
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int thread = 0, threads = 1;
#endif
    // each thread normalises and quantises few tokens for itself: cheaper than a barrier; of many, only its share
    const bool alone = M <= blocks::Lanes::kTokens;
    float* inputs = shared_end + (alone ? thread * own : 0);
    blocks::Activation* quantised = reinterpret_cast<blocks::Activation*>(inputs);
    float* normed = inputs + M * quantised_floats(widest);
    float* scores = shared_end + (thread + 1) * own - room;

    auto input = [&](std::initializer_list<const Matrix*> users, const float* values, const float* norm, int tokens) {
      const int cols = (*users.begin())->cols;
      bool packed = false;
      for (const Matrix* w : users) packed |= w->type != blocks::F32;
      for (int m = 0, i = 0, height; m < tokens; m += height, ++i) {
        height = blocks::tile(tokens, m);
        if (!alone && i % threads != thread) continue;
        const float* rows = values + static_cast<int64_t>(m) * cols;
        if (norm) {
          normalise(rows, norm, model->epsilon, height, cols, normed + static_cast<int64_t>(m) * cols);
          rows = normed + static_cast<int64_t>(m) * cols;
        }
        if (packed) blocks::quantise_tile(rows, height, cols, quantised + m * blocks::activations(cols));
      }
      if (!alone) {
#pragma omp barrier
      }
      return Input{norm ? normed : values, quantised};
    };

    auto embed = [&](int m, float* to) {
      const int type = model->embedding_type;
      const uint8_t* rows = static_cast<const uint8_t*>(model->embedding);
      if (model->embedding_packed) {
        rows += pass->ids[m] / blocks::kStrip * blocks::strip_bytes(type, H);
        blocks::dequantise_packed(type, rows, pass->ids[m] % blocks::kStrip, H, to);
      } else {
        blocks::dequantise(type, rows + pass->ids[m] * blocks::row_bytes(type, H), H, to);
      }
      if (model->embedding_scale != 1)
        for (int k = 0; k < H; ++k) to[k] *= model->embedding_scale;
    };
    if (!model->state_norm) {
      for (int m = thread; m < M; m += threads) embed(m, x + static_cast<int64_t>(m) * H);
    } else if (pass->states_width == H) {
      for (int m = thread; m < M; m += threads)
        std::memcpy(x + static_cast<int64_t>(m) * H, pass->states_in + static_cast<int64_t>(m) * H, sizeof(float) * H);
    } else {
      product(model->fuse, input({&model->fuse}, pass->states_in, nullptr, M), M, thread, threads,
              [&](int m, int n, int count, const float* y) {
                std::memcpy(x + static_cast<int64_t>(m) * H + n, y, sizeof(float) * count);
              });
    }
#pragma omp barrier
    int tokens = M;  // tokens still computed: in the last layer, only those whose outputs are wanted
    for (int l = 0; l < model->layers; ++l) {
      const Layer& layer = model->layer[l];
      for (int j = 0; j < pass->taps; ++j)
        for (int m = thread; m < M && pass->tap[j] == l; m += threads)
          std::memcpy(pass->features + (static_cast<int64_t>(m) * pass->taps + j) * H, x + static_cast<int64_t>(m) * H,
                      sizeof(float) * H);
      const float *values = x, *norm = layer.attention_norm;
      if (model->state_norm) {
        for (int m = alone ? 0 : thread; m < M; m += alone ? 1 : threads) {
          float* both = normed + static_cast<int64_t>(m) * 2 * H;
          embed(m, both);
          normalise(both, layer.attention_norm, model->epsilon, 1, H, both);
          normalise(x + static_cast<int64_t>(m) * H, model->state_norm, model->epsilon, 1, H, both + H);
        }
        if (!alone) {
#pragma omp barrier
        }
        values = normed, norm = nullptr;
      }
      const Input attention_input = input({&layer.query, &layer.key, &layer.value}, values, norm, M);
      int offset = 0;
      for (const Matrix* w : {&layer.query, &layer.key, &layer.value}) {
        product(*w, attention_input, M, thread, threads, [&](int m, int n, int count, const float* y) {
          std::memcpy(qkv + static_cast<int64_t>(m) * width + offset + n, y, sizeof(float) * count);
        });
        offset += w->rows;
      }
#pragma omp barrier
      if (model->norm_before_residual)  // since the barrier no thread reads the old state
        for (int m = thread; m < M; m += threads)
          std::memcpy(x + static_cast<int64_t>(m) * H, normed + (static_cast<int64_t>(m) * 2 + 1) * H, sizeof(float) * H);
      if (layer.query_norm && model->whole_norms) {
        for (int m = thread; m < M; m += threads) {
          float* p = qkv + static_cast<int64_t>(m) * width;
          normalise(p, layer.query_norm, model->epsilon, 1, heads * D, p);
          normalise(p + heads * D, layer.key_norm, model->epsilon, 1, kv * D, p + heads * D);
        }
#pragma omp barrier
      }
      // rotate queries and keys, store keys and values
      const int64_t table = static_cast<int64_t>(layer.table) * pass->table_slots;
      for (int i = thread; i < M * (heads + kv); i += threads) {
        const int m = i / (heads + kv), h = i % (heads + kv);
        float* p = qkv + static_cast<int64_t>(m) * width + h * D;
        const float* c = pass->cosine + (table + pass->position[m]) * D;
        const float* s = pass->sine + (table + pass->position[m]) * D;
        if (layer.query_norm && !model->whole_norms)
          normalise(p, h < heads ? layer.query_norm : layer.key_norm, model->epsilon, 1, D, p);
        for (int d = 0; d < D / 2; ++d) {
          const float a = p[d], b = p[d + D / 2];
          p[d] = a * c[d] - b * s[d];
          p[d + D / 2] = b * c[d + D / 2] + a * s[d + D / 2];
        }
        if (h >= heads) {
          float* key = cached(pass->row[m], l, h - heads) + static_cast<int64_t>(pass->position[m]) * D;
          std::memcpy(key, p, D * sizeof(float));
          std::memcpy(key + values_offset(pass->row[m]), p + kv * D, D * sizeof(float));
        }
      }
#pragma omp barrier
      const bool cut = l + 1 == model->layers && pass->outputs < M;
      if (cut) {
        tokens = pass->outputs;
        for (int i = 0; i < tokens && thread == 0; ++i) {
          const int64_t from = pass->output[i];
          std::memmove(x + static_cast<int64_t>(i) * H, x + from * H, sizeof(float) * H);
          std::memmove(qkv + static_cast<int64_t>(i) * width, qkv + from * width, sizeof(float) * heads * D);
        }
#pragma omp barrier
      }
      auto row_of = [&](int m) { return pass->row[cut ? pass->output[m] : m]; };
      auto position_of = [&](int m) { return pass->position[cut ? pass->output[m] : m]; };
      // the heads of a key-value head share its keys; a single token is split by head to keep all threads busy
      const int together = tokens == 1 ? 1 : G, parts = heads / together;
      for (int m = 0, turn = 0, n; m < tokens; m += n) {  // and so do tokens that follow each other in a row
        const int row = row_of(m), first = position_of(m);
        for (n = 1; n < kTokens && m + n < tokens && row_of(m + n) == row; ++n)
          if (position_of(m + n) != first + n) break;
        // keys before a window are left out by whole registers: sums then have one order, whatever else is in the pass
        const int hidden = layer.window ? first - layer.window + 1 : -2 * kTokens;
        const int from = hidden > 0 ? hidden / kAligned * kAligned : 0;
        for (int part = 0; part < parts; ++part) {
          if (turn++ % threads != thread) continue;
          const int h = part * together;
          const float* k = cached(row, l, h / G) + static_cast<int64_t>(from) * D;
          attend(n, {qkv + static_cast<int64_t>(m) * width + h * D, width, together, k, k + values_offset(row),
                     first + 1 - from, D, hidden - from, model->attention_scale, model->attention_cap, scores, pass->slots,
                     mixed + (static_cast<int64_t>(m) * heads + h) * D, heads * D});
        }
      }
#pragma omp barrier
      // x += scale · y, or y first goes into `added` and is normalised
      auto add = [&](const Matrix& w, const float* values, const float* after) {
        product(w, input({&w}, values, nullptr, tokens), tokens, thread, threads,
                [&](int m, int n, int count, const float* y) {
                  float* at = (after ? added : x) + static_cast<int64_t>(m) * H + n;
                  if (after) {
                    std::memcpy(at, y, sizeof(float) * count);
                    return;
                  }
                  for (int j = 0; j < count; ++j) at[j] += model->residual_scale * y[j];
                });
#pragma omp barrier
        if (!after) return;
        for (int m = thread; m < tokens; m += threads) {
          float *y = added + static_cast<int64_t>(m) * H, *at = x + static_cast<int64_t>(m) * H;
          normalise(y, after, model->epsilon, 1, H, y);
          for (int j = 0; j < H; ++j) at[j] += model->residual_scale * y[j];
        }
#pragma omp barrier
      };
      add(layer.out, mixed, layer.attention_after);
      const Input mlp_input = input({&layer.gate, &layer.up}, x, layer.mlp_norm, tokens);
      // gate and up have the same shape, so a thread's share of both is the same: no barrier between them
      product(layer.gate, mlp_input, tokens, thread, threads, [&](int m, int n, int count, const float* y) {
        std::memcpy(active + static_cast<int64_t>(m) * I + n, y, sizeof(float) * count);
      });
      product(layer.up, mlp_input, tokens, thread, threads, [&](int m, int n, int count, const float* y) {
        float* at = active + static_cast<int64_t>(m) * I + n;
        if (model->gelu) {
          for (int j = 0; j < count; ++j) at[j] = gelu(at[j]) * y[j];
          return;
        }
        for (int j = 0; j < count; ++j) at[j] = silu(at[j]) * y[j];
      });
#pragma omp barrier
      add(layer.down, active, layer.mlp_after);
    }
    // logits: the last layer left only the tokens whose outputs are wanted
    for (int i = thread; i < tokens; i += threads) {
      const int64_t at = static_cast<int64_t>(i) * H;
      normalise(x + at, model->norm, model->epsilon, 1, H, pass->states + at);
      if (pass->residual) std::memcpy(pass->residual + at, x + at, sizeof(float) * H);
    }
#pragma omp barrier
    product(model->head, input({&model->head}, pass->states, nullptr, tokens), tokens, thread, threads,
            [&](int m, int n, int count, const float* y) {
              float* at = pass->logits + static_cast<int64_t>(m) * model->head.rows + n;
              std::memcpy(at, y, sizeof(float) * count);
              if (model->logit_scale != 1)
                for (int j = 0; j < count; ++j) at[j] *= model->logit_scale;
              if (model->logit_cap > 0) cap(at, count, model->logit_cap);
            });
#pragma omp barrier
    for (int i = thread; i < tokens; i += threads)
      pass->best[i] = likeliest(pass->logits + static_cast<int64_t>(i) * model->head.rows, model->head.rows);
  }
  return std::all_of(pass->best, pass->best + pass->outputs, [](int64_t token) { return token >= 0; });
}

// y [tokens, rows] of one matrix alone, by one thread; `quantised` has room for the quantised inputs.
void apply(const Matrix* w, const float* x, int32_t tokens, void* quantised, float* y) {
  blocks::Activation* q = static_cast<blocks::Activation*>(quantised);
  if (w->type != blocks::F32) blocks::quantise(x, tokens, w->cols, q);
  product(*w, Input{x, q}, tokens, 0, 1, [&](int m, int n, int count, const float* values) {
    std::memcpy(y + static_cast<int64_t>(m) * w->rows + n, values, sizeof(float) * count);
  });
}

// Bytes of `cols` quantised inputs of one token.
int64_t quantised_bytes(int32_t cols) { return 4 * quantised_floats(cols); }

// Which instructions multiply blocks here.
const char* block_kernel() { return blocks::Lanes::name; }

// Bytes of a matrix as the kernels read it.
int64_t packed_bytes(int32_t type, int64_t rows, int32_t cols) {
  return (rows + blocks::kStrip - 1) / blocks::kStrip * blocks::strip_bytes(type, cols);
}

// Ask for large pages for the packed weights: with small ones a tenth of the time goes into address translation.
void use_large_pages(uint8_t* start, int64_t size) {
#ifdef __linux__
  const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + size) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)start, (void)size;
#endif
}

// A matrix of a file as the kernels read it. Row r is row order[r] of the file, where an order is given.
void pack(int32_t type, int32_t rows, int32_t cols, const uint8_t* file, const int32_t* order, uint8_t* out,
          int32_t threads) {
  const int64_t size = blocks::strip_bytes(type, cols), row = blocks::row_bytes(type, cols);
#pragma omp parallel for num_threads(threads)
  for (int first = 0; first < rows; first += blocks::kStrip) {
    const uint8_t* lines[blocks::kStrip];
    for (int r = 0; r < blocks::kStrip; ++r)
      lines[r] = first + r < rows ? file + row * (order ? order[first + r] : first + r) : nullptr;
    blocks::pack_strip(type, lines, cols, out + first / blocks::kStrip * size);
  }
}

}  // extern "C"
