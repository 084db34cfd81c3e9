// Attention of new tokens over a paged cache: one thread for each token and query head, which reads K and V through the
// block table. HEADS, KV_HEADS, HEAD_DIM and BLOCK_TOKENS are given to the compiler. Written to be read; fast kernels
// share loads between threads.
extern "C" __global__ void paged_attention(
    double* out,                 // [tokens, HEADS, HEAD_DIM]
    const double* queries,       // [tokens, HEADS, HEAD_DIM]
    const double* keys,          // [blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM], one layer of the pool
    const double* values,        // likewise
    const int* table,            // [sequences, columns] block ids
    const int columns,
    const long long* owner,      // [tokens] the row of the table
    const long long* positions,  // [tokens]
    const int tokens
) {
    const int which = blockIdx.x * blockDim.x + threadIdx.x;
    const int token = which / HEADS, head = which % HEADS;
    if (token >= tokens) return;
    const int* blocks = table + owner[token] * columns;
    const double* query = queries + (long long)which * HEAD_DIM;
    // The softmax of what came so far: the largest score, the sum of weights relative to it, and the values by these
    // weights.
    double most = -1e300, sum = 0, mixed[HEAD_DIM] = {};
    for (int at = 0; at <= positions[token]; ++at) {
        const long long slot = (long long)blocks[at / BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS;
        const long long place = (slot * KV_HEADS + head / (HEADS / KV_HEADS)) * HEAD_DIM;
        double score = 0;
        for (int d = 0; d < HEAD_DIM; ++d) score += query[d] * keys[place + d];
        score /= sqrt((double)HEAD_DIM);
        const double top = fmax(most, score), before = exp(most - top), weight = exp(score - top);
        sum = sum * before + weight;
        for (int d = 0; d < HEAD_DIM; ++d) mixed[d] = mixed[d] * before + weight * values[place + d];
        most = top;
    }
    for (int d = 0; d < HEAD_DIM; ++d) out[(long long)which * HEAD_DIM + d] = mixed[d] / sum;
}
