"""Bodies of the CUDA kernels of ``families.cuda_kernels``; capitals are constants put before them.

Arithmetic is float32; sums run in an order that neither the count of sequences nor the capacity of
a buffer changes.
"""

LOAD = r"""
template <typename T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Piece { T at[N]; };
template <typename T, int N>
__device__ inline Piece<T, N> piece(const T* from) {
  return *reinterpret_cast<const Piece<T, N>*>(from);
}
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
"""

# x (COUNT, K) · w (N, K)ᵀ → out (COUNT, N).  A warp makes ROWS outputs of every sequence.  With
# GATED, w is (2N, K), gate then up, and out is gelu(gate) · up.
PRODUCT = r"""
  constexpr int V = 16 / sizeof(T), PARTS = GATED ? 2 : 1;
  const int lane = threadIdx.x % 32;
  const int row = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * ROWS;
  if (row >= N) return;
  float sum[PARTS][ROWS][COUNT];
  #pragma unroll
  for (int p = 0; p < PARTS; ++p)
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int c = 0; c < COUNT; ++c) sum[p][r][c] = 0.0f;
  #pragma unroll UNROLL
  for (int k = lane * V; k < K; k += 32 * V) {
    Piece<T, V> weights[PARTS][ROWS];
    #pragma unroll
    for (int p = 0; p < PARTS; ++p)
      #pragma unroll
      for (int r = 0; r < ROWS; ++r)
        weights[p][r] = piece<T, V>(w + size_t(p * N + min(row + r, N - 1)) * K + k);
    #pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      const Piece<T, V> values = piece<T, V>(x + size_t(c) * K + k);
      #pragma unroll
      for (int p = 0; p < PARTS; ++p)
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
          #pragma unroll
          for (int v = 0; v < V; ++v)
            sum[p][r][c] = fmaf(float(weights[p][r].at[v]), float(values.at[v]), sum[p][r][c]);
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    #pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      const float one = warp_sum(sum[0][r][c]);
      const float two = GATED ? warp_sum(sum[PARTS - 1][r][c]) : 0.0f;
      if (lane == 0 && row + r < N)
        out[size_t(c) * N + row + r] = T(GATED ? gelu_tanh(one) * two : one);
    }
"""

# One block a sequence: sum = x + rms(y)·w_y, normed = rms(sum)·w_next.
ADD_NORM = r"""
  __shared__ float parts[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const size_t base = size_t(blockIdx.x) * D;
  auto total = [&](float own) {
    own = warp_sum(own);
    __syncthreads();
    if (lane == 0) parts[warp] = own;
    __syncthreads();
    float all = 0.0f;
    for (int i = 0; i < warps; ++i) all += parts[i];
    return all;
  };
  constexpr int EACH = (D + THREADS - 1) / THREADS;
  float held[EACH];
  float own = 0.0f;
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int d = threadIdx.x + i * THREADS;
    held[i] = d < D ? float(y[base + d]) : 0.0f;
    own += held[i] * held[i];
  }
  const float inner = rsqrtf(total(own) / D + EPS);
  own = 0.0f;
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int d = threadIdx.x + i * THREADS;
    if (d >= D) continue;
    const T next = T(float(x[base + d]) + float(T(held[i] * inner * float(w_y[d]))));
    sum[base + d] = next;
    held[i] = float(next);
    own += held[i] * held[i];
  }
  const float outer = rsqrtf(total(own) / D + EPS);
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int d = threadIdx.x + i * THREADS;
    if (d < D) normed[base + d] = T(held[i] * outer * float(w_next[d]));
  }
"""

