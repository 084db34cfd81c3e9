// Streams, and the one thread that runs what is enqueued on them: late, in pieces, in an order that only streams and
// events bind.
//
// An operation may run when the one before it in its stream is complete and so is every point that it waits for. Among
// those that may run, a seeded generator picks. Steps are made when a caller waits (those that he waits for, or any),
// now and then at a call, and when no call came for a while, since a GPU gets on without being asked.
#include "emu.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { STREAMS_MAX = 1 << 20, MISSES_MAX = 24 };

static Stream* streams;
static int stream_count;
static Stream** busy;  // those with operations
static int busy_count, busy_room;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static Point* waited;  // what threads wait for
static int waited_count, waited_room;
static int budget;      // steps that calls have granted
static uint64_t calls;  // so far: while they come, nothing runs by itself
static int misses;
static bool started, asleep;  // asleep: until something is enqueued
static bool closure_only;     // of this wait: nothing runs that is not waited for
static uint64_t state;
static double progress;
static int idle_ms = 100;
static int patience_ms = 20;  // for a host function, until other streams get on

// -- random numbers --------------------------------------------------------------------------------

static uint64_t next_random(void) {  // splitmix64
    uint64_t x = (state += 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t below(uint64_t bound) { return bound ? next_random() % bound : 0; }
bool chance(double probability) { return (next_random() >> 11) * 0x1p-53 < probability; }

static void seed(uint64_t value) {
    static const double settings[] = {0, 0, 0.05, 0.3, 0.9};
    state = value * 0x9E3779B97F4A7C15u + 1;
    progress = settings[below(5)];
    budget = misses = 0;
}

API void emu_set_seed(uint64_t value) {
    pthread_mutex_lock(&lock);
    seed(value);
    pthread_mutex_unlock(&lock);
}
API void emu_set_progress(double probability) { progress = probability; }
// A stream that is held back runs nothing while any other stream can, or does.
static int held_count;
API void emu_hold(CUstream handle, int held) {
    pthread_mutex_lock(&lock);
    Context* context = current();
    Stream* stream;
    if (context && !find_stream(handle, context, &stream) && stream->held != !!held) {
        stream->held = held, held_count += held ? 1 : -1;
    }
    pthread_mutex_unlock(&lock);
}
API void emu_set_patience_ms(int milliseconds) { patience_ms = milliseconds; }
API void emu_set_idle_ms(int milliseconds) {
    idle_ms = milliseconds;
    pthread_cond_signal(&work);
}

// -- streams ---------------------------------------------------------------------------------------

// A new stream may get the handle of one that was destroyed and has done its work. Its operations count on, so that
// points of the old one stay reached.
static Stream* place_of_a_stream(void) {
    for (int i = 0; i < stream_count; ++i) {
        if (!streams[i].alive && !streams[i].head && !streams[i].capture) return &streams[i];
    }
    return stream_count == STREAMS_MAX ? NULL : &streams[stream_count++];
}

Stream* make_stream(Context* context, bool blocking, int priority) {
    static int number;
    if (!streams) streams = calloc(STREAMS_MAX, sizeof *streams);
    Stream* stream = place_of_a_stream();
    if (!stream) return NULL;
    free(stream->pending);
    *stream = (Stream){.alive = true,
                       .blocking = blocking,
                       .number = number++,
                       .priority = priority,
                       .context = context,
                       .enqueued = stream->enqueued,
                       .completed = stream->completed};
    ++counters[STREAMS];
    return stream;
}

// 0 and 1 are the legacy default stream of the current context; 2 is the calling thread's own. Anything else must be
// alive: 400.
CUresult find_stream(CUstream handle, Context* context, Stream** found) {
    static __thread Stream* own[DEVICES];
    if (handle == NULL || handle == CU_STREAM_LEGACY) return *found = context->legacy, CUDA_SUCCESS;
    if (handle == CU_STREAM_PER_THREAD) {
        Stream** mine = &own[context->device];
        if (!*mine || !(*mine)->alive) *mine = make_stream(context, true, 0);
        return *found = *mine, CUDA_SUCCESS;
    }
    uintptr_t place = (uintptr_t)handle - (uintptr_t)streams;
    if (!streams || place >= stream_count * sizeof *streams || place % sizeof *streams)
        return CUDA_ERROR_INVALID_HANDLE;
    *found = (Stream*)handle;
    if (!(*found)->alive) return CUDA_ERROR_INVALID_HANDLE;
    return (*found)->context->error;
}

API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!handle || flags & ~CU_STREAM_NON_BLOCKING) return leave(CUDA_ERROR_INVALID_VALUE);
    // "If priority is outside the numerical range ... it will automatically be clamped."
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    Stream* stream = make_stream(context, !(flags & CU_STREAM_NON_BLOCKING), priority);
    *handle = (CUstream)stream;
    return leave(stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuStreamCreate(CUstream* handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

// "In case the device is still doing work in the stream, the function will return immediately and the resources will be
// released once the device has completed all work."
API CUresult cuStreamDestroy(CUstream handle) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (!(result = find_stream(handle, context, &stream))) {
        stream->alive = false;
        if (stream->capture) stream->capture->invalid = true;
        --counters[STREAMS];
    }
    return leave(result);
}

API CUresult cuStreamGetCtx(CUstream handle, CUcontext* of) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!(result = find_stream(handle, context, &stream))) *of = (CUcontext)stream->context;
    return leave(result);
}

API CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!(result = find_stream(handle, context, &stream))) *flags = stream->blocking ? 0 : CU_STREAM_NON_BLOCKING;
    return leave(result);
}

API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!(result = find_stream(handle, context, &stream))) *priority = stream->priority;
    return leave(result);
}

API CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!(result = find_stream(handle, context, &stream))) *id = stream->number;
    return leave(result);
}

API CUresult cuStreamQuery(CUstream handle) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream)) || (result = check_not_capturing(stream)))
        return leave(result);
    Point end = tail_of(stream);
    if (reached(end)) return leave(CUDA_SUCCESS);
    query_missed(end);
    return leave(CUDA_ERROR_NOT_READY);
}

API CUresult cuStreamSynchronize(CUstream handle) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream)) || (result = check_not_capturing(stream)))
        return leave(result);
    return leave(wait_for(tail_of(stream)));
}

API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    Op* op = new_op(HOST_FUNCTION);
    op->function = function, op->data = data;
    ++counters[HOST_FUNCTIONS];
    return leave(enqueue(op, stream));
}

API CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* data, unsigned flags) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (flags) return leave(CUDA_ERROR_INVALID_VALUE);
    if ((result = find_stream(handle, context, &stream)) || (result = check_not_capturing(stream)))
        return leave(result);
    Op* op = new_op(HOST_FUNCTION);
    op->callback = callback, op->data = data;
    ++counters[HOST_FUNCTIONS];
    return leave(enqueue(op, stream));
}

// -- operations ------------------------------------------------------------------------------------

Op* new_op(Kind kind) {
    Op* op = calloc(1, sizeof *op);
    op->kind = kind;
    return op;
}

void free_op(Op* op) {
    free(op->waits), free(op->pieces), free(op->staged), free(op->record), free(op->parameters), free(op);
}

Point tail_of(Stream* stream) { return (Point){stream, stream->enqueued}; }
bool reached(Point point) { return point.stream->completed >= point.index; }

bool uses(uintptr_t first, uintptr_t end, Context** context) {
    for (int i = 0; i < busy_count; ++i) {
        for (Op* op = busy[i]->head; op; op = op->next) {
            for (size_t k = op->kind == COPY && !op->failed ? op->pieces_done : op->piece_count; k < op->piece_count; ++k) {
                Piece* piece = &op->pieces[k];
                uintptr_t to = (uintptr_t)piece->target, from = (uintptr_t)piece->source;
                if ((to < end && first < to + piece->bytes) || (from < end && first < from + piece->bytes))
                    return *context = op->stream->context, true;
            }
        }
    }
    return false;
}

static void note_time(Event* event) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->time = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static void add_wait(Op* op, Point point) {
    if (reached(point)) return;
    op->waits = realloc(op->waits, (op->wait_count + 1) * sizeof(Point));
    op->waits[op->wait_count++] = point;
}

static void list(Stream* stream) {
    if (stream->listed) return;
    if (busy_count == busy_room) busy = realloc(busy, (busy_room = busy_room * 2 + 16) * sizeof *busy);
    busy[busy_count++] = stream, stream->listed = true, stream->rank = next_random();
}

static void* executor(void* unused);
static void guard_memory(void);

