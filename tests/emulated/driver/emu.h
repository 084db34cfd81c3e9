// An emulated CUDA driver over main memory: what its parts share. One lock guards all state; the executor thread alone
// runs operations.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 2
#define API __attribute__((visibility("default")))

typedef struct Stream Stream;
typedef struct Capture Capture;
typedef struct Twin Twin;

// A GPU and its primary context. `error` is sticky: 700 and its kind end the context, as the documentation of CUresult
// says.
typedef struct Context {
    int device;
    bool primary, alive;
    int retained;
    CUresult error;
    Stream* legacy;
} Context;

typedef struct Device {
    int number;
    Context primary;
    long long launches;
    int made;  // how many times the primary context has become active
    uint8_t* arena;
    size_t arena_bytes;
    int file;  // holds the arena, so that another process can map a part of it
    size_t total, used;
} Device;

// A point of a stream: everything up to its operation `index` is complete.
typedef struct Point {
    Stream* stream;
    uint64_t index;
} Point;

typedef enum { COPY, FILL, KERNEL, HOST_FUNCTION, MARK } Kind;

typedef struct Piece {
    uint8_t *target, *source;
    size_t bytes;
} Piece;

typedef struct Op {
    struct Op* next;
    Kind kind;
    Stream* stream;
    uint64_t index;
    Point* waits;
    int wait_count;
    bool running;
    // COPY and FILL
    Piece* pieces;
    size_t piece_count, pieces_done;
    void* staged;  // a copy of pageable memory, freed with the operation
    unsigned fill;
    int fill_width;
    // KERNEL
    Twin* twin;
    void* record;  // what kernel parameters were at the launch
    void** parameters;
    unsigned grid[3], block[3], shared;
    // HOST_FUNCTION
    void (*function)(void*);
    void (*callback)(CUstream, CUresult, void*);
    void* data;
    bool failed;
} Op;

struct Stream {
    bool alive, blocking;
    int number, priority;
    Context* context;
    Op *head, *tail;
    uint64_t enqueued, completed;
    Capture* capture;
    uint64_t captured;  // operations of the capture so far
    Stream* joined_to;  // which stream of the capture has waited for this one,
    uint64_t joined;    // up to here
    Point* pending;     // waits that the next operation of the stream brings along
    int pending_count;
    bool listed, held;
    unsigned mark;
    uint64_t rank;  // those of the highest run first, until ranks are drawn again
};

typedef struct Event {
    bool alive, recorded, timing;
    unsigned flags;
    Context* context;
    Point point;
    double time;
    Capture* capture;
} Event;

typedef enum { DEVICE_MEMORY, IMPORTED, PINNED, REGISTERED } Memory;

typedef struct Range {
    uintptr_t base;
    size_t bytes;
    Memory kind;
    int device;
    Context* context;
    unsigned flags;
    uint8_t* mapped;
    size_t mapped_bytes;
    int users;     // of IMPORTED: how often it was opened
    int exported;  // of DEVICE_MEMORY: its slot in the table of exports, or -1
    unsigned long long id;
    char handle[64];
} Range;

struct Capture {
    Context* context;
    Stream* origin;
    CUstreamCaptureMode mode;
    pthread_t owner;
    bool invalid;
    Op* first;
    Op** last;
    unsigned long long id;
    struct Capture* next;
};

// What runs a kernel on the CPU: blocks [first, first + count) of the grid.
struct Twin {
    void (*run)(void** parameters, const unsigned* grid, const unsigned* block, unsigned shared, unsigned first,
                unsigned count);
    const size_t* sizes;
    int parameters;
};

typedef enum {
    CONTEXTS,
    LAUNCHES,
    COPIES,
    BATCHES,
    REGISTRATIONS,
    ALLOCATIONS,
    STREAMS,
    EVENTS,
    HOST_FUNCTIONS,
    STEPS,
    PINNED_NOW,
    UNPINNED,
    COUNTERS
} Counter;

extern pthread_mutex_t lock;
extern Device devices[DEVICES];
extern long long counters[COUNTERS];
extern Capture* captures;
extern size_t batch_limit;

// core.c
// Every call begins with one of these, is counted by the name of its function, and fails where a test says so.
CUresult enter_as(const char* name);  // initialized, not forked, not inside a host function; takes the lock
CUresult enter_context_as(const char* name, Context** context);  // the same, with a living context that has not failed
#define enter() enter_as(__func__)
#define enter_context(context) enter_context_as(__func__, context)
CUresult leave(CUresult result);            // lets go of the lock
CUresult unsupported(const char* name);
Context* current(void);
void fail(Context* context, CUresult error);
extern __thread bool in_host_function;

// A number below `bound`, and whether something happens; drawn from the seed.
uint64_t below(uint64_t bound);
bool chance(double probability);

// scheduler.c
void nudge(void);  // a call was made: perhaps make progress
Op* new_op(Kind kind);
void free_op(Op* op);
CUresult enqueue(Op* op, Stream* stream);
CUresult wait_for(Point point);  // with the lock held, which is let go meanwhile
CUresult wait_for_context(Context* context);
bool reached(Point point);
bool uses(uintptr_t first, uintptr_t end, Context** context);  // whether a copy that is not done touches these bytes
void query_missed(Point point);
Point tail_of(Stream* stream);
void drop_all(Context* context);
CUresult find_stream(CUstream handle, Context* context, Stream** found);
Stream* make_stream(Context* context, bool blocking, int priority);

// memory.c
Range* find_range(uintptr_t address);
CUresult resolve(uintptr_t address, size_t bytes, Range** found);
void free_all(Context* context);
CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t bytes, Stream* stream, bool synchronous);
void cut(Op* op, uint8_t* target, uint8_t* source, size_t bytes);

// capture.c
bool captured(Op* op, Stream* stream, CUresult* result);
CUresult unsafe_call(void);
CUresult check_not_capturing(Stream* stream);
CUresult check_legacy(Stream* stream);
CUresult check_context(Context* context);
CUresult capture_event(Event* event, Stream* stream, bool* done);
CUresult capture_wait(Event* event, Stream* stream, bool* done);

// kernels.c
bool run_blocks(Op* op, unsigned first, unsigned count);
