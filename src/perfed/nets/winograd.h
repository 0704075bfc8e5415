/* Convolutions by S. Winograd's minimal algorithms F(4x4, 3x3) and F(2x2, 5x5): 36 products for what were 144, and 100.

     Y = A^T [ (G g G^T) * (B^T d B) ] A

   (A. Lavin, S. Gray, Fast algorithms for convolutional neural networks, CVPR 2016.) d is a tile of 6x6 positions, Y the
   convolution at STEP x STEP of them. The points are 0, 1/R, -1/R, R, -R for R the root of 2, and infinity: no power of
   theirs is far from 1, so less is lost in rounding than with whole numbers. What stands at one of the 36 places of all
   tiles is one product of matrices, [tiles][channels] with [channels][channels]. After vectors.h, L, product.h, K, CI and
   CO; channels are multiples of 16. */
#define TILE 6
#define STEP (TILE + 1 - K)
#define TAPS (K * K)
#define PLACES (TILE * TILE)
#define FEW 4                                       /* fewer tiles of a map are not worth what the filters' places cost */
#define TILES 24                                    /* at a time, so that they stay near */
#define APART(channels) (TILES * (channels) + 16)   /* from place to place: no power of two, or they would share lines of the cache */
#define ROOM (TAPS * CI * CO + PLACES * (CI * CO + APART(CI) + APART(CO)))
#define R_2 0.70710678118654752f                    /* R / 2, which is 1 / R */

typedef struct { const float *at; long apart, height, width, pad; } map; /* maps so far apart, padded by zeros that are not there */

INLINE void into_six(const lanes *d, lanes *t) /* B^T d */
{
    const lanes a = d[4] - d[2] * 2.0f, b = (d[3] - d[1] * 2.0f) * R_2, c = d[4] - d[2] * 0.5f, e = (d[3] * 2.0f - d[1]) * R_2;
    t[0] = (d[0] + d[4]) - d[2] * 2.5f;
    t[1] = a + b;
    t[2] = a - b;
    t[3] = c + e;
    t[4] = c - e;
    t[5] = (d[1] + d[5]) - d[3] * 2.5f;
}

INLINE void from_six(const lanes *m, lanes *y) /* A^T m */
{
    const lanes s = m[1] + m[2], d = m[1] - m[2], p = m[3] + m[4], q = m[3] - m[4];
    y[0] = m[0] + s + p;
    y[1] = (d + q * 2.0f) * R_2;
    if (STEP == 4) {
        y[2] = s * 0.5f + p * 2.0f;
        y[3] = (d * 0.5f + q * 4.0f) * R_2;
    }
    y[STEP - 1] += m[5];
}

INLINE void filter_six(const lanes *g, lanes *u) /* G g */
{
    lanes near = g[0] + g[2] * 0.5f, far = g[0] + g[2] * 2.0f, next = g[1], last = g[1] * 2.0f;
    if (K == 5) {
        near += g[4] * 0.25f;
        far += g[4] * 4.0f;
        next += g[3] * 0.5f;
        last += g[3] * 4.0f;
    }
    u[0] = g[0];
    u[1] = (near + next * R_2) * (-2.0f / 3);
    u[2] = (near - next * R_2) * (-2.0f / 3);
    u[3] = (far + last * R_2) * (1.0f / 6);
    u[4] = (far - last * R_2) * (1.0f / 6);
    u[5] = g[K - 1];
}

/* The places of filters, `apart` floats apart; their taps come `step` floats apart, from the last one if `turned` */
INLINE void filter_places(const float *from, const long step, const int turned, float *to, const long apart)
{
    lanes rows[K][TILE], six[TILE];
    UNROLLED for (int r = 0; r < K; r++) {
        lanes g[K];
        UNROLLED for (int c = 0; c < K; c++) g[c] = at(from + (turned ? TAPS - 1 - K * r - c : K * r + c) * step);
        filter_six(g, rows[r]);
    }
    UNROLLED for (int c = 0; c < TILE; c++) {
        lanes column[K];
        UNROLLED for (int r = 0; r < K; r++) column[r] = rows[r][c];
        filter_six(column, six);
        UNROLLED for (int r = 0; r < TILE; r++) *(lanes_at *)(to + (r * TILE + c) * apart) = six[r];
    }
}

