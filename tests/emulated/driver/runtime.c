// The documented runtime functions that CuPy calls, over the driver's. What is missing here is made to say so when it
// is called.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define CALL(call) return noted((cudaError_t)(call))
#define READY                               \
    do {                                    \
        cudaError_t status_ = ready();      \
        if (status_) return noted(status_); \
    } while (0)

static __thread cudaError_t last;
static __thread int device;
static __thread bool chosen;

extern const struct {
    int code;
    const char *name, *text;
} emu_errors[];

// Every error stays to be asked for, NotReady too.
static cudaError_t noted(cudaError_t error) {
    if (error) last = error;
    return error;
}

API cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError(void) { return last; }

API const char* cudaGetErrorName(cudaError_t error) {
    for (int i = 0; emu_errors[i].name; ++i) {
        if (emu_errors[i].code == (int)error) return emu_errors[i].name;
    }
    return "cudaErrorUnrecognized";
}
API const char* cudaGetErrorString(cudaError_t error) {
    for (int i = 0; emu_errors[i].name; ++i) {
        if (emu_errors[i].code == (int)error) return emu_errors[i].text;
    }
    return "unrecognized error code";
}

static cudaError_t initialize(void) { return (cudaError_t)cuInit(0); }

// The runtime uses the primary context, and makes that of the thread's device current with the first call that needs
// one.
static cudaError_t use_primary(int number) {
    static bool retained[64];
    static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
    CUcontext context;
    unsigned flags;
    int active;
    pthread_mutex_lock(&guard);
    CUresult result = cuDevicePrimaryCtxGetState(number, &flags, &active);
    if (!result) result = cuDevicePrimaryCtxRetain(&context, number);
    if (!result && active && retained[number]) cuDevicePrimaryCtxRelease(number);
    if (!result) retained[number] = true;
    pthread_mutex_unlock(&guard);
    return (cudaError_t)(result ? result : cuCtxSetCurrent(context));
}

static cudaError_t ready(void) {
    CUcontext context;
    cudaError_t status = initialize();
    if (status || (status = (cudaError_t)cuCtxGetCurrent(&context))) return status;
    return context ? cudaSuccess : use_primary(device);
}

// -- devices ---------------------------------------------------------------------------------------

API cudaError_t cudaDriverGetVersion(int* version) { CALL(cuDriverGetVersion(version)); }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaGetDeviceCount(int* count) {
    cudaError_t status = initialize();
    CALL(status ? (CUresult)status : cuDeviceGetCount(count));
}
API cudaError_t cudaGetDevice(int* number) {
    CUcontext context = NULL;
    cudaError_t status = initialize();
    if (status) return noted(status);
    CUdevice found;
    cuCtxGetCurrent(&context);
    if (context && !cuCtxGetDevice(&found)) return *number = found, cudaSuccess;
    return *number = device, cudaSuccess;
}

// "cudaSetDevice ... initializes the primary context" since CUDA 12.
API cudaError_t cudaSetDevice(int number) {
    int count;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status) return status;
    if (number < 0 || number >= count) return noted(cudaErrorInvalidDevice);
    if ((status = use_primary(number))) return noted(status);
    device = number, chosen = true;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int number) {
    cudaError_t status = initialize();
    CALL(status ? (CUresult)status : cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, number));
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int number) {
    CALL(cuDeviceGetPCIBusId(text, bytes, number));
}
API cudaError_t cudaDeviceGetByPCIBusId(int* number, const char* text) { CALL(cuDeviceGetByPCIBusId(number, text)); }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int number, int peer) {
    CALL(cuDeviceCanAccessPeer(can, number, peer));
}
API cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit limit) { CALL(cuCtxGetLimit(value, (CUlimit)limit)); }

