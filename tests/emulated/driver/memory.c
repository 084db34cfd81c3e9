// Memory: what is allocated on a GPU, pinned or registered, and copies between all of it.
#include "emu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, ALIGNMENT = 256, EXPORTS = 256, GARBAGE = 1 << 20 };

size_t batch_limit = 50000;
static Range* ranges;  // ascending, apart from each other
static int range_count, range_room;
static unsigned long long ids;

// -- ranges ----------------------------------------------------------------------------------------

// The first range that ends after an address.
static int place_of(uintptr_t address) {
    int low = 0, high = range_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ranges[middle].base + ranges[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

Range* find_range(uintptr_t address) {
    int at = place_of(address);
    return at < range_count && ranges[at].base <= address ? &ranges[at] : NULL;
}

static Range* add_range(Range range) {
    if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room * 2 + 64) * sizeof *ranges);
    int at = place_of(range.base);
    memmove(&ranges[at + 1], &ranges[at], (range_count - at) * sizeof *ranges);
    range.id = ++ids;
    ranges[at] = range;
    ++range_count;
    return &ranges[at];
}

static void remove_range(Range* range) {
    memmove(range, range + 1, (&ranges[range_count] - range - 1) * sizeof *ranges);
    --range_count;
}

// An end of a copy lies in one allocation or one registration as a whole, or in none, which is pageable memory.
CUresult resolve(uintptr_t address, size_t bytes, Range** found) {
    int at = place_of(address);
    *found = NULL;
    if (at == range_count || ranges[at].base >= address + bytes) return CUDA_SUCCESS;
    if (ranges[at].base > address || address + bytes > ranges[at].base + ranges[at].bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *found = &ranges[at];
    return CUDA_SUCCESS;
}

// -- device memory ---------------------------------------------------------------------------------

// The first gap of the arena that is wide enough. The first page of the arena is the table of exports.
static uint8_t* find_gap(Device* device, size_t bytes) {
    uint8_t* start = device->arena + PAGE * 2;
    for (int i = place_of((uintptr_t)device->arena); i <= range_count; ++i) {
        bool inside = i < range_count && ranges[i].base < (uintptr_t)device->arena + device->arena_bytes;
        uint8_t* end = inside ? ranges[i].mapped : device->arena + device->arena_bytes;
        if ((size_t)(end - start) >= bytes + PAGE) return start;
        if (!inside) return NULL;
        start = ranges[i].mapped + ranges[i].mapped_bytes + PAGE;  // a page between neighbours that nobody may touch
    }
    return NULL;
}

static CUresult allocate(Context* context, size_t bytes, CUdeviceptr* address) {
    Device* device = &devices[context->device];
    CUresult result = unsafe_call();
    if (result) return result;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > device->total || device->used + bytes > device->total) return CUDA_ERROR_OUT_OF_MEMORY;
    // It ends at the end of its pages, so that the first bytes past it are an illegal address.
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, pages = (rounded + PAGE - 1) / PAGE * PAGE;
    uint8_t* mapped = find_gap(device, pages);
    if (!mapped || mprotect(mapped, pages, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
    uint8_t* base = mapped + pages - rounded;
    // Nothing says what new memory holds.
    memset(base, 0xA5, bytes < GARBAGE ? bytes : GARBAGE);
    add_range((Range){(uintptr_t)base, bytes, DEVICE_MEMORY, context->device, context, 0, mapped, pages, 0, -1});
    device->used += bytes;
    ++counters[ALLOCATIONS];
    *address = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

typedef struct Export {
    unsigned long long id;
    size_t offset, mapped_bytes, inside, bytes;
} Export;

static Export* exports_of(Device* device) {
    Export* table = (Export*)device->arena;
    mprotect(table, PAGE * 2, PROT_READ | PROT_WRITE);
    return table;
}

static void give_back(Range* range) {
    Device* device = &devices[range->device];
    if (range->kind == DEVICE_MEMORY) {
        if (range->exported >= 0) exports_of(device)[range->exported].id = 0;
        madvise(range->mapped, range->mapped_bytes, MADV_REMOVE);
        mprotect(range->mapped, range->mapped_bytes, PROT_NONE);
        device->used -= range->bytes;
        --counters[ALLOCATIONS];
    } else if (range->kind == REGISTERED) {
        --counters[REGISTRATIONS], ++counters[UNPINNED];
    } else {
        munmap(range->mapped, range->mapped_bytes);
        if (range->kind == PINNED) --counters[PINNED_NOW], ++counters[UNPINNED];
    }
    remove_range(range);
}

void kill_streams(Context* context);
void kill_events(Context* context);

// All that a context has, when it ends.
void free_all(Context* context) {
    for (int i = range_count - 1; i >= 0; --i) {
        if (ranges[i].context == context) give_back(&ranges[i]);
    }
    kill_streams(context);
    kill_events(context);
}

API CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    Context* context;
    CUresult result = enter_context(&context);
    return result ? result : leave(address ? allocate(context, bytes, address) : CUDA_ERROR_INVALID_VALUE);
}

// Freeing waits for whatever may use the memory.
static CUresult give_back_at(uintptr_t address, Memory kind) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range(address);
    if (!range || range->base != address || range->kind != kind) return leave(CUDA_ERROR_INVALID_VALUE);
    if ((result = unsafe_call()) || (result = wait_for_context(range->context))) return leave(result);
    range = find_range(address);  // the lock was let go
    if (!range || range->base != address || range->kind != kind) return leave(CUDA_ERROR_INVALID_VALUE);
    give_back(range);
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemFree(CUdeviceptr address) { return address ? give_back_at(address, DEVICE_MEMORY) : CUDA_SUCCESS; }

API CUresult cuMemGetInfo(size_t* free, size_t* total) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Device* device = &devices[context->device];
    *total = device->total, *free = device->used < device->total ? device->total - device->used : 0;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range(address);
    if (!range) return leave(CUDA_ERROR_NOT_FOUND);
    if (base) *base = range->base;
    if (bytes) *bytes = range->bytes;
    return leave(CUDA_SUCCESS);
}

// -- pinned memory ---------------------------------------------------------------------------------

API CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = unsafe_call())) return leave(result);
    if (!bytes) return leave(CUDA_ERROR_INVALID_VALUE);
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    void* mapped = mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    memset(mapped, 0xA5, bytes < GARBAGE ? bytes : GARBAGE);
    add_range((Range){(uintptr_t)mapped, bytes, PINNED, context->device, context, flags, mapped, pages, 0, -1});
    ++counters[PINNED_NOW];
    *address = mapped;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemAllocHost(void** address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }
