/* Reference for products with quantised weights, in plain C: straight from the blocks of a GGUF file,
 * one output and one input row at a time. Every build of the kernels must give the same bits as this
 * code, which shares nothing with them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int q[32];        /* as the format counts them */
    int scales[2];    /* of each half; 1 where there is only one scale */
    float scale;
    float minimum;    /* to be added */
} Block;

static float half(const uint8_t *p) {
    const int sign = p[1] >> 7, exponent = p[1] >> 2 & 31, fraction = (p[1] & 3) << 8 | p[0];
    const float size = exponent ? ldexpf((float)(1024 + fraction), exponent - 25)
                                : ldexpf((float)fraction, -24);
    return sign ? -size : size;
}

/* Group `g` of an output; the forms are ggml's numbers. */
static Block read_group(int form, const uint8_t *row, int64_t g) {
    static const int sizes[] = {[2] = 18, [3] = 20, [6] = 22, [7] = 24, [8] = 34, [12] = 144, [13] = 176, [14] = 210};
    const uint8_t *b = row + (form < 12 ? g : g / 8) * sizes[form], *s = b + 4;
    const int n = (int)(g % 8);
    Block to = {.scales = {1, 1}};
    for (int i = 0; i < 32; i++) {
        const int byte = i % 16, is_high = i / 16;
        if (form == 2) to.q[i] = (b[2 + byte] >> 4 * is_high & 15) - 8;
        if (form == 3) to.q[i] = b[4 + byte] >> 4 * is_high & 15;
        if (form == 6 || form == 7) {
            const int first = form == 6 ? 2 : 4;
            to.q[i] = (b[first + 4 + byte] >> 4 * is_high & 15) +
                      16 * (b[first + i / 8] >> i % 8 & 1) - (form == 6 ? 16 : 0);
        }
        if (form == 8) to.q[i] = (int8_t)b[2 + i];
        if (form == 12) to.q[i] = b[16 + n / 2 * 32 + i] >> n % 2 * 4 & 15;
        if (form == 13)
            to.q[i] = (b[48 + n / 2 * 32 + i] >> n % 2 * 4 & 15) + 16 * (b[16 + i] >> n & 1);
        if (form == 14)
            to.q[i] = (b[n / 4 * 64 + n % 2 * 32 + i] >> n % 4 / 2 * 4 & 15) +
                      16 * (b[128 + n / 4 * 32 + i] >> n % 4 * 2 & 3) - 32;
    }
    to.scale = half(form == 14 ? b + 208 : b);
    if (form == 3 || form == 7) to.minimum = half(b + 2);
    if (form == 12 || form == 13) {
        const int scale = n < 4 ? s[n] & 63 : (s[n + 4] & 15) + 16 * (s[n - 4] >> 6);
        const int minimum = n < 4 ? s[n + 4] & 63 : (s[n + 4] >> 4) + 16 * (s[n] >> 6);
        to.minimum = -(half(b + 2) * (float)minimum);
        to.scale *= (float)scale;
    }
    if (form == 14)
        for (int i = 0; i < 2; i++) to.scales[i] = (int8_t)b[192 + 2 * n + i];
    return to;
}

/* output[rows][outputs] = input[rows][inputs] times the weights. */
__attribute__((visibility("default")))
void oracle(int64_t form, const uint8_t *blocks, int64_t row_bytes, int64_t outputs, int64_t inputs,
            const float *input, int64_t rows, float *output) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            float sum = 0.0f;
            for (int64_t g = 0; g < inputs / 32; g++) {
                const float *x = input + r * inputs + g * 32;
                const Block block = read_group((int)form, blocks + o * row_bytes, g);
                float most = 0.0f;
                int whole = 0, all = 0;
                for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[i]));
                for (int i = 0; i < 32 && most >= 1e-30f; i++) {
                    const int rounded = (int)rintf(x[i] * (127.0f / most));
                    whole += block.scales[i / 16] * block.q[i] * rounded;
                    all += rounded;
                }
                const float own = most >= 1e-30f ? most / 127.0f : 0.0f;
                const float scale = block.scale * own;
                if (form == 3 || form == 7 || form == 12 || form == 13)
                    sum += fmaf((float)whole, scale, block.minimum * (own * (float)all));
                else
                    sum = fmaf((float)whole, scale, sum);
            }
            output[r * outputs + o] = sum;
        }
}
