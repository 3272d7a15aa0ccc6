// Loops written for vector registers: matrix products, convolutions and transposed copies. Included by level.cpp only.

#if defined(__AVX512F__)
using Vector = __m512;
constexpr int kLanes = 16, kTileRows = 8, kWideTileRows = 8;
INLINE Vector Load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void Store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
INLINE Vector All(float x) { return _mm512_set1_ps(x); }
INLINE Vector AddProduct(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
using Vector = __m256;
constexpr int kLanes = 8, kTileRows = 6, kWideTileRows = 4;
INLINE Vector Load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void Store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
INLINE Vector All(float x) { return _mm256_set1_ps(x); }
INLINE Vector AddProduct(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#else
using Vector = __m128;
constexpr int kLanes = 4, kTileRows = 4, kWideTileRows = 2;
INLINE Vector Load(const float* p) { return _mm_loadu_ps(p); }
INLINE void Store(float* p, Vector v) { _mm_storeu_ps(p, v); }
INLINE Vector All(float x) { return _mm_set1_ps(x); }
INLINE Vector AddProduct(Vector a, Vector b, Vector c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
#endif

#define UNROLL _Pragma("GCC unroll 8")

// What the tiles of a matrix product share: a block of terms and a panel of columns. `ahead`: the distance from b to the
// next block of b.
struct ProductPanel {
  const float *a, *b;
  float* c;
  int64_t a_row, a_term, b_row, c_row, rows, terms, width, ahead;
  bool adds;
};

// A tile of a matrix product: R rows and V vectors of columns, in registers. The last vector ends at the last column,
// so it may repeat columns of the vector before it. They get the same sums.
template<int R, int V, bool kLooksAhead = false>
INLINE void ProductTile(const ProductPanel& p, int64_t row) {
  const float *a[R], *b[V];
  float* c[R];
  UNROLL for (int m = 0; m < R; ++m) {
    const int64_t i = row + m < p.rows ? row + m : p.rows - 1;  // repeating the last row gives the same numbers
    a[m] = p.a + i * p.a_row;
    c[m] = p.c + i * p.c_row;
  }
  int64_t at[V];
  UNROLL for (int v = 0; v < V; ++v) {
    at[v] = v < V - 1 ? v * kLanes : p.width - kLanes;
    b[v] = p.b + at[v];
  }
  Vector sum[R][V];
  UNROLL for (int m = 0; m < R; ++m)
    UNROLL for (int v = 0; v < V; ++v) sum[m][v] = All(0.0f);
  int64_t a_at = 0, b_at = 0;
  for (int64_t k = 0; k < p.terms; ++k, a_at += p.a_term, b_at += p.b_row) {
    Vector factor[V];
    UNROLL for (int v = 0; v < V; ++v) factor[v] = Load(b[v] + b_at);
    if (kLooksAhead) __builtin_prefetch(b[0] + b_at + p.ahead, 0, 2);
    UNROLL for (int m = 0; m < R; ++m) {
      const Vector number = All(a[m][a_at]);
      UNROLL for (int v = 0; v < V; ++v) sum[m][v] = AddProduct(number, factor[v], sum[m][v]);
    }
  }
  if (p.adds) {  // all numbers are read before one is written, because rows and columns may be repeated
    UNROLL for (int m = 0; m < R; ++m)
      UNROLL for (int v = 0; v < V; ++v) sum[m][v] = sum[m][v] + Load(c[m] + at[v]);
  }
  UNROLL for (int m = 0; m < R; ++m)
    UNROLL for (int v = 0; v < V; ++v) Store(c[m] + at[v], sum[m][v]);
}

template<int R, int V>
INLINE void ProductRows(const ProductPanel& p) {
  int64_t row = 0;
  if (p.ahead != 0 && p.rows > R) {
    ProductTile<R, V, true>(p, 0);
    row = R;
  }
  for (; row + R / 2 < p.rows; row += R) ProductTile<R, V>(p, row);
  if (row < p.rows) ProductTile<R / 2, V>(p, row);
}

// Columns are computed in panels of two vectors. The last panel takes the rest, at most three vectors.
void Multiply(const ProductRun* run) {
  const ProductRun r = *run;
  for (int64_t column = 0, width; column < r.width; column += width) {
    const int64_t left = r.width - column;
    width = left > 3 * kLanes ? 2 * kLanes : left;
    const int64_t b_row = r.b_row == 0 ? width : r.b_row;
    for (int64_t term = 0, terms; term < r.terms; term += terms) {
      terms = r.terms - term < r.block_terms ? r.terms - term : r.block_terms;
      const float* b = r.b + column * r.b_column + (r.first_term + term) * b_row;
      const int64_t ahead = r.b_row != 0 ? 0 : term + terms < r.terms ? terms * width : (r.b_column - term) * width;
      const ProductPanel p{r.a + term * r.a_term, b, r.c + column, r.a_row, r.a_term, b_row, r.c_row,
                           r.rows, terms, width, ahead, r.first_term + term > 0};
      if (width > 2 * kLanes) {
        ProductRows<kWideTileRows, 3>(p);
      } else if (width > kLanes) {
        ProductRows<kTileRows, 2>(p);
      } else {
        ProductRows<kTileRows, 1>(p);
      }
    }
  }
}

// y = start + sums over taps and channels, for kTileRows pixels and V vectors of channels. If start is null, adds to y.
template<int V>
INLINE void ConvTile(const ConvRun& r, const int64_t* x_at, const int64_t* y_at, int64_t column) {
  Vector sum[kTileRows][V];
  UNROLL for (int m = 0; m < kTileRows; ++m) {
    const float* from = (r.start != nullptr ? r.start : r.y + y_at[m]) + column;
    UNROLL for (int v = 0; v < V; ++v) sum[m][v] = Load(from + v * kLanes);
  }
  for (int64_t t = 0; t < r.num_taps; ++t) {
    const float* x[kTileRows];
    UNROLL for (int m = 0; m < kTileRows; ++m) x[m] = r.x + x_at[m] + r.taps[t].x_shift;
    const float* w = r.w + r.taps[t].w_shift + column;
    for (int64_t c = 0; c < r.channels; ++c, w += r.w_step) {
      Vector factor[V];
      UNROLL for (int v = 0; v < V; ++v) factor[v] = Load(w + v * kLanes);
      UNROLL for (int m = 0; m < kTileRows; ++m) {
        const Vector number = All(x[m][c]);
        UNROLL for (int v = 0; v < V; ++v) sum[m][v] = AddProduct(number, factor[v], sum[m][v]);
      }
    }
  }
  UNROLL for (int m = 0; m < kTileRows; ++m) {
    UNROLL for (int v = 0; v < V; ++v) Store(r.y + y_at[m] + column + v * kLanes, sum[m][v]);
  }
}

void ConvPixels(const ConvRun* run, const int64_t* x_at, const int64_t* y_at, int64_t pixels) {
  const ConvRun r = *run;
  for (int64_t i = 0; i < pixels; i += kTileRows) {
    int64_t x[kTileRows], y[kTileRows];
    for (int m = 0; m < kTileRows; ++m) {
      const int64_t pixel = i + m < pixels ? i + m : pixels - 1;  // repeating the last pixel gives the same numbers
      x[m] = x_at[pixel];
      y[m] = y_at[pixel];
    }
    int64_t column = 0;
    for (; column + 2 * kLanes <= r.width; column += 2 * kLanes) ConvTile<2>(r, x, y, column);
    if (column < r.width) ConvTile<1>(r, x, y, column);
  }
}

// dw += the sum over pixels of dy times x, for R channels of dy and V vectors of x
template<int V, int R>
INLINE void FilterTile(const FilterRun& r, const float* dy, const float* x, float* dw) {
  Vector sum[R][V];
  UNROLL for (int m = 0; m < R; ++m)
    UNROLL for (int v = 0; v < V; ++v) sum[m][v] = Load(dw + m * r.dw_step + v * kLanes);
  for (int64_t line = 0; line < r.lines; ++line) {
    const float *g = dy + r.dy_at[line], *in = x + r.x_at[line];
    for (int64_t i = 0; i < r.count; ++i, g += r.dy_step, in += r.x_step) {
      Vector number[V];
      UNROLL for (int v = 0; v < V; ++v) number[v] = Load(in + v * kLanes);
      UNROLL for (int m = 0; m < R; ++m) {
        const Vector factor = All(g[m]);
        UNROLL for (int v = 0; v < V; ++v) sum[m][v] = AddProduct(factor, number[v], sum[m][v]);
      }
    }
  }
  UNROLL for (int m = 0; m < R; ++m)
    UNROLL for (int v = 0; v < V; ++v) Store(dw + m * r.dw_step + v * kLanes, sum[m][v]);
}

template<int R>
INLINE void FilterRows(const FilterRun& r, int64_t row) {
  const float* dy = r.dy + row;
  float* dw = r.dw + row * r.dw_step;
  int64_t column = 0;
  for (; column + 2 * kLanes <= r.width; column += 2 * kLanes) FilterTile<2, R>(r, dy, r.x + column, dw + column);
  if (column < r.width) FilterTile<1, R>(r, dy, r.x + column, dw + column);
}

void ConvFilter(const FilterRun* run) {
  const FilterRun r = *run;
  int64_t row = 0;
  for (; row + kTileRows <= r.rows; row += kTileRows) FilterRows<kTileRows>(r, row);
  for (; row + 2 <= r.rows; row += 2) FilterRows<2>(r, row);
  if (row < r.rows) FilterRows<1>(r, row);
}

// y[i][j] = alpha times the dot product of row i of x (N rows) and row j of w
template<int N>
INLINE void DotRowsOf(const float* x, const float* w, int64_t num_w, int64_t d, float alpha, float* y, int64_t y_step) {
  const int64_t in_pairs = d - d % (2 * kLanes);
  for (int64_t j = 0; j < num_w; ++j, w += d) {
    Vector sum[N][2];
    UNROLL for (int i = 0; i < N; ++i) sum[i][0] = sum[i][1] = All(0.0f);
    for (int64_t c = 0; c < in_pairs; c += 2 * kLanes) {
      const Vector even = Load(w + c), odd = Load(w + c + kLanes);
      UNROLL for (int i = 0; i < N; ++i) {
        sum[i][0] = AddProduct(Load(x + i * d + c), even, sum[i][0]);
        sum[i][1] = AddProduct(Load(x + i * d + c + kLanes), odd, sum[i][1]);
      }
    }
    UNROLL for (int i = 0; i < N; ++i) {
      float lanes[2 * kLanes];
      Store(lanes, sum[i][0]);
      Store(lanes + kLanes, sum[i][1]);
      for (int half = kLanes; half > 0; half /= 2)  // adding lanes one by one would take longer than the products
        SIMD for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
      float total = lanes[0];
      for (int64_t c = in_pairs; c < d; ++c) total += x[i * d + c] * w[c];
      y[i * y_step + j] = alpha * total;
    }
  }
}
void DotRows(const float* x, int64_t num_x, const float* w, int64_t num_w, int64_t d, float alpha, float* y, int64_t y_step) {
  for (; num_x >= 4; num_x -= 4, x += 4 * d, y += 4 * y_step) DotRowsOf<4>(x, w, num_w, d, alpha, y, y_step);
  for (; num_x > 0; --num_x, x += d, y += y_step) DotRowsOf<1>(x, w, num_w, d, alpha, y, y_step);
}

// y = the sum of `count` rows of v, each multiplied by its weight in p; a row has `d` numbers
void WeighRows(const float* p, const float* v, int64_t count, int64_t d, float* y) {
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    Vector sum = All(0.0f);
    for (int64_t i = 0; i < count; ++i) sum = AddProduct(All(p[i]), Load(v + i * d + c), sum);
    Store(y + c, sum);
  }
  for (; c < d; ++c) {
    y[c] = 0.0f;
    for (int64_t i = 0; i < count; ++i) y[c] += p[i] * v[i * d + c];
  }
}

// Copies rows of `d` numbers that lie `x_step` apart in x to y, which is contiguous.
void CopyRows(const float* x, int64_t x_step, float* y, int64_t rows, int64_t d) {
  const int64_t lanes = d < kLanes ? 4 : kLanes;
  if (d < lanes || d > 16 * lanes) {
    for (; rows > 0; --rows, x += x_step, y += d) __builtin_memcpy(y, x, d * sizeof(float));
    return;
  }
  const int64_t last = d - lanes;  // the last vector ends at the end of the row
  for (; rows > 0; --rows, x += x_step, y += d) {
    if (lanes == 4) {
      for (int64_t i = 0; i < last; i += 4) _mm_storeu_ps(y + i, _mm_loadu_ps(x + i));
      _mm_storeu_ps(y + last, _mm_loadu_ps(x + last));
    } else {
      for (int64_t i = 0; i < last; i += kLanes) Store(y + i, Load(x + i));
      Store(y + last, Load(x + last));
    }
  }
}

// y[c][r] = x[r][c] for 4 columns of a vector's worth of rows, at least 4
INLINE void TransposeTile(const float* x, int64_t x_stride, float* y, int64_t y_stride) {
#if defined(__AVX2__)
  const auto pair = [&](int r) {
    const __m128 low = _mm_loadu_ps(x + r * x_stride), high = _mm_loadu_ps(x + (r + 4) * x_stride);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
  };
  const __m256 a = pair(0), b = pair(1), d = pair(2), e = pair(3);
  const __m256 ab = _mm256_unpacklo_ps(a, b), de = _mm256_unpacklo_ps(d, e);
  const __m256 ab2 = _mm256_unpackhi_ps(a, b), de2 = _mm256_unpackhi_ps(d, e);
  _mm256_storeu_ps(y, _mm256_shuffle_ps(ab, de, 0x44));
  _mm256_storeu_ps(y + y_stride, _mm256_shuffle_ps(ab, de, 0xee));
  _mm256_storeu_ps(y + 2 * y_stride, _mm256_shuffle_ps(ab2, de2, 0x44));
  _mm256_storeu_ps(y + 3 * y_stride, _mm256_shuffle_ps(ab2, de2, 0xee));
#else
  __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + x_stride);
  __m128 d = _mm_loadu_ps(x + 2 * x_stride), e = _mm_loadu_ps(x + 3 * x_stride);
  _MM_TRANSPOSE4_PS(a, b, d, e);
  _mm_storeu_ps(y, a);
  _mm_storeu_ps(y + y_stride, b);
  _mm_storeu_ps(y + 2 * y_stride, d);
  _mm_storeu_ps(y + 3 * y_stride, e);
#endif
}
void Transpose(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols) {
  constexpr int64_t kTurned = kLanes < 8 ? 4 : 8;  // rows of a tile
  const int64_t whole_rows = rows - rows % kTurned, whole_cols = cols & ~3;
  for (int64_t r0 = 0; r0 < whole_rows; r0 += 16) {
    const int64_t r1 = r0 + 16 < whole_rows ? r0 + 16 : whole_rows;
    for (int64_t c = 0; c < whole_cols; c += 4)
      for (int64_t r = r0; r < r1; r += kTurned) TransposeTile(x + r * x_stride + c, x_stride, y + c * y_stride + r, y_stride);
  }
  for (int64_t c = whole_cols; c < cols; ++c)
    for (int64_t r = 0; r < whole_rows; ++r) y[c * y_stride + r] = x[r * x_stride + c];
  for (int64_t r = whole_rows; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) y[c * y_stride + r] = x[r * x_stride + c];
}
