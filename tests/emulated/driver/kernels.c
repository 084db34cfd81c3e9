// Modules and launches. Of a loaded image only the names of its kernels are read; what runs is a twin, built for the
// CPU from the same source. A twin is a library that has a `Twin emu_twin_<name>` for each kernel; which one belongs to
// an image is said before it is loaded.
#include "emu.h"

#include <ctype.h>
#include <dlfcn.h>
#include <elf.h>

typedef struct Function {
    char* name;
    struct Module* module;
    Twin* twin;
    struct Function* next;
} Function;

typedef struct Module {
    bool alive;
    void* twins;
    Function* functions;
    Context* context;
} Module;

static __thread void* next_twins;
static struct {
    char* name;
    Twin* twin;
}* by_name;
static int by_name_count;

// The twins of the next image that this thread loads.
API int emu_next_image(const char* library) {
    next_twins = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!next_twins) fprintf(stderr, "emulated driver: %s\n", dlerror());
    return next_twins != NULL;
}

// A twin that is found by the kernel's name, whatever image it comes in.
API void emu_twin(const char* name, Twin* twin) {
    pthread_mutex_lock(&lock);
    by_name = realloc(by_name, (by_name_count + 1) * sizeof *by_name);
    by_name[by_name_count].name = strdup(name), by_name[by_name_count++].twin = twin;
    pthread_mutex_unlock(&lock);
}

static void add_function(Module* module, const char* name, size_t length) {
    Function* function = calloc(1, sizeof *function);
    function->name = strndup(name, length), function->module = module, function->next = module->functions;
    module->functions = function;
    char symbol[4096];
    snprintf(symbol, sizeof symbol, "emu_twin_%s", function->name);
    if (module->twins) function->twin = dlsym(module->twins, symbol);
    for (int i = 0; i < by_name_count && !function->twin; ++i) {
        if (!strcmp(by_name[i].name, function->name)) function->twin = by_name[i].twin;
    }
}

// Every kernel of a cubin has a section .text.<name>; in PTX it is ".entry <name>".
static void read_names(Module* module, const char* image) {
    if (!memcmp(image, ELFMAG, SELFMAG)) {
        const Elf64_Ehdr* header = (const Elf64_Ehdr*)image;
        const Elf64_Shdr* sections = (const Elf64_Shdr*)(image + header->e_shoff);
        const char* names = image + sections[header->e_shstrndx].sh_offset;
        for (int i = 0; i < header->e_shnum; ++i) {
            const char* name = names + sections[i].sh_name;
            if (!strncmp(name, ".text.", 6)) add_function(module, name + 6, strlen(name + 6));
        }
        return;
    }
    for (const char* at = image; (at = strstr(at, ".entry"));) {
        at += 6;
        while (isspace(*at)) ++at;
        size_t length = strcspn(at, " \t\n(");
        add_function(module, at, length);
    }
}

static CUresult load(Module** found, const void* image) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Module* module = calloc(1, sizeof *module);
    module->alive = true, module->twins = next_twins, module->context = context;
    next_twins = NULL;
    read_names(module, image);
    *found = module;
    return leave(CUDA_SUCCESS);
}

API CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load((Module**)module, image); }
API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned n, CUjit_option* options, void** values) {
    return load((Module**)module, image);
}
API CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option* jit, void** jit_values, unsigned n,
                               CUlibraryOption* options, void** values, unsigned m) {
    return load((Module**)library, image);
}

static CUresult unload(Module* module) {
    if (!module || !module->alive) return CUDA_ERROR_INVALID_HANDLE;
    module->alive = false;
    return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule module) { return unload((Module*)module); }
API CUresult cuLibraryUnload(CUlibrary library) { return unload((Module*)library); }

static CUresult find(Function** found, Module* module, const char* name) {
    if (!module || !module->alive) return CUDA_ERROR_INVALID_HANDLE;
    for (Function* function = module->functions; function; function = function->next) {
        if (!strcmp(function->name, name)) return *found = function, CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return find((Function**)function, (Module*)module, name);
}
API CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    return find((Function**)kernel, (Module*)library, name);
}
API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    return *function = (CUfunction)kernel, CUDA_SUCCESS;
}
API CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
    return *module = (CUmodule)library, CUDA_SUCCESS;
}
API CUresult cuKernelGetName(const char** name, CUkernel kernel) {
    return *name = ((Function*)kernel)->name, CUDA_SUCCESS;
}
API CUresult cuFuncGetName(const char** name, CUfunction function) {
    return *name = ((Function*)function)->name, CUDA_SUCCESS;
}
API CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
    return *library = (CUlibrary)((Function*)kernel)->module, CUDA_SUCCESS;
}
API CUresult cuFuncGetModule(CUmodule* module, CUfunction function) {
    return *module = (CUmodule)((Function*)function)->module, CUDA_SUCCESS;
}
API CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) { return *mode = CU_MODULE_EAGER_LOADING, CUDA_SUCCESS; }
API CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library, const char* name) {
    return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
    return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
    *count = 0;
    for (Function* function = ((Module*)library)->functions; function; function = function->next) ++*count;
    return CUDA_SUCCESS;
}