static CUcontext primary(int number) {
    CUcontext context = NULL;
    if (!cuDevicePrimaryCtxRetain(&context, number)) cuDevicePrimaryCtxRelease(number);
    return context;
}
API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    READY;
    CALL(use_primary(device) ? CUDA_ERROR_INVALID_DEVICE : cuCtxEnablePeerAccess(primary(peer), flags));
}
API cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    READY;
    CALL(cuCtxDisablePeerAccess(primary(peer)));
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* found, int number) {
    size_t total;
    CUuuid uuid;
    cudaError_t status = initialize();
    if (status) return noted(status);
    memset(found, 0, sizeof *found);
    if ((status = (cudaError_t)cuDeviceGetName(found->name, sizeof found->name, number)))
        return noted(cudaErrorInvalidDevice);
    cuDeviceTotalMem(&total, number), found->totalGlobalMem = total;
    cuDeviceGetUuid(&uuid, number), memcpy(&found->uuid, &uuid, sizeof uuid);
    struct {
        int* to;
        CUdevice_attribute from;
    } numbers[] = {
        {&found->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        {&found->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
        {&found->multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {&found->warpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
        {&found->maxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
        {&found->maxThreadsPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
        {&found->maxThreadsDim[0], CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X},
        {&found->maxThreadsDim[1], CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y},
        {&found->maxThreadsDim[2], CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z},
        {&found->maxGridSize[0], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X},
        {&found->maxGridSize[1], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y},
        {&found->maxGridSize[2], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z},
        {&found->regsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
        {&found->regsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
        {&found->pciBusID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
        {&found->unifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
        {&found->canMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY},
        {&found->canUseHostPointerForRegisteredMem, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
        {&found->asyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
        {&found->concurrentKernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i)
        cuDeviceGetAttribute(numbers[i].to, numbers[i].from, number);
    found->sharedMemPerBlock = found->sharedMemPerBlockOptin = 48 << 10, found->sharedMemPerMultiprocessor = 96 << 10;
    found->totalConstMem = 64 << 10;
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void) {
    READY;
    CALL(cuCtxSynchronize());
}

// -- memory ----------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** address, size_t bytes) {
    READY;
    if (!bytes) return *address = NULL, cudaSuccess;
    CALL(cuMemAlloc((CUdeviceptr*)address, bytes));
}
API cudaError_t cudaFree(void* address) {
    READY;
    CALL(cuMemFree((CUdeviceptr)address));
}
API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned flags) {
    READY;
    if (!bytes) return *address = NULL, cudaSuccess;
    CALL(cuMemHostAlloc(address, bytes, flags));
}
API cudaError_t cudaFreeHost(void* address) {
    READY;
    CALL(address ? cuMemFreeHost(address) : CUDA_SUCCESS);
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
    READY;
    CALL(cuMemHostRegister(address, bytes, flags));
}
API cudaError_t cudaHostUnregister(void* address) {
    READY;
    CALL(cuMemHostUnregister(address));
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    READY;
    CALL(cuMemGetInfo(free, total));
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
    READY;
    CALL(cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, bytes));
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
    READY;
    CALL(cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, stream));
}
API cudaError_t cudaMemcpyPeer(void* to, int a, const void* from, int b, size_t bytes) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    READY;
    CALL(cuMemsetD8((CUdeviceptr)to, (unsigned char)value, bytes));
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    READY;
    CALL(cuMemsetD8Async((CUdeviceptr)to, (unsigned char)value, bytes, stream));
}

// Unknown memory is no error.
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* address) {
    READY;
    unsigned type = 0;
    int number = -2;
    CUdeviceptr on_device = 0;
    void* on_host = NULL;
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                   CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    CUresult result =
        cuPointerGetAttributes(4, asked, (void*[]){&type, &number, &on_device, &on_host}, (CUdeviceptr)address);
    memset(found, 0, sizeof *found);
    found->type = type == CU_MEMORYTYPE_HOST     ? cudaMemoryTypeHost
                  : type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                                                 : cudaMemoryTypeUnregistered;
    found->device = type ? number : -2, found->devicePointer = (void*)on_device;
    found->hostPointer = type ? on_host : (void*)address;
    CALL(result);
}

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
    READY;
    CALL(cuIpcGetMemHandle((CUipcMemHandle*)handle, (CUdeviceptr)address));
}
API cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned flags) {
    READY;
    CUipcMemHandle given;
    memcpy(&given, &handle, sizeof given);
    CALL(cuIpcOpenMemHandle((CUdeviceptr*)address, given, flags));
}
API cudaError_t cudaIpcCloseMemHandle(void* address) {
    READY;
    CALL(cuIpcCloseMemHandle((CUdeviceptr)address));
}

// -- streams and events ----------------------------------------------------------------------------

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    READY;
    CALL(cuStreamCreate(stream, 0));
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    READY;
    CALL(cuStreamCreate(stream, flags));
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    READY;
    CALL(cuStreamCreateWithPriority(stream, flags, priority));
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    READY;
    CALL(cuStreamGetFlags(stream, flags));
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    READY;
    CALL(cuStreamGetPriority(stream, priority));
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    READY;
    CALL(cuStreamDestroy(stream));
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    READY;
    CALL(cuStreamSynchronize(stream));
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    READY;
    CALL(cuStreamQuery(stream));
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    READY;
    CALL(cuStreamWaitEvent(stream, event, flags));
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags) {
    READY;
    CALL(cuStreamAddCallback(stream, (CUstreamCallback)callback, data, flags));
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    READY;
    CALL(cuLaunchHostFunc(stream, function, data));
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    READY;
    CALL(cuEventCreate(event, flags));
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    READY;
    CALL(cuEventDestroy(event));
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    READY;
    CALL(cuEventQuery(event));
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    READY;
    CALL(cuEventRecord(event, stream));
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    READY;
    CALL(cuEventSynchronize(event));
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    READY;
    CALL(cuEventElapsedTime(milliseconds, from, to));
}

// -- capture and graphs ----------------------------------------------------------------------------

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
    CALL(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode*)mode));
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    READY;
    CALL(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    READY;
    CALL(cuStreamEndCapture(stream, graph));
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
    READY;
    CALL(cuStreamIsCapturing(stream, (CUstreamCaptureStatus*)status));
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
    READY;
    CALL(cuGraphInstantiate(made, graph, flags));
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    READY;
    CALL(cuGraphLaunch(graph, stream));
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream) {
    READY;
    CALL(cuGraphUpload(graph, stream));
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { CALL(cuGraphDestroy(graph)); }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { CALL(cuGraphExecDestroy(graph)); }

API cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
API cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
