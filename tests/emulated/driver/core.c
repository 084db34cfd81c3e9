// Initialization, devices, contexts, and what tests read and steer (emu_*).
#include "emu.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
Device devices[DEVICES];
long long counters[COUNTERS];
__thread bool in_host_function;
static bool initialized, forked;
static __thread Context* contexts[64];  // the calling thread's stack; the last is current
static __thread int depth;

static size_t number_of(const char* name, size_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

CUresult unsupported(const char* name) {
    fprintf(stderr, "emulated driver: %s is not implemented\n", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}

// "Child processes created by fork cannot use the parent's context."
static void after_fork(void) {
    forked = true;
    pthread_mutex_init(&lock, NULL);
}

// What is known of a function: how often it was called, and what its next calls fail with.
typedef struct Calls {
    char name[64];
    long long count;
    CUresult error;
    int passed, failing;  // so many calls pass, then so many fail; -1: all
} Calls;

static Calls calls[256];

static Calls* calls_of(const char* name) {
    static Calls others;
    for (int i = 0; i < 256; ++i) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) return &calls[i];
    }
    return &others;
}

static CUresult note_call(const char* name) {
    Calls* found = calls_of(name);
    ++found->count;
    if (!found->failing) return CUDA_SUCCESS;
    if (found->passed > 0) return --found->passed, CUDA_SUCCESS;
    if (found->failing > 0) --found->failing;
    return found->error;
}

CUresult enter_as(const char* name) {
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;  // Host functions must make no CUDA calls.
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    nudge();
    CUresult error = note_call(name);
    return error ? leave(error) : CUDA_SUCCESS;
}

Context* current(void) { return depth ? contexts[depth - 1] : NULL; }

CUresult enter_context_as(const char* name, Context** context) {
    CUresult result = enter_as(name);
    if (result) return result;
    *context = current();
    if (!*context) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!(*context)->alive) return leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return (*context)->error ? leave((*context)->error) : CUDA_SUCCESS;
}

CUresult leave(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

// An error of the device ends the context: nothing of it runs any more, and every later call gets the same error.
void fail(Context* context, CUresult error) {
    if (!context->error) {
        context->error = error;
        fprintf(stderr, "emulated driver: GPU %d fails with error %d\n", context->device, error);
    }
    drop_all(context);
}

API CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    if (!initialized) {
        pthread_atfork(NULL, NULL, after_fork);
        for (int i = 0; i < DEVICES; ++i) {
            Device* device = &devices[i];
            device->number = device->primary.device = i;
            device->primary.primary = true;
            device->total = number_of("EMU_MEMORY_BYTES", (size_t)4 << 30);
            device->file = -1;
        }
        initialized = true;
        nudge();
    }
    return leave(CUDA_SUCCESS);
}