API CUresult cuMemFreeHost(void* address) { return give_back_at((uintptr_t)address, PINNED); }

API CUresult cuMemHostRegister(void* address, size_t bytes, unsigned flags) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = unsafe_call())) return leave(result);
    if (!address || !bytes || flags & CU_MEMHOSTREGISTER_IOMEMORY) return leave(CUDA_ERROR_INVALID_VALUE);
    uintptr_t first = (uintptr_t)address / PAGE * PAGE, end = ((uintptr_t)address + bytes + PAGE - 1) / PAGE * PAGE;
    int at = place_of(first);
    if (at < range_count && ranges[at].base < end) return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    // Pages that are not there cannot be locked.
    unsigned char* there = malloc((end - first) / PAGE);
    int missing = mincore((void*)first, end - first, there);
    free(there);
    if (missing) return leave(CUDA_ERROR_INVALID_VALUE);
    add_range((Range){(uintptr_t)address, bytes, REGISTERED, context->device, context, flags, NULL, 0, 0, -1});
    ++counters[REGISTRATIONS];
    return leave(CUDA_SUCCESS);
}

// Nothing says that this waits for what may still use the memory. A copy that is not done reads what is nobody's then.
API CUresult cuMemHostUnregister(void* address) {
    Context *context, *user;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range((uintptr_t)address);
    if (!range || range->base != (uintptr_t)address || range->kind != REGISTERED)
        return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    if ((result = unsafe_call())) return leave(result);
    if (uses(range->base, range->base + range->bytes, &user)) fail(user, CUDA_ERROR_ILLEGAL_ADDRESS);
    give_back(range);
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned flags) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range((uintptr_t)host);
    if (!range || (range->kind != PINNED && range->kind != REGISTERED)) return leave(CUDA_ERROR_INVALID_VALUE);
    *address = (CUdeviceptr)host;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetFlags(unsigned* flags, void* host) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range((uintptr_t)host);
    if (!range || range->kind != PINNED) return leave(CUDA_ERROR_INVALID_VALUE);
    *flags = range->flags;
    return leave(CUDA_SUCCESS);
}

