// Copies tokens between a paged KV cache and contiguous staging, all layers and planes in one launch.
//
// A unit is one word of one token, in all layers of a chunk: a thread loads the token's slot once, splits it once, and
// then walks the layers. The units of a plane are counted as one number with the digits (chunk, token, head, word),
// words fastest, so that neighbouring threads touch neighbouring words. A thread advances by a constant step, which
// comes split into digits: it adds and carries, and never divides. Words in flight may be of several layers or of
// several units, as there are.
#include "copy.cuh"

constexpr int PLANES = 4;
constexpr int BASES = 384;
constexpr int IN_FLIGHT = 4;
constexpr Int LEFT_OUT = -0x7fffffffffffffff;

struct Digits {
    Int chunk, token, head, word;
};

struct Plane {
    Int block_stride, token_stride, head_stride;
    Int staging, staging_layer_stride, staging_token_stride, staging_head_stride;
    Int heads, words, chunk_layers;
    Digits step;  // from one unit of a thread to its next one
};

// The whole argument: it is copied at the launch, so that nothing of the caller's is read later but the slots.
struct KvCopy {
    Int slots, slot_bytes, slot_end, tokens, tokens_per_block;
    Int layers, planes, gather;
    Plane plane[PLANES];
    Int bases[BASES];  // of layer l in plane p: p * layers + l
};

struct Position {
    unsigned chunk, token, head, word;
    unsigned layer;  // of the chunk
};

__device__ __forceinline__ void advance(Position& at, const Plane& plane, unsigned tokens, unsigned layers) {
    const unsigned each = (unsigned)plane.chunk_layers;
    if (++at.layer < each && at.chunk * each + at.layer < layers) return;
    at.layer = 0;
    at.word += (unsigned)plane.step.word;
    at.head += (unsigned)plane.step.head;
    at.token += (unsigned)plane.step.token;
    at.chunk += (unsigned)plane.step.chunk;
    if (at.word >= (unsigned)plane.words) at.word -= (unsigned)plane.words, ++at.head;
    if (at.head >= (unsigned)plane.heads) at.head -= (unsigned)plane.heads, ++at.token;
    if (at.token >= tokens) at.token -= tokens, ++at.chunk;
}

template <class Word> __device__ __forceinline__ void copy_plane(const KvCopy& copy, int p) {
    const Plane& plane = copy.plane[p];
    const unsigned tokens = (unsigned)copy.tokens, layers = (unsigned)copy.layers, each = (unsigned)plane.chunk_layers;
    unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
    Position at;
    at.word = first % (unsigned)plane.words, first /= (unsigned)plane.words;
    at.head = first % (unsigned)plane.heads, first /= (unsigned)plane.heads;
    at.token = first % tokens, at.chunk = first / tokens, at.layer = 0;
    // Of the present unit: its place in a layer of the cache, counted from the layer's base, and in layer 0 of the
    // staging.
    Int paged = LEFT_OUT, staging = 0;
    while (at.chunk * each < layers) {
        Position place[IN_FLIGHT];
        unsigned slot[IN_FLIGHT], high[IN_FLIGHT];  // the words of a slot as they lie in memory; an int32 has one
        Int target[IN_FLIGHT];
        Word word[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            place[i] = at;
            slot[i] = ~0u;
            if (at.layer == 0 && at.chunk * each < layers) {
                const Int address = copy.slots + (Int)at.token * copy.slot_bytes;
                slot[i] = __ldg(reinterpret_cast<const unsigned*>(address));
                if (copy.slot_bytes == 8) high[i] = __ldg(reinterpret_cast<const unsigned*>(address) + 1);
            }
            advance(at, plane, tokens, layers);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (place[i].layer == 0) {
                paged = LEFT_OUT;
                // Negative slots are skipped, and so are those past the end, which the host could not see.
                // An int32 is widened here, behind all loads: widened at its load, it would hold up the next one.
                const unsigned above = copy.slot_bytes == 8 ? high[i] : slot[i] >> 31;
                if (slot[i] < copy.slot_end && above == 0) {
                    const unsigned block = slot[i] / (unsigned)copy.tokens_per_block;
                    const unsigned token = slot[i] % (unsigned)copy.tokens_per_block;
                    const Int inside = (Int)place[i].word * (Int)sizeof(Word);
                    paged = block * plane.block_stride + token * plane.token_stride +
                            place[i].head * plane.head_stride + inside;
                    staging = plane.staging + place[i].token * plane.staging_token_stride +
                              place[i].head * plane.staging_head_stride + inside;
                }
            }
            target[i] = 0;
            if (paged != LEFT_OUT) {
                const unsigned layer = place[i].chunk * each + place[i].layer;
                const Int in_cache = copy.bases[p * layers + layer] + paged;
                const Int in_staging = staging + layer * plane.staging_layer_stride;
                target[i] = copy.gather ? in_staging : in_cache;
                word[i] = load<Word>(copy.gather ? in_cache : in_staging);
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (target[i]) store<Word>(target[i], word[i]);
        }
    }
}

// Unrolled, so that the strides of a plane are constants at fixed places and cost no loads.
#define KV_COPY(bytes, Word)                                                                                    \
    extern "C" __global__ void __launch_bounds__(512, 2) kv_copy_##bytes(const __grid_constant__ KvCopy copy) { \
        _Pragma("unroll") for (int p = 0; p < PLANES; ++p)                                                      \
            if (p < copy.planes) copy_plane<Word>(copy, p);                                                     \
    }
FOR_EACH_WORD(KV_COPY)
