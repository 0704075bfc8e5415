/* Linear layers, ReLU and the slope of the mean cross-entropy, for one batch at a time.

   Values and gradients are columns, [features][wide]: a lane is a sample, and behind the last of n samples are lanes that
   nobody reads. What a layer takes is kept as rows too, [n][row of features], as the gradients of weights add samples up
   and have features in their lanes. So no two lanes are ever added. Weights are torch's, [out][in]. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"
#define L WIDE
#include "product.h"

INLINE long full(long length) { return (length + L - 1) / L * L; } /* to whole vectors */

long padded(long length) { return full(length); }

/* The product for columns in any number of vectors */
static void multiply(const float *a, long step_i, long step_k, const float *b, long stride, long depth, float *out, long to,
                     long rows, long all)
{
    if (all == 1) product(a, step_i, step_k, b, stride, depth, out, to, rows, all, ACROSS(1), 0);
    else if (all == 2) product(a, step_i, step_k, b, stride, depth, out, to, rows, all, ACROSS(2), 0);
    else if (all == 3) product(a, step_i, step_k, b, stride, depth, out, to, rows, all, ACROSS(3), 0);
    else product(a, step_i, step_k, b, stride, depth, out, to, rows, all, ACROSS(4), 0);
}

/* x: n maps, [places][channels], whose features come channel by channel */
void enter(const float *x, float *columns, float *rows, long n, long channels, long places)
{
    const long wide = full(n), features = channels * places, row = full(features);
    for (long first = 0; first < n; first += L) { /* as many samples as a vector has, or writing would be all over memory */
        const long many = n - first < L ? n - first : L;
        for (long p = 0; p < places; p++)
            for (long c = 0; c < channels; c++)
                for (long s = 0; s < many; s++) columns[(c * places + p) * wide + first + s] = x[s * features + p * channels + c];
        for (long s = 0; s < many; s++, rows += row, x += features)
            for (long c = 0; c < channels; c++)
                for (long p = 0; p < places; p++) rows[c * places + p] = x[p * channels + c];
    }
}

/* The way back, for gradients */
void leave(const float *columns, float *dx, long n, long channels, long places)
{
    const long wide = full(n), features = channels * places;
    for (long first = 0; first < n; first += L, dx += L * features) {
        const long many = n - first < L ? n - first : L;
        for (long p = 0; p < places; p++)
            for (long c = 0; c < channels; c++)
                for (long s = 0; s < many; s++) dx[s * features + p * channels + c] = columns[(c * places + p) * wide + first + s];
    }
}

/* y = w x + b, cut off below 0 if asked; rows of y, if there is room for them */
void forward(const float *x, const float *w, const float *b, float *y, float *rows, long n, long in, long out, long cut)
{
    const long wide = full(n), row = full(out);
    multiply(w, in, 1, x, wide, in, y, wide, out, wide / L);
    for (long o = 0; o < out; o++, y += wide) {
        for (long s = 0; s < wide; s++) {
            const float z = y[s] + b[o];
            y[s] = cut && z < 0 ? 0 : z; /* NaN stays */
        }
        if (rows)
            for (long s = 0; s < n; s++) rows[s * row + o] = y[s];
    }
}

/* dz = (softmax(z) - onehot(label)) / n; or whether a label is none of the classes */
_Bool slope(const float *z, const int64_t *labels, float *dz, long n, long classes)
{
    const long wide = full(n);
    for (long s = 0; s < n; s++) {
        if (labels[s] < 0 || labels[s] >= classes) return 1;
        float most = z[s], all = 0;
        for (long c = 1; c < classes; c++)
            if (z[c * wide + s] > most) most = z[c * wide + s];
        for (long c = 0; c < classes; c++) all += dz[c * wide + s] = expf(z[c * wide + s] - most);
        for (long c = 0; c < classes; c++) dz[c * wide + s] = (dz[c * wide + s] / all - (c == labels[s])) / n;
    }
    return 0;
}

/* The gradients of w and b. room: out rows, if those of dw are no whole vectors */
void weights(const float *dz, const float *rows, float *room, float *dw, float *db, long n, long in, long out)
{
    const long wide = full(n), row = full(in);
    float *to = row == in ? dw : room;
    multiply(dz, wide, 1, rows, row, n, to, row, out, row / L);
    for (long o = 0; to == room && o < out; o++) memcpy(dw + o * in, room + o * row, in * sizeof(float));
    for (long o = 0; o < out; o += L) { /* many sums side by side: each has to wait for itself */
        const long many = out - o < L ? out - o : L;
        float sum[L] = {0};
        for (long s = 0; s < n; s++)
            for (long r = 0; r < many; r++) sum[r] += dz[(o + r) * wide + s];
        memcpy(db + o, sum, many * sizeof(float));
    }
}

/* The gradient of x; none where x was cut off, if x is given */
void inputs(const float *dz, const float *w, const float *x, float *dx, long n, long in, long out)
{
    const long wide = full(n);
    multiply(w, 1, in, dz, wide, out, dx, wide, in, wide / L);
    if (x)
        for (long i = 0; i < in * wide; i++) dx[i] = x[i] <= 0 ? 0 : dx[i];
}
