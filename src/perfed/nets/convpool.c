/* y = relu(max_pool_2x2(conv(x, w) + b)) and its gradients, for convolutions with few channels.

   Maps are channels-last, [n][h][w][channels], filters [CO][K][K][CI]; CI, CO, K and PAD are constants of the
   build, and SLACK, the floats behind a map that its last vectors may read.
   Going back, a gradient reaches one of the four positions that a pooled value was chosen from, and none where ReLU
   cut it off: only those positions are looked at. Every sum runs in an order of its own that the length of the processor's
   vectors does not change, as no two lanes are ever added; only whether the processor multiplies and adds in one step
   does. What is not looked at makes no NaN: where torch multiplies an infinite input by a gradient of zero, nothing
   happens here. */
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define ROW (K * CI)                                  /* a filter's row: K pixels side by side */
#define ALONG (CI == 1 && CO <= 8)                    /* few channels: lanes are columns going forward, not channels */
#define LANES (CO > 8 || ALONG ? WIDE : 8)            /* of a vector going forward */
#define SPAN ((ROW + 7) / 8 % 2 ? 8 : WIDE)           /* values of a row in a vector, going back */
#define VECTORS ((CO + LANES - 1) / LANES)
#define AT_ONCE (VECTORS < REGISTERS / 8 ? VECTORS : REGISTERS / 8)
#define BLOCKS ((VECTORS + AT_ONCE - 1) / AT_ONCE)    /* of output channels */
#define DEPTH (AT_ONCE * LANES)
#define COLUMNS (REGISTERS / 8 / AT_ONCE)             /* pooled columns at a time */
#define PARTS ((ROW + SPAN - 1) / SPAN)
#define FILTER (K * PARTS)                            /* vectors of a filter */
#define CHUNK (FILTER < REGISTERS * 5 / 8 ? FILTER : REGISTERS * 5 / 8)
#define CHUNKS ((FILTER + CHUNK - 1) / CHUNK)
#define SIDE (REGISTERS * 3 / 16)                     /* channels at a time where lanes are columns */
#define WAYS (K * ((ROW + 7) / 8) <= 5 ? 2 : 1)       /* sums of a filter's value: one by one, they would wait for each other */
#define TILED ((K == 3 || K == 5) && CI % 16 == 0 && CO % 16 == 0) /* going forward */
#define DEAD 4                                        /* cut off by ReLU */

