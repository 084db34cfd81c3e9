// What the copy kernels share: loads and stores of one machine word that leave the caches to the model.
// Addresses and distances are 64-bit integers, in bytes.
#pragma once

typedef long long Int;

template <class Word> __device__ __forceinline__ Word load(Int address) {
    return __ldcs(reinterpret_cast<const Word*>(address));
}

template <class Word> __device__ __forceinline__ void store(Int address, Word word) {
    __stcs(reinterpret_cast<Word*>(address), word);
}

// One kernel for each width of a word, in bytes: all addresses, strides and lengths of a launch are multiples of it.
#define FOR_EACH_WORD(kernel) \
    kernel(16, uint4) kernel(8, uint2) kernel(4, unsigned int) kernel(2, unsigned short) kernel(1, unsigned char)