// -- what is known of an address -------------------------------------------------------------------

static CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    Range* range = find_range(address);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    bool host = range->kind == PINNED || range->kind == REGISTERED;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)value = (CUcontext)range->context; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned*)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)value = address; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (!host) return CUDA_ERROR_INVALID_VALUE;
            *(void**)value = (void*)address;
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long*)value = range->id; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned*)value = 0; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = range->device; break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned*)value = range->kind == DEVICE_MEMORY; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)value = range->base; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)value = range->bytes; break;
        case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned*)value = 1; break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned*)value = 0; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    Context* context;
    CUresult result = enter_context(&context);
    return result ? result : leave(pointer_attribute(value, attribute, address));
}

// Of an unknown address, all attributes are zero, and that is no error.
API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                    CUdeviceptr address) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    for (unsigned i = 0; i < count; ++i) {
        if (!pointer_attribute(values[i], attributes[i], address)) continue;
        bool number =
            attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE || attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED ||
            attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL || attributes[i] == CU_POINTER_ATTRIBUTE_MAPPED;
        memset(values[i], attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? 0xFE : 0, number ? 4 : 8);
    }
    return leave(CUDA_SUCCESS);
}

API CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

// -- copies ----------------------------------------------------------------------------------------

static void add_piece(Op* op, Piece piece) {
    if ((op->piece_count & (op->piece_count - 1)) == 0) {
        op->pieces = realloc(op->pieces, (op->piece_count ? 2 * op->piece_count : 1) * sizeof(Piece));
    }
    op->pieces[op->piece_count++] = piece;
}

void shuffle(Op* op) {
    for (size_t i = op->piece_count; i > 1; --i) {
        size_t j = below(i);
        Piece piece = op->pieces[i - 1];
        op->pieces[i - 1] = op->pieces[j], op->pieces[j] = piece;
    }
}

// A copy is torn into pieces: nothing says that it happens at once, or from its beginning to its end.
void cut(Op* op, uint8_t* target, uint8_t* source, size_t bytes) {
    size_t count = bytes < 2 || chance(0.3) ? 1 : 2 + below(6), size = bytes / count;
    size -= size % (op->kind == FILL ? op->fill_width : 1);
    if (!size) size = bytes;
    for (size_t start = 0; start < bytes;) {
        size_t some = bytes - start < 2 * size ? bytes - start : size;
        add_piece(op, (Piece){target + start, source + start, some});
        start += some;
    }
}

// "For transfers from pageable host memory to device memory, a stream sync is performed before the copy is initiated.
// The function will return once the pageable buffer has been copied to the staging memory ... but the DMA to final
// destination may not have completed." "For transfers from device to pageable host memory, the function will return
// only once the copy has completed." "For transfers from any host memory to any host memory, the function is fully
// synchronous with respect to the host." Copies from device to device do not hold the host up, synchronous ones neither.
CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t bytes, Stream* stream, bool synchronous) {
    Range *to, *from;
    CUresult result;
    if (!bytes) return CUDA_SUCCESS;
    if ((result = resolve(target, bytes, &to)) || (result = resolve(source, bytes, &from))) return result;
    if (synchronous && (result = unsafe_call())) return result;
    bool to_host = !to || to->kind > IMPORTED, from_host = !from || from->kind > IMPORTED;
    bool wait = !to || (to_host && from_host) || (synchronous && (to_host || (from && from_host)));
    bool stage = !from && to;
    if (stage && !stream->capture && (result = wait_for(tail_of(stream)))) return result;
    if (stream->capture && (!from || !to)) {
        // Pageable memory would have to be waited for.
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    Op* op = new_op(COPY);
    uint8_t* bytes_from = (uint8_t*)source;
    if (stage) bytes_from = op->staged = memcpy(malloc(bytes), bytes_from, bytes);
    cut(op, (uint8_t*)target, bytes_from, bytes);
    shuffle(op);
    ++counters[COPIES];
    if ((result = enqueue(op, stream))) return result;
    return wait && !stream->capture ? wait_for(tail_of(stream)) : CUDA_SUCCESS;
}

static CUresult copy_on(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream handle, bool synchronous) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!(result = find_stream(handle, context, &stream))) result = copy(target, source, bytes, stream, synchronous);
    return leave(result);
}

