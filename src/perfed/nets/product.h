/* Products of matrices in blocks whose sums stay in registers. After vectors.h and L, the floats of a vector.

   Every sum runs in one lane from first to last, so neither the length of vectors nor the size of blocks changes it; only
   whether the processor multiplies and adds in one step does. */
#define MOST (REGISTERS / 8)                                    /* vectors side by side in a block of sums */
#define ACROSS(vectors) ((vectors) < MOST ? (vectors) : MOST)
#define DOWN(across) (REGISTERS * 3 / 4 / (across))             /* rows of such a block */

typedef float lanes __attribute__((vector_size(L * 4)));
typedef float lanes_at __attribute__((vector_size(L * 4), aligned(4), may_alias));

INLINE lanes at(const float *place) { return *(const lanes_at *)place; }

/* out[i][:] = sum over k of a[i, k] * b[k][:], a block of them; a's steps are given. `onto`: added to what is there */
INLINE void block(const float *a, long step_i, long step_k, const float *b, long stride, const long depth, float *out,
                  long to, const int rows, const int vectors, const int onto)
{
    lanes sum[REGISTERS][MOST];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] = onto ? at(out + i * to + v * L) : (lanes){0};
    for (long k = 0; k < depth; k++) {
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int v = 0; v < vectors; v++)
                sum[i][v] += a[i * step_i + k * step_k] * at(b + k * stride + v * L);
        if (rows * vectors == 1) ALONE(sum[0][0]);
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int v = 0; v < vectors; v++) *(lanes_at *)(out + i * to + v * L) = sum[i][v];
}

/* The same for all rows and for columns in `all` vectors, `across` of them at a time */
INLINE void product(const float *a, const long step_i, const long step_k, const float *b, long stride, const long depth,
                    float *out, long to, const long rows, const long all, const int across, const int onto)
{
    for (long v = 0; v < all; v += across) {
        const int whole = v + across <= all;
        long i = 0;
        for (; whole && i + DOWN(across) <= rows; i += DOWN(across))
            block(a + i * step_i, step_i, step_k, b + v * L, stride, depth, out + i * to + v * L, to, DOWN(across), across, onto);
        for (; i < rows; i++)
            if (whole) block(a + i * step_i, step_i, step_k, b + v * L, stride, depth, out + i * to + v * L, to, 1, across, onto);
            else
                for (long one = v; one < all; one++)
                    block(a + i * step_i, step_i, step_k, b + one * L, stride, depth, out + i * to + one * L, to, 1, 1, onto);
    }
}