static void start(void) {
    const char* text = getenv("EMU_SEED");
    uint64_t value = text && *text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) * 1000003u + getpid();
    seed(value);
    if ((text = getenv("EMU_PROGRESS")) && *text) progress = atof(text);
    if ((text = getenv("EMU_IDLE_MS")) && *text) idle_ms = atoi(text);
    if (getenv("EMU_VERBOSE"))
        fprintf(stderr, "emulated driver: EMU_SEED=%llu EMU_PROGRESS=%g\n", (unsigned long long)value, progress);
    guard_memory();
    pthread_t thread;
    pthread_create(&thread, NULL, executor, NULL);
    pthread_detach(thread);
    started = true;
}

// The rule of the legacy default stream: it waits for all blocking streams of its context, and they for it.
static void order_by_legacy(Op* op, Stream* stream) {
    Stream* legacy = stream->context->legacy;
    if (stream == legacy) {
        for (int i = 0; i < busy_count; ++i) {
            if (busy[i] != stream && busy[i]->blocking && busy[i]->context == stream->context)
                add_wait(op, tail_of(busy[i]));
        }
    } else if (stream->blocking) {
        add_wait(op, tail_of(legacy));
    }
}

CUresult enqueue(Op* op, Stream* stream) {
    CUresult result;
    if (captured(op, stream, &result)) return result;
    if ((result = check_legacy(stream))) return free_op(op), result;
    op->stream = stream, op->index = ++stream->enqueued;
    order_by_legacy(op, stream);
    for (int i = 0; i < stream->pending_count; ++i) add_wait(op, stream->pending[i]);
    stream->pending_count = 0;
    op->next = NULL;
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    list(stream);
    if (asleep || budget || waited_count) pthread_cond_signal(&work);
    return CUDA_SUCCESS;
}

static void complete(Op* op) {
    Stream* stream = op->stream;
    if (op->kind == MARK && op->data) note_time(op->data);
    stream->head = op->next;
    if (!stream->head) {
        stream->tail = NULL;
        for (int i = 0; i < busy_count; ++i) {
            if (busy[i] == stream) {
                busy[i] = busy[--busy_count], stream->listed = false;
                break;
            }
        }
    }
    stream->completed = op->index;
    free_op(op);
    pthread_cond_broadcast(&done);
}

// After an error of the context: nothing that has not begun is run.
void drop_all(Context* context) {
    for (int i = 0; i < busy_count; ++i) {
        Stream* stream = busy[i];
        if (stream->context != context) continue;
        for (Op* op = stream->head; op; op = op->next) op->failed = true;
    }
    pthread_cond_signal(&work);
    pthread_cond_broadcast(&done);
}

// The streams of a context that ends, end with it.
void kill_streams(Context* context) {
    for (int i = 0; i < stream_count; ++i) {
        if (streams[i].context == context && streams[i].alive) streams[i].alive = false, --counters[STREAMS];
    }
}

static bool is_joined(Stream* stream, Stream* origin) {
    for (int hops = 0; stream != origin && hops < stream_count; ++hops) {
        if (stream->captured && (!stream->joined_to || stream->joined < stream->captured)) return false;
        if (!stream->joined_to) return true;
        stream = stream->joined_to;
    }
    return true;
}

// At the end of a capture its streams run again. What the origin has not waited for is not joined.
bool end_streams(Capture* capture, Stream* origin) {
    bool joined = true;
    for (int i = 0; i < stream_count; ++i) {
        if (streams[i].capture == capture) joined = joined && is_joined(&streams[i], origin);
    }
    for (int i = 0; i < stream_count; ++i) {
        if (streams[i].capture == capture) streams[i].capture = NULL;
    }
    return joined;
}

API long long emu_pending(CUstream handle) {
    pthread_mutex_lock(&lock);
    long long count = -1;
    Context* context = current();
    Stream* stream;
    if (context && !find_stream(handle, context, &stream)) count = stream->enqueued - stream->completed;
    pthread_mutex_unlock(&lock);
    return count;
}

static struct timespec after_ms(int milliseconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)milliseconds * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    return until;
}

// -- running ---------------------------------------------------------------------------------------

static __thread sigjmp_buf fault;
static __thread volatile sig_atomic_t guarded;
static struct sigaction before[NSIG];