# Norm and rotation of the query heads of one KV head, attention over its rows, and the new row.
#
# SPLITS blocks share a (sequence, KV head); which rows a block takes depends on the position alone.
# The last one to end joins what they found, in the order of the splits.  Block 0 also makes the new
# row and writes it into the cache, in place: MLX takes inputs as constant, but everything that
# reads the row depends on this kernel's output, so no order is lost, and nothing is copied.
ATTEND = r"""
  constexpr int G = H / KV, E = HD / 32, R = 4;
  const float none = __int_as_float(0xff800000);
  __shared__ float queries[G][HD], new_key[HD], new_value[HD];
  __shared__ float held[WARPS][G][HD], tops[WARPS][G], sums[WARPS][G];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int split = blockIdx.x, head = blockIdx.y, one = blockIdx.z;
  KT* const all_keys[COUNT] = {KEYS_LIST};
  KT* const all_values[COUNT] = {VALUES_LIST};
  int* const all_turns[COUNT] = {TURNS_LIST};
  const int capacities[COUNT] = {CAPACITIES_LIST};
  const int position = positions[one];
  KT* keys = all_keys[one] + size_t(head) * capacities[one] * HD;
  KT* values = all_values[one] + size_t(head) * capacities[one] * HD;
  const int rows = WINDOW ? min(position, WINDOW) : position;
  const int slot = WINDOW ? position % WINDOW : position;
  const int skipped = WINDOW && position >= WINDOW ? slot : -1;

  const T* mine = qkv + size_t(one) * (H + 2 * KV) * HD;
  for (int t = warp; t < G + 2; t += WARPS) {
    if (t >= G && split) continue;
    const int from = t < G ? head * G + t : t == G ? H + head : H + KV + head;
    float x[E];
    const Piece<T, E> raw = piece<T, E>(mine + from * HD + lane * E);
    float squares = 0.0f;
    #pragma unroll
    for (int e = 0; e < E; ++e) { x[e] = float(raw.at[e]); squares += x[e] * x[e]; }
    if (t == G + 1) {
      #pragma unroll
      for (int e = 0; e < E; ++e) {
        const KT value = KT(x[e]);
        values[size_t(slot) * HD + lane * E + e] = value;
        new_value[lane * E + e] = float(value);
      }
      continue;
    }
    const float scale = rsqrtf(warp_sum(squares) / HD + EPS);
    #pragma unroll
    for (int e = 0; e < E; ++e) {
      const int d = lane * E + e;
      x[e] = x[e] * scale * float(t < G ? q_norm[d] : k_norm[d]);
    }
    #pragma unroll
    for (int e = 0; e < E; ++e) {
      const float other = __shfl_xor_sync(0xffffffffu, x[e], 16);
      const int pair = (lane * E + e) % (HD / 2);
      const float angle =
          float(position) * ROPE_SCALE * exp2f(-LOG2_BASE * (2.0f * pair / HD));
      float sine, cosine;
      sincosf(angle, &sine, &cosine);
      const float turned = x[e] * cosine + (lane < 16 ? -other : other) * sine;
      if (t < G) {
        queries[t][lane * E + e] = turned * SCALE;
      } else {
        const KT key = KT(turned);
        keys[size_t(slot) * HD + lane * E + e] = key;
        new_key[lane * E + e] = float(key);
      }
    }
  }
  __syncthreads();

  float q[G][E], found[G][E], top[G], sum[G];
  #pragma unroll
  for (int g = 0; g < G; ++g) {
    top[g] = none; sum[g] = 0.0f;
    #pragma unroll
    for (int e = 0; e < E; ++e) { q[g][e] = queries[g][lane * E + e]; found[g][e] = 0.0f; }
  }
  const int each = ((rows + SPLITS - 1) / SPLITS + 31) / 32 * 32;
  const int first = split * each, end = min(rows, first + each);
  for (int base = first + warp * R; base < end; base += WARPS * R) {
    Piece<KT, E> k[R], v[R];
    bool seen[R];
    #pragma unroll
    for (int r = 0; r < R; ++r) {
      seen[r] = base + r < end && base + r != skipped;
      const size_t at = size_t(seen[r] ? base + r : (first == skipped ? first + 1 : first)) * HD;
      k[r] = piece<KT, E>(keys + at + lane * E);
      v[r] = piece<KT, E>(values + at + lane * E);
    }
    #pragma unroll
    for (int g = 0; g < G; ++g) {
      float scores[R], highest = top[g];
      #pragma unroll
      for (int r = 0; r < R; ++r) {
        float dot = 0.0f;
        #pragma unroll
        for (int e = 0; e < E; ++e) dot = fmaf(q[g][e], float(k[r].at[e]), dot);
        dot = warp_sum(dot);
        scores[r] = seen[r] ? dot : none;
        highest = fmaxf(highest, scores[r]);
      }
      if (highest == none) continue;
      const float less = expf(top[g] - highest);
      sum[g] *= less;
      #pragma unroll
      for (int e = 0; e < E; ++e) found[g][e] *= less;
      #pragma unroll
      for (int r = 0; r < R; ++r) {
        const float share = expf(scores[r] - highest);
        sum[g] += share;
        #pragma unroll
        for (int e = 0; e < E; ++e) found[g][e] = fmaf(share, float(v[r].at[e]), found[g][e]);
      }
      top[g] = highest;
    }
  }
  if (split == 0 && warp == 0) {
    #pragma unroll
    for (int g = 0; g < G; ++g) {
      float dot = 0.0f;
      #pragma unroll
      for (int e = 0; e < E; ++e) dot = fmaf(q[g][e], new_key[lane * E + e], dot);
      dot = warp_sum(dot);
      const float highest = fmaxf(top[g], dot);
      const float less = expf(top[g] - highest), share = expf(dot - highest);
      sum[g] = sum[g] * less + share;
      #pragma unroll
      for (int e = 0; e < E; ++e)
        found[g][e] = found[g][e] * less + share * new_value[lane * E + e];
      top[g] = highest;
    }
  }
  #pragma unroll
  for (int g = 0; g < G; ++g) {
    #pragma unroll
    for (int e = 0; e < E; ++e) held[warp][g][lane * E + e] = found[g][e];
    if (lane == 0) { tops[warp][g] = top[g]; sums[warp][g] = sum[g]; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * HD; i += WARPS * 32) {
    const int g = i / HD, d = i % HD;
    float highest = none, whole = 0.0f, value = 0.0f;
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[w][g]);
    for (int w = 0; w < WARPS; ++w) {
      const float share = tops[w][g] == none ? 0.0f : expf(tops[w][g] - highest);
      whole += share * sums[w][g];
      value += share * held[w][g][d];
    }
    const size_t place = (size_t(one) * H + head * G + g) * SPLITS + split;
    partial[place * HD + d] = value;
    if (d == 0) { stats[place * 2] = highest; stats[place * 2 + 1] = whole; }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int before = atomicAdd(all_turns[one] + head, 1);
    is_last = before == SPLITS - 1;
    if (is_last) all_turns[one][head] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < G * HD; i += WARPS * 32) {
    const int g = i / HD, d = i % HD;
    const size_t place = (size_t(one) * H + head * G + g) * SPLITS;
    float highest = none, whole = 0.0f, value = 0.0f;
    for (int s = 0; s < SPLITS; ++s) highest = fmaxf(highest, __ldcg(stats + (place + s) * 2));
    for (int s = 0; s < SPLITS; ++s) {
      const float of = __ldcg(stats + (place + s) * 2);
      if (of == none) continue;
      const float share = expf(of - highest);
      whole += share * __ldcg(stats + (place + s) * 2 + 1);
      value += share * __ldcg(partial + (place + s) * HD + d);
    }
    out[(size_t(one) * H + head * G + g) * HD + d] = T(value / whole);
  }
"""
