// Copies tokens between a paged KV cache and contiguous staging, all layers and planes in one launch.
//
// The words of a plane are counted as one number with the digits (layer, token, head, word), words fastest, so that
// neighbouring threads touch neighbouring words. A thread advances by constant steps, which come split into digits:
// it adds and carries, and never divides.
#include "copy.cuh"

constexpr int PLANES = 4;
constexpr int BASES = 384;
constexpr int IN_FLIGHT = 4;

struct Digits {
    Int layer, token, head, word;
};

struct Plane {
    Int block_stride, token_stride, head_stride;
    Int staging, staging_layer_stride, staging_token_stride, staging_head_stride;
    Int heads, words;
    Digits next;  // from one word of a thread to its next one in flight
    Digits jump;  // what is left to the thread's first word of the next round
};

// The whole argument: it is copied at the launch, so that nothing of the caller's is read later but the slots.
struct KvCopy {
    Int slots, slot_bytes, slot_end, tokens, tokens_per_block;
    Int layers, planes, gather;
    Plane plane[PLANES];
    Int bases[BASES];  // of layer l in plane p: p * layers + l
};

struct Position {
    unsigned layer, token, head, word;
};

__device__ __forceinline__ void advance(Position& at, const Digits& step, const Plane& plane, unsigned tokens) {
    at.word += (unsigned)step.word;
    at.head += (unsigned)step.head;
    at.token += (unsigned)step.token;
    at.layer += (unsigned)step.layer;
    if (at.word >= (unsigned)plane.words) at.word -= (unsigned)plane.words, ++at.head;
    if (at.head >= (unsigned)plane.heads) at.head -= (unsigned)plane.heads, ++at.token;
    if (at.token >= tokens) at.token -= tokens, ++at.layer;
}

template <class Word> __device__ __forceinline__ void copy_plane(const KvCopy& copy, int p) {
    const Plane& plane = copy.plane[p];
    const unsigned tokens = (unsigned)copy.tokens, layers = (unsigned)copy.layers;
    unsigned first = blockIdx.x * IN_FLIGHT * blockDim.x + threadIdx.x;
    Position at;
    at.word = first % (unsigned)plane.words, first /= (unsigned)plane.words;
    at.head = first % (unsigned)plane.heads, first /= (unsigned)plane.heads;
    at.token = first % tokens, at.layer = first / tokens;
    while (at.layer < layers) {
        Position place[IN_FLIGHT];
        Int slot[IN_FLIGHT], source[IN_FLIGHT], target[IN_FLIGHT];
        Word word[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            place[i] = at;
            slot[i] = -1;
            if (at.layer < layers) {
                const Int address = copy.slots + (Int)at.token * copy.slot_bytes;
                slot[i] = copy.slot_bytes == 8 ? __ldg(reinterpret_cast<const Int*>(address)) : __ldg(reinterpret_cast<const int*>(address));
            }
            advance(at, plane.next, plane, tokens);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            target[i] = 0;
            // Negative slots are skipped, and so are those past the end, which the host could not see.
            if ((unsigned long long)slot[i] < (unsigned long long)copy.slot_end) {
                const unsigned block = (unsigned)slot[i] / (unsigned)copy.tokens_per_block;
                const unsigned token = (unsigned)slot[i] % (unsigned)copy.tokens_per_block;
                const Int inside = (Int)place[i].word * (Int)sizeof(Word);
                const Int paged = copy.bases[p * layers + place[i].layer] + block * plane.block_stride + token * plane.token_stride +
                                  place[i].head * plane.head_stride + inside;
                const Int staging = plane.staging + place[i].layer * plane.staging_layer_stride +
                                    place[i].token * plane.staging_token_stride + place[i].head * plane.staging_head_stride + inside;
                source[i] = copy.gather ? paged : staging;
                target[i] = copy.gather ? staging : paged;
                word[i] = load<Word>(source[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (target[i]) store<Word>(target[i], word[i]);
        }
        advance(at, plane.jump, plane, tokens);
    }
}

// Unrolled, so that the strides of a plane are constants at fixed places and cost no loads.
#define KV_COPY(bytes, Word)                                                                                    \
    extern "C" __global__ void __launch_bounds__(512, 2) kv_copy_##bytes(const __grid_constant__ KvCopy copy) { \
        _Pragma("unroll") for (int p = 0; p < PLANES; ++p)                                                      \
            if (p < copy.planes) copy_plane<Word>(copy, p);                                                     \
    }
FOR_EACH_WORD(KV_COPY)
