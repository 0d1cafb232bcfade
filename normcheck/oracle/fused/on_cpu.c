/* The four kernels of the fused judge for a CPU: what forward.py and gradients.py have for a GPU, under the same names
 * and in the same order, in fp64. on_cpu.py writes the structs and enums of their arguments before this text, compiles
 * it and calls it; tests/oracle/test_fused.py holds it to the plain judge.
 *
 * Rows are computed in tiles of TILE columns, by loops without a branch for an element, so that a compiler makes
 * vectors of them. Sums have LANES partial sums each, in an order that does not depend on the machine.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 256
#define LANES 8

#define INLINE static inline

typedef double tile[TILE];

/* fp64 numbers and their bits */

INLINE int64_t bits_of(double a) { int64_t b; memcpy(&b, &a, 8); return b; }
INLINE double number_of(int64_t b) { double a; memcpy(&a, &b, 8); return a; }
INLINE double larger(double a, double b) { return a > b ? a : b; }

/* `bound`, but at least what stands for 0; NaN stays NaN */
INLINE double with_room(double bound) { return bound < 1e-300 ? 1e-300 : bound; }

/* 2^floor(log2(a)) of a >= 0, at least `least`, a power of two */
INLINE double power(double a, double least) { return larger(number_of(bits_of(a) & 0x7FF0000000000000), least); }

/* 1 / p of a normal power of two, exactly */
INLINE double one_over(double p) { return number_of(((int64_t)2046 << 52) - bits_of(p)); }

/* the error of one store at magnitude a >= 0 */
INLINE double store(double a, double least, double half, int flush) {
    double error = power(a, least) * half;
    return flush ? error + (a < 0x1p-125 ? 0x1p-126 : 0.0) : error;
}

/* `a` rounded to the nearest number of a format, ties to even: fp64 with the anchor's exponent has its spacing */
INLINE double to_io(double a, double least, double half) {
    double anchor = power(fabs(a), least) * half * (3.0 * 0x1p52);
    return (a + anchor) - anchor;
}

/* ratios: NaN counts as infinite */
INLINE double ratio_of(double error, double bound) {
    double ratio = error / bound;
    return ratio == ratio ? ratio : INFINITY;
}

/* values of a tensor as fp64, exactly */

INLINE double of_fp16(uint16_t h) {
    int32_t exponent = h & 0x7C00, size = h & 0x7FFF;
    double normal = number_of(((int64_t)size + ((int64_t)(exponent == 0x7C00 ? 2047 - 31 : 1023 - 15) << 10)) << 42);
    double a = exponent ? normal : size * 0x1p-24;
    return h & 0x8000 ? -a : a;
}

INLINE double of_bf16(uint16_t h) {
    uint32_t b = (uint32_t)h << 16;
    float a;
    memcpy(&a, &b, 4);
    return a;
}