API CUresult cuDriverGetVersion(int* version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

// -- devices ---------------------------------------------------------------------------------------

static bool is_device(CUdevice device) { return device >= 0 && device < DEVICES; }

API CUresult cuDeviceGetCount(int* count) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    *count = DEVICES;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, bytes, "Emulated GPU (not a GPU)");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = devices[device].total;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0, sizeof *uuid);
    snprintf(uuid->bytes, sizeof uuid->bytes, "emulated gpu %d", device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (bytes < 13) return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, bytes, "0000:%02X:00.0", 0xE0 + device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
    for (int i = 0; i < DEVICES; ++i) {
        char name[16];
        cuDeviceGetPCIBusId(name, sizeof name, i);
        if (!strcasecmp(name, text)) return *device = i, CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static int changed_attribute = -1, changed_value;  // as a test says

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if ((int)attribute == changed_attribute) return *value = changed_value, CUDA_SUCCESS;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 48 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 96 << 10; break;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 64 << 10; break;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0xE0 + device; break;
        // One address space; pinned memory has the same address everywhere.
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 2; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// Peers reach each other's memory: it is all one main memory.
API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

static bool peers[DEVICES][DEVICES];

API CUresult cuCtxEnablePeerAccess(CUcontext other, unsigned flags) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Context* peer = (Context*)other;
    if (flags || !peer || peer->device == context->device) return leave(CUDA_ERROR_INVALID_VALUE);
    bool* enabled = &peers[context->device][peer->device];
    if (*enabled) return leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    *enabled = true;
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxDisablePeerAccess(CUcontext other) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    bool* enabled = &peers[context->device][((Context*)other)->device];
    if (!*enabled) return leave(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    *enabled = false;
    return leave(CUDA_SUCCESS);
}

// -- contexts --------------------------------------------------------------------------------------

// The arena of a GPU has room for four times its memory, so that what is freed and allocated again leaves no holes that
// matter.
static CUresult make_arena(Device* device) {
    if (device->arena) return CUDA_SUCCESS;
    device->arena_bytes = device->total * 4;
    device->file = memfd_create("emulated-gpu", MFD_CLOEXEC);
    if (device->file < 0 || ftruncate(device->file, device->arena_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    // What is not allocated cannot be touched.
    void* arena = mmap(NULL, device->arena_bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, device->file, 0);
    if (arena == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(arena, device->arena_bytes, MADV_DONTFORK);
    device->arena = arena;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice number) {
    CUresult result = enter();
    if (result) return result;
    if (!is_device(number)) return leave(CUDA_ERROR_INVALID_DEVICE);
    Device* device = &devices[number];
    if ((result = make_arena(device))) return leave(result);
    if (!device->primary.alive) {
        device->primary.alive = true, device->primary.error = CUDA_SUCCESS;
        device->primary.legacy = make_stream(&device->primary, true, 0);
        ++device->made, ++counters[CONTEXTS];
    }
    ++device->primary.retained;
    *context = (CUcontext)&device->primary;
    return leave(CUDA_SUCCESS);
}

static void destroy(Context* context) {
    CUresult ignored = wait_for_context(context);
    (void)ignored;
    drop_all(context);
    free_all(context);
    context->alive = false, context->retained = 0;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice number) {
    CUresult result = enter();
    if (result) return result;
    if (!is_device(number)) return leave(CUDA_ERROR_INVALID_DEVICE);
    Context* context = &devices[number].primary;
    if (!context->alive) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--context->retained <= 0) destroy(context);
    return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxReset(CUdevice number) {
    CUresult result = enter();
    if (result) return result;
    if (!is_device(number)) return leave(CUDA_ERROR_INVALID_DEVICE);
    if (devices[number].primary.alive) destroy(&devices[number].primary);
    return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned* flags, int* active) {
    CUresult result = enter();
    if (result) return result;
    if (!is_device(number)) return leave(CUDA_ERROR_INVALID_DEVICE);
    if (flags) *flags = 0;
    if (active) *active = devices[number].primary.alive;
    return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxSetFlags(CUdevice number, unsigned flags) {
    return is_device(number) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// A context of the caller's own, beside the primary one of the same GPU.
API CUresult cuCtxCreate(CUcontext* made, CUctxCreateParams* parameters, unsigned flags, CUdevice number) {
    CUresult result = enter();
    if (result) return result;
    if (!is_device(number)) return leave(CUDA_ERROR_INVALID_DEVICE);
    if (parameters || depth == 64) return leave(unsupported("cuCtxCreate with parameters"));
    if ((result = make_arena(&devices[number]))) return leave(result);
    Context* context = calloc(1, sizeof *context);
    *context = (Context){.device = number, .alive = true};
    context->legacy = make_stream(context, true, 0);
    ++counters[CONTEXTS];
    *made = (CUcontext)(contexts[depth++] = context);
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxDestroy(CUcontext context) {
    CUresult result = enter();
    if (result) return result;
    if (!context || ((Context*)context)->primary) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (current() == (Context*)context) --depth;
    destroy((Context*)context);
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    *context = (CUcontext)current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!context) {
        if (depth) --depth;
    } else {
        if (!depth) depth = 1;
        contexts[depth - 1] = (Context*)context;
    }
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent(CUcontext context) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!context || depth == 64) return CUDA_ERROR_INVALID_CONTEXT;
    contexts[depth++] = (Context*)context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent(CUcontext* context) {
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    --depth;
    if (context) *context = (CUcontext)contexts[depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
    Context* context = current();
    if (!initialized || forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *device = context->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
    if (!context) return cuCtxGetDevice(device);
    *device = ((Context*)context)->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) { return *version = 13000, CUDA_SUCCESS; }
API CUresult cuCtxGetFlags(unsigned* flags) { return *flags = 0, CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return *value = 1024, CUDA_SUCCESS; }
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void) {
    Context* context;
    CUresult result = enter_context(&context);
    if (!result) result = leave((result = check_context(context)) ? result : wait_for_context(context));
    return result;
}

// -- entry points ----------------------------------------------------------------------------------

extern const char* const emu_names[][2];  // a name, and what <cuda.h> makes of it
extern const struct {
    int code;
    const char *name, *text;
} emu_errors[];

API CUresult cuGetErrorName(CUresult error, const char** text) {
    for (int i = 0; emu_errors[i].name; ++i) {
        if (emu_errors[i].code == (int)error) return *text = emu_errors[i].name, CUDA_SUCCESS;
    }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char** text) {
    for (int i = 0; emu_errors[i].name; ++i) {
        if (emu_errors[i].code == (int)error) return *text = emu_errors[i].text, CUDA_SUCCESS;
    }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

// Functions are asked for by name and version; of two versions that differ here, the one of that CUDA version is given.
API CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult* status) {
    static void* self;
    if (!self) {
        Dl_info info;
        if (dladdr((void*)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    const char* name = symbol;
    for (int i = 0; emu_names[i][0]; ++i) {
        if (!strcmp(emu_names[i][0], symbol)) name = emu_names[i][1];
    }
    if (!strcmp(symbol, "cuMemcpyBatchAsync")) name = version < 13000 ? "cuMemcpyBatchAsync" : "cuMemcpyBatchAsync_v2";
    if (!strcmp(symbol, "cuCtxCreate") && version < 13000) name = "cuCtxCreate_v2";
    if (!strcmp(symbol, "cuCtxGetDevice")) name = version < 13000 ? "cuCtxGetDevice" : "cuCtxGetDevice_v2";
    if (!strcmp(symbol, "cuStreamGetCaptureInfo"))
        name = version < 12030 ? "cuStreamGetCaptureInfo_v2" : "cuStreamGetCaptureInfo_v3";
    // Who asks for it gets functions to which the stream 0 is the calling thread's own: here, launches.
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM && !strcmp(symbol, "cuLaunchKernel"))
        name = "cuLaunchKernel_ptsz";
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM && !strcmp(symbol, "cuLaunchKernelEx"))
        name = "cuLaunchKernelEx_ptsz";
    *function = self ? dlsym(self, name) : NULL;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
API CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

// No undocumented tables: callers are told that there are none.
API CUresult cuGetExportTable(const void** table, const CUuuid* id) {
    *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuProfilerStart(void) { return CUDA_SUCCESS; }
API CUresult cuProfilerStop(void) { return CUDA_SUCCESS; }

// -- for tests -------------------------------------------------------------------------------------

API long long emu_counter(const char* name) {
    static const char* const names[] = {"contexts",    "launches", "copies", "batches",        "registrations",
                                        "allocations", "streams",  "events", "host_functions", "steps",
                                        "pinned",      "unpinned"};
    for (int i = 0; i < COUNTERS; ++i) {
        if (!strcmp(names[i], name)) return counters[i];
    }
    return -1;
}

// How often a function was called, by its name in these sources: the driver's, or `launch`, `record`, `copy_on`, `set`,
// `batch` and `give_back_at` of several functions.
API long long emu_calls(const char* name) { return calls_of(name)->count; }

// Lets `passed` calls of a function through; then the next ones, or all where `failing` is -1, do nothing and fail.
API void emu_fail(const char* name, int error, int passed, int failing) {
    pthread_mutex_lock(&lock);
    Calls* found = calls_of(name);
    found->error = error, found->passed = passed, found->failing = failing;
    pthread_mutex_unlock(&lock);
}

// One attribute of all GPUs has another value; -1: none has.
API void emu_change_attribute(int attribute, int value) { changed_attribute = attribute, changed_value = value; }

API long long emu_launches(int device) { return devices[device].launches; }
API void emu_set_memory(int device, size_t bytes) { devices[device].total = bytes; }
API void emu_set_batch_limit(size_t descriptors) { batch_limit = descriptors; }
