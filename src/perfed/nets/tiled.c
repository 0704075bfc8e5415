/* y = conv(x, w) + b for filters of 3x3, and its gradients, by tiles (winograd.h).

   Maps are channels-last, [n][h][w][channels], filters [CO][3][3][CI]; CI, CO and PAD are constants of the build, CI and CO
   multiples of 16. Every sum runs in one lane, in an order that neither the length of the processor's vectors nor the
   number of maps changes. */
#include <string.h>

#include "vectors.h"
#define L WIDE
#include "product.h"
#define K 3
#include "winograd.h"

INLINE void spread(const lanes *y, lanes *m) /* A y */
{
    const lanes near = y[0] + y[2] * 0.5f, far = y[0] + y[2] * 2.0f;
    const lanes next = (y[1] + y[3] * 0.5f) * R_2, last = (y[1] * 2.0f + y[3] * 4.0f) * R_2;
    m[0] = y[0];
    m[1] = near + next;
    m[2] = near - next;
    m[3] = far + last;
    m[4] = far - last;
    m[5] = y[3];
}

INLINE void filter_three(const lanes *s, lanes *g) /* G^T s */
{
    const lanes near = s[1] + s[2], far = s[3] + s[4];
    g[0] = s[0] + (far - near * 4.0f) * (1.0f / 6);
    g[1] = ((s[2] - s[1]) * 2.0f + (s[3] - s[4])) * (R_2 / 3);
    g[2] = s[5] + (far - near) * (1.0f / 3);
}

/* What room the functions below need */
long room_size(void) { return ROOM; }

/* Convolves maps of `in` channels, whose filters stand at their places, and adds biases, if there are any */
INLINE void convolved(map x, const float *u, const float *bias, float *room, float *y, long n, long height, long width,
                      const long in, const long out)
{
    const tiling t = tiling_of(n, height, width);
    float *v = room, *m = v + PLACES * APART(in);
    for (long from = 0; from < t.all; from += TILES) {
        const long many = t.all - from < TILES ? t.all - from : TILES;
        enter(x, t, from, many, v, in);
        multiply(v, u, m, many, in, out);
        for (long k = 0; k < many; k++) {
            const spot s = spot_of(t, from + k);
            for (long o = 0; o < out; o += L) {
                lanes four[STEP][STEP];
                leave(m + k * out + o, APART(out), four);
                const lanes b = bias ? at(bias + o) : (lanes){0};
                for (int r = 0; r < STEP && s.row + r < height; r++)
                    for (int c = 0; c < STEP && s.column + c < width; c++)
                        *(lanes_at *)(y + ((s.map * height + s.row + r) * width + s.column + c) * out + o) = four[r][c] + b;
            }
        }
    }
}

void forward(const float *x, const float *w, const float *bias, float *room, float *y, long n, long h, long width)
{
    const long rows = h + 2 * PAD - 2, columns = width + 2 * PAD - 2;
    float *u = room + TAPS * CI * CO;
    filters_for_inputs(w, room, u);
    convolved((map){x, h * width * CI, h, width, PAD}, u, bias, u + PLACES * CI * CO, y, n, rows, columns, CI, CO);
}

/* The gradient of x: dy convolved with the filters turned round */
void inputs(const float *dy, const float *w, float *room, float *dx, long n, long h, long width)
{
    const long rows = h + 2 * PAD - 2, columns = width + 2 * PAD - 2;
    for (long o = 0; o < CO; o++)
        for (long i = 0; i < CI; i += L) filter_places(w + o * TAPS * CI + i, CI, 1, room + o * CI + i, CI * CO);
    convolved((map){dy, rows * columns * CO, rows, columns, 2 - PAD}, room, 0, room + PLACES * CI * CO, dx, n, h, width, CO, CI);
}

/* The gradients of filters and biases: the transposed algorithm, G^T [ sum of (A dy A^T) * (B^T d B) ] G */
void filters(const float *dy, const float *x, float *room, float *dw, float *db, long n, long h, long width)
{
    const long rows = h + 2 * PAD - 2, columns = width + 2 * PAD - 2;
    const tiling t = tiling_of(n, rows, columns);
    const map from = {x, h * width * CI, h, width, PAD}, slope = {dy, rows * columns * CO, rows, columns, 0};
    float *sums = room, *v = sums + PLACES * CI * CO, *m = v + PLACES * APART(CI);
    memset(sums, 0, PLACES * CI * CO * sizeof(float));
    for (long first = 0; first < t.all; first += TILES) {
        const long many = t.all - first < TILES ? t.all - first : TILES;
        enter(from, t, first, many, v, CI);
        for (long k = 0; k < many; k++) {
            const spot s = spot_of(t, first + k);
            for (long o = 0; o < CO; o += L) {
                lanes across[STEP][TILE], six[TILE];
                for (int r = 0; r < STEP; r++) {
                    lanes four[STEP];
                    UNROLLED for (int c = 0; c < STEP; c++) four[c] = position(slope, s.map, s.row + r, s.column + c, CO, o);
                    spread(four, across[r]);
                }
                for (int c = 0; c < TILE; c++) {
                    const lanes four[STEP] = {across[0][c], across[1][c], across[2][c], across[3][c]};
                    spread(four, six);
                    UNROLLED for (int r = 0; r < TILE; r++)
                        *(lanes_at *)(m + (r * TILE + c) * APART(CO) + k * CO + o) = six[r];
                }
            }
        }
        for (int place = 0; place < PLACES; place++)
            product(m + place * APART(CO), 1, CO, v + place * APART(CI), CI, many, sums + place * CI * CO, CI, CO, CI / L,
                    ACROSS(CI / L), 1);
    }
    for (long o = 0; o < CO; o++)
        for (long i = 0; i < CI; i += L) {
            lanes down[3][TILE], three[3];
            for (int c = 0; c < TILE; c++) {
                lanes six[TILE];
                UNROLLED for (int r = 0; r < TILE; r++) six[r] = at(sums + ((r * TILE + c) * CO + o) * CI + i);
                filter_three(six, three);
                UNROLLED for (int r = 0; r < 3; r++) down[r][c] = three[r];
            }
            for (int r = 0; r < 3; r++) {
                filter_three(down[r], three);
                UNROLLED for (int c = 0; c < 3; c++) *(lanes_at *)(dw + ((o * 3 + r) * 3 + c) * CI + i) = three[c];
            }
        }
    for (long o = 0; db && o < CO; o += L) {
        lanes all = {0};
        for (long k = 0; k < n * rows * columns; k++) all += at(dy + k * CO + o);
        *(lanes_at *)(db + o) = all;
    }
}