static bool on_device(CUdeviceptr address, size_t bytes) {
    Range* range;
    pthread_mutex_lock(&lock);
    bool known = !resolve(address, bytes, &range) && range;
    pthread_mutex_unlock(&lock);
    return known || !bytes;
}

#define IF_ON_DEVICE(address, call) (on_device(address, bytes) ? (call) : CUDA_ERROR_INVALID_VALUE)

#undef cuMemcpyHtoD
#undef cuMemcpyDtoH
#undef cuMemcpyDtoD
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyDtoDAsync
API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_on(to, from, bytes, NULL, true); }
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream on) {
    return copy_on(to, from, bytes, on, false);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return IF_ON_DEVICE(to, copy_on(to, (CUdeviceptr)from, bytes, NULL, true));
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return IF_ON_DEVICE(from, copy_on((CUdeviceptr)to, from, bytes, NULL, true));
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return IF_ON_DEVICE(to, IF_ON_DEVICE(from, copy_on(to, from, bytes, NULL, true)));
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream on) {
    return IF_ON_DEVICE(to, copy_on(to, (CUdeviceptr)from, bytes, on, false));
}
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream on) {
    return IF_ON_DEVICE(from, copy_on((CUdeviceptr)to, from, bytes, on, false));
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream on) {
    return IF_ON_DEVICE(to, IF_ON_DEVICE(from, copy_on(to, from, bytes, on, false)));
}
API CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext a, CUdeviceptr from, CUcontext b, size_t bytes) {
    return copy_on(to, from, bytes, NULL, true);
}
API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext a, CUdeviceptr from, CUcontext b, size_t bytes, CUstream on) {
    return copy_on(to, from, bytes, on, false);
}

static CUresult set(CUdeviceptr target, unsigned value, int width, size_t count, CUstream handle) {
    Context* context;
    Stream* stream;
    Range* range;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    size_t bytes = count * width;
    if (!bytes) return leave(CUDA_SUCCESS);
    if (target % width || resolve(target, bytes, &range) || !range) return leave(CUDA_ERROR_INVALID_VALUE);
    Op* op = new_op(FILL);
    op->fill = value, op->fill_width = width;
    cut(op, (uint8_t*)target, (uint8_t*)target, bytes);
    shuffle(op);
    return leave(enqueue(op, stream));
}

#undef cuMemsetD8
#undef cuMemsetD16
#undef cuMemsetD32
API CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count) {
    return set(target, value, 1, count, NULL);
}
API CUresult cuMemsetD16_v2(CUdeviceptr target, unsigned short value, size_t count) {
    return set(target, value, 2, count, NULL);
}
API CUresult cuMemsetD32_v2(CUdeviceptr target, unsigned value, size_t count) {
    return set(target, value, 4, count, NULL);
}
API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream on) {
    return set(target, value, 1, count, on);
}
API CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream on) {
    return set(target, value, 2, count, on);
}
API CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream on) {
    return set(target, value, 4, count, on);
}

// -- batches ---------------------------------------------------------------------------------------

// The copies of a batch have no order among themselves. Each group says when its sources are read: in stream order,
// during the call, or at any time, which may be now. The default streams are refused.
static CUresult batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                      size_t* firsts, size_t kinds, size_t* failed, CUstream handle) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (failed) *failed = SIZE_MAX;
    if (!handle || handle == CU_STREAM_LEGACY) return leave(CUDA_ERROR_INVALID_VALUE);
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    if (stream->capture) {
        stream->capture->invalid = true;
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if (!count || !kinds || kinds > count || !attributes || !firsts || firsts[0])
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (count > batch_limit) {
        fprintf(stderr, "emulated driver: %zu copies in one batch, where drivers have crashed; the bound is %zu\n",
                count, batch_limit);
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    Op* op = new_op(COPY);
    size_t total = 0, used = 0;
    for (size_t i = 0; i < count; ++i) total += sizes[i];
    for (size_t i = 0, kind = 0; i < count; ++i) {
        Range *target, *source;
        if (kind + 1 < kinds && firsts[kind + 1] == i) ++kind;
        unsigned order = attributes[kind].srcAccessOrder;
        if (resolve(to[i], sizes[i], &target) || resolve(from[i], sizes[i], &source) || !sizes[i] || order < 1 ||
            order > 3) {
            if (failed) *failed = i;
            free_op(op);
            return leave(CUDA_ERROR_INVALID_VALUE);
        }
        uint8_t* read = (uint8_t*)from[i];
        if (order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL ||
            (order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY && chance(0.7))) {
            if (!op->staged) op->staged = malloc(total);
            read = memcpy((uint8_t*)op->staged + used, read, sizes[i]);
            used += sizes[i];
        }
        if (count <= 64)
            cut(op, (uint8_t*)to[i], read, sizes[i]);
        else
            add_piece(op, (Piece){(uint8_t*)to[i], read, sizes[i]});
    }
    shuffle(op);
    counters[COPIES] += count, ++counters[BATCHES];
    return leave(enqueue(op, stream));
}

#undef cuMemcpyBatchAsync
API CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* failed,
                                CUstream stream) {
    return batch(to, from, sizes, count, attributes, firsts, kinds, failed, stream);
}
API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, CUstream stream) {
    return batch(to, from, sizes, count, attributes, firsts, kinds, NULL, stream);
}