#if TILED
#define L LANES
#include "product.h"
#include "winograd.h"
#else
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef float lanes_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#endif
typedef int32_t choice __attribute__((vector_size(LANES * 4)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef float span __attribute__((vector_size(SPAN * 4)));
typedef float span_at __attribute__((vector_size(SPAN * 4), aligned(4), may_alias));
typedef struct { int32_t at; float g; } entry;
typedef struct { long stride, size, rows, columns; } shape; /* of a padded map, and of what is pooled from it */

INLINE shape shape_of(long h, long w)
{
    const long stride = (w + 2 * PAD) * CI;
    return (shape){stride, (h + 2 * PAD) * stride + SLACK, (h + 2 * PAD - K + 1) / 2, (w + 2 * PAD - K + 1) / 2};
}

long padded_size(long h, long w) { return shape_of(h, w).size; }
long filter_size(void) { return FILTER * SPAN; } /* with full vectors */
long room_size(long h, long w) /* what going forward needs: nothing where there are no tiles */
{
#if TILED
    const shape s = shape_of(h, w);
    if (worth(2 * s.rows, 2 * s.columns)) return ROOM;
#endif
    return 0;
}

/* The greatest of four, cut off by ReLU, and which one it is */
INLINE lanes greatest(const lanes *four, bytes *named)
{
    lanes best = four[0];
    choice which = {0};
    for (int k = 1; k < 4; k++) { /* the first of equals, and NaN before all, as torch has it */
        const choice more = (four[k] > best) | (four[k] != four[k]);
        best = (lanes)(((choice)four[k] & more) | ((choice)best & ~more));
        which = (more & k) | (which & ~more);
    }
    const choice dead = best <= 0;
    *named = __builtin_convertvector((dead & DEAD) | (which & ~dead), bytes);
    return (lanes)((choice)best & ~dead);
}

INLINE void pooled(const float *x, long stride, const float *w, const float *bias, float *y, uint8_t *chosen,
                   const int channels, const int columns)
{
    lanes sum[2][2 * COLUMNS][AT_ONCE];
    for (int r = 0; r < 2; r++)
        for (int c = 0; c < 2 * columns; c++)
            for (int o = 0; o < AT_ONCE; o++) sum[r][c][o] = (lanes){0};
    for (int k = 0; k < K; k++, x += stride)
        for (int i = 0; i < ROW; i++, w += DEPTH) {
            lanes weight[AT_ONCE];
            for (int o = 0; o < AT_ONCE; o++) {
                weight[o] = *(const lanes_at *)(w + o * LANES);
                IN_REGISTER(weight[o]);
            }
            for (int r = 0; r < 2; r++)
                for (int c = 0; c < 2 * columns; c++)
                    for (int o = 0; o < AT_ONCE; o++) sum[r][c][o] += x[r * stride + c * CI + i] * weight[o];
        }
    for (int c = 0; c < columns; c++)
        for (int o = 0; o < AT_ONCE; o++) {
            const int many = channels - o * LANES < LANES ? channels - o * LANES : LANES;
            if (many <= 0) break;
            const lanes b = *(const lanes_at *)(bias + o * LANES);
            const lanes four[4] = {sum[0][2 * c][o] + b, sum[0][2 * c + 1][o] + b, sum[1][2 * c][o] + b, sum[1][2 * c + 1][o] + b};
            bytes named;
            const lanes best = greatest(four, &named);
            memcpy(y + c * CO + o * LANES, &best, many * sizeof(float));
            memcpy(chosen + c * CO + o * LANES, &named, many);
        }
}

/* The same for LANES pooled columns, from two vectors of columns and CI == 1; weight: filters as they come */
INLINE void along(const float *x, long stride, const float *weight, const float *bias, float (*values)[LANES],
                  uint8_t (*names)[LANES], const int channels)
{
    lanes sum[2][2][SIDE];
    UNROLLED for (int i = 0; i < 4 * channels; i++) sum[i & 1][i >> 1 & 1][i >> 2] = (lanes){0};
    for (int k = 0; k < K; k++)
        for (int i = 0; i < K; i++) {
            const float *from = x + k * stride + i, *w = weight + k * K + i;
            const lanes at[2][2] = {{*(const lanes_at *)from, *(const lanes_at *)(from + LANES)},
                                    {*(const lanes_at *)(from + stride), *(const lanes_at *)(from + stride + LANES)}};
            UNROLLED for (int o = 0; o < channels; o++)
                UNROLLED for (int j = 0; j < 4; j++) sum[j >> 1][j & 1][o] += w[o * K * K] * at[j >> 1][j & 1];
        }
    for (int o = 0; o < channels; o++) {
        float row[2][2 * LANES];
        lanes four[4];
        bytes named;
        for (int j = 0; j < 4; j++) *(lanes_at *)(row[j >> 1] + (j & 1) * LANES) = sum[j >> 1][j & 1][o] + bias[o];
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < LANES; c++) four[j][c] = row[j >> 1][2 * c + (j & 1)];
        *(lanes_at *)values[o] = greatest(four, &named);
        memcpy(names[o], &named, sizeof named);
    }
}

INLINE void row_along(const float *x, long stride, const float *weight, const float *bias, float *y, uint8_t *chosen, long columns)
{
    for (long c = 0; c < columns; c += LANES, x += 2 * LANES) {
        float values[CO][LANES];
        uint8_t names[CO][LANES];
        int o = 0;
        for (; o + SIDE <= CO; o += SIDE) along(x, stride, weight + o * K * K, bias + o, values + o, names + o, SIDE);
        if (CO % SIDE) along(x, stride, weight + o * K * K, bias + o, values + o, names + o, CO % SIDE);
        for (long i = 0; i < LANES && c + i < columns; i++)
            for (o = 0; o < CO; o++) {
                *y++ = values[o][i];
                *chosen++ = names[o][i];
            }
    }
}

/* Copies maps into the middle of larger ones of zeros */
INLINE void pad(const float *x, float *padded, shape s, long n, long h, long w)
{
    for (long m = 0; m < n; m++, padded += s.size) {
        memset(padded, 0, s.size * sizeof(float));
        for (long r = 0; r < h; r++, x += w * CI) memcpy(padded + (r + PAD) * s.stride + PAD * CI, x, w * CI * sizeof(float));
    }
}

#if TILED
/* What a tile's positions become, for L channels from o on */
INLINE void pooled_tile(lanes four[STEP][STEP], lanes bias, shape s, spot tile, long o, float *y, uint8_t *chosen)
{
    for (long r = 0; r < STEP / 2 && tile.row / 2 + r < s.rows; r++)
        for (long c = 0; c < STEP / 2 && tile.column / 2 + c < s.columns; c++) {
            const lanes window[4] = {four[2 * r][2 * c] + bias, four[2 * r][2 * c + 1] + bias, four[2 * r + 1][2 * c] + bias,
                                     four[2 * r + 1][2 * c + 1] + bias};
            const long to = ((tile.map * s.rows + tile.row / 2 + r) * s.columns + tile.column / 2 + c) * CO + o;
            bytes named;
            *(lanes_at *)(y + to) = greatest(window, &named);
            memcpy(chosen + to, &named, sizeof named);
        }
}

INLINE void by_tiles(const float *padded, const float *weight, const float *bias, float *room, float *y, uint8_t *chosen,
                     long n, long h, long w)
{
    const shape s = shape_of(h, w);
    const tiling t = tiling_of(n, 2 * s.rows, 2 * s.columns);
    float *u = room + TAPS * CI * CO, *v = u + PLACES * CI * CO, *m = v + PLACES * APART(CI);
    filters_for_inputs(weight, room, u);
    for (long from = 0; from < t.all; from += TILES) {
        const long many = t.all - from < TILES ? t.all - from : TILES;
        enter((map){padded, s.size, h + 2 * PAD, w + 2 * PAD, 0}, t, from, many, v, CI);
        multiply(v, u, m, many, CI, CO);
        for (long k = 0; k < many; k++) {
            const spot tile = spot_of(t, from + k);
            for (long o = 0; o < CO; o += L) {
                lanes four[STEP][STEP];
                leave(m + k * CO + o, APART(CO), four);
                pooled_tile(four, at(bias + o), s, tile, o, y, chosen);
            }
        }
    }
}
#endif

/* padded: n maps of padded_size; chosen: like y; room: room_size */
void forward(const float *x, const float *weight, const float *bias, float *padded, float *room, float *y, uint8_t *chosen,
             long n, long h, long w)
{
    const shape s = shape_of(h, w);
    pad(x, padded, s, n, h, w);
#if TILED
    if (room_size(h, w)) {
        by_tiles(padded, weight, bias, room, y, chosen, n, h, w);
        return;
    }
#endif
    float packed[BLOCKS][K * ROW][DEPTH], biases[BLOCKS][DEPTH];
    memset(packed, 0, sizeof packed);
    memset(biases, 0, sizeof biases);
    for (int o = 0; o < CO; o++) {
        biases[o / DEPTH][o % DEPTH] = bias[o];
        for (int i = 0; i < K * ROW; i++) packed[o / DEPTH][i][o % DEPTH] = weight[o * K * ROW + i];
    }
    for (long m = 0; m < n; m++, padded += s.size)
        for (long r = 0; r < s.rows; r++)
            for (int b = 0; b < BLOCKS; b++) {
                if (ALONG) {
                    const long at = (m * s.rows + r) * s.columns * CO;
                    row_along(padded + 2 * r * s.stride, s.stride, weight, bias, y + at, chosen + at, s.columns);
                    continue;
                }
                const float *from = padded + 2 * r * s.stride;
                const long to = (m * s.rows + r) * s.columns * CO + b * DEPTH;
                const int left = CO - b * DEPTH;
                long c = 0;
                for (; c + COLUMNS <= s.columns; c += COLUMNS)
                    pooled(from + 2 * c * CI, s.stride, packed[b][0], biases[b], y + to + c * CO, chosen + to + c * CO, left, COLUMNS);
                for (; c < s.columns; c++)
                    pooled(from + 2 * c * CI, s.stride, packed[b][0], biases[b], y + to + c * CO, chosen + to + c * CO, left, 1);
            }
}

INLINE long place(int v, long stride) { return v / PARTS * stride + v % PARTS * SPAN; }

/* Adds to the sums of a filter's values and, with its first ones, to that of its bias */
INLINE void filter_chunk(const entry *list, long count, const float *padded, long stride, float (*made)[SPAN], float *bias,
                         const int first, const int many)
{
    span sum[WAYS][CHUNK] = {0};
    float all[WAYS] = {0};
    UNROLLED for (int v = 0; v < many; v++) sum[0][v] = *(const span_at *)made[first + v];
    if (!first) all[0] = *bias;
    long e = 0;
    for (; e + WAYS <= count; e += WAYS)
        UNROLLED for (int way = 0; way < WAYS; way++) {
            const entry one = list[e + way];
            UNROLLED for (int v = 0; v < many; v++) sum[way][v] += one.g * *(const span_at *)(padded + one.at + place(first + v, stride));
            if (many == 1) ALONE(sum[way][0]);
            if (!first) all[way] += one.g;
        }
    if (e < count) {
        UNROLLED for (int v = 0; v < many; v++) sum[0][v] += list[e].g * *(const span_at *)(padded + list[e].at + place(first + v, stride));
        if (many == 1) ALONE(sum[0][0]);
        if (!first) all[0] += list[e].g;
    }
    UNROLLED for (int way = 1; way < WAYS; way++) {
        UNROLLED for (int v = 0; v < many; v++) sum[0][v] += sum[way][v];
        all[0] += all[way];
    }
    UNROLLED for (int v = 0; v < many; v++) *(span_at *)made[first + v] = sum[0][v];
    if (!first) *bias = all[0];
}

/* The gradients of filters and biases. list: rows * columns entries; made: CO * FILTER * SPAN numbers. Map after map,
   so that one map is read for all filters while it is near. */
void filters(const float *dy, const uint8_t *chosen, const float *padded, entry *list, float (*made)[FILTER][SPAN],
             float *dw, float *db, long n, long h, long w)
{
    const shape s = shape_of(h, w);
    const int32_t offset[DEAD + 1] = {0, CI, s.stride, s.stride + CI, 0};
    memset(made, 0, CO * sizeof *made);
    memset(db, 0, CO * sizeof *db);
    for (long m = 0; m < n; m++, padded += s.size, dy += s.rows * s.columns * CO, chosen += s.rows * s.columns * CO)
        for (int o = 0; o < CO; o++) {
            long count = 0, i = o;
            for (long r = 0; r < s.rows; r++)
                for (long c = 0; c < s.columns; c++, i += CO) { /* without a branch, which no processor could foresee */
                    list[count] = (entry){2 * (r * s.stride + c * CI) + offset[chosen[i]], dy[i]};
                    count += (chosen[i] != DEAD) & (dy[i] != 0);
                }
            for (int c = 0; c < CHUNKS; c++) {
                const int first = c * CHUNK;
                if (first + CHUNK <= FILTER) filter_chunk(list, count, padded, s.stride, made[o], db + o, first, CHUNK);
                else filter_chunk(list, count, padded, s.stride, made[o], db + o, first, FILTER % CHUNK);
            }
        }
    for (int o = 0; o < CO; o++)
        for (int k = 0; k < K; k++) memcpy(dw + (o * K + k) * ROW, made[o][k * PARTS], ROW * sizeof(float));
}

INLINE void input_chunk(const entry *list, int count, float (*filters)[FILTER][SPAN], float *to, long stride,
                        const int first, const int many)
{
    span sum[CHUNK];
    UNROLLED for (int v = 0; v < many; v++) sum[v] = (span){0};
    for (int e = 0; e < count; e++) {
        UNROLLED for (int v = 0; v < many; v++) sum[v] += list[e].g * *(const span_at *)filters[list[e].at][first + v];
        if (many == 1) ALONE(sum[0]);
    }
    UNROLLED for (int v = 0; v < many; v++) {
        span_at *at = (span_at *)(to + place(first + v, stride));
        *at = *at + sum[v];
    }
}

/* The gradient of x. room: one map of padded_size */
void inputs(const float *dy, const uint8_t *chosen, const float *weight, float *room, float *dx, long n, long h, long w)
{
    const shape s = shape_of(h, w);
    float packed[CO][FILTER][SPAN];
    memset(packed, 0, sizeof packed);
    for (int o = 0; o < CO; o++)
        for (int k = 0; k < K; k++) memcpy(packed[o][k * PARTS], weight + (o * K + k) * ROW, ROW * sizeof(float));
    for (long m = 0; m < n; m++) {
        memset(room, 0, s.size * sizeof(float));
        for (long r = 0; r < s.rows; r++)
            for (long c = 0; c < s.columns; c++, dy += CO, chosen += CO) {
                entry list[DEAD + 1][CO];
                int count[DEAD + 1] = {0};
                for (int o = 0; o < CO; o++) {
                    const int k = chosen[o];
                    list[k][count[k]] = (entry){o, dy[o]};
                    count[k] += dy[o] != 0;
                }
                for (int k = 0; k < DEAD; k++) {
                    if (!count[k]) continue;
                    float *to = room + (2 * r + k / 2) * s.stride + (2 * c + k % 2) * CI;
                    for (int p = 0; p < CHUNKS; p++) {
                        const int first = p * CHUNK;
                        if (first + CHUNK <= FILTER) input_chunk(list[k], count[k], packed, to, s.stride, first, CHUNK);
                        else input_chunk(list[k], count[k], packed, to, s.stride, first, FILTER % CHUNK);
                    }
                }
            }
        for (long r = 0; r < h; r++, dx += w * CI) memcpy(dx, room + (r + PAD) * s.stride + PAD * CI, w * CI * sizeof(float));
    }
}
