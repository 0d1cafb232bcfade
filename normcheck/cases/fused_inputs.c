/* The tensors of a case on a CPU: the same bits as the plain way in inputs.py, which defines them. fused_inputs.py
 * writes the numbers of kinds before this text. fp64 is rounded after each operation, then to fp32, then to the stored
 * dtype.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 256
#define INLINE static inline

typedef double tile[TILE];

/* the arguments, in the order of fused_inputs.py, with the dtype of each tensor */
struct make {
    int64_t x_ptr, x_type, dy_ptr, dy_type, weight_ptr, weight_type, bias_ptr, bias_type;
    int64_t M, N, x_stride, dy_stride, dy_elements, slab, start, row_kind, dy_kind, only_row, nan_bits;
    int64_t weight_kind, clamped, has_bias, step, offset, lower, upper; /* the last four are the bits of an fp64 */
};

INLINE int64_t bits_of(double a) { int64_t b; memcpy(&b, &a, 8); return b; }
INLINE double number_of(int64_t b) { double a; memcpy(&a, &b, 8); return a; }
INLINE double power_of_two(int exponent) { return number_of((int64_t)(exponent + 1023) << 52); }

/* random numbers, see rng.py */

INLINE uint64_t start_of(int64_t start, int stream) {
    return ((uint64_t)start + (uint64_t)stream * OF_STREAM) & INT64_MAX;
}

INLINE uint64_t hash(uint64_t z) {
    z = (z ^ (z >> 30)) * (uint64_t)MIX_1;
    z = (z ^ (z >> 27)) * (uint64_t)MIX_2;
    return z ^ (z >> 31);
}

INLINE uint64_t hash_at(int64_t start, int stream, int64_t position) {
    return hash((uint64_t)position * (uint64_t)GOLDEN + start_of(start, stream));
}

INLINE double normal(uint64_t b) {
    int32_t sum = (int16_t)b + (int16_t)(b >> 16) + (int16_t)(b >> 32) + (int16_t)(b >> 48);
    return (sum + 2) * NORMAL_SCALE;
}

INLINE double uniform(uint64_t b) { return (double)(uint32_t)b * 0x1p-32; }

INLINE void hashes(uint64_t *restrict to, int64_t start, int stream, int64_t position, int64_t count) {
    uint64_t z = (uint64_t)position * (uint64_t)GOLDEN + start_of(start, stream);
    for (int64_t i = 0; i < count; i++) to[i] = hash(z + (uint64_t)i * (uint64_t)GOLDEN);
}

INLINE double random_of_row(const struct make *a, int64_t row) { return uniform(hash_at(a->start, ROW, row)); }

/* stores: fp64 in fp32, then in the io dtype, to nearest even; a NaN has bits of its own */

INLINE uint16_t to_fp16(float value) {
    uint32_t b;
    memcpy(&b, &value, 4);
    uint32_t sign = b >> 16 & 0x8000, size = b & 0x7FFFFFFF, half = 0x3F000000, small;
    float shifted;
    memcpy(&shifted, &size, 4);
    shifted += 0.5f; /* its last place is that of fp16's subnormal numbers */
    memcpy(&small, &shifted, 4);
    uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    uint32_t out = size < 0x38800000 ? small - half : size >= 0x47800000 ? 0x7C00 : normal;
    return (uint16_t)(out | sign);
}

INLINE uint16_t to_bf16(float value) {
    uint32_t b;
    memcpy(&b, &value, 4);
    uint32_t size = b & 0x7FFFFFFF;
    uint32_t rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    return (uint16_t)(size >= 0x7F800000 ? b >> 16 : rounded);
}

