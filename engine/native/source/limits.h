/* Measure the machine's limits for benchmarks: memory read speed, and products of L1-cached data.
 */
#ifndef TRIOLET_LIMITS_H
#define TRIOLET_LIMITS_H

#include "product.h"

#define LIMIT_STEPS 128 /* words of the panel: with its rows it stays in the first cache */

/* Seconds for reading `bytes` once, divided among threads. */
static double time_reading(const char *memory, int64_t bytes, int64_t threads) {
    const double began_at = omp_get_wtime();
    float read = 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : read)
    for (int64_t page = 0; page < bytes / 4096; page++) {
        vf sum = v_set(0.0f);
        for (int64_t i = 0; i < 4096; i += VL * 4) {
            _mm_prefetch(memory + page * 4096 + i + AHEAD, _MM_HINT_T0);
            sum = v_add(sum, v_load((const float *)(memory + page * 4096 + i)));
        }
        read += v_sum(sum);
    }
    /* Store the sum, so that the compiler does not remove the loop. */
    return omp_get_wtime() - began_at + (read == 1.0f ? 1e-12 : 0.0);
}

/* Seconds per thread for `rounds` products of MR rows with a panel. */
static double time_products(int64_t is_bf16, int64_t rounds, int64_t threads) {
    const double began_at = omp_get_wtime();
#pragma omp parallel num_threads(threads)
    {
        float panel[LIMIT_STEPS * PANEL], rows[MR * LIMIT_STEPS], sums[MR * PANEL];
        memset(panel, 0, sizeof panel);
        memset(rows, 0, sizeof rows);
        memset(sums, 0, sizeof sums);
        for (int64_t round = 0; round < rounds; round++)
            (is_bf16 ? multiply_add_bf16 : multiply_add_f32)(
                MR, (const char *)rows, LIMIT_STEPS * 4, (const char *)panel, LIMIT_STEPS,
                (const char *)panel, sums, PANEL);
    }
    return omp_get_wtime() - began_at;
}

/* Operations of one such product: a multiplication and an addition per number. */
static int64_t product_operations(int64_t is_bf16) {
    return (int64_t)2 * MR * PANEL * LIMIT_STEPS * (is_bf16 ? 2 : 1);
}

#endif