INLINE void widen(double *restrict to, int64_t address, int64_t type, int64_t first, int64_t count) {
    if (type == FP16) {
        const uint16_t *from = (const uint16_t *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = of_fp16(from[i]);
    } else if (type == BF16) {
        const uint16_t *from = (const uint16_t *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = of_bf16(from[i]);
    } else if (type == FP32) {
        const float *from = (const float *)address + first;
        for (int64_t i = 0; i < count; i++) to[i] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++) to[i] = NAN; /* of a dtype that is not known nothing passes */
    }
}

/* dy, whose columns may all be one number */
INLINE void widen_dy(double *restrict to, int64_t address, int64_t type, int64_t first, int64_t column, int64_t count) {
    if (column || !count) {
        widen(to, address, type, first, count);
        return;
    }
    double a;
    widen(&a, address, type, first, 1);
    for (int64_t i = 0; i < count; i++) to[i] = a;
}

/* sums and largest numbers of a tile, in lanes */

INLINE double of_lanes(const double *a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* adds up to LANES sums; `a` has TILE numbers, 0 behind the last one */
INLINE void add(double *restrict lanes, const double *restrict a) {
    for (int i = 0; i < TILE; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += a[i + l];
}

INLINE void keep_largest(double *restrict lanes, const double *restrict a) {
    for (int i = 0; i < TILE; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = larger(a[i + l], lanes[l]);
}

INLINE double largest(const double *lanes) {
    double most = lanes[0];
    for (int l = 1; l < LANES; l++) most = larger(lanes[l], most);
    return most;
}

/* what is found of a check: its largest ratio, error, and error in powers of two, how many zeros would pass, and how
 * many elements have no finite bound, of which nothing else is found */
typedef struct {
    double ratio[LANES], size[LANES], powers[LANES];
    int64_t zeros, unbounded;
} check;

INLINE void note(int64_t *found, int number, const check *c) {
    int64_t *to = found + number * FIELDS;
    double most[3] = {largest(c->ratio), largest(c->size), largest(c->powers)};
    for (int i = 0; i < 3; i++) to[i] = bits_of(larger(most[i], number_of(to[i])));
    to[ZEROS] += c->zeros;
    to[UNCHECKABLE] += c->unbounded;
}

/* compares a tile of `count` numbers with what is expected */
INLINE void compare(check *restrict c, const double *restrict got, const double *restrict expected,
                    const double *restrict upper, const double *restrict lower, double least, int64_t count) {
    tile ratio, size, powers;
    int64_t zeros = 0, unbounded = 0;
    memset(ratio, 0, sizeof ratio);
    memset(size, 0, sizeof size);
    memset(powers, 0, sizeof powers);
    for (int64_t i = 0; i < count; i++) {
        double error = got[i] - expected[i], bound = error > 0 ? upper[i] : lower[i];
        double of_zero = expected[i] > 0 ? lower[i] : upper[i];
        double off = upper[i] < INFINITY ? fabs(error) : 0.0;
        ratio[i] = bound < INFINITY ? ratio_of(fabs(error), bound) : 0.0;
        size[i] = off;
        powers[i] = off > 0 ? off * one_over(power(fabs(expected[i]), least)) : 0.0;
        zeros += fabs(expected[i]) <= of_zero && of_zero < INFINITY;
        unbounded += !(upper[i] < INFINITY);
    }
    keep_largest(c->ratio, ratio);
    keep_largest(c->size, size);
    keep_largest(c->powers, powers);
    c->zeros += zeros;
    c->unbounded += unbounded;
}

/* one number, of a statistic or of a sum over rows */
INLINE void compare_one(check *c, double got, double expected, double upper, double lower, double least) {
    double error = got - expected, off = fabs(error);
    if (!(upper < INFINITY)) {
        c->unbounded++;
        return;
    }
    c->ratio[0] = larger(ratio_of(off, error > 0 ? upper : lower), c->ratio[0]);
    c->size[0] = larger(off, c->size[0]);
    c->powers[0] = larger(off * one_over(power(fabs(expected), least)), c->powers[0]);
    c->zeros += fabs(expected) <= (expected > 0 ? lower : upper);
}

/* forward */

typedef struct {
    double mean, r, al, per_xh, per_row; /* statistics of a row, and how far xhat is off, by |xhat| and beside it */
} row;

INLINE void off_before_cast(const double *number, double al, double r, double *per_xh, double *per_row) {
    *per_xh = (1 + al) * number[PER_XHAT] - 1;
    *per_row = number[ETA] * (1 + r * (1 + al));
}

INLINE row row_of(const double *number, double mean, double r, double al, double d, int cast) {
    row s = {mean, r, al, 0, 0};
    double u = number[U], eta = number[ETA], k_y = number[K_Y];
    if (cast) {
        off_before_cast(number, al, r, &s.per_xh, &s.per_row);
    } else {
        s.per_row = eta * (1 + r * (1 + al)) + (1 + al) * (1 + (k_y + 1) * u) * d;
        s.per_xh = (1 + al) * (1 + k_y * u) - 1 + 0x1p-51; /* the last is the reference's own rounding */
    }
    return s;
}

typedef struct {
    tile p, z, y, before, upper, lower;
} outputs;

/* z and y of a tile, the error of z before its store, and the bounds of that of y */
INLINE void outputs_of(outputs *restrict o, const struct forward_kernel *a, const double *number, row s,
                       const double *restrict x, const double *restrict g, const double *restrict bias, int64_t n) {
    const double u = number[U], eta = number[ETA], lower_clip = number[LOWER_CLIP], upper_clip = number[UPPER_CLIP];
    const double io_least = number[IO_LEAST], io_half = number[IO_HALF], wider = 5 * u * (1 + s.al);
    const double y_least = number[Y_LEAST], y_half = number[Y_HALF], mean_abs = fabs(s.mean);
    const int clamped = (int)a->CLAMPED, flush = (int)a->FLUSH, stored = (int)a->STORED, folded = (int)a->FOLDED;
    tile xh;
    for (int64_t i = 0; i < n; i++) xh[i] = (x[i] - s.mean) * s.r;
    if (a->CAST) {
        for (int64_t i = 0; i < n; i++) {
            double e = fabs(xh[i]) * s.per_xh + s.per_row, g_abs = fabs(g[i]);
            double value = to_io(xh[i], io_least, io_half);
            double low = to_io(xh[i] - e, io_least, io_half), high = to_io(xh[i] + e, io_least, io_half);
            double y = value * g[i], one = low * g[i], other = high * g[i];
            double above = larger(one, other) - y, below = y + larger(-one, -other);
            double ops = (larger(-low, high) * g_abs) * u + eta * (1 + g_abs);
            ops = g[i] != 0 ? ops : 0.0;
            o->p[i] = o->z[i] = o->y[i] = y;
            o->before[i] = larger(above, below) + ops;
            o->upper[i] = above + ops;
            o->lower[i] = below + ops;
        }
    } else {
        for (int64_t i = 0; i < n; i++) o->p[i] = xh[i] * g[i];
        if (bias)
            for (int64_t i = 0; i < n; i++) o->z[i] = o->p[i] + bias[i];
        else
            memcpy(o->z, o->p, n * sizeof(double));
        if (clamped)
            for (int64_t i = 0; i < n; i++)
                o->y[i] = o->z[i] < lower_clip ? lower_clip : o->z[i] > upper_clip ? upper_clip : o->z[i];
        else
            memcpy(o->y, o->z, n * sizeof(double));
        for (int64_t i = 0; i < n; i++)
            o->before[i] = fabs(o->p[i]) * s.per_xh + (fabs(g[i]) * s.per_row + eta);
        if (a->weight_offset) { /* xhat may be added to its product with the weight */
            const double offset = (double)a->weight_offset, alone = number[ALONE];
            for (int64_t i = 0; i < n; i++)
                o->before[i] += (fabs(xh[i]) * (1 + s.al) + s.per_row) * fabs(g[i] - offset) * alone;
        }
        if (folded)
            for (int64_t i = 0; i < n; i++) o->before[i] += (fabs(x[i]) + mean_abs) * s.r * fabs(g[i]) * wider;
        if (bias)
            for (int64_t i = 0; i < n; i++) {
                double b_abs = fabs(bias[i]), before = folded ? o->before[i] + b_abs * wider : o->before[i];
                double by_add = fabs(o->z[i]) * u + before * (1 + u), by_size = 2 * before + fabs(o->p[i]);
                o->before[i] = (by_add < by_size ? by_add : by_size) + b_abs * 0x1p-51;
            }
        for (int64_t i = 0; i < n; i++) o->before[i] = g[i] != 0 ? o->before[i] : 0.0;
        if (bias)
            for (int64_t i = 0; i < n; i++) o->before[i] += fabs(bias[i]) < eta ? fabs(bias[i]) : 0.0;
        memcpy(o->upper, o->before, n * sizeof(double));
        memcpy(o->lower, o->before, n * sizeof(double));
    }
    if (stored)
        for (int64_t i = 0; i < n; i++) {
            double half = store(fabs(o->y[i]) + o->before[i], y_least, y_half, flush);
            o->upper[i] += half;
            o->lower[i] += half;
        }
    else
        for (int64_t i = 0; i < n; i++) {
            o->upper[i] = with_room(o->upper[i]);
            o->lower[i] = with_room(o->lower[i]);
        }
}

/* writes the reference's bits, ties and doubt of a tile, and counts the own bits */
INLINE void judge_bits(const struct forward_kernel *a, const double *number, const outputs *restrict o, int64_t at_row,
                       int64_t start, int64_t n, int bounded, int spoilt, int64_t *counts) {
    const double lower_clip = number[LOWER_CLIP], upper_clip = number[UPPER_CLIP];
    uint8_t *bits = (uint8_t *)a->bits_ptr + at_row * a->N + start, *ties = (uint8_t *)a->ties_ptr + at_row * a->N + start;
    uint8_t *doubts = (uint8_t *)a->doubt_ptr + at_row * a->N + start;
    const uint8_t *own = (const uint8_t *)a->own_bits_ptr + (a->own_bits_ptr ? at_row * a->bits_stride : 0);
    for (int64_t i = 0; i < n; i++) {
        double z = o->z[i], before = o->before[i], reach = before;
        double to_lower = fabs(z - lower_clip), to_upper = fabs(z - upper_clip);
        if (a->ROUNDED) reach += power(fabs(z) + before, number[IO_LEAST]) * number[IO_HALF];
        int bit = z > lower_clip && z < upper_clip, tie = to_lower == 0 || to_upper == 0;
        int exact = before == 0; /* a tie without any error is a tie in every correct kernel */
        int doubt = (!(to_lower > reach) && !(exact && to_lower == 0)) || (!(to_upper > reach) && !(exact && to_upper == 0));
        doubt = doubt && reach != 0;
        if (!bounded) doubt = !(spoilt && z != z); /* a NaN by x is not between the limits, whatever else there is */
        bits[i] = (uint8_t)bit;
        ties[i] = (uint8_t)tie;
        doubts[i] = (uint8_t)(doubt || tie);
        if (!a->own_bits_ptr) continue;
        int64_t column = start + i;
        int got = a->PACKED ? (own[column / 8] >> (column % 8)) & 1 : own[column] != 0;
        counts[0] += !doubt && got != bit;
        counts[1] += doubt;
        counts[2] += !doubt && !bit;
    }
}

INLINE void forward(const struct forward_kernel *a, double *work) {
    const double *number = (const double *)a->numbers_ptr;
    const double u = number[U], eta = number[ETA], eps = number[EPS], n = (double)a->N;
    const int64_t M = a->M, N = a->N;
    int64_t *found = (int64_t *)a->found_ptr;
    double *x = work, *g = work + N, *bias = a->bias_ptr ? work + 2 * N : 0;
    double *rows = (double *)a->rows_ptr;
    check means = {0}, rstds = {0}, own = {0}, whole = {0};
    int64_t counts[3] = {0, 0, 0};
    widen(g, a->weight_ptr, a->weight_type, 0, N);
    for (int64_t i = 0; i < N; i++) g[i] += (double)a->weight_offset;
    if (bias) widen(bias, a->bias_ptr, a->bias_type, 0, N);
    for (int64_t m = 0; m < M; m++) {
        double sums[LANES] = {0}, sizes[LANES] = {0}, absolute[LANES], mean = 0, dm = 0, var, dv, size;
        widen(x, a->x_ptr, a->x_type, m * a->x_stride, N);
        int64_t even = N / LANES * LANES;
        for (int64_t i = 0; i < even; i += LANES)
            for (int l = 0; l < LANES; l++) {
                sums[l] += a->CENTERED ? x[i + l] : x[i + l] * x[i + l];
                sizes[l] += fabs(x[i + l]);
            }
        for (int64_t i = even; i < N; i++) {
            sums[i - even] += a->CENTERED ? x[i] : x[i] * x[i];
            sizes[i - even] += fabs(x[i]);
        }
        memcpy(absolute, sizes, sizeof sizes);
        if (a->CENTERED) {
            mean = of_lanes(sums) / n;
            size = of_lanes(sizes) / n;
            memset(sums, 0, sizeof sums);
            memset(sizes, 0, sizeof sizes);
            for (int64_t i = 0; i < even; i += LANES)
                for (int l = 0; l < LANES; l++) {
                    double xc = x[i + l] - mean;
                    sums[l] += xc;
                    sizes[l] += xc * xc;
                }
            for (int64_t i = even; i < N; i++) {
                double xc = x[i] - mean;
                sums[i - even] += xc;
                sizes[i - even] += xc * xc;
            }
            double shift = of_lanes(sums) / n;
            mean += shift;
            var = larger(of_lanes(sizes) / n - shift * shift, 0.0);
            dm = size * number[GAM_MEAN] + number[MEAN_ETA];
            dv = (var + dm * dm) * number[GAM_VAR] + dm * dm + 3 * eta;
            if (a->ANY_VARIANCE) dv += sqrt(var) * sqrt(mean * mean + var) * number[C_VAR];
            size = larger(size, var);
        } else {
            var = of_lanes(sums) / n;
            dv = var * number[GAM_VAR] + 3 * eta;
            size = var;
        }
        const int bounded = size <= number[LIMIT]; /* its sums cannot overflow; NaN is none */
        const int spoilt = !(of_lanes(absolute) < INFINITY); /* by a NaN or an infinity in x */
        double q = var + eps, r = 1 / sqrt(q), dq = (q + dv) * u + dv + u * eps, rs = number[RS];
        double upper = sqrt(q / larger(q - dq, eps * (1 - 2 * u))) * (1 + rs) - 1;
        double lower = 1 - sqrt(q / (q + dq)) * (1 - rs);
        double al = larger(upper, lower), d = r * dm;
        float saved_mean = (float)mean, saved_rstd = (float)r;
        double kept[8] = {mean, r, al, d, saved_mean, saved_rstd, 0, fabs(mean - saved_mean) * saved_rstd};
        if (!bounded) kept[2] = kept[6] = INFINITY; /* so that the gradients know */
        for (int i = 0; i < 8; i++) rows[i * M + m] = kept[i];
        ((float *)a->rstd_ptr)[m] = saved_rstd;
        if (a->CENTERED) ((float *)a->mean_ptr)[m] = saved_mean;
        double own_mean = mean, own_rstd = r;
        if (a->own_mean_ptr) {
            widen(&own_mean, a->own_mean_ptr, a->own_mean_type, m, 1);
            compare_one(&means, own_mean, mean, bounded ? dm : INFINITY, dm, number[LEAST_32]);
        }
        if (a->own_rstd_ptr) {
            widen(&own_rstd, a->own_rstd_ptr, a->own_rstd_type, m, 1);
            compare_one(&rstds, own_rstd, r, bounded ? r * upper + eta : INFINITY, r * lower + eta, number[LEAST_32]);
        }
        row ends = row_of(number, mean, r, al, d, (int)a->CAST);
        row by_own = row_of(number, own_mean, own_rstd, number[AL_LANES],
                            fabs(own_mean) * own_rstd * number[AL_SAVED], (int)a->CAST);
        for (int64_t start = 0; start < N; start += TILE) {
            int64_t count = N - start < TILE ? N - start : TILE;
            const double *at_bias = bias ? bias + start : 0;
            outputs o;
            tile got;
            widen(got, a->y_ptr, a->y_type, m * a->y_stride + start, count);
            if (!bounded) {
                own.unbounded += count;
                whole.unbounded += count;
            } else if (a->OWN) {
                outputs_of(&o, a, number, by_own, x + start, g + start, at_bias, count);
                compare(&own, got, o.y, o.upper, o.lower, number[Y_LEAST], count);
            }
            if (!bounded && !a->CLAMPED) continue;
            outputs_of(&o, a, number, ends, x + start, g + start, at_bias, count);
            if (bounded) compare(&whole, got, o.y, o.upper, o.lower, number[Y_LEAST], count);
            if (a->CLAMPED) judge_bits(a, number, &o, m, start, count, bounded, spoilt, counts);
        }
    }
    note(found, Y_CHECK, &whole);
    if (a->OWN) note(found, OWN_CHECK, &own);
    if (a->own_mean_ptr) note(found, MEAN_CHECK, &means);
    if (a->own_rstd_ptr) note(found, RSTD_CHECK, &rstds);
    found[WRONG_BITS] += counts[0];
    found[DOUBTFUL_BITS] += counts[1];
    found[ZERO_BITS] += counts[2];
}

/* gradients */

/* dy as the backward takes it, times its bit, and its size where the bit is in doubt; NaN stays NaN */
INLINE void load_dy(double *restrict dy, double *restrict doubt, int64_t dy_ptr, int64_t dy_type, int64_t first,
                    int64_t column, int64_t bits_ptr, int64_t doubt_ptr, int64_t place, int64_t count) {
    widen_dy(dy, dy_ptr, dy_type, first, column, count);
    if (doubt_ptr) {
        const uint8_t *in_doubt = (const uint8_t *)doubt_ptr + place;
        for (int64_t i = 0; i < count; i++) doubt[i] = fabs(dy[i] * in_doubt[i]);
    }
    if (bits_ptr) {
        const uint8_t *bits = (const uint8_t *)bits_ptr + place;
        for (int64_t i = 0; i < count; i++) dy[i] *= bits[i];
    }
}

typedef struct {
    tile x, xh, wd, off; /* off: how far dy * g may be moved by a bit in doubt, or by a rounding to the io dtype */
} terms;

INLINE void terms_of(terms *restrict t, const struct dx_kernel *a, const double *number, const double *g, int64_t m,
                     double mean, double r, int64_t start, int64_t n) {
    const double u = number[U], eta = number[ETA], grow = number[GROW];
    const double least = number[IO_LEAST], half = number[DX_HALF];
    const int flush = (int)a->FLUSH;
    tile dy, doubt;
    widen(t->x, a->x_ptr, a->x_type, m * a->x_stride + start, n);
    load_dy(dy, doubt, a->dy_ptr, a->dy_type, m * a->dy_stride + start * a->dy_column, a->dy_column, a->bits_ptr,
            a->doubt_ptr, m * a->N + start, n);
    for (int64_t i = 0; i < n; i++) {
        t->xh[i] = (t->x[i] - mean) * r;
        t->wd[i] = dy[i] * g[start + i];
    }
    if (a->IO_ROUNDED)
        for (int64_t i = 0; i < n; i++) t->off[i] = store(fabs(t->wd[i]) * (1 + u) + eta, least, half, flush) * grow;
    else if (a->doubt_ptr)
        for (int64_t i = 0; i < n; i++) t->off[i] = doubt[i] * grow * fabs(g[start + i]);
    else if (a->weight_offset) { /* dy may be added to its product with the weight */
        const double offset = (double)a->weight_offset, unit = number[ALONE] * grow;
        for (int64_t i = 0; i < n; i++)
            t->off[i] = g[start + i] != 0 ? fabs(dy[i]) * fabs(g[start + i] - offset) * unit : 0.0;
    }
}

INLINE void dx(const struct dx_kernel *a, double *g) {
    const double *number = (const double *)a->numbers_ptr, *rows = (const double *)a->rows_ptr;
    const double u = number[U], eta = number[ETA], least = number[IO_LEAST], half = number[DX_HALF], k_dx = number[K_DX];
    const int64_t M = a->M, N = a->N;
    const double n = (double)N;
    const int may_move = a->IO_ROUNDED || a->doubt_ptr || a->weight_offset;
    check whole = {0};
    widen(g, a->weight_ptr, a->weight_type, 0, N);
    for (int64_t i = 0; i < N; i++) g[i] += (double)a->weight_offset;
    for (int64_t m = 0; m < M; m++) {
        const double mean = rows[m], r = rows[M + m], al = rows[2 * M + m], d = rows[3 * M + m];
        if (!(al < INFINITY)) { /* the row has no bounds */
            whole.unbounded += N;
            continue;
        }
        enum { C1, C2, C1_SIZE, WD_SIZE, RAW_SIZE, C1_MOVED, C2_MOVED, SUMS };
        double lanes[SUMS][LANES] = {{0}}, s[SUMS];
        terms t;
        for (int64_t start = 0; start < N; start += TILE) {
            int64_t count = N - start < TILE ? N - start : TILE;
            tile of[SUMS];
            if (count < TILE) memset(of, 0, sizeof of);
            terms_of(&t, a, number, g, m, mean, r, start, count);
            for (int64_t i = 0; i < count; i++) {
                of[C1][i] = t.xh[i] * t.wd[i];
                of[C2][i] = t.wd[i];
                of[C1_SIZE][i] = fabs(of[C1][i]);
                of[WD_SIZE][i] = fabs(t.wd[i]);
            }
            for (int i = C1; i <= WD_SIZE; i++) add(lanes[i], of[i]);
            if (a->RAW) {
                for (int64_t i = 0; i < count; i++) of[RAW_SIZE][i] = fabs(t.wd[i] * t.x[i]);
                add(lanes[RAW_SIZE], of[RAW_SIZE]);
            }
            if (may_move) {
                for (int64_t i = 0; i < count; i++) {
                    of[C1_MOVED][i] = fabs(t.xh[i]) * t.off[i];
                    of[C2_MOVED][i] = t.off[i];
                }
                add(lanes[C1_MOVED], of[C1_MOVED]);
                add(lanes[C2_MOVED], of[C2_MOVED]);
            }
        }
        for (int i = 0; i < SUMS; i++) s[i] = of_lanes(lanes[i]) / n;
        const double c1 = s[C1], c2 = a->CENTERED ? s[C2] : 0.0, wd_mean = s[WD_SIZE];
        const double k2 = (1 + al) * (1 + al), ra = (1 + al) * r, flushed = eta * (1 + ra);
        const double c1_abs = fabs(c1), c2_abs = fabs(c2);
        double dc1 = (1 + al) * (s[C1_SIZE] + d * wd_mean) * number[GAM_C1] + wd_mean * flushed;
        dc1 += ((1 + al) * (number[MEAN_XH] + d)) * eta + 3 * eta;
        const double c1_most = c1_abs * k2 + k2 * d * c2_abs;
        double per_row = k_dx * c2_abs + c1_most * flushed + 5 * eta;
        if (a->CENTERED) per_row += (wd_mean * number[GAM_C2] + 3 * eta) * (1 + 8 * u);
        double per_xa = (dc1 * (1 + 8 * u) + k_dx * c1_most) * ra;
        double per_xh = ra * ((k2 - 1) * c1_abs + k2 * d * c2_abs), per_x = 0;
        const double per_wd = k_dx * ra;
        per_row = per_row * ra + eta + ra * k2 * d * (c1_abs + d * c2_abs);
        if (a->RAW) {
            double lost = ra * ra * (s[RAW_SIZE] + fabs(mean) * wd_mean) * number[GAM_RAW];
            per_x = lost * ra * (8 * u) + ra * ra * c1_most * (4 * u);
            per_xh += lost * (ra / r);
            per_row += fabs(mean) * per_x;
        }
        if (may_move) {
            per_xa += (1 + al) * (s[C1_MOVED] + d * s[C2_MOVED]) * ra;
            if (a->CENTERED) per_row += s[C2_MOVED] * ra;
        }
        per_xh += per_xa * (1 + al);
        per_row += per_xa * (1 + al) * d;
        for (int64_t start = 0; start < N; start += TILE) {
            int64_t count = N - start < TILE ? N - start : TILE;
            tile got, expected, bound;
            if (N > TILE) terms_of(&t, a, number, g, m, mean, r, start, count); /* else they are there */
            widen(got, a->dx_ptr, a->dx_type, m * a->dx_stride + start, count);
            for (int64_t i = 0; i < count; i++) {
                expected[i] = (t.wd[i] - (t.xh[i] * c1 + c2)) * r;
                bound[i] = fabs(t.xh[i]) * per_xh + (fabs(t.wd[i]) * per_wd + per_row) + fabs(expected[i]) * al;
            }
            if (a->RAW)
                for (int64_t i = 0; i < count; i++) bound[i] += fabs(t.x[i]) * per_x;
            if (may_move)
                for (int64_t i = 0; i < count; i++) bound[i] += t.off[i] * ra;
            if (a->STORED) {
                const int flush = (int)a->FLUSH;
                for (int64_t i = 0; i < count; i++)
                    bound[i] += store(fabs(expected[i]) + bound[i], least, half, flush);
            }
            compare(&whole, got, expected, bound, bound, least, count);
        }
    }
    note((int64_t *)a->found_ptr, DX_CHECK, &whole);
}

/* a summand of dw, and how far it may be off by a bit in doubt, or by roundings to the io dtype; added to both sums */
INLINE void add_dw(const struct sums_kernel *a, const double *number, double *restrict dw, double *restrict dw_doubt,
                   const double *restrict xh, const double *restrict xa, const double *restrict dy,
                   const double *restrict doubt, double al, double r, int64_t n) {
    const double grow = number[GROW], eta = number[ETA], least = number[IO_LEAST], half = number[IO_HALF];
    const double dw_half = number[DW_IO_HALF];
    const int flush = (int)a->FLUSH;
    if (a->IO_ROUNDED) {
        double per_xh, per_row;
        off_before_cast(number, al, r, &per_xh, &per_row);
        for (int64_t i = 0; i < n; i++) {
            double e = fabs(xh[i]) * per_xh + per_row, size = fabs(dy[i]);
            double value = to_io(xh[i], least, half);
            double low = to_io(xh[i] - e, least, half), high = to_io(xh[i] + e, least, half);
            double off = store(size * larger(-low, high) + eta, least, dw_half, flush);
            off += size * larger(high - value, value - low);
            dw[i] += dy[i] * value;
            dw_doubt[i] += off * grow + size * fabs(value - xh[i]) * (grow - 1);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) dw[i] += dy[i] * xh[i];
    if (a->doubt_ptr)
        for (int64_t i = 0; i < n; i++) dw_doubt[i] += doubt[i] * grow * xa[i];
}

INLINE void sums(const struct sums_kernel *a) {
    const double *number = (const double *)a->numbers_ptr, *rows = (const double *)a->rows_ptr;
    const double u = number[U], eta = number[ETA], grow = number[GROW];
    const int64_t M = a->M, N = a->N, each = (a->BOTH ? BOTH_SUMS : WHOLE_SUMS) * N;
    int64_t groups = (M + a->group_rows - 1) / a->group_rows;
    memset((double *)a->sums_ptr, 0, groups * each * sizeof(double));
    for (int64_t m = 0; m < M; m++) {
        double *to = (double *)a->sums_ptr + m / a->group_rows * each;
        const double mean = rows[m], r = rows[M + m], al = rows[2 * M + m], d = rows[3 * M + m];
        const double saved_mean = rows[4 * M + m], saved_r = rows[5 * M + m];
        const double flushed = eta * (1 + (1 + al) * r), per_x = (1 + al) * r * (4 * u);
        const double beside = (1 + al) * d + flushed, saved_d = rows[7 * M + m];
        const double saved_beside = saved_d + eta * (1 + saved_r);
        for (int64_t start = 0; start < N; start += TILE) {
            int64_t n = N - start < TILE ? N - start : TILE;
            tile x, dy, doubt, xh, xa;
            double *dw = to + DW * N + start, *db = to + DB * N + start, *dy_xhat = to + DY_XHAT * N + start;
            double *dy_size = to + DY_SIZE * N + start, *dy_shift = to + DY_SHIFT * N + start;
            double *dw_doubt = to + DW_DOUBT * N + start, *db_doubt = to + DB_DOUBT * N + start;
            widen(x, a->x_ptr, a->x_type, m * a->x_stride + start, n);
            load_dy(dy, doubt, a->dy_ptr, a->dy_type, m * a->dy_stride + start * a->dy_column, a->dy_column,
                    a->bits_ptr, a->doubt_ptr, m * N + start, n);
            for (int64_t i = 0; i < n; i++) {
                double size = fabs(dy[i]);
                xh[i] = (x[i] - mean) * r;
                xa[i] = fabs(xh[i]) * (1 + al) + d * (1 + al);
                db[i] += dy[i];
                dy_size[i] += size;
                dy_xhat[i] += size * xa[i];
                dy_shift[i] += size * (fabs(xh[i]) * al + beside); /* no number if the row has no bounds */
            }
            if (a->RAW)
                for (int64_t i = 0; i < n; i++) dy_shift[i] += fabs(dy[i]) * ((fabs(x[i]) + fabs(mean)) * per_x);
            if (a->doubt_ptr)
                for (int64_t i = 0; i < n; i++) db_doubt[i] += doubt[i] * grow;
            add_dw(a, number, dw, dw_doubt, xh, xa, dy, doubt, al, r, n);
            if (!a->BOTH) continue;
            double *given = to + WHOLE_SUMS * N + start;
            for (int64_t i = 0; i < n; i++) {
                xh[i] = (x[i] - saved_mean) * saved_r;
                xa[i] = fabs(xh[i]) + saved_d;
                given[N + i] += al < INFINITY ? fabs(dy[i]) * xa[i] : INFINITY;
                given[2 * N + i] += fabs(dy[i]) * saved_beside;
            }
            if (a->RAW)
                for (int64_t i = 0; i < n; i++)
                    given[2 * N + i] += fabs(dy[i]) * ((fabs(x[i]) + fabs(saved_mean)) * (saved_r * (4 * u)));
            add_dw(a, number, given, given + 3 * N, xh, xa, dy, doubt, 0.0, saved_r, n);
        }
    }
}

INLINE double sum_of(const struct dw_db_kernel *a, int which, int64_t column) {
    const double *at = (const double *)a->sums_ptr + which * a->N + column;
    double total = 0;
    for (int64_t group = 0; group < a->groups; group++) total += at[group * (a->BOTH ? BOTH_SUMS : WHOLE_SUMS) * a->N];
    return total;
}

INLINE void judge_sum(check *c, const struct dw_db_kernel *a, const double *number, int64_t actual, int64_t type,
                      int64_t column, double value, double off, double half) {
    double got, bound = off;
    widen(&got, actual, type, column, 1);
    if (a->STORED) bound += store(fabs(value) + off, number[W_LEAST], half, (int)a->FLUSH);
    bound = with_room(bound);
    compare_one(c, got, value, bound, bound, number[W_LEAST]);
}

INLINE void dw_db(const struct dw_db_kernel *a) {
    const double *number = (const double *)a->numbers_ptr;
    int64_t *found = (int64_t *)a->found_ptr;
    check dw = {0}, db = {0};
    for (int64_t i = 0; i < a->N; i++) {
        if (a->dw_ptr) {
            int given = (int)a->GIVEN, size = given ? WHOLE_SUMS + 1 : DY_XHAT, shift = given ? WHOLE_SUMS + 2 : DY_SHIFT;
            double off = sum_of(a, size, i) * number[GAM_DW] + sum_of(a, shift, i) + number[ROWS_ETA];
            off += sum_of(a, given ? WHOLE_SUMS + 3 : DW_DOUBT, i);
            judge_sum(&dw, a, number, a->dw_ptr, a->dw_type, i, sum_of(a, given ? WHOLE_SUMS : DW, i), off,
                      number[DW_HALF]);
        }
        if (a->db_ptr) {
            double off = sum_of(a, DY_SIZE, i) * number[GAM_DB] + number[ROWS_ETA] + sum_of(a, DB_DOUBT, i);
            judge_sum(&db, a, number, a->db_ptr, a->db_type, i, sum_of(a, DB, i), off, number[DB_HALF]);
        }
    }
    if (a->dw_ptr) note(found, DW_CHECK, &dw);
    if (a->db_ptr) note(found, DB_CHECK, &db);
}

/* the entries: 0, or 1 if there is no memory */

int forward_kernel(const struct forward_kernel *a) {
    double *work = malloc(3 * a->N * sizeof(double));
    if (!work) return 1;
    forward(a, work);
    free(work);
    return 0;
}

int dx_kernel(const struct dx_kernel *a) {
    double *g = malloc(a->N * sizeof(double));
    if (!g) return 1;
    dx(a, g);
    free(g);
    return 0;
}

int sums_kernel(const struct sums_kernel *a) {
    sums(a);
    return 0;
}

int dw_db_kernel(const struct dw_db_kernel *a) {
    dw_db(a);
    return 0;
}
