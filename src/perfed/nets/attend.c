/* O = softmax(scale * Q (K + P)^T) V of one attention head after another, and its gradients; T tokens, D channels of a head.

   Tokens are rows, [n][T][heads * D]; those of Q, K and V may lie in wider rows, their gradients then likewise. P is one row
   of heads * D for every token, or nothing. Weights are kept transposed, [n][heads][T][WIDTH]: a lane is a query, so that no
   two lanes are ever added and every sum runs in an order that the length of the processor's vectors does not change. */
#include <stdint.h>
#include <string.h>

#include "vectors.h"
#define L (D % 16 ? 8 : WIDE)
#include "product.h"

#define WIDTH ((T + 15) / 16 * 16)
typedef int32_t ints __attribute__((vector_size(L * 4)));

INLINE lanes either(ints which, lanes yes, lanes no) { return (lanes)(((ints)yes & which) | ((ints)no & ~which)); }

/* e^x for x <= 0, to the last bits, and 0 below -87; NaN stays NaN */
INLINE lanes exponential(lanes given)
{
    const lanes magic = (lanes){0} + 12582912.0f; /* 1.5 * 2^23: whoever adds it rounds */
    const ints small = given < -87.0f;
    const lanes x = either(small, (lanes){0}, given);
    const lanes k = (x * 1.44269504f + magic) - magic;
    const lanes r = (x - k * 0.693359375f) + k * 2.12194440e-4f; /* x = k ln 2 + r, with ln 2 in two parts */
    lanes p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + (r + 1.0f);
    return either(small, (lanes){0}, p * (lanes)((__builtin_convertvector(k, ints) + 127) << 23));
}

/* out[c][i] = x[i][c] */
INLINE void turned(const float *x, long stride, float (*out)[WIDTH])
{
    for (int c = 0; c < D; c++) memset(out[c] + T, 0, (WIDTH - T) * sizeof(float));
    for (int i = 0; i < T; i++)
        for (int c = 0; c < D; c++) out[c][i] = x[i * stride + c];
}

/* out[j][i] = sum over c of rows[j][c] * turned[c][i] */
INLINE void scores(const float *rows, long stride, float (*turned)[WIDTH], float *out)
{
    product(rows, stride, 1, turned[0], WIDTH, D, out, WIDTH, T, WIDTH / L, ACROSS(WIDTH / L), 0);
}

/* out[i][:] = sum over j of w[j][i] * rows[j][:] */
INLINE void by_query(const float *w, const float *rows, long stride, float *out, long to)
{
    product(w, 1, WIDTH, rows, stride, T, out, to, T, D / L, ACROSS(D / L), 0);
}

/* out[j][:] = sum over i of w[j][i] * rows[i][:] */
INLINE void by_key(const float *w, const float *rows, long stride, float *out, long to)
{
    product(w, WIDTH, 1, rows, stride, T, out, to, T, D / L, ACROSS(D / L), 0);
}

typedef struct { const float *rows; long stride; } table;

/* A head's K + P; in `room`, if there is a P */
INLINE table keyed(const float *k, long stride, const float *p, long to, float (*room)[D])
{
    if (!p) return (table){k, stride};
    for (int i = 0; i < T; i++)
        for (int c = 0; c < D; c++) room[i][c] = k[i * stride + c] + p[i * to + c];
    return (table){room[0], D};
}

long weights_size(void) { return T * WIDTH; } /* of a head */

void forward(const float *q, const float *k, const float *v, const float *p, float *o, float *weights, long n, long heads,
             long q_row, long kv_row, float scale)
{
    const long o_row = heads * D;
    float t[D][WIDTH], room[T][D];
    for (long h = 0; h < n * heads; h++, weights += T * WIDTH) {
        const long token = h / heads * T, c = h % heads * D, kv_at = token * kv_row + c;
        const table keys = keyed(k + kv_at, kv_row, p ? p + c : p, o_row, room);
        turned(q + token * q_row + c, q_row, t);
        scores(keys.rows, keys.stride, t, weights);
        for (int i = 0; i < WIDTH; i += L) {
            lanes most = *(lanes_at *)(weights + i), all = {0};
            for (int j = 1; j < T; j++) {
                const lanes s = *(lanes_at *)(weights + j * WIDTH + i);
                most = either(s > most, s, most);
            }
            for (int j = 0; j < T; j++) {
                lanes_at *w = (lanes_at *)(weights + j * WIDTH + i);
                all += *w = exponential((*w - most) * scale);
            }
            all = 1.0f / all;
            for (int j = 0; j < T; j++) *(lanes_at *)(weights + j * WIDTH + i) *= all;
        }
        by_query(weights, v + kv_at, kv_row, o + token * o_row + c, o_row);
    }
}

void backward(const float *d_o, const float *q, const float *k, const float *v, const float *p, const float *weights, float *dq,
              float *dk, float *dv, long n, long heads, long q_row, long kv_row, float scale)
{
    const long o_row = heads * D;
    float t[D][WIDTH], d[T * WIDTH], room[T][D];
    for (long h = 0; h < n * heads; h++, weights += T * WIDTH) {
        const long token = h / heads * T, c = h % heads * D;
        const long q_at = token * q_row + c, kv_at = token * kv_row + c, o_at = token * o_row + c;
        const table keys = keyed(k + kv_at, kv_row, p ? p + c : p, o_row, room);
        by_key(weights, d_o + o_at, o_row, dv + kv_at, kv_row);
        turned(d_o + o_at, o_row, t);
        scores(v + kv_at, kv_row, t, d);
        for (int i = 0; i < WIDTH; i += L) {
            lanes all = {0};
            for (int j = 0; j < T; j++) {
                all += *(lanes_at *)(weights + j * WIDTH + i) * *(lanes_at *)(d + j * WIDTH + i);
                ALONE(all);
            }
            for (int j = 0; j < T; j++) {
                lanes_at *to = (lanes_at *)(d + j * WIDTH + i);
                *to = *(lanes_at *)(weights + j * WIDTH + i) * (*to - all) * scale;
            }
        }
        by_query(d, keys.rows, keys.stride, dq + q_at, q_row);
        by_key(d, q + q_at, q_row, dk + kv_at, kv_row);
    }
}