enum { REGISTERS = 32 };  // of a thread, of any kernel

static CUresult attribute(int* value, CUfunction_attribute which) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? REGISTERS
             : which == CU_FUNC_ATTRIBUTE_PTX_VERSION         ? 80
                                                              : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
    return attribute(value, which);
}
API CUresult cuKernelGetAttribute(int* value, CUfunction_attribute which, CUkernel kernel, CUdevice device) {
    return attribute(value, which);
}
API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
API CUresult cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice device) {
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
API CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
    return *blocks = threads > 0 ? 2048 / threads : 1, CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int threads,
                                                                  size_t shared, unsigned flags) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
API CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* threads, CUfunction function, CUoccupancyB2DSize size,
                                              size_t shared, int limit) {
    return *grid = 8, *threads = 512, CUDA_SUCCESS;
}

void shuffle(Op* op);

// Parameters are copied at the launch. A grid runs some blocks at a time, in any order.
static CUresult launch(Function* function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                       CUstream handle, void** parameters, void** extra) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    if (!function || !function->module->alive || stream->context != context) return leave(CUDA_ERROR_INVALID_HANDLE);
    unsigned threads = block[0] * block[1] * block[2], blocks = grid[0] * grid[1] * grid[2];
    if (!threads || threads > 1024 || !blocks) return leave(CUDA_ERROR_INVALID_VALUE);
    int registers;
    cuDeviceGetAttribute(&registers, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, context->device);
    // "too many threads for the kernel's register count"
    if (threads * REGISTERS > (unsigned)registers) return leave(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    Twin* twin = function->twin;
    if (!twin) {
        fprintf(stderr, "emulated driver: kernel %s has no twin for the CPU\n", function->name);
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    }
    if (extra) return leave(unsupported("cuLaunchKernel with a buffer of parameters"));
    Op* op = new_op(KERNEL);
    size_t bytes = 0;
    for (int i = 0; i < twin->parameters; ++i) bytes += (twin->sizes[i] + 15) / 16 * 16;
    op->twin = twin, op->shared = shared;
    op->record = aligned_alloc(16, bytes + 16), op->parameters = calloc(twin->parameters + 1, sizeof(void*));
    uint8_t* at = op->record;
    for (int i = 0; i < twin->parameters; ++i) {
        op->parameters[i] = memcpy(at, parameters[i], twin->sizes[i]);
        at += (twin->sizes[i] + 15) / 16 * 16;
    }
    memcpy(op->grid, grid, sizeof op->grid), memcpy(op->block, block, sizeof op->block);
    unsigned parts = blocks < 6 ? blocks : 6, first = 0;
    op->pieces = calloc(parts, sizeof(Piece)), op->piece_count = parts;
    for (unsigned i = 0; i < parts; ++i) {
        unsigned count = blocks / parts + (i < blocks % parts);
        op->pieces[i] = (Piece){NULL, (uint8_t*)(uintptr_t)first, count};
        first += count;
    }
    shuffle(op);
    ++counters[LAUNCHES], ++devices[context->device].launches;
    return leave(enqueue(op, stream));
}

API CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, CUstream stream, void** parameters, void** extra) {
    return launch((Function*)function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, parameters,
                  extra);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
    return launch((Function*)function, (unsigned[]){c->gridDimX, c->gridDimY, c->gridDimZ},
                  (unsigned[]){c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, c->hStream, parameters,
                  extra);
}

// Work of a library of ours (its BLAS): a twin that is not in any image.
API CUresult emu_launch(Twin* twin, void** parameters, CUstream stream) {
    static Module module = {.alive = true};
    Function function = {.name = "library", .module = &module, .twin = twin};
    return launch(&function, (unsigned[]){1, 1, 1}, (unsigned[]){1, 1, 1}, 0, stream, parameters, NULL);
}

API CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, CUstream stream, void** parameters, void** extra) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream ? stream : CU_STREAM_PER_THREAD, parameters,
                          extra);
}
API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
    CUlaunchConfig own = *c;
    if (!own.hStream) own.hStream = CU_STREAM_PER_THREAD;
    return cuLaunchKernelEx(&own, function, parameters, extra);
}
