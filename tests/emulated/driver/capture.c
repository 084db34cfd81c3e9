// Stream capture: a capturing stream records what is enqueued, and runs nothing.
#include "emu.h"

Capture* captures;
static unsigned long long ids;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

typedef struct Graph {
    bool alive;
    Op* first;
    Context* context;
} Graph;

static CUresult invalidate(Capture* capture, CUresult result) {
    capture->invalid = true;
    return result;
}

// Record instead of running. The nodes of a capture are kept in one order that respects all of its streams.
bool captured(Op* op, Stream* stream, CUresult* result) {
    Capture* capture = stream->capture;
    if (!capture) return false;
    if (capture->invalid) {
        free_op(op);
        *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        return true;
    }
    op->stream = stream, op->next = NULL, ++stream->captured;
    *capture->last = op, capture->last = &op->next;
    *result = CUDA_SUCCESS;
    return true;
}

// A call that a capture in global mode forbids to every thread, and one in thread-local mode to its own; it ends the
// capture. A thread in relaxed mode may make it.
CUresult unsafe_call(void) {
    CUresult result = CUDA_SUCCESS;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return result;
    for (Capture* capture = captures; capture; capture = capture->next) {
        bool mine = pthread_equal(capture->owner, pthread_self());
        bool global =
            capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mine);
        bool local = capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && mine;
        if (global || local) result = invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return result;
}

// A stream that is capturing cannot be queried or waited for. The legacy stream would wait for one that is capturing,
// and so would its query and synchronization.
CUresult check_not_capturing(Stream* stream) {
    if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult result = check_legacy(stream);
    return result ? result : unsafe_call();
}

static Capture* in_the_way_of(Stream* stream) {
    if (stream != stream->context->legacy) return NULL;
    for (Capture* capture = captures; capture; capture = capture->next) {
        if (capture->context == stream->context && capture->origin->blocking) return capture;
    }
    return NULL;
}

CUresult check_legacy(Stream* stream) {
    Capture* capture = in_the_way_of(stream);
    return capture ? invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) : CUDA_SUCCESS;
}

// "It is also invalid to synchronize a broader handle which encompasses active stream capture, such as a device or
// context handle": in every mode, also for a thread in relaxed mode.
CUresult check_context(Context* context) {
    CUresult result = CUDA_SUCCESS;
    for (Capture* capture = captures; capture; capture = capture->next) {
        if (capture->context == context) result = invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return result ? result : unsafe_call();
}

// An event that is recorded on a capturing stream is a point of the graph.
CUresult capture_event(Event* event, Stream* stream, bool* done) {
    if (!stream->capture) return CUDA_SUCCESS;
    *done = true;
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = stream->capture, event->recorded = true, event->point = (Point){stream, stream->captured};
    return CUDA_SUCCESS;
}

// A wait for a point of a graph pulls the waiting stream into its capture; a wait of a capturing stream for a point
// outside is refused.
CUresult capture_wait(Event* event, Stream* stream, bool* done) {
    if (!event->capture && !stream->capture) return CUDA_SUCCESS;
    *done = true;
    if (!event->capture)
        return event->recorded ? invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION) : CUDA_SUCCESS;
    Capture* capture = event->capture;
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream == stream->context->legacy) return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (stream->capture && stream->capture != capture) {
        invalidate(stream->capture, CUDA_SUCCESS);
        return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (!stream->capture) stream->capture = capture, stream->captured = stream->joined = 0, stream->joined_to = NULL;
    Point point = event->point;
    if (point.stream != stream && point.stream->joined <= point.index)
        point.stream->joined_to = stream, point.stream->joined = point.index;
    return CUDA_SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode, *mode = before;
    return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    if (stream == context->legacy) return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->capture) return leave(CUDA_ERROR_ILLEGAL_STATE);
    Capture* capture = calloc(1, sizeof *capture);  // kept: events may still name it
    *capture = (Capture){
        .context = context, .origin = stream, .mode = mode, .owner = pthread_self(), .id = ++ids, .next = captures};
    capture->last = &capture->first;
    stream->capture = captures = capture, stream->captured = 0;
    return leave(CUDA_SUCCESS);
}

