// The documented functions of cuBLAS that a matrix product of CuPy's calls, as work on a stream of the emulated driver.
#include "emu.h"

typedef struct Blas {
    CUstream stream;
    int math, pointers;
} Blas;

typedef struct Product {
    int transpose_a, transpose_b, m, n, k, lda, ldb, ldc;
    double alpha, beta;
    const void *a, *b;
    void* c;
} Product;

CUresult emu_launch(Twin* twin, void** parameters, CUstream stream);

API int cublasCreate_v2(Blas** handle) { return (*handle = calloc(1, sizeof(Blas))) ? 0 : 3; }
API int cublasDestroy_v2(Blas* handle) { return free(handle), 0; }
API int cublasSetStream_v2(Blas* handle, CUstream stream) { return handle->stream = stream, 0; }
API int cublasGetStream_v2(Blas* handle, CUstream* stream) { return *stream = handle->stream, 0; }
API int cublasSetMathMode(Blas* handle, int mode) { return handle->math = mode, 0; }
API int cublasGetMathMode(Blas* handle, int* mode) { return *mode = handle->math, 0; }
API int cublasSetPointerMode_v2(Blas* handle, int mode) { return handle->pointers = mode, 0; }
API int cublasGetPointerMode_v2(Blas* handle, int* mode) { return *mode = handle->pointers, 0; }
API int cublasGetVersion_v2(Blas* handle, int* version) { return *version = 130000, 0; }

// C = alpha op(A) op(B) + beta C, columns first. A grid of one block.
#define PRODUCT(Number, Sum, name)                                                                             \
    static void name(void** parameters, const unsigned* g, const unsigned* b, unsigned shared, unsigned first, \
                     unsigned count) {                                                                         \
        const Product* p = parameters[0];                                                                      \
        const Number *a = p->a, *other = p->b;                                                                 \
        Number* c = p->c;                                                                                      \
        for (int j = 0; j < p->n; ++j) {                                                                       \
            for (int i = 0; i < p->m; ++i) {                                                                   \
                Sum sum = 0;                                                                                   \
                for (int l = 0; l < p->k; ++l) {                                                               \
                    sum += (Sum)a[p->transpose_a ? l + (size_t)i * p->lda : i + (size_t)l * p->lda] *          \
                           other[p->transpose_b ? j + (size_t)l * p->ldb : l + (size_t)j * p->ldb];            \
                }                                                                                              \
                Number* to = &c[i + (size_t)j * p->ldc];                                                       \
                *to = (Number)((Sum)p->alpha * sum + (p->beta ? (Sum)p->beta * *to : 0));                      \
            }                                                                                                  \
        }                                                                                                      \
    }                                                                                                          \
    static Twin name##_twin = {name, (const size_t[]){sizeof(Product)}, 1};

PRODUCT(double, double, of_doubles)
PRODUCT(float, float, of_floats)
PRODUCT(_Float16, float, of_halves)

static int enqueue_product(Twin* twin, Blas* handle, Product product) {
    if (handle->pointers)
        return fprintf(stderr, "emulated driver: cuBLAS with factors in device memory is not implemented\n"), 15;
    return emu_launch(twin, (void*[]){&product}, handle->stream) ? 13 : 0;
}

API int cublasDgemm_v2(Blas* handle, int ta, int tb, int m, int n, int k, const double* alpha, const double* a, int lda,
                       const double* b, int ldb, const double* beta, double* c, int ldc) {
    return enqueue_product(&of_doubles_twin, handle, (Product){ta, tb, m, n, k, lda, ldb, ldc, *alpha, *beta, a, b, c});
}
API int cublasSgemm_v2(Blas* handle, int ta, int tb, int m, int n, int k, const float* alpha, const float* a, int lda,
                       const float* b, int ldb, const float* beta, float* c, int ldc) {
    return enqueue_product(&of_floats_twin, handle, (Product){ta, tb, m, n, k, lda, ldb, ldc, *alpha, *beta, a, b, c});
}

// Types as in cudaDataType: 0 is float, 1 is double, 2 is half, whose sums are float. All three must be one.
enum { DOUBLE = 1, HALF, SUMS_IN_HALF = 64, PEDANTIC_SUMS_IN_HALF };

API int cublasGemmEx(Blas* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int type_a,
                     int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc,
                     int compute, int algorithm) {
    if (type_a != type_b || type_a != type_c || type_a > HALF) return 15;
    if (compute == SUMS_IN_HALF || compute == PEDANTIC_SUMS_IN_HALF) return 15;
    double by = type_a == DOUBLE ? *(const double*)alpha : *(const float*)alpha,
           plus = type_a == DOUBLE ? *(const double*)beta : *(const float*)beta;
    Twin* twin = type_a == DOUBLE ? &of_doubles_twin : type_a == HALF ? &of_halves_twin : &of_floats_twin;
    return enqueue_product(twin, handle, (Product){ta, tb, m, n, k, lda, ldb, ldc, by, plus, a, b, c});
}
