/* What the processor has, for code that is vectors of floats by itself */
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