bool end_streams(Capture* capture, Stream* origin);

API CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    *graph = NULL;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    Capture* capture = stream->capture;
    if (!capture) return leave(CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin != stream) return leave(invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->owner, pthread_self())) {
        return leave(invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
    }
    bool joined = end_streams(capture, stream);
    for (Capture** at = &captures; *at; at = &(*at)->next) {
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    }
    if (capture->invalid) return leave(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (!joined) return leave(invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    Graph* made = calloc(1, sizeof *made);
    *made = (Graph){true, capture->first, context};
    *graph = (CUgraph)made;
    return leave(CUDA_SUCCESS);
}

API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    Context* context;
    Stream* stream;
    CUresult result = enter_context(&context);
    if (result) return result;
    if ((result = find_stream(handle, context, &stream))) return leave(result);
    // "If this is called on the legacy stream while a blocking stream in the same context is capturing ... the blocking
    // stream capture is not invalidated."
    if (in_the_way_of(stream)) return leave(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    Capture* capture = stream->capture;
    *status = !capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return leave(CUDA_SUCCESS);
}

#undef cuStreamGetCaptureInfo
API CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** nodes, size_t* count) {
    CUresult result = cuStreamIsCapturing(handle, status);
    if (result || *status == CU_STREAM_CAPTURE_STATUS_NONE) return result;
    if (graph || nodes || count) return unsupported("cuStreamGetCaptureInfo of a graph");
    if (id) *id = ((Stream*)handle)->capture->id;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** nodes, const CUgraphEdgeData** edges, size_t* count) {
    return cuStreamGetCaptureInfo_v2(handle, status, id, graph, nodes, count);
}

// -- graphs ----------------------------------------------------------------------------------------

API CUresult cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long flags) {
    Graph* from = (Graph*)graph;
    if (!from || !from->alive) return CUDA_ERROR_INVALID_VALUE;
    *made = (CUgraphExec)from;  // graphs are never changed here
    return CUDA_SUCCESS;
}

static void* duplicate(const void* data, size_t bytes) { return data ? memcpy(malloc(bytes), data, bytes) : NULL; }

// Each launch of a graph enqueues copies of its operations, with the parameters of the capture.
API CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    Context* context;
    Stream* stream;
    Graph* graph = (Graph*)executable;
    CUresult result = enter_context(&context);
    if (result) return result;
    if (!graph || (result = find_stream(handle, context, &stream)))
        return leave(graph ? result : CUDA_ERROR_INVALID_VALUE);
    for (Op* node = graph->first; node && !result; node = node->next) {
        Op* op = new_op(node->kind);
        *op = *node;
        op->waits = NULL, op->wait_count = 0, op->pieces_done = 0;
        op->pieces = duplicate(node->pieces, node->piece_count * sizeof(Piece));
        if (node->staged || (node->kind == MARK && node->data)) op->staged = NULL, op->data = NULL;
        if (node->kind == KERNEL) {
            size_t bytes = 0;
            for (int i = 0; i < node->twin->parameters; ++i) bytes += (node->twin->sizes[i] + 15) / 16 * 16;
            op->record = memcpy(aligned_alloc(16, bytes + 16), node->record, bytes);
            op->parameters = calloc(node->twin->parameters + 1, sizeof(void*));
            for (int i = 0; i < node->twin->parameters; ++i) {
                op->parameters[i] = (uint8_t*)op->record + ((uint8_t*)node->parameters[i] - (uint8_t*)node->record);
            }
        }
        result = enqueue(op, stream);
    }
    return leave(result);
}

API CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) { return CUDA_SUCCESS; }
API CUresult cuGraphDestroy(CUgraph graph) {
    return graph ? (((Graph*)graph)->alive = false, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuGraphExecDestroy(CUgraphExec graph) { return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    if (nodes) return unsupported("cuGraphGetNodes");
    *count = 0;
    for (Op* op = ((Graph*)graph)->first; op; op = op->next) ++*count;
    return CUDA_SUCCESS;
}
