/* y = relu(max_pool_2x2(conv(x, w) + b)) and its gradients, for convolutions with few channels.

   Maps are channels-last, [n][h][w][channels], filters [CO][K][K][CI]; CI, CO, K and PAD are constants of the build.
   Going back, a gradient reaches one of the four positions that a pooled value was chosen from, and none where ReLU
   cut it off: only those positions are looked at. Every sum runs in an order of its own that neither the length of the
   processor's vectors nor the compiler changes, as no two lanes are ever added; only whether the processor multiplies
   and adds in one step does. What is not looked at makes no NaN: where torch multiplies an infinite input by a gradient of
   zero, nothing happens here. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 32") /* or gcc leaves sums in memory that have more than 16 vectors */
#ifdef __AVX512VL__
#define WIDE 16
#define REGISTERS 32
#else
#define WIDE 8
#define REGISTERS 16
#endif
#ifdef __AVX__
#define IN_REGISTER(v) __asm__("" : "+v"(v)) /* or gcc reads it from memory for every product */
#define ALONE(sum) IN_REGISTER(sum) /* or for some processors gcc takes two steps for a product and a lone short sum */
#else
#define IN_REGISTER(v)
#define ALONE(sum)
#endif

#define ROW (K * CI)                                  /* a filter's row: K pixels side by side */
#define LANES (CO > 8 ? WIDE : 8)                     /* output channels in a vector, going forward */
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
#define SLACK 16                                      /* what the last vector of a map may read behind it */
#define DEAD 4                                        /* cut off by ReLU */

typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef float lanes_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
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
            lanes best = sum[0][2 * c][o] + b;
            choice which = {0};
            for (int k = 1; k < 4; k++) { /* the first of equals, and NaN before all, as torch has it */
                const lanes a = sum[k / 2][2 * c + k % 2][o] + b;
                const choice more = (a > best) | (a != a);
                best = (lanes)(((choice)a & more) | ((choice)best & ~more));
                which = (more & k) | (which & ~more);
            }
            const choice dead = best <= 0;
            best = (lanes)((choice)best & ~dead);
            const bytes named = __builtin_convertvector((dead & DEAD) | (which & ~dead), bytes);
            memcpy(y + c * CO + o * LANES, &best, many * sizeof(float));
            memcpy(chosen + c * CO + o * LANES, &named, many);
        }
}

/* padded: n maps of padded_size; chosen: like y */
void forward(const float *x, const float *weight, const float *bias, float *padded, float *y, uint8_t *chosen, long n,
             long h, long w)
{
    const shape s = shape_of(h, w);
    float packed[BLOCKS][K * ROW][DEPTH], biases[BLOCKS][DEPTH];
    memset(packed, 0, sizeof packed);
    memset(biases, 0, sizeof biases);
    for (int o = 0; o < CO; o++) {
        biases[o / DEPTH][o % DEPTH] = bias[o];
        for (int i = 0; i < K * ROW; i++) packed[o / DEPTH][i][o % DEPTH] = weight[o * K * ROW + i];
    }
    for (long m = 0; m < n; m++, padded += s.size) {
        memset(padded, 0, s.size * sizeof(float));
        for (long r = 0; r < h; r++, x += w * CI) memcpy(padded + (r + PAD) * s.stride + PAD * CI, x, w * CI * sizeof(float));
        for (long r = 0; r < s.rows; r++)
            for (int b = 0; b < BLOCKS; b++) {
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
}

INLINE long place(int v, long stride) { return v / PARTS * stride + v % PARTS * SPAN; }

INLINE void filter_chunk(const entry *list, long count, const float *padded, long stride, float (*made)[SPAN],
                         const int first, const int many)
{
    span sum[CHUNK];
    UNROLLED for (int v = 0; v < many; v++) sum[v] = *(const span_at *)made[first + v];
    for (long e = 0; e < count; e++) {
        UNROLLED for (int v = 0; v < many; v++)
            sum[v] += list[e].g * *(const span_at *)(padded + list[e].at + place(first + v, stride));
        if (many == 1) ALONE(sum[0]);
    }
    UNROLLED for (int v = 0; v < many; v++) *(span_at *)made[first + v] = sum[v];
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
                if (first + CHUNK <= FILTER) filter_chunk(list, count, padded, s.stride, made[o], first, CHUNK);
                else filter_chunk(list, count, padded, s.stride, made[o], first, FILTER % CHUNK);
            }
            float sum = db[o];
            for (long e = 0; e < count; e++) sum += list[e].g;
            db[o] = sum;
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