INLINE void put(int64_t address, int64_t type, int64_t first, const double *restrict values, int64_t count) {
    if (type == FP16) {
        uint16_t *to = (uint16_t *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = to_fp16((float)values[i]);
    } else if (type == BF16) {
        uint16_t *to = (uint16_t *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = to_bf16((float)values[i]);
    } else {
        float *to = (float *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = (float)values[i];
    }
}

INLINE void put_nan(int64_t address, int64_t type, int64_t at, int64_t nan_bits) {
    if (type == FP32)
        ((int32_t *)address)[at] = (int32_t)nan_bits;
    else
        ((int16_t *)address)[at] = (int16_t)nan_bits;
}

/* rows */

INLINE double level_of(double ur) {
    const double levels[] = {14.0, -3.5, 1234.0, 0.1, 1.0, -200.0, 3e-3, 40003.0};
    return levels[(int)(ur * 8)];
}

/* x of a tile of one row of an ordinary kind, from its normal-like n and its hashes */
INLINE void ordinary(double *restrict x, const double *restrict n, const uint64_t *restrict bits,
                     const struct make *a, int kind, double ur, int64_t at, int64_t count) {
    const int half = a->x_type == FP16;
    const int64_t random_column = (int64_t)(ur * (double)a->N);
    const double step = number_of(a->step);
#define EACH(value) for (int64_t i = 0; i < count; i++) x[i] = value
    switch (kind) {
    case NORMAL: EACH(n[i]); break;
    case UNIFORM: EACH(uniform(bits[i])); break;
    case SHIFTED: EACH(n[i] + 8.0); break;
    case SCALED: EACH(n[i] * (ur < 0.5 ? 8.0 : 0.125)); break;
    case TAIL: EACH(at + i == a->N - 1 ? 10.0 + n[i] : n[i]); break;
    case RAMP: EACH((double)(at + i) * step - 3.0); break;
    case OUTLIER: EACH(at + i == random_column ? 40.0 + n[i] : n[i]); break;
    case INTEGERS:
        EACH((double)((int)(uniform(bits[i]) * 5) - 2) * (uniform(bits[i]) > 0.5 ? 1.0 : 0.0));
        break;
    case ALTERNATING: EACH((at + i) % 2 ? -100.0 : 100.0); break;
    case ZERO: EACH(0.0); break;
    case CONSTANT: EACH(level_of(ur)); break;
    case TINY_VARIANCE: EACH(n[i] * power_of_two((int)(ur * 8) - 17)); break;
    case SMALL_OFFSET: EACH(n[i] * 0x1p-10 + 0.25); break;
    case MEAN100: EACH(n[i] + 100.0); break;
    case OFFSET:
        if (a->x_type == FP32) {
            EACH(n[i] + 4096.0);
        } else {
            const double lowest = half ? 2048.0 : 256.0, fraction = ur * (double)a->N - (double)random_column;
            const int64_t width = half && a->N / 128 > 2 ? a->N / 128 : 2;
            const double level = lowest + 2.0 * floor(fraction * (lowest / 4));
            EACH(llabs(at + i - random_column) < width ? level + 2.0 : level);
        }
        break;
    case MEAN10000: EACH(n[i] + 10000.0); break;
    case MIXED: EACH(n[i] * power_of_two((int)(uniform(bits[i]) * 30) - 20)); break;
    case LARGE: EACH(n[i] * (half ? 16000.0 : 0x1p33)); break;
    case SUBNORMAL: EACH(n[i] * (half ? 0x1p-18 : 0x1p-128)); break;
    }
}

/* whether a row is the one of its slab that is not normal */
INLINE int is_hit(const struct make *a, int64_t row) {
    int64_t first = row / a->slab * a->slab, height = a->M - first < a->slab ? a->M - first : a->slab;
    return row == first + (int64_t)(random_of_row(a, first) * 4 * (double)height) % height;
}

/* one of a kind that is not in the blend */
INLINE void special(double *restrict x, const double *restrict n, const struct make *a, double ur, int hit, int64_t at,
                    int64_t count) {
    const double most = a->x_type == FP16 ? MAX_FP16 : a->x_type == BF16 ? MAX_BF16 : MAX_FP32;
    const int64_t random_column = (int64_t)(ur * (double)a->N);
    if (a->row_kind == SIGNED_ZERO) {
        EACH(copysign(0.0, n[i]));
    } else if (!hit) {
        EACH(n[i]);
    } else if (a->row_kind == LARGEST) {
        EACH(copysign(most, n[i]));
    } else if (a->row_kind == NAN_ROWS) {
        EACH(at + i == random_column || ur < 0.25 ? NAN : n[i]);
    } else {
        EACH(at + i == random_column ? copysign(INFINITY, n[i]) : n[i]);
    }
}

INLINE void cotangent(double *restrict x, const double *restrict n, const double *restrict nx, int kind, int half,
                      int64_t count) {
    switch (kind) {
    case DY_SHIFTED: EACH(n[i] + 0.5); break;
    case DY_ONES: EACH(1.0); break;
    case DY_INTEGERS: EACH(rint(n[i] * 1.25)); break;
    case DY_CORRELATED: EACH((nx[i] + 0.25 * n[i]) + 0.5); break;
    case DY_LAST_ROW:
    case DY_FIRST_ROW: EACH(n[i] + copysign(0.5, n[i])); break;
    case DY_SMALL: EACH(n[i] * (half ? 0x1p-12 : 0x1p-30)); break;
    case DY_LARGE: EACH(n[i] * 0x1p9); break;
    default: EACH(n[i]);
    }
}

/* the place of the element of dy that is not finite in the slab of a row, and a number of its sign */
INLINE int64_t one_element(const struct make *a, int64_t row, double *sign) {
    int64_t first = row / a->slab * a->slab, height = a->M - first < a->slab ? a->M - first : a->slab;
    *sign = normal(hash_at(a->start, DY, first * a->N));
    return first * a->N + (int64_t)(fabs(*sign) * 1e6) % (height * a->N);
}

INLINE void rows(const struct make *a) {
    for (int64_t row = 0; row < a->M; row++) {
        const int kind = a->row_kind == BLEND ? (int)(row % KINDS) : (int)a->row_kind;
        const double ur = random_of_row(a, row);
        const int hit = a->row_kind > BLEND && is_hit(a, row);
        double sign = 0;
        const int odd_dy = a->dy_kind == DY_NAN || a->dy_kind == DY_INF;
        const int64_t odd = odd_dy ? one_element(a, row, &sign) : -1;
        for (int64_t at = 0; at < a->N; at += TILE) {
            int64_t count = a->N - at < TILE ? a->N - at : TILE, position = row * a->N + at;
            uint64_t bits[TILE];
            tile nx, x, ndy;
            hashes(bits, a->start, X, position, count);
            for (int64_t i = 0; i < count; i++) nx[i] = normal(bits[i]);
            if (a->row_kind > BLEND)
                special(x, nx, a, ur, hit, at, count);
            else
                ordinary(x, nx, bits, a, kind, ur, at, count);
            put(a->x_ptr, a->x_type, row * a->x_stride + at, x, count);
            if (a->row_kind == NAN_ROWS)
                for (int64_t i = 0; i < count; i++)
                    if (x[i] != x[i]) put_nan(a->x_ptr, a->x_type, row * a->x_stride + at + i, a->nan_bits);
            if (position >= a->dy_elements) continue;
            if (a->dy_elements - position < count) count = a->dy_elements - position;
            hashes(bits, a->start, DY, position, count);
            for (int64_t i = 0; i < count; i++) ndy[i] = normal(bits[i]);
            cotangent(x, ndy, nx, (int)a->dy_kind, a->x_type == FP16, count);
            if (odd >= position && odd < position + count && a->dy_kind == DY_INF)
                x[odd - position] = copysign(INFINITY, sign);
            if (a->only_row >= 0 && row != a->only_row) memset(x, 0, count * sizeof(double));
            put(a->dy_ptr, a->x_type, row * a->dy_stride + at, x, count);
            if (odd >= position && odd < position + count && a->dy_kind == DY_NAN)
                put_nan(a->dy_ptr, a->x_type, row * a->dy_stride + odd - row * a->N, a->nan_bits);
        }
    }
}

/* weight and bias */

INLINE void parameters(const struct make *a) {
    const double lower = number_of(a->lower), upper = number_of(a->upper), offset = number_of(a->offset);
    for (int64_t at = 0; at < a->N; at += TILE) {
        int64_t count = a->N - at < TILE ? a->N - at : TILE;
        tile weight, bias;
        for (int64_t i = 0; i < count; i++) {
            double n = normal(hash_at(a->start, WEIGHT, at + i));
            weight[i] = a->weight_kind == SMALL_WEIGHTS ? n * (1.0 / 300) : n;
            bias[i] = normal(hash_at(a->start, BIAS, at + i));
        }
        if (a->weight_kind == PROBE) {
            const double probes[] = {0.0, -1.0, 0x1p-8, 0x1p-9};
            for (int64_t i = 0; i < count; i++) {
                int64_t column = at + i, which = column % 9;
                if (which == 8) weight[i] = 8.0 * weight[i];
                else if (which % 2 == 0) weight[i] = probes[which / 2];
                if (a->clamped && weight[i] + offset == 0) bias[i] = column / 9 % 2 ? upper : lower;
            }
        }
        put(a->weight_ptr, a->weight_type, at, weight, count);
        if (a->has_bias) put(a->bias_ptr, a->weight_type, at, bias, count);
    }
}

int make(const struct make *a) {
    parameters(a);
    rows(a);
    return 0;
}
