/* What an interpreted kernel loads and stores, element by element, from and to wherever its pointers point; and its
 * conversions between fp16 and fp32, for which numpy takes 3 and 6 ns an element.
 * interpreter_memory.py writes the struct of the arguments before this text; `size` is that of an element in bytes.
 */

#include <string.h>

#define EACH(kind, to, from)                                                                                            \
    for (int64_t i = 0; i < n; i++)                                                                                     \
        if (mask[i]) {                                                                                                  \
            kind element;                                                                                               \
            memcpy(&element, from, sizeof element); /* a pointer need not be aligned */                                 \
            memcpy(to, &element, sizeof element);                                                                       \
        }

#define BY_SIZE(move)                                                                                                   \
    switch (c->size) {                                                                                                  \
    case 1: move(uint8_t); break;                                                                                       \
    case 2: move(uint16_t); break;                                                                                      \
    case 4: move(uint32_t); break;                                                                                      \
    default: move(uint64_t);                                                                                            \
    }

#define LOAD(kind) EACH(kind, values + i * sizeof(kind), (const char *)(intptr_t)pointers[i])
#define STORE(kind) EACH(kind, (char *)(intptr_t)pointers[i], values + i * sizeof(kind))

#define ARGUMENTS                                                                                                       \
    const uint64_t *pointers = (const uint64_t *)(intptr_t)c->pointers;                                                 \
    const uint8_t *mask = (const uint8_t *)(intptr_t)c->mask;                                                           \
    char *values = (char *)(intptr_t)c->values;                                                                         \
    int64_t n = c->n;

int64_t load(const struct elements *c) {
    ARGUMENTS
    BY_SIZE(LOAD)
    return 0;
}

int64_t store(const struct elements *c) {
    ARGUMENTS
    BY_SIZE(STORE)
    return 0;
}

#ifdef __F16C__ /* a processor that converts eight at a time, to nearest even */
#include <immintrin.h>

int64_t from_half(const struct elements *c) {
    const uint16_t *from = (const uint16_t *)(intptr_t)c->pointers;
    float *to = (float *)(intptr_t)c->values;
    int64_t i = 0;
    for (; i + 8 <= c->n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < c->n; i++)
        to[i] = _cvtsh_ss(from[i]);
    return 0;
}

int64_t to_half(const struct elements *c) {
    const float *from = (const float *)(intptr_t)c->pointers;
    uint16_t *to = (uint16_t *)(intptr_t)c->values;
    int64_t i = 0;
    for (; i + 8 <= c->n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < c->n; i++)
        to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
    return 0;
}
#endif
