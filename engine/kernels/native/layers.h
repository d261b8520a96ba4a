// Layers one after the other in one call: the interpreter and its lock come in once a step. Included by
// kernels.cpp, whose functions do the work, in the order and with the roundings that single calls have.

// A product with its weights, as `baton_linear` and `baton_gated` take them. bits: 16, 8 or 4 of a weight.
struct Product {
  long bits;
  const void *weights, *table;  // table: scales of 8 bits, Groups of 4
  long k, n;
  const bf16 *first, *second;  // biases
};

template <class Done>
void multiply(const Product& p, const bf16* x, long m, int threads, const Done& done) {
  if (p.bits == 4)
    return product4(x, m, p.k, static_cast<const uint16_t*>(p.weights), *static_cast<const Groups*>(p.table),
                    threads, done);
  if (p.bits == 8)
    return byte_product<8>(x, m, p.k, static_cast<const uint8_t*>(p.weights), Groups{},
                           static_cast<const float*>(p.table), kGroup8, threads, done);
  product(x, m, static_cast<const bf16*>(p.weights), panels_of(done), p.k / 2, threads, done);
}

struct Layer {
  Product qkv, out, gated, down;
  const void *attention_norm, *mlp_norm;  // float32 if norms_wide
  long norms_wide;
  float eps;
};

// What the layers of one kind share in a step, as `baton_rope` and `baton_attend` take it.
struct Plan {
  const Attention* shape;
  const float *cos, *sin;
  const int64_t *positions, *slots;
  long sequences;
  const int32_t *queries, *contexts, *starts, *tables;
};

struct Rows {  // what lies between two operations
  std::vector<bf16> normed, qkv, attended, inner;
};

inline void norm(const Layer& layer, const void* weight, const bf16* h, long m, long hidden, bf16* out, int threads) {
  if (layer.norms_wide) return rms_norm(h, m, hidden, static_cast<const float*>(weight), layer.eps, out, threads);
  rms_norm(h, m, hidden, static_cast<const bf16*>(weight), layer.eps, out, threads);
}

inline void run_layer(const Layer& layer, const Plan& plan, uint8_t* kv, long item, bf16* h, long m, Rows& rows,
                      int threads) {
  const long hidden = layer.qkv.k;
  const Attention& a = *plan.shape;
  rows.normed.resize(m * hidden);
  rows.qkv.resize(m * layer.qkv.n);
  rows.attended.resize(m * layer.out.k);
  rows.inner.resize(m * layer.gated.n);
  norm(layer, layer.attention_norm, h, m, hidden, rows.normed.data(), threads);
  multiply(layer.qkv, rows.normed.data(), m, threads, Sum{layer.qkv.n, layer.qkv.first, nullptr, rows.qkv.data()});
  rope_and_write(rows.qkv.data(), m, a, plan.cos, plan.sin, plan.positions, plan.slots, Pages{kv, item}, threads);
  attend(a, rows.qkv.data(), Pages{kv, item}, plan.sequences, plan.queries, plan.contexts, plan.starts, plan.tables,
         rows.attended.data(), threads);
  // A row's sum takes its residual where it puts the result.
  multiply(layer.out, rows.attended.data(), m, threads, Sum{layer.out.n, layer.out.first, h, h});
  norm(layer, layer.mlp_norm, h, m, hidden, rows.normed.data(), threads);
  multiply(layer.gated, rows.normed.data(), m, threads,
           Gate{layer.gated.n, layer.gated.first, layer.gated.second, rows.inner.data()});
  multiply(layer.down, rows.inner.data(), m, threads, Sum{layer.down.n, layer.down.first, h, h});
}