// -- other processes -------------------------------------------------------------------------------

// A handle names the file of the arena in the process that exports, and a row of its table of exports.
typedef struct Handle {
    char magic[8];
    int process, file, device, slot;
    unsigned long long id;
} Handle;

static const char MAGIC[8] = "emulate";

// Only memory that was allocated on a GPU by this process; the handle is that of the whole allocation.
API CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range(address);
    if (!range || range->kind != DEVICE_MEMORY) return leave(CUDA_ERROR_INVALID_VALUE);
    Device* device = &devices[range->device];
    Export* table = exports_of(device);
    for (int i = 0; i < EXPORTS - 112 && range->exported < 0; ++i) {
        if (table[i].id) continue;
        size_t offset = range->mapped - device->arena;
        table[i] =
            (Export){range->id, offset, range->mapped_bytes, range->base - (uintptr_t)range->mapped, range->bytes};
        range->exported = i;
    }
    if (range->exported < 0) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    Handle found = {
        .process = getpid(), .file = device->file, .device = range->device, .slot = range->exported, .id = range->id};
    memcpy(found.magic, MAGIC, sizeof MAGIC);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &found, sizeof found);
    return leave(CUDA_SUCCESS);
}

// Not in the process that exported it, and not without the flag. Opening it again gives the same address, to be closed
// as often.
API CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    Context* context;
    Handle asked;
    CUresult result = enter_context(&context);
    if (result) return result;
    memcpy(&asked, &handle, sizeof asked);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || memcmp(asked.magic, MAGIC, sizeof MAGIC))
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (asked.process == getpid()) return leave(CUDA_ERROR_INVALID_CONTEXT);
    for (int i = 0; i < range_count; ++i) {
        if (ranges[i].kind != IMPORTED || memcmp(ranges[i].handle, &handle, sizeof handle)) continue;
        ++ranges[i].users;
        *address = ranges[i].base;
        return leave(CUDA_SUCCESS);
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", asked.process, asked.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return leave(CUDA_ERROR_INVALID_VALUE);
    Export* table = mmap(NULL, PAGE * 2, PROT_READ, MAP_SHARED, file, 0);
    Export found = table == MAP_FAILED ? (Export){0} : table[asked.slot];
    if (table != MAP_FAILED) munmap(table, PAGE * 2);
    uint8_t* mapped = MAP_FAILED;
    if (found.id == asked.id)
        mapped = mmap(NULL, found.mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, found.offset);
    close(file);
    if (mapped == MAP_FAILED) return leave(CUDA_ERROR_INVALID_VALUE);
    Range* range = add_range((Range){(uintptr_t)mapped + found.inside, found.bytes, IMPORTED, asked.device, context, 0,
                                     mapped, found.mapped_bytes, 1, -1});
    memcpy(range->handle, &handle, sizeof handle);
    *address = range->base;
    return leave(CUDA_SUCCESS);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    Range* range = find_range(address);
    if (!range || range->base != address || range->kind != IMPORTED) return leave(CUDA_ERROR_INVALID_VALUE);
    // Nothing says that this waits for what may still use the memory.
    if (!--range->users) give_back(range);
    return leave(CUDA_SUCCESS);
}