/* All filters, [CO][K][K][CI], for maps of CI channels. room: as many floats */
INLINE void filters_for_inputs(const float *w, float *room, float *to)
{
    for (long first = 0; first < TAPS * CI; first += 16) /* a few rows of `room` at a time, which stay near */
        for (long o = 0; o < CO; o++)
            for (long k = first; k < first + 16; k++) room[k * CO + o] = w[o * TAPS * CI + k];
    for (long i = 0; i < CI; i++)
        for (long o = 0; o < CO; o += L) filter_places(room + i * CO + o, CI * CO, 0, to + i * CO + o, CI * CO);
}

typedef struct { long across, down, all; } tiling; /* of the maps that come out */

INLINE tiling tiling_of(long n, long height, long width)
{
    const long down = (height + STEP - 1) / STEP, across = (width + STEP - 1) / STEP;
    return (tiling){across, down, n * down * across};
}

/* Whether tiles are few products more than the positions need; it does not depend on how many maps there are */
INLINE int worth(long height, long width)
{
    const long tiles = tiling_of(1, height, width).all;
    return tiles >= FEW && 2 * height * width * TAPS >= 3 * tiles * PLACES;
}

typedef struct { long map, row, column; } spot; /* where a tile's positions begin */

INLINE spot spot_of(tiling t, long tile)
{
    const long in_map = tile % (t.down * t.across);
    return (spot){tile / (t.down * t.across), in_map / t.across * STEP, in_map % t.across * STEP};
}

INLINE lanes position(map x, long which, long row, long column, const long channels, long channel)
{
    const int inside = row >= 0 && row < x.height && column >= 0 && column < x.width;
    return inside ? at(x.at + which * x.apart + (row * x.width + column) * channels + channel) : (lanes){0};
}

/* B^T d B of some tiles, to[place][tile][channel]; what lies behind the last tile is not written */
INLINE void enter(map x, tiling t, long from, long many, float *to, const long channels)
{
    for (long k = 0; k < many; k++) {
        const spot s = spot_of(t, from + k);
        const long top = s.row - x.pad, left = s.column - x.pad;
        for (long channel = 0; channel < channels; channel += L) {
            lanes rows[TILE][TILE], six[TILE];
            for (int r = 0; r < TILE; r++) {
                lanes d[TILE];
                UNROLLED for (int c = 0; c < TILE; c++) d[c] = position(x, s.map, top + r, left + c, channels, channel);
                into_six(d, rows[r]);
            }
            for (int c = 0; c < TILE; c++) {
                const lanes d[TILE] = {rows[0][c], rows[1][c], rows[2][c], rows[3][c], rows[4][c], rows[5][c]};
                into_six(d, six);
                UNROLLED for (int r = 0; r < TILE; r++)
                    *(lanes_at *)(to + (r * TILE + c) * APART(channels) + k * channels + channel) = six[r];
            }
        }
    }
}

/* A^T m A of one tile and some channels */
INLINE void leave(const float *m, const long apart, lanes y[STEP][STEP])
{
    lanes rows[TILE][STEP];
    for (int r = 0; r < TILE; r++) {
        lanes six[TILE];
        UNROLLED for (int c = 0; c < TILE; c++) six[c] = at(m + (r * TILE + c) * apart);
        from_six(six, rows[r]);
    }
    UNROLLED for (int c = 0; c < STEP; c++) {
        const lanes six[TILE] = {rows[0][c], rows[1][c], rows[2][c], rows[3][c], rows[4][c], rows[5][c]};
        lanes four[STEP];
        from_six(six, four);
        UNROLLED for (int r = 0; r < STEP; r++) y[r][c] = four[r];
    }
}

/* The products at all places: m[place][tile][out] of v[place][tile][in] and u[place][in][out] */
INLINE void multiply(const float *v, const float *u, float *m, long many, const long in, const long out)
{
    for (int place = 0; place < PLACES; place++)
        product(v + place * APART(in), in, 1, u + place * in * out, out, in, m + place * APART(out), out, many, out / L,
                ACROSS(out / L), 0);
}