// A kernel or copy that touches what is not mapped is an illegal address; one at a crooked address is built to trap.
static void caught(int number, siginfo_t* info, void* context) {
    if (guarded) siglongjmp(fault, number);
    struct sigaction* old = &before[number];
    if (old->sa_flags & SA_SIGINFO && old->sa_sigaction)
        old->sa_sigaction(number, info, context);
    else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN)
        old->sa_handler(number);
    else
        sigaction(number, old, NULL);
}

static void guard_memory(void) {
    struct sigaction action = {.sa_sigaction = caught, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigaction(SIGSEGV, &action, &before[SIGSEGV]);
    sigaction(SIGBUS, &action, &before[SIGBUS]);
    sigaction(SIGILL, &action, &before[SIGILL]);
}

static __thread bool launch_failed;
API void emu_launch_failed(void) { launch_failed = true; }

static void fill(Op* op, Piece* piece) {
    for (size_t i = 0; i < piece->bytes; i += op->fill_width) memcpy(piece->target + i, &op->fill, op->fill_width);
}

// A part of an operation, without the lock: some pieces of a copy, some blocks of a kernel.
static CUresult run_part(Op* op, size_t first, size_t count) {
    int number = sigsetjmp(fault, 1);
    if (number) {
        guarded = false;
        return number == SIGILL ? CUDA_ERROR_MISALIGNED_ADDRESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    guarded = true;
    for (size_t i = first; i < first + count; ++i) {
        Piece* piece = &op->pieces[i];
        if (op->kind == COPY)
            memmove(piece->target, piece->source, piece->bytes);
        else if (op->kind == FILL)
            fill(op, piece);
        else
            op->twin->run(op->parameters, op->grid, op->block, op->shared, (uintptr_t)piece->source, piece->bytes);
    }
    guarded = false;
    bool failed = launch_failed;
    launch_failed = false;
    return failed ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

// Host functions run on threads of their own, so that one that waits holds up its own stream only.
static void* host_function(void* argument) {
    Op* op = argument;
    in_host_function = true;
    if (op->callback)
        op->callback((CUstream)op->stream, op->failed ? op->stream->context->error : CUDA_SUCCESS, op->data);
    else
        op->function(op->data);
    pthread_mutex_lock(&lock);
    complete(op);
    pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static bool ready(Op* op) {
    if (op->running) return false;
    for (int i = 0; i < op->wait_count; ++i) {
        if (!reached(op->waits[i])) return false;
    }
    return true;
}

// One that does not wait for anything is over before the next step: with it, a seed gives the same order again.
static void wait_a_little(Stream* stream, uint64_t index) {
    struct timespec until = after_ms(patience_ms);
    while (stream->completed < index && !pthread_cond_timedwait(&done, &lock, &until)) continue;
}

static void step(Op* op) {
    ++counters[STEPS];
    if (op->kind == HOST_FUNCTION && !(op->failed && op->function)) {
        op->running = true;
        pthread_t thread;
        pthread_create(&thread, NULL, host_function, op);
        pthread_detach(thread);
        wait_a_little(op->stream, op->index);
        return;
    }
    size_t left = op->piece_count - op->pieces_done;
    if (op->failed || op->kind == MARK || !left) return complete(op);
    size_t count = 1 + below(left < 4 ? left : left / 2), first = op->pieces_done;
    op->running = true;
    pthread_mutex_unlock(&lock);
    CUresult result = run_part(op, first, count);
    pthread_mutex_lock(&lock);
    op->running = false;
    op->pieces_done += count;
    if (result) fail(op->stream->context, result);
    if (op->pieces_done == op->piece_count || op->failed) complete(op);
}

static unsigned mark;

// An operation that may run and that `stream` cannot get on without, or NULL.
static Op* needed(Stream* stream) {
    if (stream->mark == mark || !stream->head) return NULL;
    stream->mark = mark;
    if (ready(stream->head)) return stream->head;
    for (int i = 0; i < stream->head->wait_count; ++i) {
        Point point = stream->head->waits[i];
        Op* op = reached(point) ? NULL : needed(point.stream);
        if (op) return op;
    }
    return NULL;
}

// Streams have ranks for a while: one that is far ahead shows what another should have waited for, which steps in turns
// hide.
static void draw_ranks(void) {
    for (int i = 0; i < busy_count; ++i) busy[i]->rank = next_random();
}

static bool any_is_ready(void) {
    for (int i = 0; i < busy_count; ++i) {
        if (busy[i]->head && ready(busy[i]->head)) return true;
    }
    return false;
}

static Op* first_ready(bool held) {
    Op* best = NULL;
    for (int i = 0; i < busy_count; ++i) {
        Op* op = busy[i]->head;
        if (op && busy[i]->held == held && ready(op) && (!best || busy[i]->rank > best->stream->rank)) best = op;
    }
    return best;
}

// Whether a host function of a stream that is not held back is under way: on a loaded machine it takes its time.
static bool others_run(void) {
    for (int i = 0; i < busy_count; ++i) {
        if (!busy[i]->held && busy[i]->head && busy[i]->head->running) return true;
    }
    return false;
}

static Op* any_ready(void) {
    if (!any_is_ready()) return NULL;
    if (chance(0.05)) draw_ranks();
    Op* op = first_ready(false);
    return op || !held_count || others_run() ? op : first_ready(true);
}

// What to run for those who wait: what they wait for, or anything. Draws no number where there is nothing to choose, so that a seed
// gives the same order however often threads wake.
static Op* for_waiters(void) {
    Point unmet[64];
    int count = 0;
    for (int i = 0; i < waited_count && count < 64; ++i) {
        if (!reached(waited[i])) unmet[count++] = waited[i];
    }
    if (!count) return NULL;
    if (held_count) return any_ready();
    int first = count > 1 ? below(count) : 0;
    Op* op = NULL;
    for (int i = 0; i < count && !op; ++i) {
        ++mark;
        op = needed(unmet[(first + i) % count].stream);
    }
    if (closure_only) return op;
    return !op || chance(0.5) ? any_ready() : op;
}

static void* executor(void* unused) {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    pthread_mutex_lock(&lock);
    uint64_t seen = 0;
    for (bool idle = false;;) {
        idle = idle && seen == calls;
        Op* op = waited_count ? for_waiters() : NULL;
        if (!op && budget > 0) --budget, op = any_ready();
        if (!op && idle) op = any_ready();
        if (op) {
            step(op);
            continue;
        }
        seen = calls;
        if (idle_ms < 0 || !busy_count) {
            asleep = true;
            pthread_cond_wait(&work, &lock);
            asleep = idle = false;
            continue;
        }
        struct timespec until = after_ms(idle_ms);
        int woken = pthread_cond_timedwait(&work, &lock, &until);
        idle = woken == ETIMEDOUT && (calls == seen || waited_count);
    }
    return NULL;
}

void nudge(void) {
    if (!started) start();
    ++calls;
    if (progress > 0 && busy_count && chance(progress)) {
        budget = progress >= 1 ? 1 << 20 : budget + 1 + below(8);
        pthread_cond_signal(&work);
    } else if (progress < 1) {
        budget = budget > 64 ? 0 : budget;
    }
}

// A loop of queries must end: after some, a step is made of what is asked for.
void query_missed(Point point) {
    if (++misses < MISSES_MAX) return;
    misses = 0;
    ++mark;
    Op* op = needed(point.stream);
    if (op) budget += 4, pthread_cond_signal(&work);
}

CUresult wait_for(Point point) {
    Context* context = point.stream->context;
    if (!reached(point)) {
        if (waited_count == waited_room) waited = realloc(waited, (waited_room = waited_room * 2 + 8) * sizeof *waited);
        waited[waited_count++] = point;
        closure_only = chance(0.5);
        draw_ranks();
        pthread_cond_signal(&work);
        while (!reached(point)) pthread_cond_wait(&done, &lock);
        for (int i = 0; i < waited_count; ++i) {
            if (waited[i].stream == point.stream && waited[i].index == point.index) {
                waited[i] = waited[--waited_count];
                break;
            }
        }
    }
    return context->error;
}

CUresult wait_for_context(Context* context) {
    int count = 0;
    Point* points = malloc((busy_count + 1) * sizeof *points);
    for (int i = 0; i < busy_count; ++i) {
        if (busy[i]->context == context) points[count++] = tail_of(busy[i]);
    }
    for (int left = count; left; --left) {  // in any order
        int i = below(left);
        wait_for(points[i]);
        points[i] = points[left - 1];
    }
    free(points);
    return context->error;
}
