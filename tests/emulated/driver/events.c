// Events: an event is the point of a stream at which it was last recorded.
#include "emu.h"

enum { EVENTS_MAX = 1 << 22 };

static Event* events;  // never used again, so that a destroyed one is known for ever
static long event_count;

// A destroyed event is error 400.
static CUresult find_event(CUevent handle, Event** found) {
    uintptr_t place = (uintptr_t)handle - (uintptr_t)events;
    if (!events || place >= event_count * sizeof *events || place % sizeof *events) return CUDA_ERROR_INVALID_HANDLE;
    *found = (Event*)handle;
    return (*found)->alive ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void kill_events(Context* context) {
    for (long i = 0; i < event_count; ++i) {
        if (events[i].context == context && events[i].alive) events[i].alive = false, --counters[EVENTS];
    }
}

API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
    Context* context;
    CUresult result = enter_context(&context);
    if (result) return result;
    unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (!handle || flags & ~known || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!events) events = calloc(EVENTS_MAX, sizeof *events);
    if (event_count == EVENTS_MAX) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    Event* event = &events[event_count++];
    *event = (Event){.alive = true, .flags = flags, .context = context, .timing = !(flags & CU_EVENT_DISABLE_TIMING)};
    ++counters[EVENTS];
    *handle = (CUevent)event;
    return leave(CUDA_SUCCESS);
}

API long long emu_event_flags(CUevent handle) {
    Event* event;
    return find_event(handle, &event) ? -1 : (long long)event->flags;
}

API CUresult cuEventDestroy(CUevent handle) {
    Event* event;
    CUresult result = enter();
    if (result) return result;
    if (!(result = find_event(handle, &event))) event->alive = false, --counters[EVENTS];
    return leave(result);
}

static CUresult record(CUevent handle, CUstream on) {
    Context* context;
    Event* event;
    Stream* stream;
    bool done = false;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_event(handle, &event)) || (result = find_stream(on, context, &stream))) return leave(result);
    if (event->context != stream->context) return leave(CUDA_ERROR_INVALID_HANDLE);
    if ((result = capture_event(event, stream, &done)) || done) return leave(result);
    Op* op = new_op(MARK);
    op->data = event;  // gets the time
    if ((result = enqueue(op, stream))) return leave(result);
    event->recorded = true, event->capture = NULL, event->point = tail_of(stream);
    return leave(CUDA_SUCCESS);
}

API CUresult cuEventRecord(CUevent event, CUstream stream) { return record(event, stream); }
API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : record(event, stream);
}

// What a stream waits for is settled now, whatever is recorded or destroyed later. An event that was never recorded
// holds nobody up.
API CUresult cuStreamWaitEvent(CUstream waiting, CUevent handle, unsigned flags) {
    Context* context;
    Event* event;
    Stream* stream;
    bool done = false;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (flags & ~CU_EVENT_WAIT_EXTERNAL) return leave(CUDA_ERROR_INVALID_VALUE);
    if ((result = find_event(handle, &event)) || (result = find_stream(waiting, context, &stream)))
        return leave(result);
    if ((result = capture_wait(event, stream, &done)) || done) return leave(result);
    if (!event->recorded || reached(event->point)) return leave(CUDA_SUCCESS);
    stream->pending = realloc(stream->pending, (stream->pending_count + 1) * sizeof(Point));
    stream->pending[stream->pending_count++] = event->point;
    return leave(enqueue(new_op(MARK), stream));
}

API CUresult cuEventQuery(CUevent handle) {
    Event* event;
    CUresult result = enter();
    if (result) return result;
    if ((result = find_event(handle, &event))) return leave(result);
    if (event->capture) return event->capture->invalid = true, leave(CUDA_ERROR_CAPTURED_EVENT);
    if ((result = unsafe_call()) || (result = event->context->error)) return leave(result);
    if (!event->recorded || reached(event->point)) return leave(CUDA_SUCCESS);
    query_missed(event->point);
    return leave(CUDA_ERROR_NOT_READY);
}

API CUresult cuEventSynchronize(CUevent handle) {
    Event* event;
    CUresult result = enter();
    if (result) return result;
    if ((result = find_event(handle, &event))) return leave(result);
    if (event->capture) return event->capture->invalid = true, leave(CUDA_ERROR_CAPTURED_EVENT);
    if ((result = unsafe_call()) || (result = event->context->error)) return leave(result);
    return leave(event->recorded ? wait_for(event->point) : CUDA_SUCCESS);
}

// Times are those of the host: they show nothing of a GPU.
static CUresult elapsed(float* milliseconds, CUevent from, CUevent to) {
    Event *first, *last;
    CUresult result = enter();
    if (result) return result;
    if ((result = find_event(from, &first)) || (result = find_event(to, &last))) return leave(result);
    if (!first->timing || !last->timing || !first->recorded || !last->recorded) return leave(CUDA_ERROR_INVALID_HANDLE);
    if (first->context != last->context) return leave(CUDA_ERROR_INVALID_HANDLE);
    if (!reached(first->point) || !reached(last->point)) return leave(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)(last->time - first->time);
    return leave(CUDA_SUCCESS);
}

#undef cuEventElapsedTime
API CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
    return elapsed(milliseconds, from, to);
}
API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) {
    return elapsed(milliseconds, from, to);
}
